"""How the kernel was started and set: command line, sysctls, limits, IOMMU. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
import shlex
from typing import Any

from ansible.module_utils.aerie.host.hosts import Host, line, text

SYSCTLS = (
    "fs.file-max",
    "kernel.dmesg_restrict",
    "kernel.numa_balancing",
    "kernel.pid_max",
    "kernel.shmmax",
    "kernel.threads-max",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_max",
    "vm.max_map_count",
    "vm.nr_hugepages",
    "vm.overcommit_memory",
    "vm.swappiness",
    "vm.zone_reclaim_mode",
)
LIMITS = {"memlock": "Max locked memory", "nofile": "Max open files"}


def read_command_line(host: Host) -> dict[str, Any]:
    """Return the kernel's command line and its parameters; a bare word has the value ``""``."""
    command_line = line(host, "/proc/cmdline") or ""
    parameters: dict[str, list[str]] = {}
    for word in _words(command_line):
        name, _, value = word.partition("=")
        parameters.setdefault(name, []).append(value)
    return {"kernel_command_line": command_line, "kernel_parameters": parameters}


def _words(command_line: str) -> list[str]:
    """Split as the kernel does: double quotes may hold spaces, and what follows ``--`` is for process 1."""
    try:
        lexer = shlex.shlex(command_line, posix=True)
        lexer.whitespace_split, lexer.commenters, lexer.quotes, lexer.escape = True, "", '"', ""
        words = list(lexer)
    except ValueError:
        words = command_line.split()
    return words[: words.index("--")] if "--" in words else words


def read_sysctl(host: Host) -> dict[str, str]:
    """Return the sysctls of :data:`SYSCTLS` that this kernel has."""
    values = {name: line(host, f"/proc/sys/{name.replace('.', '/')}") for name in SYSCTLS}
    return {name: value for name, value in values.items() if value is not None}


def read_limits(host: Host) -> dict[str, int | str | None]:
    """Return the soft limits of this process; what a service gets may differ. Source: proc_pid_limits(5)."""
    content = text(host, "/proc/self/limits") or ""
    found = {name: re.search(rf"^{title}\s+(\S+)", content, re.MULTILINE) for name, title in LIMITS.items()}
    return {name: _limit(match.group(1)) if match else None for name, match in found.items()}


def _limit(value: str) -> int | str:
    return int(value) if value.isdigit() else value


def read_hugepages(host: Host) -> str | None:
    """Return the choice in force of transparent huge pages."""
    found = re.search(r"\[(\w+)\]", line(host, "/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return found.group(1) if found else None


def read_iommu(host: Host) -> dict[str, Any]:
    """Return whether an IOMMU translates. Source: Documentation/ABI/testing/sysfs-kernel-iommu_groups, Linux."""
    base = "/sys/kernel/iommu_groups"
    groups = host.names(base)
    if groups is None:
        return {"groups": 0, "enabled": None, "passthrough": None}
    kinds = [line(host, f"{base}/{group}/type") for group in groups]
    known = [kind for kind in kinds if kind]
    return {
        "groups": len(groups),
        "enabled": bool(groups) or bool(host.names("/sys/class/iommu")),
        "passthrough": all(kind == "identity" for kind in known) if known else None,
    }
