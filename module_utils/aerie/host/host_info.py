"""What a host is and what is on it, read in one go without changing anything. Standard library only: this runs on hosts.

A host is read through :class:`hosts.LiveHost`, or through :class:`recordings.RecordedHost`. Each part of the survey is a module
beside this one; here their commands are started at once, and what they found is put together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.files import canonical_hash
from ansible.module_utils.aerie.host import caches, collectives, cuda, driver, gpus, installed, kernel, occupancy, pci, recordings, system
from ansible.module_utils.aerie.host.gpus import read_gpus
from ansible.module_utils.aerie.host.hosts import (
    INSTANCE_VARIABLE,
    ROOT_VARIABLE,
    Background,
    Host,
    LiveHost,
    StartedHost,
    line,
    no_model,
)
from ansible.module_utils.aerie.host.recorder import Recorder
from ansible.module_utils.aerie.host.recordings import RECORDING, RecordedHost
from ansible.module_utils.aerie.host.system import PYTHONS
from ansible.module_utils.aerie.releases import model_catalog

SURVEY_COMMAND_SECONDS = 4.0
GRACE_SECONDS = 0.4
"""What commands that are only asked after others, and threads that wait, are given beyond a command's time."""

SHORTENED = 48


@dataclass(frozen=True)
class Question:
    """What to look at besides the host itself."""

    aerie_root: Path | None = None
    ports: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    pythons: tuple[str, ...] = PYTHONS
    models: tuple[str, ...] = ()
    catalog: Mapping[str, Any] = field(default_factory=dict)
    command_seconds: float = SURVEY_COMMAND_SECONDS


def open_host(root: Path) -> Host:
    """Return the live host for ``/``, else the recording in ``root``."""
    return LiveHost() if root == Path("/") else RecordedHost(recordings.load(root))


def survey(host: Host, question: Question, recording: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return everything that ``gpu_host_info`` returns; what is read goes into ``recording``."""
    began = time.monotonic()
    occupancy.refuse_relative("paths", question.paths)
    occupancy.refuse_relative("models", question.models)
    deadline = began + question.command_seconds + GRACE_SECONDS
    if isinstance(host, LiveHost):
        host = replace(host, seconds=question.command_seconds, deadline=deadline)
    if recording is not None:
        host = Recorder(host, recording)
    started = StartedHost(host, deadline)
    started.start(
        [*gpus.COMMANDS, pci.LSPCI, *driver.COMMANDS, cuda.LDCONFIG, installed.DPKG, *system.commands(question.pythons)],
    )
    root = str(question.aerie_root) if question.aerie_root else None
    late = question.command_seconds
    # These look at places that may be on a network mount, and that may be dead.
    placed = model_catalog.placed(question.aerie_root, question.catalog)
    weights = {str(place.path): place.weights for place in placed}
    look = partial(_look, host, {str(place.path) for place in placed if place.brought} - {*question.paths, *question.models})
    paths = {
        path: Background(partial(look, path, partial(occupancy.read_path, host, path)))
        for path in dict.fromkeys((*question.paths, *weights))
    }
    models = {
        path: Background(partial(look, path, partial(host.model, path, root, weights=weights.get(path, True))))
        for path in dict.fromkeys((*question.models, *weights))
    }
    user_caches = Background(partial(caches.read_caches, host, root))
    release = Background(partial(installed.read_release, host, root)).result(deadline, installed.CurrentRelease())
    compilers = cuda.find_compilers(host, release.site_packages)
    started.start(compilers.commands())

    found, gpu_reason = read_gpus(started)
    packages = installed.read_packages(started, release)
    info: dict[str, Any] = {
        "hostname": line(host, "/proc/sys/kernel/hostname"),
        "machine_id_hash": system.machine_id_hash(host),
        "user": system.read_user(started),
        "os": system.read_os(host),
        "kernel": line(host, "/proc/sys/kernel/osrelease"),
        "architecture": system.read_architecture(started),
        "uptime_seconds": system.read_uptime(host),
        "cpu": system.read_cpu(host),
        "memory": system.read_memory(host),
        "gpus": found,
        "gpu_reason": gpu_reason,
        "cuda_driver_version": gpus.read_cuda_driver_version(started) if found else None,
        "driver": driver.read_driver(started, packages["system"], cuda.find_library(started, cuda.NVML)),
        "topology": gpus.read_topology(started),
        "pci": pci.read_pci(started, found),
        "iommu": kernel.read_iommu(host),
        **kernel.read_command_line(host),
        "sysctl": kernel.read_sysctl(host),
        "limits": kernel.read_limits(host),
        "transparent_hugepages": kernel.read_hugepages(host),
        "libraries": {"cuda": cuda.read_libraries(started)},
        "tools": cuda.read_tools(started, compilers),
        "packages": packages,
        "service_manager": system.read_service_manager(host),
        "container": system.read_container(host),
        "pythons": system.read_pythons(started, question.pythons),
        "ports": occupancy.read_ports(host, question.ports),
        "servers": occupancy.read_servers(host, root),
        "release": release.id,
    }
    info["nccl"] = Background(partial(collectives.read_nccl, started, root, packages["system"])).result(deadline, collectives.EMPTY)
    told = {
        "paths": {path: work.result(deadline, occupancy.late_path(path, late)) for path, work in paths.items()},
        "models": {path: work.result(deadline, no_model(f"{path} gave no answer within {late:g} s")) for path, work in models.items()},
    }
    info |= {key: {path: about for path, about in of_path.items() if about is not None} for key, of_path in told.items()}
    info["caches"] = user_caches.result(deadline, [])
    info["fingerprint"] = fingerprint(info)
    info["survey"] = {"seconds": round(time.monotonic() - began, 3), "commands": _answers(started)}
    return info


def _look(host: Host, brought: set[str], path: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return what is at a path; None where a model is still to be brought to it."""
    return None if path in brought and host.stat(path) is None else read()


def _answers(started: StartedHost) -> dict[str, dict[str, Any]]:
    return {
        " ".join(word if len(word) <= SHORTENED else f"{word[:SHORTENED]}…" for word in argv): {
            "rc": answer.rc,
            "seconds": round(answer.seconds, 3),
            "reason": answer.reason or None,
        }
        for argv, answer in started.answers.items()
    }


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


__all__ = [
    "INSTANCE_VARIABLE",
    "PYTHONS",
    "RECORDING",
    "ROOT_VARIABLE",
    "Host",
    "LiveHost",
    "Question",
    "RecordedHost",
    "fingerprint",
    "open_host",
    "read_gpus",
    "survey",
]
