"""What a host must offer before anything on it is touched: a pure comparison of a survey with what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.aerie.words import listing

GIB = 2**30
OLDEST_PYTHON = (3, 11)
RELEASE_EXISTS_DISK_GIB = 1.0
"""Room for another release of an environment that is there already, or adopted."""

KNOWN_SYSTEMS = {"ubuntu": ("22.04", "24.04"), "debian": ("12", "13")}


@dataclass(frozen=True)
class Needs:
    """Disk and memory that a profile needs, in GiB."""

    disk_gib: float
    memory_gib: float


PROFILE_NEEDS = {"cpu": Needs(disk_gib=4, memory_gib=4), "cuda": Needs(disk_gib=40, memory_gib=32)}


@dataclass(frozen=True)
class Wanted:
    """What is to run on the host.

    ``adopted`` says that ``python`` and its packages are used as they are, and ``python_setting`` where it was named.
    ``python_versions`` are those that the wanted SGLang has a build for, such as ``3.12``; empty for any. ``None`` for disk
    or memory takes the profile's need.
    """

    profile: str
    root: str
    python: str = "python3"
    adopted: bool = False
    python_setting: str = "sglang_release_python"
    python_versions: tuple[str, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    disk_gib: float | None = None
    memory_gib: float | None = None


@dataclass(frozen=True)
class Findings:
    """Everything that stands in the way, and what is only worth a warning."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def check(info: Mapping[str, Any], wanted: Wanted) -> Findings:
    """Compare the survey ``info`` with ``wanted``; nothing is read or changed.

    ``info`` is what ``gpu_host_info`` returned when asked after every wanted port, the wanted Python, and these paths: the
    root, ``current`` below it, and each wanted model.
    """
    silent = [reason for path in info["paths"].values() if (reason := path.get("reason"))]
    if silent:
        return Findings(tuple(f"{reason}: is it on a network mount that is dead?" for reason in silent), tuple(check_system(info)))
    problems = [
        *check_gpus(info, wanted),
        *check_root(info, wanted),
        *check_python(info, wanted),
        *check_ports(info, wanted.root, wanted.ports),
        *check_models(info, wanted.models),
        *check_disk(info, wanted),
        *check_memory(info, wanted),
    ]
    return Findings(tuple(problems), tuple(check_system(info)))


def check_gpus(info: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """The cuda profile needs a GPU, and each instance the GPUs that it names."""
    if wanted.profile != "cuda":
        return []
    if not info["gpus"] and "no answer within" in (info["gpu_reason"] or ""):
        return [
            f"no GPU for the cuda profile ({info['gpu_reason']}): enable NVIDIA's persistence daemon, without which every call wakes all "
            "GPUs, or raise gpu_host_command_seconds; where nvidia-smi never answers, the driver hangs and the host must be rebooted"
        ]
    if not info["gpus"]:
        return [
            f"no GPU for the cuda profile ({info['gpu_reason']}): install the NVIDIA driver so that nvidia-smi lists the GPUs, "
            "or set aerie_profile to cpu to rehearse without one"
        ]
    there = {gpu["index"] for gpu in info["gpus"]}
    return [
        f"instance '{name}' asks for GPU {listing(missing)}, and the host has {listing(sorted(there))}: "
        "correct gpus in sglang_server_instances"
        for name, indices in wanted.gpus.items()
        if (missing := [index for index in indices if index not in there])
    ]


def check_root(info: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """The root is a directory that we may write, or can be made."""
    root, user = info["paths"][wanted.root], info["user"]["name"] or "the user"
    if root["exists"] and root["kind"] != "directory":
        return [f"aerie_root {wanted.root} is a file: choose a directory"]
    if not root["writable"]:
        where = wanted.root if root["exists"] else f"{wanted.root} can't be made: {root['nearest']}"
        return [f"aerie_root {where} is not writable for {user}: set ansible_become, or choose an aerie_root that {user} owns"]
    return []


def check_python(info: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """The interpreter of the environments exists, has a version that there is a build for, and can make virtual environments."""
    if wanted.adopted:
        there = info["pythons"].get(wanted.python)
        if there is None:
            return [f"no Python answers to '{wanted.python}': correct {wanted.python_setting}, which is to be adopted"]
        lacks = f"'{wanted.python}' (Python {there['version']}) lacks the module venv, and releases are made with it: install it"
        return [] if there["venv"] else [lacks]
    name, asked = wanted.python, listing(wanted.python_versions or (f"{'.'.join(map(str, OLDEST_PYTHON))} or newer",), last="or")

    def fits(probe: Mapping[str, Any]) -> bool:
        minor = _version(probe["version"])
        return ".".join(map(str, minor)) in wanted.python_versions if wanted.python_versions else minor >= OLDEST_PYTHON

    fitting = sorted(other for other, probe in info["pythons"].items() if other != name and fits(probe))
    others = f", or set sglang_release_python to {listing(fitting, last='or')}, which is there" if fitting else ""
    probe = info["pythons"].get(name)
    if probe is None:
        return [f"no Python answers to '{name}' ({asked} is needed): install it{others}"]
    if not fits(probe):
        return [f"'{name}' is Python {probe['version']}, and {asked} is needed: install one{others}"]
    if not (probe["venv"] and probe["ensurepip"]):
        missing = listing(module for module in ("venv", "ensurepip") if not probe[module])
        version = ".".join(map(str, _version(probe["version"])))
        return [f"'{name}' (Python {probe['version']}) lacks {missing}: install python{version}-venv (Debian, Ubuntu){others}"]
    return []


def check_ports(info: Mapping[str, Any], root: str, ports: Mapping[str, int]) -> list[str]:
    """Nobody but the instance itself listens on its port."""
    problems = []
    for name, port in ports.items():
        for owner in info["ports"].get(str(port), []):
            if (owner["instance"], owner["root"]) == (name, root):
                continue
            if owner["pid"] is None:
                who = "a process that this user may not see (run with ansible_become to learn which)"
            else:
                ours = f", instance '{owner['instance']}' of {owner['root']}" if owner["instance"] else ""
                who = f"process {owner['pid']} ({' '.join(owner['argv'])[:100] or '?'}{ours})"
            problems.append(
                f"port {port} of instance '{name}' is in use by {who}: stop it, or choose another port in sglang_server_instances"
            )
    return problems


def check_models(info: Mapping[str, Any], models: Mapping[str, str]) -> list[str]:
    """Each model that the catalog says is on the host, is."""
    return [
        f"model '{name}': {path} is not on the host (its nearest directory there is {info['paths'][path]['nearest']}): "
        "bring it there, or correct its path or source in sglang_models_catalog"
        for name, path in models.items()
        if not info["paths"][path]["exists"]
    ]


def check_disk(info: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """There is room at the root; unless told otherwise, little is needed where a release is already."""
    needed = PROFILE_NEEDS[wanted.profile].disk_gib if wanted.disk_gib is None else wanted.disk_gib
    if wanted.disk_gib is None and (wanted.adopted or info["paths"][f"{wanted.root}/current"]["exists"]):
        needed = min(needed, RELEASE_EXISTS_DISK_GIB)
    root = info["paths"][wanted.root]
    if root["free_bytes"] >= needed * GIB:
        return []
    return [
        f"too little room for aerie_root {wanted.root}: {needed:g} GiB needed, "
        f"{root['free_bytes'] / GIB:.1f} GiB free at {root['nearest']}: "
        "make room, choose another aerie_root, or lower gpu_host_disk_required_gib if you know better"
    ]


def check_memory(info: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """There is memory to load with; not asked where a wanted instance runs, since it holds its own already."""
    if any(name in info["servers"] for name in wanted.ports):
        return []
    needed = PROFILE_NEEDS[wanted.profile].memory_gib if wanted.memory_gib is None else wanted.memory_gib
    available = info["memory"]["available_bytes"]
    if available is None or available >= needed * GIB:
        return []
    limit = info["memory"]["cgroup_limit_bytes"]
    bounded = f" (the control group's limit is {limit / GIB:.1f} GiB)" if limit is not None else ""
    return [
        f"too little memory: {needed:g} GiB needed, {available / GIB:.1f} GiB available{bounded}: "
        "end what holds it, or lower gpu_host_memory_required_gib if you know better"
    ]


def check_system(info: Mapping[str, Any]) -> list[str]:
    """A system that nobody has tried is worth a warning, no more."""
    system = info["os"]
    if system["version_id"] in KNOWN_SYSTEMS.get(system["id"] or "", ()):
        return []
    known = listing((f"{name} {version}" for name, versions in KNOWN_SYSTEMS.items() for version in versions), last="or")
    return [f"{system['name'] or 'this system'} has not been tried with this project; {known} has"]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
