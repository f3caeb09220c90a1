"""NVIDIA's driver: what is loaded and how it was set, what is installed, and the errors (Xid) that it told the kernel's log.

Standard library only: this runs on hosts. Sources: nv-procfs.c and nv-reg.h of NVIDIA's open-gpu-kernel-modules;
docs.nvidia.com/deploy/xid-errors for the form of an Xid's line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.aerie.host import gpus
from ansible.module_utils.aerie.host.hosts import Host, line, text

DMESG = ("dmesg",)
JOURNAL = ("journalctl", "--dmesg", "--no-pager", "--output=short-monotonic")
KERNEL_LOG = "/var/log/kern.log"
COMMANDS = (DMESG, JOURNAL)

KERNEL_LINES = re.compile(r"NVRM|nvidia|pcieport.*AER")
"""What of the kernel's log a recording keeps."""

XID = re.compile(r"NVRM: Xid \(PCI:(?P<pci>[0-9a-fA-F:.]+)\): (?P<xid>\d+)(?:, (?P<message>.*))?")
SECONDS = re.compile(r"\[\s*(\d+\.\d+)\]")
NVML_VERSION = re.compile(r"NVML library version: ([\d.]+)")
INSTALLED_LISTS = "/var/lib/dpkg/info"


def read_driver(host: Host, system_packages: Mapping[str, str], nvml: str | None) -> dict[str, Any]:
    """Return the driver; ``nvml`` is where the loader finds libnvidia-ml.so.1."""
    document = gpus.read_xml(host)
    told = document.findtext("driver_version") if document is not None else None
    user_space = _user_space(host, nvml)
    loaded = line(host, "/proc/driver/nvidia/version")
    version = re.search(r"(?:for \S+|Kernel Module)\s+([\d.]+)", loaded or "")
    parameters = read_parameters(host)
    return {
        "version": told or user_space,
        "cuda_version": document.findtext("cuda_version") if document is not None else None,
        "user_space_version": user_space,
        "module": None if loaded is None else "open" if "Open Kernel Module" in loaded else "proprietary",
        "loaded_version": version.group(1) if version else None,
        "loaded": loaded is not None,
        "parameters": parameters or {},
        "registry_dwords": None if parameters is None else parameters.get("RegistryDwords", ""),
        "uvm_parameters": _directory(host, "/sys/module/nvidia_uvm/parameters"),
        "modprobe_files": read_modprobe(host),
        "installed_age_s": _installed_age(host, system_packages),
        **read_xids(host),
    }


def _user_space(host: Host, nvml: str | None) -> str | None:
    """Return the version of the driver's libraries, which may be newer than the module until the next boot."""
    target = host.link(nvml) if nvml else None
    by_link = re.search(r"\.so\.(\d+\.[\d.]+)$", target or "")
    if by_link:
        return by_link.group(1)
    answers = (host.run(gpus.GPU_XML), host.run(gpus.GPU_QUERY))
    found = next((match for answer in answers if (match := NVML_VERSION.search(f"{answer.stdout}\n{answer.reason}"))), None)
    return found.group(1) if found else None


def read_parameters(host: Host) -> dict[str, str] | None:
    """Return the module's parameters as loaded, None where it is not."""
    content = text(host, "/proc/driver/nvidia/params")
    if content is None:
        return None
    rows = (row.partition(":") for row in content.splitlines())
    return {name.strip(): value.strip().strip('"') for name, separator, value in rows if separator}


def _directory(host: Host, path: str) -> dict[str, str]:
    return {name: value for name in host.names(path) or () if (value := line(host, f"{path}/{name}")) is not None}


def read_modprobe(host: Host) -> dict[str, str]:
    """Return the lines of modprobe.d(5) that name nvidia; what they ask for holds only after the module is loaded again."""
    found = {}
    for name in host.names("/etc/modprobe.d") or ():
        if not name.endswith(".conf"):
            continue
        rows = (text(host, f"/etc/modprobe.d/{name}") or "").splitlines()
        kept = [row.strip() for row in rows if "nvidia" in row and not row.lstrip().startswith("#")]
        if kept:
            found[f"/etc/modprobe.d/{name}"] = "\n".join(kept)
    return found


def _installed_age(host: Host, system_packages: Mapping[str, str]) -> int | None:
    """Return the seconds since dpkg last unpacked a package of the driver."""
    names = [name for name in system_packages if re.match(r"libnvidia-compute|nvidia-(open|kernel|driver|dkms|utils|smi)", name)]
    ages = [
        found.age_s
        for name in names
        for path in (f"{INSTALLED_LISTS}/{name}.list", f"{INSTALLED_LISTS}/{name}:amd64.list")
        if (found := host.stat(path))
    ]
    return min(ages, default=None)


def read_xids(host: Host) -> dict[str, Any]:
    """Return the driver's error reports from whichever kernel log answers and reaches furthest back."""
    dmesg, journal = host.run(DMESG), host.run(JOURNAL)
    logs = [
        (name, answer.stdout) for name, answer in (("dmesg", dmesg), ("journalctl", journal)) if answer.ok and SECONDS.search(answer.stdout)
    ]
    if not logs and (content := text(host, KERNEL_LOG)):
        logs = [(KERNEL_LOG, content)]
    if not logs:
        reasons = [f"{answer.reason or f'{argv[0]}: nothing in it'}" for argv, answer in ((DMESG, dmesg), (JOURNAL, journal))]
        return {"xids": [], "kernel_log": None, "kernel_log_reason": "; ".join([*reasons, f"{KERNEL_LOG}: nothing to read"])}
    name, content = min(logs, key=lambda log: _first_second(log[1]))
    return {"xids": parse_xids(content), "kernel_log": name, "kernel_log_reason": None}


def _first_second(content: str) -> float:
    found = SECONDS.search(content)
    return float(found.group(1)) if found else float("inf")


def parse_xids(content: str) -> list[dict[str, Any]]:
    """Return the Xids of a kernel log, oldest first."""
    xids = []
    for row in content.splitlines():
        if match := XID.search(row):
            seconds = SECONDS.search(row)
            place = match["pci"].lower()
            xids.append(
                {
                    "seconds": float(seconds.group(1)) if seconds else None,
                    "xid": int(match["xid"]),
                    "pci": place if "." in place else f"{place}.0",
                    "message": (match["message"] or "").strip(),
                }
            )
    return xids
