"""One arm, profiled: a load at each number of clients, windows with the phase profiler on and off, a trace. Standard library only.

One run of the client a level. While it lasts, the profiler's switch is turned in short windows and the server's log is followed, so
that the same seconds give the shares of the phases and what measuring them costs. The client is ended when the last window is closed.
Nothing here interprets a figure; profile_levels.py does, from the files that a level leaves.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files, processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_clients, bench_runner
from ansible.module_utils.aerie.measuring.bench_runner import CellError, Server, ServerDiedError
from ansible.module_utils.aerie.profiling import overhead, preloaded_client, profile_levels, trace_summary

SWITCH, RANGES = bench_runner.PROFILER_SWITCH, "trace"
POLL_SECONDS = 0.01
FOLLOW_SECONDS = 0.004
READY_SECONDS = 180.0
"""How long a client may take to import and to fill the server; a Python client's first start on a cold disk takes over half a minute."""
WARM_SECONDS = 240.0
TRACE_SECONDS = 180.0
SEEN_SECONDS = 0.1
"""How long until the profiler has seen its files, at which it looks every 20 ms."""
LINES_PER_WINDOW = 4
"""A window lasts until so many of the server's lines fit into it, if that is longer than what was asked for."""
LONGEST_WINDOW_SECONDS = 15.0
WARM_TOKENS = (8, 48)
RESERVE = 2.5
"""By how much a load may be faster than the warm-up, whose batches run out together."""
FEW_STEPS, MANY_TOKENS = 10, 3
"""What a line of the server's log is taken to cover before one was seen: steps, and tokens of each request a step."""
AFTERWARDS_SECONDS = 15
MOST_REQUESTS = 20_000


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
    speed = _warm(job.server, job.settings, level)
    bench_runner.flush(job.server)
    requests = _requests(job.settings, level, speed)
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
    with _following(job.server.log) as follower:
        client = clients.start(load, directory / bench_runner.CLIENT_LOG, READY_SECONDS)
        watch = _Watch(job, client, directory)
        try:
            watch.until(lambda: follower.is_full(level), READY_SECONDS, lambda: _not_full(follower, level))
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


# ---- the load ----------------------------------------------------------------------------------------------------------------------


def _warm(server: Server, settings: Settings, level: int) -> float:
    """Meet the batch size unmeasured, and return about how many tokens a second it gives; needs no client, which imports meanwhile."""
    draws = random.Random(settings.seed)

    def generate(tokens: int) -> None:
        ids = [draws.randrange(10, 100) for _ in range(int(settings.workload["input_len"]))]
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        try:
            bench_runner.request(server, "/generate", "POST", WARM_SECONDS, {"input_ids": ids, "sampling_params": sampling})
        except OSError as error:
            if not processes.is_listening(server.port):
                raise ServerDiedError(bench_runner.death(server)) from error
            raise CellError(f"warm-up: /generate: {error}") from error

    speed = 1.0
    with ThreadPoolExecutor(level) as pool:
        for tokens in WARM_TOKENS:
            started = time.monotonic()
            for _ in pool.map(generate, [tokens] * level):
                pass
            speed = level * tokens / (time.monotonic() - started)
    return speed


def _requests(settings: Settings, level: int, speed: float) -> int:
    """Return more requests than the windows can use up: the client must outlast them, and is ended then."""
    slowest_window = LINES_PER_WINDOW * FEW_STEPS * level * MANY_TOKENS / speed
    seconds = max(settings.seconds, 2 * overhead.FEWEST_PAIRS * min(slowest_window, LONGEST_WINDOW_SECONDS)) + AFTERWARDS_SECONDS
    wanted = level + math.ceil(RESERVE * speed * seconds / int(settings.workload["output_len"]))
    return min(max(wanted, 4 * level), MOST_REQUESTS)


class _Watch:
    """Waits while the client and the server live."""

    def __init__(self, job: Job, client: preloaded_client.Run, directory: Path) -> None:
        self._job = job
        self._client = client
        self._log = directory / bench_runner.CLIENT_LOG
        self._deadline = time.monotonic() + job.settings.timeout_seconds
        self._looked = time.monotonic()

    def until(self, done: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
        """Wait until ``done``; raise CellError with ``why`` after ``seconds``, or when the level's time is up."""
        end = min(time.monotonic() + seconds, self._deadline)
        while not done():
            self.check()
            if time.monotonic() > end:
                raise CellError(why(), bench_runner.TIMEOUT)
            time.sleep(POLL_SECONDS)

    def sleep(self, until: float) -> None:
        """Wait until the Unix time ``until``."""
        while (left := until - time.time()) > 0:
            self.check()
            time.sleep(min(left, 0.05))

    def check(self) -> None:
        if time.monotonic() - self._looked > bench_runner.GONE_SECONDS / 4:
            self._looked = time.monotonic()
            if not processes.is_listening(self._job.server.port):
                raise ServerDiedError(bench_runner.death(self._job.server))
        status = self._client.poll()
        if status is not None:
            raise CellError(
                f"the client ended with status {status} before the last window\n{bench_runner.tail(self._log)}", exit_status=status
            )
        if time.monotonic() > self._deadline:
            raise CellError(
                f"not done after {self._job.settings.timeout_seconds:g} s (sglang_profile_timeout_seconds)", bench_runner.TIMEOUT
            )


def _not_full(follower: _Follower, level: int) -> str:
    most = max((line["running"] for line in follower.lines if line["kind"] == "decode"), default=0)
    if not most:
        return f"the server's log told of no decode batch within {READY_SECONDS:g} s: is log-level above info, or is the client too slow?"
    return f"only {most} of {level} requests ran at once: raise max-running-requests of the server, or profile fewer clients"


# ---- windows -----------------------------------------------------------------------------------------------------------------------


def _windows(job: Job, level: int, follower: _Follower, watch: _Watch, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    settings, switch = job.settings, job.server.profile / SWITCH
    length = min(max(settings.window_seconds, LINES_PER_WINDOW * follower.period()), LONGEST_WINDOW_SECONDS)
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


def _trace(job: Job, level: int, directory: Path, follower: _Follower, watch: _Watch) -> dict[str, Any]:
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


# ---- the server's log --------------------------------------------------------------------------------------------------------------


class _Follower(threading.Thread):
    """Reads what a server adds to its log, and when: the moment that a line is seen is at most some milliseconds late."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._stopped = threading.Event()
        self._stream = path.open("rb")
        self._stream.seek(0, os.SEEK_END)
        self.lines: list[dict[str, Any]] = []
        self.traced = 0

    def run(self) -> None:
        rest = b""
        while not self._stopped.is_set():
            data = self._stream.read()
            if not data:
                self._reopen()
                self._stopped.wait(FOLLOW_SECONDS)
                continue
            now = time.time()
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                self._take(line.decode(errors="replace"), now)

    def _take(self, text: str, now: float) -> None:
        if found := overhead.read_line(text, now):
            self.lines.append(found)
        elif "Profiling done" in text:
            self.traced += 1

    def _reopen(self) -> None:
        """Follow the log where a service manager began a new one."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino != os.fstat(self._stream.fileno()).st_ino:
                self._stream.close()
                self._stream = self._path.open("rb")

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self._stream.close()

    def _decodes(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "decode"]

    def is_full(self, level: int) -> bool:
        """Say whether the last two lines told of ``level`` running requests: the load is there."""
        last = self._decodes()[-2:]
        return len(last) == 2 and all(line["running"] == level for line in last)

    def period(self) -> float:
        """Return the seconds between the last two lines of decode steps."""
        last = self._decodes()[-2:]
        return float(last[1]["t"] - last[0]["t"]) if len(last) == 2 else 0.0


@contextlib.contextmanager
def _following(path: Path) -> Iterator[_Follower]:
    follower = _Follower(path)
    follower.start()
    try:
        yield follower
    finally:
        follower.stop()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
