"""A directory changed in one step: a twin is made beside it, which shares every file that stays, and the two change places.

Standard library only: this runs on hosts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ansible.module_utils.aerie.files import fsync_dir

AT_FDCWD = -100
RENAME_EXCHANGE = 2  # linux/fs.h
BYTECODE = "__pycache__"

UNABLE = frozenset({errno.EACCES, errno.EPERM, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EBUSY})
"""What a place says that has no exchange of directories, no hard links, or no permission for them: overlayfs, NFS, a parent of root."""


def exchange(one: Path, other: Path) -> None:
    """Let two paths of one file system change places: nobody ever sees neither, or a mix. Source: rename(2), RENAME_EXCHANGE."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)  # glibc 2.28, musl 1.2.4
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one))
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))
    fsync_dir(one.parent)


def make(directory: Path, twin: Path, changed: Collection[str]) -> None:
    """Make ``twin`` with the files of ``directory`` (hard links), except ``changed`` (paths below it) and their bytecode."""
    stale = {str(Path(name).parent / BYTECODE / Path(name).stem) for name in changed if name.endswith(".py")}
    twin.mkdir(0o700)
    for name, entry in _walk(directory):
        if entry.is_dir(follow_symlinks=False):
            (twin / name).mkdir(0o700)
        elif name not in changed and name.split(".cpython-", 1)[0] not in stale:
            os.link(entry.path, twin / name, follow_symlinks=False)


def complete(directory: Path, twin: Path) -> None:
    """Give every directory of ``twin`` the mode, owner and extended attributes of its counterpart, and make it durable."""
    below = [name for name, entry in _walk(twin) if entry.is_dir(follow_symlinks=False)]
    for name in [*sorted(below, key=len, reverse=True), "."]:
        like = directory / name
        if like.is_dir():
            facts = like.stat()
            for attribute in _attributes(like):
                os.setxattr(twin / name, attribute, os.getxattr(like, attribute))
        else:
            facts = directory.stat()
        if (facts.st_uid, facts.st_gid) != ((mine := (twin / name).stat()).st_uid, mine.st_gid):
            os.chown(twin / name, facts.st_uid, facts.st_gid)
        (twin / name).chmod(facts.st_mode & 0o7777)
        fsync_dir(twin / name)


def alike(directory: Path, twin: Path, changed: Collection[str]) -> bool:
    """Say whether both hold the very same files, except ``changed`` and bytecode: whether nobody else was at work on either."""
    return _entries(directory, changed) == _entries(twin, changed)


def holds(twin: Path, directory: Path, changed: Collection[str]) -> bool:
    """Say whether ``twin`` has every file of ``directory``, with the same exceptions."""
    return _entries(directory, changed).items() <= _entries(twin, changed).items()


def remove(twin: Path) -> None:
    """Remove a twin, if it's there; what it shares stays in the other."""
    if not twin.is_dir():
        return
    twin.chmod(0o700)
    for _, entry in _walk(twin):
        if entry.is_dir(follow_symlinks=False) and not entry.stat(follow_symlinks=False).st_mode & 0o200:
            Path(entry.path).chmod(0o700)
    try:
        shutil.rmtree(twin)
    except OSError as error:
        error.filename = str(twin)  # rmtree names what is in there by its last part alone
        raise
    fsync_dir(twin.parent)


def _walk(top: Path, below: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(top / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{below}/{entry.name}" if below else entry.name
        yield name, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(top, name)


def _entries(top: Path, changed: Collection[str]) -> dict[str, int]:
    return {
        name: entry.inode()
        for name, entry in _walk(top)
        if not entry.is_dir(follow_symlinks=False) and name not in changed and BYTECODE not in name.split("/")
    }


def _attributes(path: Path) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return []
