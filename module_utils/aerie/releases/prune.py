"""What a root holds that nothing needs any more, and how it goes. Standard library only: this runs on hosts.

A plan is made from what is there (:func:`plan`) and carried out (:func:`apply`) so that a run that is killed leaves nothing that looks
whole: a directory's marker goes first, then the directory steps aside under a name that only this module knows, then its content goes.
Links are never followed, and what another file system is mounted in is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs, processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import fsync_dir, read_json
from ansible.module_utils.aerie.patching import patch_store
from ansible.module_utils.aerie.patching.patch_checks import tree_of
from ansible.module_utils.aerie.patching.patch_status import pins
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import environment as environments
from ansible.module_utils.aerie.releases import release as releases
from ansible.module_utils.aerie.words import listing

DAY = 86400
JOB_DAYS = 7
"""Directories of jobs that ended longer ago go."""
OBJECT_DAYS = 30
"""Kept files that nothing needs go when they are older: a run that was told to accept unknown content promised to keep it."""
WAITING_DAYS = 1
"""An environment or package that no release uses yet stays so long: it may have been installed for a release that comes next."""
DOOMED = ".pruned-"
INCOMING = ".incoming-"
ENVIRONMENT = re.compile(r"[a-z]+-[0-9a-f]{12}")
PACKAGE = re.compile(r"sglang-.+-[0-9a-f]{8}")
CACHE = re.compile(rf"({releases.ID.pattern})-.+")
OLD_LOG = re.compile(r"(server|supervisord)\.log\.(before|\d+)")


@dataclass(frozen=True)
class Item:
    """Something that goes: one path, or many files of one kind. ``marker`` is what makes a directory count as whole."""

    kind: str
    paths: tuple[Path, ...]
    why: str
    marker: str | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Kept:
    """Something that could be thought unneeded and stays, and why."""

    kind: str
    path: Path
    why: str


@dataclass(frozen=True)
class Plan:
    """All that goes, in the order in which it goes, what stays and why, and what a person should know."""

    items: tuple[Item, ...] = ()
    kept: tuple[Kept, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


def plan(paths: HostPaths, keep: int, protect: Collection[str] = (), now: float | None = None) -> Plan:
    """Return what goes when the ``keep`` newest verified releases stay, and those that are linked, protected or in use. Reads only."""
    if keep < 0:
        raise AerieError(f"sglang_release_keep is {keep}: give the number of newest verified releases to keep, 0 or more")
    if not _is_directory(paths.releases):
        return Plan(notes=(f"{paths.root} holds no releases: nothing is looked at, and nothing goes",))
    return _Planner(paths, keep, frozenset(protect), time.time() if now is None else now).plan()


def apply(paths: HostPaths, planned: Plan, between: Callable[[], None] = lambda: None) -> None:
    """Free everything of ``planned``, calling ``between`` before each; raise on the first that can't go, naming what went."""
    for done, item in enumerate(planned.items):
        between()
        try:
            for path in item.paths:
                _free(paths.root, path, item.marker)
        except OSError as error:
            went = f"{done} of {len(planned.items)} went"
            raise AerieError(f"{error.filename or item.paths[0]}: {error.strerror}: {went}; run again for the rest") from error


@contextlib.contextmanager
def alone(paths: HostPaths) -> Iterator[None]:
    """Keep runs that patch a tree away while it is told what they need."""
    if _is_directory(paths.originals):
        with patch_store.alone(paths.originals):
            yield
    else:
        yield


def _free(root: Path, path: Path, marker: str | None) -> None:
    inner = path.relative_to(root)
    if any((root / parent).is_symlink() for parent in [inner, *inner.parents][:-1]):
        raise AerieError(f"{path}: a symbolic link leads there by now: nothing of it was touched; run again")
    if not _is_directory(path):
        path.unlink(missing_ok=True)
        return
    if marker and (path / marker).exists():
        (path / marker).unlink()
        fsync_dir(path)
    aside = path
    if not path.name.startswith(DOOMED):
        aside = path.with_name(f"{DOOMED}{path.name}")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        fsync_dir(path.parent)
    shutil.rmtree(aside)


class _Planner:
    """Looks at one part of the root after the other; what a later part needs of an earlier one is kept in between."""

    def __init__(self, paths: HostPaths, keep: int, protect: frozenset[str], now: float) -> None:
        self.paths, self.keep, self.protect, self.now = paths, keep, protect, now
        self.items: list[Item] = []
        self.kept: list[Kept] = []
        self.notes: list[str] = []
        self.used = _Used.now()
        self.mounts = _mounts()
        self.running = [path.name for path in self.entries(paths.jobs, quiet=True) if jobs.is_running(path)]
        self.stay: dict[str, dict[str, Any]] = {}
        self.going: set[str] = set()

    def plan(self) -> Plan:
        for part in (
            self.paths.releases,
            self.paths.packages,
            self.paths.environments,
            self.paths.caches,
            self.paths.caches / ".aside",
            self.paths.jobs,
        ):
            self.leftovers(part)
        self.releases()
        self.caches()
        self.packages()
        self.environments()
        self.logs()
        self.jobs()
        self.originals()
        return Plan(tuple(_weighed(self.items)), tuple(self.kept), tuple(self.notes))

    # Looking

    def entries(self, directory: Path, *, quiet: bool = False) -> list[Path]:
        """Return what is in a part of the root; nothing where that part is a link, or isn't there."""
        if directory.is_symlink() and not quiet:
            self.notes.append(f"{directory} is a symbolic link: what it leads to is left alone")
        return sorted(directory.iterdir()) if _is_directory(directory) else []

    def directories(self, directory: Path) -> list[Path]:
        return [path for path in self.entries(directory) if _is_directory(path) and not path.name.startswith(DOOMED)]

    def goes(self, kind: str, path: Path, why: str, marker: str | None = None) -> bool:
        """Note that ``path`` goes, unless a process uses it or something is mounted in it; say whether it does."""
        user = self.used.by(path)
        mounted = [mount for mount in self.mounts if mount == path.resolve() or path.resolve() in mount.parents]
        if user:
            self.stays(kind, path, f"used by process {user.pid} ({user.title[:60]})")
        elif mounted:
            self.stays(kind, path, f"another file system is mounted at {mounted[0]}")
        else:
            self.items.append(Item(kind, (path,), why, marker))
        return not user and not mounted

    def stays(self, kind: str, path: Path, why: str) -> None:
        self.kept.append(Kept(kind, path, why))

    def job(self, name: str) -> str | None:
        """Return the running job that makes such things, if there is one."""
        return next((one for one in self.running if one.startswith(name)), None)

    def age_days(self, path: Path) -> float:
        return (self.now - path.lstat().st_mtime) / DAY

    # The parts, in the order in which they go

    def leftovers(self, directory: Path) -> None:
        for path in self.entries(directory, quiet=True):
            if path.name.startswith(DOOMED):
                self.goes("leftover", path, "an earlier prune was cut off")

    def releases(self) -> None:
        found = {path.name: path for path in self.directories(self.paths.releases) if releases.ID.fullmatch(path.name)}
        values = {name: value for name in found if (value := releases.read(self.paths, name)) is not None}
        reasons = self.reasons(values)
        for name in sorted(self.protect - found.keys()):
            self.notes.append(f"sglang_release_protect names {name}, which is not on this host")
        for name, path in found.items():
            if name in reasons:
                self.stays("release", path, listing(reasons[name]))
            elif name not in values and (job := self.job("sglang_release")):
                self.stays("release", path, f"the job {job} may be making it")
            else:
                verified = values.get(name, {}).get("verified")
                why = "half made" if name not in values else f"not one of the {self.keep} newest" if verified else "was never verified"
                if self.goes("release", path, why, releases.RELEASE):
                    self.going.add(name)
        self.stay = {name: values.get(name, {}) for name in found if name not in self.going}
        for path in self.directories(self.paths.releases):
            if path.name.startswith(INCOMING) and not self.job("sglang_release"):
                self.goes("leftover", path, "what a killed run was making")

    def reasons(self, values: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
        """Return why a release stays, for each that does."""
        found: dict[str, list[str]] = {}
        for link in (self.paths.current, self.paths.previous, *pins(self.paths)):
            if (target := releases.linked(link)) is not None:
                found.setdefault(target, []).append(str(link.relative_to(self.paths.root)))
        for name in self.protect:
            found.setdefault(name, []).append("in sglang_release_protect")
        for path in self.entries(self.paths.instances):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                record = read_json(path / "instance.json")
                if record.get("release") and record.get("state") in ("starting", "ready"):
                    found.setdefault(record["release"], []).append(f"instance {path.name} was started with it")
        newest = sorted((name for name, value in values.items() if value.get("verified")), key=lambda name: values[name]["verified_at"])
        for name in newest[::-1][: self.keep]:
            found.setdefault(name, []).append(f"one of the {self.keep} newest")
        return found

    def caches(self) -> None:
        for path in self.directories(self.paths.caches):
            match = CACHE.fullmatch(path.name)
            if match and match[1] not in self.stay:
                self.goes("cache", path, "its release is gone" if match[1] not in self.going else "its release goes")
        for path in self.directories(self.paths.caches / ".aside"):
            self.goes("cache", path, "was set aside")

    def packages(self) -> None:
        needed = self.needed("package")
        for path in self.directories(self.paths.packages):
            if path.name.startswith(INCOMING):
                if not self.job("sglang_environment"):
                    self.goes("leftover", path, "what a killed run was fetching")
            elif PACKAGE.fullmatch(path.name) and path.name not in needed:
                self.unneeded("package", path, path / environments.PACKAGE_MARKER)

    def environments(self) -> None:
        needed = self.needed("environment")
        found = [path for path in self.directories(self.paths.environments) if ENVIRONMENT.fullmatch(path.name)]
        supervisors = [path for path in found if path.name.startswith("supervisor-") and environments.is_whole(path)]
        # The same one that a server would be started with.
        newest = {supervisors[-1]} if supervisors else set()
        for path in found:
            if path.name not in needed and path not in newest:
                self.unneeded("environment", path, path / environments.MARKER)

    def needed(self, part: str) -> set[str]:
        """Return the names of the environments or packages of the releases that stay."""
        return {Path(value[part]["path"]).name for value in self.stay.values() if (value.get(part) or {}).get("path")}

    def unneeded(self, kind: str, path: Path, marker: Path) -> None:
        unread = [name for name, value in self.stay.items() if not value]
        if job := self.job("sglang_environment") or self.job("sglang_release") or self.job("models"):
            self.stays(kind, path, f"the job {job} may be making or using it")
        elif unread:
            self.stays(kind, path, f"what release {unread[0]} uses can't be told: its {releases.RELEASE} can't be read")
        elif not marker.exists():
            self.goes(kind, path, "half made")
        elif self.age_days(marker) < WAITING_DAYS and not path.name.startswith("supervisor-"):
            self.stays(kind, path, "made less than a day ago, maybe for a release that comes next")
        else:
            self.goes(kind, path, "no release uses it", marker.name)

    def logs(self) -> None:
        for directory in (*self.directories(self.paths.instances), self.paths.supervisor):
            for path in self.entries(directory):
                if OLD_LOG.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    self.items.append(Item("log", (path,), "another log has taken its place"))

    def jobs(self) -> None:
        for path in self.directories(self.paths.jobs):
            if path.name not in self.running and self.age_days(path) > JOB_DAYS:
                self.goes("job", path, f"ended more than {JOB_DAYS} days ago", jobs.RESULT)

    def originals(self) -> None:
        """Manifests of trees that are gone or go, and what is kept for nothing."""
        store = self.paths.originals
        if store.is_symlink():
            self.notes.append(f"{store} is a symbolic link: what it leads to is left alone")
        if not _is_directory(store):
            return
        inventory = patch_store.inventory(store)
        if inventory.problems:
            self.notes.extend(f"{problem}: as long as this is so, nothing that is kept goes" for problem in inventory.problems)
            return
        forgotten = set()
        for one in inventory.manifests:
            name = self.release_of(Path(one.tree))
            if name is not None and name not in self.stay:
                forgotten.add(one.key)
                kind = "journal" if one.journal else "manifest"
                self.items.append(Item(kind, (one.path,), f"release {name} goes" if name in self.going else f"release {name} is gone"))
            elif not one.tree_exists:
                self.stays("manifest", one.path, f"{one.tree} isn't there now, which Aerie did not remove")
        self.objects(inventory, forgotten)
        if inventory.leftovers:
            self.items.append(Item("leftover", tuple(inventory.leftovers), "what a killed run was writing"))

    def objects(self, inventory: patch_store.Inventory, forgotten: set[str]) -> None:
        idle = inventory.unneeded(forgotten)
        old = [one for one in idle if (self.now - one.modified) / DAY > OBJECT_DAYS]
        young = len(idle) - len(old)
        if old:
            published = self.published()
            if published is None:
                return
            old = [one for one in old if one.sha256 not in published]
        if old:
            self.items.append(Item("original", tuple(one.path for one in old), f"needed by nothing, older than {OBJECT_DAYS} days"))
        if young:
            self.stays(
                "original",
                self.paths.originals / patch_store.OBJECTS,
                f"{young} files are needed by nothing, for less than {OBJECT_DAYS} days",
            )

    def published(self) -> set[str] | None:
        """Return the hashes of all files that the trees which stay were published with; None where one can't be read."""
        found: set[str] = set()
        for name, value in self.stay.items():
            try:
                site_packages = tree_of(self.paths, value)
                if site_packages is not None and value.get("adopted") != "tree":
                    found.update(SourceTree.open(site_packages, "sglang", str(value["sglang_version"])).record.values())
            except AerieError as error:
                self.notes.append(f"release {name}: {error}: as long as this is so, no kept file goes")
                return None
        return found

    def release_of(self, tree: Path) -> str | None:
        """Return the id of the release that ``tree`` is in, or None where it is somewhere else."""
        home = self.paths.releases.resolve()
        return tree.relative_to(home).parts[0] if tree.is_relative_to(home) and tree != home else None


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _mounts() -> list[Path]:
    """Return where file systems are mounted. Source: proc(5), /proc/pid/mountinfo; the fifth field, blanks as octal escapes."""
    try:
        rows = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    return [Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), row.split()[4])) for row in rows]


@dataclass(frozen=True)
class _Used:
    """The processes of the host, each with all the paths that it is known to use."""

    users: tuple[tuple[processes.Process, str], ...]

    @classmethod
    def now(cls) -> _Used:
        others = (process for process in processes.scan() if process.pid not in (os.getpid(), os.getppid()))
        return cls(tuple((one, "\0".join((*one.argv, *one.environment, *_open_paths(one.pid), ""))) for one in others))

    def by(self, directory: Path) -> processes.Process | None:
        """Return a process that uses something in ``directory``, as far as our rights let us see."""
        names = {f"{name}{end}" for name in (str(directory), str(directory.resolve())) for end in ("/", "\0", ":")}
        return next((process for process, text in self.users if any(name in text for name in names)), None)


def _open_paths(pid: int) -> Iterator[str]:
    """Yield a process's working directory, program and mapped files: SGLang's schedulers hide their arguments and environment."""
    for name in ("cwd", "exe"):
        if (path := processes.link(pid, name)) is not None:
            yield str(path)
    yield from processes.mapped_files(pid)


def _weighed(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items with what each frees on the disk: a file with several names counts where the last of them goes."""
    names: dict[tuple[int, int], int] = {}
    for item in items:
        size = 0
        for path in item.paths:
            for found in _walk(path):
                facts = found.lstat()
                inode = (facts.st_dev, facts.st_ino)
                names[inode] = names.get(inode, 0) + 1
                if stat.S_ISDIR(facts.st_mode) or names[inode] == facts.st_nlink:
                    size += facts.st_blocks * 512
        yield replace(item, bytes=size)


def _walk(path: Path) -> Iterator[Path]:
    yield path
    if _is_directory(path):
        for directory, inside, names in os.walk(path):
            yield from (Path(directory) / name for name in (*inside, *names))


def as_result(planned: Plan, paths: HostPaths) -> dict[str, Any]:
    """Return the plan as plain values, with paths as seen from the root."""

    def shown(path: Path) -> str:
        return str(path.relative_to(paths.root))

    return {
        "freed_bytes": planned.bytes,
        "removed": [
            {"kind": item.kind, "path": shown(item.paths[0]), "files": len(item.paths), "bytes": item.bytes, "why": item.why}
            for item in planned.items
        ],
        "kept": [{"kind": one.kind, "path": shown(one.path), "why": one.why} for one in planned.kept],
        "notes": list(planned.notes),
    }
