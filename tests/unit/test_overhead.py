"""What a switch costs is seen through noise, prefills and luck of acceptance, with an interval that says how sure that is."""

from __future__ import annotations

import importlib.util
import random

import pytest
from ansible.module_utils.aerie.profiling import overhead
from ansible.module_utils.aerie.profiling.overhead import OFF, ON, Window

DECODE = (
    "[2026-11-29 18:07:01] Decode batch, #running-req: {running}, #token: 615, token usage: 0.01, accept len: {accept:.2f}, accept rate: "
    "0.31, cpu graph: False, gen throughput (token/s): {speed:.2f}, #queue-req: 0"
)
BASELINE = (
    "[2026-07-01 10:00:00 TP0] Decode batch, #running-req: 64, #full token: 900, token usage: 0.10, cuda graph: True, "
    "gen throughput (token/s): 8797.12, #queue-req: 0"
)
PREFILL = "[2026-11-29 18:07:01] Prefill batch, #new-seq: 1, #new-token: 128, #cached-token: 0, #running-req: 3, #queue-req: 0"


def served(windows: list[Window], slower: float, clients: int = 8, prefill_every: int = 0, step_ms: float = 6.0) -> list[dict]:
    """The log of a server whose steps take ``slower`` times as long while the switch is on, and accept at random."""
    draws = random.Random(7)
    lines, now, number = [], windows[0].start - 1.0, 0
    while now < windows[-1].end:
        on = any(window.state == ON and window.start <= now < window.end for window in windows)
        accept = draws.uniform(2.0, 3.0)
        gap = 10 * step_ms / 1000 * (slower if on else 1.0)
        number += 1
        if prefill_every and number % prefill_every == 0:
            lines.append(overhead.read_line(PREFILL, now + gap / 2))
            gap += 0.03
        now += gap
        text = DECODE.format(running=clients, accept=accept, speed=clients * accept * 10 / gap)
        lines.append(overhead.read_line(text, now + draws.uniform(0, 0.005)))
    return lines


def windows(states: tuple[str, ...], length: float = 1.0) -> list[Window]:
    return [Window(number // 2, state, 100 + number * length, 100 + (number + 1) * length) for number, state in enumerate(states)]


def test_a_line_of_either_kind_of_arm_is_read():
    assert overhead.read_line(BASELINE, 1.0) == {"t": 1.0, "kind": "decode", "running": 64, "tok_s": 8797.12, "accept": None}
    speculating = overhead.read_line(DECODE.format(running=4, accept=2.4, speed=960), 2.0)
    assert speculating == {"t": 2.0, "kind": "decode", "running": 4, "tok_s": 960.0, "accept": 2.4}
    assert overhead.read_line(PREFILL, 3.0) == {"t": 3.0, "kind": "prefill"}
    assert overhead.read_line('INFO: 127.0.0.1 - "POST /generate HTTP/1.1" 200 OK', 4.0) is None


def test_windows_are_pairs_half_of_them_on_first_in_an_order_that_a_seed_draws():
    states = overhead.plan(10, 1, seed=3)
    pairs = list(zip(states[::2], states[1::2], strict=True))
    assert len(pairs) == 5
    assert {frozenset(pair) for pair in pairs} == {frozenset({ON, OFF})}
    assert abs(sum(first == ON for first, _ in pairs) - 2.5) == 0.5
    assert overhead.plan(10, 1, seed=3) == states
    assert len({overhead.plan(10, 1, seed=seed) for seed in range(20)}) > 3
    assert len(overhead.plan(1, 5, seed=1)) == 2 * overhead.FEWEST_PAIRS


@pytest.mark.parametrize("slower", [1.0, 1.02, 1.25])
def test_a_slowdown_is_seen_whatever_is_accepted(slower):
    turns = windows(overhead.plan(12, 1, seed=1))
    found = overhead.measure(turns, overhead.intervals(served(turns, slower), 8), margin=0.02)
    assert found is not None
    assert found.basis == overhead.STEPS
    assert found.ratio == pytest.approx(1 / slower, abs=0.004)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.ratio <= found.high
    assert found.high - found.low < 0.02
    if slower > 1.1:
        assert found.high < 1


def test_a_prefill_spoils_its_interval_and_the_next_one():
    turns = windows((OFF, ON))
    found = overhead.intervals(served(turns, 1.0, prefill_every=5), 8)
    clean = [interval for interval in found if interval.clean]
    assert 0.5 < len(clean) / len(found) < 0.65
    assert {round(interval.step_ms, 1) for interval in clean} == {6.0}


def test_where_prefills_leave_no_clean_steps_tokens_are_compared():
    turns = windows(overhead.plan(60, 3, seed=1), length=3.0)
    found = overhead.measure(turns, overhead.intervals(served(turns, 1.25, prefill_every=1), 8), margin=0.02)
    assert found is not None
    assert found.basis == overhead.TOKENS
    assert found.ratio == pytest.approx((60 + 30) / (75 + 30), abs=0.05)


def test_ramp_up_and_tail_do_not_count():
    turns = windows((OFF, ON))
    lines = served(turns, 1.0)
    for line in lines:
        if line["t"] < 100.5 or line["t"] > 101.5:
            line["running"] = 5
    found = overhead.intervals(lines, 8)
    assert found
    assert all(interval.start >= 100.5 and interval.end <= 101.5 for interval in found)


def test_one_pair_gives_no_interval_and_no_pair_no_figure():
    turns = windows((OFF, ON))
    found = overhead.measure(turns, overhead.intervals(served(turns, 1.0), 8))
    assert found is not None
    assert found.low is None
    assert overhead.measure(turns, []) is None


@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="scipy is not installed")
def test_the_quantiles_are_students():
    from scipy import stats

    for degrees in (1, 2, 5, 10, 19, 25, 60):
        assert overhead.t_quantile(degrees) == pytest.approx(stats.t.ppf(0.95, degrees), abs=0.004)
