"""Settings for GPUs of one kind are chosen by capability, version, model and parallelism, lie beneath a person's, and are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie import settings
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.serving import gpu_settings, server_flags, server_plan
from ansible.module_utils.aerie.serving.gpu_settings import ModelFacts, Situation
from ansible.module_utils.aerie.specifiers import Version
from sglang_example import ARGUMENTS, BASELINE, DRAFT, EAGLE3, TARGET, _row, _switch, make_host, make_models, make_release, make_request

from aerie_controller import patch_sets

VALUES = yaml.safe_load((Path(__file__).parents[2] / "profiles/cuda/gpu_settings.yml").read_text())
TABLE = gpu_settings.Table.of(VALUES)
SM120 = frozenset({"12.0"})
BACKENDS = ["triton", "flashinfer", "fa3", "flashmla", "trtllm_mla", "trtllm_mha"]
ROWS = [
    *ARGUMENTS,
    _row("--attention-backend", choices=BACKENDS),
    _row("--prefill-attention-backend", choices=BACKENDS),
    _row("--decode-attention-backend", choices=BACKENDS),
    _row("--speculative-attention-mode", choices=["prefill", "decode"]),
    _row("--speculative-draft-attention-backend", choices=BACKENDS),
    _row("--moe-runner-backend"),
    _row("--fp8-gemm-backend"),
    _row("--fp4-gemm-backend"),
    _row("--kv-cache-dtype"),
    _row("--flashinfer-allreduce-fusion-backend"),
    _switch("--disable-custom-all-reduce"),
    _switch("--enable-deterministic-inference"),
]

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "hidden_size": 128, "vocab_size": 1024, "dtype": "bfloat16"}
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {**LLAMA, "kv_lora_rank": 512, "n_routed_experts": 384}}
FP8 = {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NVFP4 = {**LLAMA, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
NVFP4_MOE = {**NVFP4, "num_experts": 128}
GPT_OSS = {**LLAMA, "architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}, "num_local_experts": 32}
TRITON, ALL_REDUCE = {"attention-backend": "triton"}, {"disable-custom-all-reduce": True}
RECOMMENDED = " patch set triton_target_verify is recommended"
DEEP_GEMM = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}


def parser(version: str) -> server_flags.Parser:
    return server_flags.Parser(version, tuple(server_flags._argument(row) for row in ROWS))


def there(version: str, config: dict[str, Any], **changes: Any) -> Situation:
    draft = changes.pop("draft", None)
    return Situation(
        version=Version.parse(version),
        capabilities=changes.pop("capabilities", SM120),
        target=ModelFacts.of(config),
        draft=ModelFacts.of(draft) if draft else None,
        **changes,
    )


def chosen(version: str, config: dict[str, Any], options: tuple[str, ...] = (), **changes: Any) -> gpu_settings.Choice:
    return gpu_settings.choose(TABLE, there(version, config, **changes), parser(version), options)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LLAMA, ("mha", None, False, "bfloat16")),
        (KIMI, ("mla", None, True, "bfloat16")),
        ({**KIMI["text_config"], "index_topk": 2048}, ("dsa", None, True, "bfloat16")),
        ({**LLAMA, "compress_ratios": [1]}, ("other", None, False, "bfloat16")),
        (FP8, ("mha", "fp8_block", False, "bfloat16")),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, ("mha", "fp8", False, "bfloat16")),
        (NVFP4_MOE, ("mha", "nvfp4", True, "bfloat16")),
        (
            {**LLAMA, "quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            ("mha", "nvfp4_compressed", False, "bfloat16"),
        ),
        (GPT_OSS, ("mha", "mxfp4", True, "bfloat16")),
        ({**LLAMA, "dtype": None, "torch_dtype": "float16"}, ("mha", None, False, "float16")),
        ({**LLAMA, "dtype": None}, ("mha", None, False, "float16")),
        ({**LLAMA, "dtype": "float32", "model_type": "gemma2"}, ("mha", None, False, "bfloat16")),
    ],
)
def test_a_model_is_known_by_its_config(config, kind):
    facts = ModelFacts.of(config)
    assert (facts.attention, facts.quantization, facts.moe, facts.dtype) == kind


def test_modelopt_keeps_its_quantization_in_a_file_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert gpu_settings.read_model(tmp_path, {}).quantization == "nvfp4"
    assert gpu_settings.read_model(tmp_path / "absent", FP8).quantization == "fp8_block"


@pytest.mark.parametrize(
    ("version", "config", "flags", "environment"),
    [
        ("0.5.9", LLAMA, {}, DEEP_GEMM),
        ("0.5.9", KIMI, TRITON, DEEP_GEMM),
        ("0.5.9", FP8, {"fp8-gemm-backend": "triton"}, DEEP_GEMM),
        ("0.5.9", NVFP4, {"fp4-gemm-backend": "flashinfer_cudnn"}, DEEP_GEMM),
        ("0.5.9", GPT_OSS, {"moe-runner-backend": "triton_kernel"}, DEEP_GEMM),
        ("0.5.10.post1", FP8, {}, DEEP_GEMM),
        ("0.5.10.post1", NVFP4_MOE, {}, DEEP_GEMM),
        ("0.5.12.post1", NVFP4_MOE, {"moe-runner-backend": "flashinfer_cutlass"}, DEEP_GEMM),
        ("0.5.12.post1", NVFP4, {}, DEEP_GEMM),
        ("0.5.13", NVFP4_MOE, {}, {}),
        ("0.5.15.post1", FP8, {}, {}),
        ("0.5.15.post1", KIMI, TRITON, {}),
        ("0.5.23", KIMI, TRITON, {}),
        ("0.5.23", GPT_OSS, {}, {}),
        ("0.5.8", KIMI, {}, {}),
    ],
)
def test_what_is_set_follows_version_and_model(version, config, flags, environment):
    choice = chosen(version, config)
    assert (choice.flags, choice.environment, choice.problems, choice.warnings) == (flags, environment, (), ())


@pytest.mark.parametrize("version", ["0.5.9", "0.5.12.post1", "0.5.15.post1", "0.5.23"])
@pytest.mark.parametrize("capability", ["9.0", "10.0", "12.1"])
@pytest.mark.parametrize("config", [LLAMA, KIMI, FP8, NVFP4_MOE, GPT_OSS])
def test_other_gpus_get_nothing_and_are_refused_nothing(version, capability, config):
    choice = chosen(version, config, capabilities=frozenset({capability}), speculation=True, flags={"tp_size": 8})
    assert choice.rules == ()
    assert list(choice.refusals(parser(version), {"attention_backend": "trtllm_mla"}, {})) == []


@pytest.mark.parametrize(("tp", "flags"), [(1, {}), (2, {}), (4, ALL_REDUCE), ("8", ALL_REDUCE)])
def test_the_custom_all_reduce_goes_beyond_two_gpus(tp, flags):
    assert chosen("0.5.15.post1", LLAMA, flags={"tp_size": tp}).flags == flags


@pytest.mark.parametrize(
    ("version", "speculates", "environment", "flags"),
    [
        ("0.5.12.post1", True, {}, {"speculative-draft-attention-backend": "triton"}),
        ("0.5.12.post1", False, {}, {}),
        ("0.5.9", True, {}, {}),
        ("0.5.9", True, {"SGLANG_ENABLE_SPEC_V2": "1"}, {"speculative-draft-attention-backend": "triton"}),
        ("0.5.14", True, {}, {}),
    ],
)
def test_the_draft_gets_the_backend_whose_extend_has_a_graph(version, speculates, environment, flags):
    assert chosen(version, LLAMA, draft=LLAMA, speculation=speculates, environment=environment).flags == flags


def test_a_draft_counts_only_where_it_is_served():
    assert chosen("0.5.9", LLAMA, draft=FP8, speculation=True).flags == {"fp8-gemm-backend": "triton"}
    assert chosen("0.5.9", LLAMA, draft=FP8, speculation=False).flags == {}


@pytest.mark.parametrize(
    ("version", "flags", "refused"),
    [
        ("0.5.15.post1", {"attention_backend": "trtllm_mla"}, "--attention-backend trtllm_mla"),
        ("0.5.15.post1", {"decode_attention_backend": "trtllm_mla"}, "--decode-attention-backend trtllm_mla"),
        ("0.5.15.post1", {"speculative_draft_attention_backend": "fa3"}, "--speculative-draft-attention-backend fa3"),
        ("0.5.23", {"attention_backend": "flashmla"}, "--attention-backend flashmla"),
        ("0.5.9", {"decode_attention_backend": "trtllm_mha"}, "--decode-attention-backend trtllm_mha"),
        ("0.5.15.post1", {"decode_attention_backend": "trtllm_mha"}, None),
        ("0.5.15.post1", {"attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
        ("0.5.15.post1", {"attention_backend": "trtllm_mha", "prefill_attention_backend": "flashinfer"}, None),
        ("0.5.19", {"attention_backend": "trtllm_mha"}, None),
        ("0.5.19", {"attention_backend": "trtllm_mha", "kv_cache_dtype": "fp8_e4m3"}, "--attention-backend trtllm_mha"),
        ("0.5.23", {"flashinfer_allreduce_fusion_backend": "auto"}, "--flashinfer-allreduce-fusion-backend auto"),
        ("0.5.23", {"attention_backend": "flashinfer"}, None),
    ],
)
def test_what_fails_on_these_gpus_is_refused_with_place_reason_and_cure(version, flags, refused):
    choice = chosen(version, LLAMA, flags=flags)
    found = list(choice.refusals(parser(version), flags, dict.fromkeys(flags, "arm x")))
    assert len(found) == (1 if refused else 0)
    for problem in found:
        assert problem.startswith(f"arm x: {refused}: not on GPUs of compute capability 12.0: ")
        assert "sglang" in problem
        assert "leave" in problem


def test_the_fusion_is_refused_unless_its_patch_set_and_its_variable_are_there():
    flags = {"flashinfer_allreduce_fusion_backend": "trtllm"}

    def refused(**changes: Any) -> bool:
        return bool(list(chosen("0.5.23", LLAMA, flags=flags, **changes).refusals(parser("0.5.23"), flags, {})))

    variable, patch = {"AERIE_FLASHINFER_FUSION_SM120": "1"}, frozenset({"flashinfer_fusion_sm120"})
    assert refused()
    assert refused(environment=variable)
    assert refused(patch_sets=patch)
    assert not refused(environment=variable, patch_sets=patch)


ON_TRITON = {"attention_backend": "triton"}
ON_FLASHINFER = {"attention_backend": "flashinfer"}


@pytest.mark.parametrize(
    ("config", "changes", "rule"),
    [
        # By the rule's own flag, by SGLang's own choice, by somebody's flag, on either GPU.
        (KIMI, {}, "triton-target-verify"),
        (GPT_OSS, {}, "sm120-gpt-oss-target-verify"),
        (LLAMA, {"flags": ON_TRITON}, "triton-target-verify"),
        (LLAMA, {"flags": ON_TRITON, "capabilities": frozenset({"9.0"})}, "triton-target-verify"),
        (LLAMA, {"flags": ON_TRITON, "environment": {"AERIE_TARGET_VERIFY": "grouped"}}, "triton-target-verify"),
        (LLAMA, {"flags": {"prefill_attention_backend": "triton"}}, "triton-target-verify"),
        # Target verify is on prefill's backend, unless speculative-attention-mode says decode.
        (LLAMA, {"flags": {"decode_attention_backend": "triton"}}, None),
        (LLAMA, {"flags": {**ON_TRITON, "prefill_attention_backend": "flashinfer"}}, None),
        (
            LLAMA,
            {"flags": {"decode_attention_backend": "triton", "speculative_attention_mode": "decode"}},
            "triton-target-verify",
        ),
        (LLAMA, {"flags": {"prefill_attention_backend": "triton", "speculative_attention_mode": "decode"}}, None),
        # Nothing to say: another backend, no speculation, the set is there, SGLang's kernel is wanted.
        (LLAMA, {}, None),
        (KIMI, {"flags": ON_FLASHINFER}, None),
        (GPT_OSS, {"flags": {"attention_backend": "trtllm_mha"}}, None),
        (KIMI, {"speculation": False}, None),
        (KIMI, {"patch_sets": frozenset({"triton_target_verify"})}, None),
        (KIMI, {"environment": {"AERIE_TARGET_VERIFY": "extend"}}, None),
        (GPT_OSS, {"environment": {"AERIE_TARGET_VERIFY": "0"}}, None),
        (KIMI, {"capabilities": frozenset({"9.0"})}, None),
        (LLAMA, {"flags": ON_TRITON, "capabilities": frozenset({"8.0"})}, None),
    ],
)
def test_a_patch_set_is_recommended_where_target_verify_is_on_triton(config, changes, rule):
    choice = chosen("0.5.14", config, **{"speculation": True, **changes})
    assert [recommendation.rule.id for recommendation in choice.recommendations] == [rule] * bool(rule)


@pytest.mark.parametrize(("version", "count"), [("0.5.13", 0), ("0.5.14", 1), ("0.5.15.post1", 1), ("0.5.23", 1)])
def test_it_is_recommended_for_the_versions_that_the_patch_set_is_for(version, count):
    assert len(chosen(version, KIMI, speculation=True).recommendations) == count
    rules = [rule for rule in TABLE.rules if rule.patch_sets]
    for name in {name for rule in rules for name in rule.patch_sets}:
        (patch_set,) = patch_sets.load([name])
        assert all(str(rule.versions) == str(patch_set.versions) for rule in rules if name in rule.patch_sets)


def test_a_recommendation_says_what_was_measured_where_and_what_to_do():
    (recommendation,) = chosen("0.5.15.post1", KIMI, speculation=True).recommendations
    text = str(recommendation)
    for words in (
        "EAGLE-3 over baseline at 64 clients went from 0.73 to 1.35",
        "H200 (compute capability 9.0), with simulated acceptance",
        "for SM120 the set was only compiled, never run",
        "measured: docs/measurements/target-verify.md",
        "add it to sglang_patches_sets and run playbooks/patch.yml",
        "set AERIE_TARGET_VERIFY to extend",
    ):
        assert words in text
    assert recommendation.as_dict()["patch_set"] == "triton_target_verify"


def test_what_was_measured_stands_where_a_rule_says():
    citations = [source for rule in VALUES["rules"] for source in rule["source"] if "measurement" in source]
    assert citations
    for source in citations:
        assert source["says"] in (Path(__file__).parents[2] / source["measurement"]).read_text(), source


def test_a_rule_whose_flag_a_version_lacks_is_never_emitted():
    values = {"rules": [{**VALUES["rules"][0], "flags": {"no-such-flag": "x"}}]}
    choice = gpu_settings.choose(gpu_settings.Table.of(values), there("0.5.23", KIMI), parser("0.5.23"))
    assert choice.flags == {}
    assert "has no flag --no-such-flag" in choice.warnings[0]


@pytest.mark.parametrize(
    ("version", "config", "flags", "problem"),
    [
        ("0.5.22", LLAMA, {"tp_size": 8}, None),
        ("0.5.23", LLAMA, {"tp_size": 2}, None),
        ("0.5.23", KIMI, {"tp_size": 4}, None),
        ("0.5.21", LLAMA, {"tp_size": 8}, "is for SGLang >=0.5.22, not for 0.5.21: 0.5.21 has the switch, but pins FlashInfer 0.6.18"),
        ("0.5.15.post1", LLAMA, {"tp_size": 8}, "is for SGLang >=0.5.22, not for 0.5.15.post1"),
        ("0.5.23", LLAMA, {}, "serves tp-size 2, 4 or 8 only, not 1"),
        ("0.5.23", LLAMA, {"tp_size": 6}, "serves tp-size 2, 4 or 8 only, not 6"),
        ("0.5.23", LLAMA, {"tp_size": 8, "dtype": "half"}, "serves bfloat16 only, and the model runs in float16: set dtype to bfloat16"),
        ("0.5.23", {**LLAMA, "dtype": "float16"}, {"tp_size": 8}, "the model runs in float16"),
        ("0.5.23", {**LLAMA, "dtype": "float16"}, {"tp_size": 8, "dtype": "bfloat16"}, None),
        ("0.5.23", LLAMA, {"tp_size": 8, "enable_deterministic_inference": True}, "has no effect with --enable-deterministic-inference"),
    ],
)
def test_an_option_is_refused_where_it_would_have_no_effect(version, config, flags, problem):
    choice = chosen(version, config, ("pcie_ipc_allreduce",), flags=flags)
    assert len(choice.problems) == (1 if problem else 0)
    if problem:
        assert choice.problems[0].startswith("options: pcie_ipc_allreduce: ")
        assert problem in choice.problems[0]
        assert choice.option_environment == {}
    else:
        assert choice.option_environment == {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
        assert choice.option_flags == ALL_REDUCE


def test_a_misspelt_option_is_answered_with_what_there_is():
    assert chosen("0.5.23", LLAMA, ("pcie_ipc_allreduse",)).problems == (
        "options: no option 'pcie_ipc_allreduse'; did you mean 'pcie_ipc_allreduce'?",
    )
    assert gpu_settings.unknown_option("x", ()) == "options: no option 'x' in this profile"


def test_gpus_count_only_where_the_instance_uses_them():
    gpus = [{"index": 0, "compute_capability": "12.0"}, {"index": 1, "compute_capability": "9.0"}, {"index": 2, "compute_capability": None}]
    assert gpu_settings.capabilities(gpus, None) == {"12.0", "9.0"}
    assert gpu_settings.capabilities(gpus, [1]) == {"9.0"}
    assert gpu_settings.capabilities([], None) == frozenset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versons": ">=1"}, "rule x: versons: no such key; did you mean 'versions'?"),
        ({"why": None}, "rule x: why is missing"),
        ({"severity": "must"}, "severity must be required or recommended, not 'must'"),
        ({"flags": None}, "rule x: sets and forbids nothing"),
        ({"forbids": {"a": ["b"]}}, "rule x: forbids, and names no cure"),
        ({"versions": ">0.5,"}, None),
        ({"versions": "0.5"}, "rule x: versions: '0.5' is no version specifier"),
        ({"when": {"attention": ["mle"]}}, "when: attention: 'mle' is not one of mla, mha, dsa and other"),
        ({"when": {"tp": 2}}, "rule x: when: tp: no such key"),
        ({"environment": {"A": 0}}, "environment: A: needs text in quotes, got 0"),
        ({"patch_sets": ["p"], "cure": "c"}, "rule x: patch_sets: is for a rule of severity recommended with a cure"),
    ],
)
def test_a_wrong_table_is_refused(change, message):
    rule = {"id": "x", "capabilities": ["12.0"], "versions": ">=0.5", "severity": "required", "why": "w", "source": [{"report": "r"}]}
    values = {"rules": [rule | {"flags": {"attention-backend": "triton"}} | change]}
    if message is None:
        assert gpu_settings.Table.of(values).rules
        return
    with pytest.raises(AerieError) as caught:
        gpu_settings.Table.of(values)
    assert message in str(caught.value)


# In a plan, with a release on a disk


MLA = {**TARGET, "num_attention_heads": 8, "kv_lora_rank": 16, "dtype": "bfloat16"}
GPUS = ({"index": 0, "compute_capability": "12.0"}, {"index": 1, "compute_capability": "12.0"})


def planned(root: Path, arm: dict[str, Any] = EAGLE3, **changes: Any) -> server_plan.Plan:
    make_release(root, ROWS)
    models = make_models(root, target=MLA, draft=DRAFT)
    settings = {"host_gpus": GPUS, "gpu_table": VALUES, "profile": {"name": "cuda"}, "models": models, **changes}
    return server_plan.plan(make_host(root), make_request(root, arm, **settings))


def test_a_plan_has_the_settings_in_its_arguments_and_tells_each(tmp_path):
    plan = planned(tmp_path)
    assert plan.argv[plan.argv.index("--attention-backend") + 1] == "triton"
    assert [warning.split(":")[1] for warning in plan.warnings] == [RECOMMENDED]
    (told,) = plan.gpu_settings
    assert told["id"] == "sm120-mla-triton"
    assert told["flags"] == TRITON
    assert "MLA" in told["why"]


ACTIVE = ({"name": "triton_target_verify", "sha256": "s", "upstream_since": None},)


def test_a_start_recommends_the_patch_set_and_keeps_why(tmp_path):
    plan = planned(tmp_path)
    (told,) = plan.recommendations
    assert (told["patch_set"], told["source"]) == ("triton_target_verify", "measured: docs/measurements/target-verify.md")
    assert plan.warnings[0].startswith("arm eagle3: patch set triton_target_verify is recommended: ")
    assert plan.patch_modes == {}


def test_nothing_is_recommended_that_the_patch_step_is_about_to_bring(tmp_path):
    plan = planned(tmp_path, patch_sets=ACTIVE, rehearsal=True)
    assert plan.recommendations == ()
    assert not any("is recommended" in warning for warning in plan.warnings)


def test_extend_keeps_sglangs_kernel_without_the_patch_set_and_without_a_recommendation(tmp_path):
    arm = {**EAGLE3, "environment": {"AERIE_TARGET_VERIFY": "extend"}}
    plan = planned(tmp_path, arm)
    assert (plan.recommendations, plan.warnings) == ((), ())
    assert plan.environment["AERIE_TARGET_VERIFY"] == "extend"


def test_a_server_in_check_mode_is_warned_about_and_is_no_other_server_for_that(tmp_path):
    def with_mode(name: str, **variables: str) -> server_plan.Plan:
        arm = {**EAGLE3, "environment": variables}
        return planned(tmp_path / name, arm, patch_sets=ACTIVE, rehearsal=True)

    checking, plain = with_mode("a", AERIE_TARGET_VERIFY="check"), with_mode("b")
    assert (checking.patch_modes, plain.patch_modes) == ({"triton_target_verify": "check"}, {"triton_target_verify": "grouped"})
    assert "its speeds are no results" in checking.warnings[-1]
    assert not any("check mode" in warning for warning in plain.warnings)


def test_a_wrong_mode_is_refused_before_anything_is_touched(tmp_path):
    arm = {**EAGLE3, "environment": {"AERIE_TARGET_VERIFY": "on"}}
    with pytest.raises(AerieError, match=r"AERIE_TARGET_VERIFY must be grouped, extend or check \(is on\)"):
        planned(tmp_path, arm)
    assert not (tmp_path / "instances").exists()


def test_a_hopper_gets_the_plan_that_it_would_have_without_a_table(tmp_path):
    hopper = tuple({"index": index, "compute_capability": "9.0"} for index in range(2))
    plan = planned(tmp_path / "a", host_gpus=hopper)
    assert plan.gpu_settings == ()
    assert planned(tmp_path / "b", gpu_table=None).argv[3:] == tuple(word.replace("/a/", "/b/") for word in plan.argv[3:])


@pytest.mark.parametrize("value", ["flashinfer", None])
def test_a_persons_own_setting_wins(tmp_path, value):
    plan = planned(tmp_path, flags={"attention-backend": value})
    assert plan.gpu_settings == ()
    assert ("--attention-backend" in plan.argv) == (value is not None)
    # The rule is a recommendation; without a flag SGLang takes triton by itself.
    assert [warning.split(":")[1] for warning in plan.warnings] == ([] if value else [RECOMMENDED])


def test_a_setting_against_a_required_rule_is_warned_about_with_rule_source_and_cure(tmp_path):
    named = ("sm120-no-deep-gemm", "sm120-nvfp4-moe-cutlass")
    rules = [{**rule, "versions": ">=0.5.9", "when": {}} for rule in VALUES["rules"] if rule["id"] in named]
    table = {"rules": rules}
    plan = planned(
        tmp_path, gpu_table=table, flags={"moe-runner-backend": "flashinfer_trtllm"}, environment={"SGLANG_ENABLE_JIT_DEEPGEMM": "1"}
    )
    variable, flag = plan.warnings
    assert flag.startswith(
        "sglang_server_flags: --moe-runner-backend flashinfer_trtllm: GPUs of compute capability 12.0 need flashinfer_cutlass: "
    )
    assert "sm120-nvfp4-moe-cutlass; sglang 0.5.11: sglang/srt/layers/quantization/modelopt_quant.py" in flag
    assert flag.endswith("leave it out, and the right value is set")
    assert variable.startswith("environment: SGLANG_ENABLE_JIT_DEEPGEMM 1: GPUs of compute capability 12.0 need 0: ")
    assert plan.environment["SGLANG_ENABLE_JIT_DEEPGEMM"] == "1"
    assert plan.gpu_settings == ()


def test_a_forbidden_value_is_refused_with_all_other_problems_before_anything_is_touched(tmp_path):
    arm = {**EAGLE3, "flags": {"decode-attention-backend": "trtllm_mla"}, "options": ["pcie_ipc_allreduce"]}
    with pytest.raises(AerieError) as caught:
        planned(tmp_path, arm)
    assert "arm eagle3: --decode-attention-backend trtllm_mla: not on GPUs of compute capability 12.0" in str(caught.value)
    assert "arm eagle3: options: pcie_ipc_allreduce: serves tp-size 2, 4 or 8 only, not 1" in str(caught.value)
    assert not (tmp_path / "instances").exists()


def test_an_option_is_set_told_and_part_of_what_defines_the_server(tmp_path):
    plain = planned(tmp_path / "a", BASELINE, flags={"tp-size": 2}, models=make_models(tmp_path, target=MLA))
    arm = {**BASELINE, "options": ["pcie_ipc_allreduce"]}
    plan = planned(tmp_path / "b", arm, flags={"tp-size": 2}, models=make_models(tmp_path, target=MLA))
    assert plan.environment["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == "1"
    assert "--disable-custom-all-reduce" in plan.argv
    assert [setting["id"] for setting in plan.gpu_settings] == ["sm120-mla-triton", "pcie_ipc_allreduce"]
    assert plan.definition != plain.definition


@pytest.mark.parametrize(("own", "is_set"), [({}, True), ({"disable_custom_all_reduce": False}, False)])
def test_an_option_wins_over_common_flags_and_a_launch_s_and_an_arm_s_own_flags_win_over_it(tmp_path, own, is_set):
    other = {"disable-custom-all-reduce": False}
    arm = {**BASELINE, "options": ["pcie_ipc_allreduce"], "flags": own}
    models = make_models(tmp_path, target=MLA)
    plan = planned(tmp_path / "a", arm, flags={"tp-size": 2, **other}, launch_flags=other, models=models)
    assert ("--disable-custom-all-reduce" in plan.argv) is is_set


def test_gpus_that_nobody_knows_are_warned_about(tmp_path):
    plan = planned(tmp_path, host_gpus=())
    assert plan.gpu_settings == ()
    assert "nobody knows the compute capability of its GPUs" in plan.warnings[0]


def test_options_must_be_names(tmp_path):
    with pytest.raises(AerieError, match="options: needs a list of names"):
        planned(tmp_path, {**BASELINE, "options": "pcie_ipc_allreduce"})
    with pytest.raises(AerieError, match="no such setting of an arm; did you mean 'options'"):
        planned(tmp_path / "b", {**BASELINE, "option": []})


def test_options_of_arms_are_checked_before_a_host_is_asked():
    project = settings.Project(options={"cuda": ["pcie_ipc_allreduce"]})

    def found(profile: str, options: Any) -> list[str]:
        return settings.check({"aerie_profile": profile, "sglang_server_arms": {"a": {"options": options}}}, project)

    assert found("cuda", ["pcie_ipc_allreduce"]) == []
    assert found("cuda", ["pcie_allreduce"]) == [
        "sglang_server_arms.a.options: no option 'pcie_allreduce'; did you mean 'pcie_ipc_allreduce'?"
    ]
    assert found("cpu", ["pcie_ipc_allreduce"]) == ["sglang_server_arms.a.options: no option 'pcie_ipc_allreduce' in this profile"]
    assert found("cuda", "pcie_ipc_allreduce") == ["sglang_server_arms.a.options is 'pcie_ipc_allreduce': it must be a list of names"]
