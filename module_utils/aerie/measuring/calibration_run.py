"""One server, calibrated: at each number of clients, windows of plain and of speculative decoding under one load. Standard library only.

Where the arm names candidate_steps, each number of draft steps is a mode of its own, and modes are compared with their neighbours.

The levels of a first look, then finer steps around the crossover as it shows itself, then the thresholds before and after against each
other. Nothing is restarted in between: the mode is forced over /set_internal_state. Afterwards nothing is forced, whatever happens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import (
    bench_clients,
    bench_runner,
    calibration,
    calibration_depths,
    calibration_files,
    dynamic_control,
)
from ansible.module_utils.aerie.measuring.bench_runner import CellError, Server, ServerDiedError
from ansible.module_utils.aerie.measuring.calibration import PLAIN, SPECULATIVE
from ansible.module_utils.aerie.measuring.calibration_depths import Comparison
from ansible.module_utils.aerie.profiling import overhead, preloaded_client, profile_levels
from ansible.module_utils.aerie.profiling.decode_load import (
    READY_SECONDS,
    Watch,
    following,
    not_full,
    requests_to_outlast,
    warm_up,
    window_seconds,
)
from ansible.module_utils.aerie.serving import server_flags
from ansible.module_utils.aerie.words import listing

FORCED_SECONDS = 15.0
"""How long a forced mode may take to begin; it does with the next step."""
CONFIRMED_LEVELS = 4
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class Settings:
    """How a server is calibrated; no concurrency: by what the server can run at once."""

    concurrency: tuple[int, ...]
    finer_levels: int
    seconds: float
    window_seconds: float
    seed: int
    workload: Mapping[str, Any]
    confirm: bool
    timeout_seconds: float


@dataclass(frozen=True)
class Job:
    """What is calibrated: where files go, the server, the client, and the thresholds that were in force before (null: none)."""

    directory: Path
    server: Server
    client: bench_clients.Client
    client_environment: Mapping[str, str]
    tokenizer: Path | None
    settings: Settings
    before: Mapping[str, int] | None
    definition: Mapping[str, Any]
    lock: Path
    before_level: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Modes:
    """Two states that windows alternate between, each with what the server is told for it."""

    first: str
    second: str
    told: Mapping[str, Mapping[str, Any]]
    forced: bool

    @classmethod
    def of_depths(cls, comparison: Comparison) -> Modes:
        """Return the two modes of a comparison, each with its number of draft steps."""
        told = {}
        for name, steps in zip(comparison.names, (comparison.deeper, comparison.shallower), strict=True):
            told[name] = {"force": SPECULATIVE if steps else PLAIN, "num_steps": steps}
        return cls(*comparison.names, told, forced=True)


FORCED = Modes(SPECULATIVE, PLAIN, {mode: {"force": mode} for mode in (SPECULATIVE, PLAIN)}, forced=True)


def run(job: Job, tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Calibrate; return what became of each level. The files say the rest (calibration_files.py)."""
    with bench_runner.alone(job.lock, job.directory.name):
        try:
            state = dynamic_control.state(job.server)
            return _Sweep(job, tell, state, dynamic_control.info(job.server)).run()
        except CellError as error:
            raise AerieError(str(error)) from error
        finally:
            with contextlib.suppress(CellError):
                dynamic_control.release(job.server)


class _Sweep:
    def __init__(self, job: Job, tell: Callable[[str, int, int], None], state: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        self._job = job
        self._tell = tell
        self._most, self._sizes = most_requests(info), batch_sizes(state, info)
        self._wanted = list(job.settings.concurrency) or list(calibration.first_levels(self._most, self._sizes))
        if max(self._wanted) > self._most:
            raise AerieError(
                f"sglang_calibrate_concurrency has {max(self._wanted)}, and the server runs {self._most} requests at most: raise "
                "max-running-requests of its arm, or take fewer clients"
            )
        self._started = time.monotonic()
        self._done = 0
        self._outcomes: list[dict[str, Any]] = []
        self._levels: list[calibration.Level] = []
        self._comparisons = calibration_depths.comparisons(depths_to_measure(job.definition["arm"], state))
        self._measured: dict[Comparison, list[calibration.Level]] = {comparison: [] for comparison in self._comparisons}
        self._done_names: set[str] = set()
        self._died: str | None = None

    def run(self) -> dict[str, Any]:
        job = self._job
        profile_levels.set_aside(job.directory)
        job.directory.mkdir(parents=True)
        about: dict[str, Any] = {"most": self._most, "batch_sizes": self._sizes, "before": job.before}
        if self._comparisons:
            about["candidate_steps"] = [comparison.deeper for comparison in self._comparisons]
        files.write_json(job.directory / calibration_files.LAUNCH, {**job.definition, **about})
        environment = bench_runner.client_environment(job.client_environment, job.server.api_key)
        with preloaded_client.Clients.open(job.client, environment, job.directory / "client-import.log") as clients:
            if self._comparisons:
                self._compare_depths(clients)
            else:
                self._compare_modes(clients)
            estimate = self._estimate()
            if job.settings.confirm and estimate and not self._died:
                self._confirm(clients, estimate)
        return {
            "levels": self._outcomes,
            "levels_failed": sum(outcome["status"] != bench_runner.COMPLETED for outcome in self._outcomes),
            "run_directory": str(job.directory),
            "changed": True,
        }

    def _estimate(self) -> calibration.Estimate | None:
        """Return the crossover with plain decoding by what was measured so far."""
        if self._comparisons:
            decision = self._decision()
            return decision.estimate if decision else None
        return calibration.estimate(self._levels, self._job.settings.seed) if self._levels else None

    def _decision(self) -> calibration_depths.Decision | None:
        """Return the depths and the crossover by what was measured so far; None where figures lack."""
        steps = int(self._job.definition["arm"]["speculation"]["steps"])
        try:
            return calibration_depths.decide(self._measured, steps, self._most, self._sizes, self._job.settings.seed)
        except AerieError:
            return None

    def _compare_modes(self, clients: preloaded_client.Clients) -> None:
        """Measure speculation against plain decoding at the levels of a first look, then at finer ones around the crossover."""
        for level in self._wanted:
            self._measure(clients, level, FORCED, f"c{level}")
        for _ in range(self._job.settings.finer_levels):
            estimate = self._estimate()
            if estimate is None or self._died:
                break
            finer = calibration.next_level(estimate, self._most, self._sizes)
            if finer is None:
                break
            self._measure(clients, finer, FORCED, f"c{finer}")

    def _compare_depths(self, clients: preloaded_client.Clients) -> None:
        """Measure every comparison at the levels of a first look, then finer ones around each crossover."""
        for level in self._wanted:
            for comparison in self._comparisons:
                self._compare(clients, level, comparison)
        for comparison in self._comparisons:
            for _ in range(self._job.settings.finer_levels):
                decision = self._decision()
                if decision is None or self._died or not self._refine(clients, decision, comparison):
                    break

    def _refine(self, clients: preloaded_client.Clients, decision: calibration_depths.Decision, comparison: Comparison) -> bool:
        """Measure the level that tells most about a crossover; return False where there is none left."""
        with_plain = comparison.shallower is None
        estimate = decision.estimate if with_plain else decision.estimates[comparison]
        level = calibration.next_level(estimate, self._most, self._sizes)
        if level is None:
            return False
        if with_plain:
            size = calibration.padded(level, self._sizes)
            needed = calibration_depths.comparisons_to_plain(self._comparisons, decision.steps_by_batch, size)
        else:
            needed = [comparison]
            if level > calibration.thresholds(decision.estimate, self._most, self._sizes).high:
                return False  # plain decoding is faster there than any depth
        new = [entry for entry in needed if _name_of(level, entry) not in self._done_names]
        for entry in new:
            self._compare(clients, level, entry)
        return bool(new)

    def _compare(self, clients: preloaded_client.Clients, level: int, comparison: Comparison) -> None:
        self._measure(clients, level, Modes.of_depths(comparison), _name_of(level, comparison), comparison)

    def _confirm(self, clients: preloaded_client.Clients, found: calibration.Estimate) -> None:
        """Meet the thresholds before and after in pairs of windows, where they choose different modes and on either side of that."""
        after = calibration.thresholds(found, self._most, self._sizes)
        before = calibration.Thresholds(**(self._job.before or {"high": self._most, "low": self._most}))
        if after == before:
            return
        decision = self._decision() if self._comparisons else None
        for level in calibration.levels_to_confirm(found.points, before, after, self._sizes, CONFIRMED_LEVELS):
            depth = {"num_steps": decision.steps_at(calibration.padded(level, self._sizes))} if decision else {}
            told = {BEFORE: {**asdict(before), "force": None, **depth}, AFTER: {**asdict(after), "force": None, **depth}}
            self._measure(clients, level, Modes(AFTER, BEFORE, told, forced=False), f"confirm-c{level}")

    def _measure(
        self, clients: preloaded_client.Clients, level: int, modes: Modes, name: str, comparison: Comparison | None = None
    ) -> None:
        self._done_names.add(name)
        directory = self._job.directory / name
        directory.mkdir()
        self._job.before_level()
        label = f"c={level}" + ("" if modes.forced else "  before and after")
        label += f"  {modes.first} and {modes.second}" if comparison else ""
        if not self._outcomes:  # else the line would hide what became of the level before
            self._say(f"{label}  warming up, 1 of about {self._expected()}")
        outcome: dict[str, Any] = {"concurrency": level, "status": bench_runner.COMPLETED, "reason": None, "started": _now()}
        try:
            if self._died:
                raise ServerDiedError(self._died)
            outcome |= _level(self._job, clients, level, modes, directory, lambda said: self._say(f"{label}  {said}"))
        except (CellError, AerieError) as error:
            outcome |= {"status": getattr(error, "status", bench_runner.FAILED), "reason": str(error)}
            self._died = str(error) if isinstance(error, ServerDiedError) else self._died
        outcome |= {"finished": _now(), "modes": [modes.first, modes.second], "told": dict(modes.told)}
        files.write_json(directory / calibration_files.OUTCOME, outcome)
        self._outcomes.append({name: outcome[name] for name in ("concurrency", "status", "reason")} | {"modes": outcome["modes"]})
        self._done += 1
        found = calibration_files.level(directory)
        if modes.forced and found:
            (self._measured[comparison] if comparison else self._levels).append(found)
        left = (time.monotonic() - self._started) / self._done * max(self._expected() - self._done, 0)
        after = f"  left ~{int(left // 60):02d}:{int(left % 60):02d}" if left else ""
        self._say(f"{label}  {_in_words(outcome, found)}{after}")

    def _expected(self) -> int:
        """Return about how many levels there will be: finer steps and a confirmation only where there is a crossover."""
        settings = self._job.settings
        confirmed = CONFIRMED_LEVELS if settings.confirm else 0
        each = len(self._wanted) + settings.finer_levels
        return max(each * max(len(self._comparisons), 1) + confirmed, self._done)

    def _say(self, said: str) -> None:
        self._tell(f"{self._job.definition['arm']['name']} {said}", self._done, self._expected())


def _level(
    job: Job, clients: preloaded_client.Clients, level: int, modes: Modes, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    settings = job.settings
    # The first mode is the slower one to a step, so that its lines say how long windows must be; kernels are met in both modes.
    speeds = {}
    for mode in (modes.second, modes.first):
        dynamic_control.change(job.server, modes.told[mode])
        speeds[mode] = warm_up(job.server, settings.workload, settings.seed, level)
    bench_runner.flush(job.server)
    requests = requests_to_outlast(settings.workload, settings.seconds, level, max(speeds.values()))
    load = bench_clients.Load(
        host=job.server.host,
        port=job.server.port,
        tokenizer=job.tokenizer,
        workload=settings.workload,
        dataset=None,
        concurrency=level,
        requests=requests,
        seed=settings.seed + level,
        output=directory / bench_runner.CLIENT,
    )
    with following(job.server.log) as follower:
        client = clients.start(load, directory / bench_runner.CLIENT_LOG, READY_SECONDS)
        watch = Watch(job.server, client, directory / bench_runner.CLIENT_LOG, settings.timeout_seconds, "sglang_calibrate_timeout_seconds")
        try:
            watch.until(lambda: follower.is_full(level), READY_SECONDS, lambda: not_full(follower, level, READY_SECONDS))
            length = window_seconds(settings.window_seconds, follower)
            states = overhead.plan(settings.seconds, length, settings.seed + level)
            say(f"measuring {len(states)} windows of {length:.1f} s")
            windows = _windows(job, modes, states, length, watch)
            files.write_json(directory / profile_levels.WINDOWS, {"concurrency": level, "windows": windows})
        finally:
            client.end()
            files.write_atomic(directory / profile_levels.LINES, profile_levels.dump_lines(list(follower.lines)))
    bench_runner.flush(job.server)
    return {"requests": requests, "warm_up_tok_s": {mode: round(speed, 1) for mode, speed in speeds.items()}}


def _windows(job: Job, modes: Modes, states: Sequence[str], length: float, watch: Watch) -> list[dict[str, Any]]:
    windows: list[dict[str, Any]] = []
    for number, state in enumerate(states):
        mode = modes.first if state == overhead.ON else modes.second
        if not windows or windows[-1]["state"] != mode:
            dynamic_control.change(job.server, modes.told[mode])
        changed = time.time()
        if modes.forced:
            told = f"forced to be {mode}, the server is not after {FORCED_SECONDS:g} s"
            watch.until(lambda: _is_in(dynamic_control.state(job.server), modes.told[mode]), FORCED_SECONDS, lambda: told)  # noqa: B023
        start = time.time()
        watch.sleep(start + length)
        windows.append({"pair": number // 2, "state": mode, "start": start, "end": time.time(), "changed": changed})
    return windows


def _is_in(state: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Say whether the server does what it was told; its depth only where it reports one."""
    steps = told.get("num_steps")
    return state.get("mode") == told["force"] and steps in (None, state.get("num_steps_now", steps))


def _name_of(level: int, comparison: Comparison) -> str:
    """Return the directory of a comparison's files at one level."""
    return f"c{level}-{comparison.names[0].replace(' ', '-')}"


def _in_words(outcome: Mapping[str, Any], found: calibration.Level | None) -> str:
    if outcome["status"] != bench_runner.COMPLETED:
        return f"{str(outcome['status']).upper()}: {str(outcome['reason']).splitlines()[0]}"
    if found is None or not found.plain_tok_s or not found.speculative_tok_s:
        return "no throughput told"
    ratio = found.speculative_tok_s / found.plain_tok_s
    names = outcome["modes"]
    return f"{names[0]} {found.speculative_tok_s:.0f} tok/s  {names[1]} {found.plain_tok_s:.0f} tok/s  {ratio:.3f}×"


# ---- what the server says of itself ------------------------------------------------------------------------------------------------------


def most_requests(info: Mapping[str, Any]) -> int:
    """Return how many requests the server runs at once."""
    states = info.get("internal_states") or [{}]
    for holder, name in (
        (states[0], "effective_max_running_requests_per_dp"),
        (states[0], "max_running_requests"),
        (info, "max_running_requests"),
    ):
        value = holder.get(name) if isinstance(holder, Mapping) else None
        if isinstance(value, int) and value > 0:
            return value
    raise AerieError("the server doesn't say how many requests it runs at once: set max-running-requests in its arm")


def batch_sizes(state: Mapping[str, Any], info: Mapping[str, Any]) -> list[int] | None:
    """Return the sizes of captured CUDA graphs, to which batches are padded; None where they aren't."""
    found = state.get("graph_batch_sizes")
    if not found and not info.get("disable_cuda_graph"):
        config = info.get("cuda_graph_config")
        decode = config.get("decode") if isinstance(config, Mapping) else None
        off = isinstance(decode, Mapping) and str(decode.get("backend") or "").lower() == "disabled"
        found = None if off else (decode.get("bs") if isinstance(decode, Mapping) else info.get("cuda_graph_bs"))
    sizes = sorted({int(size) for size in found or () if isinstance(size, int) and size > 0})
    return sizes or None


def describe(settings: Settings) -> dict[str, Any]:
    """Return the settings as files keep them."""
    return asdict(settings) | {"concurrency": list(settings.concurrency), "workload": dict(settings.workload)}


def depths_to_measure(arm: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of draft steps to compare; none where the arm names no candidate_steps.

    A server that has adaptive speculation by flags alone chooses its depth itself, as always.
    """
    candidates = server_flags.candidate_steps(arm.get("speculation"))
    offered = state.get("candidate_steps") or []
    if lacking := [steps for steps in candidates if steps not in offered]:
        raise AerieError(
            f"arm {arm.get('name')} has candidate_steps {listing(candidates)}, and the server can't be "
            f"forced to draft {listing(lacking)} (it offers {listing(offered)}): does its log say that "
            "adaptive speculation was disabled? Else run playbooks/patch.yml for the present patch set"
        )
    return candidates


def would(settings: Settings, arm: Mapping[str, Any]) -> str:
    """Say what would be measured."""
    candidates = server_flags.candidate_steps(arm.get("speculation"))
    depths = [calibration_depths.mode_name(steps) for steps in reversed(candidates)]
    levels = listing(settings.concurrency) if settings.concurrency else "doubling numbers of"
    finer = f", then up to {settings.finer_levels} numbers around the crossover" if settings.finer_levels else ""
    modes = listing([*depths, "plain decoding"]) if depths else "plain and speculative decoding"
    return f"{modes} would be measured in turn at {levels} clients{finer}, in one launch"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
