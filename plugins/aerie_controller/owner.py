"""Who this run of Ansible is, for host leases."""

from __future__ import annotations

import functools
import getpass
import hashlib
import multiprocessing
import os
import socket
from pathlib import Path

MACHINE = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))
PID_NAMESPACE = Path("/proc/self/ns/pid")


def _main_pid() -> int:
    # Tasks run in workers forked from the process that is the run.
    parent = multiprocessing.parent_process()
    return parent.pid if parent is not None and parent.pid else os.getpid()


def _start_ticks(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


@functools.cache
def _place() -> str:
    """Return a name of what pids are counted in: this boot of this machine, and this container of it.

    Host names are no such thing: containers and images are called alike. Hashed, since a lease is read by others.
    """
    parts = []
    for path in MACHINE:
        try:
            parts.append(path.read_text().strip())
        except OSError:
            parts.append("")
    try:
        parts.append(str(PID_NAMESPACE.readlink()))
    except OSError:
        parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def owner() -> dict[str, str]:
    """Return the owner of this run: the same for every task of one ansible-playbook, another for any other run."""
    pid = _main_pid()
    return {"run": f"{pid}.{_start_ticks(pid)}.{_place()}", "user": getpass.getuser(), "controller": socket.gethostname()}


def is_dead(run: str) -> bool:
    """Say whether ``run``, if it was started here, has ended; of other places nobody knows.

    Runs of older versions do not say where they were started.
    """
    parts = run.split(".")
    if len(parts) != 3 or parts[2] != _place() or not parts[0].isdecimal():
        return False
    return _start_ticks(int(parts[0])) != parts[1]
