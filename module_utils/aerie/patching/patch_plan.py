"""What must change in a tree for it to be its originals with the wanted patch sets, and whether it already is. Reads only.

Standard library only: this runs on hosts. ``patch_transaction`` carries a plan out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patching import anchors, hand_backups
from ansible.module_utils.aerie.patching.hand_backups import Backup
from ansible.module_utils.aerie.patching.patch_set import Hook, PatchSet, selected
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.specifiers import Version
from ansible.module_utils.aerie.words import listing

DIFF_LINES = 60
NAMED = 3
ACCEPTING = "to a playbook: -e sglang_patches_accept_unknown=true"

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
            "accepted": self.accepted,
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
    """Everything that a run would do, computed once: what is shown is what is applied.

    ``warnings`` are about what was asked for; ``notes`` about what else was seen, and only of a run that changes something.
    """

    files: tuple[FileChange, ...]
    sets: tuple[PatchSet, ...]
    manifest_before: Mapping[str, Any] | None
    interrupted: Interrupted | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    backups: tuple[Backup, ...] = ()

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
    backups = tuple(one for file in made for one in planner.backups(file.path, file.original))
    planned = Plan(tuple(made), tuple(wanted_sets), manifest, interrupted, tuple(notes + planner.warnings), backups=backups)
    return replace(planned, notes=tuple(_notes(tree, planned))) if planned.changed else planned


def _notes(tree: SourceTree, planned: Plan) -> list[str]:
    """What else is to be seen in a tree that somebody works in by hand."""
    notes = []
    ours = {file.path for file in planned.files} | (planned.interrupted.journal["files"].keys() if planned.interrupted else set())
    edited = [path for path in tree.edited() if path not in ours]
    if edited:
        notes.append(
            f"{tree.path}: uncommitted edits of {_few(edited)}, which no set touches: they stay, also when the sets are taken back"
        )
    entries = planned.manifest_before["files"] if planned.manifest_before else {}
    commits = [path for path, entry in entries.items() if committed(tree.recorded(path), entry)]
    if commits:
        notes.append(f"{tree.path}: somebody committed what Aerie wrote in {_few(commits)}: taking the sets back is a change against HEAD")
    if planned.backups:
        notes.append(f"{tree.path}: back-ups lie beside files that sets touch, and are left alone: {hand_backups.told(planned.backups)}")
    tagged = tree.git.described if tree.git else None
    if tagged and "+" not in tagged and Version.parse(tagged) != tree.version:
        notes.append(
            f"{tree.path}: taken for version {tree.version.text}, but its HEAD has the tag of {tagged}: give version if that is wrong"
        )
    return notes


def _few(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    counted = f"{len(names)} file{'s' if len(names) > 1 else ''}"
    return f"{counted} ({', '.join(names[:NAMED])}{f' and {rest} more' if rest > 0 else ''})"


def committed(recorded: str | None, entry: Mapping[str, Any]) -> bool:
    """Say whether git's HEAD has what was written, since somebody committed it."""
    return recorded is not None and recorded == entry["after"] != entry["before"]


def cure(tree: SourceTree, path: str) -> str:
    """Return in words how a person gets the pristine file ``path`` back."""
    if tree.git and path in tree.git.objects:
        return f"put back what HEAD has (git -C {tree.git.top} checkout HEAD -- {tree.git.prefix}{path})"
    return "move it away" if tree.git else "install the package anew"


def kept(tree: SourceTree, store: PatchStore, path: str, sha256: str) -> bytes | None:
    """Return the content of ``path`` with that hash from the store, or from git where the store has lost it; raise where it is damaged."""
    data = store.get(sha256)
    return tree.pristine(path) if data is None and tree.recorded(path) == sha256 else data


class _Planner:
    """Decides for one file after the other what it is and what it must become; collects every problem."""

    def __init__(
        self, tree: SourceTree, store: PatchStore, manifest: Mapping[str, Any] | None, interrupted: Interrupted | None, accept_unknown: bool
    ) -> None:
        self.tree = tree
        self.store = store
        self.entries: Mapping[str, Mapping[str, Any]] = manifest["files"] if manifest else {}
        self.commit: str | None = manifest.get("commit") if manifest else None
        self.version: str | None = manifest.get("version") if manifest else None
        self.restores = interrupted.restores if interrupted and not interrupted.finished else {}
        self.accept_unknown = accept_unknown
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def read(self, path: str) -> bytes | None:
        return self.restores[path] if path in self.restores else self.tree.read(path)

    def state(self, path: str, found: bytes | None) -> str:
        if found is None:
            return ABSENT
        sha256, recorded, entry = sha256_bytes(found), self.recorded(path), self.entries.get(path)
        if sha256 == recorded:
            return PRISTINE
        if entry and sha256 == entry["after"] and not self.outdated(path):
            return OURS
        return UNKNOWN

    def recorded(self, path: str) -> str | None:
        """Return the hash that the package has for the file, unless that is what was written: a commit of ours is no original."""
        recorded, entry = self.tree.recorded(path), self.entries.get(path)
        return None if entry and committed(recorded, entry) else recorded

    def outdated(self, path: str) -> bool:
        """Say whether what was written came from another content than the one that the package has now: another version, or HEAD moved."""
        entry, recorded = self.entries.get(path), self.recorded(path)
        return bool(entry and recorded is not None and entry["before"] != recorded and not entry["accepted"])

    def original(self, path: str, state: str, found: bytes | None) -> tuple[bytes | None, bool]:
        """Return the file's original, as far as known, and whether it is one that was accepted without being the package's."""
        if state == PRISTINE:
            return found, False
        entry = self.entries.get(path)
        if entry and entry["before"] and not self.outdated(path):
            return kept(self.tree, self.store, path, entry["before"]), bool(entry["accepted"])
        recorded = self.recorded(path)
        return (kept(self.tree, self.store, path, recorded), False) if recorded else (None, False)

    def backups(self, path: str, original: bytes | None) -> list[Backup]:
        try:
            return hand_backups.beside(self.tree, path, original)
        except AerieError:
            return []

    def earlier(self, sha256: str) -> bytes | None:
        """Return a kept file that the package no longer has; None, and a problem, where it is damaged."""
        try:
            return self.store.get(sha256)
        except AerieError as error:
            self.problems.append(str(error))
            return None

    def look(self, path: str) -> tuple[bytes | None, str, bytes | None, bool] | None:
        try:
            found = self.read(path)
            state = self.state(path, found)
            return found, state, *self.original(path, state, found)
        except AerieError as error:
            self.problems.append(str(error))
            return None

    def refuse(self, path: str, found: bytes, original: bytes | None, hooks: Sequence[Hook] = (), accepting: str | None = None) -> None:
        entry, backups = self.entries.get(path), self.backups(path, original)
        if self.tree.recorded(path) is not None:
            known = f"that of {self.tree.words}"
        elif self.tree.git:
            known = f"of {self.tree.words}, which has no such file,"
        else:
            known = "that of any record: the package has none for it"
        neither = f"neither {known} nor what Aerie wrote"
        parts = [f"{path}: unknown content (sha256 {hash_of(found)}), which is {self.moved(path, found) or neither}"]
        if original is None:
            original = next((one.data for one in backups if one.state == hand_backups.PRISTINE), None)
        written = anchors.derive(original, hooks, path)[0] if original is not None and entry else None
        if entry and self.outdated(path) and hash_of(found) in (entry["before"], entry["after"]):
            before = self.earlier(entry["before"])
            if original is not None and before is not None:
                parts.append(f"what changed in between:\n{unified(path, before, original, DIFF_LINES)}".rstrip())
        elif written is not None and entry and sha256_bytes(written.data) == entry["after"]:
            parts.append(f"against what Aerie wrote:\n{unified(path, written.data, found, DIFF_LINES)}".rstrip())
        elif original is not None:
            whose = self.tree.words if self.tree.git and not (entry and entry["accepted"]) else "the original"
            lines = "only line endings differ; " if _same_lines(original, found) else ""
            parts.append(f"{lines}against {whose}:\n{unified(path, original, found, DIFF_LINES)}".rstrip())
        message = "; ".join(parts)
        if backups:
            message += f"\n    beside it: {hand_backups.told(backups)}"
        if accepting is None:
            restored = "to have it restored from the kept original"
            accepting = restored if entry and original is not None else "to take it as the original"
        commit = "commit it, " if self.tree.git and not entry else ""
        self.problems.append(f"{message}\n    {commit}{cure(self.tree, path)}, or give accept_unknown: true {accepting} ({ACCEPTING})")

    def moved(self, path: str, found: bytes) -> str | None:
        """Say what a file is whose package has another content of it than the one that it was patched from; None where that is not so."""
        if not self.outdated(path):
            return None
        entry, sha256 = self.entries[path], sha256_bytes(found)
        before = f"commit {self.commit[:12]}" if self.commit else f"version {self.version}"
        was = "neither what Aerie wrote nor what it was made from"
        if sha256 == entry["after"]:
            was = "what Aerie wrote"
        elif sha256 == entry["before"]:
            was = "what Aerie's was made from"
        return f"{was} at {before}, and {self.tree.words} has another content of it now (sha256 {self.tree.recorded(path)})"

    def patched(self, path: str, hooks: Sequence[Hook]) -> FileChange | None:
        looked = self.look(path)
        if looked is None:
            return None
        found, state, original, accepted = looked
        if found is None:
            asked = f"{path}: the file isn't there, but hooks {listing(repr(hook.name) for hook in hooks)} are for it"
            why = f"{self.tree.words} has it: {cure(self.tree, path)}" if self.tree.recorded(path) else "is this their version?"
            self.problems.append(f"{asked}: {why}")
            return None
        if state == UNKNOWN:
            if not self.accept_unknown:
                self.refuse(path, found, original, hooks)
                return None
            if original is None and self.outdated(path) and hash_of(found) == self.entries[path]["after"]:
                self.problems.append(f"{path} is {self.moved(path, found)}: it can't be taken as an original: {cure(self.tree, path)}")
                return None
            if path in self.entries and original is not None:
                self.warnings.append(
                    f"{path}: UNKNOWN content gave way to the original as asked (accept_unknown); it is kept as sha256 {hash_of(found)}"
                )
            else:
                differs = f", {hand_backups.change(original, found)} against {self.tree.words}" if original is not None else ""
                self.warnings.append(
                    f"{path}: UNKNOWN content was taken as the original as asked (accept_unknown): sha256 {hash_of(found)}{differs}; "
                    "taking the sets back gives this content again, not the package's"
                )
                original, accepted = found, True
        if original is None:
            self.problems.append(
                f"{path}: its original (sha256 {self.entries[path]['before']}) is missing from {self.store.root}: {cure(self.tree, path)}"
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
        if self.recorded(path) is not None:
            self.problems.append(f"{path}: {owner} adds this file, but the package has one of that name: rename the overlay's")
            return None
        if found is not None and state == UNKNOWN and not self.accept_unknown:
            self.refuse(path, found, None, accepting=f"to have it overwritten by what {owner} adds, and kept in the store")
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
        if self.tree.git and entry["before"] and hash_of(found) == entry["after"] and self.outdated(path):
            state, original = OURS, self.earlier(entry["before"])
            self.warnings.append(
                f"{path} was put back to what it was before it was patched, at commit {(self.commit or 'unknown')[:12]}; "
                f"{self.tree.words} has another content of it now: {cure(self.tree, path)} to have that"
            )
        if entry["before"] is None:
            original = None
        elif original is None:
            self.problems.append(
                f"{path}: its original (sha256 {entry['before']}) is missing from {self.store.root}: {cure(self.tree, path)}"
            )
            return None
        if found is not None and state == UNKNOWN and found != original:
            if not self.accept_unknown:
                self.refuse(path, found, original, accepting="to have it thrown away, and kept in the store")
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
    finished = bool(journal.get("finished"))
    restores: dict[str, bytes | None] = {}
    problems = []
    for path, entry in journal["files"].items():
        found = hash_of(tree.read(path))
        if finished:
            continue
        if found not in (entry["before"], entry["after"]):
            problems.append(
                f"{path} is neither what that run found (sha256 {entry['before']}) nor what it wrote ({entry['after']}): "
                f"{cure(tree, path)}, then remove {store.journal_path} if that is still told"
            )
        elif entry["before"] is None:
            restores[path] = None
        else:
            try:
                restores[path] = kept(tree, store, path, entry["before"])
            except AerieError as error:
                problems.append(str(error))
                continue
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
        return _manifest_drift(tree, store, manifest)
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


def _manifest_drift(tree: SourceTree, store: PatchStore, manifest: Mapping[str, Any] | None) -> list[str]:
    found = changed_since(tree, manifest)
    for path, entry in (manifest["files"] if manifest else {}).items():
        try:
            if entry["before"] and kept(tree, store, path, entry["before"]) is None:
                found.append(f"{path} can't go back: its original (sha256 {entry['before']}) is missing from {store.root}")
        except AerieError as error:
            found.append(str(error))
    return found


def changed_since(tree: SourceTree, manifest: Mapping[str, Any] | None) -> list[str]:
    """Return in words each file that isn't as the manifest's run wrote it, so that what it was patched with isn't active."""
    found = []
    for path, entry in (manifest["files"] if manifest else {}).items():
        sha256 = hash_of(tree.read(path))
        if sha256 != entry["after"]:
            words = "is not there" if sha256 is None else "was put back" if sha256 == entry["before"] else f"was changed (sha256 {sha256})"
            found.append(f"{path} {words} since {manifest['when'] if manifest else ''}")
        elif tree.git and not entry["accepted"] and tree.recorded(path) not in (None, entry["before"], entry["after"]):
            found.append(f"{path} is what was written, but from another content than {tree.words} has now")
    return found


def _same_lines(one: bytes, other: bytes) -> bool:
    return one.replace(b"\r\n", b"\n") == other.replace(b"\r\n", b"\n")


def _named(applied: Sequence[Mapping[str, str]]) -> str:
    return listing(f"{one['name']} ({one['sha256'][:8]})" for one in applied)
