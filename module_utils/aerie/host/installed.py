"""What is installed: the packages of the current release, by their metadata's names, and the system's own packages.

Standard library only: this runs on hosts. Nothing is imported: an import of torch alone takes seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.host.hosts import Host, text
from ansible.module_utils.aerie.paths import HostPaths

DPKG = ("dpkg-query", "--show", "--showformat=${binary:Package}\\t${Version}\\t${db:Status-Abbrev}\\n")
SYSTEM_PACKAGES = re.compile(r"(?:lib)?nvidia|cuda|libnccl|linux-headers")
DPKG_LINES = re.compile(rf"^(?:{SYSTEM_PACKAGES.pattern})|\th")
"""What of dpkg's list a recording keeps."""

DISTRIBUTION = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.dist-info")
NAMES = {
    "torch": "torch",
    "sglang": "sglang",
    "sglang_kernel": "sglang_kernel",
    "sgl_kernel": "sglang_kernel",
    "flashinfer_python": "flashinfer",
    "flashinfer_cubin": "flashinfer_cubin",
    "flashinfer_jit_cache": "flashinfer_jit_cache",
    "triton": "triton",
    "transformers": "transformers",
    "xgrammar": "xgrammar",
}
NVIDIA_NAME = re.compile(r"nvidia_(nccl|cuda_runtime)(?:_cu\d+)?")
BUILT_FOR = re.compile(r"\+cu(\d+)(\d)$")


@dataclass(frozen=True)
class CurrentRelease:
    """The release that ``current`` points to, and where its packages are; ``id`` is None where there is none."""

    id: str | None = None
    site_packages: tuple[str, ...] = ()


def read_release(host: Host, aerie_root: str | None) -> CurrentRelease:
    """Return the current release of ``aerie_root``."""
    if aerie_root is None:
        return CurrentRelease()
    current = str(HostPaths(Path(aerie_root)).current)
    target = host.link(current)
    if target is None:
        return CurrentRelease()
    release = f"{HostPaths(Path(aerie_root)).releases}/{Path(target).name}"
    own = [f"{release}/lib/{name}/site-packages" for name in host.names(f"{release}/lib") or () if re.fullmatch(r"python3\.\d+", name)]
    return CurrentRelease(Path(target).name, tuple(dict.fromkeys((*own, *_search_path(host, release)))))


def _search_path(host: Host, release: str) -> list[str]:
    try:
        environment = json.loads(text(host, f"{release}/release.json") or "null")["environment"]
        paths = [*environment.get("search_path", ()), environment["site_packages"]]
    except (ValueError, TypeError, KeyError):
        return []
    return [str(path) for path in paths]


def read_release_packages(host: Host, release: CurrentRelease) -> dict[str, str] | None:
    """Return versions of the packages that matter, the release's own before its environment's; None without a release."""
    if release.id is None:
        return None
    found: dict[str, str] = {}
    for directory in release.site_packages:
        for name, version in known_distributions(host.names(directory) or ()):
            found.setdefault(name, version)
    for package, told in (("torch", "torch_cuda"), ("sglang_kernel", "kernel_cuda")):
        if match := BUILT_FOR.search(found.get(package, "")):
            found[told] = ".".join(match.groups())
    if "torch" in found and "torch_cuda" not in found and (runtime := found.get("cuda_runtime")) and "+" not in found["torch"]:
        found["torch_cuda"] = ".".join(runtime.split(".")[:2])
    return found


def known_distributions(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield what :func:`read_release_packages` calls a package, and its version, for each metadata directory of one that matters."""
    for entry in names:
        if match := DISTRIBUTION.fullmatch(entry):
            name = re.sub(r"[-_.]+", "_", match["name"]).lower()
            nvidia = NVIDIA_NAME.fullmatch(name)
            if known := nvidia.group(1) if nvidia else NAMES.get(name):
                yield known, match["version"]


def read_packages(host: Host, release: CurrentRelease) -> dict[str, Any]:
    """Return the packages of the release and of the system. Source: dpkg-query(1), the three letters of db:Status-Abbrev."""
    system, held, broken = {}, [], []
    for row in host.run(DPKG).stdout.splitlines():
        name, version, status = (*row.split("\t"), "", "")[:3]
        if status[:1] == "h":
            held.append(name)
        if SYSTEM_PACKAGES.match(name) and status[1:2] not in ("", "n", "c"):
            system[name] = version
            if status[1:2] != "i" or status[2:3].strip():
                broken.append(name)
    return {"release": read_release_packages(host, release), "system": _plain(system), "held": held, "broken": broken}


def _plain(packages: Mapping[str, str]) -> dict[str, str]:
    """Leave out the architecture (``libnccl2:amd64``), save where two are installed."""
    bare = [name.partition(":")[0] for name in packages]
    return {name.partition(":")[0] if bare.count(name.partition(":")[0]) == 1 else name: version for name, version in packages.items()}
