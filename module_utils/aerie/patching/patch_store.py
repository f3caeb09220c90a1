"""Where originals are kept: by content hash, outside the trees, never overwritten. Standard library only: this runs on hosts.

Below the store's root: ``sha256/ab/<hash>`` (bytes of files), ``manifests/<tree>.json`` (what is applied to a tree, by whom, since when),
``journals/<tree>.json`` (a transaction that has begun and not ended), ``locks/<tree>.lock``,
``unfinished/<tree>`` (what is being written). ``inventory`` tells what needs which object.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import canonical_hash, fsync_dir, read_json, sha256_bytes, sha256_file, write_atomic
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.words import listing

SCHEMA = "aerie-patches/1"
MANIFESTS, JOURNALS, OBJECTS, LOCKS, UNFINISHED = "manifests", "journals", "sha256", "locks", "unfinished"
SEAL = "content_sha256"
STORE_LOCK = "store"


@dataclass(frozen=True)
class PatchStore:
    """The store at ``root``, seen from the tree ``tree`` (its identity)."""

    root: Path
    tree: str

    @classmethod
    def beside(cls, tree: SourceTree, root: Path) -> PatchStore:
        """Return the store at ``root`` for ``tree``; raise where it would lie inside it, or inside its git checkout."""
        if root.resolve().is_relative_to(tree.home):
            raise AerieError(f"store {root} lies inside {tree.home}: choose a place that isn't lost with it")
        return cls(root, tree.identity)

    @property
    def key(self) -> str:
        return sha256_bytes(self.tree.encode())[:16]

    @property
    def manifest_path(self) -> Path:
        return self.root / MANIFESTS / f"{self.key}.json"

    @property
    def journal_path(self) -> Path:
        return self.root / JOURNALS / f"{self.key}.json"

    def object_path(self, sha256: str) -> Path:
        return object_path(self.root, sha256)

    def put(self, data: bytes) -> str:
        """Keep ``data``, durably; return its hash. What is there already is checked and never overwritten."""
        sha256 = sha256_bytes(data)
        path = self.object_path(sha256)
        if self._intact(path, sha256) is None:
            self._place(path, data, 0o444)
        else:
            self._make_durable(path)
        return sha256

    def get(self, sha256: str) -> bytes | None:
        """Return the bytes with that hash, or None where the store hasn't them."""
        return self._intact(self.object_path(sha256), sha256)

    @staticmethod
    def _intact(path: Path, sha256: str) -> bytes | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if sha256_bytes(data) != sha256:
            raise AerieError(
                f"{path}: this kept original is damaged (its hash is another): restore it from a backup, or install the package anew"
            )
        return data

    def manifest(self) -> dict[str, Any] | None:
        """Return what is applied to the tree, or None; raise where the file is damaged."""
        return _read(self.manifest_path, ("files", "sets", "directories", "transaction", "when"))

    def journal(self) -> dict[str, Any] | None:
        """Return the transaction that began and did not end, or None; raise where the file is damaged."""
        return _read(self.journal_path, ("files", "directories_made", "manifest_before", "transaction", "started", "owner"))

    def write_manifest(self, manifest: dict[str, Any] | None) -> None:
        self._write(self.manifest_path, manifest)

    def write_journal(self, journal: dict[str, Any] | None) -> None:
        self._write(self.journal_path, journal)

    def sweep(self) -> None:
        """Remove what a run on this tree was writing when it was killed."""
        if self._unfinished.exists():
            self._unfinished.unlink()

    @property
    def _unfinished(self) -> Path:
        return self.root / UNFINISHED / self.key

    def _write(self, path: Path, value: dict[str, Any] | None) -> None:
        if value is not None:
            sealed = value | {SEAL: canonical_hash(value)}
            self._place(path, json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False) + "\n", 0o644)
        elif path.exists():
            path.unlink()
            fsync_dir(path.parent)

    def _place(self, path: Path, data: bytes | str, mode: int) -> None:
        made = [parent for parent in self._unfinished.parents if not parent.exists()]
        self.sweep()
        write_atomic(path, data, mode, temporary=self._unfinished)
        for directory in made:
            fsync_dir(directory.parent)
        self._make_durable(path)

    def _make_durable(self, path: Path) -> None:
        """Also what a run that was cut off had made: its directories may be there and not yet on the disk."""
        for directory in path.parents:
            fsync_dir(directory)
            if directory == self.root:
                break

    def same_filesystem_as(self, path: Path) -> bool:
        """Say whether one broken file system would lose both the tree and its originals."""
        there = self.root
        while not there.exists():
            there = there.parent
        return there.stat().st_dev == path.stat().st_dev

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs off this tree; a run that was killed frees it."""
        with (
            _lock(self.root, STORE_LOCK, fcntl.LOCK_SH, f"{self.root} is being tidied up now: wait for that to end"),
            _lock(self.root, self.key, fcntl.LOCK_EX, f"{self.tree}: another run is patching it now: wait for that to end"),
        ):
            yield


# The store as a whole


@dataclass(frozen=True)
class KeptManifest:
    """What a manifest, or the journal of a run that was cut off (``journal``), says: the tree, and which objects it needs to go back.

    ``problem`` says why it can't be read; then nothing else is known, and what it needs neither.
    """

    path: Path
    journal: bool
    tree: str
    package: str
    version: str
    when: str
    sets: tuple[str, ...]
    tree_exists: bool
    needs: frozenset[str]
    problem: str | None = None

    @property
    def key(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class KeptObject:
    """One kept file; ``needed_by`` are the keys of the manifests and journals that can't go back without it."""

    path: Path
    sha256: str
    bytes: int
    modified: float
    needed_by: tuple[str, ...]

    @property
    def intact(self) -> bool:
        """Whether its content still has its hash; reads it whole."""
        return sha256_file(self.path) == self.sha256


@dataclass(frozen=True)
class Inventory:
    """All that a store holds. ``missing`` are objects that are needed and not there, ``leftovers`` files that a killed run was writing."""

    root: Path
    manifests: tuple[KeptManifest, ...]
    objects: tuple[KeptObject, ...]
    missing: tuple[str, ...]
    leftovers: tuple[Path, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why some manifest or journal can't be read. While there are any, no object may be thought unneeded."""
        return tuple(one.problem for one in self.manifests if one.problem)

    @property
    def gone(self) -> tuple[str, ...]:
        """The keys of manifests and journals whose trees aren't there any more."""
        return tuple(sorted({one.key for one in self.manifests if not one.problem and not one.tree_exists}))

    def unneeded(self, forgotten: Collection[str] = ()) -> tuple[KeptObject, ...]:
        """Return the objects that nothing needs but the manifests and journals with the keys ``forgotten``; raise where that can't be told.

        Among them are originals of trees that were put back, earlier patched files, and unknown content that gave way because a run was
        told to accept it: somebody's edit, of which this may be the only copy. Remove by age, and say what.
        """
        raise_all(self.problems, f"{self.root}: what its manifests need can't be told, so that nothing may be removed")
        return tuple(one for one in self.objects if not set(one.needed_by) - set(forgotten))


def inventory(root: Path) -> Inventory:
    """Return what the store at ``root`` holds and what needs it. Reads names, manifests and journals, not the objects themselves."""
    manifests = tuple(
        _kept(path, path.parent.name == JOURNALS)
        for path in sorted(root.glob(f"{MANIFESTS}/*.json")) + sorted(root.glob(f"{JOURNALS}/*.json"))
    )
    users: dict[str, set[str]] = {}
    for one in manifests:
        for sha256 in one.needs:
            users.setdefault(sha256, set()).add(one.key)
    objects, leftovers = [], sorted(root.glob(f"{UNFINISHED}/*"))
    for path in sorted(root.glob(f"{OBJECTS}/??/*")):
        if path.name.startswith("."):
            leftovers.append(path)
            continue
        facts = path.stat()
        objects.append(KeptObject(path, path.name, facts.st_size, facts.st_mtime, tuple(sorted(users.get(path.name, ())))))
    missing = users.keys() - {one.sha256 for one in objects}
    return Inventory(root, manifests, tuple(objects), tuple(sorted(missing)), tuple(leftovers))


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Keep every run off the store at ``root``, so that what nothing needs can be told and removed."""
    with _lock(root, STORE_LOCK, fcntl.LOCK_EX, f"{root}: a run is patching a tree with it now: wait for that to end"):
        yield


def object_path(root: Path, sha256: str) -> Path:
    """Return where the store at ``root`` keeps the file with that hash; a controller's copy of a store has the same layout."""
    return root / OBJECTS / sha256[:2] / sha256


def needed(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the hashes of the objects without which the tree of this manifest or journal can't go back."""
    before = {entry["before"] for entry in state["files"].values() if entry["before"]}
    earlier = state.get("manifest_before")
    return frozenset(before) | (needed(earlier) if earlier else frozenset())


def _kept(path: Path, journal: bool) -> KeptManifest:
    try:
        found = _read(path, ("tree", "files", *(("started", "manifest_before") if journal else ("when", "version", "sets"))))
        if found is None:
            raise AerieError(f"{path}: it went away meanwhile")
    except AerieError as error:
        return KeptManifest(path, journal, "", "", "", "", (), False, frozenset(), str(error))
    facts = (found.get("manifest_before") or {}) if journal else found
    return KeptManifest(
        path=path,
        journal=journal,
        tree=found["tree"],
        package=Path(found["tree"]).name,
        version=facts.get("version", ""),
        when=found["started"] if journal else found["when"],
        sets=tuple(one["name"] for one in facts.get("sets", ())),
        tree_exists=Path(found["tree"]).is_dir(),
        needs=needed(found),
    )


def _read(path: Path, keys: Collection[str]) -> dict[str, Any] | None:
    """Read a manifest or journal; None where there is none. A damaged one is never taken for one that says nothing."""
    advice = "restore it from a backup, or install the package anew and remove this file"
    try:
        found = read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AerieError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise AerieError(f"{path}: damaged, it is no JSON ({error}): {advice}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise AerieError(f"{path}: damaged, or of another version of Aerie: it is no {SCHEMA}: {advice}")
    seal = found.pop(SEAL, None)
    if seal is not None and seal != canonical_hash(found):
        raise AerieError(f"{path}: damaged, its content is not what was written (its {SEAL} is another): {advice}")
    lacking = [key for key in keys if key not in found]
    if lacking or not isinstance(found["files"], dict):
        raise AerieError(f"{path}: damaged, it lacks {listing(lacking or ['files'])}: {advice}")
    half = [name for name, entry in found["files"].items() if not isinstance(entry, dict) or not {"before", "after"} <= entry.keys()]
    if half:
        raise AerieError(f"{path}: damaged, it lacks hashes of {listing(half)}: {advice}")
    return found


@contextlib.contextmanager
def _lock(root: Path, name: str, kind: int, refusal: str) -> Iterator[None]:
    path = root / LOCKS / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)  # who may open it may hold it, and older versions let everybody
    except OSError as error:
        raise AerieError(f"{error.filename or path}: {error.strerror}: nothing was changed; the store must be writable") from error
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AerieError(refusal) from None
        except OSError as error:
            raise AerieError(f"{path}: {error.strerror}: nothing was changed; the store's file system must know locks") from error
        yield
    finally:
        os.close(descriptor)
