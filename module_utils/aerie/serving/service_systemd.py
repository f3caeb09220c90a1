"""Servers as systemd units: one template, ``sglang@.service``, for all instances. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving.service import checked_root

UNITS = Path("/etc/systemd/system")
TEMPLATE = "sglang@.service"

# Left out on purpose: PrivateDevices and DevicePolicy (and ProtectClock, which implies it) hide the GPUs, MemoryDenyWriteExecute
# breaks every JIT, ProtectKernelModules keeps nvidia-modprobe from loading nvidia-uvm, PrivateTmp hides an MPS daemon's pipe,
# PrivateNetwork and RestrictAddressFamilies break NCCL, ProtectHome hides models and roots in a home.
MARK = "# Written by Aerie"
EXEC_START = re.compile(r"^ExecStart=(.*)/instances/%i/launch$", re.MULTILINE)
UNIT = """\
# Written by Aerie (role sglang_server); changes are overwritten.
[Unit]
Description=SGLang server %i (Aerie)
Wants=network-online.target
After=network-online.target nvidia-persistenced.service nvidia-fabricmanager.service
StartLimitIntervalSec=1800
StartLimitBurst=3

[Service]
Type=exec
ExecStart={root}/instances/%i/launch
WorkingDirectory={root}/instances/%i
StandardOutput=append:{root}/instances/%i/server.log
StandardError=inherit
Restart=on-failure
RestartSec=15
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop_seconds}
FinalKillSignal=SIGKILL
UMask=0077
LimitMEMLOCK=infinity
LimitNOFILE=1048576
TasksMax=infinity
OOMPolicy=stop
NoNewPrivileges=yes
LockPersonality=yes
RestrictSUIDSGID=yes
ProtectSystem=full
ProtectControlGroups=yes

[Install]
WantedBy=multi-user.target
"""


class Systemd:
    """Instances below ``paths`` as units ``sglang@<instance>``."""

    kind = "systemd"

    def __init__(self, paths: HostPaths, stop_seconds: int, units: Path = UNITS, systemctl: str = "systemctl") -> None:
        self._root = checked_root(paths)
        self._paths = paths
        self._stop_seconds = stop_seconds
        self._units = units
        self._systemctl = systemctl

    def definitions(self, name: str) -> dict[Path, str]:  # noqa: ARG002
        """Return the template; raise where that file is another's, which is never replaced."""
        self._refuse_foreign(self._units / TEMPLATE)
        return {self._units / TEMPLATE: UNIT.format(root=self._root, stop_seconds=self._stop_seconds)}

    def _refuse_foreign(self, path: Path) -> None:
        try:
            text = path.read_text(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise AerieError(f"{path}: {error.strerror}: it must be Aerie's own unit, or none") from error
        if not text.startswith(MARK):
            raise AerieError(
                f"{path} was not written by Aerie (its first line is not {MARK!r}): move it aside, or set aerie_service_manager to "
                "supervisor"
            )
        root = EXEC_START.search(text)
        if root is not None and root[1] != self._root:
            raise AerieError(
                f"{path} starts the servers of another aerie_root, {root[1]}: a host has one root with systemd; remove that file once "
                f"nothing of {root[1]} is to run here, or set aerie_service_manager to supervisor"
            )

    def install(self, name: str) -> bool:
        changed = False
        for path, text in self.definitions(name).items():
            if not path.exists() or path.read_text() != text:
                write_atomic(path, text)
                changed = True
        if changed:
            self._run("daemon-reload")
        return changed

    def start(self, name: str) -> None:
        # A unit that failed too often refuses to start until it is reset.
        self._run("reset-failed", self._unit(name), check=False)
        self._run("start", self._unit(name))

    def stop(self, name: str, seconds: float) -> None:
        self._run("stop", self._unit(name), timeout=max(seconds, self._stop_seconds) + 30, check=self.is_installed(name))
        self._run("reset-failed", self._unit(name), check=False)

    def main_pid(self, name: str) -> int | None:
        answer = self._run("show", "--property=MainPID", "--value", self._unit(name), check=False)
        return int(answer) if answer.isdigit() and int(answer) > 0 else None

    def is_active(self, name: str) -> bool:
        # "activating" is a unit that waits for RestartSec, without a process.
        return self._run("show", "--property=ActiveState", "--value", self._unit(name), check=False) not in ("", "inactive", "failed")

    def is_installed(self, name: str) -> bool:
        return (self._units / TEMPLATE).exists() and (self._paths.instance(name) / "launch").exists()

    def is_enabled(self, name: str) -> bool:
        return self._run("is-enabled", self._unit(name), check=False) == "enabled"

    def enable(self, name: str) -> None:
        self._run("enable", self._unit(name))

    def disable(self, name: str) -> None:
        self._run("disable", self._unit(name), check=False)

    def remove(self, name: str) -> None:
        self.disable(name)

    @staticmethod
    def _unit(name: str) -> str:
        return f"sglang@{name}.service"

    def _run(self, *arguments: str, timeout: float = 90, check: bool = True) -> str:
        argv = [self._systemctl, "--no-pager", *arguments]
        try:
            answer = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise AerieError(f"{' '.join(argv)} did not end within {timeout:g} s: see journalctl -b") from error
        except OSError as error:
            raise AerieError(
                f"{argv[0]}: {error.strerror}: is systemd running here? set aerie_service_manager to supervisor otherwise"
            ) from error
        if check and answer.returncode:
            raise AerieError(f"{' '.join(argv)} failed ({answer.returncode}): {answer.stderr.strip() or answer.stdout.strip()}")
        return answer.stdout.strip()
