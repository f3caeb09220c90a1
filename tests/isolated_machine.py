"""What unit and contract tests have instead of the machine they run on.

Nothing is there but what they brought or started. They are watched by ``machine_guard``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import ansible.module_utils
import pytest

from machine_guard import PROJECT, guard
from ports import BUSY_PORTS

if str(PROJECT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(PROJECT / "module_utils"))

from ansible.module_utils.aerie import processes

ISOLATED = {"unit", "contract"}
"""Directories whose tests are isolated."""
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
PROGRAMS = (
    "awk basename cat chmod cp cut date dirname echo env expr false find git grep head id ionice "
    "ln ls mkdir mktemp mv nice printenv printf pwd readlink rm rmdir sed sh sha256sum sleep sort "
    "tail tar tee test touch tr true uname wc which xargs"
)
"""What a unit test, and what it starts, may run by name. None reports what the machine is."""


class OwnMachine(processes.Machine):
    """The machine as it would be if only this process, and what it started, ran there."""

    def pids(self) -> list[int]:
        with guard.paused():
            parents = {pid: self._parent(pid) for pid in super().pids()}
        family = {os.getpid()}
        while children := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= children
        return sorted(family)

    def listeners(self) -> list[processes.Listener]:
        with guard.paused():
            listening = super().listeners()
            own = {socket for pid in self.pids() for socket in self.open_sockets(pid)}
        # This process may be the one that takes BUSY_PORTS. To a test they are another's.
        return [entry for entry in listening if entry.socket in own and entry.port not in BUSY_PORTS]

    def lock_holders(self, inode: int) -> list[int]:
        with guard.paused():
            return [pid for pid in super().lock_holders(inode) if pid in self.pids()]

    def boot_id(self) -> str:
        with guard.paused():
            return super().boot_id()

    def _parent(self, pid: int) -> int | None:
        fields = self.text(pid, "stat").rpartition(")")[2].split()
        return int(fields[1]) if fields else None


@contextlib.contextmanager
def entered(directory: str) -> Iterator[None]:
    """Let the tests of one of the directories ``ISOLATED`` run on a machine of their own."""
    variables = {"MPLCONFIGDIR": str(PROJECT / ".cache/matplotlib")}
    # Contract tests let pip download wheels, with the settings that the machine has for that.
    if directory == "unit":
        scratch = _make_scratch()
        variables |= {"HOME": str(scratch / "home"), "PATH": str(scratch / "bin")}
        variables |= {"GIT_CONFIG_NOSYSTEM": "1"}
    with pytest.MonkeyPatch.context() as patched, _adopting_orphans():
        for name, value in variables.items():
            patched.setenv(name, value)
        patched.setattr(processes, "machine", OwnMachine())
        yield


@functools.cache
def _make_scratch() -> Path:
    """Return a directory with an empty home and links to ``PROGRAMS``, removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="aerie-tests-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(directory) if os.getpid() == owner else None)
    for name in ("home", "bin"):
        (directory / name).mkdir()
    for name in PROGRAMS.split():
        if program := shutil.which(name):
            (directory / "bin" / name).symlink_to(program)
    return directory


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of what children leave running: daemons still descend from this process."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# Hooks, not fixtures: what fixtures of a module or session do must be isolated and watched, too.


_ISOLATION = pytest.StashKey[contextlib.ExitStack]()


def _is_isolated(item: pytest.Item) -> bool:
    return item.path.parent.name in ISOLATED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not _is_isolated(item):
        return (yield)
    with contextlib.ExitStack() as stack:
        stack.enter_context(entered(item.path.parent.name))
        item.stash[_ISOLATION] = stack
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _watched(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _watched(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item,
    nextitem: pytest.Item | None,
) -> Generator[None, object, object]:
    if _is_isolated(item) and nextitem is None:
        # Fixtures of the session, which may be of other tests, end after those of this test. As the
        # newest finalizer of the session, this one runs between them.
        item.session.addfinalizer(lambda: _leave(item))
    return (yield from _watched(item))


def _leave(item: pytest.Item) -> None:
    guard.stop()
    item.stash[_ISOLATION].close()


def _watched(item: pytest.Item) -> Generator[None, object, object]:
    if not _is_isolated(item):
        return (yield)
    guard.take_violations()
    with guard.watch(item.config.rootpath):
        result = yield
    if violations := guard.take_violations():
        heading = "This test looked at the machine that it runs on; see tests/machine_guard.py:"
        pytest.fail("\n  ".join([heading, *violations]), pytrace=False)
    return result
