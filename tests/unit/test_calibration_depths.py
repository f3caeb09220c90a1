"""The best number of draft steps at each batch size is found, and doubt changes nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import (
    calibration,
    calibration_depths,
    calibration_files,
    calibration_run,
    dynamic_control,
)
from ansible.module_utils.aerie.measuring.calibration import NEVER, PLAIN, SPECULATIVE, Level
from ansible.module_utils.aerie.measuring.calibration_depths import Comparison, Decision
from ansible.module_utils.aerie.serving import server_flags
from test_calibration import ARM, THERE, Lab

from aerie_controller import terminal
from aerie_controller.report import _template
from aerie_controller.terminal_reports import calibration as calibration_report

GRAPHS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
MOST = 256
LEVELS = calibration.first_levels(MOST, GRAPHS)
TWO = calibration_depths.comparisons([1, 3])
DEEP, LAST = TWO
DEPTH_ARM = {**ARM, "speculation": ARM["speculation"] | {"candidate_steps": [1, 3]}}

Truth = Callable[[float], float]


def falling(crossover: float, steep: float = 0.2) -> Truth:
    return lambda size: (crossover / size) ** steep


def flat(ratio: float) -> Truth:
    return lambda size: ratio


def measure(
    truths: dict[Comparison, Truth],
    seed: int = 0,
    noise: float = 0.02,
    pairs: int = 6,
    levels: tuple[int, ...] = LEVELS,
) -> dict[Comparison, list[Level]]:
    """Levels of each comparison; few requests are noisier, as their windows hold fewer tokens."""
    draws = random.Random(seed)

    def level(truth: Truth, size: int) -> Level:
        spread = noise * (1 + 2 / math.sqrt(size))
        ratios = [truth(size) * math.exp(draws.gauss(0, spread)) for _ in range(pairs)]
        return Level(size, tuple(ratios), 100.0, 100.0 * truth(size))

    return {entry: [level(truth, size) for size in levels] for entry, truth in truths.items()}


def decide(truths: dict[Comparison, Truth], steps: int = 3, **more: Any) -> Decision:
    return calibration_depths.decide(measure(truths, **more), steps, MOST, GRAPHS, draws=200)


def depths(truths: dict[Comparison, Truth], steps: int = 3, **more: Any) -> dict[int, int]:
    return calibration_depths.choose_depths(measure(truths, **more), steps, GRAPHS, draws=200)


def test_modes_are_compared_with_their_neighbours_in_order_of_how_much_they_speculate():
    found = [entry.names for entry in calibration_depths.comparisons([1, 5, 3])]
    assert found == [("5 steps", "3 steps"), ("3 steps", "1 step"), ("1 step", "plain")]
    assert calibration_depths.comparisons([]) == ()


def test_three_steps_then_one_then_plain_are_found_at_their_sizes():
    truths = {DEEP: falling(64), LAST: falling(200)}
    tables = [depths(truths, steps, seed=seed) for seed in range(20) for steps in (3, 1)]
    # Above 64, which the next size is; doubt may make it the size after that one.
    assert all(table in ({1: 3, 65: 1}, {1: 3, 97: 1}) for table in tables)
    assert sum(table == {1: 3, 65: 1} for table in tables) >= 30
    for seed in range(5):
        found = decide(truths, seed=seed)
        assert found.estimate.verdict == calibration.CROSSES
        assert found.estimate.at == pytest.approx(200, rel=0.15)
        assert [found.steps_at(size) for size in (1, 32, 128, 256)] == [3, 3, 1, 1]


def test_the_best_depth_over_plain_is_the_product_of_the_comparisons_in_between():
    found = decide({DEEP: falling(64), LAST: falling(200)}, noise=1e-4)
    by_level = {point.concurrency: point for point in found.estimate.points}
    assert by_level[8].ratio == pytest.approx((64 / 8) ** 0.2 * (200 / 8) ** 0.2, rel=0.001)
    assert by_level[256].ratio == pytest.approx((200 / 256) ** 0.2, rel=0.001)
    assert by_level[8].pairs == 6


def test_its_interval_is_that_of_all_comparisons_together():
    def width(truths: dict[Comparison, Truth], seed: int) -> float:
        point = decide(truths, seed=seed, noise=0.03).estimate.points[3]
        assert point.low
        assert point.high
        return math.log(point.high / point.low)

    chained = [width({DEEP: falling(1e4), LAST: falling(200)}, seed) for seed in range(20)]
    alone = [width({LAST: falling(200)}, seed) for seed in range(20)]
    assert sum(chained) / sum(alone) == pytest.approx(math.sqrt(2), rel=0.2)


def test_its_interval_holds_the_true_crossover_nine_times_of_ten():
    truths = {DEEP: falling(1e4, 0.05), LAST: falling(1.0, 0.15)}
    # (1e4 / size) ** 0.05 * (1 / size) ** 0.15 is 1 at 10 requests
    found = [decide(truths, seed=seed, noise=0.03).estimate for seed in range(60)]
    assert sum((one.low or 0) <= 10 <= (one.high or math.inf) for one in found) >= 50


@pytest.mark.parametrize("steps", [3, 1])
def test_where_one_step_never_wins_three_are_drafted_throughout(steps):
    truths = {DEEP: falling(2000), LAST: falling(60)}
    for seed in range(10):
        assert depths(truths, steps, seed=seed) == {1: 3}


def test_where_three_steps_never_win_one_is_drafted_throughout():
    truths = {DEEP: flat(0.9), LAST: falling(60)}
    tables = [depths(truths, seed=seed) for seed in range(20)]
    assert sum(table == {1: 1} for table in tables) >= 17
    assert all(table in ({1: 1}, {1: 3, 2: 1}) for table in tables)  # doubt at one client
    assert decide(truths).estimate.at == pytest.approx(60, rel=0.2)


@pytest.mark.parametrize(
    ("steps", "gain", "noise"),
    [
        (3, 1.0, 0.02),
        (1, 1.0, 0.02),
        (3, 1.0, 0.1),
        (3, 1 / 1.015, 0.001),
        (1, 1.015, 0.001),
    ],
    ids=["equal", "equal from 1", "equal and noisy", "1.5 % worse", "1.5 % worse from 1"],
)
def test_a_depth_that_is_not_settled_as_faster_changes_nothing(steps, gain, noise):
    truths = {DEEP: flat(gain), LAST: falling(200)}
    found = [depths(truths, steps, seed=seed, noise=noise) for seed in range(40)]
    assert sum(table == {1: steps} for table in found) >= 36


def test_doubt_about_where_a_depth_begins_to_win_keeps_that_of_smaller_batches():
    sure = {DEEP: [Level(8, (1.3, 1.31, 1.29)), Level(64, (1.1, 1.11, 1.09))]}
    last = {LAST: [Level(8, (2.0, 2.01, 1.99)), Level(64, (1.5, 1.51, 1.49))]}
    doubtful = {DEEP: [*sure[DEEP], Level(256, (1.25, 0.75, 0.8, 1.1))]}
    settled = {DEEP: [*sure[DEEP], Level(256, (0.9, 0.91, 0.89, 0.9))]}
    assert calibration_depths.decide(doubtful | last, 3, MOST, GRAPHS).steps_by_batch == {1: 3}
    table = calibration_depths.decide(settled | last, 3, MOST, GRAPHS).steps_by_batch
    assert [*table.values()] == [3, 1]


def test_a_middle_depth_is_chosen_where_it_is_the_fastest():
    five, three, one = calibration_depths.comparisons([1, 3, 5])
    truths = {five: falling(8), three: falling(80), one: falling(1000)}
    found = decide(truths, 3, noise=0.005)
    assert [*found.steps_by_batch.values()] == [5, 3, 1]
    assert found.estimate.verdict == calibration.ALWAYS
    missed = decide({five: flat(0.8), three: flat(1.5), one: falling(1000)}, 1, noise=0.005)
    assert missed.steps_by_batch == {1: 3}


def test_the_table_covers_sizes_at_which_plain_decoding_wins():
    found = decide({DEEP: falling(64), LAST: falling(20)}, noise=0.005)
    assert found.estimate.at is not None
    assert found.estimate.at < 64
    assert max(found.steps_by_batch) > found.estimate.at
    never = decide({DEEP: falling(64, 0.1), LAST: flat(0.5)}, noise=0.005)
    assert never.estimate.verdict == NEVER
    assert len(never.steps_by_batch) == 2


def test_without_graphs_any_size_may_be_the_first_of_a_depth():
    measured = measure({DEEP: falling(64), LAST: falling(200)}, noise=1e-4)
    table = calibration_depths.decide(measured, 3, MOST).steps_by_batch
    assert max(table) == math.floor(64 * 1.02**5) + 1


def test_a_level_that_lacks_one_comparison_counts_for_the_others():
    measured = measure({DEEP: falling(64), LAST: falling(200)}, noise=1e-4)
    measured[DEEP] = [level for level in measured[DEEP] if level.concurrency not in (8, 256)]
    found = calibration_depths.decide(measured, 3, MOST, GRAPHS)
    sizes = [point.concurrency for point in found.estimate.points]
    assert 8 not in sizes  # 3 steps are the best there
    assert 256 in sizes


def test_a_comparison_without_figures_is_reported():
    measured = measure({DEEP: falling(64), LAST: falling(200)}) | {DEEP: []}
    with pytest.raises(AerieError, match="no figures of 3 steps against 1 step"):
        calibration_depths.decide(measured, 3, MOST, GRAPHS)
    apart = {DEEP: [Level(1, (1.5, 1.5))], LAST: [Level(8, (1.5, 1.5))]}
    with pytest.raises(AerieError, match="no number of requests at which the best depth"):
        calibration_depths.decide(apart, 3, MOST, GRAPHS)


@pytest.mark.parametrize(
    ("table", "limits", "slots"),
    [
        ({1: 3, 65: 1}, (128, 96), {"1": 3, "65": 1, "129": 0}),
        ({1: 3, 65: 1}, (64, 48), {"1": 3, "65": 0}),
        ({1: 3, 65: 1}, (32, 24), {"1": 3, "33": 0}),
        ({1: 3, 65: 1}, (MOST, MOST), {"1": 3, "65": 1}),
        ({1: 1}, (0, 0), {"1": 0}),
    ],
)
def test_sglangs_own_adaptive_speculation_gets_the_same_with_step_0_above_high(table, limits, slots):
    found = calibration_depths.adaptive_config(table, calibration.Thresholds(*limits), MOST)
    assert found == {size: {"candidate_steps": [steps]} for size, steps in slots.items()}


def test_depths_are_said_in_words():
    said = calibration_depths.sentence({1: 3, 97: 1})
    assert said == "Speculation drafts 3 steps up to 96 requests, 1 step above."
    assert calibration_depths.sentence({1: 1}) == "Speculation drafts 1 step at every batch size."


# ---- what is forced --------------------------------------------------------------------------------


def test_only_a_server_that_can_force_a_depth_is_asked_to_release_it():
    assert dynamic_control.released({"force": None}) == {"force": None}
    assert dynamic_control.released({"num_steps": 1}) == {"force": None, "num_steps": None}
    assert dynamic_control.is_forced({"force": None, "num_steps": 1})
    assert dynamic_control.is_forced({"force": PLAIN})
    assert not dynamic_control.is_forced({"force": None, "num_steps": None})


@pytest.mark.parametrize("state", [{}, {"candidate_steps": None}, {"candidate_steps": [3]}])
def test_a_server_that_can_not_be_forced_to_a_depth_is_not_calibrated(state):
    with pytest.raises(AerieError, match="has candidate_steps 1 and 3, and the server can't be"):
        calibration_run.depths_to_measure(DEPTH_ARM, state)
    assert calibration_run.depths_to_measure(ARM, state) == ()


def test_depths_are_compared_only_where_the_arm_names_them():
    state = {"candidate_steps": [1, 3]}
    assert calibration_run.depths_to_measure(DEPTH_ARM, state) == (1, 3)
    assert calibration_run.depths_to_measure(ARM, state) == ()


def test_a_check_names_the_modes_that_would_be_measured():
    settings = calibration_run.Settings((1, 4), 0, 1, 1, 1, {}, False, 60)
    said = calibration_run.would(settings, DEPTH_ARM)
    assert said.startswith("3 steps, 1 step and plain decoding would be measured in turn at 1 and 4")
    assert calibration_run.would(settings, ARM).startswith("plain and speculative decoding would")


# ---- one server, calibrated ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("depths")
    lab = Lab(root, depths=True)
    lab.run(before={"high": 16, "low": 16}, arm=DEPTH_ARM, seconds=2.0, window_seconds=0.3)
    yield lab, calibration_files.read(lab.run_directory)
    lab.process.kill()
    lab.process.wait()


def test_a_servers_depths_and_crossover_are_found_in_one_launch(calibrated):
    _, found = calibrated
    result = found["calibration"]
    assert result["schema"] == "aerie-calibration/1"
    assert list(result["steps_by_batch"].values()) == [3, 1]
    first, second = result["steps_by_batch"]
    assert first == "1"
    assert int(second) in (2, 3, 4)  # 2 % beyond the crossover at 2.5
    assert result["crossover"]["at"] == pytest.approx(6.0, rel=0.2)
    assert 4 <= result["low"] < result["high"] <= 7
    slots = server_flags.adaptive_config([1, 3], result["steps_by_batch"])
    above = {str(result["high"] + 1): {"candidate_steps": [0]}}
    assert result["adaptive_config"] == slots | above
    assert result["evidence"]["switch_ms"].keys() == {PLAIN, SPECULATIVE}


def test_each_level_says_which_depth_its_speed_up_is_of(calibrated):
    _, found = calibrated
    levels = {level["concurrency"]: level for level in found["calibration"]["evidence"]["levels"]}
    assert (levels[1]["steps"], levels[16]["steps"]) == (3, 1)
    assert levels[1]["ratio"] == pytest.approx(6**0.25 * 2.5**0.25, rel=0.05)
    assert levels[16]["ratio"] == pytest.approx((6 / 16) ** 0.25, rel=0.05)
    deep, last = found["calibration"]["evidence"]["comparisons"]
    assert (deep["deeper"], deep["shallower"], last["shallower"]) == (3, 1, 0)
    assert deep["crossover"]["at"] == pytest.approx(2.5, rel=0.3)
    assert deep["levels"][0]["deeper_tok_s"] > deep["levels"][0]["shallower_tok_s"]


def test_thresholds_meet_each_other_at_the_depth_of_each_level(calibrated):
    lab, found = calibrated
    by_level = {entry["concurrency"]: entry for entry in found["confirmed"]}
    assert by_level[16]["after_over_before"] == pytest.approx((16 / 6) ** 0.25, rel=0.05)
    outcome = json.loads((lab.run_directory / "confirm-c16/level.json").read_text())
    assert {told["num_steps"] for told in outcome["told"].values()} == {1}
    outcome = json.loads((lab.run_directory / "confirm-c1/level.json").read_text())
    assert {told["num_steps"] for told in outcome["told"].values()} == {3}
    assert {told["force"] for told in outcome["told"].values()} == {None}


def test_nothing_is_forced_afterwards_and_progress_names_depths(calibrated):
    lab, _ = calibrated
    state = dynamic_control.state(lab.server)
    assert (state["force"], state["num_steps"]) == (None, None)
    assert any("c=4  3 steps and 1 step  3 steps " in line for line in lab.lines)
    assert any("c=4  1 step and plain  1 step " in line for line in lab.lines)


def test_an_arm_with_other_candidates_may_not_use_it(calibrated):
    _, found = calibrated
    there = replace(THERE, speculation=DEPTH_ARM["speculation"], most=16)
    assert calibration.problems(found["calibration"], there) == []
    other = DEPTH_ARM["speculation"] | {"candidate_steps": [1, 2, 3]}
    (problem,) = calibration.problems(found["calibration"], replace(there, speculation=other))
    assert "candidate_steps [1, 3], draft_model draft" in problem
    assert "candidate_steps [1, 2, 3]" in problem


def test_table_and_page_name_depths(calibrated):
    _, found = calibrated
    text = terminal.render(calibration_report.parts(found), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "Speculation drafts 3 steps up to" in " ".join(text.split())
    assert "Every depth has the pinned acceptance length" in " ".join(text.split())
    assert "3 steps" in text
    assert "1 step" in text
    page = _template("calibration.html.j2").render(
        found=found,
        told=found["calibration"],
        levels=list(zip(found["calibration"]["evidence"]["levels"], found["table"], strict=True)),
        gain="",
        shares="",
        swatches=["", "", ""],
        limits=calibration_report.limits,
        mode=calibration_report.mode,
        names=calibration_report.names,
        remarks=calibration_report.remarks(found),
    )
    assert "<td>3 steps</td>" in page
    assert "against the next one that speculates less" in page


def test_a_depth_that_gave_no_figures_is_reported_with_what_failed(tmp_path):
    lab = Lab(tmp_path, depths=True)
    try:
        (lab.state / "stubborn").touch()
        lab.run(arm=DEPTH_ARM, concurrency=(2,))
        with pytest.raises(AerieError, match="gave no figures: the server refused"):
            calibration_files.read(lab.run_directory)
    finally:
        lab.process.kill()
        lab.process.wait()


def test_files_of_a_comparison_have_a_place_of_their_own(calibrated):
    lab, _ = calibrated
    names = {path.parent.name for path in Path(lab.run_directory).glob("*/level.json")}
    assert {"c1-3-steps", "c1-1-step", "c16-1-step"} <= names
    launch = json.loads((lab.run_directory / "launch.json").read_text())
    assert launch["candidate_steps"] == [3, 1]
