"""Files that are whole or not there: atomic, durable writes and hashes. Standard library only: this runs on hosts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import untrusted


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of a call that is given an open file name that file, as one that is given a path does."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync_dir(path: Path) -> None:
    """Make a rename or unlink inside the directory ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644, temporary: Path | None = None) -> None:
    """Write ``data`` to ``path`` so that a reader, or a crash, sees the old file or the new one and never a part.

    It is first written to ``temporary``, which must not be there; by default to a name beside ``path`` that nobody else uses.
    """
    payload = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    if temporary is None:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    else:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), str(temporary)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as stream:
            stream.write(payload)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Write ``value`` as sorted, indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", mode)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file of this machine; raises OSError, or ValueError where it is not JSON within bounds."""
    return untrusted.read(path, untrusted.FILE, follow=True)


def sha256_bytes(data: bytes) -> str:
    """Return the sha256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's content in hexadecimal, without reading it whole into memory."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def canonical_hash(value: Any) -> str:
    """Return the sha256 of ``value`` as canonical JSON (sorted keys, no spaces): equal values, equal hashes."""
    return sha256_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
