"""An arm's ``dynamic`` becomes a flag and variables, or is refused with the reason and the cure before a server is touched."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.serving import launch_checks, server_flags, server_plan
from sglang_example import ARGUMENTS, DRAFT, EAGLE3, make_host, make_models, make_release, make_request

from aerie_controller import patch_sets

FLAG = {
    "flags": ["--speculative-dynamic-disable-threshold"],
    "dest": "speculative_dynamic_disable_threshold",
    "type": "str",
    "choices": None,
    "nargs": None,
    "default": None,
    "help": "",
}


def arm(**dynamic: Any) -> dict[str, Any]:
    return {**EAGLE3, "dynamic": dynamic}


@pytest.fixture
def plan(tmp_path: Path):
    """Plan a server of a release that has the patch set, or, with ``patched=False``, has not."""

    def make(wanted: dict[str, Any], patched: bool = True, version: str | None = None, **changes: Any) -> server_plan.Plan:
        if not (tmp_path / "current").is_symlink():
            release = make_release(tmp_path, [*ARGUMENTS, FLAG] if patched else ARGUMENTS)
            if version:
                path = release / "release.json"
                path.write_text(json.dumps(json.loads(path.read_text()) | {"sglang_version": version}))
        return server_plan.plan(make_host(tmp_path), make_request(tmp_path, wanted, **changes))

    return make


@pytest.mark.parametrize(
    ("dynamic", "problem"),
    [
        ("auto", "dynamic: needs null or a dictionary with threshold"),
        ({}, "dynamic.threshold is missing: set a number"),
        ({"treshold": 4}, "dynamic.treshold: no such setting; did you mean 'threshold'?"),
        ({"threshold": -1}, "dynamic.threshold: needs a whole number of requests, 0 or more, or auto, got -1"),
        ({"threshold": "many"}, "dynamic.threshold: needs a whole number of requests"),
        ({"threshold": True}, "dynamic.threshold: needs a whole number of requests"),
        ({"threshold": 8, "low": 9}, "dynamic.low: must not exceed dynamic.threshold (8), got 9"),
        ({"threshold": "auto", "low": 9}, "dynamic.low: the calibration says it"),
        ({"threshold": 8, "min_dwell_steps": 1.5}, "dynamic.min_dwell_steps: needs a whole number"),
        ({"threshold": 8, "adapt": "yes"}, "dynamic.adapt: needs true or false"),
    ],
)
def test_a_wrong_dynamic_is_refused_with_the_cure(plan, dynamic, problem):
    assert problem in " ".join(server_flags.dynamic_problems(dynamic, EAGLE3["speculation"]))
    with pytest.raises(AerieError) as raised:
        plan({**EAGLE3, "dynamic": dynamic})
    assert problem in str(raised.value)


def test_without_speculation_there_is_nothing_to_turn_off(plan):
    with pytest.raises(AerieError, match="the arm doesn't speculate"):
        plan({"name": "odd", "speculation": None, "dynamic": {"threshold": 4}})


def test_a_threshold_becomes_a_flag_and_the_rest_a_variable(plan):
    made = plan(arm(threshold=32))
    assert made.argv[made.argv.index("--speculative-dynamic-disable-threshold") + 1] == "32"
    assert "AERIE_DYNAMIC_SETTINGS" not in made.environment
    assert "AERIE_DYNAMIC_CALIBRATION" not in made.environment
    more = plan(arm(threshold="32", low=20, min_dwell_steps="4", adapt=True))
    assert json.loads(more.environment["AERIE_DYNAMIC_SETTINGS"]) == {"low": 20, "min_dwell_steps": 4, "adapt": True}
    assert more.definition != made.definition


@pytest.mark.parametrize("dynamic", [None, {"threshold": 0}])
def test_zero_is_a_threshold_and_null_is_none(plan, dynamic):
    made = plan({**EAGLE3, "dynamic": dynamic})
    assert ("--speculative-dynamic-disable-threshold" in made.argv) is (dynamic is not None)


@pytest.mark.parametrize(
    ("sets", "version", "message"),
    [
        ([], "0.5.23", "patch set dynamic_speculation is not active in release .*: add it to sglang_patches_sets and run"),
        ([], "0.5.13", r"SGLang 0\.5\.13 is too old for it: take 0\.5\.14 or newer"),
        ([{"name": "dynamic_speculation"}], "0.5.23", "was verified before it got patch set dynamic_speculation"),
    ],
)
def test_a_release_that_does_not_know_the_threshold_is_told_apart(sets, version, message):
    (found,) = launch_checks.dynamic_release_problems({"id": "r", "sglang_version": version, "patch_sets": sets})
    with pytest.raises(AerieError, match=message):
        raise AerieError(found)


def test_a_variable_of_a_patch_set_that_is_not_there_is_refused_before_a_start(plan):
    wanted = arm(threshold=4) | {"environment": {"AERIE_FLASHINFER_PREFILL_PLAN": "host"}}
    with pytest.raises(AerieError, match="AERIE_FLASHINFER_PREFILL_PLAN has no effect without patch set flashinfer_prefill_plan"):
        plan(wanted)


@pytest.mark.parametrize(("version", "message"), [(None, "is not active in release"), ("0.5.9", "is too old for it")])
def test_a_server_without_the_patch_set_is_not_started(plan, version, message):
    with pytest.raises(AerieError, match=message) as raised:
        plan(arm(threshold=4), patched=False, version=version)
    assert "has no such flag" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flags": {"max-running-requests": 16}}, "no more than 16 requests run at once"),
        ({"flags": {"enable-dp-attention": True}}, "leave out enable-dp-attention"),
        ({"flags": {"pp-size": 2}, "instance": {"gpus": [0, 1]}}, "set pp-size to 1"),
    ],
)
def test_flags_from_anywhere_that_it_can_not_be_had_with_are_refused(plan, changes, message):
    with pytest.raises(AerieError, match=message) as raised:
        plan(arm(threshold=32), **changes)
    assert "nothing was touched" in str(raised.value)


def refused_by_the_server() -> tuple[tuple[str, Any, str], ...]:
    """Return REFUSED of the patch set's source, which can't be imported without SGLang."""
    (patch_set,) = patch_sets.load(["dynamic_speculation"])
    (source,) = [text for path, text in patch_set.overlay.items() if path.endswith("aerie_dynamic_control.py")]
    texts: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            texts[ast.unparse(node.targets[0])] = node.value.value
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "REFUSED":
            assert isinstance(node.value, ast.Tuple)
            rows = [row.elts for row in node.value.elts if isinstance(row, ast.Tuple)]
            values = [[texts[part.id] if isinstance(part, ast.Name) else ast.literal_eval(part) for part in row] for row in rows]
            return tuple((name, default, why) for name, default, why in values)
    raise AssertionError("no REFUSED")


def test_launch_checks_refuse_by_the_same_table_as_the_server():
    assert refused_by_the_server() == launch_checks.DYNAMIC_REFUSED


OTHER_VALUES = {
    "dcp_size": 2,
    "attn_cp_size": "8",
    "moe_a2a_backend": "deepep",
    "moe_dense_tp_size": 1,
    "enable_deterministic_inference": True,
    "enable_unified_memory": True,
    "enable_hisparse": True,
    "speculative_draft_window_size": 512,
    "enable_lmcache": True,
    "enable_flexkv": True,
    "enable_unified_cache_external_linker": True,
    "radix_cache_backend": "mine",
    "rl_on_policy_target": "fsdp",
}
DYNAMIC_FLAGS = {"speculative_dynamic_disable_threshold": "8", "speculative_algorithm": "EAGLE3"}


@pytest.mark.parametrize(("dest", "default", "why"), launch_checks.DYNAMIC_REFUSED_FLAGS)
def test_each_argument_of_the_table_is_refused_before_a_start_and_its_default_is_not(dest, default, why):
    value = OTHER_VALUES[dest]
    problems = list(launch_checks.dynamic_problems({**DYNAMIC_FLAGS, dest: value}, None, {}))
    assert problems == [f"dynamic speculation {why}: leave out {dest.replace('_', '-')} (is {value})"]
    for harmless in (default, str(default) if isinstance(default, int) and not isinstance(default, bool) else default):
        assert list(launch_checks.dynamic_problems({**DYNAMIC_FLAGS, dest: harmless}, None, {})) == []
    assert list(launch_checks.dynamic_problems({dest: value}, None, {})) == []  # without a threshold


def test_the_reference_names_each_argument_of_the_table():
    page = (Path(__file__).parents[2] / "docs/reference/instance.md").read_text()
    flags = [dest.replace("_", "-") for dest, _, _ in launch_checks.DYNAMIC_REFUSED_FLAGS]
    missing = [flag for flag in flags if f"`{flag}`" not in page and flag != "enable-deterministic-inference"]
    assert missing == []


def test_a_server_that_the_table_refuses_is_not_started(plan, tmp_path):
    row = {**FLAG, "flags": ["--attn-cp-size"], "dest": "attn_cp_size", "type": "int"}
    make_release(tmp_path, [*ARGUMENTS, FLAG, row])
    with pytest.raises(AerieError, match=r"context parallelism: leave out attn-cp-size \(is 2\)") as raised:
        plan(arm(threshold=32), flags={"attn-cp-size": 2})
    assert "nothing was touched" in str(raised.value)


def test_a_tree_is_refused(plan):
    tree = {**arm(threshold=32), "speculation": EAGLE3["speculation"] | {"topk": 4, "draft_tokens": 8}}
    with pytest.raises(AerieError, match=r"not for trees: set speculation\.topk to 1"):
        plan(tree)


def test_a_draft_of_several_layers_is_refused(plan, tmp_path):
    with pytest.raises(AerieError, match="a draft of 2 layers"):
        plan(arm(threshold=32), models=make_models(tmp_path, draft=DRAFT | {"num_hidden_layers": 2}))


def test_a_flag_by_hand_is_checked_alike(plan):
    by_hand = {**EAGLE3, "flags": {"speculative-dynamic-disable-threshold": 48}}
    with pytest.raises(AerieError, match="no more than 48 requests run at once"):
        plan(by_hand)
    with pytest.raises(AerieError, match=r"set the arm's dynamic\.threshold to auto instead of the flag"):
        plan({**EAGLE3, "flags": {"speculative-dynamic-disable-threshold": "auto"}})
