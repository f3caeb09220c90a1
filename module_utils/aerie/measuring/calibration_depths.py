"""How many tokens to draft at each batch size, where a server can choose. Pure; standard library.

Modes are compared with their neighbours in order of how much they speculate: 3 steps with 1 step,
1 step with plain decoding. Each comparison has its own falling curve (calibration.py), since the
gain of a deeper mode falls with load. Sums of their logarithms compare any two modes. Comparisons
are measured independently, and so are their draws. Simulated: tests/unit/test_calibration_depths.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import calibration
from ansible.module_utils.aerie.measuring.calibration import PLAIN, Level
from ansible.module_utils.aerie.profiling import overhead

LEAST_GAIN = 0.02
"""How much faster another depth must be to be taken instead of that of smaller batches."""


def mode_name(steps: int | None) -> str:
    """Return a mode in words; None is decoding without speculation."""
    if steps is None:
        return PLAIN
    return f"{steps} step" if steps == 1 else f"{steps} steps"


@dataclass(frozen=True)
class Comparison:
    """Two modes that are measured against each other: ``deeper`` steps, and fewer or none."""

    deeper: int
    shallower: int | None

    @property
    def names(self) -> tuple[str, str]:
        return mode_name(self.deeper), mode_name(self.shallower)


def comparisons(candidates: Iterable[int]) -> tuple[Comparison, ...]:
    """Return the comparisons of neighbouring modes, the deepest first and plain last."""
    modes = [*sorted(candidates, reverse=True), None]
    return tuple(Comparison(deeper, fewer) for deeper, fewer in pairwise(modes) if deeper)


Measured = Mapping[Comparison, Sequence[Level]]


@dataclass(frozen=True)
class Decision:
    """The depth of each batch size, and where decoding without speculation is faster than it."""

    steps_by_batch: Mapping[int, int]
    """From which batch size on how many steps are drafted; the first size is 1."""
    estimate: calibration.Estimate
    """Of the best depth over plain decoding."""
    estimates: Mapping[Comparison, calibration.Estimate]
    """Of each comparison by itself."""

    def steps_at(self, batch: int) -> int:
        return steps_at(self.steps_by_batch, batch)


def decide(
    measured: Measured,
    first_steps: int,
    most: int,
    buckets: Sequence[int] | None = None,
    seed: int = 1,
    draws: int = calibration.DRAWS,
) -> Decision:
    """Return what the levels of all comparisons give.

    ``first_steps`` is the depth to begin with, which is kept until another is settled as faster.
    """
    lacking = [comparison for comparison, levels in measured.items() if not levels]
    if lacking:
        deeper, fewer = lacking[0].names
        raise AerieError(f"the calibration gave no figures of {deeper} against {fewer}")
    sizes = calibration.batch_sizes(most, buckets)
    table = choose_depths(measured, first_steps, sizes, seed, draws)
    levels = best_over_plain(measured, table, buckets)
    if not levels:
        raise AerieError(
            "the calibration has no number of requests at which the best depth can be compared "
            f"with plain decoding (depths: {words(table)})"
        )
    return Decision(
        steps_by_batch=table,
        estimate=calibration.estimate(levels, seed, draws),
        estimates={comparison: calibration.estimate(levels, seed, draws) for comparison, levels in measured.items()},
    )


# ---- the depth -------------------------------------------------------------------------------------


class _Gains:
    """How much faster one depth is than another, by the fitted curves and by their draws."""

    def __init__(self, measured: Measured, seed: int, draws: int) -> None:
        depths = [entry for entry in measured.items() if entry[0].shallower is not None]
        curves = {comparison: calibration.Curve.of(levels) for comparison, levels in depths}
        self._fitted = {comparison: curve.knots for comparison, curve in curves.items()}
        self._drawn = {comparison: list(curve.drawn(seed + number, draws)) for number, (comparison, curve) in enumerate(curves.items())}

    def fitted(self, steps: int, than: int, size: int) -> float:
        """Return the logarithm of the gain of ``steps`` over ``than`` at a batch size."""
        sign, between = self._between(steps, than)
        return sign * sum(calibration.value_at(self._fitted[entry], size) for entry in between)

    def is_settled(self, steps: int, than: int, size: int) -> bool:
        """Say whether ``steps`` is faster by more than :data:`LEAST_GAIN` in nine of ten draws."""
        least = math.log1p(LEAST_GAIN)
        if self.fitted(steps, than, size) <= least:
            return False
        sign, between = self._between(steps, than)
        draws = zip(*(self._drawn[comparison] for comparison in between), strict=True)
        gains = [sign * sum(calibration.value_at(knots, size) for knots in draw) for draw in draws]
        return sum(gain > least for gain in gains) >= calibration.CONFIDENCE * len(gains)

    def _between(self, steps: int, than: int) -> tuple[int, list[Comparison]]:
        low, high = sorted((steps, than))
        inside = [entry for entry in self._fitted if low < entry.deeper <= high]
        return (1 if steps > than else -1), inside


def choose_depths(
    measured: Measured,
    first_steps: int,
    sizes: Sequence[int],
    seed: int = 1,
    draws: int = calibration.DRAWS,
) -> dict[int, int]:
    """Return from which batch size on which depth is the fastest.

    A batch size keeps the depth of the smaller one unless another depth is settled as faster there.
    """
    gains = _Gains(measured, seed, draws)
    depths = [comparison.deeper for comparison in measured]
    table: dict[int, int] = {}
    current, smaller = first_steps, 0
    for size in sizes:
        faster = [steps for steps in depths if steps != current and gains.is_settled(steps, current, size)]
        if faster:
            current = max(faster, key=lambda steps: gains.fitted(steps, first_steps, size))
        if not table or table[max(table)] != current:
            table[smaller + 1] = current
        smaller = size
    return table


def steps_at(table: Mapping[int, int], batch: int) -> int:
    """Return how many steps are drafted at a batch size (after padding)."""
    return table[max(size for size in table if size <= batch)]


def best_over_plain(measured: Measured, table: Mapping[int, int], buckets: Sequence[int] | None = None) -> list[Level]:
    """Return the levels of the best depth over plain decoding.

    The speed-up is the product of those of all comparisons in between. Their pairs of windows are
    independent, so that the first of each give the first product, and so on.
    """
    by_level = {comparison: {level.concurrency: level for level in levels} for comparison, levels in measured.items()}
    last = list(measured)[-1]
    combined = []
    for concurrency in sorted(by_level[last]):
        chain = comparisons_to_plain(measured, table, calibration.padded(concurrency, buckets))
        if all(concurrency in by_level[comparison] for comparison in chain):
            levels = [by_level[comparison][concurrency] for comparison in chain]
            combined.append(_product(levels))
    return combined


def comparisons_to_plain(candidates: Iterable[Comparison], table: Mapping[int, int], batch: int) -> list[Comparison]:
    """Return the comparisons from the best depth of a batch size down to plain decoding."""
    best = steps_at(table, batch)
    return [comparison for comparison in candidates if comparison.deeper <= best]


def _product(levels: Sequence[Level]) -> Level:
    pairs = zip(*(level.pairs for level in levels), strict=False)
    is_by_tokens = any(level.basis == overhead.TOKENS for level in levels)
    return Level(
        levels[0].concurrency,
        tuple(math.prod(pair) for pair in pairs),
        levels[-1].plain_tok_s,
        levels[0].speculative_tok_s,
        overhead.TOKENS if is_by_tokens else overhead.STEPS,
    )


# ---- what is written and said ----------------------------------------------------------------------


def adaptive_config(table: Mapping[int, int], limits: calibration.Thresholds, most: int) -> dict[str, Any]:
    """Return the depths for SGLang's own adaptive speculation, with its step 0 above ``high``."""
    slots = {str(size): {"candidate_steps": [steps]} for size, steps in table.items() if size <= limits.high}
    if limits.high < most:
        slots[str(limits.high + 1)] = {"candidate_steps": [0]}
    return slots


def evidence(decision: Decision) -> list[dict[str, Any]]:
    """Return each comparison with its crossover and levels, as the calibration's file keeps them."""
    found = []
    for comparison, estimate in decision.estimates.items():
        crossover = {"at": estimate.at, "low": estimate.low, "high": estimate.high}
        found.append(
            {
                "deeper": comparison.deeper,
                "shallower": comparison.shallower or 0,
                "verdict": estimate.verdict,
                "settled": estimate.settled,
                "crossover": {name: _rounded(value) for name, value in crossover.items()},
                "levels": [_level(point) for point in estimate.points],
            }
        )
    return found


def _level(point: calibration.Point) -> dict[str, Any]:
    values = asdict(point)
    speeds = {
        "deeper_tok_s": values.pop("speculative_tok_s"),
        "shallower_tok_s": values.pop("plain_tok_s"),
    }
    return {name: _rounded(value) for name, value in {**values, **speeds}.items()}


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def words(table: Mapping[int, int]) -> str:
    """Return the depths in words, such as ``3 steps up to 96 requests, 1 step above``."""
    sizes = sorted(table)
    parts = [f"{mode_name(table[size])} up to {following - 1} requests" for size, following in pairwise(sizes)]
    last = mode_name(table[sizes[-1]])
    return ", ".join([*parts, f"{last} above"]) if parts else f"{last} at every batch size"


def sentence(table: Mapping[int, int]) -> str:
    """Return the depths as a sentence."""
    return f"Speculation drafts {words(table)}."
