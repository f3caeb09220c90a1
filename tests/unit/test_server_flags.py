"""Flags are checked against the release's own parser, all at once, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.serving import server_flags
from ansible.module_utils.aerie.serving.server_flags import Layer, Parser
from sglang_example import ARGUMENTS, VERSION


@pytest.fixture
def parser(tmp_path: Path) -> Parser:
    path = tmp_path / "server_arguments.json"
    path.write_text(json.dumps(ARGUMENTS))
    return Parser.load(path, VERSION)


def line(parser: Parser, flags: dict[str, Any], origin: str = "arm a") -> server_flags.CommandLine:
    return server_flags.command_line(parser, [Layer(origin, flags)])


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ({"dtype": "float32"}, ["--dtype", "float32"]),
        ({"mem_fraction_static": 0.85}, ["--mem-fraction-static", "0.85"]),
        ({"--max-running-requests": "64"}, ["--max-running-requests", "64"]),
        ({"enable-dp-attention": True}, ["--enable-dp-attention"]),
        ({"enable-dp-attention": False}, []),
        ({"dtype": None}, []),
        ({"cuda-graph-bs-decode": [1, 2, 4]}, ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ({"chunked-prefill-size": -1}, ["--chunked-prefill-size=-1"]),
        ({"json-model-override-args": {"rope_theta": 1}}, ["--json-model-override-args", '{"rope_theta":1}']),
        ({"model-loader-extra-config": {"threads": [1, 2]}}, ["--model-loader-extra-config", '{"threads":[1,2]}']),
        ({"enable-fused-qk-norm-rope": False}, ["--no-enable-fused-qk-norm-rope"]),
        ({"enable-fused-qk-norm-rope": None}, []),
    ],
)
def test_a_setting_becomes_the_words_that_argparse_wants(parser, flags, arguments):
    found = line(parser, flags)
    assert found.problems == ()
    assert list(found.arguments) == arguments


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"max-runing-requests": 4}, "arm a: --max-runing-requests: SGLang 0.5.23 has no such flag; did you mean 'max-running-requests'?"),
        ({"mem-frac": 0.8}, "an abbreviation of --mem-fraction-static"),
        ({"dtype": "float23"}, "'float23' is not one of auto, half"),
        ({"max-running-requests": "many"}, "needs a whole number, got 'many'"),
        ({"max-running-requests": 4.5}, "needs a whole number, got '4.5'"),
        ({"max-running-requests": True}, "needs a whole number"),
        ({"mem-fraction-static": "most"}, "needs a number, got 'most'"),
        ({"dtype": True}, "needs one of auto, half"),
        ({"enable-dp-attention": 1}, "takes no value, got 1: write true"),
        ({"max-running-requests": [1, 2]}, "takes one value, got a list of 2"),
        ({"cuda-graph-bs-decode": []}, "needs a whole number"),
        ({"cuda-graph-bs-decode": [1, "x"]}, "needs a whole number, got 'x'"),
        ({"model-loader-extra-config": "{"}, "needs JSON"),
        ({"tp-size": 2, "tensor_parallel_size": 2}, "--tensor_parallel_size and --tp-size are the same flag"),
        ({"tp-size": 2, "tp_size": 2}, "--tp_size and --tp-size are the same flag"),
        ({"port": 1}, "set the instance's port and leave the flag out"),
        ({"model": "x"}, "set the instance's model and leave the flag out"),
        ({"speculative-num-steps": 3}, "set the arm's speculation.steps and leave the flag out"),
    ],
)
def test_a_setting_that_the_release_would_refuse_is_refused_first(parser, flags, problem):
    found = line(parser, flags)
    assert len(found.problems) == 1
    assert problem in found.problems[0]
    assert found.problems[0].startswith("arm a: --")


def test_all_problems_come_at_once_each_with_its_origin(parser):
    layers = [Layer("sglang_server_flags", {"dtyp": "x"}), Layer("arm a", {"dtype": "x"}), Layer("instance main", {"tp-size": "two"})]
    problems = server_flags.command_line(parser, layers).problems
    assert sorted(problem.partition(":")[0] for problem in problems) == ["arm a", "instance main", "sglang_server_flags"]


def test_a_later_layer_wins_under_any_spelling_and_null_takes_a_flag_away(parser):
    layers = [Layer("common", {"tp-size": 2, "dtype": "half", "device": "cuda"}), Layer("arm", {"tensor_parallel_size": 4, "dtype": None})]
    found = server_flags.command_line(parser, layers)
    assert list(found.arguments) == ["--device", "cuda", "--tensor-parallel-size", "4"]


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ({"cuda-graph-max-bs": 16}, ["--cuda-graph-max-bs-decode", "16"]),
        ({"disable-piecewise-cuda-graph": True}, ["--cuda-graph-backend-prefill", "disabled"]),
        ({"disable-piecewise-cuda-graph": False}, []),
    ],
)
def test_an_old_name_is_translated_with_a_warning(parser, flags, arguments):
    found = line(parser, flags)
    assert list(found.arguments) == arguments
    assert found.problems == ()
    assert "the old name is gone by 0.5.23" in found.warnings[0]


def test_a_new_name_is_translated_for_a_release_that_has_only_the_old():
    old = server_flags.Argument(("--cuda-graph-max-bs",), "cuda_graph_max_bs", "int", None, None, False, "")
    found = line(Parser("0.5.9", (old,)), {"cuda-graph-max-bs-decode": 16})
    assert list(found.arguments) == ["--cuda-graph-max-bs", "16"]
    assert "still calls it --cuda-graph-max-bs" in found.warnings[0]


def test_a_deprecated_flag_warns_with_the_releases_own_cure_unless_the_profile_sets_it(parser):
    warnings = line(parser, {"disable-cuda-graph": True}).warnings
    assert len(warnings) == 1
    assert "deprecated in SGLang 0.5.23: Use --cuda-graph-backend" in warnings[0]
    assert server_flags.command_line(parser, [Layer("profile cpu", {"disable-cuda-graph": True}, owner=True)]).warnings == ()


@pytest.mark.parametrize(
    ("speculation", "problem"),
    [
        ({"algorithm": "EAGLE3", "steps": 3, "topk": 1, "draft_tokens": 6}, "set draft_tokens to 4 (is 6) or steps to 5 (is 3)"),
        ({"algorithm": "EAGLE3", "steps": 3}, "topk and draft_tokens missing"),
        ({"algorithm": "EAGLE3", "steps": 0, "topk": 1, "draft_tokens": 1}, "steps: needs a whole number above 0"),
        ({"steps": 3}, "speculation.algorithm is missing"),
        ({"algorithm": "NGRAM", "step": 3}, "speculation.step: no such setting; did you mean 'steps'?"),
    ],
)
def test_a_speculation_that_contradicts_itself_is_refused_with_the_cure(speculation, problem):
    assert problem in next(server_flags.speculation_problems(speculation))


def test_a_tree_may_have_any_number_of_draft_tokens():
    assert list(server_flags.speculation_problems({"algorithm": "EAGLE3", "steps": 5, "topk": 4, "draft_tokens": 8})) == []


def test_a_damaged_list_of_arguments_names_the_file_and_the_cure(tmp_path):
    path = tmp_path / "server_arguments.json"
    path.write_text('[{"flags": ["--x"]}]')
    with pytest.raises(AerieError, match=r"server_arguments\.json: .*make the release again"):
        Parser.load(path, VERSION)
