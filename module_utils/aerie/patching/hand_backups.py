"""Back-ups that somebody left beside a file before changing it by hand: found, compared, never touched. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patching.source_tree import SourceTree

PRISTINE, DIFFERS, UNKNOWN = "pristine", "differs", "unknown"
MARKS = "bak|orig|old|backup|save"


@dataclass(frozen=True)
class Backup:
    """The back-up ``path`` of ``file``: whether it is the pristine file, differs from it, or can't be compared; ``words`` say how."""

    path: str
    file: str
    state: str
    words: str
    data: bytes | None

    def as_result(self) -> dict[str, Any]:
        return {"path": self.path, "file": self.file, "is": self.state, "words": self.words}


def beside(tree: SourceTree, file: str, original: bytes | None = None) -> list[Backup]:
    """Return the back-ups of ``file`` beside it: such as ``x.py.bak``, ``x.py.bak2``, ``x.py.bak.20260101``, ``x.py~``, ``x.bak.py``.

    ``original`` is what the file is known to have been, where that is known.
    """
    directory, name = (tree.path / file).parent, Path(file)
    pattern = re.compile(rf"{re.escape(name.name)}(\.({MARKS})[-\w.]*|~)|{re.escape(name.stem)}\.({MARKS})\d*{re.escape(name.suffix)}")
    try:
        found = sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name) and path.is_file() and not path.is_symlink())
    except OSError:
        return []
    recorded = tree.recorded(file) if found else None
    contents = {path: _bytes(path) for path in found}
    pristine = tree.pristine(file) if found else None
    if pristine is None:
        pristine = next((data for data in (original, *contents.values()) if data is not None and sha256_bytes(data) == recorded), None)
    return [_compared(str(name.with_name(path.name)), file, data, recorded, pristine) for path, data in contents.items()]


def change(before: bytes, after: bytes) -> str:
    """Return in short how two texts differ, as ``+3 -1``."""
    old, new = (data.decode(errors="backslashreplace").splitlines(keepends=True) for data in (before, after))
    marks = [line[0] for line in list(difflib.unified_diff(old, new, n=0))[2:]]
    return f"+{marks.count('+')} -{marks.count('-')}"


def told(backups: Sequence[Backup]) -> str:
    return "; ".join(f"{one.path} {one.words}" for one in backups)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _compared(path: str, file: str, data: bytes | None, recorded: str | None, pristine: bytes | None) -> Backup:
    if data is None:
        return Backup(path, file, UNKNOWN, "can't be read", None)
    if recorded is None:
        return Backup(path, file, UNKNOWN, "can't be compared, as nothing says how the file was", data)
    if sha256_bytes(data) == recorded:
        return Backup(path, file, PRISTINE, "is the pristine file", data)
    return Backup(
        path, file, DIFFERS, "differs from the pristine file" + (f": {change(pristine, data)}" if pristine is not None else ""), data
    )
