"""What a host has of tuning: our files and state, what others set, and the values in force. Standard library only: this runs on hosts.

Nothing here changes anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json
from ansible.module_utils.aerie.host import tuning_files as files
from ansible.module_utils.aerie.host.tuning_settings import LIMITS, Settings

STATE = "/var/lib/aerie/host-tuning.json"
# Not on disk: what was taken back and is still in force until the next boot.
UNDONE = "/run/aerie-host-tuning.json"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = ("update-grub", "update-initramfs", "dracut", "setpci", "lspci", "nvidia-smi", "su", "systemctl")
COMMAND_SECONDS = 900  # an initramfs for each of several kernels
LIVE_KINDS = ("sysctl", "governor", "acs", "persistence", "power_limit")
SYSFS_CPUS = "sys/devices/system/cpu"
ACS_CONTROL = "ECAP_ACS+0x6.w"
ACS_CLEAR = "0000"
CLEARED_PORTS = ("root_port", "downstream_port")
PARAMS = "proc/driver/nvidia/params"

Run = Callable[[tuple[str, ...]], tuple[int, str]]
"""Run a command; return its exit status and what it printed."""


def run_command(argv: tuple[str, ...]) -> tuple[int, str]:
    environment = os.environ | {"LC_ALL": "C", "PATH": PATH}
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {COMMAND_SECONDS} s"
    except OSError as error:
        return 127, str(error.strerror)
    return done.returncode, (done.stdout + done.stderr).strip()


@dataclass(frozen=True)
class State:
    """What we did to a host: hashes of our files, directories that we made, live values as they were, commands still to run."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    previous: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    pending: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def load(cls, path: Path) -> State | None:
        try:
            found = read_json(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise AerieError(
                f"{path}: {error}: it says how this host was before it was tuned; restore it, or remove it to forget that"
            ) from error
        return cls(
            settings=found["settings"],
            files=found["files"],
            directories=tuple(found["directories"]),
            previous=found["previous"],
            pending=tuple(tuple(argv) for argv in found["pending"]),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "files": self.files,
            "directories": list(self.directories),
            "previous": self.previous,
            "pending": [list(argv) for argv in self.pending],
        }


@dataclass(frozen=True)
class Found:
    """What is there. Live values are by kind (:data:`LIVE_KINDS`) and name; GPUs are named by their UUID."""

    info: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    grub: files.GrubWords = field(default_factory=files.GrubWords)
    modprobe: tuple[files.Foreign, ...] = ()
    sysctl: tuple[files.Foreign, ...] = ()
    limits: tuple[files.Foreign, ...] = ()
    governors: tuple[files.Foreign, ...] = ()
    live: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    available_governors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpu_indices: Mapping[str, int] = field(default_factory=dict)
    loaded: Mapping[str, Mapping[str, str] | None] = field(default_factory=dict)
    login_limits: Mapping[str, str] = field(default_factory=dict)
    running_words: tuple[str, ...] = ()
    tools: Mapping[str, str] = field(default_factory=dict)
    has_grub: bool = False
    boot_loader: str = ""
    systemd: bool = True
    enabled: frozenset[str] = frozenset()
    active: frozenset[str] = frozenset()
    state: State | None = None
    undone: Settings = field(default_factory=Settings)
    missing_directories: tuple[str, ...] = ()


def read(root: Path, info: Mapping[str, Any], wanted: Settings, run: Run = run_command) -> Found:
    """Return what a plan for ``wanted`` needs to know of the host whose tree is at ``root``. Changes nothing."""
    state = State.load(at(root, STATE))
    previous = state.previous if state else {}
    tools = {name: str(found) for name in TOOLS if (found := _which(root, name))}
    gpus = [gpu for gpu in info.get("gpus") or [] if gpu.get("uuid")]
    cpus = {path.parent.parent.name: path for path in sorted(root.glob(f"{SYSFS_CPUS}/cpu[0-9]*/cpufreq/scaling_governor"))}
    live: dict[str, dict[str, str]] = {
        "sysctl": {
            name: text
            for name in dict.fromkeys((*wanted.sysctl, *previous.get("sysctl", {})))
            if (text := _line(at(root, sysctl_path(name)))) is not None
        },
        "governor": {name: _line(path) or "" for name, path in cpus.items()},
        "acs": _read_acs(info, wanted, tools, run),
        "persistence": {gpu["uuid"]: "1" if gpu["persistence"] else "0" for gpu in gpus if gpu.get("persistence") is not None},
        "power_limit": {gpu["uuid"]: watts for gpu in gpus if (watts := _watts((gpu.get("power") or {}).get("limit_w")))},
    }
    loaded: dict[str, Mapping[str, str] | None] = {module: _loaded(root, module, options) for module, options in wanted.modprobe.items()}
    undone = _read_undone(root)
    for module, options in _merged_options(undone, state).items():
        loaded.setdefault(module, _loaded(root, module, options))
    units = (files.ACS_UNIT, files.POWER_UNIT)
    systemd = "systemctl" in tools and (root / "run/systemd/system").is_dir()
    return Found(
        info=info,
        texts={path: text for path in files.FILES if (text := _text(at(root, path))) is not None},
        grub=files.grub_words(root),
        modprobe=tuple(files.modprobe_options(root)),
        sysctl=tuple(files.sysctl_values(root)),
        limits=tuple(files.limit_values(root)),
        governors=tuple(files.governors(root)),
        live=live,
        available_governors={
            name: tuple((_line(path.with_name("scaling_available_governors")) or "").split()) for name, path in cpus.items()
        },
        gpu_indices={gpu["uuid"]: gpu["index"] for gpu in gpus},
        loaded=loaded,
        login_limits=_read_login_limits(wanted, tools, run),
        running_words=tuple((_line(root / "proc/cmdline") or "").split()),
        tools=tools,
        has_grub="update-grub" in tools,
        boot_loader=files.boot_loader(root),
        systemd=systemd,
        enabled=frozenset(unit for unit in units if at(root, f"{files.WANTS}/{unit}").is_symlink()),
        active=frozenset(
            unit
            for unit in units
            if systemd and at(root, f"{files.UNITS}/{unit}").exists() and run((tools["systemctl"], "is-active", "--quiet", unit))[0] == 0
        ),
        state=state,
        undone=undone,
        missing_directories=tuple(
            sorted(
                {
                    str(parent)
                    for path in (*files.FILES, f"{files.WANTS}/{files.ACS_UNIT}", STATE)
                    for parent in Path(path).parents
                    if not at(root, str(parent)).exists()
                }
            )
        ),
    )


def nothing_to_do(root: Path, wanted: Settings) -> bool:
    """Say whether a host that nothing is wanted of was never tuned, so that it need not be read."""
    return not wanted and not at(root, STATE).exists() and not at(root, UNDONE).exists()


def sysctl_path(name: str) -> str:
    return f"/proc/sys/{name.replace('.', '/')}"


def _read_acs(info: Mapping[str, Any], wanted: Settings, tools: Mapping[str, str], run: Run) -> dict[str, str]:
    """Return the control word of each port with ACS above a GPU, as :data:`tuning_files.CLEAR_ACS` chooses them."""
    if not wanted.acs or "setpci" not in tools:
        return {}
    pci = info.get("pci") or {}
    bridges = {bridge["address"]: bridge for bridge in pci.get("bridges") or []}
    above: set[str] = set()
    for link in pci.get("gpu_links") or []:
        address = link.get("parent")
        while address in bridges and address not in above:
            above.add(address)
            address = bridges[address].get("parent")
    words = {}
    for address in sorted(above):
        if bridges[address].get("acs") is not None and bridges[address].get("kind") in CLEARED_PORTS:
            status, text = run((tools["setpci"], "-s", address, ACS_CONTROL))
            if status == 0 and text:
                words[address] = text.split()[0].lower()
    return words


def _read_login_limits(wanted: Settings, tools: Mapping[str, str], run: Run) -> dict[str, str]:
    """Return the limits that a new login gets, in limits.conf's units; our own process may belong to a login older than a change."""
    if not wanted.limits or "su" not in tools:
        return {}
    status, text = run((tools["su"], "root", "-c", "ulimit -Sl; ulimit -Sn"))
    return dict(zip(LIMITS, text.split(), strict=False)) if status == 0 else {}


def _loaded(root: Path, module: str, names: Iterable[str]) -> dict[str, str] | None:
    """Return the values that a loaded module runs with; None for one that is not loaded.

    NVIDIA's module lets its parameters be read from /proc only: in /sys a string such as NVreg_RegistryDwords is empty.
    """
    if module == "nvidia":
        text = _text(root / PARAMS)
        if text is None:
            return None
        pairs = (line.partition(":") for line in text.splitlines())
        return {f"NVreg_{name.strip()}": value.strip().strip('"') for name, separator, value in pairs if separator}
    parameters = root / "sys/module" / module / "parameters"
    if not parameters.parent.is_dir():
        return None
    return {name: value for name in names if (value := _line(parameters / name)) is not None}


def _read_undone(root: Path) -> Settings:
    try:
        found = read_json(at(root, UNDONE))
    except (OSError, ValueError):
        return Settings()
    return Settings(kernel_command_line=tuple(found["kernel_command_line"]), modprobe=found["modprobe"])


def _merged_options(undone: Settings, state: State | None) -> dict[str, dict[str, str]]:
    kept: Mapping[str, Mapping[str, str]] = state.settings.get("modprobe", {}) if state else {}
    return {module: {**undone.modprobe.get(module, {}), **kept.get(module, {})} for module in (*undone.modprobe, *kept)}


def at(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _which(root: Path, name: str) -> str | None:
    found = shutil.which(name, path=":".join(str(at(root, directory)) for directory in PATH.split(":")))
    return f"/{Path(found).relative_to(root)}" if found else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _line(path: Path) -> str | None:
    text = _text(path)
    return None if text is None else " ".join(text.split())


def _watts(value: Any) -> str | None:
    return None if value is None else f"{float(value):g}"
