"""NVIDIA's packages on a host: driver, CUDA toolkit and NCCL at wanted versions, and nothing else moved. Standard library only.

A run reads, plans in a stage (:mod:`apt`) and refuses here; :mod:`packages_apply` then writes. What was brought is kept in a manifest, so
that it can be taken away again.
"""

from __future__ import annotations

import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import read_json, write_json
from ansible.module_utils.aerie.host import apt, apt_key, dpkg
from ansible.module_utils.aerie.host.apt import KEYRING, PREFERENCES, SOURCES, Repository, RepositoryUnavailable, Stage
from ansible.module_utils.aerie.host.dpkg import Move, Package

MANIFEST = "nvidia_packages.json"
PERSISTENCE_UNIT = "nvidia-persistenced.service"
PERSISTENCE_PACKAGE = "nvidia-persistenced"
PIN_PRIORITY, DOWNGRADE_PRIORITY = 995, 1001

DRIVER_PIECES = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "libxnvctrl*",
    "libegl-nvidia*",
    "libgl*-nvidia*",
    "firmware-nvidia-*",
    "xserver-xorg-video-nvidia*",
    "cuda-drivers*",
)
LOWEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
"""Oldest driver that runs programs of a CUDA major version. Source: CUDA release notes, minor version compatibility."""


@dataclass(frozen=True)
class Want:
    """A package that shall be there."""

    name: str
    version: str | None  # exact, or how it begins; None: any that is there, else the newest
    setting: str  # the variable that wants it, for messages
    pieces: tuple[str, ...] = ()  # patterns of packages that belong to it and move with it
    same_version: bool = False  # its pieces have its upstream version
    cuda: str | None = None  # "13.0": of versions built for several, this one's
    hold: bool = True


@dataclass(frozen=True)
class Request:
    """What a host shall have. Repository's values that are None come from `repositories`, by distribution."""

    root: Path
    repositories: Mapping[str, Mapping[str, Any]]
    url: str | None = None
    suite: str = "/"
    components: tuple[str, ...] = ()
    key_url: str | None = None
    key: bytes | None = None
    fingerprints: tuple[str, ...] = ()
    manage_driver: bool = True
    driver_package: str = "nvidia-open"
    driver_version: str | None = None
    toolkit_package: str | None = "cuda-toolkit-13-0"
    toolkit_version: str | None = None
    nccl: bool = True
    nccl_version: str | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    headers: bool = True
    persistence: bool = True
    hold: bool = True
    allow_downgrade: bool = False
    may_move: tuple[str, ...] = ()
    locked_seconds: int = 300

    @property
    def cuda(self) -> str | None:
        found = re.search(r"-(\d+)-(\d+)$", self.toolkit_package or "")
        return f"{found.group(1)}.{found.group(2)}" if found else None

    def wants(self, kernel: str) -> list[Want]:
        wants = []
        if self.manage_driver:
            if self.headers:
                wants.append(Want(f"linux-headers-{kernel}", None, "nvidia_cuda_headers", hold=False))
            wants.append(Want(self.driver_package, self.driver_version, "nvidia_cuda_driver_version", DRIVER_PIECES, same_version=True))
            if self.persistence:
                wants.append(Want(PERSISTENCE_PACKAGE, None, "nvidia_cuda_persistence"))
        if self.toolkit_package:
            suffix = (self.cuda or "").replace(".", "-")
            pieces = (
                f"*-{suffix}",
                f"*-{suffix}-config-common",
                f"cuda-toolkit-{suffix.partition('-')[0]}-config-common",
                "cuda-toolkit-config-common",
            )
            wants.append(Want(self.toolkit_package, self.toolkit_version, "nvidia_cuda_toolkit_version", pieces if suffix else ()))
        if self.nccl:
            wants += [Want(name, self.nccl_version, "nvidia_cuda_nccl_version", cuda=self.cuda) for name in ("libnccl2", "libnccl-dev")]
        named = {want.name for want in wants}
        return wants + [Want(name, version, "nvidia_cuda_packages") for name, version in self.packages.items() if name not in named]


@dataclass(frozen=True)
class Manifest:
    """What we brought to a host: packages that were not there, directories, units that we enabled, holds that we set."""

    packages: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        try:
            return cls(**{name: tuple(values) for name, values in read_json(path).items()})
        except FileNotFoundError:
            return cls()
        except (TypeError, ValueError, AttributeError) as error:
            raise AerieError(f"{path}: not the list of what this project brought ({error}): restore it or remove it") from error

    def write(self, path: Path) -> None:
        write_json(path, {name: sorted(getattr(self, name)) for name in ("packages", "directories", "units", "holds")})

    def with_added(self, **more: Iterable[str]) -> Manifest:
        known = {name: getattr(self, name) for name in ("packages", "directories", "units", "holds")}
        return Manifest(**(known | {name: tuple(sorted({*known[name], *values})) for name, values in more.items()}))


@dataclass(frozen=True)
class Driver:
    """The NVIDIA kernel driver: the version that is loaded, and the one of the package that is (or will be) installed."""

    managed: bool
    loaded: str | None
    installed: str | None

    @property
    def reboot_reason(self) -> str | None:
        """Why the host must boot to be what its packages say."""
        if not self.managed or self.loaded == self.installed:
            return None
        if self.installed is None:
            return f"the NVIDIA driver {self.loaded} is loaded, and no longer installed"
        return f"the NVIDIA driver {self.installed} is installed, and {f'{self.loaded} is' if self.loaded else 'none is'} loaded"

    def describe(self) -> dict[str, Any]:
        reason = self.reboot_reason
        return {
            "driver": {"managed": self.managed, "loaded": self.loaded, "installed": self.installed},
            "reboot_required": reason is not None,
            "reboot_reason": reason,
        }


# -- reading


def loaded_driver(root: Path = Path("/")) -> str | None:
    """Return the version of the driver that the kernel runs. Source: nv-procfs.c of NVIDIA's open-gpu-kernel-modules."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"(?:for \S+|Kernel Module)\s+([\d.]+)", text)
    return found.group(1) if found else None


def running_kernel(root: Path = Path("/")) -> str:
    """Return the release of the running kernel, which its headers' package is named after: 6.8.0-88-generic, 6.1.0-41-amd64."""
    return (root / "proc/sys/kernel/osrelease").read_text().strip()


def distribution(root: Path = Path("/")) -> str:
    """Return the distribution as NVIDIA's repositories are named after it: ubuntu2404, debian12."""
    values = {}
    for line in (root / "etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        values[name] = value.strip().strip("'\"")
    return f"{values.get('ID', 'linux')}{values.get('VERSION_ID', '').replace('.', '')}"


def repository_of(request: Request, system: str) -> tuple[str, str, tuple[str, ...]]:
    """Return address, address of the key and fingerprints that the key may have."""
    known = request.repositories.get(system, {})
    url = request.url or known.get("url")
    if not url:
        raise AerieError(
            f"nvidia_cuda_repositories has none for {system} (it has {', '.join(request.repositories) or 'none'}): set "
            "nvidia_cuda_repository_url and nvidia_cuda_repository_key_fingerprint"
        )
    url = f"{url.rstrip('/')}/"
    fingerprints = tuple(re.sub(r"\s", "", print_).upper() for print_ in (request.fingerprints or known.get("key_fingerprints", ())))
    if not fingerprints:
        raise AerieError(f"{url}: no fingerprint is pinned for its key: set nvidia_cuda_repository_key_fingerprint")
    key_name = known.get("key_url", "").rpartition("/")[2]
    key_url = request.key_url or (f"{url}{key_name}" if request.url and key_name else known.get("key_url", ""))
    return url, key_url, fingerprints


def fetch_key(request: Request, key_url: str, fingerprints: tuple[str, ...]) -> bytes:
    """Return the packets of the repository's key, which has a pinned fingerprint; one that the host has is not fetched again."""
    if request.key is not None:
        where, data = "nvidia_cuda_repository_key_file", request.key
    elif KEYRING.exists() and set(apt.keyring_fingerprints(KEYRING)) <= set(fingerprints) and apt.keyring_fingerprints(KEYRING):
        return KEYRING.read_bytes()
    elif key_url:
        where = key_url
        try:
            with urllib.request.urlopen(key_url if "://" in key_url else f"file://{key_url}", timeout=30) as answer:
                data = answer.read()
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise RepositoryUnavailable(f"{key_url}: can't fetch the repository's key: {reason}; nothing was changed") from error
    else:
        raise AerieError("no key of the repository: set nvidia_cuda_repository_key_url or nvidia_cuda_repository_key_file")
    packets = apt_key.binary(data, where)
    found = apt_key.fingerprints(packets, where)
    if not set(found) <= set(fingerprints):
        raise AerieError(
            f"{where}: the key's fingerprint is {', '.join(found)}, and nvidia_cuda_repository_key_fingerprint allows "
            f"{', '.join(fingerprints)}; nothing was changed. Find out who signed this repository before you change the setting."
        )
    return packets


# -- planning


def belongs(name: str, version: str, want: Want, version_of_want: str) -> bool:
    """Say whether a package is the wanted one or a piece of it."""
    if name == want.name:
        return True
    if not any(fnmatchcase(name, pattern) for pattern in want.pieces):
        return False
    return not want.same_version or dpkg.upstream(version) == dpkg.upstream(version_of_want)


def choose(want: Want, installed: str | None, offers: list[tuple[str, str]], url: str) -> str:
    """Return the version to have. Raise when none that is offered will do."""
    if installed is not None and (want.version is None or dpkg.matches(installed, want.version)):
        return installed
    ours = [version for version, source in offers if source.startswith(url.rstrip("/"))]
    versions = ours or [version for version, _ in offers]
    fitting = [version for version in versions if want.version is None or dpkg.matches(version, want.version)]
    if want.cuda and want.version not in fitting:
        built = [version for version in fitting if "+cuda" in version]
        same = [version for version in built if version.endswith(f"+cuda{want.cuda}")]
        fitting = (
            same
            or [version for version in built if f"+cuda{want.cuda.partition('.')[0]}." in version]
            or [v for v in fitting if v not in built]
        )
    if fitting:
        newest = fitting[0]
        for version in fitting[1:]:
            newest = version if dpkg.compare(version, newest) > 0 else newest
        return newest
    if want.name.startswith("linux-headers-"):
        raise AerieError(
            f"{want.setting}: no source of the host offers {want.name}, which the driver's kernel module is built with: boot the "
            "distribution's newest kernel, add a source that has the package, or set nvidia_cuda_headers to false where headers are there "
            "by other means"
        )
    asked = f" {want.version}" if want.version else f" for CUDA {want.cuda}" if want.cuda and versions else ""
    offered = f"; offered are {', '.join(versions[:12])}" if versions else ""
    raise AerieError(f"{want.setting}: no source of the host offers {want.name}{asked}{offered}")


def pins(wants: Iterable[Want], versions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that apt shall prefer, by patterns of packages."""
    found = {}
    for want in wants:
        if want.hold and want.name in versions:
            if want.same_version and want.pieces:
                found[" ".join(want.pieces)] = f"{dpkg.upstream(versions[want.name])}-*"
            found[want.name] = versions[want.name]
    return found


def refuse(moves: Iterable[Move], inside: Callable[[Move], bool], *, allow_downgrade: bool) -> None:
    """Raise when a plan would move what nobody asked for, or would move anything down."""
    problems = []
    for move in moves:
        if move.is_downgrade and not allow_downgrade:
            problems.append(f"{move}: this is a downgrade; nvidia_cuda_allow_downgrade: true allows it")
        elif move.before is not None and not inside(move):
            verb = "be removed" if move.after is None else "change"
            problems.append(
                f"{move}: it would {verb} too, and is none of what was asked for; nvidia_cuda_may_move: [{move.name}] allows it"
            )
    raise_all(problems, "the packages can't be had without moving others, nothing was changed")


@dataclass
class Plan:
    """What a run will do, made before anything is written."""

    request: Request
    driver: Driver
    before: dict[str, Package]
    manifest: Manifest
    wants: list[Want]
    versions: dict[str, str] = field(default_factory=dict)  # of what is wanted, afterwards
    moves: list[Move] = field(default_factory=list)
    repairs: dict[str, str] = field(default_factory=dict)
    files: dict[Path, bytes | None] = field(default_factory=dict)  # to write, None to remove
    hold: list[str] = field(default_factory=list)
    release: list[str] = field(default_factory=list)
    enable: list[str] = field(default_factory=list)  # units
    start: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    complete: bool = True  # false: the repository could not be asked
    removing: bool = False
    stage: Stage | None = None

    @property
    def changed(self) -> bool:
        return any((self.moves, self.repairs, self.files, self.hold, self.release, self.enable, self.start, not self.complete))

    def close(self) -> None:
        if self.stage is not None:
            self.stage.close()

    @property
    def manifest_path(self) -> Path:
        return self.request.root / MANIFEST

    def remember(self, **more: Iterable[str]) -> None:
        """Add to the manifest, before it is true: what a cut run left is then ours to take away."""
        self.manifest = self.manifest.with_added(**more)
        self.manifest.write(self.manifest_path)

    def describe(self) -> dict[str, Any]:
        """Return the module's result."""
        return {
            "changed": self.changed,
            "versions": dict(self.versions),
            "moves": [{"name": move.name, "before": move.before, "after": move.after} for move in self.moves],
            "repaired": dict(self.repairs),
            "held": sorted({*(name for name, package in self.before.items() if package.held), *self.hold} - set(self.release)),
            "units": sorted({*self.enable, *self.start}),
            "complete": self.complete,
            **self.driver.describe(),
            "diff": self.diff(),
            **({"warnings": self.warnings} if self.warnings else {}),
        }

    def diff(self) -> list[dict[str, str]]:
        parts = []
        if self.moves or self.repairs:
            before = [f"{move.name} {move.before}" for move in self.moves if move.before]
            after = [f"{move.name} {move.after}" for move in self.moves if move.after]
            before += [f"{name} {trouble}" for name, trouble in self.repairs.items()]
            after += [f"{name} configured" for name in self.repairs]
            parts.append(_difference("packages", before, after))
        if self.hold or self.release:
            parts.append(_difference("held packages", self.release, self.hold))
        if self.enable or self.start:
            after = [*(f"{unit} enabled" for unit in self.enable), *(f"{unit} active" for unit in self.start)]
            parts.append(_difference("units", [], after))
        for path, content in self.files.items():
            sides = (path.read_bytes() if path.exists() else b"", content or b"")
            before_text, after_text = (_readable(path, side) for side in sides)
            parts.append({"before_header": str(path), "before": before_text, "after_header": str(path), "after": after_text})
        return parts


def _difference(header: str, before: Iterable[str], after: Iterable[str]) -> dict[str, str]:
    one, other = ("".join(f"{line}\n" for line in sorted(lines)) for lines in (before, after))
    return {"before_header": header, "before": one, "after_header": header, "after": other}


def _readable(path: Path, content: bytes) -> str:
    if path != KEYRING or not content:
        return content.decode(errors="replace")
    return "".join(f"{print_}\n" for print_ in apt_key.fingerprints(content, str(path)))


def plan(request: Request, *, check: bool = False) -> Plan:
    """Return what must be done for the host to have what is wanted; raise when that can't be, before anything is written.

    With `check`, a repository that can't be asked makes the plan incomplete instead.
    """
    before, manifest = apt.read_packages(), Manifest.read(request.root / MANIFEST)
    wants = request.wants(running_kernel())
    made = Plan(request, Driver(request.manage_driver, loaded_driver(), None), before, manifest, wants)
    made.repairs = {name: package.trouble for name, package in before.items() if package.trouble}
    if not request.manage_driver:
        check_loaded_driver(made)
    url, key_url, fingerprints = repository_of(request, distribution())
    satisfied = not made.repairs and all(_is_there(want, before) for want in wants)
    foreign = apt.foreign_source(url)
    if foreign is not None:
        _require_same_key(foreign, url, fingerprints)
    try:
        key = b"" if foreign is not None else fetch_key(request, key_url, fingerprints)
        repository = Repository(url, request.suite, request.components, key)
        # apt refuses two sources of one repository with different keys
        ours = {SOURCES: None, KEYRING: None} if foreign is not None else {KEYRING: key, SOURCES: repository.sources(KEYRING).encode()}
        made.files = {path: content for path, content in ours.items() if (path.read_bytes() if path.exists() else None) != content}
        if not satisfied or made.files:
            made.stage = Stage.make(repository, request.locked_seconds, adopted=foreign is not None)
            made.warnings += made.stage.update()
            plan_moves(made, made.stage)
        else:
            made.versions = {want.name: before[want.name].version for want in wants}
    except RepositoryUnavailable as error:
        made.close()
        if not check:
            raise
        made.complete = False
        made.warnings.append(f"what would come can only be guessed: {error}")
        guess(made)
        return made
    except BaseException:
        made.close()
        raise
    text = apt.preferences(repository, pins(wants, made.versions), PIN_PRIORITY).encode()
    if not PREFERENCES.exists() or PREFERENCES.read_bytes() != text:
        made.files[PREFERENCES] = text
    plan_holds(made)
    plan_units(made)
    return made


def _is_there(want: Want, packages: Mapping[str, Package]) -> bool:
    package = packages.get(want.name)
    return package is not None and package.installed and (want.version is None or dpkg.matches(package.version, want.version))


def _require_same_key(foreign: tuple[Path, Path | None], url: str, fingerprints: tuple[str, ...]) -> None:
    path, keyring = foreign
    found = apt.keyring_fingerprints(keyring)
    if not found or not set(found) <= set(fingerprints):
        signed = f"{keyring} ({', '.join(found) or 'unreadable'})" if keyring else "no key of its own"
        raise AerieError(
            f"{path} already names {url}, signed by {signed}, and the pinned key is {', '.join(fingerprints)}: remove that file, or "
            "correct nvidia_cuda_repository_key_fingerprint; nothing was changed"
        )


def check_loaded_driver(made: Plan) -> None:
    """Compare user space with a driver that is not ours to change: too old a one is refused."""
    cuda, loaded = made.request.cuda, made.driver.loaded
    lowest = LOWEST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    if lowest is None:
        return
    if loaded is None:
        made.warnings.append(
            f"no NVIDIA driver is loaded, and this run does not manage it: CUDA {cuda} needs {lowest} or later. In a container the "
            "driver is its host's: start the container with its GPUs."
        )
    elif dpkg.compare(loaded, lowest) < 0:
        raise AerieError(
            f"{made.request.toolkit_package}: CUDA {cuda} needs the NVIDIA driver {lowest} or later, and {loaded} is loaded, which this "
            "run does not manage: upgrade it on the machine that owns it, or set nvidia_cuda_toolkit_package to an older toolkit"
        )


def plan_moves(made: Plan, stage: Stage) -> None:
    """Choose versions, let apt say what would move with them, and refuse what must not."""
    request, before = made.request, made.before
    installed = {name: package.version for name, package in before.items() if package.installed}
    offers = stage.offers(want.name for want in made.wants)
    problems = []
    for want in made.wants:
        try:
            made.versions[want.name] = choose(want, installed.get(want.name), offers.get(want.name, []), stage.repository.url)
        except AerieError as error:
            problems.append(str(error))
    raise_all(problems, "the wanted packages are not to be had, nothing was changed")
    driver = made.versions.get(request.driver_package) if request.manage_driver else None
    if driver and PERSISTENCE_PACKAGE in made.versions and not request.packages.get(PERSISTENCE_PACKAGE):
        fitting = of_upstream(offers.get(PERSISTENCE_PACKAGE, []), driver, stage.repository.url)
        made.versions[PERSISTENCE_PACKAGE] = fitting or made.versions[PERSISTENCE_PACKAGE]
    wanted_moves = [Move(name, installed.get(name), version) for name, version in made.versions.items() if installed.get(name) != version]
    refuse(wanted_moves, lambda _: True, allow_downgrade=request.allow_downgrade)
    stage.prefer(
        apt.preferences(stage.repository, pins(made.wants, made.versions), DOWNGRADE_PRIORITY if request.allow_downgrade else PIN_PRIORITY)
    )
    if made.repairs:
        refuse(stage.simulate("install", "--fix-broken"), lambda move: is_ours(move.name, made), allow_downgrade=False)
    unfinished = {name for name in made.repairs if before[name].state in "UH" and is_ours(name, made)}
    stage.pretend(free=(name for name in before if before[name].held and is_ours(name, made)), missing=unfinished)
    together = {**left_behind(made, stage, installed), **made.versions}
    moves = stage.simulate(*install_options(request), *(f"{name}={version}" for name, version in together.items()))
    there = [Move(move.name, installed[move.name], move.after) if move.name in unfinished else move for move in moves]
    made.moves = [move for move in there if move.before != move.after]
    refuse(made.moves, lambda move: is_ours(move.name, made), allow_downgrade=request.allow_downgrade)


def of_upstream(offers: Iterable[tuple[str, str]], version: str, url: str) -> str | None:
    """Return the offered version that has the same upstream part, NVIDIA's before a distribution's own build of it."""
    fitting = [(one, source) for one, source in offers if dpkg.upstream(one) == dpkg.upstream(version)]
    return next((one for one, source in fitting if source.startswith(url.rstrip("/"))), fitting[0][0] if fitting else None)


def left_behind(made: Plan, stage: Stage, installed: Mapping[str, str]) -> dict[str, str]:
    """Return the installed pieces of a driver that moves, at its new version where that is offered.

    On Ubuntu pieces depend on each other loosely: apt alone would leave some at the old version.
    """
    pieces = {
        name: made.versions[want.name]
        for want in made.wants
        if want.same_version and installed.get(want.name, made.versions[want.name]) != made.versions[want.name]
        for name, version in installed.items()
        if name != want.name and belongs(name, version, want, installed[want.name])
    }
    offers = stage.offers(pieces) if pieces else {}
    found = {name: of_upstream(offers.get(name, []), version, stage.repository.url) for name, version in pieces.items()}
    return {name: version for name, version in found.items() if version}


def install_options(request: Request) -> list[str]:
    options = ["install", "--no-install-recommends", "--allow-change-held-packages"]
    return [*options, "--allow-downgrades"] if request.allow_downgrade else options


def is_ours(name: str, made: Plan) -> bool:
    """Say whether a package may move: wanted, a piece of what is wanted, brought by us, or allowed by name."""
    if (
        name in made.manifest.packages
        or name in made.manifest.holds
        or any(fnmatchcase(name, pattern) for pattern in made.request.may_move)
    ):
        return True
    return any(name == want.name or any(fnmatchcase(name, pattern) for pattern in want.pieces) for want in made.wants)


def guess(made: Plan) -> None:
    """Fill the plan with what is known without the repository: the packages by name, and versions where they were set."""
    for want in made.wants:
        package = made.before.get(want.name)
        if not _is_there(want, made.before):
            after = want.version or "(newest)"
            made.moves.append(Move(want.name, package.version if package and package.installed else None, after))
        made.versions[want.name] = package.version if package and _is_there(want, made.before) else want.version or "(newest)"
    url, _, _ = repository_of(made.request, distribution())
    made.files = {SOURCES: Repository(url, made.request.suite, made.request.components, b"").sources(KEYRING).encode()}


def after_moves(made: Plan) -> dict[str, str]:
    """Return the versions of all packages that will be installed."""
    versions = {name: package.version for name, package in made.before.items() if package.installed}
    for move in made.moves:
        if move.after is None:
            versions.pop(move.name, None)
        else:
            versions[move.name] = move.after
    return versions


def plan_holds(made: Plan) -> None:
    """Hold what is wanted and its pieces; let go of what we held and nobody wants held any more."""
    after = after_moves(made)
    wanted = {
        name
        for name, version in after.items()
        for want in made.wants
        if made.request.hold and want.hold and belongs(name, version, want, made.versions[want.name])
    }
    held = {name for name, package in made.before.items() if package.held and package.installed}
    made.hold = sorted(wanted - held)
    made.release = sorted((set(made.manifest.holds) & held) - wanted)


def plan_units(made: Plan) -> None:
    """Find what the persistence daemon lacks, and what the driver will be."""
    request = made.request
    if not request.manage_driver:
        return
    driver = made.versions[request.driver_package]
    made.driver = Driver(True, made.driver.loaded, dpkg.upstream(driver))
    if request.persistence:
        state = unit_state(PERSISTENCE_UNIT)
        made.enable = [PERSISTENCE_UNIT] if state["UnitFileState"] in ("disabled", "", "not-found") else []
        # The daemon can't start before the driver that belongs to it is loaded; at the next boot it does.
        ready = made.driver.loaded == made.driver.installed
        made.start = [PERSISTENCE_UNIT] if ready and state["ActiveState"] != "active" else []


def unit_state(unit: str) -> dict[str, str]:
    """Return UnitFileState and ActiveState of a unit; empty values where systemd does not run, or the unit is not there.

    Whether it is enabled is asked of the files: what the manager remembers can be of a unit that a package took away meanwhile.
    """

    def said(*argv: str) -> str:
        try:
            return subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stdout.strip()
        except FileNotFoundError:
            return ""

    return {
        "UnitFileState": said("systemctl", "is-enabled", unit),
        "ActiveState": said("systemctl", "show", "--property=ActiveState", "--value", unit),
    }


def plan_removal(request: Request) -> Plan:
    """Return what must go for the host to be as if we had never come; raise when others need what we brought."""
    before, manifest = apt.read_packages(), Manifest.read(request.root / MANIFEST)
    made = Plan(request, Driver(request.manage_driver, loaded_driver(), None), before, manifest, [], removing=True)
    made.files = {path: None for path in (SOURCES, KEYRING, PREFERENCES) if path.exists()}
    made.release = sorted(name for name in manifest.holds if name in before and before[name].held)
    names = [name for name in manifest.packages if name in before]
    if names:
        done = apt.run(("apt-get", "--simulate", "--yes", "--allow-change-held-packages", "purge", *names))
        made.moves = dpkg.parse_simulation(apt.require(done, "apt-get purge"))
        mine = set(names)
        problems = [f"{move}: this project did not bring it, and it would change too" for move in made.moves if move.name not in mine]
        raise_all(
            problems, "what was brought can't be taken away, nothing was changed: remove these first, or keep nvidia_cuda_state: present"
        )
    still = request.driver_package not in manifest.packages and before.get(request.driver_package)
    made.driver = Driver(
        request.manage_driver and bool(manifest.packages), made.driver.loaded, dpkg.upstream(still.version) if still else None
    )
    return made
