"""Recordings of hosts: what the survey read of one, to be read again elsewhere. Standard library only: this runs on hosts.

The format is described in docs/reference/host-info.md.
"""

from __future__ import annotations

import base64
import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host.hosts import Completed, Stat, check_model, no_model
from ansible.module_utils.aerie.processes import Process

RECORDING = "recording.json"
FORMAT = 1
TABLES = ("files", "links", "directories", "stats", "commands", "disks", "models", "environment")


@dataclass(frozen=True)
class Recording:
    """A recording with its base worked in; ``trees`` are directories whose files come after those of ``tables``."""

    path: Path
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    processes: tuple[Mapping[str, Any], ...] = ()
    trees: tuple[Path, ...] = ()

    def table(self, name: str) -> Mapping[str, Any]:
        return self.tables.get(name, {})

    def as_dict(self) -> dict[str, Any]:
        """Return it as one that has no base, without the files beside it."""
        return {"format": FORMAT, **{name: dict(self.table(name)) for name in TABLES}, "processes": [dict(one) for one in self.processes]}


def load(directory: Path) -> Recording:
    """Return the recording in ``directory``, with all that its base holds and it does not change."""
    return _load(directory, ())


def _load(directory: Path, above: tuple[Path, ...]) -> Recording:
    path = directory / RECORDING
    if directory.resolve() in above:
        raise AerieError(f"{path}: base: it is based on itself")
    try:
        own = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AerieError(f"{path}: {error}: a root other than / must be a host's recording") from error
    if not isinstance(own, dict) or own.get("format", FORMAT) != FORMAT:
        raise AerieError(f"{path}: it is no recording of format {FORMAT}")
    base = Recording(path)
    if own.get("base"):
        base = _load(directory.parent / own["base"], (*above, directory.resolve()))
    tables = {
        name: {**base.table(name), **{key: _changed(path, base, name, key, value) for key, value in own.get(name, {}).items()}}
        for name in TABLES
    }
    return Recording(path, tables, tuple(own.get("processes", base.processes)), (directory, *base.trees))


def _changed(path: Path, base: Recording, table: str, key: str, value: Any) -> Any:
    """Return an entry, worked out where it only tells how it differs from the base's."""
    if not isinstance(value, Mapping) or not {"replace", "xml"} & set(value):
        return value
    where = f"{path}: {table}: {key}"
    before = base.table(table).get(key)
    if before is None and table == "files":
        before = next((found.read_text() for tree in base.trees if (found := tree / key.lstrip("/")).is_file()), None)
    content = before.get("stdout") if isinstance(before, Mapping) else before
    if not isinstance(content, str):
        raise AerieError(f"{where}: the base has no text to change")
    for old, new in value.get("replace", {}).items():
        if old not in content:
            raise AerieError(f"{where}: replace: the base does not have {old!r}")
        content = content.replace(old, new)
    if "xml" in value:
        content = change_xml(content, value["xml"], where)
    if not isinstance(before, Mapping):
        return content
    return {**before, **{name: item for name, item in value.items() if name not in ("replace", "xml")}, "stdout": content}


def change_xml(content: str, changes: Mapping[str, str | None], where: str) -> str:
    """Return an XML document with the text of elements changed, or elements (null) taken out; paths are those of the document."""
    tree = ElementTree.fromstring(content)
    elements = {path: tree.find(path) for path in changes}
    parents = {child: parent for parent in tree.iter() for child in parent}
    for path, new in changes.items():
        element = elements[path]
        if element is None:
            raise AerieError(f"{where}: xml: the base has no element {path!r}")
        if new is None:
            parents[element].remove(element)
        elif new.lstrip().startswith("<"):
            element.append(ElementTree.fromstring(new))
        else:
            element.text = new
    return ElementTree.tostring(tree, encoding="unicode")


@dataclass(frozen=True)
class RecordedHost:
    """A host as its recording tells it."""

    recording: Recording

    @property
    def environment(self) -> Mapping[str, str]:
        return self.recording.table("environment")

    def run(self, argv: tuple[str, ...]) -> Completed:
        answer = self.recording.table("commands").get(" ".join(argv))
        if answer is None:
            return Completed(None, "", f"{argv[0]}: not found")
        return Completed(answer["rc"], answer.get("stdout", ""), answer.get("reason", ""))

    def read(self, path: str) -> bytes | None:
        files = self.recording.table("files")
        path = path if path in files else self._resolved(path)
        if self._taken_away(path):
            return None
        value = files.get(path)
        if isinstance(value, Mapping):
            return base64.b64decode(value["base64"])
        if isinstance(value, str):
            return value.encode()
        found = self._in_tree(path)
        return found.read_bytes() if found and found.is_file() else None

    def names(self, path: str) -> tuple[str, ...] | None:
        path = self._resolved(path)
        names = set(self.recording.table("directories").get(path) or ())
        prefix = path.rstrip("/") + "/"
        for table in ("files", "links", "directories", "stats", "models"):
            names |= {
                key.removeprefix(prefix).split("/")[0] for key in self.recording.table(table) if key.startswith(prefix) and key != prefix
            }
        for tree in self.recording.trees:
            found = tree / path.lstrip("/")
            if found.is_dir():
                names |= {entry.name for entry in found.iterdir()}
        there = tuple(sorted(name for name in names if name and not self._taken_away(f"{prefix}{name}")))
        return there if there or self.stat(path) else None

    def stat(self, path: str) -> Stat | None:
        stats = self.recording.table("stats")
        path = path if path in stats else self._resolved(path)
        if self._taken_away(path):
            return None
        if (known := stats.get(path)) is not None:
            return Stat(known["kind"], known.get("size", 0), known.get("age_s", 0))
        if (content := self.recording.table("files").get(path)) is not None:
            return Stat("file", len(content) if isinstance(content, str) else len(base64.b64decode(content["base64"])), 0)
        prefix = path.rstrip("/") + "/"
        tables = [self.recording.table(name) for name in ("files", "links", "directories", "stats", "models")]
        if any(key == path or key.startswith(prefix) for table in tables for key, value in table.items() if value is not None):
            return Stat("directory", 0, 0)
        found = self._in_tree(path)
        return None if found is None else Stat("directory" if found.is_dir() else "file", found.stat().st_size, 0)

    def link(self, path: str) -> str | None:
        if self._taken_away(path):
            return None
        known = self.recording.table("links").get(path)
        if known is not None:
            return str(known)
        found = next((place for tree in self.recording.trees if (place := tree / path.lstrip("/")).is_symlink()), None)
        return str(found.readlink()) if found else None

    def disk(self, path: str) -> dict[str, Any]:
        disks = self.recording.table("disks")
        mount = next((str(parent) for parent in (Path(path), *Path(path).parents) if disks.get(str(parent))), None)
        if mount is None:
            raise AerieError(f"{self.recording.path}: disks names no file system that holds {path}")
        return dict(disks[mount])

    def model(self, path: str, root: str | None = None, *, weights: bool = True) -> dict[str, Any]:  # noqa: ARG002 - it keeps no hashes
        known = self.recording.table("models").get(path)
        if known is not None:
            return {"identity": None, **known}
        found = self._in_tree(path)
        return check_model(found, path, weights=weights) if found else no_model(f"{path} is no directory")

    def processes(self) -> list[Process]:
        return [_process(entry) for entry in self.recording.processes if entry.get("pid") is not None]

    def holders(self, port: int) -> list[Process] | None:
        entries = [entry for entry in self.recording.processes if port in entry.get("ports", ())]
        return [_process(entry) for entry in entries if entry.get("pid") is not None] if entries else None

    def _resolved(self, path: str) -> str:
        """Return ``path`` with the recorded links on its way followed."""
        links = self.recording.table("links")
        for _ in range(8):
            on_the_way = next((parent for parent in (path, *map(str, Path(path).parents)) if links.get(parent)), None)
            if on_the_way is None:
                break
            target = posixpath.normpath(posixpath.join(posixpath.dirname(on_the_way), links[on_the_way]))
            path = target + path.removeprefix(on_the_way)
        return path

    def _in_tree(self, path: str) -> Path | None:
        return next((found for tree in self.recording.trees if (found := tree / path.lstrip("/")).exists()), None)

    def _taken_away(self, path: str) -> bool:
        files, links = self.recording.table("files"), self.recording.table("links")
        return any(
            (parent in files and files[parent] is None) or (parent in links and links[parent] is None)
            for parent in (path, *map(str, Path(path).parents))
        )


def _process(entry: Mapping[str, Any]) -> Process:
    environment = tuple(f"{name}={value}" for name, value in entry.get("environment", {}).items())
    return Process(entry["pid"], entry.get("ppid", 1), tuple(entry.get("argv", ())), environment)
