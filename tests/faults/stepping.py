"""A function run in a child process that is stopped at each of its system calls, there killed, or told that the call failed.

python-ptrace gives the requests and the names of system calls. The function is bracketed by two calls of ``getppid``, which nothing else
makes, so that only what it does itself is counted.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ptrace import PtraceError
from ptrace.binding import ptrace_getregs, ptrace_setoptions, ptrace_setregs, ptrace_syscall, ptrace_traceme
from ptrace.syscall import SYSCALL_NAMES

TRACESYSGOOD, EXITKILL = 0x1, 0x100000
SYSCALL_STOP = signal.SIGTRAP | 0x80
BRACKET = "getppid"
NEWER = {435: "clone3", 437: "openat2", 439: "faccessat2", 452: "fchmodat2"}
NO_SYSCALL = ctypes.c_ulong(-1).value

CHANGING = frozenset(
    """
    write pwrite64 writev truncate ftruncate fsync fdatasync sync_file_range rename renameat renameat2 link linkat symlink symlinkat
    unlink unlinkat mkdir mkdirat rmdir chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat setxattr utimensat flock
    """.split()  # noqa: SIM905 a list of thirty literals is no easier to read
)
"""Calls that change or sync files; opening is added where it makes or empties one."""


@dataclass(frozen=True)
class Call:
    """One system call of the function: its place in the order, its name, and whether it changes or syncs files."""

    number: int
    name: str
    changes: bool


@dataclass(frozen=True)
class Ended:
    """How the child ended: ``killed``, or its exit status; ``error`` is what the function raised, as ``type: message``."""

    killed: bool
    status: int
    error: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Fault:
    """An error that a call returns; ``lasting``: and so does every later one that changes or syncs files."""

    number: int
    error: int
    lasting: bool = False

    def hits(self, call: Call) -> bool:
        return call.number == self.number or (self.lasting and call.changes and call.number > self.number)


def forbidden() -> str | None:
    """Say why processes can't be stepped on this machine, or None."""
    if platform.machine() != "x86_64":
        return f"system calls are stepped on x86_64, and this is {platform.machine()}"
    try:
        ended = run(os.getpid)
    except (OSError, PtraceError) as error:
        return f"ptrace is not permitted here ({error})"
    return None if [call.name for call in ended.calls] == ["getpid"] else f"ptrace does not work here ({ended})"


def run(function: Callable[[], object], *, kill: tuple[int, str] | None = None, fail: Fault | None = None) -> Ended:
    """Run ``function`` in a child and count its system calls.

    ``kill``: (number, "before" or "after"): SIGKILL at that call. A call that is to ``fail`` isn't made.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _child(function, writer)
    os.close(writer)
    calls: list[Call] = []
    try:
        status = _step(child, calls, kill, fail)
    except PtraceError:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    with os.fdopen(reader, errors="replace") as stream:
        error = stream.read()
    return Ended(os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status), error, tuple(calls))


def _child(function: Callable[[], object], writer: int) -> None:
    status = 0
    try:
        ptrace_traceme()
        os.kill(os.getpid(), signal.SIGSTOP)
        os.getppid()
        try:
            function()
        finally:
            os.getppid()
    except BaseException as error:
        unexpected = "" if type(error).__name__ == "AerieError" else "".join(traceback.format_exception(error))
        os.write(writer, f"{type(error).__name__}: {error}\n{unexpected}".encode())
        status = 1
    finally:
        os._exit(status)


def _step(child: int, calls: list[Call], kill: tuple[int, str] | None, fail: Fault | None) -> int:
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        return status
    ptrace_setoptions(child, TRACESYSGOOD | EXITKILL)
    inside, refused = False, False
    for entering in _alternate():
        status = _next_stop(child)
        if not os.WIFSTOPPED(status):
            return status
        registers = ptrace_getregs(child)
        number = registers.orig_rax
        name = BRACKET if refused else SYSCALL_NAMES.get(number) or NEWER.get(number) or str(number)
        if not refused and name == BRACKET:
            if not entering:
                if inside:
                    return _let_go(child)
                inside = True
            continue
        if not inside:
            continue
        if entering:
            calls.append(Call(len(calls), name, name in CHANGING or (name.startswith("open") and _makes(name, registers))))
        here = len(calls) - 1
        if kill == (here, "before" if entering else "after"):
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        if fail and (refused or (entering and fail.hits(calls[here]))):
            refused = entering
            if entering:
                registers.orig_rax = NO_SYSCALL
            else:
                registers.rax = ctypes.c_ulong(-fail.error).value
            ptrace_setregs(child, registers)
    raise AssertionError("a child stops for ever")


def _alternate() -> Iterator[bool]:
    while True:
        yield True
        yield False


def _next_stop(child: int) -> int:
    passed_on = 0
    while True:
        ptrace_syscall(child, passed_on)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) == SYSCALL_STOP:
            return status
        passed_on = os.WSTOPSIG(status)


def _let_go(child: int) -> int:
    """The function has ended: let the rest run without stops at system calls."""
    while os.WIFSTOPPED(status := _next_stop(child)):
        pass
    return status


def _makes(name: str, registers: object) -> bool:
    flags = getattr(registers, "rsi" if name == "open" else "rdx")
    return bool(flags & (os.O_CREAT | os.O_TRUNC))
