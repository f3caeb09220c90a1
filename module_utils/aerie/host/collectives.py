"""NCCL: which one the system has, and every place that sets it. Standard library only: this runs on hosts.

Source: "Environment Variables" of NVIDIA's NCCL User Guide: /etc/nccl.conf, ~/.nccl.conf, and NCCL_* over both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from ansible.module_utils.aerie.host import cuda
from ansible.module_utils.aerie.host.hosts import Host, text

GRAPH_VARIABLES = ("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE")
NCCL_LIBRARY = "libnccl.so.2"
EMPTY: dict[str, Any] = {"system_version": None, "configs": [], "environment": {}, "graph_files": []}


def read_nccl(host: Host, aerie_root: str | None, system_packages: Mapping[str, str]) -> dict[str, Any]:
    """Return NCCL's version and settings."""
    home = host.environment.get("HOME")
    places = ["/etc/nccl.conf", *([f"{home}/.nccl.conf"] if home else []), *([f"{aerie_root}/nccl.env"] if aerie_root else [])]
    settings = {path: _settings(content) for path in places if (content := text(host, path)) is not None}
    files = {name: value for name, value in cuda.system_environment(host).items() if name.startswith("NCCL_")}
    own = {name: value for name, value in host.environment.items() if name.startswith("NCCL_")}
    return {
        "system_version": _version(host, system_packages),
        "configs": [{"path": path, "settings": values} for path, values in settings.items()],
        "environment": {**files, **own},
        "graph_files": _graph_files(host, [*settings.items(), (cuda.ENVIRONMENT_FILE, files), ("environment", own)]),
    }


def _settings(content: str) -> dict[str, str]:
    rows = (row.partition("#")[0].partition("=") for row in content.splitlines())
    return {name.strip(): value.strip() for name, separator, value in rows if separator and name.strip()}


def _version(host: Host, system_packages: Mapping[str, str]) -> str | None:
    if package := system_packages.get("libnccl2"):
        return package.partition("-")[0]
    path = cuda.find_library(host, NCCL_LIBRARY)
    found = re.search(r"\.so\.(\d+\.\d+\.\d+)$", (host.link(path) if path else None) or "")
    return found.group(1) if found else None


def _graph_files(host: Host, sources: Sequence[tuple[str, Mapping[str, str]]]) -> list[dict[str, Any]]:
    found = []
    for source, settings in sources:
        for variable in GRAPH_VARIABLES:
            if variable in settings:
                path = settings[variable]
                content = host.read(path) if path.startswith("/") else None
                found.append(
                    {
                        "variable": variable,
                        "from": source,
                        "path": path,
                        "exists": content is not None,
                        "gpus": None if content is None else count_gpus(content),
                    }
                )
    return found


def count_gpus(content: bytes) -> int | None:
    """Return for how many GPUs NCCL's XML, a topology or a graph, was made."""
    try:
        devices = {gpu.get("dev") for gpu in ElementTree.fromstring(content).iter("gpu")}
    except ElementTree.ParseError:
        return None
    return len(devices)
