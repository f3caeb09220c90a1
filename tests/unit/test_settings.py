"""Settings that can't work are refused, each with what is wrong, where, and what to do."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from ansible.module_utils.aerie import settings

EAGLE3 = {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4}
GOOD: dict[str, Any] = {
    "aerie_profile": "cpu",
    "aerie_root": "/opt/aerie",
    "aerie_results": "/srv/results",
    "aerie_lease_seconds": 900,
    "sglang_models_catalog": {"target": {"path": "/m/t", "source": "host"}, "draft": {"path": "/m/d", "source": "controller"}},
    "sglang_server_arms": {"baseline": {"speculation": None}, "eagle3": {"speculation": EAGLE3, "flags": {"tp-size": 2}}},
    "sglang_server_instances": {"main": {"arm": "eagle3", "model": "target", "port": 30000}},
    "sglang_server_environment": {"OMP_NUM_THREADS": 8},
    "sglang_patches_sets": ["phase_profiler"],
    "sglang_release_version": None,
    "sglang_benchmark_experiment": "demo",
    "sglang_benchmark_instance": "main",
}
BUILD = {
    "lock": "locks/x.txt",
    "torch": "2.13.0",
    "torch_in_lock": True,
    "sglang_sha256": {"3.11": "0" * 64},
    "disk_gib": 3,
    "verified_on": ["cpu"],
}
VERSIONS = {
    "default": {"cpu": "0.5.23", "cuda": "0.5.15.post1"},
    "supervisor": {"lock": "locks/s.txt"},
    "versions": {"0.5.23": {"kernel": "k", "builds": {"cpu": BUILD}}, "0.5.15.post1": {"kernel": "k", "builds": {"cuda": BUILD}}},
}
EXPERIMENT = {
    "name": "demo",
    "arms": ["baseline", "eagle3"],
    "workload": {"dataset": "random-ids", "input_len": 8, "output_len": 8, "concurrency": [1]},
}
PROJECT = settings.Project(["phase_profiler", "tuner"], {"demo": EXPERIMENT, "night": {**EXPERIMENT, "arms": ["eagle4"]}}, VERSIONS)


ON_GPUS: dict[str, Any] = GOOD | {
    "aerie_profile": "cuda",
    "sglang_server_flags": {"tensor-parallel-size": 2},
    "sglang_server_instances": {
        "first": {"arm": "eagle3", "model": "target", "port": 30000, "gpus": [0, 1]},
        "second": {"arm": "baseline", "model": "target", "port": 30001, "gpus": [2, 3]},
    },
    "sglang_benchmark_instance": "first",
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the good settings with the value at the dotted ``path`` replaced."""
    result = copy.deepcopy(GOOD)
    *parents, last = path.split("/")
    place = result
    for key in parents:
        place = place[key]
    place[last] = value
    return result


def test_good_settings_have_no_problem():
    assert settings.check(GOOD, PROJECT) == []


def test_instances_on_gpus_of_their_own_have_no_problem():
    assert settings.check(ON_GPUS, PROJECT) == []


@pytest.mark.parametrize(
    ("instance", "change", "problem"),
    [
        (
            "second",
            {"gpus": [1, 2]},
            "GPU 1 belongs to instances first and second: give each GPUs of its own",
        ),
        (
            "second",
            {"gpus": [0, 1]},
            "GPUs 0 and 1 belong to instances first and second: give each GPUs of its own",
        ),
        ("second", {"gpus": None}, "second has no gpus, and its flags use 2: give each GPUs of its"),
        ("second", {"gpus": None, "flags": {"base-gpu-id": 1}}, "GPU 1 belongs to instances first and"),
        ("second", {"flags": {"tp_size": 4}}, "its flags use 4 GPUs (tp-size x pp-size x dp-size), gpus"),
        ("second", {"gpus": [2]}, "instance second: its flags use 2 GPUs"),
        ("second", {"gpus": [2, 3, 4, 5]}, "instance second: gpus gives 4, its flags use 2"),
        ("second", {"flags": {"pp-size": 2}}, "instance second: its flags use 4 GPUs"),
    ],
)
def test_gpus_that_cannot_serve_their_instances_are_refused(instance, change, problem):
    values = copy.deepcopy(ON_GPUS)
    values["sglang_server_instances"][instance] |= change
    problems = settings.check(values, PROJECT)
    assert len(problems) == 1, problems
    assert problem in problems[0]


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": None, "flags": {"base-gpu-id": 2}},
        {"gpus": [2, 3, 4, 5], "flags": {"tp-size": 4}},
        # With DP attention the replicas share the GPUs of tensor parallelism.
        {"flags": {"dp-size": 2, "enable-dp-attention": True}},
        {"gpus": [2], "flags": {"tp-size": None}},
    ],
)
def test_gpus_are_counted_as_sglang_counts_them(change):
    values = copy.deepcopy(ON_GPUS)
    values["sglang_server_instances"]["second"] |= change
    assert settings.check(values, PROJECT) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"tp_size": "two"}, "sglang_server_flags.tp_size is 'two': it must be a whole number"),
        ({"tp_size": 2, "tp-size": 4}, "sglang_server_flags: tp_size and tp-size are the same flag: write one of them"),
        ({"tp_size": 2, "tensor-parallel-size": 2}, "tp_size and tensor-parallel-size are the same flag"),
        ({"mem-fraction-static": 0.9, "mem_fraction_static": 0.8}, "are the same flag: write one of them"),
    ],
)
def test_flags_that_contradict_themselves_are_refused(flags, problem):
    problems = settings.check(ON_GPUS | {"sglang_server_flags": {"pp-size": 1} | flags}, PROJECT)
    assert any(problem in text for text in problems), problems


def test_gpus_are_checked_for_each_arm_that_an_experiment_starts():
    values = copy.deepcopy(ON_GPUS)
    values["sglang_server_arms"]["baseline"]["flags"] = {"tp-size": 4}
    values["sglang_server_instances"]["second"]["arm"] = "eagle3"
    problems = settings.check(values, PROJECT)
    assert len(problems) == 1, problems
    assert problems[0].startswith("instance first: its flags use 4 GPUs")
    assert problems[0].endswith("(with arm baseline of the experiment)")


def test_an_experiment_may_name_the_instance_that_it_measures():
    values = copy.deepcopy(ON_GPUS) | {"sglang_benchmark_instance": None}
    values["sglang_server_arms"]["baseline"]["flags"] = {"tp-size": 4}
    values["sglang_server_instances"]["second"]["arm"] = "eagle3"
    own = settings.Project(["phase_profiler"], {"demo": {**EXPERIMENT, "instance": "second"}}, VERSIONS)
    assert [problem.partition(":")[0] for problem in settings.check(values, own)] == ["instance second"]


def test_the_cpu_profile_serves_without_gpus():
    problems = settings.check(changed("sglang_server_instances/main/gpus", [0, 1]), PROJECT)
    assert problems == ["sglang_server_instances.main.gpus is [0, 1]: the profile cpu serves without GPUs: leave gpus out"]


@pytest.mark.parametrize(
    ("name", "arm"),
    [("speculation", None), ("flags", {"tp_size": 2}), ("options", ["x"]), ("speculation", EAGLE3)],
)
def test_a_setting_that_is_indented_too_little_is_no_arm(name, arm):
    problems = settings.check(changed(f"sglang_server_arms/{name}", arm), PROJECT)
    assert problems == [f"sglang_server_arms.{name} is no arm but a setting of one: indent `{name}:` under the arm that it belongs to"]


def test_an_arm_may_have_the_name_of_a_setting():
    assert settings.check(changed("sglang_server_arms/dynamic", {"speculation": EAGLE3}), PROJECT) == []


@pytest.mark.parametrize(("name", "value"), [("gpus", [2, 3]), ("port", 30001), ("flags", {"tp": 2})])
def test_a_setting_that_is_indented_too_little_is_no_instance(name, value):
    problems = settings.check(changed(f"sglang_server_instances/{name}", value), PROJECT)
    assert problems == [
        f"sglang_server_instances.{name} is no instance but a setting of one: indent `{name}:` under the instance that it belongs to"
    ]


@pytest.mark.parametrize(
    ("algorithm", "suggestion"),
    [
        ("EAGEL3", "did you mean 'EAGLE3' or 'EAGLE'?"),
        ("eagle-3", "SGLang calls it EAGLE3"),
        ("MTP", "SGLang calls it NEXTN"),
        ("MEDUSA", "SGLang has no algorithm 'MEDUSA'"),
    ],
)
def test_an_algorithm_that_sglang_does_not_have_is_refused(algorithm, suggestion):
    problems = settings.check(changed("sglang_server_arms/eagle3/speculation/algorithm", algorithm), PROJECT)
    assert len(problems) == 1, problems
    assert problems[0].startswith("sglang_server_arms.eagle3.speculation.algorithm: SGLang has no algorithm")
    assert suggestion in problems[0]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "eagle3", "STANDALONE", "DFLASH"])
def test_an_algorithm_that_needs_a_draft_is_refused_without(algorithm):
    speculation = {key: value for key, value in EAGLE3.items() if key != "draft_model"}
    arm = {"speculation": speculation | {"algorithm": algorithm}}
    problems = settings.check(changed("sglang_server_arms/eagle3", arm), PROJECT)
    assert problems == [
        f"sglang_server_arms.eagle3.speculation.draft_model is missing: {algorithm.upper()} needs one, "
        "the name of a model in sglang_models_catalog"
    ]


def test_settings_of_roles_that_are_not_there_are_not_missed():
    assert settings.check({}, settings.Project()) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("aerie_root", "opt/aerie", "aerie_root is 'opt/aerie': it must be an absolute path"),
        ("aerie_root", "/", "aerie_root is '/': everything below it is managed"),
        ("aerie_root", "/opt/..", "aerie_root is '/opt/..': everything below it is managed"),
        ("aerie_root", "/opt/aerie/", "aerie_root is '/opt/aerie/': write it as '/opt/aerie'"),
        ("aerie_root", "/opt/my aerie", "white space"),
        ("aerie_results", "results", "aerie_results is 'results': it must be an absolute path"),
        ("aerie_lease_seconds", 5, "aerie_lease_seconds is 5"),
        ("aerie_fetch_limit_gib", 0, "aerie_fetch_limit_gib is 0: it must be more than 0"),
        ("aerie_fetch_limit_files", 0, "aerie_fetch_limit_files is 0: it must be 1 or more"),
        ("sglang_models_catalog/target/sourc", "host", "sglang_models_catalog.target.sourc: no such setting; did you mean 'source'?"),
        ("sglang_models_catalog/target/source", "hosts", "'hosts': it must be host, controller, rsync or hub; did you mean 'host'?"),
        ("sglang_models_catalog/target/source", None, "sglang_models_catalog.target.source is missing"),
        ("sglang_models_catalog/target/path", "models/t", "path is 'models/t': it must be an absolute path"),
        (
            "sglang_models_catalog/target",
            "/m/t",
            "sglang_models_catalog.target is '/m/t': it must be a mapping with source (host, controller, rsync or hub)",
        ),
        ("sglang_server_arms/eagle3/flag", {}, "sglang_server_arms.eagle3.flag: no such setting; did you mean 'flags'?"),
        (
            "sglang_server_arms/eagle3/speculation/draft_model",
            "drafts",
            "draft_model: 'drafts' is not one of sglang_models_catalog (draft and target); did",
        ),
        ("sglang_server_arms/eagle3/speculation/draft_tokens", 6, "sglang_server_arms.eagle3.speculation: topk 1 drafts a chain"),
        ("sglang_server_arms/eagle3/speculation", "EAGLE3", "speculation is 'EAGLE3': it must be null or a mapping"),
        (
            "sglang_server_arms/eagle3/dynamic",
            {"threshold": "x"},
            "sglang_server_arms.eagle3.dynamic.threshold: needs a whole number of requests",
        ),
        ("sglang_server_arms/baseline/dynamic", {"threshold": 8}, "sglang_server_arms.baseline.dynamic: the arm doesn't speculate"),
        ("sglang_server_arms/eagle3/flags", ["tp-size"], "sglang_server_arms.eagle3.flags is ['tp-size']: it must be a mapping"),
        (
            "sglang_server_arms/eagle3/flags",
            {"port": 1},
            "sglang_server_arms.eagle3.flags.port: set the instance's port and leave the flag out",
        ),
        ("sglang_server_arms/eagle 3", {}, "the name becomes part of files and units"),
        (
            "sglang_server_instances/a.b",
            {"arm": "eagle3", "model": "target", "port": 1},
            "sglang_server_instances.a.b: the name becomes part of files and units",
        ),
        ("sglang_server_instances/main/arm", "eagle", "sglang_server_instances.main.arm: 'eagle' is not one of sglang_server_arms"),
        ("sglang_server_instances/main/model", "targe", "did you mean 'target'?"),
        ("sglang_server_instances/main/ports", 1, "sglang_server_instances.main.ports: no such setting; did you mean 'port'?"),
        ("sglang_server_instances/main/port", None, "sglang_server_instances.main.port is missing"),
        ("sglang_server_instances/main/port", 70000, "port is 70000: it must be a number from 1 to 65535"),
        ("sglang_server_instances/main/port", True, "port is True: it must be a number"),
        ("sglang_server_instances/main/gpus", [0, 0], "gpus is [0, 0]: it must be a list of different GPU numbers"),
        ("sglang_server_instances/main/host", "0.0.0.0", "set sglang_server_api_key"),
        (
            "sglang_server_instances/second",
            {"arm": "eagle3", "model": "target", "port": 30000},
            "port 30000 belongs to instances main and second",
        ),
        ("sglang_server_environment/OMP_NUM_THREADS", True, 'write the text that the program reads in quotes, as "1"'),
        (
            "sglang_server_environment/AERIE_TARGET_VERIFY",
            "on",
            "sglang_server_environment.AERIE_TARGET_VERIFY must be grouped, extend or check (is on)",
        ),
        ("sglang_server_environment/A-B", 1, "'A-B' is no name of an environment variable"),
        ("sglang_server_environment/A", [1], "sglang_server_environment.A is [1]: it must be a text or a number"),
        (
            "sglang_patches_sets",
            ["phase_profile"],
            "'phase_profile' is not one of the sets under patches/ (phase_profiler and tuner); did you mean 'phase",
        ),
        ("sglang_patches_sets", ["tuner", "tuner"], "sglang_patches_sets names 'tuner' twice"),
        (
            "sglang_patches_golden_prompts",
            "no/such.json",
            "sglang_patches_golden_prompts is 'no/such.json': there is no such file in the project",
        ),
        ("sglang_release_version", "0.5.24", "SGLang 0.5.24 has no lock for profile cpu"),
        ("sglang_release_version", "0.5.15.post1", "has no lock for profile cpu (it has one for cuda)"),
        ("sglang_benchmark_experiment", "demos", "'demos' is not one of the files of experiments/ (demo and night); did you mean 'demo'?"),
        (
            "sglang_benchmark_experiment",
            "night",
            "experiments/night.yml: experiment 'demo': arms: 'eagle4' is not one of sglang_server_arms",
        ),
        ("sglang_benchmark_instance", "mian", "sglang_benchmark_instance: 'mian' is not one of sglang_server_instances (main)"),
    ],
)
def test_each_mistake_is_one_problem_that_says_where(path, value, message):
    problems = settings.check(changed(path, value), PROJECT)
    assert [problem for problem in problems if message in problem], problems
    assert len(problems) == 1


def test_an_api_key_opens_a_server_to_others_and_is_never_shown():
    opened = changed("sglang_server_instances/main/host", "0.0.0.0") | {"sglang_server_api_key": "s3cret"}
    assert settings.check(opened, PROJECT) == []
    assert "s3cret" not in str(settings.check(opened | {"aerie_root": "x"}, PROJECT))


def test_all_mistakes_are_told_at_once():
    wrong = changed("sglang_server_instances/main/arm", "nope") | {
        "aerie_root": "/",
        "sglang_patches_sets": ["nope"],
        "sglang_release_version": "9",
    }
    assert len(settings.check(wrong, PROJECT)) == 4


@pytest.mark.parametrize("name", [name for name, value in GOOD.items() if isinstance(value, dict | list)])
@pytest.mark.parametrize("value", [None, "text", 3, [1], {"x": None}])
def test_a_value_of_another_type_never_breaks_the_check(name, value):
    settings.check(GOOD | {name: value}, PROJECT)


def test_a_data_set_that_would_kill_the_server_is_refused_before_a_host_is_touched(tmp_path):
    turns = [{"value": ""}, {"value": "an answer"}]
    (tmp_path / "set.json").write_text(json.dumps([{"conversations": turns}]))
    sharegpt = {
        "dataset": "sharegpt",
        "path": "set.json",
        "output_len": 8,
        "concurrency": [1],
        "minimum_requests": 1,
        "requests_per_client": 1,
    }
    project = settings.Project(["phase_profiler"], {"demo": {**EXPERIMENT, "workload": sharegpt}}, VERSIONS, tmp_path)
    (problem,) = settings.check(GOOD, project)
    assert "experiments/demo.yml" in problem and "entry 0" in problem and "its prompt is empty" in problem
    turns[0]["value"] = "a prompt"
    (tmp_path / "set.json").write_text(json.dumps([{"conversations": turns}]))
    assert settings.check(GOOD, project) == []


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("sglang_release_adopt_environment", "python3", "must be an absolute path"),
        ("sglang_release_adopt", "/srv/sglang/../x", "in its shortest spelling"),
        ("sglang_release_adopt", "/opt/aerie/releases/x", "is below aerie_root"),
    ],
)
def test_what_is_adopted_is_named_by_its_path_and_is_not_aeries_own(name, path, message):
    (problem,) = settings.check(GOOD | {name: path}, PROJECT)
    assert message in problem


@pytest.mark.parametrize("name", ["sglang_release_adopt_environment", "sglang_release_adopt"])
def test_an_adopted_version_needs_no_lock(name):
    adopted = {name: "/srv/x", "sglang_release_version": "0.5.9", "sglang_release_wheels": "/srv/wheels"}
    assert settings.check(GOOD | adopted, PROJECT) == []
