"""What a host is: hardware, system, Python, listeners and servers, read without changing anything.

Standard library only: this runs on hosts. A host is read through :class:`LiveHost`, or through :class:`RecordedHost` from a
directory that holds part of its file tree and, in ``recording.json``, what its commands and file systems answered.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import canonical_hash, sha256_bytes
from ansible.module_utils.aerie.paths import HostPaths

COMMAND_SECONDS = 20
INSTANCE_VARIABLE, ROOT_VARIABLE = "AERIE_INSTANCE", "AERIE_ROOT"
PYTHONS = ("python3", "python3.11", "python3.12", "python3.13")
RECORDING = "recording.json"

GPU_FIELDS = ("index", "name", "uuid", "driver_version", "memory.total", "memory.used", "compute_cap", "pci.bus_id")
GPU_QUERY = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")

PYTHON_PROBE = (
    "import importlib.util as u, json, platform, sys;"
    "print(json.dumps({'version': platform.python_version(), 'executable': sys.executable,"
    " 'venv': u.find_spec('venv') is not None, 'ensurepip': u.find_spec('ensurepip') is not None}))"
)

# A limit at or above this is the kernel's way to say "none" (cgroup v1 rounds LONG_MAX down to a page).
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Completed:
    """What a command gave: its exit status (None when it could not run or took too long) and its output."""

    rc: int | None
    stdout: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.rc == 0


class Host(Protocol):
    """How the survey reads a host: files below ``root``, commands bounded in time, file systems."""

    @property
    def root(self) -> Path: ...

    def run(self, argv: tuple[str, ...]) -> Completed: ...

    def disk(self, path: Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class LiveHost:
    """The host that this process runs on."""

    root: Path = Path("/")

    def run(self, argv: tuple[str, ...]) -> Completed:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL)
        except FileNotFoundError:
            return Completed(None, "", f"{argv[0]}: not found")
        except OSError as error:
            return Completed(None, "", f"{argv[0]}: {error.strerror}")
        except subprocess.TimeoutExpired:
            return Completed(None, "", f"{argv[0]}: no answer within {COMMAND_SECONDS} s")
        return Completed(done.returncode, done.stdout, "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[:500])

    def disk(self, path: Path) -> dict[str, Any]:
        """Return the size and free bytes of the file system of ``path``, and whether we may write there."""
        usage = shutil.disk_usage(path)
        return {"total_bytes": usage.total, "free_bytes": usage.free, "writable": os.access(path, os.W_OK | os.X_OK)}


@dataclass(frozen=True)
class RecordedHost:
    """A host's recording: files below ``root``; ``recording.json`` has ``commands`` ({command line: {rc, stdout, reason}})
    and ``disks`` ({mount point: {total_bytes, free_bytes, writable}})."""

    root: Path
    commands: dict[str, dict[str, Any]] = field(default_factory=dict)
    disks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, argv: tuple[str, ...]) -> Completed:
        answer = self.commands.get(" ".join(argv))
        return (
            Completed(None, "", f"{argv[0]}: not found")
            if answer is None
            else Completed(answer["rc"], answer["stdout"], answer.get("reason", ""))
        )

    def disk(self, path: Path) -> dict[str, Any]:
        inside = Path("/") / path.relative_to(self.root)
        mount = next((str(parent) for parent in (inside, *inside.parents) if str(parent) in self.disks), None)
        if mount is None:
            raise AerieError(f"{self.root / RECORDING}: disks names no file system that holds {inside}")
        return dict(self.disks[mount])


def open_host(root: Path) -> Host:
    """Return the live host for ``/``, else the recording below ``root``."""
    if root == Path("/"):
        return LiveHost()
    path = root / RECORDING
    try:
        recording = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AerieError(f"{path}: {error}: a root other than / must be a host's recording") from error
    return RecordedHost(root, recording.get("commands", {}), recording.get("disks", {}))


@dataclass(frozen=True)
class Question:
    """What to look at besides the host itself."""

    aerie_root: Path | None = None
    ports: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    pythons: tuple[str, ...] = PYTHONS


def survey(host: Host, question: Question) -> dict[str, Any]:
    """Return everything that ``gpu_host_info`` returns."""
    gpus, gpu_reason = read_gpus(host)
    info: dict[str, Any] = {
        "hostname": _line(host, "proc/sys/kernel/hostname"),
        "machine_id_hash": machine_id_hash(host),
        "user": read_user(host),
        "os": read_os(host),
        "kernel": _line(host, "proc/sys/kernel/osrelease"),
        "architecture": host.run(("uname", "-m")).stdout.strip() or None,
        "cpu": read_cpu(host),
        "memory": read_memory(host),
        "gpus": gpus,
        "gpu_reason": gpu_reason,
        "cuda_driver_version": read_cuda_driver_version(host) if gpus else None,
        "service_manager": read_service_manager(host),
        "container": read_container(host),
        "pythons": read_pythons(host, question.pythons),
        "paths": {path: read_path(host, Path(path)) for path in question.paths},
        "ports": read_ports(host, question.ports),
    }
    info |= read_aerie(host, question.aerie_root)
    info["fingerprint"] = fingerprint(info)
    return info


def fingerprint(info: dict[str, Any]) -> str:
    """Return a hash of what makes figures comparable: the machine, its hardware, system and drivers; nothing that moves by itself."""
    return canonical_hash(
        {
            "machine": info["machine_id_hash"],
            "os": [info["os"]["id"], info["os"]["version_id"]],
            "kernel": info["kernel"],
            "architecture": info["architecture"],
            "cpu": [info["cpu"][key] for key in ("model", "sockets", "cores", "logical")],
            "memory_gib": round((info["memory"]["total_bytes"] or 0) / 2**30),
            "gpus": [[gpu[key] for key in ("name", "uuid", "driver", "memory_total_mib", "compute_capability")] for gpu in info["gpus"]],
            "cuda": info["cuda_driver_version"],
        }
    )


def read_os(host: Host) -> dict[str, str | None]:
    """Return the distribution by os-release(5)."""
    text = _text(host, "etc/os-release") or _text(host, "usr/lib/os-release") or ""
    values = {name: value.strip("'\"") for name, separator, value in (line.partition("=") for line in text.splitlines()) if separator}
    return {"id": values.get("ID"), "version_id": values.get("VERSION_ID"), "name": values.get("PRETTY_NAME")}


def machine_id_hash(host: Host) -> str | None:
    """Return a hash of the machine id: machine-id(5) asks that the id itself is not shown around."""
    machine = _line(host, "etc/machine-id")
    return sha256_bytes(f"aerie:{machine}".encode())[:16] if machine else None


def read_user(host: Host) -> dict[str, Any]:
    """Return the name and id of the user that the survey runs as."""
    uid = host.run(("id", "-u")).stdout.strip()
    return {"name": host.run(("id", "-un")).stdout.strip() or None, "uid": int(uid) if uid.isdigit() else None}


def read_cpu(host: Host) -> dict[str, Any]:
    """Return model and counts of the CPUs, and how many of them this process may use."""
    model, sockets, cores, logical = None, set(), set(), 0
    for block in (_text(host, "proc/cpuinfo") or "").split("\n\n"):
        values = {
            name.strip(): value.strip() for name, separator, value in (line.partition(":") for line in block.splitlines()) if separator
        }
        if "processor" not in values:
            continue
        logical += 1
        model = model or values.get("model name")
        socket = values.get("physical id", "0")
        sockets.add(socket)
        cores.add((socket, values.get("core id", values["processor"])))
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(host, "proc/self/status") or "", re.MULTILINE)
    return {
        "model": model,
        "sockets": len(sockets),
        "cores": len(cores),
        "logical": logical,
        "available": count_cpus(allowed.group(1)) if allowed else logical,
    }


def count_cpus(ranges: str) -> int:
    """Return how many CPUs a list such as ``0-3,8`` names."""
    return sum(int(last or first) - int(first) + 1 for first, _, last in (part.partition("-") for part in ranges.split(",")))


def read_memory(host: Host) -> dict[str, int | None]:
    """Return total, available and limit in bytes; ``available`` already heeds the control group's limit."""
    values = {name: int(value) * 1024 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", _text(host, "proc/meminfo") or "", re.MULTILINE)}
    available, limit, used = values.get("MemAvailable"), *_cgroup_memory(host)
    if available is not None and limit is not None:
        available = min(available, max(0, limit - used))
    return {"total_bytes": values.get("MemTotal"), "available_bytes": available, "cgroup_limit_bytes": limit}


def _cgroup_memory(host: Host) -> tuple[int | None, int]:
    """Return the tightest limit of our control groups and what is used of it. Source: cgroups(7), v1 and v2 layouts."""
    tightest, used = None, 0
    for row in (_text(host, "proc/self/cgroup") or "").splitlines():
        _, controllers, group = row.split(":", 2)
        if controllers == "":
            base, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = Path(group)
        for parent in (own, *own.parents):
            directory = f"{base}/{str(parent).strip('/')}".rstrip("/")
            limit = _line(host, f"{directory}/{names[0]}")
            if limit is None or not limit.isdigit() or int(limit) >= NO_LIMIT or (tightest is not None and int(limit) >= tightest):
                continue
            current = _line(host, f"{directory}/{names[1]}") or ""
            tightest, used = int(limit), int(current) if current.isdigit() else 0
    return tightest, used


def read_gpus(host: Host) -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that the driver reports, and why there are none. Source: ``nvidia-smi --help-query-gpu``."""
    answer = host.run(GPU_QUERY)
    if not answer.ok:
        return [], answer.reason or f"{GPU_QUERY[0]} exited with {answer.rc}: {answer.stdout.strip()[:500]}"
    gpus = []
    for row in answer.stdout.splitlines():
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != len(GPU_FIELDS):
            continue
        index, name, uuid, driver, total, used, capability, bus = (
            None if cell.strip("[]") in ("N/A", "Not Supported", "Unknown Error") else cell for cell in cells
        )
        gpus.append(
            {
                "index": _int(index),
                "name": name,
                "uuid": uuid,
                "driver": driver,
                "memory_total_mib": _int(total),
                "memory_used_mib": _int(used),
                "compute_capability": capability,
                "pci_bus_id": bus,
            }
        )
    return gpus, None if gpus else f"{GPU_QUERY[0]} lists no GPU: {answer.stdout.strip()[:200] or 'empty answer'}"


def read_cuda_driver_version(host: Host) -> str | None:
    """Return the newest CUDA version that the driver supports, from the heading of ``nvidia-smi``."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", host.run(("nvidia-smi",)).stdout)
    return found.group(1) if found else None


def read_service_manager(host: Host) -> dict[str, Any]:
    """Return whether systemd manages this host, as sd_booted(3) tells, and what process 1 is."""
    return {"systemd": (host.root / "run/systemd/system").is_dir(), "pid1": _line(host, "proc/1/comm")}


def read_container(host: Host) -> dict[str, str | None]:
    """Return the kind of container that this is, None for none, and the evidence."""
    for name, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if _kind(host.root / name):
            return {"kind": kind, "evidence": f"/{name}"}
    if manager := _line(host, "run/systemd/container"):
        return {"kind": manager, "evidence": "/run/systemd/container"}
    for item in (_text(host, "proc/1/environ") or "").split("\0"):
        if item.startswith("container="):
            return {"kind": item.removeprefix("container="), "evidence": "/proc/1/environ"}
    found = re.search(r"(docker|kubepods|lxc|containerd|libpod)", _text(host, "proc/1/cgroup") or "")
    return {"kind": found.group(1), "evidence": "/proc/1/cgroup"} if found else {"kind": None, "evidence": None}


def read_pythons(host: Host, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return for each name what interpreter answers to it, and whether that can make virtual environments."""
    found = {}
    for name in dict.fromkeys(names):
        answer = host.run((name, "-c", PYTHON_PROBE))
        try:
            found[name] = json.loads(answer.stdout) if answer.ok else None
        except ValueError:
            found[name] = None
    return {name: probe for name, probe in found.items() if probe is not None}


def read_path(host: Host, path: Path) -> dict[str, Any]:
    """Return whether ``path`` exists, and size, free bytes and our rights on its nearest existing parent."""
    if not path.is_absolute():
        raise AerieError(f"paths: {path} is not absolute")
    nearest = host.root / path.relative_to("/")
    kind = _kind(nearest)
    while _kind(nearest) is None and nearest != host.root:
        nearest = nearest.parent
    inside = Path("/") / nearest.relative_to(host.root)
    return {"exists": kind is not None, "kind": kind, "nearest": str(inside), **host.disk(nearest)}


def read_ports(host: Host, ports: Iterable[int]) -> dict[str, list[dict[str, Any]]]:
    """Return who listens on each TCP port; one entry without pid says that something does which we may not see."""
    proc = host.root / "proc"
    found = {}
    for port in ports:
        owners = [
            {
                "pid": owner.pid,
                "argv": list(owner.argv),
                "instance": owner.variable(INSTANCE_VARIABLE),
                "root": owner.variable(ROOT_VARIABLE),
            }
            for owner in processes.listeners(port, proc)
        ]
        hidden = not owners and processes.is_listening(port, proc)
        found[str(port)] = owners or ([{"pid": None, "argv": [], "instance": None, "root": None}] if hidden else [])
    return found


def read_aerie(host: Host, root: Path | None) -> dict[str, Any]:
    """Return the current release's id and the servers of ``root`` that run, by the instance that their environment names."""
    servers: dict[str, list[dict[str, Any]]] = {}
    for process in processes.scan(host.root / "proc"):
        # Another root may have an instance of the same name.
        if (name := process.variable(INSTANCE_VARIABLE)) and (root is None or process.variable(ROOT_VARIABLE) == str(root)):
            servers.setdefault(name, []).append({"pid": process.pid, "argv": list(process.argv)})
    release = None
    if root is not None:
        current = HostPaths(host.root / root.relative_to("/")).current
        release = current.readlink().name if current.is_symlink() else None
    return {"servers": servers, "release": release}


def _kind(path: Path) -> str | None:
    """Return what lies at ``path``; None for nothing, or nothing that we may see."""
    try:
        return "directory" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except OSError:
        return None


def _text(host: Host, path: str) -> str | None:
    try:
        return (host.root / path).read_text(errors="replace")
    except OSError:
        return None


def _line(host: Host, path: str) -> str | None:
    return ((_text(host, path) or "").splitlines() or [""])[0].strip("\0 ") or None


def _int(cell: str | None) -> int | None:
    return int(float(cell)) if cell is not None else None
