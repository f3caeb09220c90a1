"""Lock files that only we can hold, and that nobody waits for without end. Standard library only: this runs on hosts.

Who may open a file may lock it (flock(2) needs no right to write). So lock files are private, in
directories that others may not write to, and are waited for until a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError

MODE = 0o600
LOOK_SECONDS = 0.05


@contextlib.contextmanager
def held(path: Path, seconds: float, what: str, waits: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold the lock file ``path`` and give its descriptor; ``what`` is said of who has it after ``seconds``.

    ``waits`` is called once where somebody has it. The lock goes with the process that holds it.
    Raise AerieError where it stays held, or can't be had.
    """
    descriptor = _open(path)
    try:
        deadline, has_waited = time.monotonic() + seconds, False
        while not _take(descriptor, path):
            if time.monotonic() >= deadline:
                raise AerieError(f"{what}{_holder(descriptor)}: wait for it to end ({path})")
            if waits is not None and not has_waited:
                waits()
            has_waited = True
            time.sleep(LOOK_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
    except OSError as error:
        raise AerieError(
            f"{error.filename or path}: {error.strerror}: a lock file can't be kept there; become a user who may write"
        ) from error
    # Older versions left files that everybody may open, and so lock.
    found = os.fstat(descriptor)
    if stat.S_IMODE(found.st_mode) != MODE and found.st_uid == os.geteuid():
        os.fchmod(descriptor, MODE)
    return descriptor


def _take(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise AerieError(f"{path}: {error.strerror}: its file system must know locks") from error
    return True


def _holder(descriptor: int) -> str:
    """Return which process has the lock, as far as the kernel tells: /proc/locks of proc(5), by inode."""
    found = os.fstat(descriptor)
    for pid in processes.machine.lock_holders(found.st_ino):
        process = processes.read(pid)
        if process is not None:
            return f" (process {pid}, {process.title})"
    return ""
