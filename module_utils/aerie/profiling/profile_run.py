"""One arm, profiled: a load at each number of clients, windows with the phase profiler on and off, a trace. Standard library only.

One run of the client a level. While it lasts, the profiler's switch is turned in short windows and the server's log is followed, so
that the same seconds give the shares of the phases and what measuring them costs. The client is ended when the last window is closed.
Nothing here interprets a figure; profile_levels.py does, from the files that a level leaves.
"""

from __future__ import annotations

import contextlib
import functools
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_clients, bench_runner
from ansible.module_utils.aerie.measuring.bench_runner import CellError, Server, ServerDiedError
from ansible.module_utils.aerie.profiling import overhead, preloaded_client, profile_levels, trace_summary
from ansible.module_utils.aerie.profiling.decode_load import (
    READY_SECONDS,
    Follower,
    Watch,
    following,
    not_full,
    requests_to_outlast,
    warm_up,
    window_seconds,
)

SWITCH, RANGES = bench_runner.PROFILER_SWITCH, "trace"
TRACE_SECONDS = 180.0
SEEN_SECONDS = 0.1
"""How long until the profiler has seen its files, at which it looks every 20 ms."""


@dataclass(frozen=True)
class Settings:
    """How an arm is profiled."""

    concurrency: tuple[int, ...]
    seconds: float
    window_seconds: float
    seed: int
    workload: Mapping[str, Any]
    trace_concurrency: int | None
    trace_steps: int
    timeout_seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "concurrency": list(self.concurrency),
            "seconds": self.seconds,
            "window_seconds": self.window_seconds,
            "seed": self.seed,
            "workload": dict(self.workload),
            "trace_concurrency": self.trace_concurrency,
            "trace_steps": self.trace_steps,
            "timeout_seconds": self.timeout_seconds,
        }


@dataclass(frozen=True)
class Job:
    """One arm's work: where its files go, the server, the client, what to do, and whether the arm has phases to time."""

    directory: Path
    server: Server
    client: bench_clients.Client
    client_environment: Mapping[str, str]
    tokenizer: Path | None
    settings: Settings
    phases: bool
    definition: Mapping[str, Any]
    lock: Path
    before_level: Callable[[], None] = field(default=lambda: None)


def clean_up(profile: Path) -> list[str]:
    """Take away what an interrupted run left switched on; return the names of what was there."""
    left = [name for name in (SWITCH, RANGES) if (profile / name).exists()]
    for name in left:
        (profile / name).unlink(missing_ok=True)
    return left


def record_failed(directory: Path, definition: Mapping[str, Any], levels: tuple[int, ...], reason: str) -> None:
    """Record that an arm's levels could not be measured, since its server did not start."""
    profile_levels.set_aside(directory)
    directory.mkdir(parents=True)
    files.write_json(directory / profile_levels.LAUNCH, definition)
    for level in levels:
        place = directory / f"c{level}"
        place.mkdir()
        files.write_json(place / profile_levels.OUTCOME, {"concurrency": level, "status": bench_runner.FAILED, "reason": reason})


def run(job: Job, tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Profile every level; return what became of each. Whatever happens, the profiler is off afterwards."""
    with bench_runner.alone(job.lock, job.directory.parent.name):
        clean_up(job.server.profile)
        try:
            return _run(job, tell)
        finally:
            clean_up(job.server.profile)


def _run(job: Job, tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    profile_levels.set_aside(job.directory)
    job.directory.mkdir(parents=True)
    files.write_json(job.directory / profile_levels.LAUNCH, job.definition)
    arm, levels = job.definition["arm"]["name"], job.settings.concurrency
    environment = bench_runner.client_environment(job.client_environment, job.server.api_key)
    outcomes: list[dict[str, Any]] = []
    died: str | None = None

    def say(done: int, level: int, said: str) -> None:
        tell(f"{arm} c={level}  {said}", done, len(levels))

    with preloaded_client.Clients.open(job.client, environment, job.directory / "client-import.log") as clients:
        for number, level in enumerate(levels, 1):
            directory = job.directory / f"c{level}"
            directory.mkdir()
            job.before_level()
            if number == 1:  # else the line would hide what became of the level before
                say(0, level, "warming up")
            outcome: dict[str, Any] = {"concurrency": level, "status": bench_runner.COMPLETED, "reason": None, "started": _now()}
            try:
                if died:
                    raise ServerDiedError(died)
                outcome |= _level(job, clients, level, directory, functools.partial(say, number - 1, level))
            except (CellError, AerieError) as error:
                outcome |= {"status": getattr(error, "status", bench_runner.FAILED), "reason": str(error)}
                died = str(error) if isinstance(error, ServerDiedError) else died
            outcome["finished"] = _now()
            files.write_json(directory / profile_levels.OUTCOME, outcome)
            found = profile_levels.read(directory)
            outcomes.append({"concurrency": level, "status": outcome["status"], "reason": outcome["reason"]})
            say(number, level, profile_levels.in_words(found))
    return {
        "levels": outcomes,
        "levels_failed": sum(outcome["status"] != bench_runner.COMPLETED for outcome in outcomes),
        "run_directory": str(job.directory),
        "changed": True,
    }


def _level(job: Job, clients: preloaded_client.Clients, level: int, directory: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    speed = warm_up(job.server, job.settings.workload, job.settings.seed, level)
    bench_runner.flush(job.server)
    requests = requests_to_outlast(job.settings.workload, job.settings.seconds, level, speed)
    load = bench_clients.Load(
        host=job.server.host,
        port=job.server.port,
        tokenizer=job.tokenizer,
        workload=job.settings.workload,
        dataset=None,
        concurrency=level,
        requests=requests,
        seed=job.settings.seed + level,
        output=directory / bench_runner.CLIENT,
    )
    told: dict[str, Any] = {"requests": requests, "warm_up_tok_s": round(speed, 1)}
    with following(job.server.log) as follower:
        client = clients.start(load, directory / bench_runner.CLIENT_LOG, READY_SECONDS)
        watch = Watch(
            job.server, client, directory / bench_runner.CLIENT_LOG, job.settings.timeout_seconds, "sglang_profile_timeout_seconds"
        )
        try:
            watch.until(lambda: follower.is_full(level), READY_SECONDS, lambda: not_full(follower, level, READY_SECONDS))
            with _kept_phases(job.server.profile, directory / bench_runner.PHASES, job.phases):
                windows = _windows(job, level, follower, watch, tell)
                files.write_json(directory / profile_levels.WINDOWS, {"concurrency": level, "windows": windows})
            if level == job.settings.trace_concurrency:
                tell(f"tracing {job.settings.trace_steps} steps")
                told |= _trace(job, level, directory, follower, watch)
        finally:
            client.end()
            files.write_atomic(directory / profile_levels.LINES, profile_levels.dump_lines(list(follower.lines)))
    bench_runner.flush(job.server)
    return told


# ---- windows -----------------------------------------------------------------------------------------------------------------------


def _windows(job: Job, level: int, follower: Follower, watch: Watch, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    settings, switch = job.settings, job.server.profile / SWITCH
    length = window_seconds(settings.window_seconds, follower)
    # Without phases there is nothing to switch, and half the time tells the speed.
    states = (
        overhead.plan(settings.seconds, length, settings.seed + level)
        if job.phases
        else (overhead.OFF,) * max(1, int(settings.seconds / 2 / length))
    )
    tell(f"measuring {len(states)} windows of {length:.1f} s")
    windows = []
    try:
        for number, state in enumerate(states):
            if state == overhead.ON:
                switch.touch()
            else:
                switch.unlink(missing_ok=True)
            start = time.time()
            watch.sleep(start + length)
            windows.append({"pair": number // 2, "state": state, "start": start, "end": time.time()})
    finally:
        switch.unlink(missing_ok=True)
    return windows


@contextlib.contextmanager
def _kept_phases(profile: Path, target: Path, wanted: bool) -> Iterator[None]:
    """Keep the lines that the profiler writes during the block."""
    if not wanted:
        yield
        return
    if not profile.is_dir():
        raise CellError(f"{profile} does not exist: the server has no AERIE_PROFILE_DIR: start it with the sglang_server role")
    sizes = {path.name: path.stat().st_size for path in profile.glob("phases-*.jsonl")}
    try:
        yield
    finally:
        kept = (bench_runner.new_lines(path, sizes.get(path.name, 0)) for path in sorted(profile.glob("phases-*.jsonl")))
        files.write_atomic(target, b"".join(kept))


# ---- the trace ---------------------------------------------------------------------------------------------------------------------


def _trace(job: Job, level: int, directory: Path, follower: Follower, watch: Watch) -> dict[str, Any]:
    """Have SGLang trace some steps under this load, and sum the trace up; a trace that fails is told and spoils nothing else."""
    place = job.directory / profile_levels.TRACES / f"c{level}"
    place.mkdir(parents=True, exist_ok=True)
    asked = {
        "output_dir": str(place),
        "num_steps": job.settings.trace_steps,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
        "profile_prefix": f"{job.definition['arm']['name']}-c{level}",
    }
    marks = [job.server.profile / name for name in (RANGES, SWITCH)] if job.phases else []
    try:
        before = follower.traced
        for mark in marks:
            mark.touch()
        watch.sleep(time.time() + SEEN_SECONDS)
        bench_runner.request(job.server, "/start_profile", "POST", TRACE_SECONDS, asked)
        watch.until(lambda: follower.traced > before, TRACE_SECONDS, lambda: f"no trace after {TRACE_SECONDS:g} s: see {job.server.log}")
    except urllib.error.HTTPError as error:
        return {"trace_reason": f"/start_profile answered {error.code}: {error.read(300).decode(errors='replace').strip()}"}
    except (ServerDiedError, OSError):
        raise
    except CellError as error:
        with contextlib.suppress(OSError):
            bench_runner.request(job.server, "/stop_profile", "POST", TRACE_SECONDS)
        return {"trace_reason": str(error)}
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)
    traces = sorted(place.glob("*.trace.json.gz"))
    first = next((path for path in traces if "TP-0" in path.name), None)
    if first is None:
        return {"trace_reason": f"SGLang said that it had traced, and left no trace below {place}"}
    sizes = {path.name: path.stat().st_size for path in traces}
    try:
        files.write_json(directory / profile_levels.TRACE, trace_summary.summarise(trace_summary.load(first)))
    except AerieError as error:
        return {"trace_reason": str(error), "traces": sizes}
    return {"traces": sizes}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
