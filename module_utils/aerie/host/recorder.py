"""Keeps what a survey reads of a live host, in the form of a recording. Standard library only: this runs on hosts.

Of what may hold more than the survey uses (logs, lists, environments, directories), only what it uses is kept.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from ansible.module_utils.aerie.host import caches, cuda, driver, gpus, installed, pci, pci_config
from ansible.module_utils.aerie.host.hosts import (
    ENVIRONMENT_NAMES,
    ENVIRONMENT_PREFIXES,
    INSTANCE_VARIABLE,
    ROOT_VARIABLE,
    Completed,
    Host,
    Stat,
)
from ansible.module_utils.aerie.host.recordings import FORMAT
from ansible.module_utils.aerie.processes import Process

PCI_LINES = re.compile(r"^\S|^\s+(?:Bus:|Capabilities:.*Express|Capabilities: <access denied>|LnkCap:|LnkSta:|ACSCtl:|!!! Unknown)")
CPUINFO_LINES = re.compile(r"^(?:processor|model name|physical id|core id)\b|^$")
STATUS_LINES = re.compile(r"^Cpus_allowed_list:")
NAMES = re.compile(
    "|".join(
        (
            r"cuda-[\d.]+",
            r"python3\.\d+",
            r"torchinductor_.*",
            r".*\.conf",
            r"policy\d+",
            caches.P2P_CACHE.pattern,
            caches.RELEASE_CACHE.pattern,
            cuda.LIBRARY_FILE.pattern,
            *caches.RELEASE_PLACES,
        )
    )
)
KERNEL_TREES = ("/sys/", "/proc/")
SHOWN_VARIABLES = (INSTANCE_VARIABLE, ROOT_VARIABLE)


@dataclass
class Recorder:
    """A host that is read through ``host``; everything read is kept in :attr:`recording`."""

    host: Host
    recording: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recording |= {"format": FORMAT, "processes": []}

    def _keep(self, table: str, key: str, value: Any) -> None:
        self.recording.setdefault(table, {})[key] = value

    @property
    def environment(self) -> Mapping[str, str]:
        environment = self.host.environment
        self.recording["environment"] = dict(environment)
        return environment

    def run(self, argv: tuple[str, ...]) -> Completed:
        answer = self.host.run(argv)
        if answer.rc is not None or "not found" not in answer.reason:
            trim = OUTPUTS.get(argv)
            kept: dict[str, Any] = {"rc": answer.rc, "stdout": trim(answer.stdout) if trim else answer.stdout}
            self._keep("commands", " ".join(argv), kept | ({"reason": answer.reason} if answer.reason else {}))
        return answer

    def read(self, path: str) -> bytes | None:
        data = self.host.read(path)
        if data is not None:
            self._keep("files", path, _file(path, data))
        return data

    def names(self, path: str) -> tuple[str, ...] | None:
        names = self.host.names(path)
        if names is not None:
            kept = [name for name in names if path.startswith(KERNEL_TREES) or NAMES.fullmatch(name) or _known_distribution(name)]
            self._keep("directories", path, kept)
        return names

    def stat(self, path: str) -> Stat | None:
        found = self.host.stat(path)
        if found is not None:
            self._keep("stats", path, {"kind": found.kind, "size": found.size, "age_s": found.age_s})
        return found

    def link(self, path: str) -> str | None:
        target = self.host.link(path)
        if target is not None:
            self._keep("links", path, target)
        return target

    def disk(self, path: str) -> dict[str, Any]:
        found = self.host.disk(path)
        self._keep("disks", path, found)
        return found

    def model(self, path: str, root: str | None = None, *, weights: bool = True) -> dict[str, Any]:
        found = self.host.model(path, root, weights=weights)
        self._keep("models", path, found)
        return found

    def processes(self) -> list[Process]:
        found = self.host.processes()
        for process in found:
            if process.variable(INSTANCE_VARIABLE):
                self._process(process)
        return found

    def holders(self, port: int) -> list[Process] | None:
        found = self.host.holders(port)
        for process in found or ():
            self._process(process)["ports"].append(port)
        if found == []:
            self.recording["processes"].append({"pid": None, "ports": [port]})
        return found

    def _process(self, process: Process) -> dict[str, Any]:
        """Return the entry of a process, made where there is none yet. Its environment may hold secrets."""
        known: list[dict[str, Any]] = self.recording["processes"]
        entry = next((entry for entry in known if entry["pid"] == process.pid), None)
        if entry is None:
            environment = {name: value for name in SHOWN_VARIABLES if (value := process.variable(name)) is not None}
            entry = {"pid": process.pid, "ppid": process.ppid, "argv": list(process.argv), "environment": environment, "ports": []}
            known.append(entry)
        return entry


def _file(path: str, data: bytes) -> str | dict[str, str]:
    if path.startswith(pci_config.DEVICES) and path.endswith("/config"):
        return {"base64": base64.b64encode(data.rstrip(b"\0").ljust(min(len(data), pci_config.READABLE_BY_ALL + 1), b"\0")).decode()}
    try:
        content = data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
    trim = FILES.get(path) or (_of_modprobe if path.startswith("/etc/modprobe.d/") else None)
    return trim(content) if trim else content


def _known_distribution(name: str) -> bool:
    return bool(list(installed.known_distributions([name])))


def _lines(pattern: re.Pattern[str]) -> Callable[[str], str]:
    return lambda content: "".join(f"{row}\n" for row in content.splitlines() if pattern.search(row))


def _log(content: str) -> str:
    """Keep the driver's lines, and of the first line when it was, which says how far back the log reaches."""
    first = driver.SECONDS.search(content)
    return (f"{first.group(0)}\n" if first else "") + _lines(driver.KERNEL_LINES)(content)


def _xml(content: str) -> str:
    try:
        document = ElementTree.fromstring(content)
    except ElementTree.ParseError:
        return content
    for gpu in document.findall("gpu"):
        for name in ("supported_clocks", "accounted_processes", "encoder_stats", "fbc_stats"):
            for element in gpu.findall(name):
                gpu.remove(element)
    return ElementTree.tostring(document, encoding="unicode")


def _lspci(content: str) -> str:
    """Keep bridges and NVIDIA's display controllers, and of these what is read."""
    blocks = []
    for block in re.split(r"\n\s*\n", content):
        codes = pci.CODES.search(block.strip("\n").partition("\n")[0])
        if codes and (codes.group(1) == pci.BRIDGE or (codes.group(3) == pci.NVIDIA and codes.group(1).startswith(pci.DISPLAY))):
            blocks.append(_lines(PCI_LINES)(block))
    return "\n".join(blocks)


def _of_modprobe(content: str) -> str:
    return "".join(f"{row}\n" for row in content.splitlines() if "nvidia" in row and not row.lstrip().startswith("#"))


def _environment_file(content: str) -> str:
    """Keep the variables that the survey looks at: this file is where people put tokens."""
    named = [(row.strip().removeprefix("export ").partition("=")[0].strip(), row) for row in content.splitlines()]
    return "".join(f"{row}\n" for name, row in named if name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES))


def _container_variable(content: str) -> str:
    """Keep what tells a container of the environment of process 1."""
    return "\0".join(item for item in content.split("\0") if item.startswith("container="))


OUTPUTS: Mapping[tuple[str, ...], Callable[[str], str]] = {
    gpus.GPU_XML: _xml,
    gpus.HEADING: _lines(re.compile(r"CUDA ")),
    gpus.TOPOLOGY: _lines(re.compile(r"GPU\d")),
    gpus.P2P_READ: _lines(re.compile(r"GPU\d")),
    pci.LSPCI: _lspci,
    driver.DMESG: _log,
    driver.JOURNAL: _log,
    cuda.LDCONFIG: _lines(cuda.LDCONFIG_LINES),
    installed.DPKG: _lines(installed.DPKG_LINES),
}
FILES: Mapping[str, Callable[[str], str]] = {
    "/proc/cpuinfo": _lines(CPUINFO_LINES),
    "/proc/self/status": _lines(STATUS_LINES),
    "/proc/1/environ": _container_variable,
    cuda.ENVIRONMENT_FILE: _environment_file,
    driver.KERNEL_LOG: _log,
}
