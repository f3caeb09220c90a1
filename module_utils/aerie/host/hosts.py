"""How the survey reads a host: live, or from a recording. Standard library only: this runs on hosts.

Everything goes through :class:`Host`, so that what was read can be kept (``recorder``) and read again (``recordings``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.processes import Process
from ansible.module_utils.aerie.releases import model_identity

COMMAND_SECONDS = 20.0
LARGEST_FILE = 16 << 20
"""Of a larger one, a log, the end is read."""

SYSTEM_PROGRAMS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where ldconfig, dmesg and lspci are; a user's search path may lack them."""

INSTANCE_VARIABLE, ROOT_VARIABLE = "AERIE_INSTANCE", "AERIE_ROOT"

ENVIRONMENT_NAMES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
    "HOME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PATH",
    "SGLANG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "VLLM_CACHE_ROOT",
    "XDG_CACHE_HOME",
)
ENVIRONMENT_PREFIXES = ("NCCL_",)

T = TypeVar("T")


@dataclass(frozen=True)
class Completed:
    """What a command gave: its exit status (None when it could not run or took too long), its output and how long it took."""

    rc: int | None
    stdout: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.rc == 0


@dataclass(frozen=True)
class Stat:
    """What lies at a path: ``file`` or ``directory``, its size in bytes and the seconds since it last changed."""

    kind: str
    size: int
    age_s: int


class Host(Protocol):
    """How the survey reads a host. Paths are absolute; None says that there is nothing, or nothing that we may see."""

    @property
    def environment(self) -> Mapping[str, str]: ...

    def run(self, argv: tuple[str, ...]) -> Completed: ...

    def read(self, path: str) -> bytes | None: ...

    def names(self, path: str) -> tuple[str, ...] | None: ...

    def stat(self, path: str) -> Stat | None: ...

    def link(self, path: str) -> str | None: ...

    def disk(self, path: str) -> dict[str, Any]: ...

    def model(self, path: str, root: str | None = None, *, weights: bool = True) -> dict[str, Any]: ...

    def processes(self) -> list[Process]: ...

    def holders(self, port: int) -> list[Process] | None: ...


@dataclass(frozen=True)
class LiveHost:
    """The host that this process runs on.

    A command has ``seconds``, and none is waited for after ``deadline`` (time.monotonic). Files are
    read below ``root``, and system programs run from there: unit tests survey a directory instead
    of the machine.
    """

    seconds: float = COMMAND_SECONDS
    deadline: float | None = None
    root: Path = Path("/")

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    @property
    def environment(self) -> Mapping[str, str]:
        return {name: value for name, value in os.environ.items() if name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES)}

    def run(self, argv: tuple[str, ...]) -> Completed:
        started = time.monotonic()
        allowed = self.seconds if self.deadline is None else min(self.seconds, self.deadline - started)
        if allowed <= 0:
            return Completed(None, "", f"{argv[0]}: not asked, since the survey's time was up")
        system_programs = (str(self._at(directory)) for directory in SYSTEM_PROGRAMS)
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), *system_programs))
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                # Tools are read in English, and pager and colour have no place here.
                env=os.environ | {"PATH": path, "LC_ALL": "C.UTF-8", "PAGER": "cat"},
            )
        except FileNotFoundError:
            return Completed(None, "", f"{argv[0]}: not found")
        except OSError as error:
            return Completed(None, "", f"{argv[0]}: {error.strerror}")
        try:
            stdout, stderr = process.communicate(timeout=allowed)
        except subprocess.TimeoutExpired:
            _abandon(process)
            return Completed(None, "", f"{argv[0]}: no answer within {allowed:.3g} s", time.monotonic() - started)
        reason = "" if process.returncode == 0 else (stderr or stdout).strip()[:500]
        return Completed(process.returncode, stdout, reason, time.monotonic() - started)

    def read(self, path: str) -> bytes | None:
        try:
            with self._at(path).open("rb") as stream:
                # A file of /proc says size 0; asking it for many bytes at once is refused.
                if os.fstat(stream.fileno()).st_size > LARGEST_FILE:
                    stream.seek(-LARGEST_FILE, os.SEEK_END)
                return stream.read()
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...] | None:
        try:
            return tuple(sorted(entry.name for entry in self._at(path).iterdir()))
        except OSError:
            return None

    def stat(self, path: str) -> Stat | None:
        try:
            status = self._at(path).stat()
        except OSError:
            return None
        return Stat("directory" if stat.S_ISDIR(status.st_mode) else "file", status.st_size, max(0, int(time.time() - status.st_mtime)))

    def link(self, path: str) -> str | None:
        try:
            return str(self._at(path).readlink())
        except OSError:
            return None

    def disk(self, path: str) -> dict[str, Any]:
        """Return the size and free bytes of the file system of ``path``, and whether we may write there."""
        place = self._at(path)
        usage = shutil.disk_usage(place)
        writable = os.access(place, os.W_OK | os.X_OK)
        return {"total_bytes": usage.total, "free_bytes": usage.free, "writable": writable}

    def model(self, path: str, root: str | None = None, *, weights: bool = True) -> dict[str, Any]:
        """Return what :func:`check_model` does; ``root`` is Aerie's directory, where it keeps the hashes of models that it looked at."""
        cache = model_identity.cache_of(HostPaths(self._at(root))) if root else None
        return check_model(self._at(path), path, cache=cache, weights=weights)

    def processes(self) -> list[Process]:
        return processes.scan()

    def holders(self, port: int) -> list[Process] | None:
        return processes.holders(port)


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill a command and its children; one that the kernel holds (a wedged driver) can't be waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=0.1)


def check_model(directory: Path, shown: str | None = None, *, cache: Path | None = None, weights: bool = True) -> dict[str, Any]:
    """Return what keeps a server from loading the model in ``directory``, which is called ``shown``, its size, and its identity.

    The identity is None where ``cache`` does not know it: to hash weights takes longer than any survey may.
    """
    found = model_identity.problems(directory, weights=weights)
    size = None
    with contextlib.suppress(OSError):
        size = sum(path.stat().st_size for path in model_identity.list_files(directory))
    identity = model_identity.known(directory, cache) if cache and not found else None
    return {
        "problems": [problem.replace(str(directory), shown or str(directory)) for problem in found],
        "bytes": size,
        "identity": identity,
    }


def no_model(problem: str) -> dict[str, Any]:
    """Return what :func:`check_model` would of a model that can't be looked at."""
    return {"problems": [problem], "bytes": None, "identity": None}


class Background(Generic[T]):
    """Something that is done in a thread of its own, which is left behind when it takes too long: a dead mount holds it for ever."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._result: list[T] = []
        self._error: list[Exception] = []
        self._thread = threading.Thread(target=self._do, args=(work,), daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], T]) -> None:
        try:
            self._result.append(work())
        except Exception as error:
            self._error.append(error)

    def result(self, deadline: float | None, late: T) -> T:
        """Return what came of it, ``late`` when nothing has by ``deadline``; what went wrong is raised here."""
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._error:
            raise self._error[0]
        return self._result[0] if self._result else late


@dataclass
class StartedHost:
    """A host whose commands of :meth:`start` run at once; asking for one waits for its answer. Keeps what each answered."""

    host: Host
    deadline: float | None = None
    asked: dict[tuple[str, ...], Background[Completed]] = field(default_factory=dict)
    answers: dict[tuple[str, ...], Completed] = field(default_factory=dict)

    def start(self, commands: Iterable[tuple[str, ...]]) -> None:
        for argv in dict.fromkeys(commands):
            self.asked.setdefault(argv, Background(partial(self.host.run, argv)))

    def run(self, argv: tuple[str, ...]) -> Completed:
        if argv not in self.answers:
            late = Completed(None, "", f"{argv[0]}: no answer before the survey's time was up")
            self.answers[argv] = self.asked[argv].result(self.deadline, late) if argv in self.asked else self.host.run(argv)
        return self.answers[argv]

    @property
    def environment(self) -> Mapping[str, str]:
        return self.host.environment

    def read(self, path: str) -> bytes | None:
        return self.host.read(path)

    def names(self, path: str) -> tuple[str, ...] | None:
        return self.host.names(path)

    def stat(self, path: str) -> Stat | None:
        return self.host.stat(path)

    def link(self, path: str) -> str | None:
        return self.host.link(path)

    def disk(self, path: str) -> dict[str, Any]:
        return self.host.disk(path)

    def model(self, path: str, root: str | None = None, *, weights: bool = True) -> dict[str, Any]:
        return self.host.model(path, root, weights=weights)

    def processes(self) -> list[Process]:
        return self.host.processes()

    def holders(self, port: int) -> list[Process] | None:
        return self.host.holders(port)


def text(host: Host, path: str) -> str | None:
    """Return a file as text."""
    data = host.read(path)
    return None if data is None else data.decode(errors="replace")


def line(host: Host, path: str) -> str | None:
    """Return a file's first line without what surrounds it, None for an empty one."""
    return ((text(host, path) or "").splitlines() or [""])[0].strip("\0 \t") or None


def integer(value: str | None) -> int | None:
    """Return the whole number that ``value`` begins with (``97887 MiB``, ``-1``), None for none."""
    head = (value or "").split()[:1]
    try:
        return int(float(head[0])) if head else None
    except ValueError:
        return None
