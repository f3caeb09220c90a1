"""What is patched on a host, file by file: by whom, whether it can go back, and what isn't as it should be. Reads only.

Standard library only: this runs on hosts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_file
from ansible.module_utils.aerie.patching import hand_backups, patch_plan
from ansible.module_utils.aerie.patching.patch_checks import PACKAGE, tree_of
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import GIT, RECORD, SourceTree
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release as releases
from ansible.module_utils.aerie.words import listing

PATCHED, ADDED, PRISTINE, CHANGED, MISSING, UNKNOWN = "patched", "added", "pristine", "changed", "missing", "unknown"
KEPT, DAMAGED, LOST, NOT_KEPT, NONE = "kept", "damaged", "missing", "not kept", "none"
IN_GIT = "in git"
BACKUP = re.compile(rf"\.({hand_backups.MARKS})[-\w.]*|~$")
"""Names of copies that people and tools leave beside a file before they change it."""
GENERATED = ("_version.py",)
"""Written at the package's top by its build, and not published."""


def survey(paths: HostPaths, *, release_id: str | None = None) -> list[dict[str, Any]]:
    """Return what is known of each release that a link of ``paths`` points to, or only of ``release_id``."""
    links = linked_releases(paths)
    wanted = {release_id: links.get(release_id, [])} if release_id else links
    return [_release(paths, one, names) for one, names in wanted.items()]


def linked_releases(paths: HostPaths) -> dict[str, list[str]]:
    """Return the links (``current``, ``previous``, ``pins/<name>``) of each release that has any, in that order."""
    found: dict[str, list[str]] = {}
    for link in (paths.current, paths.previous, *pins(paths)):
        target = releases.linked(link)
        if target is not None:
            found.setdefault(target, []).append(str(link.relative_to(paths.root)))
    return found


def pins(paths: HostPaths) -> list[Path]:
    """Return the links below ``pins/``, each of which keeps a release."""
    directory = paths.root / "pins"
    return sorted(path for path in directory.iterdir() if path.is_symlink()) if directory.is_dir() else []


def _release(paths: HostPaths, release_id: str, links: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {"id": release_id, "links": links, "adopted": None, "verified": False, "sets": []}
    try:
        value = releases.read(paths, release_id)
        site_packages = tree_of(paths, value) if value else None
    except OSError as error:
        return facts | nothing_known(None, f"{error.filename}: {error.strerror}")
    if value is None or site_packages is None:
        return facts | nothing_known(None, f"release {release_id} isn't there, or only half made: run playbooks/patch.yml")
    facts |= {
        "adopted": value.get("adopted"),
        "verified": bool(value.get("verified")),
        "sets": [one["name"] for one in value.get("patch_sets") or ()],
    }
    found = tree(site_packages, paths.originals, version=str(value["sglang_version"]))
    try:
        adopted = releases.drift(paths, value)
    except AerieError as error:
        adopted = str(error)
    return facts | found | {"drift": found["drift"] + ([adopted] if adopted else [])}


def nothing_known(path: Path | None, problem: str) -> dict[str, Any]:
    """Return the facts of a tree of which only is known why nothing is."""
    return {
        "tree": str(path) if path else None,
        "version": None,
        "origin": None,
        "commit": None,
        "applied": [],
        "since": None,
        "store_same_filesystem": None,
        "files": [],
        "pristine": None,
        "backups_beside": [],
        "interrupted": None,
        "drift": [problem],
    }


def tree(path: Path, store_root: Path, *, package: str = PACKAGE, version: str | None = None) -> dict[str, Any]:
    """Return what is known of the package below ``path``: each file that was patched, or that isn't what was published."""
    try:
        source = SourceTree.open(path, package, version)
        store = PatchStore.beside(source, store_root)
        manifest = store.manifest()
        drift, interrupted = _interrupted(source, store)
        entries = manifest["files"] if manifest else {}
        files = [_file(source, store, name, entry, manifest or {}) for name, entry in sorted(entries.items())]
        strangers, pristine, backups = _strangers(source, entries)
        words = {one.path: one.words for name in entries for one in hand_backups.beside(source, name)}
    except AerieError as error:
        return nothing_known(path, str(error))
    except OSError as error:
        return nothing_known(path, f"{error.filename}: {error.strerror}")
    files += strangers
    return {
        "tree": str(path),
        "version": source.version.text,
        "origin": source.origin,
        "commit": source.commit,
        "applied": [one["name"] for one in manifest["sets"]] if manifest else [],
        "since": manifest["when"] if manifest else None,
        "store_same_filesystem": store.same_filesystem_as(path),
        "files": files,
        "pristine": pristine,
        "backups_beside": [{"path": one, "words": words.get(one)} for one in sorted({*backups, *words})],
        "interrupted": interrupted,
        "drift": drift + [f"{file['path']} {file['drift']}" for file in files if file["drift"]],
    }


def _interrupted(source: SourceTree, store: PatchStore) -> tuple[list[str], dict[str, Any] | None]:
    journal = store.journal()
    if journal is None:
        return [], None
    facts = {"started": journal["started"], "owner": dict(journal["owner"]), "files": sorted(journal["files"])}
    by = f"a run of {journal['owner'].get('user', 'somebody')} that began {journal['started']} was cut off"
    try:
        found = patch_plan.find_interrupted(source, store)
    except AerieError as error:
        return [f"{by}"], facts | {"outcome": "stuck", "next": str(error)}
    finished = found is not None and found.finished
    return [by], facts | {
        "outcome": "finished" if finished else "undone",
        "next": "the next run finds it finished and only tidies up"
        if finished
        else f"the next run puts its files back first ({len(facts['files'])})",
    }


def _file(source: SourceTree, store: PatchStore, name: str, entry: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a patched file's facts; everything that isn't as it was written is drift."""
    since = manifest["when"]
    sets = list(entry.get("sets") or (one["name"] for one in manifest["sets"]))
    found = patch_plan.hash_of(source.read(name))
    kept = _original(store, entry["before"])
    if kept == LOST and source.origin == GIT and source.recorded(name) == entry["before"]:
        kept = IN_GIT
    state, drift = (ADDED if entry["before"] is None else PATCHED), None
    if found is None:
        state, drift = MISSING, f"is missing since {since}"
    elif found == entry["after"]:
        if source.git and not entry["accepted"] and source.recorded(name) not in (None, entry["before"], entry["after"]):
            drift = f"is as it was written, but from another content than {source.words} has now"
        elif kept in (DAMAGED, LOST):
            drift = f"can't go back: its kept original (sha256 {entry['before']}) is {kept}: install the package anew"
    elif found == entry["before"]:
        state, drift = PRISTINE, f"was put back as published since {since}"
    else:
        state, drift = CHANGED, f"was changed by somebody (sha256 {found}) since {since}"
    return {
        "path": name,
        "state": state,
        "sets": sets,
        "hooks": list(entry["hooks"]),
        "original": {"sha256": entry["before"], "state": kept, "accepted": bool(entry["accepted"])},
        "drift": drift,
    }


def _original(store: PatchStore, sha256: str | None) -> str:
    if sha256 is None:
        return NONE
    path = store.object_path(sha256)
    try:
        return KEPT if sha256_file(path) == sha256 else DAMAGED
    except FileNotFoundError:
        return LOST


def _strangers(source: SourceTree, entries: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int | None, list[str]]:
    """Return the Python files that aren't as published without a patch set's doing, how many are, and copies left beside files.

    A checkout is a place to work in, so that its untracked files are nobody's concern; where nothing is known, only copies are.
    """
    published = {name for name in source.files if name.endswith(".py")}
    edited = set(source.edited())
    strangers, backups, seen = [], [], set()
    for directory, inside, names in os.walk(source.path / source.package):
        inside[:] = sorted(one for one in inside if one != "__pycache__")
        for one in sorted(names):
            path = Path(directory) / one
            name = path.relative_to(source.path).as_posix()
            seen.add(name)
            if name in entries:
                continue
            if name in published:
                if name in edited if source.git else sha256_file(path) != source.record[name]:
                    strangers.append(_stranger(name, CHANGED, "was changed by somebody: it is neither as published nor patched by Aerie"))
            elif BACKUP.search(one):
                backups.append(name)
            elif source.origin == RECORD and one.endswith(".py") and not (one in GENERATED and path.parent.parent == source.path):
                strangers.append(_stranger(name, UNKNOWN, "was added by somebody: neither published nor one of a patch set"))
    gone = sorted(published - seen - entries.keys())
    strangers += [_stranger(name, MISSING, "is missing, though it was published") for name in gone]
    bad = sum(one["state"] in (CHANGED, MISSING) for one in strangers)
    return strangers, len(published - entries.keys()) - bad if published else None, backups


def _stranger(name: str, state: str, drift: str) -> dict[str, Any]:
    return {"path": name, "state": state, "sets": [], "hooks": [], "original": {"sha256": None, "state": NOT_KEPT}, "drift": drift}


def describe_sets(file: Mapping[str, Any]) -> str:
    """Return a file's state in a few words."""
    by = listing(file["sets"])
    return {
        PATCHED: f"patched by {by}",
        ADDED: f"added by {by}",
        PRISTINE: "put back as published",
        CHANGED: "changed by somebody",
        MISSING: "missing",
        UNKNOWN: "added by somebody",
    }[file["state"]]
