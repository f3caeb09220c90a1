"""Processes and listeners, read from /proc. Standard library only: this runs on hosts.

Source: proc(5); /proc/net/tcp holds addresses in hexadecimal and state 0A for LISTEN.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"


@dataclass(frozen=True)
class Process:
    """One process: its id, its parent's, its argv and its environment (empty where we may not read it)."""

    pid: int
    ppid: int
    argv: tuple[str, ...]
    environment: tuple[str, ...]

    def variable(self, name: str) -> str | None:
        """Return the value of an environment variable as it was when the process started."""
        prefix = f"{name}="
        return next((item.removeprefix(prefix) for item in self.environment if item.startswith(prefix)), None)

    @property
    def title(self) -> str:
        """Return a short name for messages."""
        return " ".join(self.argv)[:120] or "?"


def _strings(path: Path) -> tuple[str, ...]:
    try:
        return tuple(item for item in path.read_bytes().decode(errors="replace").split("\0") if item)
    except OSError:
        return ()


def read(pid: int, proc: Path = PROC) -> Process | None:
    """Return process ``pid``, or None when it is gone or a zombie."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, ppid = stat.rpartition(")")[2].split()[:2]
    if state == "Z":
        return None
    return Process(pid, int(ppid), _strings(proc / str(pid) / "cmdline"), _strings(proc / str(pid) / "environ"))


def scan(proc: Path = PROC) -> list[Process]:
    """Return every live process, zombies left out, in order of id."""
    pids = sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    return [process for pid in pids if (process := read(pid, proc))]


def alive(pid: int) -> bool:
    """Say whether process ``pid`` exists and is not a zombie."""
    return read(pid) is not None


def with_variables(wanted: dict[str, str], proc: Path = PROC) -> list[Process]:
    """Return the processes whose environment holds every variable of ``wanted``: a server and all its children."""
    return [process for process in scan(proc) if all(process.variable(name) == value for name, value in wanted.items())]


def _listening_inodes(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for row in (proc / table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{columns[9]}]")
    return inodes


def is_listening(port: int, proc: Path = PROC) -> bool:
    """Say whether anything listens on TCP ``port``, ours to see or not."""
    return bool(_listening_inodes(port, proc))


def listeners(port: int, proc: Path = PROC) -> list[Process]:
    """Return the processes that listen on TCP ``port``, as far as our rights let us see."""
    return holders(port, proc) or []


def holders(port: int, proc: Path = PROC) -> list[Process] | None:
    """Return the processes that listen on TCP ``port``: None where nothing listens, an empty list where we may not see who does."""
    inodes = _listening_inodes(port, proc)
    return [process for process in scan(proc) if inodes & _sockets(process.pid, proc)] if inodes else None


def _sockets(pid: int, proc: Path) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed since it was listed
                found.add(str(descriptor.readlink()))
    return found


def end(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Ask ``processes`` to end (SIGTERM), wait up to ``seconds``, kill the rest; return those that had to be killed."""
    left = [process for process in processes if _signal(process.pid, signal.SIGTERM)]
    left = wait_gone(left, seconds)
    for process in left:
        _signal(process.pid, signal.SIGKILL)
    wait_gone(left, 5)
    return left


def wait_gone(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Wait up to ``seconds`` for ``processes`` to be gone; return those that are still there."""
    left = list(processes)
    deadline = time.monotonic() + seconds
    while (left := [process for process in left if alive(process.pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
