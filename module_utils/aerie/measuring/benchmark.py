"""From a plan's launch and a host's instance to the work of measuring it. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.measuring import bench_clients, bench_runner, dynamic_control
from ansible.module_utils.aerie.measuring.experiment import POLICY
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release_file

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
FINGERPRINT = ("fingerprint", "hostname", "machine_id_hash", "os", "kernel", "architecture", "cuda_driver_version")
GPU_FINGERPRINT = ("index", "name", "uuid", "driver", "memory_total_mib", "compute_capability")
CPU_FINGERPRINT = ("model", "sockets", "cores", "logical")


@dataclass(frozen=True)
class Request:
    """What a benchmark task was asked to measure."""

    run_id: str
    host: str
    instance: str
    experiment: dict[str, Any]
    plan: str
    launch: dict[str, Any]
    arm: dict[str, Any]
    models: dict[str, Any]
    target: str
    settings: dict[str, Any]
    host_info: dict[str, Any]
    dataset: dict[str, Any] | None
    staged_dataset: Path | None
    api_key: str | None
    client: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Request:
        """Return the request that module parameters make; raise AerieError where they can't be one."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given["run_id"]):
            raise AerieError(f"run_id is {given['run_id']!r}: it names a directory, so use letters, digits, '-', '_' and '.' only")
        staged = given.get("staged_dataset")
        values: dict[str, Any] = {name: given.get(name) for name in cls.__dataclass_fields__ if name != "staged_dataset"}
        return cls(staged_dataset=Path(staged) if staged else None, **values)


def pending(paths: HostPaths, asked: Request) -> list[str]:
    """Return the cells of the launch that are left to measure, by all that is known of them before their server is started.

    Without a release, as in check mode on a bare host, that is all of them.
    """
    if not (paths.current / "release.json").is_file():
        return [cell["id"] for cell in asked.launch["cells"]]
    return bench_runner.pending(paths.runs / asked.run_id, _definitions_before_start(paths, asked), by="intent")


def record_not_started(paths: HostPaths, asked: Request, reason: str) -> list[dict[str, Any]]:
    """Record the launch's cells as failed because its server did not start; return what became of each."""
    return bench_runner.record_not_started(paths.runs / asked.run_id, _definitions_before_start(paths, asked), reason)


def _definitions_before_start(paths: HostPaths, asked: Request) -> tuple[dict[str, Any], ...]:
    release = _release(paths.current, "make the release again with the sglang_patches role")
    client = _client(paths.current.resolve(), release, asked)
    asked = _with_nccl(paths, asked)
    return tuple(_definition(asked, cell, {}, release, client, {}) for cell in asked.launch["cells"])


def prepare(paths: HostPaths, asked: Request, before_cell: Callable[[], None] = lambda: None) -> bench_runner.Job:
    """Return the work that ``asked`` means on this host; raise AerieError before anything is written if it can't be done."""
    home = paths.instance(asked.instance)
    instance = _read(home / "instance.json", f"instance {asked.instance} does not exist: start it with the sglang_server role")
    if instance.get("state") != "ready":
        raise AerieError(f"instance {asked.instance} is {instance.get('state')}, not ready: start it with the sglang_server role")
    served = instance["arm"]["name"]
    if served != asked.launch["arm"]:
        raise AerieError(f"instance {asked.instance} serves arm {served}, not {asked.launch['arm']}: start it with the launch's arm first")
    release_path = paths.release(instance["release"])
    release = _release(release_path, "the release that is served is gone: make one with the sglang_patches role")
    client = _client(release_path, release, asked)
    address = str(instance["host"]).strip("[]")
    environment = {str(name): str(value) for name, value in (instance.get("environment") or {}).items()}
    run = paths.runs / asked.run_id
    asked = _with_nccl(paths, asked)
    definitions = tuple(_definition(asked, cell, instance, release, client, environment) for cell in asked.launch["cells"])
    server = bench_runner.Server(
        host=ANY_ADDRESS.get(address, address),
        port=int(instance["port"]),
        log=home / "server.log",
        profile=home / "profile",
        api_key=asked.api_key,
    )
    return bench_runner.Job(
        run=run,
        server=server,
        client=client,
        client_environment=environment,
        tokenizer=_tokenizer(asked),
        dataset=dataset_path(paths, asked),
        definitions=definitions,
        lock=home / "benchmark.lock",
        timeout_seconds=float(asked.experiment["timeout_seconds"]),
        cells_before=int(asked.launch.get("cells_before") or 0),
        cells_total=int(asked.launch.get("cells_total") or 0),
        before_cell=before_cell,
        modes=dynamic_control.Modes(server),
    )


def _with_nccl(paths: HostPaths, asked: Request) -> Request:
    """Return ``asked`` with the host's nccl.env among the settings that a server's command follows from, where it has one."""
    found = nccl.read(paths.root)
    return replace(asked, settings={**asked.settings, "nccl": found}) if found else asked


def dataset_path(paths: HostPaths, asked: Request) -> Path | None:
    """Return where the data set lies on the host: one file per content, shared by all cells of a run."""
    return paths.runs / asked.run_id / "datasets" / f"{asked.dataset['sha256']}.json" if asked.dataset else None


def place_dataset(paths: HostPaths, asked: Request) -> None:
    """Put the data set that the controller sent in its place; raise AerieError when it is not the one that was checked there."""
    target = dataset_path(paths, asked)
    if target is None or asked.dataset is None:
        return
    if not target.exists() and asked.staged_dataset:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copyfile(asked.staged_dataset, partial)
        partial.replace(target)
    if not target.exists():
        raise AerieError(f"data set {target} is not on the host, and none was sent: run this through its action plugin")
    if files.sha256_file(target) != asked.dataset["sha256"]:
        target.unlink()
        raise AerieError(f"data set {target} is not what the controller checked (a cut transfer?): it was removed; run again")


def fingerprint(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a host's survey tells whether figures compare, its hash first of all; nothing that moves by itself."""
    found = {name: info[name] for name in FINGERPRINT if name in info}
    if isinstance(info.get("cpu"), Mapping):
        found["cpu"] = {name: info["cpu"].get(name) for name in CPU_FINGERPRINT}
    if info.get("gpus"):
        found["gpus"] = [{name: gpu.get(name) for name in GPU_FINGERPRINT} for gpu in info["gpus"]]
    if info and "fingerprint" not in found:
        found["fingerprint"] = files.canonical_hash(found)
    return found


def _definition(
    asked: Request,
    cell: Mapping[str, Any],
    instance: Mapping[str, Any],
    release: Mapping[str, Any],
    client: bench_clients.Client,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    workload = {**asked.experiment["workload"], "dataset_sha256": asked.dataset["sha256"] if asked.dataset else None}
    speculation = asked.arm.get("speculation") or {}
    names = {"target": asked.target, "draft": speculation.get("draft_model")}
    models = {role: {"name": name, **_identity(asked.models.get(name))} for role, name in names.items() if name}
    definition = {
        "schema": bench_runner.SCHEMA,
        "run_id": asked.run_id,
        "host": asked.host,
        "experiment": asked.experiment["name"],
        "plan": asked.plan,
        "launch": asked.launch["launch"],
        "cell": cell["id"],
        "arm": {
            "name": cell["arm"],
            **asked.arm,
            **_shared(asked, cell),
            "environment": bench_runner.redacted_environment(asked.arm.get("environment") or {}),
        },
        "workload": {name: value for name, value in workload.items() if name != "concurrency"},
        "concurrency": cell["concurrency"],
        "repeat": cell["repeat"],
        "kind": cell["kind"],
        "seed": cell["seed"],
        "requests": cell["requests"],
        "instance": asked.instance,
        "argv": bench_runner.redacted_argv([str(word) for word in instance.get("argv") or []]),
        "environment": bench_runner.redacted_environment(environment),
        "release": dict(release),
        "models": models,
        "settings_sha256": files.canonical_hash(asked.settings),
        "host_info": asked.host_info,
        "host_fingerprint": fingerprint(asked.host_info),
        "client": client.identity(),
        "timeout_seconds": asked.experiment["timeout_seconds"],
    }
    return definition | {"identity": bench_runner.identity(definition), "intent": bench_runner.intent(definition)}


def _shared(asked: Request, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells a cell within the launch of another arm from one of a server of its own; it is part of its identity."""
    if not cell.get("mode"):
        return {}
    arm, mode = asked.launch["arm"], cell["mode"]
    how = "as its policy decides" if mode == POLICY else f"forced to be {mode}"
    described = asked.arm.get("description") or "no description"
    return {"share_launch": {"arm": arm, "mode": mode}, "description": f"{described} ({how}, in a launch that {arm} shares)"}


def _client(path: Path, release: Mapping[str, Any], asked: Request) -> bench_clients.Client:
    package = Path(release["tree"]) / "sglang" if release.get("tree") else None
    chosen = Path(asked.client) if asked.client else None
    return bench_clients.find(path, str(release["sglang_version"]), _tokenizer(asked), package=package, chosen=chosen)


def _tokenizer(asked: Request) -> Path | None:
    path = (asked.models.get(asked.target) or {}).get("path")
    return Path(path) if path and Path(path).is_dir() else None


def _identity(model: Any) -> dict[str, Any]:
    return {name: model[name] for name in ("identity", "bytes") if name in model} if isinstance(model, Mapping) else {"identity": None}


def _release(directory: Path, cure: str) -> dict[str, Any]:
    try:
        return release_file.read(directory)
    except (OSError, ValueError) as error:
        raise AerieError(f"{directory / release_file.RELEASE} can't be read ({error}): {cure}") from error


def _read(path: Path, cure: str) -> dict[str, Any]:
    try:
        value = files.read_json(path)
    except (OSError, ValueError) as error:
        raise AerieError(f"{path} can't be read ({error}): {cure}") from error
    if not isinstance(value, dict):
        raise AerieError(f"{path} holds no object: {cure}")
    return value
