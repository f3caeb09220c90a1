"""CUDA's libraries on the loader's path, and its compilers. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.aerie.host.hosts import Host, text

LDCONFIG = ("ldconfig", "-p")
LIBRARIES = (
    "libcublas",
    "libcublasLt",
    "libcudart",
    "libcudnn",
    "libcufft",
    "libcupti",
    "libcurand",
    "libcusolver",
    "libcusparse",
    "libnccl",
    "libnvJitLink",
    "libnvrtc",
)
LIBRARY_FILE = re.compile(rf"({'|'.join(LIBRARIES)})\.so\.(\d+)")
LDCONFIG_LINES = re.compile(rf"\b(?:{'|'.join(LIBRARIES)}|libcuda|libnvidia-ml)\.so")
"""What of ldconfig's list a recording keeps."""

CACHED = re.compile(r"^\s*(\S+) \(.*?\) => (\S+)$", re.MULTILINE)
NVML = "libnvidia-ml.so.1"
ENVIRONMENT_FILE = "/etc/environment"
COMPILER_VERSION = re.compile(r"release (\d+\.\d+)")


def system_environment(host: Host) -> dict[str, str]:
    """Return what ``/etc/environment`` sets. Source: pam_env(8)."""
    rows = (row.strip().removeprefix("export ").partition("=") for row in (text(host, ENVIRONMENT_FILE) or "").splitlines())
    return {name.strip(): value.strip().strip("'\"") for name, separator, value in rows if separator and not name.startswith("#")}


def read_libraries(host: Host) -> list[dict[str, Any]]:
    """Return CUDA's libraries that the loader would find: directories of LD_LIBRARY_PATH come before its cache. Source: ld.so(8)."""
    found: list[tuple[str, str, str]] = []
    for directory in loader_directories(host):
        found += [(name, f"{directory}/{name}", directory) for name in host.names(directory) or ()]
    found += [(name, path, "ldconfig") for name, path in CACHED.findall(host.run(LDCONFIG).stdout)]
    libraries: dict[str, dict[str, Any]] = {}
    for name, path, source in found:
        if match := LIBRARY_FILE.fullmatch(name):
            libraries.setdefault(path, {"name": match.group(1), "path": path, "major": int(match.group(2)), "source": source})
    return list(libraries.values())


def loader_directories(host: Host) -> list[str]:
    """Return the directories of LD_LIBRARY_PATH, of the survey's own and of ``/etc/environment``."""
    paths = (host.environment.get("LD_LIBRARY_PATH"), system_environment(host).get("LD_LIBRARY_PATH"))
    return list(dict.fromkeys(part.rstrip("/") for path in paths for part in (path or "").split(":") if part.startswith("/")))


def find_library(host: Host, name: str) -> str | None:
    """Return where the loader finds a library."""
    for directory in loader_directories(host):
        if host.stat(f"{directory}/{name}"):
            return f"{directory}/{name}"
    return next((path for cached, path in CACHED.findall(host.run(LDCONFIG).stdout) if cached == name), None)


@dataclass(frozen=True)
class Compilers:
    """Where compilers were found, in the order in which they would be taken."""

    nvcc: tuple[str, ...]
    ptxas: tuple[str, ...]
    triton_ptxas: str | None

    def commands(self) -> list[tuple[str, ...]]:
        first = (*self.nvcc[:1], *self.ptxas[:1], *((self.triton_ptxas,) if self.triton_ptxas else ()))
        return [(path, "--version") for path in first]


def find_compilers(host: Host, site_packages: Iterable[str]) -> Compilers:
    """Return the compilers of CUDA_HOME, of the search path and of toolkits, and the ptxas that the release's Triton brings."""
    environment: Mapping[str, str] = {**system_environment(host), **host.environment}
    toolkits = sorted((name for name in host.names("/usr/local") or () if re.fullmatch(r"cuda-[\d.]+", name)), key=_version, reverse=True)
    directories = [
        *(f"{home}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if (home := environment.get(name))),
        *(part for part in environment.get("PATH", "").split(":") if part.startswith("/")),
        "/usr/local/cuda/bin",
        *(f"/usr/local/{name}/bin" for name in toolkits),
    ]
    places = list(dict.fromkeys(directories))
    nvcc, ptxas = (tuple(path for place in places if _is_file(host, path := f"{place}/{tool}")) for tool in ("nvcc", "ptxas"))
    bundled = (f"{directory}/triton/backends/nvidia/bin/ptxas" for directory in site_packages)
    return Compilers(nvcc, ptxas, next((path for path in bundled if _is_file(host, path)), None))


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", name))


def _is_file(host: Host, path: str) -> bool:
    found = host.stat(path)
    return found is not None and found.kind == "file"


def read_tools(host: Host, compilers: Compilers) -> dict[str, Any]:
    """Return the compilers that would be taken, with their versions, and every nvcc found."""

    def first(paths: Iterable[str]) -> dict[str, Any] | None:
        path = next(iter(paths), None)
        if path is None:
            return None
        version = COMPILER_VERSION.search(host.run((path, "--version")).stdout)
        return {"path": path, "version": version.group(1) if version else None}

    bundled = (compilers.triton_ptxas,) if compilers.triton_ptxas else ()
    return {
        "nvcc": first(compilers.nvcc),
        "ptxas": first(compilers.ptxas),
        "triton_ptxas": first(bundled),
        "nvcc_candidates": list(compilers.nvcc),
    }
