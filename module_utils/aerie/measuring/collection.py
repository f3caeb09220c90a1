"""Collecting a host's cells: their records, their files, and one archive of what a controller lacks. Standard library only."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.module_utils.aerie import files
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_runner, records


@dataclass(frozen=True)
class Collected:
    """The records of a host's cells, which of them were newly made, and every file with its place on the controller."""

    records: tuple[dict[str, Any], ...]
    written: tuple[str, ...]
    files: tuple[dict[str, Any], ...]


def collect(runs: Path, run_id: str | None, *, write: bool) -> Collected:
    """Make the record of every cell below ``runs`` (of one run, or of all), and write those that are new if told to.

    A cell that is being measured has no outcome yet; its record says that it was interrupted until it is made again.
    """
    made, written, manifest = [], [], []
    for cell in _cells(runs, run_id):
        record = records.make(cell)
        text = records.dump(record)
        path = cell.relative_to(runs).as_posix()
        place = f"{record['experiment']}/{record['run_id']}/{record['host']}/{record['cell']}"
        target = cell / records.RECORD
        if not target.exists() or target.read_text() != text:
            written.append(path)
            if write:
                files.write_atomic(target, text)
        made.append(record)
        everything = {**record["raw"], records.RECORD: {"bytes": len(text.encode()), "sha256": files.sha256_bytes(text.encode())}}
        manifest += [{"path": f"{path}/{name}", "place": f"{place}/{name}", **facts} for name, facts in everything.items()]
    return Collected(tuple(made), tuple(written), tuple(manifest))


def remake(results: Path, *, everything: bool, write: bool) -> list[str]:
    """Make records anew from the raw files of cells below ``results``: those that lack one, or ``everything``; return what changed.

    What a record says follows from the raw files alone, so it comes out the same, byte for byte.
    """
    changed = []
    for definition in sorted(results.rglob(bench_runner.DEFINITION)):
        cell, target = definition.parent, definition.parent / records.RECORD
        if target.exists() and not everything:
            continue
        text = records.dump(records.make(cell))
        if not target.exists() or target.read_text() != text:
            changed.append(target.relative_to(results).as_posix())
            if write:
                files.write_atomic(target, text)
    return changed


def missing(manifest: Iterable[Mapping[str, Any]], dest: Path) -> list[dict[str, Any]]:
    """Return the files of ``manifest`` that ``dest`` lacks or has with other content."""
    lacking = []
    for entry in manifest:
        place = _inside(dest, entry["place"])
        if not place.is_file() or place.stat().st_size != entry["bytes"] or files.sha256_file(place) != entry["sha256"]:
            lacking.append(dict(entry))
    return lacking


def archive(runs: Path, wanted: Iterable[str], target: Path) -> None:
    """Write one compressed archive of the files ``wanted``, named relative to ``runs``."""
    with tarfile.open(target, "w:gz", compresslevel=1) as stream:
        for name in wanted:
            stream.add(_inside(runs, name), arcname=name, recursive=False)
    target.chmod(0o644)  # another user may be the one who fetches it


def unpack(source: Path, wanted: Iterable[Mapping[str, Any]], dest: Path) -> None:
    """Put the archive's files in their places below ``dest``, records last; raise AerieError before any is placed if one is damaged."""
    entries = sorted(wanted, key=lambda entry: (PurePosixPath(entry["place"]).name == records.RECORD, entry["place"]))
    dest.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".collect-", dir=dest) as scratch, tarfile.open(source) as stream:
        staged = []
        for number, entry in enumerate(entries):
            try:
                member = stream.extractfile(entry["path"])
            except KeyError:
                member = None
            data = member.read() if member else None
            if data is None or files.sha256_bytes(data) != entry["sha256"]:
                raise AerieError(
                    f"{entry['path']} arrived damaged, or changed meanwhile (a cell still running?): nothing was placed; collect again"
                )
            path = Path(scratch) / str(number)
            path.write_bytes(data)
            path.chmod(0o644)
            staged.append((path, _inside(dest, entry["place"])))
        for path, place in staged:
            place.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as written:
                os.fsync(written.fileno())
            path.replace(place)
    for directory in {place.parent for _, place in staged}:
        files.fsync_dir(directory)


def _cells(runs: Path, run_id: str | None) -> list[Path]:
    if not runs.is_dir():
        return []
    chosen = sorted(path for path in runs.iterdir() if path.is_dir()) if run_id is None else [_inside(runs, run_id)]
    return [cell for run in chosen if run.is_dir() for cell in sorted(run.iterdir()) if cell.is_dir() and records.is_cell(cell)]


def _inside(directory: Path, name: str) -> Path:
    """Return ``name`` below ``directory``; a name that leads out of it is refused, whoever sent it."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise AerieError(f"{name!r} leads out of {directory}")
    return directory / name
