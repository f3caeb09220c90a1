"""What a switch costs while one load runs: short windows with it on and off, and the server's own decode figures in each. Pure.

SGLang prints one line every ``--decode-log-interval`` decode steps, with the number of running requests, the throughput since the
line before, and the acceptance length. The throughput is exact, since it is counted and timed inside the scheduler; with it, a line
tells how long its steps took: each took running × accepted / throughput, whatever was accepted. So a step's time needs neither a
client nor a profiler, and its unit is a few steps. Standard library only: this runs on hosts.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ON, OFF = "on", "off"
CONFIDENCE = 0.90
FEWEST_PAIRS = 3
STEPS, TOKENS = "steps", "tokens"

RUNNING = re.compile(r"#running-req: (\d+)")
SPEED = re.compile(r"gen throughput \(token/s\): ([\d.]+)")
ACCEPTED = re.compile(r"accept len: ([\d.]+)")

# Two-sided 90 % quantiles of Student's t by degrees of freedom (any table; checked against scipy in the tests where it is installed).
T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729)


@dataclass(frozen=True)
class Window:
    """A time (Unix) in which the switch was on or off throughout; the two windows of a pair follow each other in random order."""

    pair: int
    state: str
    start: float
    end: float


@dataclass(frozen=True)
class Interval:
    """The decode steps between two of the server's log lines.

    ``clean``: all clients ran all the time and no prefill came between, so that its time is that of its decode steps alone.
    """

    start: float
    end: float
    tokens_per_second: float
    step_ms: float
    clean: bool


@dataclass(frozen=True)
class Overhead:
    """Speed with the switch on over speed with it off, as the geometric mean of pairs, with its 90 % interval (null for one pair).

    ``basis`` is ``steps`` where decode steps per second are compared, which no luck of acceptance moves, and ``tokens`` where
    prefills came so often that only tokens per second could be.
    """

    basis: str
    pairs: tuple[float, ...]
    ratio: float
    low: float | None
    high: float | None

    def as_dict(self) -> dict[str, Any]:
        return {"basis": self.basis, "pairs": list(self.pairs), "on_over_off": self.ratio, "low": self.low, "high": self.high}


def plan(seconds: float, window_seconds: float, seed: int) -> tuple[str, ...]:
    """Return the states of the windows that fill ``seconds``: pairs, half of them on first and half off first, shuffled by ``seed``."""
    pairs = max(FEWEST_PAIRS, int(seconds / (2 * window_seconds)))
    first = [ON if number % 2 else OFF for number in range(pairs)]
    random.Random(seed).shuffle(first)
    return tuple(state for state in first for state in (state, OFF if state == ON else ON))


def read_line(text: str, time: float) -> dict[str, Any] | None:
    """Return what one line of a server's log says of a batch, seen at ``time``; None for any other line."""
    if "Prefill batch" in text:
        return {"t": time, "kind": "prefill"}
    running, speed, accepted = RUNNING.search(text), SPEED.search(text), ACCEPTED.search(text)
    if "Decode batch" not in text or not running or not speed:
        return None
    return {
        "t": time,
        "kind": "decode",
        "running": int(running[1]),
        "tok_s": float(speed[1]),
        "accept": float(accepted[1]) if accepted else None,
    }


def intervals(lines: Iterable[Mapping[str, Any]], concurrency: int) -> list[Interval]:
    """Return the intervals between the decode lines that :func:`read_line` gave, in order of time.

    Only those at both ends of which ``concurrency`` requests ran. The line of a prefill comes before or after its work, so it
    spoils the interval that it falls into and the next one.
    """
    found: list[Interval] = []
    before: Mapping[str, Any] | None = None
    prefills = spoilt = 0
    for line in lines:
        if line["kind"] == "prefill":
            prefills += 1
            continue
        full = line["running"] == concurrency and before is not None and before["running"] == concurrency
        if full and before is not None and line["tok_s"] > 0:
            step_ms = 1000 * concurrency * (line["accept"] or 1.0) / line["tok_s"]
            found.append(Interval(before["t"], line["t"], line["tok_s"], step_ms, clean=not (prefills or spoilt)))
        before, spoilt, prefills = line, prefills, 0
    return found


def within(found: Sequence[Interval], window: Window, margin: float = 0.0) -> list[Interval]:
    """Return the intervals that lie wholly in ``window``; ``margin`` is how late a line may have been seen."""
    return [interval for interval in found if window.start + margin <= interval.start and interval.end <= window.end]


def step_ms(found: Sequence[Interval]) -> float | None:
    """Return the mean time of a decode step over the clean intervals; None where there is none."""
    times = [interval.step_ms for interval in found if interval.clean]
    return statistics.fmean(times) if times else None


def tokens_per_second(found: Sequence[Interval]) -> float | None:
    """Return tokens per second over the intervals, prefills between them included; None where there is none."""
    seconds = sum(interval.end - interval.start for interval in found)
    return sum(interval.tokens_per_second * (interval.end - interval.start) for interval in found) / seconds if seconds > 0 else None


def measure(windows: Sequence[Window], found: Sequence[Interval], margin: float = 0.0) -> Overhead | None:
    """Compare the pairs of ``windows`` by ``found``; None where no pair has figures in both of its windows.

    By the time of clean steps where at least two pairs have them, else by tokens.
    """
    by_steps = _ratios(windows, found, margin, STEPS)
    by_tokens = _ratios(windows, found, margin, TOKENS)
    basis, ratios = (STEPS, by_steps) if len(by_steps) >= min(FEWEST_PAIRS, len(by_tokens)) else (TOKENS, by_tokens)
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Overhead(basis, tuple(ratios), math.exp(middle), None, None)
    reach = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Overhead(basis, tuple(ratios), math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _ratios(windows: Sequence[Window], found: Sequence[Interval], margin: float, basis: str) -> list[float]:
    speeds: dict[int, dict[str, float]] = {}
    for window in windows:
        inside = within(found, window, margin)
        value = (1000 / time if (time := step_ms(inside)) else None) if basis == STEPS else tokens_per_second(inside)
        if value:
            speeds.setdefault(window.pair, {})[window.state] = value
    return [pair[ON] / pair[OFF] for _, pair in sorted(speeds.items()) if ON in pair and OFF in pair]


def t_quantile(degrees: int) -> float:
    """Return the two-sided 90 % quantile of Student's t."""
    if degrees <= len(T_90):
        return T_90[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    return z + (z**3 + z) / (4 * degrees)
