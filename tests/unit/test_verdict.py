"""The verdict says what the records say, how sure that is, and never more."""

from __future__ import annotations

import math

import pytest
from ansible.module_utils.aerie.measuring import verdict
from example_records import FLASHINFER, PARTS, TRITON, campaign, record


def one(records) -> verdict.Group:
    (group,) = verdict.groups(records)
    return group


def point(group: verdict.Group, arm: str, level: int) -> verdict.Point:
    (found,) = [each for each in group.points if (each.arm, each.concurrency) == (arm, level)]
    return found


def crossing(group: verdict.Group, arm: str = "eagle3") -> verdict.Crossover:
    (found,) = [each for each in group.crossovers if each.arm == arm]
    return found


def runs_of(baseline: dict[int, float], eagle: dict[int, float], repeats: int = 1):
    return [
        record(arm, level, speed, repeat)
        for arm, levels in (("baseline", baseline), ("eagle3", eagle))
        for level, speed in levels.items()
        for repeat in range(1, repeats + 1)
    ]


def test_speedup_is_the_geometric_mean_of_pairs_with_a_t_interval():
    speeds = {1: (100.0, 150.0), 2: (110.0, 154.0), 3: (90.0, 144.0)}
    group = one([record(arm, 4, speeds[repeat][index], repeat) for repeat in speeds for index, arm in enumerate(("baseline", "eagle3"))])
    found = point(group, "eagle3", 4).ratio
    logs = [math.log(1.5), math.log(1.4), math.log(1.6)]
    mean = sum(logs) / 3
    reach = 4.3027 * math.sqrt(sum((value - mean) ** 2 for value in logs) / 2 / 3)
    assert found.value == pytest.approx(math.exp(mean))
    assert (found.low, found.high) == pytest.approx((math.exp(mean - reach), math.exp(mean + reach)), rel=1e-4)
    assert found.pairs == 3


def test_pairs_are_of_the_same_repeat_so_a_slow_night_cancels():
    group = one(
        [
            record(arm, 4, speed * factor, repeat)
            for repeat, factor in ((1, 1), (2, 0.5))
            for arm, speed in (("baseline", 100), ("eagle3", 150))
        ]
    )
    found = point(group, "eagle3", 4)
    assert (found.ratio.low, found.ratio.value, found.ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    assert (found.throughput.low, found.throughput.high) == (75, 150)


def test_several_cells_of_one_launch_are_one_observation():
    records = runs_of({4: 100}, {4: 150})
    records.append(record("eagle3", 4, 152.0, cell="eagle3-c4-again"))
    found = point(one(records), "eagle3", 4)
    assert (found.throughput.launches, found.ratio.low) == (1, None)


def test_quantiles_are_those_of_students_t():
    from scipy import stats

    for degrees in (*range(1, 60), 200):
        assert verdict.t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-4)


def test_crossover_is_interpolated_in_the_logarithm_of_clients():
    found = crossing(one(runs_of({4: 100, 16: 100, 64: 100}, {4: 200, 16: 200, 64: 50})))
    assert found.kind == "crosses"
    assert found.at == pytest.approx(32)
    assert (found.low, found.high) == (16, 64)
    assert "up to about 32 clients and slower from there to 64 (2.00× at 16, 0.50× at 64)" in found.sentence


def test_a_crossover_the_other_way_round_is_said_that_way():
    found = crossing(one(runs_of({1: 100, 4: 100}, {1: 50, 4: 200})))
    assert found.at == pytest.approx(2)
    assert "slower than baseline up to about 2 clients and faster from there to 4" in found.sentence


def test_a_level_exactly_at_one_between_two_sides_is_the_crossover():
    assert crossing(one(runs_of({1: 100, 8: 100, 64: 100}, {1: 200, 8: 100, 64: 50}))).at == 8


@pytest.mark.parametrize(("factor", "kind"), [(1.5, "faster"), (0.5, "slower")])
def test_no_crossover_says_which_side_and_which_range(factor, kind):
    found = crossing(one(runs_of({1: 100, 4: 300, 16: 900}, {1: 100 * factor, 4: 300 * factor, 16: 900 * factor})))
    assert (found.kind, found.at) == (kind, None)
    assert f"No crossover in this range: eagle3 is {kind} than baseline everywhere from 1 to 16 clients" in found.sentence


def test_changing_places_twice_names_no_single_crossover():
    found = crossing(one(runs_of({1: 100, 4: 100, 16: 100}, {1: 150, 4: 70, 16: 150})))
    assert (found.kind, found.at) == ("several", None)
    assert "change places 2 times" in found.sentence


def test_one_concurrency_claims_nothing_about_others():
    found = crossing(one(runs_of({4: 100}, {4: 130})))
    assert found.kind == "single"
    assert "1.30× the speed of baseline (faster) at 4 clients, the only concurrency measured" in found.sentence


def test_equal_arms_are_called_equal():
    assert crossing(one(runs_of({1: 100, 4: 300}, {1: 100, 4: 300}))).kind == "same"


def test_one_launch_each_admits_that_no_spread_is_known():
    group = one(runs_of(TRITON["baseline"], TRITON["eagle3"]))
    assert "One launch each: no spread known" in " ".join(crossing(group).doubts)
    assert point(group, "eagle3", 1).ratio.low is None
    assert "One launch each: no spread known" in " ".join(one(runs_of({}, {1: 100, 4: 200})).notes)


def test_an_interval_that_includes_one_leaves_the_place_open():
    records = [
        record(arm, level, speed, repeat)
        for level, ratios in ((1, (2.0, 2.01, 1.99)), (8, (1.3, 0.95, 1.1)), (32, (0.95, 0.9, 1.05)), (64, (0.5, 0.51, 0.49)))
        for repeat, factor in enumerate(ratios, 1)
        for arm, speed in (("baseline", 100.0), ("eagle3", 100.0 * factor))
    ]
    found = crossing(one(records))
    assert (found.low, found.high) == (1, 64)
    assert any("Not settled at 8 (" in doubt and "32 (" in doubt and "includes 1" in doubt for doubt in found.doubts)
    assert "The crossing itself may lie between 1 and 64." in found.doubts


def test_a_sure_verdict_has_no_doubts():
    found = crossing(one(campaign(FLASHINFER, repeats=3)))
    assert (found.kind, found.doubts) == ("crosses", ())
    assert 32 < found.at < 64


def test_failed_cells_are_counted_and_named_and_compare_nothing():
    records = [*runs_of({1: 100, 64: 800}, {1: 150}, repeats=2), record("eagle3", 64, None, 1), record("eagle3", 64, None, 2)]
    group = one(records)
    found = point(group, "eagle3", 64)
    assert (found.throughput, found.ratio, found.failed) == (None, None, 2)
    assert [failure.cell for failure in group.failures] == ["eagle3-c64-r1", "eagle3-c64-r2"]
    assert "out of memory" in group.failures[0].reason
    assert crossing(group).kind == "single"


def test_a_cell_that_completed_without_a_figure_is_a_failure_too():
    group = one([*runs_of({1: 100}, {}), record("eagle3", 1, 150.0, metrics={"output_throughput_tok_s": 0})])
    assert [(failure.status, failure.arm) for failure in group.failures] == [("no figure", "eagle3")]
    assert point(group, "eagle3", 1).ratio is None


def test_repeats_that_never_completed_together_are_compared_without_an_interval_and_said_so():
    group = one(
        [record("baseline", 4, 100.0, 1), record("baseline", 4, None, 2), record("eagle3", 4, None, 1), record("eagle3", 4, 150.0, 2)]
    )
    found = point(group, "eagle3", 4).ratio
    assert (found.value, found.low, found.paired) == (pytest.approx(1.5), None, False)
    assert any("different repeats" in doubt for doubt in crossing(group).doubts)


def test_without_a_baseline_speeds_are_shown_and_ratios_are_not():
    group = one([record("eagle3", 1, 150.0), record("eagle3-deep", 1, 140.0)])
    assert (group.baseline, group.crossovers) == (None, ())
    assert all(each.ratio is None and each.throughput for each in group.points)
    assert any("No baseline in this run" in note for note in group.notes)


def test_a_baseline_that_always_failed_is_said():
    group = one([record("baseline", 1, None), record("eagle3", 1, 150.0)])
    assert any("no completed cell" in note for note in group.notes)
    assert crossing(group).kind == "unknown"


def test_the_only_arm_without_speculation_is_the_baseline_and_another_can_be_named():
    plain = record("baseline", 1, 100.0)
    plain["arm"]["name"] = "plain"
    records = [plain, record("eagle3", 1, 150.0)]
    assert one(records).baseline == "plain"
    (named,) = verdict.groups(records, "eagle3")
    assert named.baseline == "eagle3"
    assert [each.arm for each in named.crossovers] == ["plain"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"workload": {"dataset": "sharegpt", "output_len": 256}}, "workload"),
        ({"release": {"id": "0.5.23-000000000000"}}, "release"),
        ({"models": {"target": {"name": "llama-8b-shaped", "identity": "another"}}}, "target model"),
        ({"host_fingerprint": {"gpus": [{"driver": "another"}]}}, "host"),
    ],
)
def test_records_of_different_shapes_are_never_compared(change, word):
    groups = verdict.groups([record("baseline", 1, 100.0), record("eagle3", 1, 150.0, **change)])
    assert len(groups) == 2
    assert all(each.ratio is None for group in groups for each in group.points)
    assert all(any("not compared" in note and word in note for note in group.notes) for group in groups)


def test_a_draft_model_does_not_part_the_arms():
    group = one(campaign())
    assert [(model.role, model.name) for model in group.models] == [("target", "llama-8b-shaped"), ("draft", "eagle3-one-layer")]


def test_runs_and_hosts_are_never_compared():
    groups = verdict.groups(
        [record("baseline", 1, 100.0, host="a"), record("eagle3", 1, 150.0, host="b"), record("eagle3", 1, 150.0, run_id="other")]
    )
    assert len(groups) == 3
    assert all(each.ratio is None for group in groups for each in group.points)


def test_profile_cells_give_shares_and_never_speed():
    group = one([*runs_of({1: 100}, {1: 150}), *[each for each in campaign(repeats=1) if each["kind"] == "profile"]])
    assert point(group, "eagle3", 1).throughput.value == 150
    first = group.phases[0]
    assert sum(first.shares.values()) == pytest.approx(1)
    whole = sum(PARTS.values()) + PARTS["target_verify"] / 64
    assert first.shares["draft"] == pytest.approx(PARTS["draft"] / whole)
    assert (first.draft_steps, first.cycles) == ("divided", 400)


@pytest.mark.parametrize(
    "pin", [{"environment": {"SGLANG_SIMULATE_ACC_LEN": "2.4"}}, {"metrics": {"output_throughput_tok_s": 150, "accept_simulated": True}}]
)
def test_pinned_acceptance_is_labelled(pin):
    group = one([record("baseline", 1, 100.0), record("eagle3", 1, 150.0, **pin)])
    assert [arm.name for arm in group.arms if arm.pinned] == ["eagle3"]
    assert any("Acceptance of eagle3 is simulated" in note for note in group.notes)


@pytest.mark.parametrize(("value", "count"), [("check", 1), ("grouped", 0)])
def test_speeds_in_check_mode_are_called_no_results(value, count):
    release = {"patch_sets": [{"name": "triton_target_verify", "sha256": "s"}]}
    checked = record("eagle3", 1, 150.0, environment={"AERIE_TARGET_VERIFY": value}, release=release)
    group = one([record("baseline", 1, 100.0, release=release), checked])
    found = [note for note in group.notes if note.startswith("Speeds of eagle3 are no results: triton_target_verify ran in check mode")]
    assert len(found) == count
    assert [arm.name for arm in group.arms if arm.patch_sets_in_check] == ["eagle3"] * count


def test_acceptance_is_pooled_over_verify_steps():
    cells = [({"accepted_tokens": 900, "verify_steps": 300}, 1), ({"accepted_tokens": 100, "verify_steps": 700}, 2)]
    records = [
        record("eagle3", 1, 150.0, repeat, metrics={"output_throughput_tok_s": 150.0, "accept_length": 9.9, **extra})
        for extra, repeat in cells
    ]
    assert point(one(records), "eagle3", 1).accept_length == pytest.approx(2.0)


def test_the_order_of_records_does_not_matter():
    records = campaign()
    assert verdict.groups(records) == verdict.groups(records[::-1])
