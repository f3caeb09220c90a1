"""Makes the project's cores importable as ansible.module_utils.aerie, with Ansible or without, and this directory's modules by name."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]

if importlib.util.find_spec("ansible"):
    import ansible.module_utils

    if str(PROJECT / "module_utils") not in ansible.module_utils.__path__:
        ansible.module_utils.__path__.append(str(PROJECT / "module_utils"))
else:
    for name, places in (("ansible", []), ("ansible.module_utils", [str(PROJECT / "module_utils")])):
        package = types.ModuleType(name)
        package.__path__ = places
        sys.modules[name] = package
sys.path[:0] = [str(PROJECT / "tests/e2e")]


def environment(name: str) -> str | None:
    """Return a variable, or None where it is empty."""
    return os.environ.get(name) or None
