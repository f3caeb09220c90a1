"""The overlay's policy of dynamic speculation, on its own: it holds still, decides alike on all ranks, and loses nothing worth a word.

Loads are simulated with step times like an H200's (docs/measurements/profile-h200.md): a plain step hardly grows with the batch, a
speculative one does, so that one wins below a crossover and the other above it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

OVERLAY = Path(__file__).parents[2] / "patches/dynamic_speculation/overlay/sglang/srt/speculative/aerie_dynamic_policy.py"
SPEC = importlib.util.spec_from_file_location("aerie_dynamic_policy", OVERLAY)
dynamic = importlib.util.module_from_spec(SPEC)
sys.modules["aerie_dynamic_policy"] = dynamic
SPEC.loader.exec_module(dynamic)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Step times in seconds by batch size, and the acceptance length."""

    accepted: float = 2.4
    noise: float = 0.1

    def seconds(self, kind: str, batch: int) -> float:
        return 0.0047 + 0.00003 * batch if kind == dynamic.PLAIN else 0.0065 + 0.00024 * batch

    def rate(self, kind: str, batch: int) -> float:
        return batch * (1 if kind == dynamic.PLAIN else self.accepted) / self.seconds(kind, batch)

    def crossover(self) -> int:
        return next(batch for batch in range(1, 512) if self.rate(dynamic.PLAIN, batch) > self.rate(dynamic.SPECULATIVE, batch))


MACHINE = Machine()
Load = Callable[[float], int]


def kind_of(plain: bool) -> str:
    return dynamic.PLAIN if plain else dynamic.SPECULATIVE


def run(policy, load: Load, seconds: float, machine: Callable[[float], Machine] = lambda _now: MACHINE, seed: int = 1) -> float:
    """Serve ``load`` (requests at a moment) for a time; return tokens per second. ``policy`` may be a kind, for a server of that alone."""
    draw = random.Random(seed)
    now, tokens = 0.0, 0.0
    while now < seconds:
        batch, there = load(now), machine(now)
        if isinstance(policy, str):
            kind = policy
        else:
            if policy.settings.adapt and policy.plan_is_due():
                policy.apply(policy.plan())
            kind = kind_of(policy.decide(batch, now))
        step = there.seconds(kind, batch) * draw.lognormvariate(0, there.noise)
        # Each request accepts on its own.
        gained = batch if kind == dynamic.PLAIN else max(round(draw.gauss(batch * there.accepted, math.sqrt(batch))), batch)
        if not isinstance(policy, str):
            policy.observe(kind, batch, step, gained)
        now += step
        tokens += gained
    return tokens / now


def share_of_the_better(policy, load: Load, seconds: float, machine: Callable[[float], Machine] = lambda _now: MACHINE) -> float:
    """Return the policy's throughput over that of the better of two servers that always speculate, and never do."""
    return run(policy, load, seconds, machine) / max(run(kind, load, seconds, machine) for kind in dynamic.KINDS)


def policy(high: int = 28, low: int = 24, **settings):
    return dynamic.Policy(dynamic.Settings(high=high, low=low, **settings))


def decisions(made, sizes) -> list[bool]:
    return [made.decide(size, float(step)) for step, size in enumerate(sizes)]


def test_it_needs_nothing_but_python():
    code = f"import sys, runpy; runpy.run_path({str(OVERLAY)!r}); print('torch' in sys.modules, 'sglang' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


# Hysteresis, dwell, force


def test_larger_batches_decode_plainly_and_smaller_ones_speculate_again_only_at_low():
    made = policy(high=8, low=6, min_dwell_steps=0)
    assert decisions(made, [8, 9, 8, 7, 6, 7, 8, 9]) == [False, True, True, True, False, False, False, True]
    assert made.state()["switches_by_reason"] == {"above_high": 2, "at_low": 1}


def test_threshold_zero_never_speculates_and_one_that_is_never_reached_always_does():
    assert all(decisions(dynamic.Policy(dynamic.Settings.of_threshold(0)), [1, 5, 1, 64, 1]))
    assert not any(decisions(dynamic.Policy(dynamic.Settings.of_threshold(64)), [1, 64, 5, 64, 1]))


@pytest.mark.parametrize("threshold", [1, 2, 4, 7, 8, 32, 48, 100])
def test_a_threshold_alone_can_be_left_and_reached_again(threshold: int):
    made = dynamic.Policy(dynamic.Settings.of_threshold(threshold))
    assert decisions(made, [threshold, threshold + 1])[-1] is True
    assert made.settings.low >= 1
    assert decisions(made, [made.settings.low] * 20)[-1] is False


def lengths(found: list[bool]) -> dict[bool, list[int]]:
    """Return how long each mode was kept, by whether it was plain; without the first and the last time."""
    kept: dict[bool, list[int]] = {True: [], False: []}
    for plain, steps in [(plain, len(list(steps))) for plain, steps in itertools.groupby(found)][1:-1]:
        kept[plain].append(steps)
    return kept


@pytest.mark.parametrize("above", [9, 16])
def test_a_mode_is_kept_for_its_dwell_while_load_jumps_around_the_threshold(above: int):
    draw = random.Random(1)
    kept = lengths(decisions(policy(high=8, low=6, min_dwell_steps=10), [draw.choice((1, above)) for _ in range(2000)]))
    assert min(len(runs) for runs in kept.values()) > 20
    assert min(min(runs) for runs in kept.values()) >= 10


def test_speculation_does_not_dwell_where_its_steps_are_longest():
    """Load in waves: all requests end together, few run for a moment, and the next wave meets a speculation that just began."""
    draw = random.Random(1)
    sizes = [draw.choice((1, 17)) for _ in range(2000)]
    found = decisions(policy(high=8, low=6, min_dwell_steps=10), sizes)
    assert all(plain for plain, size in zip(found, sizes, strict=True) if size == 17)
    kept = lengths(found)
    assert min(kept[True]) >= 10, "what follows dwells again, so that switches stay few"
    assert min(kept[False]) == 1


def test_what_the_next_step_will_be_is_foreseen_and_changes_nothing():
    made = policy(high=28, low=24)
    assert [made.expects_plain(size) for size in (1, 28, 29)] == [False, False, True]
    assert (made.step, made.plain) == (0, False)
    made.decide(40, 0.0)
    assert made.expects_plain(1), "a mode is kept until a step is decided otherwise"
    made.update({"force": "speculative"})
    assert not made.expects_plain(40)
    made.update({"force": None, "flip_every": 3})
    assert made.expects_plain(1) is made.plain


def test_force_holds_at_once_whatever_the_load_is_and_ends_with_the_loads_own_mode():
    made = policy(high=8, low=6, min_dwell_steps=50)
    assert decisions(made, [9]) == [True]
    made.update({"force": "speculative"})
    assert decisions(made, [9, 64, 64]) == [False, False, False]
    assert made.state()["reason"] == "forced"
    made.update({"force": None})
    assert decisions(made, [64]) == [True]
    assert made.state()["reason"] == "above_high"


@pytest.mark.parametrize("every", [1, 3, 24])
def test_flipping_toggles_every_so_many_steps(every: int):
    found = decisions(policy(flip_every=every), [1] * (8 * every))
    assert found == [step // every % 2 == 1 for step in range(8 * every)]


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"high": -1}, "high must be a whole number, 0 or more"),
        ({"high": True}, "high must be a whole number"),
        ({"high": "8"}, "high must be a whole number"),
        ({"low": 29}, "low must not exceed high"),
        ({"force": "off"}, "force must be plain, speculative or null"),
        ({"flip_every": 1.5}, "flip_every must be a whole number"),
        ({"adapt": 1}, "adapt must be true or false"),
        ({"treshold": 3}, "unknown: treshold"),
    ],
)
def test_a_wrong_change_is_refused_and_changes_nothing(changes, message):
    made = policy()
    before = made.state()
    with pytest.raises(ValueError, match=message):
        made.update({"min_dwell_steps": 3, **changes})
    assert made.state() == before


def test_a_new_high_alone_brings_its_own_low():
    made = policy(high=0, low=0)
    made.update({"high": 64})
    assert (made.settings.high, made.settings.low) == (64, 56)


def test_a_calibration_is_read_and_one_of_another_schema_is_refused():
    calibration = {"schema": "aerie-calibration/1", "high": 40, "low": 32, "dwell_steps": 5, "min_dwell_seconds": 0.5, "verdict": "crosses"}
    assert dynamic.Settings.of_calibration(calibration) == dynamic.Settings(high=40, low=32, min_dwell_steps=5)
    for wrong, message in (
        ({**calibration, "schema": "aerie-calibration/2"}, "schema must be aerie-calibration/1"),
        ({"schema": "aerie-calibration/1"}, "high is missing"),
        ({**calibration, "low": 41}, "low must not exceed high"),
        ([], "schema must be aerie-calibration/1"),
    ):
        with pytest.raises(ValueError, match=message):
            dynamic.Settings.of_calibration(wrong)


# All ranks


def test_ranks_that_measured_differently_decide_alike():
    """Rank 0's plan is the only thing measured that reaches a decision."""
    ranks = [policy(high=64, low=56, adapt=True) for _ in range(4)]
    draw = random.Random(5)
    for step in range(20_000):
        batch = 40 + round(20 * math.sin(step / 900)) + draw.randrange(-4, 5)
        if ranks[0].plan_is_due():
            plan = ranks[0].plan()
            for one in ranks:
                assert one.plan_is_due()
                one.apply(plan)
        found = {one.decide(batch, draw.random()) for one in ranks}
        assert len(found) == 1
        kind = kind_of(found.pop())
        for number, one in enumerate(ranks):  # the others measure nonsense
            one.observe(kind, batch, MACHINE.seconds(kind, batch) * (1 if number == 0 else draw.random()), round(batch * 2.4))
    assert len({str(one.settings) for one in ranks}) == 1
    assert ranks[0].settings.high < 64
    assert sum(ranks[0].switches.values()) > 2


def test_time_decides_nothing():
    sizes = [random.Random(2).randrange(1, 64) for _ in range(500)]
    one, other = policy(), policy()
    assert [one.decide(size, 0.0) for size in sizes] == [other.decide(size, 1e9 - step) for step, size in enumerate(sizes)]


# Under load


def constant(batch: int) -> Load:
    return lambda _now: batch


def ramp(now: float) -> int:
    return round(1 + 127 * (1 - abs(1 - now % 60 / 30)))


def stepped(now: float) -> int:
    return (1, 64, 8, 128, 32)[int(now / 10) % 5]


def around_the_threshold(now: float) -> int:
    return 26 + round(8 * math.sin(now * 9)) + int(now * 1e4) % 5 - 2


LOADS = {"ramp": ramp, "stepped": stepped, "around_the_threshold": around_the_threshold} | {
    f"constant {size}": constant(size) for size in (1, 8, 28, 32, 128)
}
ADAPTED = ("ramp", "stepped", "around_the_threshold", "constant 8", "constant 128")


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_calibrated_threshold_keeps_up_with_the_better_of_both(load: Load):
    assert MACHINE.crossover() == 29
    made = policy()
    assert share_of_the_better(made, load, 60) >= 0.97


def test_load_that_goes_round_the_threshold_switches_as_often_as_its_dwell_allows_at_most():
    made = policy(min_dwell_steps=16)
    run(made, around_the_threshold, 60)
    assert 1 < sum(made.switches.values()) <= made.step / 16
    steady = policy(high=28, low=12)
    run(steady, around_the_threshold, 60)
    assert sum(steady.switches.values()) <= 1


@pytest.mark.parametrize("load", [LOADS[name] for name in ADAPTED], ids=ADAPTED)
@pytest.mark.parametrize(("high", "low"), [(28, 24), (128, 112), (0, 0)], ids=["right", "much too high", "much too low"])
def test_measuring_keeps_up_with_the_better_of_both_wherever_it_starts(load: Load, high: int, low: int):
    made = policy(high=high, low=low, adapt=True)
    run(made, load, 120)  # what a wrong threshold costs until it was measured is the threshold's fault
    assert share_of_the_better(made, load, 60) >= 0.97


@pytest.mark.parametrize(("before", "after"), [(2.4, 1.3), (1.3, 3.0)], ids=["the draft gets worse", "the draft gets better"])
@pytest.mark.parametrize("batch", [8, 48])
def test_a_crossover_that_moves_is_followed(before: float, after: float, batch: int):
    made = policy(adapt=True)
    run(made, constant(batch), 60, lambda _now: Machine(accepted=before))
    there = Machine(accepted=after)
    run(made, constant(batch), 90, lambda _now: there)
    assert share_of_the_better(made, constant(batch), 60, lambda _now: there) >= 0.97


@pytest.mark.parametrize("batch", [1, 32, 128])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_looking_at_the_other_mode_costs_a_hundredth_at_most_and_settles(batch: int, noise: float):
    machine = Machine(noise=noise)
    looking, calm = policy(adapt=True), policy()
    share = run(looking, constant(batch), 90, lambda _now: machine) / run(calm, constant(batch), 90, lambda _now: machine)
    assert share >= 0.985  # a hundredth, and the noise of two runs
    assert looking.probe_seconds_lost <= 0.011 * looking.seconds
    assert sum(looking.switches.values()) - 2 * looking.probes <= 3


def test_nothing_is_looked_at_that_nobody_asked_to():
    made = policy()
    run(made, constant(40), 60)
    assert (made.probes, made.settings.high) == (0, 28)
    made.update({"adapt": True, "force": "plain"})
    run(made, constant(40), 60)
    assert (made.probes, made.settings.high) == (0, 28)


# For people


def test_state_tells_mode_reason_counts_and_measurements():
    made = policy(high=8, low=6)
    for _ in range(20):
        made.decide(4, 1.0)
        made.observe("speculative", 4, 0.01, 8)
    for _ in range(20):
        made.decide(12, 7.0)
        made.observe("plain", 12, 0.006, 12)
    state = made.state()
    assert (state["mode"], state["reason"], state["since"], state["switches"]) == ("plain", "above_high", 7.0, 1)
    assert state["steps"] == {"speculative": 20, "plain": 20}
    assert state["steps_by_batch"] == {"speculative": {"4": 20}, "plain": {"12": 20}}
    assert state["measured"]["speculative"] == {"4": {"step_ms": 10.0, "accept_length": 2.0}}
    assert state["measured"]["plain"] == {"12": {"step_ms": 6.0, "accept_length": 1.0}}


def test_what_is_not_known_of_a_step_is_not_measured():
    made = policy()
    made.decide(4, 0.0)
    made.observe("speculative", 4, 0, 8)
    made.observe("speculative", 4, 0.01, 0)
    assert made.state()["measured"]["speculative"] == {"4": {"step_ms": 10.0, "accept_length": 2.0}}
