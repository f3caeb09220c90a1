"""Where a host's files go below the results: the controller's own decision. Standard library only.

A manifest that a host sends lists files of that host, and nothing else: their paths there, their
sizes and hashes. The place of each is made here, of what the controller knows (kind, run, the name
of the host in the inventory) and of checked components of its path. So no manifest can name another
host, another run, or a file of Aerie's own. Who may write what: docs/reference/results.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.words import cut, listing

COMPONENT = re.compile(r"[A-Za-z0-9][\w.-]*")
"""What a component of a path is made of that a host may choose."""
FILE_COMPONENT = re.compile(r"[A-Za-z0-9][\w.=-]*")
"""And within a run: files of a search are called after what they tried, ``NCCL_PROTO=LL``."""
LONGEST_COMPONENT = 200
"""In bytes: file systems have names of up to 255, and temporary ones are longer."""
DEEPEST = 8
"""How many components a file may have below its run."""

PROFILE, CALIBRATION, NCCL = "profile", "calibration", "nccl"
OWN_NAMES = (PROFILE, CALIBRATION, NCCL, "capture", "preflight", "provision")
"""Directories of the results that are Aerie's own: no experiment may be called so."""
OWN_SUFFIXES = (".html", ".json", ".sqlite", ".yml", ".yaml")
"""Files of Aerie's own and a user's pages lie beside the experiments."""
GIB = 1 << 30
DEFAULT_GIB, DEFAULT_FILES = 16.0, 20_000
MOST_LISTED = 1_000_000
"""Files that a manifest may list. Most of them are on the controller already."""

ENTRY = {"path": untrusted.TEXT, "bytes": untrusted.COUNT, "sha256": untrusted.WORD}
CELL = dict.fromkeys(("experiment", "run_id", "host", "cell"), untrusted.WORD)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Limits:
    """How much one host may send at once; more is refused before anything is fetched."""

    gib: float = DEFAULT_GIB
    files: int = DEFAULT_FILES

    @property
    def size(self) -> int:
        return int(self.gib * GIB)


@dataclass(frozen=True)
class Entry:
    """One file: its path on the host, its place below the results, and the group that it comes or stays away with."""

    path: str
    place: str
    bytes: int
    sha256: str
    group: str


@dataclass(frozen=True)
class Placed:
    """The files that may be fetched, and what of the host's answer was left out, one line each."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()


def is_component(name: object, pattern: re.Pattern[str] = COMPONENT) -> bool:
    """Say whether a host may call a file, a directory, a run, a cell or an experiment so."""
    return isinstance(name, str) and bool(pattern.fullmatch(name)) and len(name.encode(errors="replace")) <= LONGEST_COMPONENT


def is_own(name: str) -> bool:
    """Say whether a name at the top of the results belongs to Aerie or to a user, and to no experiment."""
    folded = name.casefold()
    return folded in OWN_NAMES or folded.endswith(OWN_SUFFIXES) or ".sqlite" in folded


def require_host(name: object) -> str:
    """Return a host's name in the inventory; raise AerieError where it can't name a directory."""
    text = str(name)
    if not text or text.startswith(".") or "/" in text or "\0" in text:
        raise AerieError(f"the inventory's name {text!r} can't name a directory of results: give the host another name")
    return text


def of_run(manifest: object, kind: str, run_id: str, host: str, arm: str | None = None) -> Placed:
    """Return the places of one run's files, or of one arm's in it: ``<kind>/<run>/<host>[/<arm>]/...``.

    They come together or not at all: raise AerieError for the first file that is not as it should be.
    """
    prefix = (run_id,) if arm is None else (run_id, arm)
    for name in prefix:
        if not is_component(name):
            raise AerieError(f"{cut(name, 80)!r} can't name a directory: use letters, digits, '-', '_' and '.'")
    group = "/".join((kind, run_id, require_host(host), *prefix[1:]))
    entries = []
    for number, entry in enumerate(_entries(manifest)):
        path = _checked(entry, number)
        if path.parts[: len(prefix)] != prefix or len(path.parts) == len(prefix):
            raise untrusted.Malformed(f"the host's list of files names {cut(path, 80)!r}, which is not of {'/'.join(prefix)}")
        entries.append(_entry(entry, "/".join((group, *path.parts[len(prefix) :])), group))
    _require_different(entries)
    return Placed(tuple(entries))


def of_cells(manifest: object, records: object, host: str, run_id: str | None) -> Placed:
    """Return the places of cells' files: ``<experiment>/<run>/<host>/<cell>/<file>``.

    Of the host come the names of experiment, run (where none was asked for) and cell, each a checked component. A cell is a group:
    one that is not as it should be is a problem, and the others are fetched.
    """
    require_host(host)
    problems: dict[str, str] = {}
    groups: dict[tuple[str, ...], str] = {}
    if not isinstance(records, list | tuple):
        raise untrusted.Malformed("the host's answer has no list of records")
    for number, record in enumerate(records):
        name, group = f"record {number}", None
        try:
            untrusted.require(record, CELL, name)
            name = f"{cut(record['run_id'], 80)}/{cut(record['cell'], 80)}"
            group = _cell_place(record, host, run_id)
            if (record["run_id"], record["cell"]) in groups:
                raise untrusted.Malformed("there are two records of this cell")
        except untrusted.Malformed as error:
            problems.setdefault(name, str(error))
        else:
            groups[record["run_id"], record["cell"]] = group
    by_cell: dict[tuple[str, ...], list[Entry]] = {}
    bad: set[tuple[str, ...]] = set()
    for number, entry in enumerate(_entries(manifest)):
        cell: tuple[str, ...] = ()
        try:
            path = _checked(entry, number)
            cell = path.parts[:2]
            if len(path.parts) != 3 or cell not in groups:
                raise untrusted.Malformed(f"{cut(path, 120)!r} is of no cell that the host has a record of")
            by_cell.setdefault(cell, []).append(_entry(entry, f"{groups[cell]}/{path.name}", groups[cell]))
        except untrusted.Malformed as error:
            bad.add(cell)
            problems.setdefault(cut("/".join(cell), 120) or f"file {number}", str(error))
    entries = []
    for cell, found in by_cell.items():
        try:
            _require_different(found)
        except untrusted.Malformed as error:
            bad.add(cell)
            problems.setdefault("/".join(cell), str(error))
        if cell not in bad:
            entries += found
    return Placed(tuple(entries), tuple(f"{name}: {reason}" for name, reason in problems.items()))


def _cell_place(record: Mapping[str, Any], host: str, run_id: str | None) -> str:
    if record["host"] != host:
        raise untrusted.Malformed(f"it says that it is of host {cut(record['host'], 80)!r}, and it came from {host}")
    if run_id is not None and record["run_id"] != run_id:
        raise untrusted.Malformed(f"it is of run {cut(record['run_id'], 80)!r}, and {run_id} was asked for")
    for key in ("experiment", "run_id", "cell"):
        if not is_component(record[key]):
            raise untrusted.Malformed(f"its {key} {cut(record[key], 80)!r} can't name a directory")
    if is_own(record["experiment"]):
        raise untrusted.Malformed(f"its experiment is called {record['experiment']!r}, which is a name of Aerie's own files")
    return "/".join((record["experiment"], record["run_id"], host, record["cell"]))


def _entries(manifest: object) -> Sequence[Any]:
    if not isinstance(manifest, list | tuple):
        raise untrusted.Malformed("the host's answer has no list of files")
    if len(manifest) > MOST_LISTED:
        raise untrusted.Malformed(f"the host lists {len(manifest):,} files, and at most {MOST_LISTED:,} are read")
    return manifest


def _checked(entry: Any, number: int) -> PurePosixPath:
    """Return the path of one entry, every component of it checked."""
    untrusted.require(entry, ENTRY, f"file {number}")
    text = entry["path"]
    parts = text.split("/")
    if not all(is_component(part, FILE_COMPONENT) for part in parts) or len(parts) > DEEPEST:
        raise untrusted.Malformed(f"{cut(text, 120)!r} is not a path that a file of a run may have")
    if not _SHA256.fullmatch(entry["sha256"]):
        raise untrusted.Malformed(f"{cut(text, 120)!r} comes without a sha256")
    return PurePosixPath(text)


def _entry(entry: Mapping[str, Any], place: str, group: str) -> Entry:
    return Entry(path=str(entry["path"]), place=place, bytes=int(entry["bytes"]), sha256=str(entry["sha256"]), group=group)


def _require_different(entries: Iterable[Entry]) -> None:
    """Refuse two files of one place, and a file where another one needs a directory."""
    places: set[str] = set()
    for entry in entries:
        if entry.place in places:
            raise untrusted.Malformed(f"{cut(entry.path, 120)!r} is listed twice")
        places.add(entry.place)
    above = {str(parent) for place in places for parent in PurePosixPath(place).parents}
    if both := sorted(places & above):
        raise untrusted.Malformed(f"{listing(both[:3])} would be a file and a directory")


def require_room(entries: Sequence[Entry], limits: Limits) -> int:
    """Return the bytes of files that are to be fetched at once; raise Malformed where they exceed ``limits``."""
    total = sum(entry.bytes for entry in entries)
    if len(entries) > limits.files:
        raise untrusted.Malformed(
            f"the host has {len(entries):,} files to fetch, and at most {limits.files:,} are taken at once: "
            "raise aerie_fetch_limit_files where that is right"
        )
    if total > limits.size:
        raise untrusted.Malformed(
            f"the host has {total / GIB:,.1f} GiB to fetch, and at most {limits.gib:g} are taken at once: "
            "raise aerie_fetch_limit_gib where that is right"
        )
    return total
