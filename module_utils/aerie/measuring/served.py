"""An instance's server, for work that puts load on it and reads its log. Standard library only: this runs on hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ansible.module_utils.aerie import files
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_clients, bench_runner, benchmark, records
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release_file
from ansible.module_utils.aerie.serving import launch_checks
from ansible.module_utils.aerie.words import listing


class Asked(Protocol):
    """What is asked of an instance: the arm it must serve, the models by name, and what load it is to have."""

    @property
    def run_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def instance(self) -> str: ...
    @property
    def arm(self) -> Mapping[str, Any]: ...
    @property
    def models(self) -> Mapping[str, Any]: ...
    @property
    def target(self) -> str: ...
    @property
    def host_info(self) -> Mapping[str, Any]: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def client(self) -> str | None: ...


@dataclass(frozen=True)
class Served:
    """A ready server with its records, and the client to put load on it."""

    instance: Mapping[str, Any]
    release: Mapping[str, Any]
    server: bench_runner.Server
    client: bench_clients.Client
    client_environment: Mapping[str, str]
    tokenizer: Path | None
    lock: Path


def current_release(paths: HostPaths) -> dict[str, Any] | None:
    """Return release.json of the release that would serve; None where there is none yet. Raises AerieError when it can't be read."""
    path = paths.current / "release.json"
    try:
        release = release_file.read(paths.current)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise AerieError(f"{path} can't be read ({error}): make the release again (patch playbook)") from error
    return release


def require_patch_set(release: Mapping[str, Any], name: str, otherwise: str) -> None:
    """Raise AerieError where a release lacks a patch set; ``otherwise`` says what can't be done then."""
    names = [found["name"] for found in release.get("patch_sets") or []]
    if name not in names:
        raise AerieError(
            f"release {release.get('id')} has no patch set {name} (it has {listing(names)}), so {otherwise}: "
            f"add {name} to sglang_patches_sets and run playbooks/patch.yml first"
        )


def find(paths: HostPaths, asked: Asked, require: Callable[[Mapping[str, Any]], None]) -> Served:
    """Return the instance's server; raise AerieError where it is not ready, or serves another arm, or no client can be had.

    ``require`` is called with the release before a client is looked for, and raises where that release will not do.
    """
    home = paths.instance(asked.instance)
    try:
        instance = files.read_json(home / "instance.json")
    except (OSError, ValueError) as error:
        raise AerieError(f"instance {asked.instance} does not exist ({error}): start it with the sglang_server role") from error
    if instance.get("state") != "ready":
        raise AerieError(f"instance {asked.instance} is {instance.get('state')}, not ready: start it with the sglang_server role")
    if instance["arm"]["name"] != asked.arm["name"]:
        raise AerieError(f"instance {asked.instance} serves arm {instance['arm']['name']}, not {asked.arm['name']}")
    release_path = paths.release(instance["release"])
    try:
        release = release_file.read(release_path)
    except (OSError, ValueError) as error:
        raise AerieError(f"the release that is served can't be read ({error}): make one with the sglang_patches role") from error
    require(release)
    path = (asked.models.get(asked.target) or {}).get("path")
    tokenizer = Path(path) if path and Path(path).is_dir() else None
    package = Path(release["tree"]) / "sglang" if release.get("tree") else None
    chosen = Path(asked.client) if asked.client else None
    address = str(instance["host"]).strip("[]")
    return Served(
        instance=instance,
        release=release,
        server=bench_runner.Server(
            host=benchmark.ANY_ADDRESS.get(address, address),
            port=int(instance["port"]),
            log=home / "server.log",
            profile=home / "profile",
            api_key=asked.api_key,
        ),
        client=bench_clients.find(release_path, str(release["sglang_version"]), tokenizer, package=package, chosen=chosen),
        client_environment={str(name): str(value) for name, value in (instance.get("environment") or {}).items()},
        tokenizer=tokenizer,
        lock=home / "benchmark.lock",
    )


def definition(asked: Asked, served: Served | None) -> dict[str, Any]:
    """Return what is measured, without anything secret; ``served`` is None where the server did not start."""
    instance: Mapping[str, Any] = served.instance if served else {}
    environment = bench_runner.redacted_environment(instance.get("environment") or asked.arm.get("environment") or {})
    speculation = asked.arm.get("speculation") or {}
    release = dict(served.release) if served else {}
    patch_modes = launch_checks.patch_modes(environment, release.get("patch_sets") or ())
    names = {"target": asked.target, "draft": speculation.get("draft_model")}
    return {
        "run_id": asked.run_id,
        "host": asked.host,
        "instance": asked.instance,
        "arm": {**asked.arm, "environment": bench_runner.redacted_environment(asked.arm.get("environment") or {})},
        "acceptance_simulated": bool(speculation)
        and any(environment.get(name, "").strip() not in ("", "0", "-1") for name in records.PINS),
        "argv": bench_runner.redacted_argv([str(word) for word in instance.get("argv") or []]),
        "environment": environment,
        "patch_modes": patch_modes,
        "patch_sets_in_check": launch_checks.patch_sets_in_check(patch_modes),
        "release": release,
        "models": {
            role: {"name": name, "identity": (asked.models.get(name) or {}).get("identity")} for role, name in names.items() if name
        },
        "client": served.client.identity() if served else None,
        "host_fingerprint": benchmark.fingerprint(asked.host_info),
    }
