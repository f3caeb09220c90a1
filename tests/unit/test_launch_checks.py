"""A draft that does not fit, a taken port, an open door: known before a model is loaded."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Any

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.serving import launch_checks
from sglang_example import DRAFT, TARGET

from aerie_controller import patch_sets
from ports import free_port

HOLD_PORT = (
    "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], flush=True); time.sleep(600)"
)


def problems(algorithm: str, target: dict[str, Any], draft: dict[str, Any] | None) -> list[str]:
    return list(launch_checks.draft_problems(algorithm, "t", target, "d" if draft is not None else None, draft))


@pytest.mark.parametrize(
    ("algorithm", "target", "draft"),
    [
        ("EAGLE3", TARGET, DRAFT),
        ("EAGLE3", TARGET, DRAFT | {"hidden_size": 64, "target_hidden_size": 128}),
        ("EAGLE3", {"architectures": ["Llava"], "text_config": {"hidden_size": 128, "vocab_size": 1024}}, DRAFT),
        ("EAGLE3", TARGET, DRAFT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}),
        ("EAGLE", TARGET, DRAFT | {"architectures": ["LlamaForCausalLMEagle"]}),
        ("EAGLE", {**TARGET, "architectures": ["DeepseekV3ForCausalLM"]}, None),
        ("STANDALONE", TARGET, TARGET | {"hidden_size": 32}),
        ("NGRAM", TARGET, None),
    ],
)
def test_a_fitting_draft_passes(algorithm, target, draft):
    assert problems(algorithm, target, draft) == []


@pytest.mark.parametrize(
    ("algorithm", "draft", "problem"),
    [
        ("EAGLE3", DRAFT | {"architectures": ["LlamaForCausalLMEagle"]}, "LlamaForCausalLMEagle is no EAGLE-3 draft"),
        ("EAGLE", DRAFT, "set speculation.algorithm to EAGLE3"),
        ("EAGLE3", DRAFT | {"architectures": []}, "names no architecture"),
        ("EAGLE3", DRAFT | {"hidden_size": 256}, "hidden states of 256, the target's have 128"),
        ("EAGLE3", DRAFT | {"target_hidden_size": 256}, "hidden states of 256, the target's have 128"),
        ("EAGLE3", DRAFT | {"vocab_size": 2048}, "vocab_size is 2048 in the draft, 1024 in the target"),
        ("EAGLE3", DRAFT | {"draft_vocab_size": 4096}, "draft_vocab_size 4096 exceeds vocab_size 1024"),
        ("EAGLE3", None, "speculation.draft_model is missing: EAGLE3 needs one for t"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(algorithm, draft, problem):
    found = problems(algorithm, TARGET, draft)
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    ("host", "key", "refused"),
    [("127.0.0.1", None, 0), ("localhost", None, 0), ("::1", None, 0), ("0.0.0.0", None, 1), ("gpu1", None, 1), ("0.0.0.0", "k", 0)],
)
def test_only_loopback_may_go_without_a_key(host, key, refused):
    assert len(list(launch_checks.exposure_problems("main", host, key))) == refused


@pytest.mark.parametrize(
    ("gpus", "flags", "problem"),
    [
        (None, {"tp_size": 8}, None),
        ([0], {}, None),
        ([2, 3], {"tp_size": 2}, None),
        ([0, 1], {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, None),
        ([0], {"tp_size": 2}, "use 2 GPUs"),
        ([0, 1], {"tp_size": 2, "dp_size": "2"}, "use 4 GPUs"),
        ([0, 1], {}, "set tp-size to 2, or list 1"),
        ([1, 1], {"tp_size": 2}, "names one twice"),
    ],
)
def test_gpus_and_parallelism_must_agree(gpus, flags, problem):
    found = list(launch_checks.gpu_problems("main", gpus, flags))
    assert [problem in text for text in found] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("argv", "gpus"),
    [
        (["python", "-m", "sglang.launch_server", "--enable-metrics", "--tp-size", "4"], [0, 1, 2, 3]),
        (["--tensor-parallel-size=2", "--base-gpu-id", "4"], [4, 5]),
        (["--tp-size", "2", "--gpu-id-step", "2", "--port", "1"], [0, 2]),
        (["--model-path", "/m"], [0]),
    ],
)
def test_the_gpus_of_a_server_without_a_list_follow_from_its_command_line(argv, gpus):
    flags = launch_checks.parallel_flags(launch_checks.flags_of_argv(argv))
    assert launch_checks.gpus_used(None, flags) == gpus


def test_gpus_of_an_instance_that_runs_are_refused():
    running = {"old": [0, 1], "other": [6, 7]}
    (problem,) = launch_checks.shared_gpu_problems("main", [1, 2, 3], running)
    assert problem.startswith("instance main: GPU 1 is used by instance old, which runs on this host: ")
    assert list(launch_checks.shared_gpu_problems("main", [2, 3], running)) == []


@pytest.fixture
def holder():
    """Start processes that hold a port, with variables of their own; return (process id, port)."""
    started = []

    def hold(**variables: str) -> tuple[int, int]:
        process = subprocess.Popen([sys.executable, "-c", HOLD_PORT], stdout=subprocess.PIPE, text=True, env=variables)
        started.append(process)
        return process.pid, int(process.stdout.readline())

    yield hold
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_taken_port_is_refused_naming_who_holds_it(holder):
    pid, port = holder(AERIE_INSTANCE="other", AERIE_ROOT="/opt/aerie")
    (found,) = launch_checks.port_problems("main", "/opt/aerie", "127.0.0.1", port, list)
    assert f"port {port} is taken by process {pid} ({sys.executable} -c" in found
    assert "instance other of /opt/aerie" in found


def test_our_own_instance_holds_its_port_rightly(holder):
    pid, port = holder(AERIE_INSTANCE="main", AERIE_ROOT="/opt/aerie")
    assert processes.listeners(port)[0].pid == pid
    assert list(launch_checks.port_problems("main", "/opt/aerie", "127.0.0.1", port, lambda: [pid])) == []


def test_a_free_port_is_free():
    problems = launch_checks.port_problems("main", "/opt/aerie", "127.0.0.1", free_port(), list)
    assert list(problems) == []


@pytest.mark.parametrize(
    ("environment", "sets", "problem"),
    [
        ({"AERIE_FLASHINFER_PREFILL_PLAN": "host"}, {"flashinfer_prefill_plan"}, None),
        ({"AERIE_FLASHINFER_PREFILL_PLAN": "check"}, {"flashinfer_prefill_plan"}, None),
        ({"AERIE_FLASHINFER_PREFILL_PLAN": "0"}, set(), None),
        ({"AERIE_FLASHINFER_PREFILL_PLAN": "1"}, {"flashinfer_prefill_plan"}, "must be host or check (is 1)"),
        ({"AERIE_FLASHINFER_PREFILL_PLAN": "host"}, {"phase_profiler"}, "has no effect without patch set flashinfer_prefill_plan"),
        ({"AERIE_FLASHINFER_FUSION_SM120": "1"}, {"flashinfer_prefill_plan"}, "not active in release r1: add it to sglang_patches_sets"),
        ({"AERIE_TARGET_VERIFY": "grouped"}, {"triton_target_verify"}, None),
        ({"AERIE_TARGET_VERIFY": "check"}, {"triton_target_verify"}, None),
        ({"AERIE_TARGET_VERIFY": "grouped"}, set(), "has no effect without patch set triton_target_verify"),
        ({"AERIE_TARGET_VERIFY": "extend"}, set(), None),  # what happens there anyway
        ({"AERIE_TARGET_VERIFY": "0"}, set(), None),
        ({"AERIE_TARGET_VERIFY": ""}, {"triton_target_verify"}, None),
        ({"AERIE_TARGET_VERIFY": "on"}, {"triton_target_verify"}, "must be grouped, extend or check (is on)"),
        ({"AERIE_TARGET_VERIFY": "on"}, set(), "must be grouped, extend or check (is on)"),
        ({"PATH": "/bin"}, set(), None),
    ],
)
def test_a_variable_that_would_switch_nothing_on_is_refused(environment, sets, problem):
    found = list(launch_checks.patch_switch_problems(environment, sets, "r1"))
    assert len(found) == (problem is not None)
    assert not problem or problem in found[0]


def test_every_switch_is_of_a_patch_set_that_reads_it():
    for variable, switch in launch_checks.PATCH_SWITCHES.items():
        (one,) = patch_sets.load([switch.patch_set])
        assert any(variable in text for text in one.overlay.values())


@pytest.mark.parametrize(
    ("environment", "name", "mode"),
    [
        ({}, "triton_target_verify", "grouped"),
        ({"AERIE_TARGET_VERIFY": ""}, "triton_target_verify", "grouped"),
        ({"AERIE_TARGET_VERIFY": "0"}, "triton_target_verify", "extend"),
        ({"AERIE_TARGET_VERIFY": "extend"}, "triton_target_verify", "extend"),
        ({"AERIE_TARGET_VERIFY": "check"}, "triton_target_verify", "check"),
        ({}, "flashinfer_prefill_plan", "off"),
        ({"AERIE_FLASHINFER_PREFILL_PLAN": "0"}, "flashinfer_prefill_plan", "off"),
        ({"AERIE_FLASHINFER_PREFILL_PLAN": "check"}, "flashinfer_prefill_plan", "check"),
        ({"AERIE_FLASHINFER_FUSION_SM120": "1"}, "flashinfer_fusion_sm120", "1"),
    ],
)
def test_a_patch_set_with_a_switch_has_a_mode_where_it_is_active(environment, name, mode):
    modes = launch_checks.patch_modes(environment, [{"name": name}, {"name": "phase_profiler"}])
    assert modes == {name: mode}
    assert launch_checks.patch_modes(environment, [{"name": "phase_profiler"}]) == {}
    assert launch_checks.patch_sets_in_check(modes) == [name] * (mode == "check")


def test_the_modes_of_target_verify_are_those_that_its_patch_set_reads(monkeypatch):
    (patch_set,) = patch_sets.load(["triton_target_verify"])
    (source,) = [text for path, text in patch_set.overlay.items() if path.endswith("aerie_triton_target_verify.py")]
    nodes = ast.parse(source).body
    is_needed = lambda node: ast.unparse(node).startswith(("VARIABLE =", "GROUPED, ", "def how("))  # noqa: E731
    scope: dict[str, Any] = {"os": os}
    exec(compile(ast.Module([node for node in nodes if is_needed(node)], []), "overlay", "exec"), scope)
    switch = launch_checks.PATCH_SWITCHES[scope["VARIABLE"]]
    assert (scope["GROUPED"], scope["EXTEND"], scope["CHECK"]) == switch.values
    for value in ("", "0", *switch.values):
        monkeypatch.setenv(scope["VARIABLE"], value)
        assert scope["how"]() == switch.mode(value)
