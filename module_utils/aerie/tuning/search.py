"""Finding a faster set among many with few launches, and saying honestly when there is none. Pure and deterministic.

One launch (new processes, a new communicator) is one observation, however many samples it takes: samples of a launch share its luck.
Successive halving sorts out; the verdict comes from launches that took no part in it, paired by round with the default set, so that
having chosen the luckiest of many does not count as proof.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.words import listing

BETTER, SAME = "better", "no_difference"
CONFIDENCE = 0.95
HALVING, FINAL = "halving", "final"


@dataclass(frozen=True)
class Settings:
    """How much is measured: a third of the sets survives each rung; ``finalists`` of each objective meet the default set anew."""

    seed: int = 1
    keep: float = 1 / 3
    finalists: int = 2
    final_rounds: int = 8
    minimum_effect: float = 0.02


@dataclass(frozen=True)
class Launch:
    """One measurement: which set, in which stage, rung and round."""

    stage: str
    rung: int
    round: int
    candidate: str
    number: int = 0
    """Its place among all launches; ``expected`` of them are foreseen in all."""
    expected: int = 0

    @property
    def key(self) -> str:
        """Return what names it in this search, and in every search with the same settings."""
        return f"{self.stage}{self.rung}-round{self.round}-{self.candidate}"


@dataclass(frozen=True)
class Outcome:
    """What a launch gave: median microseconds by size, or why there are none."""

    medians: Mapping[int, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Ratio:
    """How much faster than the default set, with an interval that allows for how many sets were compared."""

    value: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Finding:
    """The answer for one objective."""

    objective: str
    verdict: str
    candidate: str | None
    ratio: Ratio | None
    finalists: Mapping[str, Ratio]
    medians: Mapping[str, Mapping[int, float]]
    """Median of the final launches by set and size, in microseconds."""
    spreads: Mapping[str, Mapping[int, float]]
    """Standard deviation of the final launches' logarithms by set and size: about a relative spread."""


@dataclass(frozen=True)
class Result:
    """Findings by objective, sets that were disqualified and why, who survived each rung, launches."""

    findings: Mapping[str, Finding]
    disqualified: Mapping[str, str]
    rungs: tuple[tuple[str, ...], ...]
    launches: int


Measure = Callable[[Launch], Outcome]


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return Student's t below which ``probability`` (above one half) of the distribution lies."""
    # The density in x = sqrt(n) tan(a) becomes cos(a)^(n-1), bounded and smooth on a finite range.
    norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)

    def above_centre(angle: float, steps: int = 400) -> float:
        width = angle / steps
        inner = sum((4 if index % 2 else 2) * math.cos(index * width) ** (degrees - 1) for index in range(1, steps))
        return norm * width / 3 * (1 + inner + math.cos(angle) ** (degrees - 1))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if above_centre(middle) < probability - 0.5 else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def compare(reference: Sequence[float], candidate: Sequence[float], comparisons: int = 1) -> Ratio:
    """Return the speed-up from paired logarithms of times; the interval holds for ``comparisons`` such statements at once."""
    logs = [there - here for there, here in zip(reference, candidate, strict=True)]
    centre = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(centre), 0.0, math.inf, len(logs))
    tail = (1 - CONFIDENCE) / 2 / max(1, comparisons)
    reach = t_quantile(1 - tail, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach), len(logs))


def score(medians: Mapping[int, float], sizes: Sequence[int]) -> float:
    """Return the mean logarithm of the times of ``sizes``: every size counts alike, in per cent."""
    return statistics.fmean(math.log(medians[size]) for size in sizes)


def sizes_of_rungs(candidates: int, settings: Settings) -> list[int]:
    """Return how many sets begin each rung, for one objective."""
    found = []
    while candidates > settings.finalists:
        found.append(candidates)
        candidates = max(settings.finalists, math.ceil(candidates * settings.keep))
    return found


def expected_launches(candidates: int, objectives: int, settings: Settings) -> int:
    """Return how many launches a search takes where the objectives agree on half of what survives."""
    shared = (1 + objectives) / 2
    rungs = sizes_of_rungs(candidates, settings)
    halving = sum((count * (1 if index == 0 else min(shared, candidates / count)) + 1) * (index + 1) for index, count in enumerate(rungs))
    finalists = min(candidates, settings.finalists)
    return round(halving + (finalists * min(shared, max(1.0, candidates / max(1, finalists))) + 1) * settings.final_rounds)


class _Search:
    def __init__(
        self,
        candidates: Sequence[str],
        reference: str,
        objectives: Mapping[str, Sequence[int]],
        measure: Measure,
        settings: Settings,
        parts: Mapping[str, frozenset[str]],
    ) -> None:
        self.reference, self.objectives, self.measure, self.settings, self.parts = reference, objectives, measure, settings, parts
        self.alive = [name for name in candidates if name != reference]
        self.expected = expected_launches(len(self.alive), len(objectives), settings)
        self.disqualified: dict[str, str] = {}
        self.launches = 0
        self.rungs: list[tuple[str, ...]] = []
        self.logs: dict[str, dict[str, list[float]]] = {objective: {} for objective in objectives}

    def round(self, stage: str, rung: int, number: int, names: Sequence[str]) -> dict[str, Mapping[int, float]]:
        """Measure the default set and ``names`` once each, in shuffled order; return the medians of those that gave some."""
        order = [self.reference, *names]
        random.Random(f"{self.settings.seed} {stage} {rung} {number}").shuffle(order)
        found: dict[str, Mapping[int, float]] = {}
        for name in order:
            if name in self.disqualified:
                continue
            self.launches += 1
            outcome = self.measure(Launch(stage, rung, number, name, self.launches, max(self.expected, self.launches)))
            if outcome.failure is None:
                found[name] = outcome.medians
            elif name == self.reference:
                raise AerieError(f"the default set could not be measured: {outcome.failure}")
            else:
                self.disqualify(name, outcome.failure)
        self.alive = [name for name in self.alive if name not in self.disqualified]
        return found

    def disqualify(self, name: str, failure: str) -> None:
        """Take out a set that failed, and with it every set that holds all of its changes: a hang costs the whole time-out each time."""
        self.disqualified[name] = failure
        mine = self.parts.get(name)
        for other in self.alive:
            if mine and other != name and other not in self.disqualified and mine < self.parts.get(other, frozenset()):
                self.disqualified[other] = f"not tried further, since it holds {name}: {failure}"

    def halve(self) -> None:
        """Drop the slower sets, rung by rung, each with one round more than the one before."""
        rung = 0
        while self.alive and len(self.alive) > self.settings.finalists * self._width():
            rung += 1
            self.rungs.append(tuple(self.alive))
            for number in range(1, rung + 1):
                for name, medians in self.round(HALVING, rung, number, self.alive).items():
                    for objective, sizes in self.objectives.items():
                        self.logs[objective].setdefault(name, []).append(score(medians, sizes))
            count = max(self.settings.finalists, math.ceil(len(self.alive) * self.settings.keep))
            best = {name for objective in self.objectives for name in self.ranking(objective)[:count]}
            if len(best) == len(self.alive):
                break
            self.alive = [name for name in self.alive if name in best]

    def _width(self) -> int:
        # Before anything is known, one objective's finalists would be dropped unmeasured.
        return len(self.objectives) if self.rungs else 1

    def ranking(self, objective: str) -> list[str]:
        """Return the sets that are left, the fastest first; all have been measured in the same rounds."""
        logs = self.logs[objective]
        return sorted(self.alive, key=lambda name: (statistics.fmean(logs[name]) if logs.get(name) else 0.0, name))

    def finish(self) -> Iterator[Finding]:
        """Measure the finalists anew beside the default set, and answer."""
        chosen = {objective: self.ranking(objective)[: self.settings.finalists] for objective in self.objectives}
        names = [name for name in self.alive if any(name in finalists for finalists in chosen.values())]
        rounds = [self.round(FINAL, 1, number, names) for number in range(1, self.settings.final_rounds + 1)] if names else []
        for objective, sizes in self.objectives.items():
            left = [name for name in chosen[objective] if name not in self.disqualified]
            ratios = {
                name: compare(
                    [score(one[self.reference], sizes) for one in rounds],
                    [score(one[name], sizes) for one in rounds],
                    len(chosen[objective]),
                )
                for name in left
            }
            best = max(left, key=lambda name: ratios[name].value, default=None)
            ratio = ratios[best] if best else None
            better = ratio is not None and ratio.low > 1 and ratio.value >= 1 + self.settings.minimum_effect
            shown = [self.reference, *left] if rounds else []
            yield Finding(
                objective,
                BETTER if better else SAME,
                best if better else None,
                ratio,
                ratios,
                {name: {size: statistics.median(one[name][size] for one in rounds) for size in sizes} for name in shown},
                {name: {size: _spread([one[name][size] for one in rounds]) for size in sizes} for name in shown},
            )


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(map(math.log, values)) if len(values) > 1 else 0.0


def search(
    candidates: Sequence[str],
    reference: str,
    objectives: Mapping[str, Sequence[int]],
    measure: Measure,
    settings: Settings,
    parts: Mapping[str, frozenset[str]] | None = None,
) -> Result:
    """Find the fastest set for each objective (its message sizes); raise AerieError when the default set itself can't be measured.

    ``parts`` says what each set is made of, so that one that failed takes those that hold it along.
    """
    if not objectives or not all(objectives.values()):
        raise AerieError(f"there are no message sizes for {listing(name for name, sizes in objectives.items() if not sizes)}")
    running = _Search(candidates, reference, objectives, measure, settings, parts or {})
    running.halve()
    findings = {finding.objective: finding for finding in running.finish()}
    return Result(findings, running.disqualified, tuple(running.rungs), running.launches)
