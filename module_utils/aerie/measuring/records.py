"""Records: what one cell gave, with all that defines it, derived from its raw files. Pure and standard library only.

The same directory gives the same record, byte for byte, on the host or on the controller, today or in a year: nothing is read
but the cell's files, and nothing is added but their hashes. Format: docs/reference/record.md.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import canonical_hash, sha256_file
from ansible.module_utils.aerie.measuring import bench_clients, bench_runner, placing
from ansible.module_utils.aerie.measuring.experiment import PROFILE
from ansible.module_utils.aerie.profiling import phases
from ansible.module_utils.aerie.serving import launch_checks, server_metrics

SCHEMA = "aerie-record/1"
RECORD = "record.json"
INTERRUPTED = "interrupted"
Info = dict[str, Any] | None
PINS = ("SGLANG_SIMULATE_ACC_LEN",)
"""Variables that pin the acceptance length: figures measured with one are engine speed, and say so."""

DEFINITION_SHAPE = {
    **placing.CELL,
    "identity": untrusted.WORD,
    "plan": untrusted.Maybe(untrusted.TEXT),
    "launch": untrusted.Maybe(untrusted.WHOLE),
    "repeat": untrusted.WHOLE,
    "kind": untrusted.WORD,
    "concurrency": untrusted.COUNT,
    "requests": untrusted.COUNT,
    "seed": untrusted.WHOLE,
    "arm": {"name": untrusted.WORD},
    "workload": untrusted.MAPPING,
    "instance": untrusted.Maybe(untrusted.TEXT),
    "argv": untrusted.ListOf(untrusted.TEXT),
    "environment": untrusted.MapOf(untrusted.TEXT),
    "release": untrusted.MAPPING,
    "models": untrusted.MAPPING,
    "host_fingerprint": untrusted.Maybe(untrusted.MAPPING),
    "client": untrusted.MAPPING,
}
OUTCOME_SHAPE = {
    "status": untrusted.WORD,
    "reason": untrusted.Maybe(untrusted.TEXT),
    "started": untrusted.WORD,
    "finished": untrusted.WORD,
}


def is_cell(directory: Path) -> bool:
    """Say whether ``directory`` is one of the runner's cells."""
    return (directory / bench_runner.DEFINITION).is_file()


def make(directory: Path) -> dict[str, Any]:
    """Return the record of the cell in ``directory``; raise AerieError where its files are not what a cell leaves."""
    with untrusted.reading(directory):
        record = _make(directory)
    untrusted.check(record)  # what is worked out of raw figures is not always a number
    return record


def _make(directory: Path) -> dict[str, Any]:
    definition = _json(directory / bench_runner.DEFINITION)
    if definition.get("schema") != bench_runner.SCHEMA:
        found = untrusted.shown(definition.get("schema"))
        raise AerieError(
            f"{directory}: definition.json has schema {found}, and this Aerie reads {bench_runner.SCHEMA}: use the one that wrote it"
        )
    _require(definition, DEFINITION_SHAPE, directory / bench_runner.DEFINITION)
    outcome = _json(directory / bench_runner.OUTCOME) if (directory / bench_runner.OUTCOME).exists() else None
    if outcome is not None:
        _require(outcome, OUTCOME_SHAPE, directory / bench_runner.OUTCOME)
    status = str(outcome["status"]) if outcome else INTERRUPTED
    reason = outcome["reason"] if outcome else "the cell was interrupted: it has no outcome.json"
    before, after = (_text(directory / name) for name in (bench_runner.METRICS_BEFORE, bench_runner.METRICS_AFTER))
    info_before, info_after = (_info(directory / name) for name in (bench_runner.INFO_BEFORE, bench_runner.INFO_AFTER))
    environment = bench_runner.redacted_environment(definition["environment"])
    patch_modes = launch_checks.patch_modes(environment, definition["release"].get("patch_sets") or ())
    workload = {key: value for key, value in definition["workload"].items() if key != "concurrency"}
    return {
        "schema": SCHEMA,
        "record_id": canonical_hash([definition["identity"], definition["run_id"], definition["host"], definition["cell"]]),
        "identity": definition["identity"],
        "experiment": definition["experiment"],
        "plan": definition["plan"],
        "run_id": definition["run_id"],
        "host": definition["host"],
        "cell": definition["cell"],
        "launch": definition["launch"],
        "repeat": definition["repeat"],
        "kind": definition["kind"],
        "concurrency": definition["concurrency"],
        "requests": definition["requests"],
        "seed": definition["seed"],
        "status": status,
        "reason": reason,
        "times": _times(outcome),
        "arm": definition["arm"],
        "workload": workload,
        "instance": definition["instance"],
        "argv": bench_runner.redacted_argv(definition["argv"]),
        "environment": environment,
        "acceptance_simulated": any(environment.get(name, "").strip() not in ("", "0", "-1") for name in PINS),
        "patch_modes": patch_modes,
        "patch_sets_in_check": launch_checks.patch_sets_in_check(patch_modes),
        "release": definition["release"],
        "models": definition["models"],
        "host_fingerprint": definition["host_fingerprint"],
        "client": definition["client"],
        "versions": _versions(definition, info_after or info_before),
        "metrics": _metrics(directory, before, after, info_before, info_after),
        "phases": _phases(directory) if definition["kind"] == PROFILE else None,
        "raw": raw_files(directory),
    }


def raw_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of each raw file of a cell, by name.

    A link, a pipe and a file of a name that Aerie would not give are none of the cell's: they are neither read nor collected, so a
    record is the same on the host and on the controller.
    """
    found = {}
    for entry in sorted(os.scandir(directory), key=lambda entry: os.fsencode(entry.name)):
        about = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(about.st_mode) and entry.name != RECORD and placing.is_component(entry.name):
            found[entry.name] = {"bytes": about.st_size, "sha256": sha256_file(Path(entry.path))}
    return found


def dump(record: Mapping[str, Any]) -> str:
    """Return the text of record.json."""
    return json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _metrics(directory: Path, before: str, after: str, info_before: Info, info_after: Info) -> dict[str, Any] | None:
    """Return the client's figures and what the server counted; null where the client left no result."""
    try:
        found = bench_clients.metrics(bench_clients.read_result(directory / bench_runner.CLIENT))
    except AerieError:
        return None
    grown = server_metrics.delta(before, after) if after else {}
    accepted = server_metrics.acceptance(grown, info_before, info_after)
    steps = grown.get(server_metrics.VERIFY_CALLS) or None
    from_metrics = accepted.source == "metrics" and steps is not None and accepted.length is not None
    return found | {
        "accept_length": accepted.length,
        "accept_source": accepted.source,
        "verify_steps": steps if from_metrics else None,
        # As in accept_length = 1 + accepted / steps.
        "accepted_tokens": (grown[server_metrics.GENERATED] - grown[server_metrics.REQUESTS] - steps) if from_metrics and steps else None,
        "cached_tokens": grown.get(server_metrics.CACHED, 0.0) if server_metrics.PROMPT in grown else None,
        "prompt_tokens": grown.get(server_metrics.PROMPT),
        "server_requests": grown.get(server_metrics.REQUESTS),
    }


def _phases(directory: Path) -> dict[str, Any] | None:
    text = _text(directory / bench_runner.PHASES)
    if not text:
        return None
    try:
        summary = phases.summarise(phases.read(text, bench_runner.PHASES)).as_dict()
    except AerieError as error:
        return {"error": str(error)}
    return summary | {"phases_ms": {name: part["mean_ms"] for name, part in summary["phases"].items()}}


def _times(outcome: Mapping[str, Any] | None) -> dict[str, Any]:
    if not outcome:
        return {"started": None, "finished": None, "seconds": None}
    started, finished = outcome["started"], outcome["finished"]
    try:
        seconds = (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()  # Python 3.11 reads the Z
    except (ValueError, TypeError, OverflowError) as error:
        raise untrusted.Malformed(f"{bench_runner.OUTCOME}: its times can't be read ({error})") from None
    return {"started": started, "finished": finished, "seconds": round(seconds, 3)}


def _versions(definition: Mapping[str, Any], info: Mapping[str, Any] | None) -> dict[str, Any]:
    release = definition["release"]
    return {
        "sglang": release.get("sglang_version"),
        "sglang_served": (info or {}).get("version"),
        "torch": release.get("torch_version"),
        "python": release.get("python_version"),
        "client": definition["client"].get("version"),
    }


def _require(value: Mapping[str, Any], shape: untrusted.Shape, path: Path) -> None:
    try:
        untrusted.require(value, shape)
    except untrusted.Malformed as error:
        raise untrusted.Malformed(f"{path}: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = untrusted.read(path)
    except OSError as error:
        raise AerieError(f"{path} can't be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise AerieError(f"{path} holds no object")
    return value


def _info(path: Path) -> dict[str, Any] | None:
    try:
        value = untrusted.read(path)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _text(path: Path) -> str:
    try:
        return untrusted.read_bytes(path, untrusted.RAW).decode(errors="replace")
    except FileNotFoundError:
        return ""
