"""Who this run of Ansible is, for host leases."""

from __future__ import annotations

import getpass
import multiprocessing
import os
import socket
from pathlib import Path


def _main_pid() -> int:
    # Tasks run in workers forked from the process that is the run.
    parent = multiprocessing.parent_process()
    return parent.pid if parent is not None and parent.pid else os.getpid()


def _start_ticks(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def owner() -> dict[str, str]:
    """Return the owner of this run: the same for every task of one ansible-playbook, another for any other run."""
    pid = _main_pid()
    return {"run": f"{pid}.{_start_ticks(pid)}", "user": getpass.getuser(), "controller": socket.gethostname()}


def is_dead(run: str) -> bool:
    """Say whether ``run``, which this controller started, has ended."""
    pid, _, ticks = run.partition(".")
    return not pid.isdigit() or _start_ticks(int(pid)) != ticks
