"""Fails a test that looks at the machine it runs on: its result must not depend on what is there.

A test may look at this project, its Python, temporary directories, and the processes that it
started itself. Audit hooks (PEP 578) report what Python opens, lists, connects to and starts; calls
without an audit event, such as ``os.stat``, are wrapped while a test runs. An event counts where a
frame of the project is on the stack. What child processes do is not seen: the guard checks which
programs they run, with which paths on their command lines.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
EXCEPTIONS = {
    "/dev/null": "nothing is there",
    "/proc/self": "this process itself",
    f"{sys.base_prefix}/share/locale": "argparse looks for translations of its messages",
    "/.git": "git_checkout.py looks for a checkout in every directory above a tree",
}
FIRST_PATH = (
    *("open", "os.listdir", "os.scandir", "os.chdir", "os.mkdir", "os.rmdir", "os.remove"),
    *("os.chmod", "os.chown", "os.truncate", "os.utime", "os.posix_spawn"),
)
PATHS = {
    **dict.fromkeys(FIRST_PATH, (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),  # the first is only text
}
"""Which arguments of an audit event are paths. Source: Python's table of audit events."""
UNAUDITED = ("access", "lstat", "readlink", "stat", "statvfs")
"""Functions of ``os`` that look at a path without an audit event."""
OURS = (".venv", "tests/conftest.py", "tests/isolated_machine.py", "tests/machine_guard.py")
"""Places in the project whose frames don't count."""


def _read_ephemeral_ports() -> range:
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)


EPHEMERAL_PORTS = _read_ephemeral_ports()
"""Ports that the kernel gives to who binds to port 0. A fixed port is outside of them."""


def _list_own_places() -> tuple[str, ...]:
    libraries = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    pythons = (sys.executable, os.path.realpath(sys.executable))
    imported = filter(os.path.isabs, sys.path)
    temporary = os.path.realpath(tempfile.gettempdir())
    return tuple({str(PROJECT), temporary, sys.prefix, *libraries, *pythons, *imported})


def is_own_process(pid: int) -> bool:
    """Say whether ``pid`` descends from this process, or is gone, so that nothing of it is seen."""
    while pid not in (0, 1, os.getpid()):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == os.getpid()


class MachineGuard:
    """Collects what is done beyond a test's own places while it watches."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._places = _list_own_places()
        self._project = PROJECT
        self._is_watching = False
        self._is_installed = False
        self._wrappers = {name: self._wrap(name, getattr(os, name)) for name in UNAUDITED}
        self._thread = threading.local()

    @contextlib.contextmanager
    def watch(self, project: Path = PROJECT) -> Iterator[None]:
        """Collect what the code of ``project`` does until the block ends."""
        self._project = project
        if not self._is_installed:
            sys.addaudithook(self._on_event)  # Python has no way to remove one
            self._is_installed = True
        originals = {name: getattr(os, name) for name in UNAUDITED}
        for name, wrapper in self._wrappers.items():
            setattr(os, name, wrapper)
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False
            for name, original in originals.items():
                setattr(os, name, original)

    def stop(self) -> None:
        """Collect nothing more until the next :meth:`watch`."""
        self._is_watching = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let this thread look at the machine: for code that stands between it and a test."""
        before = getattr(self._thread, "is_paused", False)
        self._thread.is_paused = True
        try:
            yield
        finally:
            self._thread.is_paused = before

    def take_violations(self) -> list[str]:
        """Return what was collected, each once, and forget it."""
        violations, self.violations = list(dict.fromkeys(self.violations)), []
        return violations

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if options.get("dir_fd") is None:
                self._on_event(f"os.{name}", (path,))
            return original(path, *arguments, **options)

        # shutil and tempfile look up in these sets what a function of os can do.
        for name_of_set in ("dir_fd", "effective_ids", "fd", "follow_symlinks"):
            functions = getattr(os, f"supports_{name_of_set}")
            if original in functions:
                functions.add(call)
        return call

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_watching or getattr(self._thread, "is_paused", False):
            return
        with self.paused():
            if event in PATHS or event.removeprefix("os.") in UNAUDITED:
                for index in PATHS.get(event, (0,)):
                    self._check_path(event, arguments[index])
            elif event in ("socket.bind", "socket.connect", "socket.sendto"):
                self._check_address(event, arguments[1])
            elif event.startswith(("socket.getaddrinfo", "socket.gethostby")):
                self._check_host(event, arguments[0])
            elif event == "subprocess.Popen":
                program, argv, _directory, environment = arguments
                self._check_program(event, program, argv, environment)
            elif event == "os.system":
                self._report(event, str(arguments[0]))
            elif event in ("os.kill", "os.killpg"):
                self._check_process(event, arguments[0])

    def _check_path(self, event: str, path: Any) -> None:
        if isinstance(path, int) or path is None:  # an open file
            return
        name = os.fsdecode(path)
        if not name.startswith("/"):
            return  # the working directory is the project, or a directory of the test
        name = os.path.normpath(name)
        # To resolve a path, each directory above it is looked at.
        leads = event.removeprefix("os.") in UNAUDITED and self._leads_to_own_place(name)
        if not leads and not self._is_own_path(name):
            self._report(event, name)

    def _is_own_path(self, name: str) -> bool:
        if any(_is_below(name, place) for place in (*self._places, *EXCEPTIONS)):
            return True
        directory = name.removeprefix("/proc/").partition("/")[0]
        return name.startswith("/proc/") and directory.isdigit() and is_own_process(int(directory))

    def _leads_to_own_place(self, name: str) -> bool:
        return any(_is_below(place, name) for place in self._places)

    def _check_address(self, event: str, address: Any) -> None:
        if isinstance(address, str | bytes):  # a Unix socket
            self._check_path(event, address)
            return
        host, port = address[:2]
        is_given = port in EPHEMERAL_PORTS or (port == 0 and event == "socket.bind")
        if not _is_loopback(host) or not is_given:
            self._report(event, f"{host}:{port}, which the test did not get from the system")

    def _check_host(self, event: str, host: Any) -> None:
        if not _is_loopback(host):
            self._report(event, str(host))

    def _check_process(self, event: str, pid: int) -> None:
        if pid <= 0 or not is_own_process(pid):
            self._report(event, f"process {pid}")

    def _check_program(
        self,
        event: str,
        program: Any,
        argv: Any,
        environment: Mapping[str, str] | None,
    ) -> None:
        search_path = os.pathsep.join(os.get_exec_path(environment))
        executable = shutil.which(program, path=search_path)
        words = [argv] if isinstance(argv, str | bytes | os.PathLike) else argv
        paths = [word for word in map(os.fsdecode, words[1:]) if word.startswith("/")]
        for path in ([executable] if executable else []) + paths:
            name = os.path.normpath(path)
            if not self._is_own_path(name):
                self._report(event, f"{os.fsdecode(program)} with {name}")

    def _report(self, event: str, what: str) -> None:
        lines = self._list_lines(sys._getframe(1))
        if lines:
            caller = f", called by {lines[-1]}" if len(lines) > 1 else ""
            self.violations.append(f"{event} {what}: {lines[0]}{caller}")

    def _list_lines(self, frame: FrameType | None) -> list[str]:
        """Return the lines of the project on the stack, innermost first."""
        lines = []
        while frame is not None:
            for project in {PROJECT, self._project}:
                name = frame.f_code.co_filename.removeprefix(f"{project}/")
                is_ours = any(_is_below(name, place) for place in OURS)
                if not name.startswith(("/", "<")) and not is_ours:
                    lines.append(f"{name}:{frame.f_lineno}")
            frame = frame.f_back
        return lines


def _is_below(name: str, place: str) -> bool:
    return name == place or name.startswith(place.rstrip("/") + "/")


def _is_loopback(host: Any) -> bool:
    text = os.fsdecode(host) if isinstance(host, str | bytes) else ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text).is_loopback
    return text == "localhost"


guard = MachineGuard()
