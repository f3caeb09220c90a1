"""apt, run so that it asks nothing, and a stage: a second set of sources, lists and pins, to try a repository out before it is the host's.

Standard library only: this runs on hosts. Sources: apt.conf(5), sources.list(5), apt_preferences(5).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import apt_key, dpkg
from ansible.module_utils.aerie.host.dpkg import Move, Package

NAME = "nvidia-cuda"
SOURCES = Path("/etc/apt/sources.list.d") / f"{NAME}.sources"
KEYRING = Path("/etc/apt/keyrings") / f"{NAME}.gpg"
PREFERENCES = Path("/etc/apt/preferences.d") / NAME
LISTS = Path("/var/lib/apt/lists")
STATUS = Path("/var/lib/dpkg/status")
STAGES = "/var/tmp"  # packages of several GB come by: not /tmp, which may be memory


class RepositoryUnavailable(AerieError):
    """The repository can't be had from here; a check may go on with what is known without it."""


ENVIRONMENT = {
    "DEBIAN_FRONTEND": "noninteractive",
    "APT_LISTCHANGES_FRONTEND": "none",
    "NEEDRESTART_SUSPEND": "1",  # Ubuntu's needrestart would restart services that no one asked about
    "LC_ALL": "C.UTF-8",
}
ANSWER_WITHIN = ("-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20", "-o", "Acquire::Retries=1")
"""A mirror that accepts and says nothing would hold apt for minutes."""
KEEP_CONFIGURATION = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")


def run(argv: Iterable[str], *, locked_seconds: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command of dpkg or apt; where another one holds the lock, wait for it."""
    words = list(argv)
    if locked_seconds and words[0] == "apt-get":
        words[1:1] = ["-o", f"DPkg::Lock::Timeout={locked_seconds}"]
    search = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"  # dpkg refuses to work without them
    environment = os.environ | ENVIRONMENT | {"PATH": search}
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=environment, check=False
        )
    except FileNotFoundError as error:
        raise AerieError(f"{words[0]}: not found: only hosts with dpkg and apt can be provisioned (Ubuntu, Debian)") from error


def require(done: subprocess.CompletedProcess[str], what: str) -> str:
    """Return what a command printed; raise with the end of its output when it failed."""
    if done.returncode != 0:
        raise AerieError(f"{what}: {explain(done)}")
    return done.stdout


def explain(done: subprocess.CompletedProcess[str]) -> str:
    """Return the part of the output that says what is wrong: apt's list of unmet dependencies, else the end of it."""
    start = done.stdout.find("The following packages have unmet dependencies")
    # dpkg and the packages' scripts write to apt's output, apt itself to its errors
    said = done.stdout[start:].splitlines() if start >= 0 else [*done.stdout.splitlines()[-15:], *done.stderr.splitlines()[-10:]]
    return "\n  ".join([f"exit status {done.returncode}", *said])


def read_packages() -> dict[str, Package]:
    """Return the packages that dpkg knows."""
    architecture = require(run(("dpkg", "--print-architecture")), "dpkg").strip()
    return dpkg.parse_packages(require(run(dpkg.QUERY), "dpkg-query"), architecture)


@dataclass(frozen=True)
class Repository:
    """An apt repository, and the packets of the key that signs it."""

    url: str
    suite: str
    components: tuple[str, ...]
    key: bytes

    def sources(self, keyring: Path) -> str:
        """Return it in deb822 form; a suite that ends with a slash has no components."""
        components = f"Components: {' '.join(self.components)}\n" if self.components else ""
        return f"Types: deb\nURIs: {self.url}\nSuites: {self.suite}\n{components}Signed-By: {keyring}\n"

    @property
    def lists_prefix(self) -> str:
        """How the names of its lists begin, as apt makes them of an address."""
        return self.url.rstrip("/").partition("://")[2].replace("_", "%5f").replace("/", "_") + "_"

    @property
    def pinned_origin(self) -> str:
        """The `Pin:` that means packages of this repository: its host, empty for files."""
        place = self.url.partition("://")[2].partition("/")[0]
        return f'origin "{place.rpartition("@")[2].partition(":")[0]}"'


@dataclass(frozen=True)
class Stage:
    """apt's view of the host with a repository added, in a directory of its own; the host itself is not touched."""

    directory: Path
    repository: Repository
    locked_seconds: int

    @classmethod
    def make(cls, repository: Repository, locked_seconds: int, *, adopted: bool) -> Stage:
        """Make a stage of the host's own sources and lists, and the repository where no source of the host names it already."""
        stage = cls(Path(tempfile.mkdtemp(prefix="aerie-apt-", dir=STAGES)), repository, locked_seconds)
        stage.directory.chmod(0o755)  # apt downloads as a user of its own
        for part in ("sources.list.d", "preferences.d", "archives/partial"):
            (stage.directory / part).mkdir(parents=True)
        shutil.copytree(LISTS, stage.directory / "lists", ignore=shutil.ignore_patterns("partial", "lock"))
        for directory, ours in ((SOURCES.parent, SOURCES), (PREFERENCES.parent, PREFERENCES)):
            for path in directory.iterdir() if directory.is_dir() else ():
                if path != ours:
                    (stage.directory / directory.name / path.name).symlink_to(path)
        if not adopted:
            keyring = stage.directory / KEYRING.name
            keyring.write_bytes(repository.key)
            (stage.directory / SOURCES.parent.name / SOURCES.name).write_text(repository.sources(keyring))
        return stage

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def prefer(self, preferences: str) -> None:
        (self.directory / PREFERENCES.parent.name / PREFERENCES.name).write_text(preferences)

    def pretend(self, *, free: Iterable[str], missing: Iterable[str]) -> None:
        """Let simulations take packages for not held, or for not there.

        apt's resolver would refuse to move a held package, and to plan anything beside one whose dependencies are missing.
        """
        freed, gone = set(free), set(missing)
        if freed or gone:
            stanzas = [(text[9:].partition("\n")[0], text) for text in STATUS.read_text(errors="replace").split("\n\n")]
            kept = [
                text.replace("\nStatus: hold ", "\nStatus: install ", 1) if name in freed else text
                for name, text in stanzas
                if name not in gone
            ]
            (self.directory / "status").write_text("\n\n".join(kept))

    def options(self, *, simulated: bool) -> list[str]:
        settings = {
            "Dir::Etc::SourceParts": self.directory / SOURCES.parent.name,
            "Dir::Etc::PreferencesParts": self.directory / PREFERENCES.parent.name,
            "Dir::State::Lists": self.directory / "lists",
            "Dir::Cache::Archives": self.directory / "archives",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
        }
        if simulated and (self.directory / "status").exists():
            settings["Dir::State::Status"] = self.directory / "status"
        return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    def update(self) -> list[str]:
        """Fetch all lists; return apt's warnings. Raise when the repository's own can't be had or trusted."""
        done = run(("apt-get", *self.options(simulated=True), *ANSWER_WITHIN, "update"), locked_seconds=self.locked_seconds)
        lines = (done.stdout + done.stderr).splitlines()
        troubles = [line for line in lines if line.startswith(("E:", "W:"))]
        address = self.repository.url.rstrip("/")
        ours = [line for line in troubles if address in line]
        if ours or not any(path.name.startswith(self.repository.lists_prefix) for path in (self.directory / "lists").iterdir()):
            reasons = "\n  ".join(ours or troubles or lines[-5:])
            kind = AerieError if re.search(r"signature|not signed|NO_PUBKEY", reasons) else RepositoryUnavailable
            raise kind(
                f"{address}: apt can't use this repository; nothing was changed\n  {reasons}\n"
                "  Is the address right and reachable from the host, and signed by the key that is pinned? A mirror is set by "
                "nvidia_cuda_repository_url."
            )
        if done.returncode != 0 and not troubles:
            raise AerieError(f"apt-get update: {explain(done)}")
        return troubles

    def offers(self, names: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
        """Return (version, source) of every version that can be had, newest first."""
        done = run(("apt-cache", *self.options(simulated=True), "madison", *names))
        return dpkg.parse_madison(done.stdout)

    def simulate(self, *arguments: str) -> list[Move]:
        """Return what `apt-get ARGUMENTS` would move; raise with apt's reasons when it can't."""
        done = run(("apt-get", *self.options(simulated=True), "--simulate", "--yes", *arguments))
        return dpkg.parse_simulation(require(done, f"apt-get {' '.join(arguments)}"))

    def install(self, *arguments: str) -> None:
        options = (*self.options(simulated=False), *KEEP_CONFIGURATION, "--yes", "--quiet")
        require(run(("apt-get", *options, *arguments), locked_seconds=self.locked_seconds), f"apt-get {' '.join(arguments)}")

    def publish_lists(self) -> None:
        """Give the repository's lists to the host's own apt, which saves it fetching them again."""
        LISTS.mkdir(parents=True, exist_ok=True)
        for path in (self.directory / "lists").iterdir():
            if path.name.startswith(self.repository.lists_prefix):
                shutil.copy2(path, LISTS / path.name)


def foreign_source(url: str) -> tuple[Path, Path | None] | None:
    """Return the file, not ours, that already names this repository, and its key file. Source: sources.list(5), both forms."""
    wanted = url.rstrip("/")
    files = [Path("/etc/apt/sources.list"), *sorted(SOURCES.parent.glob("*.list")), *sorted(SOURCES.parent.glob("*.sources"))]
    for path in files:
        if path == SOURCES or not path.is_file():
            continue
        for stanza in path.read_text(errors="replace").split("\n\n" if path.suffix == ".sources" else "\n"):
            text = "\n".join(line for line in stanza.splitlines() if not line.lstrip().startswith("#"))
            if wanted in (word.rstrip("/") for word in text.split()) and "enabled: no" not in text.lower():
                signed = re.search(r"signed-by\s*[=:]\s*(/[^\s\],]+)", text, re.IGNORECASE)
                return path, Path(signed.group(1)) if signed else None
    return None


def keyring_fingerprints(path: Path | None) -> list[str]:
    """Return the fingerprints of a key file's keys; none where it can't be read."""
    try:
        return apt_key.fingerprints(apt_key.binary(path.read_bytes(), str(path)), str(path)) if path else []
    except (OSError, AerieError):
        return []


def mark(action: str, names: Iterable[str]) -> None:
    wanted = sorted(names)
    if wanted:
        require(run(("apt-mark", action, *wanted)), f"apt-mark {action} {' '.join(wanted)}")


def preferences(repository: Repository, pins: Mapping[str, str], priority: int) -> str:
    """Return apt's preferences: packages of the repository before a distribution's, and versions of {patterns: version} before all.

    Below 1000 a pin never moves a package down.
    """
    parts = [f"Package: *\nPin: {repository.pinned_origin}\nPin-Priority: 600\n"]
    parts += [f"Package: {names}\nPin: version {version}\nPin-Priority: {priority}\n" for names, version in pins.items()]
    return "\n".join(parts)
