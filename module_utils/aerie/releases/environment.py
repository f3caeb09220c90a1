"""Environments: virtual environments that hold all of a release but SGLang itself, each made from one lock.

Standard library only: this runs on hosts. An environment is whole when its marker is there, and the marker is written
last; a directory without one is what a killed run left, and is made again.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.module_utils.aerie import locks
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import canonical_hash, read_json, sha256_bytes, sha256_file, write_json
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.words import listing, tail

MARKER = ".aerie-environment.json"
PACKAGE_MARKER = ".aerie-package.json"
GIB = 1 << 30
ALONE_SECONDS = 2 * 3600.0
"""How long to wait for another run that makes an environment: 25 GB come over a slow line."""
PACKAGE_GIB = 1.0
SUPERVISOR_GIB = 0.1

# pip says "Collecting name==version" of what an index has, and "Processing /path/name-version-….whl" of a wheel at hand.
_NEXT_PACKAGE = re.compile(r"(?:Collecting |Processing \S*/)([\w.-]+?)(?:-\d|[ =<>!~;(]|$)")

# Settings that send packages elsewhere than into the environment. Index, certificate and proxy stay the machine's.
_SURPRISES = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_NO_DEPS",
)

_DESCRIBE_PYTHON = """
import importlib.util, json, sys
print(json.dumps({
    "path": getattr(sys, "_base_executable", None) or sys.executable,
    "version": ".".join(map(str, sys.version_info[:3])),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}))
"""

_FIND_STAND_INS = """
import json, pathlib, re, sys
mark = re.compile(r"^__aerie_stand_in__\\s*=\\s*True", re.M)
found = []
for entry in dict.fromkeys(sys.path):
    for init in pathlib.Path(entry or ".").glob("*/__init__.py"):
        if mark.search(init.read_text(errors="replace")):
            found.append([init.parent.name, str(init.parent)])
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Spec:
    """What must be installed: everything that decides what an environment holds."""

    version: str
    profile: str
    lock_text: str
    torch: str
    torch_in_lock: bool
    sglang_sha256: Mapping[str, str]
    disk_gib: float
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    supervisor_lock_text: str | None = None

    def environment_id(self, python: str) -> str:
        """Return the name of the environment for a Python such as ``3.11``: equal contents, equal names."""
        contents = {
            "lock": self.lock_text,
            "torch": self.torch,
            "profile": self.profile,
            "python": python,
            "stand_ins": dict(self.stand_ins),
        }
        return f"{self.profile}-{canonical_hash(contents)[:12]}"

    def package_name(self, python: str) -> str:
        """Return the name of SGLang's own pristine copy."""
        return f"sglang-{self.version}-{self.sglang_sha256[python][:8]}"


@dataclass(frozen=True)
class Source:
    """Where packages come from: by default the index that pip on the host is configured for."""

    wheels: str | None = None
    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()

    def options(self, *, extra: bool) -> list[str]:
        """Return pip's options; ``extra`` asks the extra indexes too."""
        if self.wheels:
            return ["--no-index", "--find-links", self.wheels]
        index = ["--index-url", self.index_url] if self.index_url else []
        return index + [option for url in self.extra_index_urls if extra for option in ("--extra-index-url", url)]


@dataclass(frozen=True)
class Interpreter:
    """A Python of the host that environments are made with."""

    path: str
    version: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True)
class Plan:
    """Where things will be, and which of them have to be made."""

    environment: Path
    package: Path
    supervisor: Path | None
    make_environment: bool
    make_package: bool
    make_supervisor: bool

    @property
    def changed(self) -> bool:
        return self.make_environment or self.make_package or self.make_supervisor

    def made(self, paths: HostPaths) -> list[str]:
        """Return the directories that must be made, as seen from the root."""
        wanted = ((self.environment, self.make_environment), (self.package, self.make_package), (self.supervisor, self.make_supervisor))
        return [str(path.relative_to(paths.root)) for path, make in wanted if make and path is not None]


def find_interpreter(name: str) -> Interpreter:
    """Return the Python called ``name`` (a name or a path); raise when it is missing or can't make environments."""
    found = shutil.which(name)
    if found is None:
        raise AerieError(f"this host has no {name}: install it, or set sglang_release_python to a Python that is there")
    answer = run([found, "-I", "-c", _DESCRIBE_PYTHON])
    if answer.returncode:
        raise AerieError(f"{found} does not run: set sglang_release_python to another Python\n{tail(answer.stderr, 5)}")
    facts = json.loads(answer.stdout)
    interpreter = Interpreter(facts["path"], facts["version"])
    if not facts["venv"]:
        raise AerieError(
            f"{found} can't make virtual environments, the module ensurepip is missing: install it "
            f"(Debian and Ubuntu: apt-get install python{interpreter.minor}-venv), or set sglang_release_python to another Python"
        )
    return interpreter


def plan(paths: HostPaths, spec: Spec, interpreter: Interpreter, *, supervisor: bool) -> Plan:
    """Return what must be made; raise when this Python has no SGLang wheel or the disk is too small. Nothing is written."""
    if interpreter.minor not in spec.sglang_sha256:
        locked = list(spec.sglang_sha256)
        raise AerieError(
            f"SGLang {spec.version} (profile {spec.profile}) is locked for Python {listing(locked, last='or')}, and "
            f"{interpreter.path} is {interpreter.version}: install one of these and set sglang_release_python, such as python{locked[0]}"
        )
    environment = paths.environments / spec.environment_id(interpreter.minor)
    package = paths.packages / spec.package_name(interpreter.minor)
    supervisor_environment = supervisor_path(paths, spec.supervisor_lock_text, interpreter) if supervisor else None
    result = Plan(
        environment=environment,
        package=package,
        supervisor=supervisor_environment,
        make_environment=not is_whole(environment),
        make_package=not (package / PACKAGE_MARKER).exists(),
        make_supervisor=supervisor_environment is not None and not is_whole(supervisor_environment),
    )
    needed = spec.disk_gib * result.make_environment + PACKAGE_GIB * result.make_package + SUPERVISOR_GIB * result.make_supervisor
    check_disk(paths.root, needed)
    return result


def supervisor_path(paths: HostPaths, lock_text: str | None, interpreter: Interpreter) -> Path:
    """Return where the environment of supervisor is, or will be."""
    if lock_text is None:
        raise AerieError("supervisor was asked for without its lock")
    return paths.environments / f"supervisor-{canonical_hash({'lock': lock_text, 'python': interpreter.minor})[:12]}"


def is_whole(environment: Path) -> bool:
    """Say whether an environment was made to its end and still has its Python."""
    return (environment / MARKER).exists() and (environment / "bin" / "python").exists()


def check_disk(path: Path, needed_gib: float) -> None:
    """Raise when the file system that ``path`` is, or will be, on has less than ``needed_gib`` free."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / GIB
    if free < needed_gib:
        raise AerieError(
            f"{path} is on a file system with {free:.1f} GiB free, and {needed_gib:.1f} GiB are needed: "
            "free some, or set aerie_root to a larger one"
        )


def apply(paths: HostPaths, spec: Spec, interpreter: Interpreter, source: Source, progress: Progress, *, supervisor: bool) -> None:
    """Make what is missing. Two runs at once don't meet: the second waits, and then finds everything made."""
    with alone(paths, progress):
        todo = plan(paths, spec, interpreter, supervisor=supervisor)
        if todo.make_environment:
            make_environment(todo.environment, spec, interpreter, source, progress)
        if todo.make_package:
            make_package(todo, spec, interpreter, source, progress)
        if todo.make_supervisor and todo.supervisor is not None:
            make_supervisor(todo.supervisor, spec.supervisor_lock_text or "", interpreter, source, progress, extra=spec.torch_in_lock)


def clean_environ() -> dict[str, str]:
    """Return this process's environment without what would send packages elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name not in _SURPRISES}
    return kept | {"PYTHONNOUSERSITE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(argv: list[str], variables: Mapping[str, str] | None = None, directory: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment, undisturbed by variables that would lead it elsewhere."""
    environ = clean_environ() | dict(variables or {})
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", env=environ, cwd=directory, check=False)


def make_environment(path: Path, spec: Spec, interpreter: Interpreter, source: Source, progress: Progress) -> None:
    """Make one environment: venv, torch, the lock's packages, stand-ins, checks, marker."""
    progress.update(f"creating environment {path.name}")
    python = _make_venv(path, interpreter)
    pip = _Pip(python, source, extra=True)
    site_packages = site_packages_of(path, interpreter.minor)
    if not spec.torch_in_lock:
        progress.update(f"installing torch {spec.torch}")
        # A CPU build has another hash in every index, so it can't be in a lock; what came is checked instead.
        _install_torch(pip, spec)
        check_torch(site_packages, spec)
        pip = replace(pip, extra=False)
    total = count_packages(spec.lock_text)
    collected: list[str] = []

    def tell(line: str) -> None:
        if match := _NEXT_PACKAGE.match(line):
            collected.append(match[1])
            progress.update(f"{len(collected)} of {total} packages: {match[1]}", len(collected), total)
        elif line.startswith("Installing collected packages"):
            progress.update(f"unpacking {total} packages", total, total)

    pip.install_lock(spec.lock_text, "the packages of the lock could not be installed", tell)
    for name, text in spec.stand_ins.items():
        _write_stand_in(site_packages, name, text)
    progress.update("checking the environment")
    check_torch(site_packages, spec)
    if spec.profile == "cuda":
        refuse_stand_ins(python)
    answer = run([str(python), "-I", "-c", "import torch; print(torch.__version__)"])
    if answer.returncode:
        raise AerieError(f"torch does not import in {path}:\n{tail(answer.stderr, 8)}")
    write_json(
        path / MARKER,
        {
            "id": path.name,
            "profile": spec.profile,
            "python": str(python),
            "python_version": interpreter.version,
            "torch_version": answer.stdout.split()[-1],
            "lock_sha256": sha256_bytes(spec.lock_text.encode()),
            "packages": total,
            "stand_ins": sorted({name.split("/")[0] for name in spec.stand_ins}),
            "made_at": _now(),
        },
    )


def make_package(todo: Plan, spec: Spec, interpreter: Interpreter, source: Source, progress: Progress) -> None:
    """Fetch SGLang's wheel by its hash and unpack it beside the environments, never into one."""
    digest = spec.sglang_sha256[interpreter.minor]
    progress.update(f"fetching SGLang {spec.version}")
    todo.package.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=todo.package.parent) as folder:
        requirement, wheels = Path(folder) / "sglang.txt", Path(folder) / "wheels"
        requirement.write_text(f"sglang=={spec.version} --hash=sha256:{digest}\n")
        arguments = ["download", "--no-deps", "--require-hashes", "--only-binary=:all:", "-d", str(wheels), "-r", str(requirement)]
        pip = _Pip(todo.environment / "bin" / "python", source, extra=spec.torch_in_lock)
        pip.run(arguments, f"SGLang {spec.version} could not be fetched")
        progress.update(f"unpacking SGLang {spec.version}")
        (wheel,) = wheels.glob("*.whl")
        unpacked = Path(folder) / "unpacked"
        unpack_wheel(wheel, unpacked)
        write_json(
            unpacked / PACKAGE_MARKER, {"name": "sglang", "version": spec.version, "sha256": sha256_file(wheel), "wheel": wheel.name}
        )
        if todo.package.exists():
            shutil.rmtree(todo.package)
        unpacked.rename(todo.package)


def make_supervisor(path: Path, lock_text: str, interpreter: Interpreter, source: Source, progress: Progress, *, extra: bool) -> None:
    """Make the small environment of supervisor, which owns servers where systemd does not run."""
    make_tool(
        path, lock_text, interpreter, source, progress, name="supervisor", check=("-m", "supervisor.supervisord", "--version"), extra=extra
    )


def make_tool(
    path: Path,
    lock_text: str,
    interpreter: Interpreter,
    source: Source,
    progress: Progress,
    *,
    name: str,
    check: Sequence[str],
    extra: bool = True,
) -> None:
    """Make a small environment for one tool; ``check`` are arguments of its Python that print its version."""
    progress.update(f"creating {name}'s environment")
    python = _make_venv(path, interpreter)
    _Pip(python, source, extra=extra).install_lock(lock_text, f"{name} could not be installed")
    answer = run([str(python), "-I", *check])
    if answer.returncode:
        raise AerieError(f"{name} does not start in {path}:\n{tail(answer.stderr, 8)}")
    write_json(path / MARKER, {"id": path.name, "python": str(python), "version": answer.stdout.strip(), "made_at": _now()})


def count_packages(lock_text: str) -> int:
    """Return how many packages a lock names."""
    return len(re.findall(r"^[A-Za-z0-9][\w.-]*==", lock_text, re.MULTILINE))


def site_packages_of(environment: Path, python: str) -> Path:
    """Return where a virtual environment for a Python such as ``3.11`` keeps its packages."""
    return environment / "lib" / f"python{python}" / "site-packages"


def check_torch(site_packages: Path, spec: Spec) -> None:
    """Raise when the torch that was installed is not the pinned one, or is built for the wrong kind of machine.

    Reads ``torch/version.py``: importing torch needs packages that are installed after it.
    """
    path = site_packages / "torch" / "version.py"
    if not path.exists():
        raise AerieError(f"torch {spec.torch} is pinned and was not installed: {path} is missing")
    values = assignments(path.read_text())
    version, cuda = str(values["__version__"]), values.get("cuda")
    if version.split("+")[0] != spec.torch:
        raise AerieError(
            f"torch {version} was installed and {spec.torch} is pinned: does a pip constraint on this host forbid it? (pip config list)"
        )
    if spec.profile == "cpu" and cuda is not None:
        raise AerieError(
            f"torch {version} is a build for CUDA {cuda}, and profile cpu needs a CPU build, which the host's package index does not "
            "offer: set sglang_release_extra_index_urls to an index of CPU builds of PyTorch, or sglang_release_wheels to a directory "
            "that holds such a wheel"
        )
    if spec.profile == "cuda" and cuda is None:
        raise AerieError(
            f"torch {version} is a CPU build, and profile cuda needs one for CUDA: look at the host's pip configuration (pip config list)"
        )


def assignments(text: str) -> dict[str, Any]:
    """Return what a file of plain assignments assigns."""
    values = {}
    for statement in ast.parse(text).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            values[target.id] = value.value
    return values


def stand_ins_on_path(python: Path) -> list[tuple[str, str]]:
    """Return name and path of every stand-in package that ``python`` could import."""
    answer = run([str(python), "-c", _FIND_STAND_INS])
    if answer.returncode:
        raise AerieError(f"{python} does not run:\n{tail(answer.stderr, 8)}")
    return [(name, path) for name, path in json.loads(answer.stdout)]


def refuse_stand_ins(python: Path) -> None:
    """Raise when a GPU host could import a stand-in: it would shadow the real package."""
    found = stand_ins_on_path(python)
    if found:
        names = listing(f"{name} ({path})" for name, path in found)
        raise AerieError(
            f"profile cuda must not see stand-ins of the cpu profile, and {python} would import {names}: remove these directories"
        )


def unpack_wheel(wheel: Path, target: Path) -> None:
    """Unpack a wheel, checking every file against the wheel's own RECORD; raise when one differs or is not listed."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        record_name = next((name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)), None)
        if record_name is None:
            raise AerieError(f"{wheel.name} has no RECORD: it is no wheel")
        record = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record_name).decode())) if row}
        for name in names:
            parts = PurePosixPath(name).parts
            if name.startswith("/") or ".." in parts or parts[0].endswith(".data"):
                raise AerieError(f"{wheel.name}: can't unpack {name}: it would lie outside of a package")
            content = archive.read(name)
            if name != record_name and record.get(name) != _record_hash(content):
                raise AerieError(f"{wheel.name}: {name} differs from the wheel's RECORD: the wheel is damaged or was changed")
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    missing = sorted(set(record) - set(names))
    if missing:
        raise AerieError(f"{wheel.name}: RECORD names {missing[0]}, which is not in the wheel: the wheel is damaged")


def describe(todo: Plan, spec: Spec, interpreter: Interpreter) -> dict[str, Any]:
    """Return what other modules need to know; of what is not made yet, what is known."""
    marker = read_json(todo.environment / MARKER) if is_whole(todo.environment) else {}
    return {
        "version": spec.version,
        "profile": spec.profile,
        "environment": {
            "id": todo.environment.name,
            "path": str(todo.environment),
            "site_packages": str(site_packages_of(todo.environment, interpreter.minor)),
            "python": str(todo.environment / "bin" / "python"),
            "python_version": marker.get("python_version", interpreter.version),
            "torch_version": marker.get("torch_version"),
            "adopted": False,
            "search_path": [str(site_packages_of(todo.environment, interpreter.minor))],
        },
        "package": {
            "path": str(todo.package),
            "sha256": spec.sglang_sha256[interpreter.minor],
            "adopted": None,
            "commit": None,
        },
        "supervisor": describe_supervisor(todo.supervisor),
    }


def describe_supervisor(path: Path | None) -> dict[str, str] | None:
    """Return where supervisor is, or None when it was not asked for."""
    return {"path": str(path), "python": str(path / "bin" / "python")} if path else None


def _make_venv(path: Path, interpreter: Interpreter) -> Path:
    if path.exists():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = run([interpreter.path, "-I", "-m", "venv", str(path)])
    if answer.returncode:
        raise AerieError(f"{interpreter.path} could not make the virtual environment {path}:\n{tail(answer.stdout + answer.stderr, 8)}")
    return path / "bin" / "python"


def _write_stand_in(site_packages: Path, name: str, text: str) -> None:
    path = site_packages / name
    if not path.resolve().is_relative_to(site_packages.resolve()):
        raise AerieError(f"stand-in {name} would lie outside of {site_packages}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _install_torch(pip: _Pip, spec: Spec) -> None:
    """Install torch, asking the extra indexes too; where they are in the way (a network that swallows packets), without them."""
    arguments, failure = ["install", "--no-deps", f"torch=={spec.torch}"], f"torch {spec.torch} could not be installed"
    if pip.source.extra_index_urls and not pip.source.wheels:
        with contextlib.suppress(AerieError):
            replace(pip, retries=1, timeout=15).run(arguments, failure)
            return
    replace(pip, extra=False).run(arguments, failure)


@dataclass(frozen=True)
class _Pip:
    """The pip of one environment and where it takes packages from."""

    python: Path
    source: Source
    extra: bool
    retries: int = 5
    timeout: int = 60

    def run(self, arguments: list[str], failure: str, tell: Callable[[str], None] | None = None) -> None:
        """Run pip, giving every line of its output to ``tell``; raise with ``failure`` and pip's last words."""
        argv = [str(self.python), "-m", "pip", *arguments, *self.source.options(extra=self.extra)]
        argv += ["--retries", str(self.retries), "--timeout", str(self.timeout), "--no-input", "--progress-bar", "off", "--no-color"]
        lines: list[str] = []
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=clean_environ()
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)  # the job's log keeps what pip said
                lines.append(line)
                if tell:
                    tell(line.strip())
        if process.returncode:
            said = "".join(line for line in lines if not line.startswith("WARNING: Location "))
            raise AerieError(f"{failure} from {self._where()}. pip's last words:\n{tail(said, 8)}")

    def install_lock(self, text: str, failure: str, tell: Callable[[str], None] | None = None) -> None:
        """Install exactly what a lock names, every file checked by its hash."""
        with tempfile.TemporaryDirectory(prefix="aerie-lock-") as folder:
            lock = Path(folder) / "lock.txt"
            lock.write_text(text)
            self.run(["install", "--no-deps", "--require-hashes", "-r", str(lock)], failure, tell)

    def _where(self) -> str:
        if self.source.wheels:
            return f"the wheels at {self.source.wheels}: add those that are missing"
        return (
            f"{self.source.index_url or 'the package index that pip is configured for (pip config list)'}: make it reachable, or set "
            "sglang_release_index_url, or sglang_release_wheels to a directory of wheels"
        )


def _record_hash(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextlib.contextmanager
def alone(paths: HostPaths, progress: Progress) -> Iterator[None]:
    """Hold the host's environments: two runs that make them don't meet."""
    with locks.held(
        paths.environments / ".lock",
        ALONE_SECONDS,
        "another run is making an environment on this host",
        lambda: progress.update("waiting: another run is making an environment on this host"),
    ):
        yield
