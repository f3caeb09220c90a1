"""Decides for each decode step whether it speculates or decodes plainly. Pure: no torch, no clock, no file.

Whoever makes steps calls :meth:`Policy.decide` once for each, on every tensor-parallel rank. It counts steps and looks at nothing but batch
sizes, settings and what :meth:`Policy.apply` was given, so that ranks that saw the same batches decide the same; the time that it is
given is only kept, for people. What was measured (:meth:`Policy.observe`) differs from rank to rank and never decides anything by itself:
rank 0 makes a :meth:`Policy.plan` of it every ``PLAN_EVERY`` steps, and all ranks apply that one plan at the same step.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

PLAIN = "plain"
SPECULATIVE = "speculative"
KINDS = (SPECULATIVE, PLAIN)
CALIBRATION_SCHEMA = "aerie-calibration/1"

# Why the mode changed
ABOVE = "above_high"
BELOW = "at_low"
FORCED = "forced"
FLIPPED = "flipped"
PROBE = "probe"
PROBED = "probe_ended"
REASONS = (ABOVE, BELOW, FORCED, FLIPPED, PROBE, PROBED)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
"""Upper ends of the ranges of batch sizes that are counted and measured as one."""

FAR = 2
"""How many times ``high`` a batch must be to end the dwell of speculation, whose steps are longest there: 16 take most of a second."""

PLAN_EVERY = 64
"""Steps between two plans: all ranks meet there."""

PROBE_STEPS = 16
"""Steps that a look at the other mode takes."""

PROBE_BUDGET = 0.01
"""Share of the time that looking at the other mode may cost, at most."""

PROBE_WORST = 3.0
"""How many times longer than a plain step a speculative one is taken to be before one was measured."""

STALE_STEPS = 4096
"""Steps after which an estimate has to be looked at again."""

MARGIN = 0.02
"""By how much a mode must be better, beyond twice the standard error, for a threshold to move."""

MIN_SAMPLES = 12
"""Steps without which an estimate says nothing."""


def default_low(high: int) -> int:
    """Return the size at which speculation returns when only ``high`` is given: an eighth lower, so that load around it doesn't toggle."""
    return high - high // 8


def bucket(batch_size: int) -> int:
    """Return the upper end of the range of batch sizes that ``batch_size`` belongs to."""
    place = bisect.bisect_left(BUCKETS, batch_size)
    return BUCKETS[place] if place < len(BUCKETS) else batch_size


def _below(end: int) -> int:
    """Return the largest batch size below the range that ends with ``end``."""
    place = bisect.bisect_left(BUCKETS, end)
    return BUCKETS[place - 1] if place else 0


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the operator or a calibration says; sizes are running requests as the caller counts them, after CUDA-graph padding."""

    high: int
    """Larger batches decode plainly."""
    low: int
    """Batches up to this size speculate again."""
    min_dwell_steps: int = 16
    """Steps that a mode is kept at least, unless it is forced, or speculation meets a batch far above ``high``."""
    force: str | None = None
    """The mode whatever the load is, for experiments."""
    flip_every: int = 0
    """Change the mode every so many steps, whatever the load is, for tests; 0 does not."""
    adapt: bool = False
    """Move high and low by measured step times and acceptance."""
    num_steps: int | None = None
    """How many tokens speculation drafts whatever the load is, for calibrations; null leaves it to
    SGLang's adaptive speculation, or to --speculative-num-steps."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name in ("high", "low", "min_dwell_steps", "flip_every"):
            if not _is_count(getattr(self, name)):
                yield f"{name} must be a whole number, 0 or more (is {getattr(self, name)!r})"
        if _is_count(self.high) and _is_count(self.low) and self.low > self.high:
            yield f"low must not exceed high (is {self.low}, high {self.high})"
        if self.force not in (None, *KINDS):
            yield f"force must be {PLAIN}, {SPECULATIVE} or null (is {self.force!r})"
        if not isinstance(self.adapt, bool):
            yield f"adapt must be true or false (is {self.adapt!r})"
        if self.num_steps is not None and not _is_count(self.num_steps, 1):
            yield f"num_steps must be a whole number, 1 or more, or null (is {self.num_steps!r})"

    @classmethod
    def of_threshold(cls, threshold: int) -> Settings:
        """Return the settings for one threshold: more requests than that decode plainly."""
        return cls(high=threshold, low=default_low(threshold) if _is_count(threshold) else 0)

    @classmethod
    def of_calibration(cls, calibration: Any) -> Settings:
        """Return the settings that a calibration file's content says; raise ValueError with what is wrong in it."""
        if not isinstance(calibration, Mapping) or calibration.get("schema") != CALIBRATION_SCHEMA:
            found = calibration.get("schema") if isinstance(calibration, Mapping) else type(calibration).__name__
            raise ValueError(f"schema must be {CALIBRATION_SCHEMA} (is {found})")
        missing = {"high"} - calibration.keys()
        if missing:
            raise ValueError("high is missing")
        known = {"high": calibration["high"]}
        known["low"] = calibration.get("low", default_low(known["high"]) if _is_count(known["high"]) else 0)
        if "dwell_steps" in calibration:
            known["min_dwell_steps"] = calibration["dwell_steps"]
        if "adapt" in calibration:
            known["adapt"] = calibration["adapt"]
        return cls(**known)

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """Return the settings with ``changes``; raise ValueError, with all that is wrong, and change nothing."""
        names = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(set(changes) - names)
        if unknown:
            raise ValueError(f"unknown: {', '.join(map(str, unknown))} (there are {', '.join(sorted(names))})")
        wanted = dict(changes)
        if "high" in wanted and "low" not in wanted and _is_count(wanted["high"]):
            wanted["low"] = default_low(wanted["high"])
        return dataclasses.replace(self, **wanted)


class Average:
    """An average that forgets, with its spread. The first values count alike, so that it is no slower than it must be."""

    __slots__ = ("count", "mean", "variance")
    WEIGHT = 0.04

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0

    def add(self, value: float) -> None:
        if self.count >= MIN_SAMPLES:
            value = min(value, 3 * self.mean)  # a step that waited for something else says little
        self.count += 1
        weight = max(self.WEIGHT, 1 / self.count)
        difference = value - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference * difference)

    def relative_error(self) -> float:
        """Return the squared standard error of the mean over its square."""
        if not self.mean:
            return math.inf
        return self.variance / (min(self.count, 2 / self.WEIGHT - 1) * self.mean**2)


class Estimate:
    """What a mode does in a range of batch sizes: seconds of a step, and tokens of a step and request."""

    __slots__ = ("accepted", "seconds", "seen")

    def __init__(self) -> None:
        self.seconds = Average()
        self.accepted = Average()
        self.seen = 0  # the step of the last observation

    def is_known(self) -> bool:
        return self.seconds.count >= MIN_SAMPLES and self.accepted.count >= MIN_SAMPLES

    def rate(self) -> float:
        """Return tokens per second and request."""
        return self.accepted.mean / self.seconds.mean if self.seconds.mean else 0.0

    def relative_error(self) -> float:
        return self.seconds.relative_error() + self.accepted.relative_error()


class Policy:
    """Hysteresis over batch sizes with a least dwell near them; forced or toggled where asked; moved by measurements where allowed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plain = False
        self.reason: str | None = None
        self.since: float | None = None
        self.step = 0
        self.switches = dict.fromkeys(REASONS, 0)
        self.steps: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}
        self.estimates: dict[str, dict[int, Estimate]] = {kind: {} for kind in KINDS}
        self.probes = 0
        self.probe_seconds_lost = 0.0
        self.seconds = 0.0
        self._base = False  # plain, were there no probe
        self._reason = ABOVE  # why the base is what it is
        self._dwell = 0  # steps that the base is kept for yet
        self._probe_left = 0
        self._bucket = 1
        self._probed: dict[tuple[str, int], int] = {}

    # Each step, on all ranks

    def decide(self, batch_size: int, now: float) -> bool:
        """Say whether this step decodes plainly. To be called once a step; ``now`` is only remembered."""
        self.step += 1
        self._settle(batch_size)
        plain, reason = self._base, self._reason
        if self._probe_left:
            self._probe_left -= 1
            plain, reason = not plain, PROBE
        elif self.reason == PROBE:
            reason = PROBED
        if plain != self.plain:
            self.plain, self.reason, self.since = plain, reason, now
            self.switches[reason] += 1
        self._bucket = bucket(batch_size)
        counts = self.steps[PLAIN if plain else SPECULATIVE]
        counts[self._bucket] = counts.get(self._bucket, 0) + 1
        return plain

    def _settle(self, batch_size: int) -> None:
        settings = self.settings
        if settings.force is not None:
            wanted, reason = settings.force == PLAIN, FORCED
        elif settings.flip_every:
            wanted, reason = ((self.step - 1) // settings.flip_every) % 2 == 1, FLIPPED
        elif self._dwell and (self._base or batch_size <= FAR * settings.high):
            self._dwell -= 1
            return
        elif batch_size > settings.high:
            wanted, reason = True, ABOVE
        elif batch_size <= settings.low:
            wanted, reason = False, BELOW
        else:
            return
        if wanted != self._base:
            self._base, self._reason = wanted, reason
            self._dwell = max(settings.min_dwell_steps - 1, 0)
            self._probe_left = 0

    def expects_plain(self, batch_size: int) -> bool:
        """Say whether a next step of that size is likely to decode plainly. Decides and counts nothing."""
        settings = self.settings
        if settings.force is not None:
            return settings.force == PLAIN
        return self.plain or (batch_size > settings.high and not settings.flip_every)

    # Run-time control, on all ranks at the same step

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change settings, of which the next step is made; raise ValueError, saying why, and change nothing."""
        self.settings = self.settings.changed(changes)
        self._dwell = 0
        self._probe_left = 0

    # Measurements, which decide nothing before rank 0's plan was applied

    def observe(self, kind: str, batch_size: int, step_seconds: float, tokens: int) -> None:
        """Take in what a finished step took and how many tokens it gave; 0 for what isn't known."""
        end = bucket(batch_size)
        estimate = self.estimates[kind].get(end)
        if estimate is None:
            estimate = self.estimates[kind][end] = Estimate()
        estimate.seen = self.step
        if step_seconds > 0:
            estimate.seconds.add(step_seconds)
            self.seconds += step_seconds
            if kind != (PLAIN if self._base else SPECULATIVE):
                self._account(kind, end, step_seconds, tokens / max(batch_size, 1))
        if tokens > 0:
            estimate.accepted.add(tokens / max(batch_size, 1))

    def _account(self, kind: str, end: int, step_seconds: float, accepted: float) -> None:
        """Add what a step in the mode that isn't kept lost, against the time in which the other one gives as many tokens."""
        other = self.estimates[PLAIN if kind == SPECULATIVE else SPECULATIVE].get(end)
        if other is not None and other.is_known():
            self.probe_seconds_lost += max(step_seconds - accepted / other.rate(), 0.0)

    def plan_is_due(self) -> bool:
        """Say whether all ranks are to apply rank 0's plan before the next step; the same on all of them."""
        return self.settings.adapt and self.step % PLAN_EVERY == 0

    def plan(self) -> dict[str, int]:
        """Return what to do from here on: thresholds, and how many steps to look at the other mode. Rank 0 makes it, all apply it."""
        settings = self.settings
        high, low = settings.high, settings.low
        plan = {"high": high, "low": low, "probe": 0}
        if settings.force is not None or settings.flip_every:
            return plan
        end = self._bucket
        better = self._better(end)
        if better == PLAIN:
            high = min(high, _below(end))
            low = min(low, high)
        elif better == SPECULATIVE:
            low = max(low, end)
            high = max(high, low)
        plan.update(high=high, low=low)
        if (high, low) == (settings.high, settings.low) and self._is_worth_a_probe(end):
            plan["probe"] = PROBE_STEPS
        return plan

    def apply(self, plan: Mapping[str, int]) -> None:
        """Do what rank 0 planned."""
        if (plan["high"], plan["low"]) != (self.settings.high, self.settings.low):
            self.settings = dataclasses.replace(self.settings, high=plan["high"], low=plan["low"])
        if plan["probe"] and not self._dwell:
            self._probe_left = plan["probe"]
            self.probes += 1
            self._probed[SPECULATIVE if self._base else PLAIN, self._bucket] = self.step

    def _better(self, end: int) -> str | None:
        """Return the mode that is surely better in a range of batch sizes, if one is: the one with more tokens per second."""
        speculative, plain = (self.estimates[kind].get(end) for kind in KINDS)
        if speculative is None or plain is None or not (speculative.is_known() and plain.is_known()):
            return None
        if self.step - min(speculative.seen, plain.seen) > 2 * STALE_STEPS:
            return None
        gain = math.log(speculative.rate() / plain.rate())
        sure = MARGIN + 2 * math.sqrt(speculative.relative_error() + plain.relative_error())
        if abs(gain) <= sure:
            return None
        return SPECULATIVE if gain > 0 else PLAIN

    def _is_worth_a_probe(self, end: int) -> bool:
        """Say whether the other mode's estimate is stale and the budget allows for what looking at it costs at worst."""
        kept, other = (PLAIN, SPECULATIVE) if self._base else (SPECULATIVE, PLAIN)
        known = self.estimates[kept].get(end)
        if self._dwell or self._probe_left or known is None or not known.is_known():
            return False
        looked_at = self.estimates[other].get(end)
        is_known = looked_at is not None and looked_at.is_known()
        if looked_at is not None and is_known and self.step - looked_at.seen <= STALE_STEPS:
            return False
        step = known.seconds.mean
        if looked_at is not None and is_known:
            seconds, accepted = looked_at.seconds.mean, looked_at.accepted.mean
        elif other == PLAIN:  # a decode does less than a verification
            seconds, accepted = step, 1.0
        else:
            seconds, accepted = PROBE_WORST * step, 1.0
        cost = PROBE_STEPS * max(seconds - accepted / known.rate(), 0.25 * step)
        return self.probe_seconds_lost + cost <= PROBE_BUDGET * self.seconds

    # For people

    def state(self) -> dict[str, Any]:
        """Return the mode, its reason, the settings, and what was counted and measured, ready for JSON."""
        return {
            "mode": PLAIN if self.plain else SPECULATIVE,
            "reason": self.reason,
            "since": self.since,
            **dataclasses.asdict(self.settings),
            "switches": sum(self.switches.values()),
            "switches_by_reason": {reason: count for reason, count in self.switches.items() if count},
            "steps": {kind: sum(counts.values()) for kind, counts in self.steps.items()},
            "steps_by_batch": {kind: {str(end): count for end, count in sorted(counts.items())} for kind, counts in self.steps.items()},
            "measured": {
                kind: {
                    str(end): {"step_ms": round(1e3 * found.seconds.mean, 4), "accept_length": round(found.accepted.mean, 4)}
                    for end, found in sorted(estimates.items())
                }
                for kind, estimates in self.estimates.items()
            },
            "probes": self.probes,
            "probe_seconds_lost": round(self.probe_seconds_lost, 3),
        }
