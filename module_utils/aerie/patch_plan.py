"""What must change in a tree for it to be its originals with the wanted patch sets, and whether it already is. Reads only.

Standard library only: this runs on hosts. ``patch_transaction`` carries a plan out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.aerie import anchors
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patch_set import Hook, PatchSet, selected
from ansible.module_utils.aerie.patch_store import PatchStore
from ansible.module_utils.aerie.source_tree import SourceTree
from ansible.module_utils.aerie.words import listing

DIFF_LINES = 60

PRISTINE, OURS, UNKNOWN, ABSENT = "pristine", "ours", "unknown", "absent"
PATCHED, ADDED, RESTORED, REMOVED = "patched", "added", "restored", "removed"


@dataclass(frozen=True)
class FileChange:
    """One file: what it was found to be, and the bytes that it must have (None: it must not be there)."""

    path: str
    kind: str
    state: str
    found: bytes | None
    wanted: bytes | None
    original: bytes | None
    hooks: tuple[str, ...]
    accepted: bool

    @property
    def changes(self) -> bool:
        return self.found != self.wanted

    def as_result(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "kind": self.kind,
            "state": self.state,
            "before": hash_of(self.found),
            "after": hash_of(self.wanted),
            "hooks": list(self.hooks),
            "changed": self.changes,
        }


@dataclass(frozen=True)
class Interrupted:
    """A transaction that a run began and did not end, and how that will be settled."""

    journal: Mapping[str, Any]
    finished: bool
    restores: Mapping[str, bytes | None]

    def as_result(self) -> dict[str, Any]:
        return {
            "outcome": "finished" if self.finished else "undone",
            "started": self.journal["started"],
            "owner": self.journal["owner"],
            "files": sorted(self.journal["files"]),
        }


@dataclass(frozen=True)
class Plan:
    """Everything that a run would do, computed once: what is shown is what is applied."""

    files: tuple[FileChange, ...]
    sets: tuple[PatchSet, ...]
    manifest_before: Mapping[str, Any] | None
    interrupted: Interrupted | None
    warnings: tuple[str, ...] = ()

    @property
    def changed_files(self) -> tuple[FileChange, ...]:
        return tuple(file for file in self.files if file.changes)

    @property
    def changed(self) -> bool:
        return bool(self.changed_files or self.applied_before != self.applied_after or (self.interrupted and not self.interrupted.finished))

    @property
    def applied_before(self) -> list[dict[str, str]]:
        return list(self.manifest_before["sets"]) if self.manifest_before else []

    @property
    def applied_after(self) -> list[dict[str, str]]:
        return [{"name": one.name, "sha256": one.sha256} for one in self.sets]

    def diff(self) -> str:
        return "".join(unified(file.path, file.found, file.wanted) for file in self.changed_files)


def hash_of(data: bytes | None) -> str | None:
    return None if data is None else sha256_bytes(data)


def unified(name: str, before: bytes | None, after: bytes | None, limit: int | None = None) -> str:
    """Return the unified diff of two files; None stands for one that isn't there."""

    def lines(data: bytes | None) -> list[str]:
        return (data or b"").decode(errors="backslashreplace").splitlines(keepends=True)

    head = ("/dev/null" if before is None else name), ("/dev/null" if after is None else name)
    out = [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(lines(before), lines(after), *head)
    ]
    if limit is not None and len(out) > limit:
        out = [*out[:limit], f"… and {len(out) - limit} more lines\n"]
    return "".join(out)


def plan(tree: SourceTree, store: PatchStore, sets: Sequence[PatchSet], *, accept_unknown: bool = False) -> Plan:
    """Return what must change for ``tree`` to be its originals with exactly ``sets``, in order; raise with all that stands in the way."""
    interrupted = find_interrupted(tree, store)
    manifest = store.manifest()
    if interrupted and not interrupted.finished:
        manifest = interrupted.journal["manifest_before"]
    wanted_sets, notes = selected(sets, tree.version)
    planner = _Planner(tree, store, manifest, interrupted, accept_unknown)
    hooks: dict[str, list[Hook]] = {}
    for one in wanted_sets:
        for hook in one.hooks_for(tree.version):
            hooks.setdefault(hook.file, []).append(hook)
    overlays: dict[str, tuple[str, str]] = {}
    for one in wanted_sets:
        for path, text in one.overlay.items():
            if path in overlays:
                planner.problems.append(f"{path}: both {overlays[path][0]} and {one.name} add it")
            overlays[path] = (one.name, text)
    planner.problems.extend(
        f"{path}: {overlays[path][0]} adds it, so that no hook can be in it" for path in sorted(overlays.keys() & hooks.keys())
    )
    files = [planner.patched(path, hooks[path]) for path in sorted(hooks.keys() - overlays.keys())]
    files += [planner.added(path, *overlays[path]) for path in sorted(overlays)]
    files += [planner.put_back(path) for path in sorted(planner.entries.keys() - hooks.keys() - overlays.keys())]
    made = [file for file in files if file is not None]
    planner.problems.extend(why for why in sorted({tree.unwritable(file.path) or "" for file in made if file.changes}) if why)
    raise_all(planner.problems, f"{tree.package} {tree.version.text} in {tree.path} can't be patched, and nothing was touched")
    return Plan(tuple(made), tuple(wanted_sets), manifest, interrupted, tuple(notes + planner.warnings))


class _Planner:
    """Decides for one file after the other what it is and what it must become; collects every problem."""

    def __init__(
        self, tree: SourceTree, store: PatchStore, manifest: Mapping[str, Any] | None, interrupted: Interrupted | None, accept_unknown: bool
    ) -> None:
        self.tree = tree
        self.store = store
        self.entries: Mapping[str, Mapping[str, Any]] = manifest["files"] if manifest else {}
        self.restores = interrupted.restores if interrupted and not interrupted.finished else {}
        self.accept_unknown = accept_unknown
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def read(self, path: str) -> bytes | None:
        return self.restores[path] if path in self.restores else self.tree.read(path)

    def state(self, path: str, found: bytes | None) -> str:
        if found is None:
            return ABSENT
        sha256, recorded, entry = sha256_bytes(found), self.tree.record.get(path), self.entries.get(path)
        if sha256 == recorded:
            return PRISTINE
        if entry and sha256 == entry["after"] and (recorded is None or entry["before"] == recorded or entry["accepted"]):
            return OURS
        return UNKNOWN

    def original(self, path: str, state: str, found: bytes | None) -> tuple[bytes | None, bool]:
        """Return the file's original, as far as known, and whether it is one that was accepted without being the wheel's."""
        if state == PRISTINE:
            return found, False
        entry = self.entries.get(path)
        recorded = self.tree.record.get(path)
        if entry and entry["before"] and (recorded is None or entry["accepted"] or entry["before"] == recorded):
            return self.store.get(entry["before"]), bool(entry["accepted"])
        return (self.store.get(recorded), False) if recorded else (None, False)

    def look(self, path: str) -> tuple[bytes | None, str, bytes | None, bool] | None:
        try:
            found = self.read(path)
            state = self.state(path, found)
            return found, state, *self.original(path, state, found)
        except AerieError as error:
            self.problems.append(str(error))
            return None

    def refuse(self, path: str, found: bytes | None, original: bytes | None, hooks: Sequence[Hook] = ()) -> None:
        recorded = self.tree.record.get(path)
        known = "the wheel's RECORD" if recorded else "any record: the package has none for it"
        message = f"{path}: unknown content (sha256 {hash_of(found)}), which is neither that of {known} nor what Aerie wrote"
        written = anchors.derive(original, hooks, path)[0] if original is not None and path in self.entries else None
        if written is not None and sha256_bytes(written.data) == self.entries[path]["after"]:
            message += f"; against what Aerie wrote:\n{unified(path, written.data, found, DIFF_LINES)}"
        elif original is not None:
            message += f"; against the original:\n{unified(path, original, found, DIFF_LINES)}"
        advice = (
            "to have it restored from the kept original"
            if self.entries.get(path) and original is not None
            else "to take it as the original"
        )
        self.problems.append(f"{message}\n    install the package anew, or give accept_unknown: true {advice}")

    def patched(self, path: str, hooks: Sequence[Hook]) -> FileChange | None:
        looked = self.look(path)
        if looked is None:
            return None
        found, state, original, accepted = looked
        if found is None:
            self.problems.append(
                f"{path}: the file isn't there, but hooks {listing(repr(hook.name) for hook in hooks)} are for it: is this their version?"
            )
            return None
        if state == UNKNOWN:
            if not self.accept_unknown:
                self.refuse(path, found, original, hooks)
                return None
            if path in self.entries and original is not None:
                self.warnings.append(
                    f"{path}: UNKNOWN content gave way to the original as asked (accept_unknown); it is kept as sha256 {hash_of(found)}"
                )
            else:
                original, accepted = found, True
                self.warnings.append(
                    f"{path}: UNKNOWN content was taken as the original as asked (accept_unknown): sha256 {hash_of(found)}"
                )
        if original is None:
            self.problems.append(
                f"{path}: its original (sha256 {self.entries[path]['before']}) is missing from {self.store.root}: install the package anew"
            )
            return None
        derived, problems = anchors.derive(original, hooks, path)
        self.problems.extend(problems)
        if derived is None:
            return None
        return FileChange(path, PATCHED, state, found, derived.data, original, tuple(hook.name for hook in hooks), accepted)

    def added(self, path: str, owner: str, text: str) -> FileChange | None:
        looked = self.look(path)
        if looked is None:
            return None
        found, state, _, _ = looked
        wanted = text.encode()
        if path in self.tree.record:
            self.problems.append(f"{path}: {owner} adds this file, but the package has one of that name: rename the overlay's")
            return None
        if state == UNKNOWN and not self.accept_unknown:
            self.refuse(path, found, None)
            return None
        if state == UNKNOWN:
            self.warnings.append(
                f"{path}: UNKNOWN content was overwritten as asked (accept_unknown); it is kept as sha256 {hash_of(found)}"
            )
        if path.endswith(".py"):
            try:
                anchors.check_compiles(wanted, path)
            except (SyntaxError, ValueError) as error:
                self.problems.append(f"{path}: {owner}'s overlay is no valid Python: {error}")
                return None
        return FileChange(path, ADDED, state, found, wanted, None, (), False)

    def put_back(self, path: str) -> FileChange | None:
        looked = self.look(path)
        if looked is None:
            return None
        found, state, original, accepted = looked
        entry = self.entries[path]
        if entry["before"] is None:
            original = None
        elif original is None:
            self.problems.append(
                f"{path}: its original (sha256 {entry['before']}) is missing from {self.store.root}: install the package anew"
            )
            return None
        if state == UNKNOWN and found != original:
            if not self.accept_unknown:
                self.refuse(path, found, original)
                return None
            self.warnings.append(
                f"{path}: UNKNOWN content was thrown away as asked (accept_unknown); it is kept as sha256 {hash_of(found)}"
            )
        return FileChange(path, REMOVED if original is None else RESTORED, state, found, original, original, (), accepted)


def find_interrupted(tree: SourceTree, store: PatchStore) -> Interrupted | None:
    """Return the transaction on ``tree`` that was begun and not ended, if any; raise when it can be neither finished nor undone."""
    journal = store.journal()
    if journal is None:
        return None
    manifest = store.manifest()
    finished = bool(manifest and manifest["transaction"] == journal["transaction"])
    restores: dict[str, bytes | None] = {}
    problems = []
    for path, entry in journal["files"].items():
        found = hash_of(tree.read(path))
        if finished:
            continue
        if found not in (entry["before"], entry["after"]):
            problems.append(
                f"{path} is neither what that run found (sha256 {entry['before']}) nor what it wrote ({entry['after']}): "
                f"install the package anew, then remove {store.journal_path}"
            )
        elif entry["before"] is None:
            restores[path] = None
        else:
            restores[path] = store.get(entry["before"])
            if restores[path] is None:
                problems.append(f"{path}: what it was (sha256 {entry['before']}) is missing from {store.root}")
    raise_all(problems, f"the run that began {journal['started']} was cut off, and can't be undone")
    return Interrupted(journal, finished, restores)


def drift(tree: SourceTree, store: PatchStore, sets: Sequence[PatchSet] | None) -> list[str]:
    """Return in words every way in which ``tree`` is not what ``sets`` (None: what was last applied) make of it. Reads only."""
    if store.journal() is not None:
        return [f"a run was cut off while it patched {tree.path}: run state: present to settle that"]
    manifest = store.manifest()
    if sets is None:
        return _manifest_drift(tree, manifest)
    try:
        planned = plan(tree, store, sets)
    except AerieError as error:
        return [str(error)]
    found = [f"{file.path} is {file.state}, and would be {file.kind}" for file in planned.changed_files]
    if planned.applied_before != planned.applied_after:
        found.append(f"applied are {_named(planned.applied_before)}, wanted {_named(planned.applied_after)}")
    return found


def applied(store: PatchStore) -> list[dict[str, str]]:
    """Return the name and hash of each set that is applied, in order."""
    manifest = store.manifest()
    return list(manifest["sets"]) if manifest else []


def _manifest_drift(tree: SourceTree, manifest: Mapping[str, Any] | None) -> list[str]:
    found = []
    for path, entry in (manifest["files"] if manifest else {}).items():
        sha256 = hash_of(tree.read(path))
        if sha256 != entry["after"]:
            words = "is not there" if sha256 is None else "was put back" if sha256 == entry["before"] else f"was changed (sha256 {sha256})"
            found.append(f"{path} {words} since {manifest['when'] if manifest else ''}")
    return found


def _named(applied: Sequence[Mapping[str, str]]) -> str:
    return listing(f"{one['name']} ({one['sha256'][:8]})" for one in applied)
