"""The machine and its system: distribution, user, CPUs, memory, service manager, container, Pythons.

Standard library only: this runs on hosts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.host.hosts import Host, integer, line, text

PYTHONS = ("python3", "python3.11", "python3.12", "python3.13")
PYTHON_PROBE = (
    "import importlib.util as u, json, platform, sys;"
    "print(json.dumps({'version': platform.python_version(), 'executable': sys.executable,"
    " 'venv': u.find_spec('venv') is not None, 'ensurepip': u.find_spec('ensurepip') is not None}))"
)
ARCHITECTURE, USER_ID, USER_NAME = ("uname", "-m"), ("id", "-u"), ("id", "-un")

# A limit at or above this is the kernel's way to say "none" (cgroup v1 rounds LONG_MAX down to a page).
NO_LIMIT = 1 << 60


def commands(pythons: Iterable[str]) -> list[tuple[str, ...]]:
    """Return what is run for this part."""
    return [ARCHITECTURE, USER_ID, USER_NAME, *((name, "-c", PYTHON_PROBE) for name in pythons)]


def read_os(host: Host) -> dict[str, str | None]:
    """Return the distribution by os-release(5)."""
    content = text(host, "/etc/os-release") or text(host, "/usr/lib/os-release") or ""
    values = {name: value.strip("'\"") for name, separator, value in (row.partition("=") for row in content.splitlines()) if separator}
    return {"id": values.get("ID"), "version_id": values.get("VERSION_ID"), "name": values.get("PRETTY_NAME")}


def machine_id_hash(host: Host) -> str | None:
    """Return a hash of the machine id: machine-id(5) asks that the id itself is not shown around."""
    machine = line(host, "/etc/machine-id")
    return sha256_bytes(f"aerie:{machine}".encode())[:16] if machine else None


def read_user(host: Host) -> dict[str, Any]:
    """Return the name and id of the user that the survey runs as."""
    uid = host.run(USER_ID).stdout.strip()
    return {"name": host.run(USER_NAME).stdout.strip() or None, "uid": int(uid) if uid.isdigit() else None}


def read_architecture(host: Host) -> str | None:
    """Return the machine's architecture."""
    return host.run(ARCHITECTURE).stdout.strip() or None


def read_uptime(host: Host) -> float | None:
    """Return the seconds since the host booted."""
    first = (line(host, "/proc/uptime") or "").split(" ")[0]
    return float(first) if first else None


def read_cpu(host: Host) -> dict[str, Any]:
    """Return model and counts of the CPUs, how many of them this process may use, and how their frequency and sleep are governed."""
    model, sockets, cores, logical = None, set(), set(), 0
    for block in (text(host, "/proc/cpuinfo") or "").split("\n\n"):
        values = {name.strip(): value.strip() for name, separator, value in (row.partition(":") for row in block.splitlines()) if separator}
        if "processor" not in values:
            continue
        logical += 1
        model = model or values.get("model name")
        socket = values.get("physical id", "0")
        sockets.add(socket)
        cores.add((socket, values.get("core id", values["processor"])))
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", text(host, "/proc/self/status") or "", re.MULTILINE)
    return {
        "model": model,
        "sockets": len(sockets),
        "cores": len(cores),
        "logical": logical,
        "available": count_cpus(allowed.group(1)) if allowed else logical,
        "numa_nodes": read_numa_nodes(host),
        **read_frequency(host),
    }


def count_cpus(ranges: str) -> int:
    """Return how many CPUs a list such as ``0-3,8`` names."""
    return sum(int(last or first) - int(first) + 1 for first, _, last in (part.partition("-") for part in ranges.split(",")))


def read_numa_nodes(host: Host) -> list[dict[str, Any]]:
    """Return the NUMA nodes and their CPUs."""
    base = "/sys/devices/system/node"
    numbers = sorted(int(found.group(1)) for name in host.names(base) or () if (found := re.fullmatch(r"node(\d+)", name)))
    return [{"node": number, "cpus": line(host, f"{base}/node{number}/cpulist")} for number in numbers]


def read_frequency(host: Host) -> dict[str, Any]:
    """Return governors by frequency policy, the driver, and the deepest sleep allowed. Source: admin-guide/pm/cpufreq.rst, Linux."""
    base = "/sys/devices/system/cpu/cpufreq"
    policies = [f"{base}/{name}" for name in host.names(base) or () if name.startswith("policy")]
    governors = Counter(governor for policy in policies if (governor := line(host, f"{policy}/scaling_governor")))
    places = ("/sys/module/intel_idle/parameters/max_cstate", "/sys/module/processor/parameters/max_cstate")
    return {
        "governors": dict(sorted(governors.items())),
        "frequency_driver": line(host, f"{policies[0]}/scaling_driver") if policies else None,
        "max_cstate": next((value for place in places if (value := integer(line(host, place))) is not None), None),
    }


def read_memory(host: Host) -> dict[str, int | None]:
    """Return total, available and limit in bytes; ``available`` already heeds the control group's limit."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", text(host, "/proc/meminfo") or "", re.MULTILINE)
    values = {name: int(value) * 1024 for name, value in found}
    available, limit, used = values.get("MemAvailable"), *_cgroup_memory(host)
    if available is not None and limit is not None:
        available = min(available, max(0, limit - used))
    return {"total_bytes": values.get("MemTotal"), "available_bytes": available, "cgroup_limit_bytes": limit}


def _cgroup_memory(host: Host) -> tuple[int | None, int]:
    """Return the tightest limit of our control groups and what is used of it. Source: cgroups(7), v1 and v2 layouts."""
    tightest, used = None, 0
    for row in (text(host, "/proc/self/cgroup") or "").splitlines():
        _, controllers, group = row.split(":", 2)
        if controllers == "":
            base, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = Path(group)
        for parent in (own, *own.parents):
            directory = f"{base}/{str(parent).strip('/')}".rstrip("/")
            limit = line(host, f"{directory}/{names[0]}")
            if limit is None or not limit.isdigit() or int(limit) >= NO_LIMIT or (tightest is not None and int(limit) >= tightest):
                continue
            current = line(host, f"{directory}/{names[1]}") or ""
            tightest, used = int(limit), int(current) if current.isdigit() else 0
    return tightest, used


def read_service_manager(host: Host) -> dict[str, Any]:
    """Return whether systemd manages this host, as sd_booted(3) tells, and what process 1 is."""
    marker = host.stat("/run/systemd/system")
    return {"systemd": marker is not None and marker.kind == "directory", "pid1": line(host, "/proc/1/comm")}


def read_container(host: Host) -> dict[str, str | None]:
    """Return the kind of container that this is, None for none, and the evidence."""
    for path, kind in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if host.stat(path):
            return {"kind": kind, "evidence": path}
    if manager := line(host, "/run/systemd/container"):
        return {"kind": manager, "evidence": "/run/systemd/container"}
    for item in (text(host, "/proc/1/environ") or "").split("\0"):
        if item.startswith("container="):
            return {"kind": item.removeprefix("container="), "evidence": "/proc/1/environ"}
    found = re.search(r"(docker|kubepods|lxc|containerd|libpod)", text(host, "/proc/1/cgroup") or "")
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
