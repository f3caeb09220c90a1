"""Tests on this machine have its network, also when the process ran tests of booted hosts before."""

from __future__ import annotations

import os
from pathlib import Path


def test_this_process_is_in_the_network_of_its_parent():
    own, parent = (Path(f"/proc/{process}/ns/net").stat().st_ino for process in ("thread-self", os.getppid()))
    assert own == parent, Path("/proc/self/cmdline").read_text()
