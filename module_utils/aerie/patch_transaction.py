"""Patch sets applied to a tree: all files or none, from their originals, whatever happens in between. Standard library only.

The order that makes it safe: originals are kept; a journal says what will be replaced; new files are written beside the old ones;
they are renamed over them and verified; the manifest is written; the journal goes. Whoever finds a journal puts back what it names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import fsync_dir
from ansible.module_utils.aerie.patch_plan import ADDED, PATCHED, FileChange, Interrupted, Plan, find_interrupted, hash_of
from ansible.module_utils.aerie.patch_store import PatchStore
from ansible.module_utils.aerie.source_tree import SourceTree
from ansible.module_utils.aerie.words import tail

SCHEMA = "aerie-patches/1"
VERIFIER_SECONDS = 600

Step = Callable[[str], None]
"""Called after each durable step of a transaction with its name; tests kill the process in it."""


def _unwatched(_name: str) -> None:
    pass


def settle(tree: SourceTree, store: PatchStore, interrupted: Interrupted, step: Step = _unwatched) -> None:
    """Bring an interrupted transaction to its end: undo it, unless only its last step was missing. Can itself be interrupted."""
    journal = interrupted.journal
    if not interrupted.finished:
        for path, data in interrupted.restores.items():
            entry = journal["files"][path]
            _temporary(tree, path, journal["transaction"]).unlink(missing_ok=True)
            if hash_of(tree.read(path)) != entry["before"]:
                _put(tree, path, data, entry, journal["transaction"])
                step(f"put back {path}")
            _drop_bytecode(tree.file(path))
        _drop_directories(tree, journal["directories_made"])
        store.write_manifest(journal["manifest_before"])
        step("manifest put back")
    for path in journal["files"]:
        _temporary(tree, path, journal["transaction"]).unlink(missing_ok=True)
    store.write_journal(None)
    step("journal removed")


def apply(
    tree: SourceTree,
    store: PatchStore,
    planned: Plan,
    owner: Mapping[str, str] | None = None,
    verify: Callable[[], None] = lambda: None,
    step: Step = _unwatched,
) -> None:
    """Carry ``planned`` out: settle what was interrupted, replace the files, ``verify``; on any failure put everything back and raise."""
    if planned.interrupted:
        settle(tree, store, planned.interrupted, step)
    if not planned.changed_files and planned.applied_before == planned.applied_after:
        return
    transaction = uuid.uuid4().hex
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    files = {file.path: file for file in planned.changed_files}
    try:
        for file in files.values():
            for data in (file.original, file.found):
                if data is not None:
                    store.put(data)
        step("originals kept")
        journal = {
            "schema": SCHEMA,
            "transaction": transaction,
            "tree": tree.identity,
            "started": started,
            "owner": dict(owner or {}),
            "files": {
                path: {"before": hash_of(file.found), "after": hash_of(file.wanted), **_attributes(tree.file(path))}
                for path, file in files.items()
            },
            # Asked only now: what an interrupted run had made is gone.
            "directories_made": sorted(
                {one for path, file in files.items() if file.wanted is not None for one in tree.missing_directories(path)}, key=len
            ),
            "manifest_before": planned.manifest_before,
        }
        store.write_journal(journal)
    except OSError as error:
        raise AerieError(f"{error.filename or store.root}: {error.strerror}: nothing was changed in {tree.path}") from error
    step("journal written")
    try:
        _replace_all(tree, files, journal, step)
        verify()
        store.write_manifest(_manifest(tree, planned, journal))
        step("manifest written")
    except (AerieError, OSError) as error:
        reason = f"{error.filename or tree.path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        undo = find_interrupted(tree, store)
        if undo:
            settle(tree, store, undo)
        raise AerieError(f"{reason}\neverything in {tree.path} was put back as it was") from error
    store.write_journal(None)
    step("journal removed")


def _replace_all(tree: SourceTree, files: Mapping[str, FileChange], journal: Mapping[str, Any], step: Step) -> None:
    for directory in journal["directories_made"]:
        (tree.path / directory).mkdir(exist_ok=True)
        fsync_dir((tree.path / directory).parent)
    step("directories made")
    # All new files are on the disk before the first old one goes: a full disk or a missing permission shows here.
    for path, file in files.items():
        if file.wanted is not None:
            _write_temporary(tree, path, file.wanted, journal["files"][path], journal["transaction"])
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
    removed = [path for path, file in files.items() if file.wanted is None]
    made = _directories(journal["manifest_before"])
    _drop_directories(tree, [one for one in made if any(path.startswith(f"{one}/") for path in removed)])
    for path, file in files.items():
        if hash_of(tree.read(path)) != hash_of(file.wanted):
            raise AerieError(f"{path} does not read back as it was written: is the disk failing?")


def _manifest(tree: SourceTree, planned: Plan, journal: Mapping[str, Any]) -> dict[str, Any] | None:
    if not planned.sets:
        return None
    return {
        "schema": SCHEMA,
        "transaction": journal["transaction"],
        "tree": tree.identity,
        "package": tree.package,
        "version": tree.version.text,
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


def _write_temporary(tree: SourceTree, path: str, data: bytes, attributes: Mapping[str, Any], transaction: str) -> Path:
    temporary = _temporary(tree, path, transaction)
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        if (attributes["uid"], attributes["gid"]) != (os.geteuid(), os.getegid()):
            os.fchown(stream.fileno(), attributes["uid"], attributes["gid"])
        os.fchmod(stream.fileno(), attributes["mode"])
        os.fsync(stream.fileno())
    return temporary


def _put(tree: SourceTree, path: str, data: bytes | None, attributes: Mapping[str, Any], transaction: str) -> None:
    file = tree.file(path)
    if data is None:
        file.unlink(missing_ok=True)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_temporary(tree, path, data, attributes, transaction).replace(file)
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


def _drop_directories(tree: SourceTree, directories: Sequence[str]) -> None:
    for directory in sorted(directories, key=len, reverse=True):
        with contextlib.suppress(OSError):
            (tree.path / directory).rmdir()


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
