"""Processes and listeners, read from /proc. Standard library only: this runs on hosts.

Source: proc(5); /proc/net/tcp holds addresses in hexadecimal and state 0A for LISTEN.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
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
    started: int = 0
    """Clock ticks between the boot and its start; 0 where that is unknown. Source: proc(5), stat, field 22."""

    def variable(self, name: str) -> str | None:
        """Return the value of an environment variable as it was when the process started."""
        prefix = f"{name}="
        return next((item.removeprefix(prefix) for item in self.environment if item.startswith(prefix)), None)

    @property
    def title(self) -> str:
        """Return a short name for messages."""
        return " ".join(self.argv)[:120] or "?"


@dataclass(frozen=True)
class Identity:
    """Which process a pid meant: the kernel gives a pid to a stranger once its process has ended."""

    pid: int
    started: int
    boot: str

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.boot}"

    @classmethod
    def parse(cls, text: str) -> Identity | None:
        """Return what :meth:`__str__` wrote; None for anything else, such as a pid alone."""
        words = text.split()
        if len(words) != 3 or not (words[0].isdecimal() and words[1].isdecimal()):
            return None
        return cls(int(words[0]), int(words[1]), words[2])


@dataclass(frozen=True)
class Listener:
    """A TCP socket that listens: its address, and its name as ``/proc/<pid>/fd`` shows it."""

    address: IPv4Address | IPv6Address
    port: int
    socket: str

    @property
    def is_loopback(self) -> bool:
        mapped = getattr(self.address, "ipv4_mapped", None)
        return self.address.is_loopback or (mapped is not None and mapped.is_loopback)


def _address(text: str) -> IPv4Address | IPv6Address:
    """Return an address of /proc/net/tcp and tcp6: words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(text[place : place + 8]) for place in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


class Machine:
    """The machine that this code runs on: its processes and listeners, as /proc shows them."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc

    def pids(self) -> list[int]:
        """Return the id of every process, zombies included, in order."""
        return sorted(int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit())

    def listeners(self) -> list[Listener]:
        """Return every TCP socket that listens."""
        found = []
        for table in ("net/tcp", "net/tcp6"):
            with contextlib.suppress(OSError):
                for row in (self._proc / table).read_text().splitlines()[1:]:
                    columns = row.split()
                    if columns[3] == LISTEN:
                        address, _, port = columns[1].rpartition(":")
                        found.append(Listener(_address(address), int(port, 16), f"socket:[{columns[9]}]"))
        return found

    def text(self, pid: int, name: str) -> str:
        """Return a file of process ``pid``, empty where it is gone or we may not read it."""
        try:
            return (self._proc / str(pid) / name).read_bytes().decode(errors="replace")
        except OSError:
            return ""

    def lock_holders(self, inode: int) -> list[int]:
        """Return the processes that hold a flock on a file, by its inode. Source: proc(5), /proc/locks."""
        try:
            rows = [row.split() for row in (self._proc / "locks").read_text().splitlines()]
        except OSError:
            return []
        held = [row for row in rows if len(row) >= 6 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode)]
        return [int(row[4]) for row in held if row[4].isdecimal()]

    def boot_id(self) -> str:
        """Return the random name of this boot, empty where the kernel does not show it."""
        try:
            return (self._proc / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def link(self, pid: int, name: str) -> Path | None:
        """Return what ``cwd`` or ``exe`` of process ``pid`` is; None where we may not see it."""
        try:
            return (self._proc / str(pid) / name).readlink()
        except OSError:
            return None

    def open_sockets(self, pid: int) -> set[str]:
        """Return the sockets that process ``pid`` has open, as far as our rights let us see."""
        sockets = set()
        with contextlib.suppress(OSError):
            for descriptor in (self._proc / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed since it was listed
                    sockets.add(str(descriptor.readlink()))
        return sockets


machine = Machine()
"""All that looks at processes and ports does so through this; unit tests put another one here."""


def read(pid: int) -> Process | None:
    """Return process ``pid``, or None when it is gone or a zombie."""
    stat = machine.text(pid, "stat")
    if not stat:
        return None
    fields = stat.rpartition(")")[2].split()
    state, ppid = fields[:2]
    if state == "Z":
        return None
    argv, environment = (_strings(machine.text(pid, name)) for name in ("cmdline", "environ"))
    return Process(pid, int(ppid), argv, environment, int(fields[19]) if len(fields) > 19 else 0)


def identify(pid: int) -> Identity | None:
    """Return which process ``pid`` is now; None when it is gone or a zombie."""
    process = read(pid)
    return Identity(pid, process.started, machine.boot_id()) if process else None


def find(identity: Identity) -> Process | None:
    """Return the process that ``identity`` names, or None when it has ended, though its pid may be another's now."""
    process = read(identity.pid)
    is_same = process is not None and process.started == identity.started and machine.boot_id() == identity.boot
    return process if is_same else None


def _strings(text: str) -> tuple[str, ...]:
    return tuple(item for item in text.split("\0") if item)


def scan() -> list[Process]:
    """Return every live process, zombies left out, in order of id."""
    return [process for pid in machine.pids() if (process := read(pid))]


def alive(pid: int) -> bool:
    """Say whether process ``pid`` exists and is not a zombie."""
    return read(pid) is not None


def with_variables(wanted: dict[str, str]) -> list[Process]:
    """Return the processes whose environment holds every variable of ``wanted``: a server and all its children."""
    return [process for process in scan() if all(process.variable(name) == value for name, value in wanted.items())]


def link(pid: int, name: str) -> Path | None:
    """Return what :meth:`Machine.link` does."""
    return machine.link(pid, name)


def mapped_files(pid: int) -> list[str]:
    """Return the files that process ``pid`` has mapped. Source: proc(5), sixth field of maps."""
    rows = (row.split(maxsplit=5) for row in machine.text(pid, "maps").splitlines())
    return [fields[5] for fields in rows if len(fields) == 6 and fields[5].startswith("/")]


def _listening_sockets(port: int) -> set[str]:
    return {listener.socket for listener in machine.listeners() if listener.port == port}


def is_listening(port: int) -> bool:
    """Say whether anything listens on TCP ``port``, ours to see or not."""
    return bool(_listening_sockets(port))


def listeners(port: int) -> list[Process]:
    """Return the processes that listen on TCP ``port``, as far as our rights let us see."""
    return holders(port) or []


def holders(port: int) -> list[Process] | None:
    """Return the processes that listen on TCP ``port``: None where nothing listens, an empty list where we may not see who does."""
    sockets = _listening_sockets(port)
    if not sockets:
        return None
    return [process for process in scan() if sockets & machine.open_sockets(process.pid)]


def listeners_of(processes: Iterable[Process]) -> list[tuple[Process, Listener]]:
    """Return the TCP sockets on which ``processes`` listen, each with the first of them that has it."""
    waiting = {listener.socket: listener for listener in machine.listeners()}
    found = []
    for process in processes:
        own = sorted(machine.open_sockets(process.pid) & waiting.keys())
        found += [(process, waiting.pop(socket)) for socket in own]
    return found


def end(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Ask ``processes`` to end (SIGTERM), wait up to ``seconds``, kill the rest; return those that had to be killed."""
    left = [process for process in processes if _signal(process, signal.SIGTERM)]
    left = wait_gone(left, seconds)
    for process in left:
        _signal(process, signal.SIGKILL)
    wait_gone(left, 5)
    return left


def kill(process: Process) -> bool:
    """Kill this very process at once; return whether it was there."""
    return _signal(process, signal.SIGKILL)


def wait_gone(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Wait up to ``seconds`` for ``processes`` to be gone; return those that are still there."""
    left = list(processes)
    deadline = time.monotonic() + seconds
    while (left := [process for process in left if is_same(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def is_same(process: Process) -> bool:
    """Say whether this very process lives; its pid may be another's by now."""
    current = read(process.pid)
    return current is not None and process.started in (0, current.started)


def _signal(process: Process, number: signal.Signals) -> bool:
    """Send a signal to this very process; return whether it was there.

    A pidfd keeps naming the process that it was opened for, so that what is looked at is what gets
    the signal. Source: pidfd_open(2), from Linux 5.3 on.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel without it
        descriptor = -1
    try:
        if not is_same(process):
            return False
        if descriptor < 0:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True
