"""From what a calibration task asked for and a host's instance to the work of calibrating it. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.measuring import calibration_run, served
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.words import listing, near

PATCH_SET = "dynamic_speculation"
WORKLOAD = {"dataset": "random-ids", "input_len": 128, "output_len": 256}
SHORTEST_WINDOW_SECONDS = 0.2


@dataclass(frozen=True)
class Request:
    """What a calibration task was asked for."""

    run_id: str
    host: str
    instance: str
    arm: dict[str, Any]
    before: dict[str, int] | None
    models: dict[str, Any]
    target: str
    host_info: dict[str, Any]
    settings: calibration_run.Settings
    api_key: str | None
    client: str | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Request:
        """Return the request that module parameters make; raise one AerieError with everything that is wrong with them."""
        found = []
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given["run_id"]):
            found.append(f"run id {given['run_id']!r} names a directory: use letters, digits, '-', '_' and '.' only")
        levels = tuple(given["concurrency"] or ())
        if levels and (len(set(levels)) != len(levels) or min(levels) < 1):
            found.append(f"sglang_calibrate_concurrency is {list(levels)}: it must be different whole numbers from 1 on")
        workload = WORKLOAD | (given["workload"] or {})
        found += [f"sglang_calibrate_workload.{key}: no such setting{near(key, WORKLOAD)}" for key in workload.keys() - WORKLOAD.keys()]
        if workload["dataset"] != "random-ids":
            found.append(f"sglang_calibrate_workload.dataset is {workload['dataset']!r}: a calibration's prompts are random-ids")
        for key, least in (("input_len", 1), ("output_len", 4)):
            if not isinstance(workload[key], int) or workload[key] < least:
                found.append(f"sglang_calibrate_workload.{key} is {workload[key]!r}: it must be a whole number from {least} on")
        if given["window_seconds"] < SHORTEST_WINDOW_SECONDS:
            found.append(f"sglang_calibrate_window_seconds is {given['window_seconds']}: it must be {SHORTEST_WINDOW_SECONDS} or more")
        if given["finer_levels"] < 0:
            found.append(f"sglang_calibrate_finer_levels is {given['finer_levels']}: it must be 0 or more")
        arm = given["arm"]
        if not arm.get("dynamic"):
            found.append(
                f"arm {arm.get('name')} has no `dynamic`, so its server can't change over: name one that has in sglang_calibrate_arm, "
                "such as one with dynamic: {threshold: auto}"
            )
        raise_all(found, "the calibration")
        settings = calibration_run.Settings(
            concurrency=tuple(sorted(levels)),
            finer_levels=given["finer_levels"],
            seconds=given["seconds"],
            window_seconds=given["window_seconds"],
            seed=given["seed"],
            workload=workload,
            confirm=given["confirm"],
            timeout_seconds=given["timeout_seconds"],
        )
        kept = ("run_id", "host", "instance", "models", "target", "host_info", "api_key", "client")
        return cls(arm=arm, before=_before(given.get("before")), settings=settings, **{name: given[name] for name in kept})


def _before(given: Mapping[str, Any] | None) -> dict[str, int] | None:
    """Return the thresholds in force: those of a calibration, or of a number, whose lower one the server sets itself."""
    if not given or given.get("high") is None:
        return None
    high = int(given["high"])
    low = given.get("low")
    return {"high": high, "low": high - high // 8 if low is None else int(low)}


def root(paths: HostPaths) -> Path:
    """Return the directory of all calibrations on the host."""
    return paths.root / "calibrations"


def directory(paths: HostPaths, asked: Request) -> Path:
    """Return the directory of the calibration's files."""
    return root(paths) / asked.run_id


def require_release(paths: HostPaths, asked: Request) -> bool:
    """Raise AerieError where the release that would serve can't change over; return False where there is no release yet."""
    release = served.current_release(paths)
    if release is not None:
        _require_patch_set(release, asked)
    return release is not None


def _require_patch_set(release: Mapping[str, Any], asked: Request) -> None:
    served.require_patch_set(release, PATCH_SET, f"arm {asked.arm['name']} can't change over")


def prepare(paths: HostPaths, asked: Request, before_level: Callable[[], None] = lambda: None) -> calibration_run.Job:
    """Return the work that ``asked`` means on this host; raise AerieError before anything is written if it can't be done."""
    found = served.find(paths, asked, lambda release: _require_patch_set(release, asked))
    definition = served.definition(asked, found)
    if definition["patch_sets_in_check"]:
        raise AerieError(
            f"arm {asked.arm['name']} runs {listing(definition['patch_sets_in_check'])} in check mode, a test whose speeds are no "
            "results: leave the patch set's variable out of its environment and start it again"
        )
    about = {
        "started": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "settings": calibration_run.describe(asked.settings),
    }
    return calibration_run.Job(
        directory=directory(paths, asked),
        server=found.server,
        client=found.client,
        client_environment=found.client_environment,
        tokenizer=found.tokenizer,
        settings=asked.settings,
        before=asked.before,
        definition=definition | about,
        lock=found.lock,
        before_level=before_level,
    )
