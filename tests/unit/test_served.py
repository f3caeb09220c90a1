"""What is measured is told truly: simulated acceptance, which release, which models; nothing secret."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import records, served
from ansible.module_utils.aerie.paths import HostPaths

SPECULATION = {"algorithm": "EAGLE3", "draft_model": "draft"}


def asked(**arm: Any) -> Any:
    return SimpleNamespace(
        run_id="r1",
        host="gpu-01",
        instance="main",
        arm={"name": "eagle3", "speculation": SPECULATION, "environment": {}} | arm,
        models={"target": {"path": "/m/t", "identity": "a" * 64}, "draft": {"path": "/m/d", "identity": "b" * 64}},
        target="target",
        host_info={},
        api_key=None,
        client=None,
    )


@pytest.mark.parametrize(("value", "simulated"), [("2.4", True), ("", False), ("0", False), ("-1", False)])
def test_acceptance_is_simulated_where_the_environment_pins_it(value, simulated):
    told = served.definition(asked(environment={records.PINS[0]: value}), None)
    assert told["acceptance_simulated"] is simulated


def test_nothing_is_simulated_without_speculation():
    assert served.definition(asked(speculation=None, environment={records.PINS[0]: "2.4"}), None)["acceptance_simulated"] is False


@pytest.mark.parametrize(("value", "tested"), [("check", ["triton_target_verify"]), ("grouped", [])])
def test_a_patch_set_in_check_mode_is_told(value, tested):
    found = SimpleNamespace(
        instance={"environment": {"AERIE_TARGET_VERIFY": value}},
        release={"id": "r", "patch_sets": [{"name": "triton_target_verify"}]},
        client=SimpleNamespace(identity=dict),
    )
    told = served.definition(asked(), found)
    assert (told["patch_modes"], told["patch_sets_in_check"]) == ({"triton_target_verify": value}, tested)


def test_models_are_told_by_role_with_their_identity_and_secrets_are_not():
    told = served.definition(asked(environment={"HF_TOKEN": "sesame"}), None)
    assert told["models"] == {"target": {"name": "target", "identity": "a" * 64}, "draft": {"name": "draft", "identity": "b" * 64}}
    assert "sesame" not in json.dumps(told)


def test_an_instance_that_is_not_there_not_ready_or_of_another_arm_is_refused(tmp_path):
    paths = HostPaths(tmp_path)
    with pytest.raises(AerieError, match="instance main does not exist"):
        served.find(paths, asked(), lambda release: None)
    paths.instance("main").mkdir(parents=True)
    for instance, said in (
        ({"state": "failed"}, "instance main is failed, not ready"),
        ({"state": "ready", "arm": {"name": "baseline"}}, "serves arm baseline, not eagle3"),
    ):
        (paths.instance("main") / "instance.json").write_text(json.dumps(instance))
        with pytest.raises(AerieError, match=said):
            served.find(paths, asked(), lambda release: None)


def test_a_release_without_the_patch_set_is_refused_with_the_variable_to_set(tmp_path):
    assert served.current_release(HostPaths(tmp_path)) is None
    with pytest.raises(AerieError, match="it can't be timed: add phase_profiler to sglang_patches_sets"):
        served.require_patch_set({"id": "0.5.23-abc", "patch_sets": []}, "phase_profiler", "it can't be timed")
    served.require_patch_set({"patch_sets": [{"name": "phase_profiler"}]}, "phase_profiler", "it can't be timed")
