"""An arm's ``candidate_steps`` becomes flags and a file of slots, or is refused with the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import settings
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json
from ansible.module_utils.aerie.serving import launch_checks, server, server_flags, server_plan
from sglang_example import ARGUMENTS, EAGLE3, RELEASE, make_host, make_release, make_request
from test_dynamic_arm import FLAG

from aerie_controller import settings_overview
from ports import free_port

SPECULATION = EAGLE3["speculation"] | {"candidate_steps": [3, 1]}
ADAPTIVE: dict[str, Any] = {"name": "adaptive", "speculation": SPECULATION}
ADAPTIVE_ARGUMENTS = [
    {**FLAG, "flags": ["--speculative-adaptive"], "dest": "speculative_adaptive", "nargs": 0},
    {
        **FLAG,
        "flags": ["--speculative-adaptive-config"],
        "dest": "speculative_adaptive_config",
    },
]
CALIBRATION = {
    "schema": "aerie-calibration/1",
    "high": 24,
    "low": 16,
    "release": RELEASE,
    "arm": {"name": "adaptive", "speculation": SPECULATION},
    "steps_by_batch": {"1": 3, "17": 1},
}
AUTO = {**ADAPTIVE, "dynamic": {"threshold": "auto"}}


@pytest.fixture
def plan(tmp_path: Path):
    """Plan a server of a release that has adaptive and dynamic speculation."""

    def make(arm: dict[str, Any], arguments: list[dict[str, Any]] = ADAPTIVE_ARGUMENTS, **changes: Any) -> server_plan.Plan:
        if not (tmp_path / "current").is_symlink():
            make_release(tmp_path, [*ARGUMENTS, FLAG, *arguments])
        return server_plan.plan(make_host(tmp_path), make_request(tmp_path, arm, **changes))

    return make


def option(plan: server_plan.Plan, flag: str) -> str:
    return plan.argv[plan.argv.index(flag) + 1]


def content(plan: server_plan.Plan) -> Any:
    text, mode = plan.files()[plan.directory / "adaptive.json"]
    assert mode == 0o644
    return json.loads(text)


# ---- what it means ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, {"threshold": 32}, {"threshold": 0}])
def test_sglang_chooses_between_all_candidates_in_one_slot(plan, dynamic):
    made = plan({**ADAPTIVE, "dynamic": dynamic})
    assert "--speculative-adaptive" in made.argv
    path = made.directory / "adaptive.json"
    assert option(made, "--speculative-adaptive-config") == str(path)
    assert content(made) == {"1": {"candidate_steps": [1, 3]}}
    assert option(made, "--speculative-num-steps") == "3"
    assert option(made, "--speculative-num-draft-tokens") == "4"


def test_without_candidates_nothing_is_written_and_the_definition_stays(plan):
    made, null = plan(EAGLE3), {**EAGLE3["speculation"], "candidate_steps": None}
    assert "--speculative-adaptive" not in made.argv
    assert made.directory / "adaptive.json" not in made.files()
    assert plan({**EAGLE3, "speculation": null}).definition == made.definition


def test_a_calibration_gives_each_batch_size_one_depth(plan):
    made = plan(AUTO, calibration=CALIBRATION)
    assert content(made) == {"1": {"candidate_steps": [3]}, "17": {"candidate_steps": [1]}}
    assert option(made, "--speculative-num-steps") == "3"
    read = json.loads(made.files()[made.directory / "calibration.json"][0])
    assert read["steps_by_batch"] == CALIBRATION["steps_by_batch"]


def test_steps_that_no_slot_has_give_way_to_those_of_the_first_slot(plan):
    found = plan(AUTO, calibration=CALIBRATION | {"steps_by_batch": {"1": 1}})
    assert content(found) == {"1": {"candidate_steps": [1]}}
    assert option(found, "--speculative-num-steps") == "1"
    assert option(found, "--speculative-num-draft-tokens") == "2"


def test_a_calibration_that_did_not_measure_depths_leaves_the_choice_to_sglang(plan):
    found = plan(AUTO, calibration=CALIBRATION | {"steps_by_batch": None})
    assert content(found) == {"1": {"candidate_steps": [1, 3]}}


def test_a_calibrations_depths_are_not_used_by_an_arm_that_names_its_threshold(plan):
    found = plan({**ADAPTIVE, "dynamic": {"threshold": 8}}, calibration=CALIBRATION)
    assert content(found) == {"1": {"candidate_steps": [1, 3]}}


def test_other_candidates_are_another_definition_though_the_command_line_is_the_same(plan):
    more = {**ADAPTIVE, "speculation": SPECULATION | {"candidate_steps": [1, 2, 3]}}
    assert plan(more).argv == plan(ADAPTIVE).argv
    assert plan(more).definition != plan(ADAPTIVE).definition
    other = CALIBRATION | {"steps_by_batch": {"1": 3, "33": 1}}
    definitions = [plan(AUTO, calibration=found).definition for found in (CALIBRATION, other)]
    assert definitions[0] != definitions[1]


def test_a_diff_shows_the_file_and_a_start_writes_and_records_it(plan, tmp_path):
    made = plan(ADAPTIVE, instance={"port": free_port()})
    changes = {path.name: after for path, before, after in server.file_changes(made) if not before}
    assert json.loads(changes["adaptive.json"]) == {"1": {"candidate_steps": [1, 3]}}
    try:
        server.start(made, 30)
        assert server.is_running_as_planned(made)
        more = {**ADAPTIVE, "speculation": SPECULATION | {"candidate_steps": [1, 2, 3]}}
        other = plan(more, instance={"port": made.endpoint.port})
        assert not server.is_running_as_planned(other)
        record = read_json(tmp_path / "instances/main/instance.json")
        assert record["adaptive_config"] == {"1": {"candidate_steps": [1, 3]}}
        written = (tmp_path / "instances/main/adaptive.json").read_text()
        assert json.loads(written) == record["adaptive_config"]
    finally:
        server.stop(made.host, made.name)


def test_graphs_of_the_deepest_candidate_decide_whether_they_may_be_too_large(plan):
    deep = {**ADAPTIVE, "speculation": SPECULATION | {"candidate_steps": [3, 7]}}
    made = plan(deep, flags={"cuda-graph-max-bs-decode": 200})
    assert any("1600 tokens with 8 draft tokens each" in warning for warning in made.warnings)


def test_the_overview_names_the_candidates():
    assert settings_overview._speculation(ADAPTIVE) == "EAGLE3 3/1/4 of 1, 3 steps"


# ---- what is refused -------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"candidate_steps": 3}, "needs a list of whole numbers above 0, such as [1, 3], got 3"),
    ({"candidate_steps": [0, 3]}, "needs a list of whole numbers above 0"),
    ({"candidate_steps": [1.5, 3]}, "needs a list of whole numbers above 0"),
    ({"candidate_steps": [True, 3]}, "needs a list of whole numbers above 0"),
    ({"candidate_steps": [3, 3]}, "names a number twice"),
    ({"candidate_steps": [3]}, "leaves nothing to choose"),
    ({"candidate_steps": []}, "leaves nothing to choose"),
    ({"candidate_steps": [1, 5]}, "must contain steps (3): add it, or set steps to one of them"),
    ({"candidate_steps": [1, 3], "topk": 4, "draft_tokens": 8}, "set speculation.topk to 1 (is 4)"),
    ({"candidate_steps": [1, 3], "algorithm": "STANDALONE"}, "algorithm to EAGLE or EAGLE3"),
    ({"candidate_steps": [1, 3], "draft_tokens": 5}, "draft_tokens are steps + 1"),
    ({"candidate_step": [1, 3]}, "no such setting; did you mean 'candidate_steps'?"),
]


@pytest.mark.parametrize(("changes", "problem"), WRONG)
def test_wrong_candidates_are_refused_on_controller_and_host(plan, changes, problem):
    arm = {**EAGLE3, "speculation": EAGLE3["speculation"] | changes}
    assert problem in " ".join(server_flags.speculation_problems(arm["speculation"]))
    with pytest.raises(AerieError) as raised:
        plan(arm)
    assert problem in str(raised.value)
    checked = {"speculation": arm["speculation"]}
    found = list(settings.check_arms({"a": checked}, {"draft": {}}))
    assert [text for text in found if problem in text and text.startswith("sglang_server_arms.a.")]


@pytest.mark.parametrize("flag", ["speculative_adaptive", "--speculative-adaptive-config"])
@pytest.mark.parametrize("place", ["arm", "instance", "common", "launch"])
def test_flags_that_candidates_set_are_refused_beside_them(plan, place, flag):
    value = True if flag.endswith("adaptive") else "/etc/a.json"
    changes: dict[str, Any] = {
        "arm": {},
        "instance": {"instance": {"flags": {flag: value}}},
        "common": {"flags": {flag: value}},
        "launch": {"launch_flags": {flag: value}},
    }[place]
    arm = {**ADAPTIVE, "flags": {flag: value} if place == "arm" else {}}
    with pytest.raises(AerieError, match="set candidate_steps alone and leave the flag out"):
        plan(arm, **changes)
    plain = {**EAGLE3, "flags": {flag: value} if place == "arm" else {}}
    assert plan(plain, **changes).adaptive == {}


def test_the_controller_refuses_the_same_flags():
    flags = {"speculative_adaptive": True}
    speculation = {**SPECULATION}
    (found,) = settings.check_arms({"a": {"speculation": speculation, "flags": flags}}, ["draft"])
    assert found.startswith("sglang_server_arms.a.flags.speculative_adaptive: the arm's spec")
    instance = {"arm": "a", "model": "m", "port": 1, "flags": flags}
    arms = {"a": {"speculation": speculation}, "b": {"speculation": EAGLE3["speculation"]}}
    (found,) = settings.check_instances({"main": instance}, arms, ["m"])
    assert found.startswith("sglang_server_instances.main.flags.speculative_adaptive")
    assert list(settings.check_instances({"main": instance | {"arm": "b"}}, arms, ["m"])) == []


def test_a_release_without_slots_is_refused(plan):
    with pytest.raises(AerieError, match=r"take 0\.5\.13 or newer") as raised:
        plan(ADAPTIVE, arguments=[])
    assert "has no such flag" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}, "enable-dp-attention"),
        ({"enable_multi_layer_eagle": True}, "enable-multi-layer-eagle"),
        ({"enable_two_batch_overlap": True}, "enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "enable-pdmux"),
        ({"attn_dp_size": 2}, "attn-dp-size"),
    ],
)
def test_flags_with_which_sglang_would_ignore_candidates_are_refused(flags, name):
    (found,) = launch_checks.adaptive_problems(flags)
    assert f"no effect with {name}" in found
    assert list(launch_checks.adaptive_problems(dict.fromkeys(flags, None))) == []


def test_such_a_flag_keeps_a_server_from_starting(plan):
    with pytest.raises(AerieError, match="candidate_steps has no effect with enable-dp-attention"):
        plan(ADAPTIVE, flags={"enable-dp-attention": True})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps_by_batch": {"1": 3, "17": 2}}, "has 2 steps, and arm adaptive names 1 and 3"),
        ({"steps_by_batch": {"1": 3, "17": 0}}, "it must have draft steps by batch size"),
        ({"steps_by_batch": {"17": 1}}, "it must have draft steps by batch size, from 1 on"),
        ({"steps_by_batch": [3]}, "it must have draft steps by batch size"),
    ],
)
def test_a_calibrations_table_that_does_not_fit_is_refused(plan, changes, reason):
    with pytest.raises(AerieError) as raised:
        plan(AUTO, calibration=CALIBRATION | changes)
    assert reason in str(raised.value)
    assert "playbooks/calibrate.yml" in str(raised.value)


@pytest.mark.parametrize("candidates", [[1, 2, 3], None])
def test_a_calibration_of_other_candidates_is_refused(plan, candidates):
    arm = {**AUTO, "speculation": SPECULATION | {"candidate_steps": candidates}}
    with pytest.raises(AerieError, match=r"the calibration is of arm adaptive with .*candidate_ste"):
        plan(arm, calibration=CALIBRATION)


def test_the_order_of_candidates_makes_no_difference(plan):
    arm = {**AUTO, "speculation": SPECULATION | {"candidate_steps": [1, 3]}}
    assert plan(arm, calibration=CALIBRATION).adaptive == plan(AUTO, calibration=CALIBRATION).adaptive


# ---- dynamic beside adaptive speculation by hand -----------------------------------------------------

BY_HAND = {"speculative_adaptive": True}
DYNAMIC = {
    "speculative_algorithm": "EAGLE3",
    "speculative_dynamic_disable_threshold": "8",
    **BY_HAND,
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("{", "can't be read"),
        ("[]", "it is no JSON object"),
        ('{"ema_alpha": 0.1}', "it has no batch size"),
        ('{"1": {"steps": [3]}}', "1 has no candidate_steps"),
        ('{"1": {"candidate_steps": [3]}, "33": {"candidate_steps": [0]}}', "has step 0"),
        ('{"1": {"candidate_steps": [3]}, "33": {"candidate_steps": [1]}}', None),
        ('{"ema_alpha": 0.1, "1": {"candidate_steps": [1, 3]}}', None),
    ],
)
@pytest.mark.parametrize("is_relative", [True, False])
def test_a_table_by_hand_is_read_on_the_host(tmp_path, text, problem, is_relative):
    path = tmp_path / "slots.json"
    if text is not None:
        path.write_text(text)
    flags = DYNAMIC | {"speculative_adaptive_config": path.name if is_relative else str(path)}
    found = list(launch_checks.dynamic_problems(flags, None, {}, None, tmp_path))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
    assert all("set the arm's speculation.candidate_steps instead" in text for text in found)


def test_sglangs_own_table_is_refused_beside_dynamic_and_allowed_without(plan):
    dynamic = {**EAGLE3, "dynamic": {"threshold": 8}, "flags": BY_HAND}
    with pytest.raises(AerieError, match="the default table of speculative-adaptive has step 0"):
        plan(dynamic)
    assert "--speculative-adaptive" in plan({**EAGLE3, "flags": BY_HAND}).argv


def test_a_relative_path_counts_from_the_instances_directory(plan, tmp_path):
    flags = BY_HAND | {"speculative_adaptive_config": "slots.json"}
    directory = tmp_path / "instances/main"
    directory.mkdir(parents=True)
    (directory / "slots.json").write_text('{"1": {"candidate_steps": [3]}}')
    made = plan({**EAGLE3, "dynamic": {"threshold": 8}, "flags": flags})
    assert option(made, "--speculative-adaptive-config") == "slots.json"
    assert directory / "adaptive.json" not in made.files()
