"""From how fast a host decodes plainly and with speculation to the batch sizes at which to change over. Pure; standard library only.

The gain of speculation falls as batches grow, since verifying several tokens of each request costs nothing only while the GPU waits for
memory. So speed-ups over concurrency are fitted by the non-increasing curve that is nearest to them (pool adjacent violators, weighted by
how sure each level is), with straight lines in logarithms between; where the curve meets 1 is the crossover. Its interval is a bootstrap
over pairs of windows, made as wide as few pairs demand. Simulated: tests/unit/test_calibration.py.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.profiling import overhead
from ansible.module_utils.aerie.serving import server_flags
from ansible.module_utils.aerie.words import listing

SCHEMA = "aerie-calibration/1"
CONFIDENCE = 0.90
CROSSES, ALWAYS, NEVER = "crosses", "always", "never"
PLAIN, SPECULATIVE, POLICY = "plain", "speculative", "policy"
ONE_SERVER, RECORDS = "one server", "records"

DRAWS = 2000
TOLERANCE = 0.02
"""How much slower than the better mode a batch may run for being held back by the hysteresis, by the fitted curve."""
SHARED_DEGREES = 4
"""How many degrees of freedom a level's spread takes from the spread of all: a few pairs alone would now and then look too sure."""
MONOTONE = 1.25
"""How much wider draws are made, since fits that must fall lie closer together than measurements do: simulated, for a coverage of 90 %."""
NEAR_ENOUGH = 1.1
"""Neighbouring levels this close to each other need none between them."""
SWITCH_SHARE = 0.01
"""The most of the time that may be spent on changing over, which sets how long a mode lasts at least."""
FEWEST_DWELL_STEPS = 8
DWELL_SECONDS = (0.1, 5.0)


@dataclass(frozen=True)
class Level:
    """One number of running requests: speeds of each mode, and speculative over plain speed of each pair."""

    concurrency: int
    pairs: tuple[float, ...]
    plain_tok_s: float | None = None
    speculative_tok_s: float | None = None
    basis: str = overhead.STEPS


@dataclass(frozen=True)
class Point:
    """A level's speed-up by speculation, its 90 % interval (null for one pair), and the fitted curve there."""

    concurrency: int
    ratio: float
    low: float | None
    high: float | None
    fitted: float
    pairs: int
    plain_tok_s: float | None
    speculative_tok_s: float | None
    basis: str

    @property
    def settled(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Estimate:
    """Where plain decoding begins to win.

    ``at`` is null where it is outside of the levels: ``always`` speculate, or ``never``. ``low`` and ``high`` are its 90 % interval; null
    says that the interval reaches beyond the levels on that side. ``chances`` are the bootstrap's shares of the three verdicts.
    """

    verdict: str
    at: float | None
    low: float | None
    high: float | None
    chances: Mapping[str, float]
    points: tuple[Point, ...]

    @property
    def settled(self) -> bool:
        """Whether the bootstrap agrees with the verdict nine times of ten."""
        return self.chances[self.verdict] >= CONFIDENCE


@dataclass(frozen=True)
class Thresholds:
    """Plain above ``high``, speculative again at ``low`` or below; both are sizes that a batch can have after padding."""

    high: int
    low: int


# ---- pairs of windows ----------------------------------------------------------------------------------------------------------------


def level(
    concurrency: int,
    windows: Sequence[overhead.Window],
    found: Sequence[overhead.Interval],
    margin: float = 0.0,
    states: tuple[str, str] = (SPECULATIVE, PLAIN),
) -> Level | None:
    """Return the level that ``windows`` of one load give, the first of ``states`` over the second; None where no pair has figures of both.

    Tokens per second between prefills, since these cost the same in either mode and their luck would be noise; with prefills (``tokens``)
    where they come so often that too few pairs have clean steps.
    """
    clean = [interval for interval in found if interval.clean]
    by_steps, by_tokens = _speeds(windows, clean, margin), _speeds(windows, found, margin)
    pairs_of = {basis: _ratios(speeds, states) for basis, speeds in ((overhead.STEPS, by_steps), (overhead.TOKENS, by_tokens))}
    enough = min(overhead.FEWEST_PAIRS, len(pairs_of[overhead.TOKENS]))
    basis, speeds = (overhead.STEPS, by_steps) if len(pairs_of[overhead.STEPS]) >= enough else (overhead.TOKENS, by_tokens)
    if not pairs_of[basis]:
        return None
    means = [_mean([pair[state] for pair in speeds.values() if state in pair]) for state in states]
    return Level(concurrency, tuple(pairs_of[basis]), means[1], means[0], basis)


def _speeds(windows: Sequence[overhead.Window], found: Sequence[overhead.Interval], margin: float) -> dict[int, dict[str, float]]:
    speeds: dict[int, dict[str, float]] = {}
    for window in windows:
        value = overhead.tokens_per_second(overhead.within(found, window, margin))
        if value:
            speeds.setdefault(window.pair, {})[window.state] = value
    return dict(sorted(speeds.items()))


def _ratios(speeds: Mapping[int, Mapping[str, float]], states: tuple[str, str]) -> list[float]:
    return [pair[states[0]] / pair[states[1]] for pair in speeds.values() if all(state in pair for state in states)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def switch_ms(windows: Sequence[overhead.Window], found: Sequence[overhead.Interval], changes: Sequence[float]) -> dict[str, list[float]]:
    """Return, by the state that was changed to, the milliseconds of work that each change cost; ``changes`` are the windows' moments of it.

    The steps between two lines of the log that a change fell into gave fewer tokens than the two speeds promise; what is missing, at the
    new speed, is what the change took. Single figures are as noisy as the moment of the change is: take their mean.
    """
    clean = [interval for interval in found if interval.clean]
    costs: dict[str, list[float]] = {}
    for (before, after), moment in zip(pairwise(windows), changes[1:], strict=True):
        around = next((one for one in clean if one.start < moment < one.end), None)
        speeds = [overhead.tokens_per_second(overhead.within(clean, window)) for window in (before, after)]
        if before.state == after.state or around is None or not speeds[0] or not speeds[1]:
            continue
        promised = speeds[0] * (moment - around.start) + speeds[1] * (around.end - moment)
        given = around.tokens_per_second * (around.end - around.start)
        costs.setdefault(after.state, []).append(1000 * (promised - given) / speeds[1])
    return costs


# ---- records of two servers ------------------------------------------------------------------------------------------------------------


def from_records(records: Iterable[Mapping[str, Any]], plain: str, speculative: str) -> tuple[Level, ...]:
    """Return levels from completed cells of two arms of one run, paired by repeat: speeds of whole cells, prefills included."""
    speeds: dict[int, dict[int, dict[str, float]]] = {}
    for record in records:
        arm = (record.get("arm") or {}).get("name")
        value = (record.get("metrics") or {}).get("output_throughput_tok_s")
        if arm in (plain, speculative) and record.get("kind") == "measure" and record.get("status") == "completed" and value:
            mode = PLAIN if arm == plain else SPECULATIVE
            speeds.setdefault(int(record["concurrency"]), {}).setdefault(int(record["repeat"]), {})[mode] = float(value)
    levels = []
    for concurrency, repeats in sorted(speeds.items()):
        pairs = tuple(pair[SPECULATIVE] / pair[PLAIN] for _, pair in sorted(repeats.items()) if len(pair) == 2)
        if pairs:
            means = {mode: _mean([pair[mode] for pair in repeats.values() if len(pair) == 2]) for mode in (PLAIN, SPECULATIVE)}
            levels.append(Level(concurrency, pairs, means[PLAIN], means[SPECULATIVE], overhead.TOKENS))
    if not levels:
        raise AerieError(
            f"no concurrency at which {plain} and {speculative} both completed in the same repeat: name arms of the run in "
            "sglang_calibrate_records, or measure them with playbooks/benchmark.yml first"
        )
    return tuple(levels)


# ---- the estimate ----------------------------------------------------------------------------------------------------------------------


def estimate(levels: Iterable[Level], seed: int = 1, draws: int = DRAWS) -> Estimate:
    """Return the crossover of ``levels`` with its interval; needs one level at least, each with one pair at least."""
    curve = Curve.of(levels)
    verdict, at = _crossing(curve.knots)
    chances, low, high = _bootstrap(curve, seed, draws)
    points = []
    for one, values, spread, mean in zip(curve.levels, curve.logs, curve.spreads, curve.means, strict=True):
        reach = _factor(len(values)) * spread / math.sqrt(len(values)) if len(values) > 1 else None
        points.append(
            Point(
                concurrency=one.concurrency,
                ratio=math.exp(mean),
                low=None if reach is None else math.exp(mean - reach),
                high=None if reach is None else math.exp(mean + reach),
                fitted=math.exp(value_at(curve.knots, one.concurrency)),
                pairs=len(values),
                plain_tok_s=one.plain_tok_s,
                speculative_tok_s=one.speculative_tok_s,
                basis=one.basis,
            )
        )
    return Estimate(verdict, at, low, high, chances, tuple(points))


Knots = Sequence[tuple[float, float]]
"""Points of a curve: logarithms of the number of requests and of the speed-up."""


@dataclass(frozen=True)
class Curve:
    """The levels of one comparison in order, and the falling curve that is nearest to them."""

    levels: tuple[Level, ...]
    places: tuple[float, ...]
    logs: tuple[tuple[float, ...], ...]
    spreads: tuple[float, ...]
    weights: tuple[float, ...]
    means: tuple[float, ...]
    knots: Knots

    @classmethod
    def of(cls, levels: Iterable[Level]) -> Curve:
        """Fit the curve; needs one level at least, each with one pair at least."""
        ordered = tuple(sorted(levels, key=lambda level: level.concurrency))
        if not ordered:
            raise AerieError("no level was measured, so no crossover can be estimated")
        places = tuple(math.log(level.concurrency) for level in ordered)
        logs = tuple(tuple(math.log(pair) for pair in level.pairs) for level in ordered)
        spreads = tuple(_spreads(logs))
        weights = tuple(len(values) / spread**2 for values, spread in zip(logs, spreads, strict=True))
        means = tuple(statistics.fmean(values) for values in logs)
        return cls(ordered, places, logs, spreads, weights, means, _fit(places, means, weights))

    def drawn(self, seed: int, draws: int = DRAWS) -> Iterator[Knots]:
        """Yield the curves of a bootstrap: pairs are drawn again within each level.

        Means of few redrawn pairs lie closer together than those of new measurements would: they
        are set apart by as much as Student's t asks for, and by the level's spread as it is taken
        to be. A single pair is drawn around itself.
        """
        chance = random.Random(seed)
        normal = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
        wider = []
        for values, spread in zip(self.logs, self.spreads, strict=True):
            own = statistics.pstdev(values)
            wider.append(MONOTONE * _factor(len(values)) / normal * (spread / own if own > 1e-9 else 0.0))
        for _ in range(draws):
            means = []
            levels = zip(self.logs, self.means, self.spreads, wider, strict=True)
            for values, mean, spread, width in levels:
                if width:
                    again = statistics.fmean(chance.choices(values, k=len(values)))
                    means.append(mean + (again - mean) * width)
                else:
                    means.append(mean + MONOTONE * chance.gauss(0, spread / math.sqrt(len(values))))
            yield _fit(self.places, means, self.weights)


def value_at(knots: Knots, requests: int) -> float:
    """Return the logarithm of the speed-up with so many requests."""
    return _value(knots, math.log(requests))


def _spreads(logs: Sequence[Sequence[float]]) -> list[float]:
    """Return each level's standard deviation, drawn towards that of all levels; never 0, so that weights are finite."""
    squares = [sum((value - statistics.fmean(values)) ** 2 for value in values) for values in logs]
    degrees = [len(values) - 1 for values in logs]
    shared = sum(squares) / sum(degrees) if sum(degrees) else 0.0
    return [
        max(math.sqrt((square + SHARED_DEGREES * shared) / (degree + SHARED_DEGREES)), 1e-4)
        for square, degree in zip(squares, degrees, strict=True)
    ]


def _factor(pairs: int) -> float:
    return overhead.t_quantile(pairs - 1 + SHARED_DEGREES)


def _fit(places: Sequence[float], values: Sequence[float], weights: Sequence[float]) -> Knots:
    """Return the nearest non-increasing curve as knots: the middles of the blocks of levels whose order had to be evened out."""
    blocks: list[tuple[float, float, float]] = []  # weight, place, value
    for place, value, weight in zip(places, values, weights, strict=True):
        block = (weight, place, value)
        while blocks and blocks[-1][2] < block[2]:
            last = blocks.pop()
            whole = last[0] + block[0]
            block = (whole, *((last[0] * last[part] + block[0] * block[part]) / whole for part in (1, 2)))  # type: ignore[assignment]
        blocks.append(block)
    return [(place, value) for _, place, value in blocks]


def _value(knots: Knots, place: float) -> float:
    """Return the curve at ``place``; level beyond its ends."""
    if place <= knots[0][0]:
        return knots[0][1]
    for (left, first), (right, then) in pairwise(knots):
        if place <= right:
            return first + (then - first) * (place - left) / (right - left)
    return knots[-1][1]


def _meets(knots: Knots, level: float) -> float | None:
    """Return the logarithm of the concurrency at which the falling curve comes down to ``level``; None where it doesn't."""
    for (left, first), (right, then) in pairwise(knots):
        if first > level >= then:
            return left + (right - left) * (first - level) / (first - then)
    return None


def _crossing(knots: Knots) -> tuple[str, float | None]:
    if knots[0][1] <= 0:
        return NEVER, None
    place = _meets(knots, 0.0)
    return (ALWAYS, None) if place is None else (CROSSES, math.exp(place))


def _bootstrap(curve: Curve, seed: int, draws: int) -> tuple[dict[str, float], float | None, float | None]:
    """Return how often each verdict came, and the interval of the crossover."""
    found: list[float] = []
    for knots in curve.drawn(seed, draws):
        verdict, at = _crossing(knots)
        found.append({NEVER: 0.0, ALWAYS: math.inf}.get(verdict, at or 0.0))
    found.sort()
    ends = [found[round((draws - 1) * part)] for part in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)]
    low, high = ((end if 0 < end < math.inf else None) for end in ends)
    never, always = found.count(0.0) / draws, found.count(math.inf) / draws
    return {CROSSES: round(1 - never - always, 4), ALWAYS: always, NEVER: never}, low, high


# ---- what to measure, what to set ------------------------------------------------------------------------------------------------------


def first_levels(most: int, buckets: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the levels of a first look: doubling from 1 to ``most``, each rounded up to a size that a batch can have."""
    wanted = [2**power for power in range(most.bit_length()) if 2**power <= most] + [most]
    return tuple(sorted({min(padded(one, buckets), most) for one in wanted}))


def padded(batch: int, buckets: Sequence[int] | None) -> int:
    """Return the size at which a batch runs: the next captured graph's, or its own where there is none."""
    larger = [bucket for bucket in buckets or () if bucket >= batch]
    return min(larger, default=batch)


def next_level(found: Estimate, most: int, buckets: Sequence[int] | None = None) -> int | None:
    """Return the level whose measurement tells most about the crossover; None where no size between its neighbours is left."""
    if found.at is None:
        return None
    measured = [point.concurrency for point in found.points]
    below = max((one for one in measured if one <= found.at), default=None)
    above = min((one for one in measured if one > found.at), default=None)
    if below is None or above is None or above / below <= NEAR_ENOUGH:
        return None
    between = [one for one in buckets or range(below + 1, above) if below < one < above and one <= most]
    if not between:
        return None
    middle = math.sqrt(below * above)
    # Halfway between the neighbours and the place where the crossover seems to be: halving alone would waste what is known.
    aim = math.sqrt(middle * found.at)
    return min(between, key=lambda one: abs(math.log(one / aim)))


def thresholds(found: Estimate, most: int, buckets: Sequence[int] | None = None) -> Thresholds:
    """Return the hysteresis: the crossover's interval, no wider than the tolerance allows, at sizes that batches can have.

    Below ``most``, the most requests that the server runs at once. At least one size lies between both where there is one, so that a
    batch that changes by one request does not change the mode.
    """
    if found.verdict == ALWAYS:
        return Thresholds(most, most)
    if found.verdict == NEVER or found.at is None:
        return Thresholds(0, 0)
    sizes = batch_sizes(most, buckets)
    knots = [(math.log(point.concurrency), math.log(point.fitted)) for point in found.points]
    gain, loss = (_meets(knots, math.log1p(part)) for part in (TOLERANCE, -TOLERANCE))
    lower = max(found.low or 0.0, math.exp(gain) if gain is not None else 0.0)
    upper = min(found.high or math.inf, math.exp(loss) if loss is not None else math.inf)
    lower, upper = min(lower, found.at), max(upper, found.at)
    high = _largest(sizes, upper)
    if high == 0:
        return Thresholds(0, 0)
    low = _largest(sizes, lower)
    if low >= high:
        low = _largest(sizes, high - 1)
    return Thresholds(high, low or high)


def batch_sizes(most: int, buckets: Sequence[int] | None) -> list[int]:
    """Return the sizes that a batch can have after padding, up to ``most`` requests."""
    return sorted({size for size in buckets or range(1, most + 1) if size <= most} | {most})


def _largest(sizes: Sequence[int], end: float) -> int:
    place = bisect_right(sizes, end)
    return sizes[place - 1] if place else 0


@dataclass(frozen=True)
class Dwell:
    """The least time in a mode, in steps and in seconds, and what the changes cost that it follows from."""

    steps: int
    seconds: float
    to_plain_ms: float | None
    to_speculative_ms: float | None


def dwell(costs: Mapping[str, Sequence[float]], step_ms: float | None) -> Dwell:
    """Return how long a mode must last so that there and back take no more than :data:`SWITCH_SHARE` of the time.

    Of the costs only what is settled counts, so that noise does not make modes last.
    """
    means = {state: statistics.fmean(values) for state, values in costs.items() if values}
    both = sum(max(0.0, _at_least(values)) for values in costs.values() if values) / 1000
    seconds = min(max(both / SWITCH_SHARE / 2, DWELL_SECONDS[0]), DWELL_SECONDS[1])
    steps = max(FEWEST_DWELL_STEPS, math.ceil(1000 * seconds / step_ms)) if step_ms else FEWEST_DWELL_STEPS
    return Dwell(steps, round(seconds, 3), *(_rounded(means.get(state)) for state in (PLAIN, SPECULATIVE)))


def _at_least(values: Sequence[float]) -> float:
    """Return the lower end of a mean's 90 % interval: on a busy machine the noise of single changes is far above what one costs."""
    if len(values) < 2:
        return values[0]
    return statistics.fmean(values) - overhead.t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def chosen(point: Point, high: int | None, low: int | None, buckets: Sequence[int] | None = None) -> tuple[str, float | None]:
    """Return the mode that thresholds give a steady batch, and its speed as a share of the better mode's; ``high`` null always speculates.

    Between both thresholds the mode depends on the way there; the worse one is told.
    """
    size = padded(point.concurrency, buckets)
    faster = SPECULATIVE if point.ratio > 1 else PLAIN
    share = {faster: 1.0, PLAIN if faster == SPECULATIVE else SPECULATIVE: min(point.ratio, 1 / point.ratio)}
    if high is None or size <= (low if low is not None else high):
        return SPECULATIVE, share[SPECULATIVE]
    if size > high:
        return PLAIN, share[PLAIN]
    return "either", min(share.values())


def levels_to_confirm(
    points: Sequence[Point], before: Thresholds, after: Thresholds, buckets: Sequence[int] | None, most: int
) -> list[int]:
    """Return where thresholds are worth measuring against each other, ``most`` of the levels that were measured.

    First of all the level at which they choose different modes and that makes the largest difference; then those next to the new
    thresholds and both ends, where nothing should change.
    """
    modes = {point: [chosen(point, one.high, one.low, buckets)[0] for one in (before, after)] for point in points}
    apart = [point for point, (old, new) in modes.items() if {old, new} == {PLAIN, SPECULATIVE}]
    apart.sort(key=lambda point: abs(math.log(point.fitted)), reverse=True)
    levels = [point.concurrency for point in points]
    below = [one for one in levels if one <= min(after.low, before.low)]
    above = [one for one in levels if one > after.high]
    wanted = [*(point.concurrency for point in apart[:1]), *above[:1], *below[-1:], levels[0], levels[-1]]
    return sorted(list(dict.fromkeys(wanted))[:most])


def adaptive_config(found: Thresholds, steps: int, most: int) -> dict[str, Any]:
    """Return the same for SGLang's own adaptive speculation, the file of ``--speculative-adaptive-config``.

    It knows no hysteresis, and its step 0 is a verify of one token and no decode: below baseline wherever that was measured.
    """
    slots: dict[str, Any] = {} if found.high < 1 else {"1": {"candidate_steps": [steps]}}
    if found.high < most:
        slots[str(max(found.high + 1, 1))] = {"candidate_steps": [0]}
    return slots


# ---- whether a calibration holds for a server --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Situation:
    """The server that a calibration would be used for."""

    arm: str
    speculation: Mapping[str, Any]
    release: str
    models: Mapping[str, Any]
    """By role (``target``, ``draft``), with ``name`` and ``identity``."""
    host_fingerprint: Mapping[str, Any]
    most: int | None = None


CURE = "calibrate this host again (playbooks/calibrate.yml), or give the arm a number as dynamic.threshold"
HOST_PARTS = ("hostname", "machine_id_hash", "gpus", "cpu", "cuda_driver_version", "kernel", "os", "architecture")


def problems(calibration: Mapping[str, Any], there: Situation) -> list[str]:
    """Return why ``calibration`` can't be used for the server, every reason with its cure; what a side doesn't know is passed over."""
    if not calibration:
        return [
            f"arm {there.arm} asks for a calibrated threshold, and there is no calibration: run playbooks/calibrate.yml, or give a number"
        ]
    if calibration.get("schema") != SCHEMA:
        return [f"the calibration has schema {calibration.get('schema')!r}, and this Aerie reads {SCHEMA}: {CURE}"]
    found = []
    high, low = calibration.get("high"), calibration.get("low")
    if not isinstance(high, int) or not isinstance(low, int) or not 0 <= low <= high:
        found.append(f"the calibration's high is {high!r} and low {low!r}: they must be whole numbers with 0 <= low <= high: {CURE}")
    elif there.most is not None and high > there.most:
        found.append(f"the calibration's high is {high}, and the server runs {there.most} requests at most: {CURE}")
    was = calibration.get("host_fingerprint") or {}
    if was.get("fingerprint") and there.host_fingerprint.get("fingerprint") and was["fingerprint"] != there.host_fingerprint["fingerprint"]:
        parts = [part for part in HOST_PARTS if was.get(part) != there.host_fingerprint.get(part)]
        found.append(f"the calibration is of another host ({calibration.get('host')}; {listing(parts) or 'its survey'} differ): {CURE}")
    if calibration.get("release") != there.release:
        found.append(f"the calibration is of release {calibration.get('release')}, and {there.release} would serve: {CURE}")
    for role, model in there.models.items():
        known = (calibration.get("models") or {}).get(role) or {}
        if known.get("identity") and model.get("identity") and known["identity"] != model["identity"]:
            found.append(f"the calibration is of another {role} ({known.get('name')}; now {model.get('name')}, other files): {CURE}")
    arm = calibration.get("arm") or {}
    if _given(arm.get("speculation")) != _given(there.speculation):
        found.append(
            f"the calibration is of arm {arm.get('name')} with {_said(arm.get('speculation'))}, not {_said(there.speculation)}: {CURE}"
        )
    found += _table_problems(calibration, there)
    return found


def _table_problems(calibration: Mapping[str, Any], there: Situation) -> list[str]:
    """Return why the draft steps by batch size can't be used, if the calibration has them."""
    value = calibration.get("steps_by_batch")
    if value is None:
        return []
    table = steps_by_batch(calibration)
    if not table or min(table) != 1:
        return [
            f"the calibration's steps_by_batch is {value!r}: it must have draft steps by batch size, from "
            f"1 on, such as {{'1': 3, '97': 1}}: {CURE}"
        ]
    candidates = server_flags.candidate_steps(there.speculation)
    others = sorted(set(table.values()) - set(candidates))
    if not others:
        return []
    named = f"names {listing(candidates)}" if candidates else "has no candidate_steps"
    return [f"the calibration's steps_by_batch has {listing(others)} steps, and arm {there.arm} {named}: {CURE}"]


def steps_by_batch(calibration: Mapping[str, Any]) -> dict[int, int]:
    """Return how many steps to draft from each batch size on; empty where nothing of use says so."""
    value = calibration.get("steps_by_batch")
    if not isinstance(value, Mapping):
        return {}
    table = {str(size): str(steps) for size, steps in value.items()}
    if not all(word.isdecimal() and int(word) > 0 for entry in table.items() for word in entry):
        return {}
    return {int(size): int(table[size]) for size in sorted(table, key=int)}


def _given(speculation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings that are not null; the order of candidates makes no difference."""
    settings = {name: value for name, value in (speculation or {}).items() if value is not None}
    candidates = server_flags.candidate_steps(settings)
    return settings | ({"candidate_steps": candidates} if candidates else {})


def _said(speculation: Mapping[str, Any] | None) -> str:
    return listing(f"{name} {value}" for name, value in (speculation or {}).items() if value is not None) or "no speculation"


def result(found: Estimate, limits: Thresholds, pause: Dwell, about: Mapping[str, Any], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a variables file: what the server is told, and all that it rests on."""
    return {
        "schema": SCHEMA,
        "verdict": found.verdict,
        "high": limits.high,
        "low": limits.low,
        "dwell_steps": pause.steps,
        "min_dwell_seconds": pause.seconds,
        "crossover": {"at": _rounded(found.at), "low": _rounded(found.low), "high": _rounded(found.high), "confidence": CONFIDENCE},
        "settled": found.settled,
        **about,
        "evidence": {
            **evidence,
            "switch_ms": {PLAIN: pause.to_plain_ms, SPECULATIVE: pause.to_speculative_ms},
            "chances": dict(found.chances),
            "levels": [{name: _figure(value) for name, value in asdict(point).items()} for point in found.points],
        },
    }


def _figure(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def sentence(found: Estimate) -> str:
    """Return the verdict in words."""
    first, last = found.points[0], found.points[-1]
    span = f"from {first.concurrency} to {last.concurrency} running requests"
    ends = f"{first.ratio:.2f}× at {first.concurrency}, {last.ratio:.2f}× at {last.concurrency}"
    doubt = "" if found.settled else f" Not settled: the figures agree in {100 * found.chances[found.verdict]:.0f} of 100 draws."
    if found.verdict == ALWAYS:
        return f"No crossover in this range: speculate always; it is the faster {span} ({ends}).{doubt}"
    if found.verdict == NEVER:
        return f"No crossover in this range: never speculate; plain decoding is the faster {span} ({ends}).{doubt}"
    reach = (
        f"between {found.low:.1f} and {found.high:.1f}"
        if found.low is not None and found.high is not None
        else f"above {found.low:.1f}, perhaps beyond the range"
        if found.low is not None
        else f"below {found.high:.1f}, perhaps below the range"
        if found.high is not None
        else "anywhere in this range or beyond"
    )
    return f"Plain decoding wins above about {found.at:.1f} running requests (90 %: {reach}; speculation gives {ends}).{doubt}"
