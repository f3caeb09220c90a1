"""What the records of a run say: speed of each arm, speed-up against the baseline, where the two cross, and how sure that is.

The unit of repetition is the server launch: several requests, or cells, of one launch are one observation. Arms are compared
only within one run, on one host, at one concurrency, paired by repeat; records whose shapes differ are never compared.
Pure and deterministic; standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ansible.module_utils.aerie import files, untrusted, words
from ansible.module_utils.aerie.serving import launch_checks

CONFIDENCE = 0.95
BASELINE = "baseline"
COMPLETED = "completed"
MEASURE, PROFILE = "measure", "profile"
PARTS: tuple[tuple[str, str], ...] = (
    ("target_verify", "target verify"),
    ("draft", "draft"),
    ("draft_extend", "draft extend"),
    ("tree_and_acceptance", "tree and acceptance"),
    ("kv", "KV"),
    ("remainder", "remainder"),
)
"""Parts of a decode cycle as the phase profiler names them, and as a person reads them; they sum to the cycle."""
ONE_LAUNCH = "One launch each: no spread known, so small differences may be chance."
PINS = ("SGLANG_SIMULATE_ACC_LEN", "SIMULATE_ACC_LEN")
"""Environment variables that make SGLang accept a given number of draft tokens whatever the model says."""

# Two-sided 95 % quantiles of Student's t, by degrees of freedom 1 to 30 (any table; checked against scipy in the tests).
_T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """One figure over launches: the geometric mean, and how far the launches lie apart."""

    value: float
    low: float
    high: float
    launches: int


@dataclass(frozen=True)
class Ratio:
    """Speed-up against the baseline; ``low`` and ``high`` are the 95 % interval, None where too few pairs give none."""

    value: float
    low: float | None
    high: float | None
    pairs: int
    paired: bool

    @property
    def settled(self) -> bool | None:
        """Whether the interval leaves out 1; None where there is no interval."""
        return None if self.low is None or self.high is None else not self.low <= 1 <= self.high

    @property
    def side(self) -> int:
        """1 faster, -1 slower, 0 the same, by the point estimate."""
        return (self.value > 1) - (self.value < 1)


@dataclass(frozen=True)
class Failure:
    """A cell that gave no figure."""

    cell: str
    arm: str
    concurrency: int
    repeat: int
    kind: str
    status: str
    reason: str


@dataclass(frozen=True)
class Point:
    """One arm at one concurrency."""

    arm: str
    concurrency: int
    throughput: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    accept_length: float | None
    ratio: Ratio | None
    failed: int
    fastest: bool


@dataclass(frozen=True)
class Crossover:
    """Where an arm and the baseline change places.

    ``kind``: crosses, faster, slower, same, several, single (one concurrency only) or unknown (nothing to compare).
    ``at`` is the interpolated concurrency; ``low`` and ``high`` enclose it as far as the measurements settle it.
    """

    arm: str
    kind: str
    at: float | None
    low: int | None
    high: int | None
    sentence: str
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Phases:
    """Where the time of a decode cycle goes: share of each part (sums to 1), per arm and concurrency."""

    arm: str
    concurrency: int
    cycle_ms: float
    shares: Mapping[str, float]
    draft_steps: str
    """How the steps came about: measured, divided (equal parts of one graph), mixed or none."""
    draft_steps_ms: tuple[float, ...]
    cycles: int | None


@dataclass(frozen=True)
class Arm:
    """What defines an arm, as its records say it."""

    name: str
    description: str
    baseline: bool
    speculation: str
    pinned: bool
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    shares: bool = False
    """Whether its cells were measured within the launch of another arm."""
    patch_sets_in_check: tuple[str, ...] = ()
    """Patch sets that did the work twice to compare, so that the arm's speeds are no results."""


@dataclass(frozen=True)
class Model:
    """A model that a launch loaded: as ``target`` or ``draft``, by its catalog name and the hash of its files."""

    role: str
    name: str
    identity: str


@dataclass(frozen=True)
class Group:
    """Records that may be compared: one experiment, run, host and shape."""

    experiment: str
    run_id: str
    host: str
    started: str | None
    ended: str | None
    workload: Mapping[str, Any]
    release: Mapping[str, Any]
    models: tuple[Model, ...]
    fingerprint: Mapping[str, Any]
    """The machine, its hardware, system and drivers, with a hash of them, as far as they are recorded."""
    client: str
    arms: tuple[Arm, ...]
    baseline: str | None
    points: tuple[Point, ...]
    crossovers: tuple[Crossover, ...]
    phases: tuple[Phases, ...]
    failures: tuple[Failure, ...]
    cells: int
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.experiment} on {self.host}"

    @property
    def concurrencies(self) -> tuple[int, ...]:
        return tuple(sorted({point.concurrency for point in self.points}))


def t_quantile(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    # Cornish-Fisher in 1/degrees (Abramowitz and Stegun 26.7.5); exact to four digits from 31 on.
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def spread(values: Sequence[float]) -> Spread | None:
    """Return centre and range of one value per launch; None of none."""
    if not values:
        return None
    return Spread(_centre(values), min(values), max(values), len(values))


def _centre(values: Collection[float]) -> float:
    """Return the geometric mean; of one value that value, to the last digit."""
    return statistics.geometric_mean(values) if len(values) > 1 else next(iter(values))


def ratio(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Ratio | None:
    """Return the speed-up of throughputs by repeat; an interval from two pairs on; unpaired, without one, if no repeat is in both."""
    pairs = sorted(arm.keys() & baseline.keys())
    if pairs:
        logs = [math.log(arm[repeat] / baseline[repeat]) for repeat in pairs]
        centre = statistics.fmean(logs)
        if len(logs) == 1:
            return Ratio(math.exp(centre), None, None, 1, True)
        reach = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach), len(logs), True)
    if arm and baseline:
        return Ratio(_centre(arm.values()) / _centre(baseline.values()), None, None, 0, False)
    return None


def crossover(arm: str, ratios: Mapping[int, Ratio], baseline: str = BASELINE) -> Crossover:
    """Return where ``arm`` and the baseline change places, from the ratio at each concurrency.

    The place is where the line through the neighbouring points, in log ratio over log concurrency, meets 1.
    """
    levels = sorted(ratios)
    if not levels:
        return Crossover(
            arm, "unknown", None, None, None, f"{arm} can't be compared: no concurrency where it and {baseline} both completed.", ()
        )
    sides = [(level, ratios[level].side) for level in levels if ratios[level].side]
    doubts = _doubts(ratios)
    span = f"from {levels[0]} to {levels[-1]} clients"
    if len(levels) == 1:
        sentence = f"{arm} is {_by(ratios[levels[0]], baseline)} at {_clients(levels[0])}, the only concurrency measured."
        return Crossover(arm, "single", None, None, None, sentence, doubts)
    if not sides:
        return Crossover(arm, "same", None, None, None, f"{arm} is exactly as fast as {baseline} {span}.", doubts)
    changes = [(a, b) for a, b in pairwise(sides) if a[1] != b[1]]
    if not changes:
        word = "faster" if sides[0][1] > 0 else "slower"
        ends = f"{_times(ratios[levels[0]].value)} at {levels[0]}, {_times(ratios[levels[-1]].value)} at {levels[-1]}"
        everywhere = "everywhere" if len(sides) == len(levels) else "or as fast everywhere"
        sentence = f"No crossover in this range: {arm} is {word} than {baseline} {everywhere} {span} ({ends})."
        return Crossover(arm, word, None, None, None, sentence, doubts)
    places = [_place(ratios, before, after) for (before, _), (after, _) in changes]
    if len(changes) > 1:
        listed = words.listing(f"{_clients(place, about=True)}" for place in places)
        sentence = f"{arm} and {baseline} change places {len(changes)} times {span}, near {listed}: no single crossover can be named."
        return Crossover(arm, "several", None, sides[0][0], sides[-1][0], sentence, doubts)
    (before, side), (after, _) = changes[0]
    first, then = ("faster", "slower") if side > 0 else ("slower", "faster")
    sentence = (
        f"{arm} is {first} than {baseline} up to about {_clients(places[0], about=True)} and {then} from there to {levels[-1]} "
        f"({_times(ratios[before].value)} at {before}, {_times(ratios[after].value)} at {after})."
    )
    low, high = _settled_bounds(ratios, before, after, side)
    if (low, high) != (before, after):
        where = (
            f"between {low} and {high}"
            if low and high
            else f"above {low}"
            if low
            else f"below {high}"
            if high
            else "anywhere in this range or beyond"
        )
        doubts = (*doubts, f"The crossing itself may lie {where}.")
    return Crossover(arm, "crosses", places[0], low, high, sentence, doubts)


def _place(ratios: Mapping[int, Ratio], before: int, after: int) -> float:
    """Interpolate where the log ratio meets 0 between two levels of opposite sides; levels between them lie on 1 exactly."""
    middle = [level for level in ratios if before < level < after]
    if middle:
        return float(statistics.median(middle))
    left, right = math.log(ratios[before].value), math.log(ratios[after].value)
    return math.exp(math.log(before) + (math.log(after) - math.log(before)) * left / (left - right))


def _settled_bounds(ratios: Mapping[int, Ratio], before: int, after: int, side: int) -> tuple[int | None, int | None]:
    """Return the nearest levels outside the crossing that are not in doubt; without intervals, its neighbours."""
    below = [level for level in ratios if level <= before and ratios[level].settled is not False and ratios[level].side == side]
    above = [level for level in ratios if level >= after and ratios[level].settled is not False and ratios[level].side == -side]
    return max(below, default=None), min(above, default=None)


def _doubts(ratios: Mapping[int, Ratio]) -> tuple[str, ...]:
    doubts = []
    open_levels = [level for level in sorted(ratios) if ratios[level].settled is False]
    if open_levels:
        intervals = words.listing(f"{level} ({ratios[level].low:.2f} to {ratios[level].high:.2f})" for level in open_levels)
        doubts.append(f"Not settled at {intervals}: the 95 % interval includes 1. More launches would tell.")
    if any(value.pairs == 2 for value in ratios.values()):
        doubts.append("Two launches per arm give wide intervals: three or more are better.")
    if all(value.pairs <= 1 and value.paired for value in ratios.values()):
        doubts.append(ONE_LAUNCH)
    elif any(value.pairs == 1 for value in ratios.values()):
        single = words.listing(level for level in sorted(ratios) if ratios[level].pairs == 1)
        doubts.append(f"One pair of launches only at {single}: no interval there.")
    unpaired = [level for level in sorted(ratios) if not ratios[level].paired]
    if unpaired:
        doubts.append(
            f"At {words.listing(unpaired)} no repeat completed in both arms: the ratio compares different repeats and has no interval."
        )
    return tuple(doubts)


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _by(value: Ratio, baseline: str) -> str:
    if not value.side:
        return f"as fast as {baseline}"
    return f"{_times(value.value)} the speed of {baseline} ({'faster' if value.side > 0 else 'slower'})"


def _clients(count: float, about: bool = False) -> str:
    shown = f"{count:.0f}" if not about or count >= 10 else f"{count:.1f}".removesuffix(".0")
    return f"{shown} client{'' if shown == '1' else 's'}"


# ---- records ----------------------------------------------------------------------------------------------------------------------


def groups(records: Iterable[Mapping[str, Any]], baseline: str | None = None, problems: list[str] | None = None) -> list[Group]:
    """Return the verdict: one group per experiment, run, host and shape, in that order.

    ``baseline`` names the arm to compare with; None takes the one called baseline, else the only one without speculation. Figures of a
    host that can't be compared with each other are added to ``problems``, and the other groups are returned; without it, they raise.
    """
    sorted_records = sorted(
        records, key=lambda record: tuple(str(record.get(key, "")) for key in ("experiment", "host", "run_id", "cell", "record_id"))
    )
    places: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for record in sorted_records:
        place = (str(record["experiment"]), str(record["host"]), str(record["run_id"]))
        places.setdefault(place, {}).setdefault(files.canonical_hash(shape(record)), []).append(record)
    found = []
    for place, shapes in places.items():
        try:
            with untrusted.reading("its figures"):
                ordered = sorted(shapes.values(), key=lambda members: (_started(members) or "", str(members[0].get("cell"))))
                note = _shape_note([shape(members[0]) for members in ordered])
                found += [_group(members, baseline, note) for members in ordered]
        except ValueError as error:
            if problems is None:
                raise
            problems.append(f"{'/'.join(place)}: {words.cut(error, 200)}")
    return found


def shape(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for two records to be compared: workload without its level, release, target model, host."""
    workload = {key: value for key, value in _mapping(record, "workload").items() if key not in ("concurrency", "requests", "prompts")}
    return {
        "workload": workload,
        "release": _mapping(record, "release").get("id"),
        "target model": _mapping(_mapping(record, "models"), "target").get("identity"),
        "host": record.get("host_fingerprint"),
    }


def _shape_note(shapes: Sequence[Mapping[str, Any]]) -> str | None:
    if len(shapes) < 2:
        return None
    differing = [key for key in shapes[0] if any(other[key] != shapes[0][key] for other in shapes[1:])]
    apart = f"{words.listing(differing)} {'differs' if len(differing) == 1 else 'differ'}"
    return f"This run holds records of {len(shapes)} shapes on this host ({apart}): they are shown apart and not compared."


def _group(members: Sequence[Mapping[str, Any]], wanted_baseline: str | None, note: str | None) -> Group:
    arms = _arms(members, wanted_baseline)
    baseline = next((arm.name for arm in arms if arm.baseline), None)
    measured = [record for record in members if record.get("kind", MEASURE) == MEASURE]
    notes = [note] if note else []
    speeds: dict[tuple[str, int], dict[int, float]] = {}
    for arm, level in {(_arm_name(record), _level(record)) for record in measured}:
        speeds[arm, level] = _by_launch(measured, arm, level, "output_throughput_tok_s")
    ratios: dict[tuple[str, int], Ratio] = {}
    for (arm, level), values in speeds.items():
        found = ratio(values, speeds.get((baseline, level), {})) if baseline and arm != baseline else None
        if found:
            ratios[arm, level] = found
    points = _points(measured, arms, speeds, ratios)
    if not baseline:
        reason = f"no arm is called {wanted_baseline or BASELINE}" + (
            "" if wanted_baseline else " and not exactly one is without speculation"
        )
        notes.append(f"No baseline in this run ({reason}): speeds are shown, speed-ups and a crossover are not.")
    elif not any(speeds.get((baseline, level)) for level in {level for _, level in speeds}):
        notes.append(f"{baseline}, the baseline, has no completed cell: speed-ups and a crossover can't be given.")
    pinned = [arm.name for arm in arms if arm.pinned]
    if pinned:
        names = words.listing(pinned)
        notes.append(f"Acceptance of {names} is simulated (pinned by the environment): engine speed, not what a real draft would reach.")
    for described in arms:
        if described.patch_sets_in_check:
            names = words.listing(described.patch_sets_in_check)
            notes.append(
                f"Speeds of {described.name} are no results: {names} ran in check mode, a test that does the work twice and compares."
            )
    shared = [arm.name for arm in arms if arm.shares]
    if shared:
        notes.append(
            f"{words.listing(shared)} shared launches with each other, without a restart between them: compared with each other they are "
            "free of the luck of launches; none of them is a server of its own, and plain decoding there is no true baseline."
        )
    if not ratios and {point.throughput.launches for point in points if point.throughput} == {1}:
        notes.append(ONE_LAUNCH)
    phases = _phases([record for record in members if record.get("kind") == PROFILE and record.get("status") == COMPLETED])
    others = [arm.name for arm in arms if not arm.baseline] if baseline else []
    first = members[0]
    return Group(
        experiment=str(first["experiment"]),
        run_id=str(first["run_id"]),
        host=str(first["host"]),
        started=_started(members),
        ended=max((str(value) for record in members if (value := _mapping(record, "times").get("finished"))), default=None),
        workload=_mapping(first, "workload"),
        release=_mapping(first, "release"),
        models=_models(members),
        fingerprint=_mapping(first, "host_fingerprint"),
        client=_client(members),
        arms=arms,
        baseline=baseline,
        points=points,
        crossovers=tuple(
            crossover(arm, {level: value for (name, level), value in sorted(ratios.items()) if name == arm}, baseline or "")
            for arm in others
        ),
        phases=phases,
        failures=tuple(_failure(record) for record in members if record.get("status") != COMPLETED or _measures_nothing(record)),
        cells=len(members),
        notes=tuple(notes),
    )


def _points(
    measured: Sequence[Mapping[str, Any]],
    arms: Sequence[Arm],
    speeds: Mapping[tuple[str, int], Mapping[int, float]],
    ratios: Mapping[tuple[str, int], Ratio],
) -> tuple[Point, ...]:
    order = {arm.name: position for position, arm in enumerate(arms)}
    points = []
    for arm, level in sorted(speeds, key=lambda key: (key[1], order[key[0]])):
        throughput = spread(list(speeds[arm, level].values()))
        rivals = [_centre(values.values()) for (_, other), values in speeds.items() if other == level and values]
        cells = [record for record in measured if (_arm_name(record), _level(record)) == (arm, level)]
        points.append(
            Point(
                arm=arm,
                concurrency=level,
                throughput=throughput,
                ttft_ms=spread(list(_by_launch(measured, arm, level, "ttft_ms").values())),
                tpot_ms=spread(list(_by_launch(measured, arm, level, "tpot_ms").values())),
                accept_length=_accept_length([record for record in cells if record.get("status") == COMPLETED]),
                ratio=ratios.get((arm, level)),
                failed=sum(record.get("status") != COMPLETED or _measures_nothing(record) for record in cells),
                fastest=bool(throughput and len(rivals) > 1 and throughput.value >= max(rivals)),
            )
        )
    return tuple(points)


def _by_launch(records: Sequence[Mapping[str, Any]], arm: str, level: int, metric: str) -> dict[int, float]:
    """Return {repeat: value} of completed cells; several cells of one repeat are one observation."""
    found: dict[int, list[float]] = {}
    for record in records:
        value = metric_value(record, metric)
        if (_arm_name(record), _level(record)) == (arm, level) and record.get("status") == COMPLETED and value is not None and value > 0:
            found.setdefault(int(record.get("repeat") or 0), []).append(value)
    return {repeat: _centre(values) for repeat, values in sorted(found.items())}


def metric_value(record: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric as one number: of {mean, median, p99} the median."""
    value = _mapping(record, "metrics").get(metric)
    if isinstance(value, Mapping):
        value = value.get("median", value.get("mean"))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _measures_nothing(record: Mapping[str, Any]) -> bool:
    return record.get("kind", MEASURE) == MEASURE and not (metric_value(record, "output_throughput_tok_s") or 0) > 0


def _accept_length(cells: Sequence[Mapping[str, Any]]) -> float | None:
    """Return 1 + accepted / verify steps pooled over the cells where they are recorded, else the mean of the cells' own figures."""
    accepted = [metric_value(cell, "accepted_tokens") for cell in cells]
    steps = [metric_value(cell, "verify_steps") for cell in cells]
    if cells and all(value is not None for value in (*accepted, *steps)) and sum(value or 0 for value in steps) > 0:
        return 1 + sum(value or 0 for value in accepted) / sum(value or 0 for value in steps)
    values = [value for cell in cells if (value := metric_value(cell, "accept_length")) is not None]
    return statistics.fmean(values) if values else None


def _phases(cells: Sequence[Mapping[str, Any]]) -> tuple[Phases, ...]:
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in cells:
        phases = _mapping(record, "phases")
        if phases_ms(phases):
            found.setdefault((_arm_name(record), _level(record)), []).append(phases)
    result = []
    for (arm, level), members in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        weights = [float(member.get("cycles") or 1) for member in members]
        means = {
            part: math.fsum(phases_ms(member).get(part, 0.0) * weight for member, weight in zip(members, weights, strict=True))
            / math.fsum(weights)
            for part, _ in PARTS
        }
        total = math.fsum(means.values())
        if total <= 0:
            continue
        steps = [[float(step) for step in member.get("draft_steps_ms") or []] for member in members]
        same = len({len(each) for each in steps}) == 1
        result.append(
            Phases(
                arm=arm,
                concurrency=level,
                cycle_ms=total,
                shares={part: value / total for part, value in means.items()},
                draft_steps=str(members[0].get("draft_steps") or "measured") if same else "none",
                draft_steps_ms=tuple(statistics.fmean(column) for column in zip(*steps, strict=True)) if same else (),
                cycles=int(sum(weights)) if all(member.get("cycles") for member in members) else None,
            )
        )
    return tuple(result)


def phases_ms(phases: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean milliseconds of each part of a cycle, from a record's summary of its profile; empty where it has none."""
    parts = _mapping(phases, "phases")
    return {part: float(parts[part]["mean_ms"]) for part, _ in PARTS if "mean_ms" in _mapping(parts, part)}


def _arms(members: Sequence[Mapping[str, Any]], wanted_baseline: str | None) -> tuple[Arm, ...]:
    first: dict[str, Mapping[str, Any]] = {}
    for record in members:
        first.setdefault(_arm_name(record), record)
    plain = [name for name, record in first.items() if not _mapping(record, "arm").get("speculation")]
    chosen = wanted_baseline or (BASELINE if BASELINE in first else plain[0] if len(plain) == 1 else None)
    arms = []
    for name, record in first.items():
        arm = _mapping(record, "arm")
        environment = {str(key): str(value) for key, value in _mapping(record, "environment").items()} or {
            str(key): str(value) for key, value in (arm.get("environment") or {}).items()
        }
        arms.append(
            Arm(
                name=name,
                description=str(arm.get("description") or ""),
                baseline=name == chosen,
                speculation=_speculation(arm.get("speculation")),
                pinned=_pinned(record, environment),
                argv=tuple(str(word) for word in record.get("argv") or ()),
                environment=environment,
                shares=bool(arm.get("share_launch")),
                patch_sets_in_check=_patch_sets_in_check(members, name),
            )
        )
    return tuple(sorted(arms, key=lambda arm: (not arm.baseline, arm.name)))


def _pinned(record: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    said = record.get("acceptance_simulated", _mapping(record, "metrics").get("accept_simulated"))
    return bool(said) or any(environment.get(name, "").strip() not in ("", "0", "-1") for name in PINS)


def _patch_sets_in_check(members: Sequence[Mapping[str, Any]], arm: str) -> tuple[str, ...]:
    # Records of before have no patch_modes; what they are made of has always been there.
    names: set[str] = set()
    for record in members:
        if _arm_name(record) == arm:
            patch_sets = _mapping(record, "release").get("patch_sets") or ()
            modes = launch_checks.patch_modes(_mapping(record, "environment"), patch_sets)
            names.update(launch_checks.patch_sets_in_check(modes))
    return tuple(sorted(names))


def _speculation(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value) if value else "none"
    details = [f"{key.replace('_', ' ')} {value[key]}" for key in ("steps", "topk", "draft_tokens") if value.get(key) is not None]
    if candidates := value.get("candidate_steps"):
        details.append(f"candidate steps {words.listing(candidates)}")
    return ", ".join([str(value.get("algorithm", "speculation")), *details])


def _models(members: Sequence[Mapping[str, Any]]) -> tuple[Model, ...]:
    """Return the target, which is one, then the drafts, which may differ between arms."""
    found = {
        Model(role, str(model.get("name") or role), str(model.get("identity") or "unknown"))
        for record in members
        for role, model in _mapping(record, "models").items()
        if isinstance(model, Mapping)
    }
    return tuple(sorted(found, key=lambda model: (model.role != "target", model.role, model.name, model.identity)))


def _client(members: Sequence[Mapping[str, Any]]) -> str:
    client = next((record["client"] for record in members if record.get("client")), None)
    if isinstance(client, Mapping):
        return " ".join(str(client[key]) for key in ("name", "version") if client.get(key))
    return str(client or "")


def _failure(record: Mapping[str, Any]) -> Failure:
    status = str(record.get("status"))
    empty = status == COMPLETED
    return Failure(
        cell=str(record.get("cell")),
        arm=_arm_name(record),
        concurrency=_level(record),
        repeat=int(record.get("repeat") or 0),
        kind=str(record.get("kind", MEASURE)),
        status="no figure" if empty else status,
        reason=str(record.get("reason") or ("completed, but the client gave no output throughput" if empty else "no reason was recorded")),
    )


def _started(members: Sequence[Mapping[str, Any]]) -> str | None:
    return min((str(value) for record in members if (value := _mapping(record, "times").get("started"))), default=None)


def _arm_name(record: Mapping[str, Any]) -> str:
    arm = record.get("arm")
    return str(arm.get("name")) if isinstance(arm, Mapping) else str(arm)


def _level(record: Mapping[str, Any]) -> int:
    return int(record.get("concurrency") or 0)


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}
