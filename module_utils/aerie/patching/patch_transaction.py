"""Patch sets applied to a tree: all files or none, from their originals, whatever happens in between. Standard library only.

The order that makes it safe: originals are kept; a journal says what will be replaced; new files are written in a twin of the smallest
directory that holds them all; the two change places, in one step; the result is verified; the manifest is written; the twin goes, then the
journal. Whoever finds a journal puts back what it names. Where directories can't change places (overlayfs, NFS), files do, one by one: new
ones first, removed ones last, so that whatever a file imports is there in every state between.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import fsync_dir, naming, sha256_file
from ansible.module_utils.aerie.patching import twin
from ansible.module_utils.aerie.patching.patch_plan import ADDED, PATCHED, FileChange, Interrupted, Plan, hash_of
from ansible.module_utils.aerie.patching.patch_store import SCHEMA, PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.words import listing, tail

VERIFIER_SECONDS = 600

Step = Callable[[str], None]
"""Called after each durable step of a transaction with its name; tests kill the process in it."""


def _unwatched(_name: str) -> None:
    pass


def settle(tree: SourceTree, store: PatchStore, interrupted: Interrupted, step: Step = _unwatched) -> list[str]:
    """Bring an interrupted transaction to its end: undo it, unless only its last step was missing. Can itself be interrupted.

    Returns the files that were left alone, since somebody else changed them meanwhile.
    """
    journal = interrupted.journal
    left: list[str] = []
    if not interrupted.finished:
        left = _undo(tree, journal, interrupted.restores, step)
        if store.manifest() != journal["manifest_before"]:
            store.write_manifest(journal["manifest_before"])
            step("manifest put back")
    _clear(tree, journal)
    store.write_journal(None)
    step("journal removed")
    return left


def _undo(tree: SourceTree, journal: Mapping[str, Any], restores: Mapping[str, bytes | None], step: Step) -> list[str]:
    files = journal["files"]
    pair = _pair(tree, journal)
    # All are the new ones only if the directories changed places: the other one, if it's there, is the old directory.
    if pair.other.is_dir() and all(hash_of(tree.read(path)) == entry["after"] for path, entry in files.items()) and pair.other_has_all:
        twin.exchange(pair.directory, pair.other)
        step(f"put back {pair.directory}")
    left = []
    for path in reversed(journal["order"]):
        entry = files[path]
        _temporary(tree, path, journal["transaction"]).unlink(missing_ok=True)
        found = hash_of(tree.read(path))
        if found == entry["after"] != entry["before"]:
            _put(tree, path, restores[path], entry, journal["transaction"])
            step(f"put back {path}")
        elif found != entry["before"]:
            left.append(path)
        _drop_bytecode(tree.file(path))
    _drop_directories(tree.path, journal["directories_made"])
    return left


def apply(
    tree: SourceTree,
    store: PatchStore,
    planned: Plan,
    owner: Mapping[str, str] | None = None,
    verify: Callable[[], None] = lambda: None,
    step: Step = _unwatched,
) -> None:
    """Carry ``planned`` out: settle what was interrupted, replace the files, ``verify``; on any failure put everything back and raise."""
    try:
        store.sweep()
        left = settle(tree, store, planned.interrupted, step) if planned.interrupted else []
    except OSError as error:
        raise AerieError(
            f"{_place_of(error, tree.path)}: what an earlier run had begun could not be settled: see to that, and run this again"
        ) from error
    if left:
        raise AerieError(f"{listing(left)} in {tree.path} changed since this run looked at it: run this again")
    if not planned.changed_files and planned.applied_before == planned.applied_after:
        return
    files = {file.path: file for file in sorted(planned.changed_files, key=_turn)}
    journal = _begin(tree, store, planned, files, owner, step)
    try:
        _replace_all(tree, files, journal, step)
        verify()
        store.write_manifest(_manifest(tree, planned, journal))
        step("manifest written")
        # From here on the old directory may go: whoever finds this journal must not undo any more.
        store.write_journal(journal | {"finished": True})
        step("finished")
    except BaseException as error:
        told = _put_back(tree, store, files, journal)
        if not isinstance(error, (AerieError, OSError)):
            raise
        reason = _place_of(error, tree.path) if isinstance(error, OSError) else str(error)
        raise AerieError(f"{reason}\n{told}") from error
    try:
        _clear(tree, journal)
        store.write_journal(None)
    except OSError as error:
        raise AerieError(f"{_place_of(error, tree.path)}: everything was applied; the next run removes what this one could not") from error
    step("journal removed")


def _turn(file: FileChange) -> int:
    """Where the files are replaced one by one: what others import comes first and goes last."""
    return 0 if file.kind == ADDED else 2 if file.wanted is None else 1


def _begin(
    tree: SourceTree,
    store: PatchStore,
    planned: Plan,
    files: Mapping[str, FileChange],
    owner: Mapping[str, str] | None,
    step: Step,
) -> dict[str, Any]:
    try:
        for file in files.values():
            for data in (file.original, file.found):
                if data is not None:
                    store.put(data)
        step("originals kept")
        journal = {
            "schema": SCHEMA,
            "transaction": uuid.uuid4().hex,
            "tree": tree.identity,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "owner": dict(owner or {}),
            "files": {
                path: {"before": hash_of(file.found), "after": hash_of(file.wanted), **_attributes(tree.file(path))}
                for path, file in files.items()
            },
            "order": list(files),
            # Asked only now: what an interrupted run had made is gone.
            "directories_made": sorted(
                {one for path, file in files.items() if file.wanted is not None for one in tree.missing_directories(path)}, key=len
            ),
            "manifest_before": planned.manifest_before,
        }
        store.write_journal(journal)
    except OSError as error:
        told = f"nothing was changed in {tree.path}"
        try:
            store.sweep()
            store.write_journal(None)
        except OSError as another:
            told += f"; the next run removes what this one could not ({_place_of(another, store.root)})"
        raise AerieError(f"{_place_of(error, store.root)}: {told}") from error
    step("journal written")
    return journal


def _put_back(tree: SourceTree, store: PatchStore, files: Mapping[str, FileChange], journal: Mapping[str, Any]) -> str:
    """Undo a transaction that failed, from what is in memory; return in words how that went."""
    undo = Interrupted(journal, finished=False, restores={path: file.found for path, file in files.items()})
    try:
        store.sweep()
        if (store.journal() or {}).get("finished"):
            store.write_journal(dict(journal))
        left = settle(tree, store, undo)
    except (AerieError, OSError) as error:
        reason = _place_of(error, tree.path) if isinstance(error, OSError) else str(error)
        return f"and not everything in {tree.path} could be put back: {reason}: see to that, and run again"
    if left:
        return f"{listing(left)} was left as somebody else made it; everything else in {tree.path} was put back as it was"
    return f"everything in {tree.path} was put back as it was"


def _replace_all(tree: SourceTree, files: Mapping[str, FileChange], journal: Mapping[str, Any], step: Step) -> None:
    if not files:
        return
    pair = _pair(tree, journal)
    try:
        _exchange(tree, files, journal, pair, step)
    except OSError as error:
        if error.errno not in twin.UNABLE or not _untouched(tree, journal):
            raise
        twin.remove(pair.other)
        _replace_each(tree, files, journal, step)
    for path, file in files.items():
        if hash_of(tree.read(path)) != hash_of(file.wanted):
            raise AerieError(f"{path} does not read back as it was written: is the disk failing?")


def _exchange(tree: SourceTree, files: Mapping[str, FileChange], journal: Mapping[str, Any], pair: _Pair, step: Step) -> None:
    """Replace all files in one step, by the exchange of the smallest directory that holds them with one made beside it."""
    twin.make(pair.directory, pair.other, pair.changed)
    for directory in journal["directories_made"]:
        pair.beside(directory).mkdir()
    step("directories made")
    for path, file in files.items():
        if file.wanted is not None:
            _write(pair.beside(path), file.wanted, journal["files"][path])
            step(f"written {path}")
    _drop_directories(pair.other, [pair.below(one) for one in _emptied(files, journal) if one.startswith(f"{pair.name}/")])
    twin.complete(pair.directory, pair.other)
    _refuse_strangers(tree, journal, pair, tree.file)
    twin.exchange(pair.directory, pair.other)
    try:
        # What somebody did in the very moment before is in the old directory now.
        _refuse_strangers(tree, journal, pair, pair.beside)
    except AerieError:
        twin.exchange(pair.directory, pair.other)
        raise
    for path in files:
        step(f"replaced {path}")


def _refuse_strangers(tree: SourceTree, journal: Mapping[str, Any], pair: _Pair, place: Callable[[str], Path]) -> None:
    changed = [path for path, entry in journal["files"].items() if _hash_at(place(path)) != entry["before"]]
    if changed or not pair.alike:
        raise AerieError(
            f"{listing(changed or [pair.directory])} changed while it was being patched: is something else at work on {tree.path}?"
        )


def _replace_each(tree: SourceTree, files: Mapping[str, FileChange], journal: Mapping[str, Any], step: Step) -> None:
    """Replace one file after the other, where directories can't be exchanged."""
    for directory in journal["directories_made"]:
        (tree.path / directory).mkdir(exist_ok=True)
        fsync_dir((tree.path / directory).parent)
    step("directories made")
    # All new files are on the disk before the first old one goes: a full disk or a missing permission shows here.
    for path, file in files.items():
        if file.wanted is not None:
            _write(_temporary(tree, path, journal["transaction"]), file.wanted, journal["files"][path])
            step(f"written {path}")
    for path, file in files.items():
        if hash_of(tree.read(path)) != journal["files"][path]["before"]:
            raise AerieError(f"{path} changed while it was being patched: is something else at work on {tree.path}?")
        if file.wanted is None:
            tree.file(path).unlink(missing_ok=True)
        else:
            _temporary(tree, path, journal["transaction"]).replace(tree.file(path))
        fsync_dir(tree.file(path).parent)
        _drop_bytecode(tree.file(path))
        step(f"replaced {path}")
    _drop_directories(tree.path, _emptied(files, journal))


def _clear(tree: SourceTree, journal: Mapping[str, Any]) -> None:
    twin.remove(_pair(tree, journal).other)
    for path in journal["files"]:
        _temporary(tree, path, journal["transaction"]).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Pair:
    """The smallest directory that holds all changed files (``name``, below the tree), and the twin beside it."""

    name: str
    directory: Path
    other: Path
    changed: frozenset[str]

    def below(self, path: str) -> str:
        return path.removeprefix(f"{self.name}/")

    def beside(self, path: str) -> Path:
        return self.other / self.below(path)

    @property
    def other_has_all(self) -> bool:
        """Whether nothing would be lost by an exchange, but what is ours."""
        return twin.holds(self.other, self.directory, self.changed)

    @property
    def alike(self) -> bool:
        return twin.alike(self.directory, self.other, self.changed)


def _pair(tree: SourceTree, journal: Mapping[str, Any]) -> _Pair:
    made = set(journal["directories_made"])
    name = os.path.commonpath([str(Path(path).parent) for path in journal["files"]] or [tree.package])
    while name in made:
        name = str(Path(name).parent)
    directory = tree.path / name
    other = directory.with_name(f".{directory.name}.aerie-{journal['transaction'][:12]}")
    return _Pair(name, directory, other, frozenset(path.removeprefix(f"{name}/") for path in journal["files"]))


def _untouched(tree: SourceTree, journal: Mapping[str, Any]) -> bool:
    return all(hash_of(tree.read(path)) == entry["before"] for path, entry in journal["files"].items())


def _emptied(files: Mapping[str, FileChange], journal: Mapping[str, Any]) -> list[str]:
    """The directories of ours that may be empty once the files that go are gone."""
    removed = [path for path, file in files.items() if file.wanted is None]
    return [one for one in _directories(journal["manifest_before"]) if any(path.startswith(f"{one}/") for path in removed)]


def _hash_at(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except FileNotFoundError:
        return None


def _place_of(error: OSError, place: Path) -> str:
    target = f" to {error.filename2}" if error.filename2 else ""
    return f"{error.filename or place}{target}: {error.strerror}"


def _manifest(tree: SourceTree, planned: Plan, journal: Mapping[str, Any]) -> dict[str, Any] | None:
    if not planned.sets:
        return None
    return {
        "schema": SCHEMA,
        "transaction": journal["transaction"],
        "tree": tree.identity,
        "package": tree.package,
        "version": tree.version.text,
        "commit": tree.commit,
        "when": journal["started"],
        "owner": journal["owner"],
        "sets": planned.applied_after,
        "directories": sorted(
            {one for one in [*_directories(journal["manifest_before"]), *journal["directories_made"]] if (tree.path / one).is_dir()}
        ),
        "files": {
            file.path: {
                "before": hash_of(file.original),
                "after": hash_of(file.wanted),
                "accepted": file.accepted,
                "hooks": list(file.hooks),
                "sets": [one.name for one in planned.sets if one.touches(file.path, tree.version)],
            }
            for file in planned.files
            if file.kind in (PATCHED, ADDED)
        },
    }


def _directories(manifest: Mapping[str, Any] | None) -> list[str]:
    """The directories in the tree that are there because of us."""
    return list(manifest["directories"]) if manifest else []


def _temporary(tree: SourceTree, path: str, transaction: str) -> Path:
    file = tree.file(path)
    return file.with_name(f".{file.name}.aerie-{transaction[:12]}")


def _attributes(path: Path) -> dict[str, int]:
    """Mode and owner of the file, or of one that would be made beside it."""
    if path.exists():
        found = path.stat()
        return {"mode": found.st_mode & 0o7777, "uid": found.st_uid, "gid": found.st_gid}
    directory = path.parent
    while not directory.exists():
        directory = directory.parent
    return {"mode": 0o644, "uid": directory.stat().st_uid, "gid": directory.stat().st_gid}


def _write(path: Path, data: bytes, attributes: Mapping[str, Any]) -> Path:
    with naming(path), path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        if (attributes["uid"], attributes["gid"]) != (os.geteuid(), os.getegid()):
            os.fchown(stream.fileno(), attributes["uid"], attributes["gid"])
        os.fchmod(stream.fileno(), attributes["mode"])
        os.fsync(stream.fileno())
    return path


def _put(tree: SourceTree, path: str, data: bytes | None, attributes: Mapping[str, Any], transaction: str) -> None:
    file = tree.file(path)
    if data is None:
        file.unlink(missing_ok=True)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(_temporary(tree, path, transaction), data, attributes).replace(file)
    if file.parent.is_dir():
        fsync_dir(file.parent)


def _drop_bytecode(file: Path) -> None:
    """Remove the file's compiled forms: Python trusts them by time and size, which a replaced file may share."""
    cached = Path(importlib.util.cache_from_source(str(file))).parent if file.suffix == ".py" else None
    if cached is None or not cached.is_dir():
        return
    for compiled in [*cached.glob(f"{file.stem}.*.pyc"), *cached.glob(f"{file.stem}.*.pyc.*")]:
        compiled.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        cached.rmdir()


def _drop_directories(top: Path, directories: Sequence[str]) -> None:
    """Remove those that are empty."""
    for directory in sorted(directories, key=len, reverse=True):
        try:
            (top / directory).rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue
        fsync_dir((top / directory).parent)


def run_verifiers(commands: Sequence[Sequence[str]], directory: Path) -> None:
    """Run each command (a list of words) in ``directory``; raise with the end of its output when one fails. They may leave no bytecode."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    for command in commands:
        try:
            done = subprocess.run(
                list(command),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=VERIFIER_SECONDS,
                check=False,
            )
        except OSError as error:
            raise AerieError(f"the verifier {' '.join(command)} could not be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise AerieError(f"the verifier {' '.join(command)} did not end within {VERIFIER_SECONDS} s") from error
        if done.returncode != 0:
            raise AerieError(
                f"the verifier {' '.join(command)} failed with exit status {done.returncode}:\n{tail(done.stdout.decode(errors='replace'))}"
            )
