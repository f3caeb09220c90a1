"""The kernel of target verifications computes what attention is, and fits every GPU that it is for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OVERLAY = Path(__file__).parents[2] / "patches/triton_target_verify/overlay/sglang/srt/layers/attention"
KERNEL = OVERLAY / "aerie_target_verify_kernel.py"
TOLERANCES = {"float32": 1e-5, "float16": 3e-3}
"""In parts of the largest value: rounding of the answer, and of the shares of keys before they are summed up."""

CASES: dict[str, dict[str, Any]] = {
    "grouped heads": {"prefixes": [35, 0, 70]},
    "grouped heads, split": {"prefixes": [35, 0, 70], "splits": 4},
    "more splits than keys": {"prefixes": [3, 0], "splits": 32},
    "a head of its own for each query head": {"prefixes": [20, 33], "heads": 4, "kv_heads": 4, "splits": 2},
    "a head size that is no power of two": {"prefixes": [20, 33], "head_size": 80, "value_size": 80, "splits": 2},
    "values of another size": {"prefixes": [20, 33], "head_size": 96, "value_size": 64, "splits": 2},
    "one token": {"prefixes": [17, 0], "drafted": 1, "splits": 2},
    "more rows than a tile": {"prefixes": [40], "heads": 16, "drafted": 6, "splits": 2},
    "MLA, one KV head": {"prefixes": [40, 7], "kv_heads": 1, "head_size": 576, "value_size": 512, "splits": 3},
    "MLA of another size, a tree": {
        "prefixes": [40, 7],
        "kv_heads": 1,
        "head_size": 288,
        "value_size": 256,
        "is_tree": True,
        "drafted": 9,
        "splits": 2,
    },
    "a tree": {"prefixes": [50, 3], "drafted": 16, "is_tree": True, "splits": 3},
    "a tree of more tokens than 32": {"prefixes": [50], "drafted": 40, "is_tree": True},
    "a logit cap": {"prefixes": [30], "logit_cap": 3.0, "splits": 2},
    "sinks": {"prefixes": [30, 0], "has_sinks": True},
    "sinks, split": {"prefixes": [30, 0], "has_sinks": True, "splits": 3},
    "a sliding window": {"prefixes": [90, 20], "window": 32, "splits": 2},
    "a sliding window, a tree and sinks": {
        "prefixes": [90, 20],
        "window": 32,
        "splits": 4,
        "is_tree": True,
        "drafted": 8,
        "has_sinks": True,
    },
    "an FP8 cache with scales": {
        "prefixes": [40, 9],
        "dtype": "float16",
        "cache_dtype": "fp8",
        "k_scale": 0.5,
        "v_scale": 2.0,
        "splits": 2,
    },
    "float16": {"prefixes": [60, 5], "dtype": "float16", "splits": 2},
}

LEFT = {
    "not causal": "not causal",
    "a temperature by position": "temperature by position",
    "no indices": "not listed",
    "different numbers of tokens": "different numbers",
    "pages of memory": "by pages",
    "integers": "torch.int8",
}
"""What is left to SGLang's kernel, and a part of the reason that the log gives for it."""

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-8B, TP 1": {"heads": 32, "kv_heads": 8, "head_size": 128, "value_size": 128},
    "Llama-8B, six drafted": {"heads": 32, "kv_heads": 8, "head_size": 128, "value_size": 128, "drafted": 6},
    "a draft of 40 heads": {"heads": 40, "kv_heads": 8, "head_size": 128, "value_size": 128},
    "Llama-8B, a tree of 16": {"heads": 32, "kv_heads": 8, "head_size": 128, "value_size": 128, "drafted": 16},
    "Kimi-K2.5, TP 8": {"heads": 8, "kv_heads": 1, "head_size": 576, "value_size": 512},
    "Kimi-K2.5, TP 8, FP8 cache": {"heads": 8, "kv_heads": 1, "head_size": 576, "value_size": 512, "cache_dtype": "fp8"},
    "Kimi-K2.5, TP 8, a tree of 16": {"heads": 8, "kv_heads": 1, "head_size": 576, "value_size": 512, "drafted": 16},
    "Kimi-K2.5, TP 1": {"heads": 64, "kv_heads": 1, "head_size": 576, "value_size": 512},
    "gpt-oss, TP 1": {"heads": 64, "kv_heads": 8, "head_size": 64, "value_size": 64},
    "a head size of 256": {"heads": 16, "kv_heads": 4, "head_size": 256, "value_size": 256},
    "MLA of 288": {"heads": 8, "kv_heads": 1, "head_size": 288, "value_size": 256},
    "float32": {"heads": 32, "kv_heads": 8, "head_size": 128, "value_size": 128, "dtype": "float32"},
    "float32, MLA": {"heads": 8, "kv_heads": 1, "head_size": 576, "value_size": 512, "dtype": "float32"},
}
SHARED_MEMORY = {90: 232448, 120: 101376}
"""Bytes that a block may have. Source: CUDA C++ Programming Guide, compute capabilities 9.0 and 12.0."""
FEWEST_PROGRAMS = 0.5
"""Of a multiprocessor, one request included: splits are a power of two that fits."""
SPILLS = {(90, "Kimi-K2.5, TP 1"): 128, (90, "Kimi-K2.5, TP 8, a tree of 16"): 128, (90, "Kimi-K2.5, TP 8, FP8 cache"): 32}
"""Bytes of a thread's stack that a tile takes: the tile of 64 rows is the fastest nevertheless. All others take none."""
LEFT_TO_SGLANG = (120, "float32, MLA")

FAULTS = {
    "a drafted token sees all": ("((bits[:, None] >> bit[None, :]) & 1) != 0", "bit[None, :] >= 0"),
    "a split ends late": ("end = tl.minimum(begin + length, keys)", "end = tl.minimum(begin + length + BLOCK_N, keys)"),
    "a split ends early": ("end = tl.minimum(begin + length, keys)", "end = tl.minimum(begin + length - 1, keys)"),
    "the lengths are those of the request before": ("start = tl.load(kv_indptr + request)", "start = tl.load(kv_indptr)"),
    "drafted tokens are read from the wrong slots": ("drafted_slots + request * DRAFTED", "drafted_slots"),
    "a split's weight is forgotten": ("weight[:, None] * values", "values / splits"),
    "splits that nobody wrote are merged": ("mask=every < used", "mask=every < splits"),
    "a window is one too wide": ("n[None, :] + WINDOW", "n[None, :] + WINDOW + 1"),
    "a value's scale is forgotten": ("acc * (v_scale / total)", "acc * (1.0 / total)"),
}
FAULT_CASES = {
    "splits that nobody wrote are merged": "more splits than keys",
    "a window is one too wide": "a sliding window",
    "a value's scale is forgotten": "an FP8 cache with scales",
}


def run(python: Path, script: str, *arguments: str) -> list[Any]:
    command = [str(python), str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def errors(kernel_python: Path) -> dict[str, float]:
    """Return the error of each case; one process runs them all, since importing torch takes seconds."""
    results = run(kernel_python, "target_verify_numerics.py", str(KERNEL), *(json.dumps(case) for case in CASES.values()))
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_attention(errors, name):
    assert errors[name] <= TOLERANCES[CASES[name].get("dtype", "float32")]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_kernel_is_seen(kernel_python, tmp_path, name):
    text = KERNEL.read_text()
    right, wrong = FAULTS[name]
    assert right in text
    faulty = tmp_path / "kernel.py"
    faulty.write_text(text.replace(right, wrong))
    case = CASES[FAULT_CASES.get(name, "grouped heads, split")]
    (error,) = run(kernel_python, "target_verify_numerics.py", str(faulty), json.dumps(case))
    assert error > 10 * TOLERANCES[case.get("dtype", "float32")]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_tile_fits_the_gpus_that_it_is_for(kernel_python, capability):
    shapes = [json.dumps(shape) for shape in SHAPES.values()]
    results = run(kernel_python, "target_verify_resources.py", str(KERNEL), str(capability), *shapes)
    for name, resources in zip(SHAPES, results, strict=True):
        assert bool(resources["kernels"]) == ((capability, name) != LEFT_TO_SGLANG), name
        assert all(programs >= FEWEST_PROGRAMS for programs in resources["programs"]), name
        for kernel in resources["kernels"]:
            assert kernel["shared"] <= SHARED_MEMORY[capability], (name, kernel)
            assert kernel["stack"] <= SPILLS.get((capability, name), 0), (name, kernel)


@pytest.fixture(scope="module", params=["grouped", "extend", "check"])
def hook(kernel_python: Path, request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    (result,) = run(kernel_python, "target_verify_hook.py", str(OVERLAY), request.param)
    return request.param, result


def test_verifications_and_the_drafts_extend_are_served_and_nothing_else(hook):
    how, result = hook
    for mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2"):
        assert result[mode]["served"] == (how == "grouped")
        assert not result[mode]["served"] or result[mode]["error"] < 1e-5
    assert not result["EXTEND"]["served"]
    assert not result["DECODE"]["served"]


def test_what_the_kernel_can_not_serve_is_left_to_sglang_and_logged_once(hook):
    how, result = hook
    assert not any(result[name]["served"] for name in LEFT)
    for reason in LEFT.values():
        assert sum(reason in message for message in result["messages"]) == (how != "extend")


def test_check_mode_compares_target_and_draft_and_sees_a_difference(hook):
    how, result = hook
    if how != "check":
        assert result["worst"] == result["worst where the answers differ"] == {}
        return
    assert set(result["worst"]) == {"target layer 3", "draft layer 3"}
    assert all(share < 1e-5 for share in result["worst"].values())
    assert result["worst where the answers differ"]["target layer 3"] > 0.1


def test_check_mode_passes_over_requests_that_pad_a_batch(hook):
    how, result = hook
    assert how != "check" or result["worst where a request pads the batch"]["target layer 3"] < 1e-5


def test_graphs_that_only_verify_or_extend_make_no_decode_buffers_and_others_all(hook):
    how, result = hook
    whole = [16, 16, 16, 16]
    assert result["buffers"].pop("verification") == (whole if how == "extend" else [1, None, 16, 16])
    assert set(map(tuple, result["buffers"].values())) == {tuple(whole)}
