"""Collecting a host's cells: their records, their files, and one archive of what a controller lacks.

What a host packs is fetched within bounds: :func:`unpack` takes no file that was not asked for, and
none that is larger than it was said to be. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ansible.module_utils.aerie import files, untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_runner, placing, records
from ansible.module_utils.aerie.measuring.placing import Entry
from ansible.module_utils.aerie.profiling import profile_levels
from ansible.module_utils.aerie.words import cut

CHUNK = 1 << 20
LARGEST_HEADER = 1 << 16
"""Of a tar member: an extended header is read whole into memory before anything can look at it."""
SPARE_BYTES, SPARE_BYTES_PER_FILE = 16 << 20, 4096
"""What an archive may hold besides its files, and files may have grown since they were listed."""


@dataclass(frozen=True)
class Collected:
    """The records of a host's cells, which of them were newly made, every file, and cells that have no record."""

    records: tuple[dict[str, Any], ...]
    written: tuple[str, ...]
    files: tuple[dict[str, Any], ...]
    problems: tuple[str, ...] = ()


def collect(runs: Path, run_id: str | None, *, write: bool) -> Collected:
    """Make the record of every cell below ``runs`` (of one run, or of all), and write those that are new if told to.

    A cell that is being measured has no outcome yet; its record says that it was interrupted until it is made again. A cell whose
    files can't be read is a problem, and the others have their records.
    """
    made, written, manifest, problems = [], [], [], []
    for cell in _cells(runs, run_id):
        path = cell.relative_to(runs).as_posix()
        try:
            record = records.make(cell)
            text = records.dump(record)
            target = cell / records.RECORD
            new = _text(target) != text
            if new and write:
                files.write_atomic(target, text)
        except (AerieError, OSError, ValueError) as error:
            problems.append(f"{cut(path, 200)}: {_reason(error)}")
            continue
        if new:
            written.append(path)
        made.append(record)
        everything = {**record["raw"], records.RECORD: {"bytes": len(text.encode()), "sha256": files.sha256_bytes(text.encode())}}
        manifest += [{"path": f"{path}/{name}", **facts} for name, facts in everything.items()]
    return Collected(tuple(made), tuple(written), tuple(manifest), tuple(problems))


@dataclass(frozen=True)
class Remade:
    """Records below the results that were made anew, and cells of which none could be made."""

    changed: tuple[str, ...]
    problems: tuple[str, ...]


def remake(results: Path, *, everything: bool, write: bool) -> Remade:
    """Make records anew from the raw files of cells below ``results``: those that lack one, or ``everything``.

    What a record says follows from the raw files alone, so it comes out the same, byte for byte.
    """
    changed, problems = [], []
    for definition in sorted(results.rglob(bench_runner.DEFINITION)):
        cell, target = definition.parent, definition.parent / records.RECORD
        if target.exists() and not everything:
            continue
        name = target.relative_to(results).as_posix()
        try:
            text = records.dump(records.make(cell))
        except (AerieError, OSError, ValueError) as error:
            problems.append(f"{cut(name, 200)}: {_reason(error)}")
            continue
        if _text(target) != text:
            changed.append(name)
            if write:
                files.write_atomic(target, text)
    return Remade(tuple(changed), tuple(problems))


def missing(entries: Iterable[Entry], dest: Path) -> list[Entry]:
    """Return the files that ``dest`` lacks or has with other content."""
    lacking = []
    for entry in entries:
        place = dest / entry.place
        if not place.is_file() or place.stat().st_size != entry.bytes or files.sha256_file(place) != entry.sha256:
            lacking.append(entry)
    return lacking


def archive(runs: Path, wanted: Iterable[str], target: Path) -> None:
    """Write one compressed archive of the files ``wanted``, named relative to ``runs``."""
    with tarfile.open(target, "w:gz", compresslevel=1) as stream:
        for name in wanted:
            stream.add(_inside(runs, name), arcname=name, recursive=False)
    target.chmod(0o644)  # another user may be the one who fetches it


def most_bytes(entries: Sequence[Entry]) -> int:
    """Return how large an archive of ``entries`` may be, packed or not."""
    return sum(entry.bytes for entry in entries) + SPARE_BYTES + SPARE_BYTES_PER_FILE * len(entries)


Examine = Callable[[Entry, Path], None]


def unpack(source: Path, wanted: Sequence[Entry], dest: Path, examine: Examine | None = None, *, replace: bool = False) -> tuple[str, ...]:
    """Put the archive's files in their places below ``dest``, records last; return why groups stayed away, one line each.

    A group's files are placed together, after all of them arrived whole and ``examine``, which raises Malformed, accepted each.
    ``replace`` moves what a group's directory had before out of the way. An archive that is not one, or holds what was not asked for,
    is Malformed as a whole.
    """
    dest.mkdir(parents=True, exist_ok=True)
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix=".collect-", dir=dest) as scratch:
        staged = _stage(source, wanted, Path(scratch), problems)
        groups: dict[str, list[Entry]] = {}
        for entry in wanted:
            groups.setdefault(entry.group, []).append(entry)
            if entry.path not in staged:
                damaged = "arrived damaged, or changed meanwhile (a cell still running?): collect again"
                problems.setdefault(entry.group, f"{cut(entry.path, 120)} {damaged}")
            elif examine and entry.group not in problems:
                try:
                    examine(entry, staged[entry.path])
                except untrusted.Malformed as error:
                    problems[entry.group] = f"{cut(PurePosixPath(entry.path).name, 120)}: {error}"
        for group, entries in groups.items():
            if group in problems:
                continue
            try:
                if replace:
                    profile_levels.set_aside(dest / group)
                _place(entries, staged, dest)
            except OSError as error:
                problems[group] = f"{error.filename}: {error.strerror}"
    return tuple(f"{group}: {reason}; nothing of it was placed" for group, reason in problems.items())


def cell_agrees(entry: Entry, path: Path) -> None:
    """Raise Malformed where the definition or the record of a cell says that it belongs elsewhere than it is put."""
    if PurePosixPath(entry.path).name in (bench_runner.DEFINITION, records.RECORD):
        value = untrusted.parse(untrusted.read_bytes(path, untrusted.RECORD.size))
        untrusted.require(value, placing.CELL)
        said = "/".join(value[key] for key in ("experiment", "run_id", "host", "cell"))
        if said != entry.group:
            raise untrusted.Malformed(f"it says that it is of {cut(said, 200)}, and it is of {entry.group}")


class _Member(tarfile.TarInfo):
    """A member whose header is refused where it alone would fill the memory."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) and not 0 <= self.size <= LARGEST_HEADER:
            raise untrusted.Malformed(f"the archive has a header of {self.size:,} bytes")
        member: tarfile.TarInfo = super()._proc_member(tarfile_)  # type: ignore[misc]
        return member


def _stage(source: Path, wanted: Sequence[Entry], scratch: Path, problems: dict[str, str]) -> dict[str, Path]:
    """Write the members that are as their entries say to ``scratch``; return where each is."""
    by_path = {entry.path: entry for entry in wanted}
    staged: dict[str, Path] = {}
    seen: set[str] = set()
    left = most_bytes(wanted)
    with _archive(source) as stream:
        for member in stream:
            entry = by_path.get(member.name)
            if entry is None or member.name in seen:
                what = "has twice" if entry else "has, and nobody asked for it"
                raise untrusted.Malformed(f"the archive of the host {what}: {cut(member.name, 120)!r}")
            seen.add(member.name)
            left -= member.size
            if member.size < 0 or left < 0:
                raise untrusted.Malformed(f"the archive of the host holds more than the {most_bytes(wanted):,} bytes that its list allows")
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                problems.setdefault(entry.group, f"{cut(entry.path, 120)} is not a regular file")
            elif member.size == entry.bytes and (content := stream.extractfile(member)):
                path = scratch / str(len(seen))
                if _copy(content, path) == entry.sha256:
                    staged[entry.path] = path
    return staged


@contextmanager
def _archive(source: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive as a stream, so that no member is read whole; raise Malformed for what is none."""
    try:
        with source.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|gz", tarinfo=_Member) as stream:
            yield stream
    except (tarfile.TarError, zlib.error, EOFError, OverflowError, RecursionError) as error:
        raise untrusted.Malformed(f"the archive of the host can't be read ({cut(error, 80)}): collect again") from None


def _copy(content: IO[bytes], path: Path) -> str:
    """Write a member to ``path`` and return its sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as target:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fchmod(target.fileno(), 0o644)
        os.fsync(target.fileno())
    return digest.hexdigest()


def _place(entries: Iterable[Entry], staged: dict[str, Path], dest: Path) -> None:
    places = []
    for entry in sorted(entries, key=lambda entry: (PurePosixPath(entry.place).name == records.RECORD, entry.place)):
        place = dest / entry.place
        place.parent.mkdir(parents=True, exist_ok=True)
        staged[entry.path].replace(place)
        places.append(place)
    for directory in {place.parent for place in places}:
        files.fsync_dir(directory)


def _text(path: Path) -> str | None:
    """Return what a record says; None where there is none that can be read."""
    try:
        return untrusted.read_bytes(path, untrusted.RECORD.size).decode()
    except (OSError, ValueError):
        return None


def _reason(error: Exception) -> str:
    return cut(error.strerror or error if isinstance(error, OSError) else error, 300)


def _cells(runs: Path, run_id: str | None) -> list[Path]:
    """Return the directories of cells; one that is a symbolic link is somebody else's."""
    if not runs.is_dir():
        return []
    chosen = sorted(runs.iterdir()) if run_id is None else [_inside(runs, run_id)]
    found = [cell for run in chosen if _is_directory(run) for cell in sorted(run.iterdir())]
    return [cell for cell in found if _is_directory(cell) and records.is_cell(cell)]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _inside(directory: Path, name: str) -> Path:
    """Return ``name`` below ``directory``; a name that leads out of it is refused, whoever sent it."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
        raise AerieError(f"{name!r} leads out of {directory}")
    return directory / name
