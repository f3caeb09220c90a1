"""Servers below supervisord, where systemd does not run (a container) or we are not root. Standard library only: this runs on hosts.

One supervisord for each Aerie root, asked over its Unix socket by XML-RPC (supervisor's documented interface). It starts when
an instance is started, outlives Ansible, and ends when its last instance is stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import resource
import socket
import stat
import subprocess
import time
import xmlrpc.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving.service import checked_root, last_lines

LONGEST_SOCKET = 107 - len(".4194304")
"""sun_path holds 107 bytes and a NUL; supervisord first binds beside the socket, under its name and a process id."""

LIVE_STATES = ("STARTING", "RUNNING", "BACKOFF", "STOPPING")
KEPT_VARIABLES = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
"""What a server inherits; all else comes from its environment file, so that it runs the same whoever starts it."""

BAD_NAME, NOT_RUNNING = 10, 70
"""Fault codes of supervisor's XML-RPC interface (supervisor/xmlrpc.py)."""

SUPERVISORD = """\
; Written by Aerie (role sglang_server); changes are overwritten.
[unix_http_server]
file = {socket}
chmod = 0700

[supervisord]
logfile = {directory}/supervisord.log
logfile_maxbytes = 5MB
logfile_backups = 2
pidfile = {directory}/supervisord.pid
childlogdir = {directory}
directory = {directory}
umask = 077
minfds = {files}
minprocs = 200
identifier = aerie

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl = unix://{socket}

[include]
files = conf.d/*.conf
"""

# startsecs: a death within it counts as a failed start, of which there may be startretries in a row; a server that
# dies while it loads must not be loaded again and again.
PROGRAM = """\
; Written by Aerie (role sglang_server); changes are overwritten.
[program:{name}]
command = {instance}/launch
directory = {instance}
autostart = false
autorestart = unexpected
exitcodes = 0
startsecs = 300
startretries = 2
stopsignal = TERM
stopwaitsecs = {stop_seconds}
stopasgroup = true
killasgroup = true
redirect_stderr = true
stdout_logfile = {instance}/server.log
stdout_logfile_maxbytes = 50MB
stdout_logfile_backups = 3
"""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(self._path)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        del host  # "localhost": the socket is the address
        return _Connection(self._path)


class Supervisor:
    """Instances below ``paths`` as programs of one supervisord; ``program`` is its executable."""

    kind = "supervisor"

    def __init__(self, paths: HostPaths, stop_seconds: int, program: Path | None) -> None:
        checked_root(paths)
        self._paths = paths
        self._stop_seconds = stop_seconds
        self._program = program

    @property
    def socket(self) -> Path:
        """Return where supervisord listens: below the root, or in a directory of our own in /tmp where that path is too long."""
        near = self._paths.supervisor / "supervisor.sock"
        if len(os.fsencode(near)) <= LONGEST_SOCKET:
            return near
        digest = hashlib.sha256(os.fsencode(self._paths.root)).hexdigest()[:12]
        return Path("/tmp") / f"aerie-{os.geteuid()}-{digest}" / "supervisor.sock"

    @property
    def configuration(self) -> Path:
        return self._paths.supervisor / "supervisord.conf"

    def _program_file(self, name: str) -> Path:
        return self._paths.supervisor / "conf.d" / f"{name}.conf"

    def definitions(self, name: str) -> dict[Path, str]:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = 1048576 if hard == resource.RLIM_INFINITY else min(hard, 1048576)
        return {
            self.configuration: SUPERVISORD.format(socket=self.socket, directory=self._paths.supervisor, files=files),
            self._program_file(name): PROGRAM.format(name=name, instance=self._paths.instance(name), stop_seconds=self._stop_seconds),
        }

    def install(self, name: str) -> bool:
        changed = False
        self._paths.supervisor.mkdir(parents=True, exist_ok=True, mode=0o755)
        for path, text in self.definitions(name).items():
            if not path.exists() or path.read_text() != text:
                write_atomic(path, text)
                changed = True
        return changed

    def start(self, name: str) -> None:
        self._ensure_supervisord()
        server = self._server()
        with _ignored():
            server.reloadConfig()
            # A group that is there keeps its old definition until it is removed.
            self._take_out(server, name)
            server.addProcessGroup(name)
            server.startProcess(name, False)

    def stop(self, name: str, seconds: float) -> None:
        if not self._answers():
            self._end_deaf_supervisord(seconds)
            return
        try:
            self._stop_program(name, seconds)
        except (OSError, http.client.HTTPException):
            # Somebody else may have stopped its last server, and so supervisord, in the meantime.
            if self._pid() is not None:
                raise

    def _stop_program(self, name: str, seconds: float) -> None:
        server = self._server()
        with _ignored(BAD_NAME, NOT_RUNNING):
            server.stopProcess(name, False)
        deadline = time.monotonic() + max(seconds, self._stop_seconds) + 10
        while self._state(server, name) in LIVE_STATES:
            if time.monotonic() > deadline:
                raise AerieError(
                    f"instance {name}: supervisord (process {self._pid()}) has not stopped it: see {self._paths.supervisor}/supervisord.log"
                )
            time.sleep(0.1)
        self._take_out(server, name)
        if not any(info["statename"] in LIVE_STATES for info in server.getAllProcessInfo()):
            self._shut_down(server)

    def main_pid(self, name: str) -> int | None:
        if not self._answers():
            return None
        try:
            info = self._server().getProcessInfo(name)
        except (xmlrpc.client.Fault, OSError):
            return None
        return int(info["pid"]) or None

    def is_active(self, name: str) -> bool:
        return self._answers() and self._state(self._server(), name) in LIVE_STATES

    def is_installed(self, name: str) -> bool:
        return self._program_file(name).exists()

    def is_enabled(self, name: str) -> bool:  # noqa: ARG002
        """Supervisor itself is not started at boot, so nothing is."""
        return False

    def enable(self, name: str) -> None:
        """Nothing to do: see :meth:`is_enabled`."""

    def disable(self, name: str) -> None:
        """Nothing to do: see :meth:`is_enabled`."""

    def remove(self, name: str) -> None:
        self._program_file(name).unlink(missing_ok=True)

    def _server(self) -> Any:
        return xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=_Transport(str(self.socket))).supervisor

    def _answers(self) -> bool:
        if not self.socket.exists() or not self._directory_is_ours():
            return False
        try:
            return bool(self._server().getState()["statename"] == "RUNNING")
        except (OSError, xmlrpc.client.Error, http.client.HTTPException):
            return False

    def _directory_is_ours(self) -> bool:
        found = self.socket.parent.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()

    def _pid(self) -> int | None:
        try:
            pid = int((self._paths.supervisor / "supervisord.pid").read_text())
        except (OSError, ValueError):
            return None
        process = processes.read(pid)
        return pid if process and str(self.configuration) in process.argv else None

    def _ensure_supervisord(self) -> None:
        if self._answers():
            return
        if pid := self._pid():
            raise AerieError(
                f"supervisord (process {pid}) runs but does not answer at {self.socket}: "
                "run the stop playbook, which ends it, and start again"
            )
        if self._program is None or not os.access(self._program, os.X_OK):
            raise AerieError(
                f"no supervisord at {self._program or self._paths.environments / 'supervisor-*/bin/supervisord'}: "
                "run the install playbook first"
            )
        self.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._directory_is_ours():
            raise AerieError(
                f"{self.socket.parent} belongs to another user: choose a shorter aerie_root, so that supervisor's socket fits below it"
            )
        self.socket.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith("NVIDIA_")}
        log = self._paths.supervisor / "supervisord.log"
        answer = subprocess.run(
            [str(self._program), "-c", str(self.configuration)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self._paths.supervisor,
            start_new_session=True,
            timeout=60,
            check=False,
        )
        if answer.returncode == 0 and self._comes_up(20):
            return
        detail = "\n".join([answer.stdout.strip()[-1000:], *last_lines(log, 5)]).strip()
        raise AerieError(f"{self._program} did not start ({answer.returncode}): {detail or 'it said nothing'}")

    def _comes_up(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (up := self._answers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return up

    def _end_deaf_supervisord(self, seconds: float) -> None:
        """End a supervisord whose socket is gone, since nobody can ask it to stop a server; SIGTERM makes it stop them all."""
        pid = self._pid()
        if pid and (process := processes.read(pid)):
            processes.end([process], seconds + 10)

    def _shut_down(self, server: Any) -> None:
        pid = self._pid()
        with contextlib.suppress(OSError, http.client.HTTPException, xmlrpc.client.Error):
            server.shutdown()
        if pid and (process := processes.read(pid)) and processes.wait_gone([process], 20):
            raise AerieError(
                f"supervisord (process {pid}) has stopped its servers but does not end: see {self._paths.supervisor}/supervisord.log"
            )
        if self.socket.parent != self._paths.supervisor:
            with contextlib.suppress(OSError):
                self.socket.parent.rmdir()

    @staticmethod
    def _state(server: Any, name: str) -> str:
        try:
            return str(server.getProcessInfo(name)["statename"])
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == BAD_NAME:
                return "STOPPED"
            raise

    @staticmethod
    def _take_out(server: Any, name: str) -> None:
        with _ignored(BAD_NAME):
            server.removeProcessGroup(name)


@contextlib.contextmanager
def _ignored(*codes: int) -> Iterator[None]:
    try:
        yield
    except xmlrpc.client.Fault as fault:
        if fault.faultCode not in codes:
            raise AerieError(f"supervisord: {fault.faultString}") from fault
