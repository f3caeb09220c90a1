"""From what a profile task asked for and a host's instance to the work of profiling it. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import raise_all
from ansible.module_utils.aerie.measuring import served
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.profiling import profile_levels, profile_run
from ansible.module_utils.aerie.words import listing, near

PATCH_SET = "phase_profiler"
WORKLOAD = {"dataset": "random-ids", "input_len": 128, "output_len": 256}
SHORTEST_WINDOW_SECONDS = 0.2
FEWEST_TRACED_STEPS = 4


@dataclass(frozen=True)
class Request:
    """What a profile task was asked for."""

    run_id: str
    host: str
    instance: str
    arm: dict[str, Any]
    models: dict[str, Any]
    target: str
    host_info: dict[str, Any]
    settings: profile_run.Settings
    api_key: str | None
    client: str | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Request:
        """Return the request that module parameters make; raise one AerieError with everything that is wrong with them."""
        problems = []
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given["run_id"]):
            problems.append(f"run id {given['run_id']!r} names a directory: use letters, digits, '-', '_' and '.' only")
        levels = tuple(given["concurrency"])
        if not levels or len(set(levels)) != len(levels) or min(levels) < 1:
            problems.append(f"sglang_profile_concurrency is {list(levels)}: it must be different whole numbers from 1 on")
        workload = WORKLOAD | (given["workload"] or {})
        problems += [f"sglang_profile_workload.{key}: no such setting{near(key, WORKLOAD)}" for key in workload.keys() - WORKLOAD.keys()]
        if workload["dataset"] != "random-ids":
            problems.append(f"sglang_profile_workload.dataset is {workload['dataset']!r}: a profile's prompts are random-ids")
        for key, least in (("input_len", 1), ("output_len", 4)):
            if not isinstance(workload[key], int) or workload[key] < least:
                problems.append(f"sglang_profile_workload.{key} is {workload[key]!r}: it must be a whole number from {least} on")
        if given["window_seconds"] < SHORTEST_WINDOW_SECONDS:
            problems.append(f"sglang_profile_window_seconds is {given['window_seconds']}: it must be {SHORTEST_WINDOW_SECONDS} or more")
        traced = given["trace_concurrency"]
        if traced is not None and traced not in levels:
            problems.append(
                f"sglang_profile_trace_concurrency is {traced}, which is none of sglang_profile_concurrency ({listing(levels)})"
            )
        if given["trace_steps"] < FEWEST_TRACED_STEPS:
            problems.append(f"sglang_profile_trace_steps is {given['trace_steps']}: it must be {FEWEST_TRACED_STEPS} or more")
        raise_all(problems, "the profile")
        settings = profile_run.Settings(
            concurrency=levels,
            seconds=given["seconds"],
            window_seconds=given["window_seconds"],
            seed=given["seed"],
            workload=workload,
            trace_concurrency=traced,
            trace_steps=given["trace_steps"],
            timeout_seconds=given["timeout_seconds"],
        )
        kept = ("run_id", "host", "instance", "arm", "models", "target", "host_info", "api_key", "client")
        return cls(settings=settings, **{name: given[name] for name in kept})

    @property
    def has_phases(self) -> bool:
        """Say whether the arm runs the worker that the profiler times."""
        return str((self.arm.get("speculation") or {}).get("algorithm") or "").upper().startswith("EAGLE")


def root(paths: HostPaths) -> Path:
    """Return the directory of all profiles on the host."""
    return paths.root / "profiles"


def directory(paths: HostPaths, asked: Request) -> Path:
    """Return the directory of the arm's files."""
    return root(paths) / asked.run_id / str(asked.arm["name"])


def require_release(paths: HostPaths, asked: Request) -> bool:
    """Raise AerieError where the release that would serve the arm can't tell its phases; return False where there is no release yet."""
    release = served.current_release(paths)
    if release is not None:
        _require_profiler(release, asked)
    return release is not None


def _require_profiler(release: Mapping[str, Any], asked: Request) -> None:
    if asked.has_phases:
        served.require_patch_set(release, PATCH_SET, f"the phases of arm {asked.arm['name']} can't be timed")


def record_not_started(paths: HostPaths, asked: Request, reason: str) -> None:
    """Record the arm's levels as failed because its server did not start."""
    profile_run.record_failed(
        directory(paths, asked), _definition(asked, None), asked.settings.concurrency, f"the server did not start: {reason}"
    )


def prepare(paths: HostPaths, asked: Request, before_level: Callable[[], None] = lambda: None) -> profile_run.Job:
    """Return the work that ``asked`` means on this host; raise AerieError before anything is written if it can't be done."""
    found = served.find(paths, asked, lambda release: _require_profiler(release, asked))
    return profile_run.Job(
        directory=directory(paths, asked),
        server=found.server,
        client=found.client,
        client_environment=found.client_environment,
        tokenizer=found.tokenizer,
        settings=asked.settings,
        phases=asked.has_phases,
        definition=_definition(asked, found),
        lock=found.lock,
        before_level=before_level,
    )


def _definition(asked: Request, found: served.Served | None) -> dict[str, Any]:
    return served.definition(asked, found) | {
        "schema": profile_levels.SCHEMA,
        "started": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "settings": asked.settings.as_dict(),
    }
