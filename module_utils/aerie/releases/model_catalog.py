"""The catalog of models: which sources there are, what each needs, and where a model lies on a host. Standard library only.

Pure: what is wrong with a catalog is told on the controller before any host is touched, and again by the module that brings models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.words import listing, near

REQUIRED = {
    "host": ("path",),
    "controller": ("path",),
    "rsync": ("from",),
    "hub": ("repository", "revision"),
}
OPTIONAL = {
    "host": ("weights", "identity"),
    "controller": ("weights", "identity"),
    "rsync": ("path", "weights", "identity", "port", "identity_file", "host_key"),
    "hub": ("path", "weights", "identity", "exclude"),
}
SOURCES = tuple(REQUIRED)
FETCHED = ("rsync", "hub")
KEYS = tuple(dict.fromkeys(("source", *(key for keys in (*REQUIRED.values(), *OPTIONAL.values()) for key in keys))))
PARTIAL = ".partial"
RESERVED = ("identities",)

COMMIT = re.compile(r"[0-9a-f]{40}")
IDENTITY = re.compile(r"[0-9a-f]{64}")
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
HOST_KEY = re.compile(r"(?:ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/]+=*(?: .*)?")
_FROM = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):(?P<path>/[^\0\n]*)"
)

Resolve = Callable[[str, str], str | None]
"""Asks the hub which commit a branch or tag of a repository is now; None where that can't be known from here."""


@dataclass(frozen=True)
class Place:
    """A directory on another host, as ``from`` names it."""

    user: str | None
    host: str
    path: str

    @classmethod
    def of(cls, text: object) -> Place | None:
        """Return what ``user@host:/path`` names, or None when it is nothing of that kind."""
        match = _FROM.fullmatch(text) if isinstance(text, str) else None
        return cls(match["user"], match["host"].strip("[]"), match["path"].rstrip("/") or "/") if match else None


@dataclass(frozen=True)
class Placed:
    """Where a model is on a host; ``weights`` says whether it must have some, ``brought`` whether this project puts it there."""

    path: Path
    weights: bool
    brought: bool


def destination(paths: HostPaths, name: str, entry: Mapping[str, Any]) -> Path:
    """Return where a model is, or will be, on a host."""
    if entry["source"] == "host":
        return Path(entry["path"])
    if entry["source"] == "controller":
        return paths.models / Path(entry["path"]).name
    return Path(entry["path"]) if entry.get("path") else paths.models / name


def placed(root: Path | None, catalog: Mapping[str, Any]) -> list[Placed]:
    """Return where the models of a catalog without problems are; those below ``aerie_root`` only where ``root`` says where that is."""
    nowhere = Path()
    places = (
        Placed(destination(HostPaths(root or nowhere), name, entry), entry.get("weights", True) is not False, entry["source"] != "host")
        for name, entry in catalog.items()
    )
    return [place for place in places if place.path.is_absolute()]


def problems(catalog: Mapping[str, Any], resolve: Resolve | None = None) -> Iterator[str]:
    """Yield what is wrong with a catalog, each beginning with the model's name."""
    for name, entry in catalog.items():
        if not isinstance(entry, Mapping):
            yield f"{name} is {entry!r}: it must be a mapping with source ({listing(SOURCES, last='or')}) and what that needs, such as path"
            continue
        yield from _entry_problems(str(name), entry, resolve)
    yield from _collisions(catalog)


def _entry_problems(name: str, entry: Mapping[str, Any], resolve: Resolve | None) -> Iterator[str]:
    source = entry.get("source")
    if source is None:
        yield f"{name}.source is missing: {listing(SOURCES, last='or')}"
    elif source not in SOURCES:
        yield f"{name}.source is {source!r}: it must be {listing(SOURCES, last='or')}{near(str(source), SOURCES)}"
    known = (*REQUIRED[source], "source", *OPTIONAL[source]) if source in SOURCES else KEYS
    for key in entry:
        if key in KEYS and key not in known:
            users = listing((one for one in SOURCES if key in REQUIRED[one] or key in OPTIONAL[one]), last="or")
            yield f"{name}.{key}: source {source} does not take it, {users} does"
        elif key not in known:
            yield f"{name}.{key}: no such setting{near(str(key), known)}"
    for key in REQUIRED[source] if source in SOURCES else ():
        if entry.get(key) is None:
            yield f"{name}.{key} is missing"
    yield from _path_problems(f"{name}.path", entry.get("path"), fetched=source in FETCHED)
    weights = entry.get("weights")
    if weights is not None and not isinstance(weights, bool):
        yield f"{name}.weights is {weights!r}: it must be true or false"
    identity = entry.get("identity")
    if identity is not None and not (isinstance(identity, str) and IDENTITY.fullmatch(identity)):
        yield (
            f"{name}.identity is {identity!r}: it must be 64 hexadecimal digits in small letters, as playbooks/capture.yml writes them "
            "(docs/reference/models.md); leave it out to take any files"
        )
    if source in FETCHED and entry.get("path") is None and (not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name in RESERVED):
        yield f"{name}: it becomes the name of the model's directory, so give it path, or a name of letters, digits and ._- only"
    if source in FETCHED and entry.get("path") is None and name.endswith(PARTIAL):
        yield f"{name}: directories with names in {PARTIAL} are those of models that are not whole: rename it"
    if source == "rsync":
        yield from _rsync_problems(name, entry)
    elif source == "hub":
        yield from _hub_problems(name, entry, resolve)


def _path_problems(where: str, path: Any, *, fetched: bool) -> Iterator[str]:
    if path is None:
        return
    if not isinstance(path, str):
        yield f"{where} is {path!r}: it must be a path"
    elif not path.startswith("/"):
        yield f"{where} is {path!r}: it must be an absolute path"
    elif fetched and (path != str(Path(path)) or ".." in Path(path).parts or len(Path(path).parts) < 3):
        yield f"{where} is {path!r}: the model is put there, so it must be a directory of its own in its shortest spelling"
    elif fetched and path.endswith(PARTIAL):
        yield f"{where} is {path!r}: directories with names in {PARTIAL} are those of models that are not whole: rename it"


def _rsync_problems(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    place = entry.get("from")
    if place is not None and Place.of(place) is None:
        yield f"{name}.from is {place!r}: it must be user@host:/directory, or an inventory host's name with one, gpu-01:/srv/models/x"
    port = entry.get("port")
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535):
        yield f"{name}.port is {port!r}: it must be a number from 1 to 65535"
    private = entry.get("identity_file")
    if private is not None and not str(private).startswith("/"):
        yield f"{name}.identity_file is {private!r}: it must be the absolute path of a private key on the host that fetches"
    key = entry.get("host_key")
    if key is not None and not HOST_KEY.fullmatch(str(key)):
        yield f"{name}.host_key is {str(key)[:40]!r}: it must be a line as in ssh_host_ed25519_key.pub, such as 'ssh-ed25519 AAAA…'"


def _hub_problems(name: str, entry: Mapping[str, Any], resolve: Resolve | None) -> Iterator[str]:
    repository, revision, exclude = entry.get("repository"), entry.get("revision"), entry.get("exclude")
    named = isinstance(repository, str) and REPOSITORY.fullmatch(repository)
    if repository is not None and not named:
        yield f"{name}.repository is {repository!r}: it must be owner/name as the hub has it"
    if revision is not None and not COMMIT.fullmatch(str(revision)):
        commit = resolve(str(repository), str(revision)) if resolve and named else None
        cure = f"it is {commit} now: write that" if commit else "write the commit that the repository's page of files shows for it"
        yield f"{name}.revision is {revision!r}: a branch or tag may move, so it must be a commit of 40 hexadecimal digits; {cure}"
    if exclude is not None and not (isinstance(exclude, list) and all(isinstance(one, str) and one for one in exclude)):
        yield f"{name}.exclude is {exclude!r}: it must be a list of file names or patterns, such as ['consolidated*.safetensors']"


def _collisions(catalog: Mapping[str, Any]) -> Iterator[str]:
    """Two different models never share a directory on the host."""
    paths = HostPaths(Path("/"))
    taken: dict[Path, tuple[str, tuple[Any, ...]]] = {}
    for name, entry in catalog.items():
        if not isinstance(entry, Mapping) or entry.get("source") not in ("controller", *FETCHED):
            continue
        mine = tuple(entry.get(key) for key in REQUIRED[entry["source"]])
        if not all(isinstance(one, str) for one in mine):
            continue
        other, theirs = taken.setdefault(destination(paths, str(name), entry), (str(name), mine))
        if theirs != mine:
            yield f"{name}: {mine[0]} and {theirs[0]} ({other}) would go to the same directory on the host: rename one"
