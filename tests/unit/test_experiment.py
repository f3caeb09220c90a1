"""An experiment is refused as a whole with all its faults, and its plan gives every arm the same chances."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import experiment

ARMS = {"baseline": {"speculation": None}, "eagle3": {"speculation": {"algorithm": "EAGLE3"}}, "dynamic": {}}


def described(**changes: Any) -> dict[str, Any]:
    workload = {
        "dataset": "sharegpt",
        "path": "p.json",
        "output_len": 48,
        "concurrency": [1, 4],
        "requests_per_client": 4,
        "minimum_requests": 10,
    }
    data = {
        "name": "demo",
        "arms": ["baseline", "eagle3"],
        "workload": workload,
        "repeats": 2,
        "profile": {"arms": ["eagle3"], "requests_per_client": 2},
    }
    return data | changes


def planned(**changes: Any) -> experiment.Plan:
    return experiment.plan(experiment.validate(described(**changes), ARMS), ARMS, "d" * 64)


def test_every_fault_is_named_at_once_with_near_matches():
    data = described(arms=["baselin", "eagle3"], repeats=0, ordre="abba")
    data["workload"] = data["workload"] | {"concurrency": [1, 0], "dataset": "sharegp", "seeed": 1}
    with pytest.raises(AerieError) as error:
        experiment.validate(data, ARMS)
    told = str(error.value)
    assert "6 problems" in told
    for part in (
        "'baselin' is not one of sglang_server_arms (baseline, dynamic and eagle3); did you mean 'baseline'?",
        "repeats is 0: it must be a whole number from 1 on",
        "ordre is not a key of an experiment; did you mean 'order'?",
        "workload.concurrency is [1, 0]",
        "workload.dataset is 'sharegp': it must be sharegpt, random or random-ids; did you mean 'sharegpt'?",
        "workload.seeed is not a key of an experiment; did you mean 'seed'?",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "random-ids", "path": None}, "input_len is missing"),
        ({"path": None}, "path is missing"),
        ({"output_len": 3}, "takes 4 or more"),
        ({"concurrency": [4, 4]}, "different whole numbers"),
        ({"concurrency": [True]}, "different whole numbers"),
        ({"concurrency": 4}, "different whole numbers"),
        ({"input_len": 64}, "no effect with data set sharegpt"),
    ],
)
def test_a_workload_that_the_client_would_take_another_way_is_refused(changes, message):
    with pytest.raises(AerieError, match=message):
        experiment.validate(described(workload=described()["workload"] | changes), ARMS)


@pytest.mark.parametrize("data", [None, [], "demo"])
def test_what_is_no_mapping_is_refused(data):
    with pytest.raises(AerieError, match="not a mapping"):
        experiment.validate(data, ARMS)


def test_missing_parts_are_named():
    with pytest.raises(AerieError) as error:
        experiment.validate({"description": "x"}, ARMS)
    assert all(f"{key} is missing" in str(error.value) for key in ("name", "arms", "workload"))


def test_a_profiled_arm_must_be_measured_and_an_instance_must_exist():
    with pytest.raises(AerieError, match="'dynamic' is not one of the experiment's arms"):
        experiment.validate(described(profile={"arms": ["dynamic"]}), ARMS)
    with pytest.raises(AerieError, match=r"instance 'mian' is not one of .* did you mean 'main'"):
        experiment.validate(described(instance="mian"), ARMS, ["main"])


def test_abba_starts_arms_in_order_in_odd_repeats_and_reversed_in_even_ones():
    plan = planned(repeats=3)
    assert [(launch.arm, launch.repeat) for launch in plan.launches] == [
        ("baseline", 1), ("eagle3", 1), ("eagle3", 2), ("baseline", 2), ("baseline", 3), ("eagle3", 3),
    ]  # fmt: skip
    assert [launch.launch for launch in plan.launches] == [1, 2, 3, 4, 5, 6]


def test_sequential_runs_all_repeats_of_an_arm_before_the_next():
    assert [launch.arm for launch in planned(order="sequential").launches] == ["baseline", "baseline", "eagle3", "eagle3"]


def test_arms_share_the_seed_of_a_concurrency_and_repeat_and_nothing_else_does():
    cells = [cell for launch in planned().launches for cell in launch.cells]
    seeds: dict[tuple[int, int], set[int]] = {}
    for cell in cells:
        seeds.setdefault((cell.concurrency, cell.repeat), set()).add(cell.seed)
    assert all(len(values) == 1 for values in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds) == 4


def test_seeds_stay_when_levels_are_added():
    wider = planned(workload=described()["workload"] | {"concurrency": [1, 2, 4]})
    first, second = ({cell.id: cell.seed for launch in plan.launches for cell in launch.cells} for plan in (planned(), wider))
    assert first.items() <= second.items()


def test_profile_cells_come_last_and_in_the_first_repeat_only():
    plan = planned()
    assert [[cell.id for cell in launch.cells] for launch in plan.launches] == [
        ["baseline-c1-r1", "baseline-c4-r1"],
        ["eagle3-c1-r1", "eagle3-c4-r1", "eagle3-c1-r1-profile", "eagle3-c4-r1-profile"],
        ["eagle3-c1-r2", "eagle3-c4-r2"],
        ["baseline-c1-r2", "baseline-c4-r2"],
    ]
    assert [launch.cells_before for launch in plan.launches] == [0, 2, 6, 8] and {launch.cells_total for launch in plan.launches} == {10}


def test_requests_grow_with_the_clients_and_never_fall_below_the_minimum():
    requests = {cell.id: cell.requests for launch in planned().launches for cell in launch.cells}
    assert (requests["eagle3-c1-r1"], requests["eagle3-c4-r1"], requests["eagle3-c4-r1-profile"]) == (10, 16, 8)


def test_the_identity_changes_with_whatever_is_measured_and_not_with_its_description():
    first = planned()
    assert planned(description="in other words").identity == first.identity
    assert planned(repeats=3).identity != first.identity
    changed = ARMS | {"eagle3": {"speculation": {"algorithm": "EAGLE3", "steps": 5}}}
    assert experiment.plan(first.experiment, changed, "d" * 64).identity != first.identity
    assert experiment.plan(first.experiment, ARMS, "e" * 64).identity != first.identity
    assert experiment.plan(first.experiment, ARMS | {"other": {}}, "d" * 64).identity == first.identity


UNFIT = ["", "-x", ".x", "a/b", "../x", "a b", "é", "x" * 300, "capture", "Calibration", "x.yml", "ledger.sqlite", "report.html"]


@pytest.mark.parametrize("name", UNFIT)
def test_an_experiment_has_a_name_that_its_results_can_have(name):
    with pytest.raises(AerieError, match="name"):
        experiment.validate(described(name=name), ARMS)
