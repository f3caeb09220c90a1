"""What is known to fail before a model is loaded: drafts that don't fit, ports in use. Standard library only: this runs on hosts."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.serving import server_flags
from ansible.module_utils.aerie.specifiers import Specifier, Version
from ansible.module_utils.aerie.words import listing

Config = Mapping[str, Any]
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")

DRAFT_IN_TARGET = (
    "Deepseek",
    "Glm4Moe",
    "GlmMoeDsa",
    "BailingMoe",
    "HYV",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen4Exp",
    "MiMo",
    "Ernie4_5",
    "Longcat",
    "Step3p5",
)
"""Starts of target architectures whose checkpoints bring their own draft layer, for EAGLE and NEXTN."""

MLA_ONLY = ("trtllm_mla", "tokenspeed_mla", "cutedsl_mla", "flashmla", "cutlass_mla")
"""Attention backends for MLA models alone. Source: layers/attention/attention_registry.py, "can only be used with MLA models"."""

CHECKPOINT_QUANTIZATIONS = ("modelopt_fp4", "modelopt_fp8", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "petit_nvfp4")
"""Methods whose weights lie quantized in the checkpoint. Source: server_args.py: without its own setting the draft takes --quantization."""


@dataclass(frozen=True)
class PatchSwitch:
    """How a variable switches a patch set: its ``values`` without the set would do nothing, but ``off``."""

    patch_set: str
    values: tuple[str, ...]
    default: str = "off"
    off: str = "off"

    def mode(self, value: str | None) -> str:
        """Return what a server with ``value`` (None or empty: left out) does, where the set is active."""
        return (value or self.default) if value != "0" else self.off


PATCH_SWITCHES = {
    "AERIE_FLASHINFER_PREFILL_PLAN": PatchSwitch("flashinfer_prefill_plan", ("host", "check")),
    "AERIE_FLASHINFER_FUSION_SM120": PatchSwitch("flashinfer_fusion_sm120", ("1",)),
    "AERIE_TARGET_VERIFY": PatchSwitch("triton_target_verify", ("grouped", "extend", "check"), default="grouped", off="extend"),
}
"""Variables that switch a patch set. Without the set nothing reads them, and nobody would know."""

PATCH_SWITCH_UNSET = ("", "0")
"""Values of every switch: empty is as left out, 0 is off."""

CHECK_MODE = "check"
"""The mode in which a patch set does the work twice and compares: a test, whose speeds are no results."""

DYNAMIC_PATCH_SET = "dynamic_speculation"
DYNAMIC_SINCE = ">=0.5.14"
ADAPTIVE_SINCE = ">=0.5.13"
"""SGLang versions whose adaptive speculation has slots by batch size."""

ADAPTIVE_ENDS_WITH = ("enable_dp_attention", "enable_multi_layer_eagle", "enable_two_batch_overlap", "enable_pdmux")
"""Flags with which SGLang turns adaptive speculation off, and only logs that.
Source: adaptive_spec_params.py of 0.5.15.post1 and 0.5.23, adaptive_unsupported_reason."""

_ELSEWHERE = "was not tried with a cache, but the hierarchical one, that copies K/V elsewhere"
_EXCHANGES = "was not tried where ranks exchange their numbers of tokens in each step"
_SEEDS = "draws from a seed in two ways, by load, so that its tokens are not reproducible"
DYNAMIC_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("dcp_size", 1, "was not tried with context parallelism"),
    ("attn_cp_size", 1, "was not tried with context parallelism"),
    ("moe_a2a_backend", "none", _EXCHANGES),
    ("moe_dense_tp_size", None, _EXCHANGES),
    ("enable_deterministic_inference", False, _SEEDS),
    ("enable_unified_memory", False, "was not tried with a KV pool of virtual slots"),
    ("enable_hisparse", False, "was not tried with hierarchical sparse attention"),
    ("speculative_draft_window_size", None, "was not tried with a draft that attends to a window"),
    ("enable_lmcache", False, _ELSEWHERE),
    ("enable_flexkv", False, _ELSEWHERE),
    ("enable_unified_cache_external_linker", False, _ELSEWHERE),
    ("radix_cache_backend", None, "was not tried with a prefix cache that is not SGLang's own"),
)
"""Arguments that dynamic speculation needs at their default, which this is, and why.

The same as REFUSED of the patch set's aerie_dynamic_control.py, by which the server itself refuses;
that file can't import Aerie, so tests/unit/test_dynamic_arm.py holds the two equal.
"""

DYNAMIC_REFUSED_FLAGS = (
    *DYNAMIC_REFUSED,
    # server_args.py: SGLang switches enable_deterministic_inference on for it; the server sees that.
    ("rl_on_policy_target", None, _SEEDS),
)

MAX_RUNNING_REQUESTS = 48
"""Requests that run at once with speculation, where nothing is said. Source: arg_groups/speculative_hook.py."""

GRAPH_TOKENS = 1024
"""Tokens in the largest decode graph that need no remark: cuda_graph_runner.py captures max_bs × draft tokens."""


def text_config(config: Config) -> Config:
    """Return the part of a model's config that describes its language model (multimodal models nest it)."""
    nested = config.get("text_config")
    return {**config, **nested, "architectures": config.get("architectures")} if isinstance(nested, Mapping) else config


def architecture(config: Config) -> str | None:
    """Return the first architecture that a config names."""
    names = config.get("architectures") or []
    return str(names[0]) if names else None


def target_problems(name: str, config: Config) -> Iterator[str]:
    """Yield what is wrong with the target model ``name``."""
    if architecture(config) is None:
        yield f"model {name}: its config.json names no architecture: is this the directory of a model?"


def draft_problems(algorithm: str, target_name: str, target: Config, draft_name: str | None, draft: Config | None) -> Iterator[str]:
    """Yield why the draft can't speculate for the target with ``algorithm`` (upper case)."""
    if algorithm not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        return
    if draft_name is None or draft is None:
        own = architecture(target) or ""
        if algorithm in ("EAGLE3", "STANDALONE") or not own.startswith(DRAFT_IN_TARGET):
            yield f"speculation.draft_model is missing: {algorithm} needs one for {target_name} ({own or 'no architecture'})"
        return
    kind = architecture(draft)
    pair = f"draft {draft_name} for target {target_name}"
    is_eagle3 = (kind or "").lower().endswith("eagle3") or (kind or "").lower().startswith("eagle3")
    if kind is None:
        yield f"{pair}: the draft's config.json names no architecture: is this the directory of a draft model?"
    elif algorithm == "EAGLE3" and not is_eagle3:
        yield f"{pair}: {kind} is no EAGLE-3 draft (its name would end in Eagle3): use one that is, or algorithm EAGLE"
    elif algorithm in ("EAGLE", "NEXTN", "STANDALONE") and is_eagle3:
        yield f"{pair}: {kind} is an EAGLE-3 draft: set speculation.algorithm to EAGLE3 (is {algorithm})"
    wide, narrow = text_config(target), text_config(draft)
    if algorithm != "STANDALONE":
        expected = narrow.get("target_hidden_size") or narrow.get("hidden_size")
        if None not in (expected, wide.get("hidden_size")) and expected != wide["hidden_size"]:
            yield f"{pair}: the draft reads hidden states of {expected}, the target's have {wide['hidden_size']}: made for another target"
    if None not in (narrow.get("vocab_size"), wide.get("vocab_size")) and narrow["vocab_size"] != wide["vocab_size"]:
        yield f"{pair}: vocab_size is {narrow['vocab_size']} in the draft, {wide['vocab_size']} in the target: it is another target's draft"
    reduced = narrow.get("draft_vocab_size")
    if None not in (reduced, narrow.get("vocab_size")) and reduced > narrow["vocab_size"]:
        yield f"{pair}: draft_vocab_size {reduced} exceeds vocab_size {narrow['vocab_size']}: the draft's config.json is damaged"


def draft_backend_problems(pair: str, flags: Mapping[str, Any], draft_attention: str) -> Iterator[str]:
    """Yield why the draft can't run on the attention backend (flags by dest) that it inherits from the target."""
    backend = flags.get("decode_attention_backend") or flags.get("attention_backend")
    if flags.get("speculative_draft_attention_backend") is None and draft_attention == "mha" and backend in MLA_ONLY:
        yield (
            f"{pair}: the draft inherits --attention-backend {backend}, which only MLA models can use, and it has multi-head attention: "
            "set speculative-draft-attention-backend to triton or flashinfer"
        )


def draft_quantization_problems(pair: str, flags: Mapping[str, Any], draft_quantization: str | None) -> Iterator[str]:
    """Yield why the draft can't be loaded with the quantization (flags by dest) that it inherits from the target."""
    method = flags.get("quantization")
    if flags.get("speculative_draft_model_quantization") is None and method in CHECKPOINT_QUANTIZATIONS and draft_quantization is None:
        yield (
            f"{pair}: the draft inherits --quantization {method}, and its weights are not quantized: set "
            "speculative-draft-model-quantization to unquant, or leave quantization out (SGLang reads the target's from its config.json)"
        )


def nextn_memory_warnings(version: Version, algorithm: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield that NEXTN loads the model a second time in old versions, unless the overlapped worker is asked for."""
    wanted = environment.get("SGLANG_ENABLE_SPEC_V2", "").lower() in ("1", "true")
    if algorithm == "NEXTN" and version in Specifier.parse("<=0.5.9") and not wanted:
        yield (
            f"SGLang {version.text} loads the model twice for NEXTN and may run out of memory: set SGLANG_ENABLE_SPEC_V2 to 1 in the arm's "
            "environment, or take a later version"
        )


def graph_batch_warnings(flags: Mapping[str, Any], draft_tokens: Any) -> Iterator[str]:
    """Yield that CUDA graphs are captured for many tokens: speculation verifies all draft tokens of a sequence at once."""
    size = str(flags.get("cuda_graph_max_bs_decode") or flags.get("cuda_graph_max_bs") or "")
    if not size.isdigit() or not str(draft_tokens or "").isdigit() or flags.get("disable_cuda_graph"):
        return
    tokens = int(size) * int(draft_tokens)
    if tokens > GRAPH_TOKENS:
        yield (
            f"CUDA graphs for {size} sequences hold {tokens} tokens with {draft_tokens} draft tokens each, and may run out of memory: set "
            f"cuda-graph-max-bs to {GRAPH_TOKENS // int(draft_tokens)} or less, unless it was tried"
        )


def patch_switch_value_problems(variable: str, value: str) -> Iterator[str]:
    """Yield that a variable which switches a patch set has a value that its set would end the server for."""
    switch = PATCH_SWITCHES.get(variable)
    if switch and value not in (*PATCH_SWITCH_UNSET, *switch.values):
        yield f"{variable} must be {listing(switch.values, last='or')} (is {value}): correct it, or leave it out"


def patch_switch_problems(environment: Mapping[str, str], patch_sets: Container[str], release: str) -> Iterator[str]:
    """Yield which variables would switch nothing on, in a release with these patch sets."""
    for variable, switch in PATCH_SWITCHES.items():
        value = environment.get(variable, "")
        wrong_values = list(patch_switch_value_problems(variable, value))
        yield from wrong_values
        is_on = value not in (*PATCH_SWITCH_UNSET, switch.off)
        if is_on and not wrong_values and switch.patch_set not in patch_sets:
            yield (
                f"{variable} has no effect without patch set {switch.patch_set}, which is not active in release {release}: add it to "
                "sglang_patches_sets and run playbooks/patch.yml, or leave the variable out"
            )


def patch_modes(environment: Mapping[str, Any], patch_sets: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return by name how a server with these variables runs each of its release's patch sets that has a switch."""
    active = {str(patch_set["name"]) for patch_set in patch_sets}
    return {
        switch.patch_set: switch.mode(str(environment.get(variable) or ""))
        for variable, switch in PATCH_SWITCHES.items()
        if switch.patch_set in active
    }


def patch_sets_in_check(modes: Mapping[str, str]) -> list[str]:
    """Return the patch sets (name to mode) that run in check mode, which makes speeds meaningless."""
    return [name for name, mode in modes.items() if mode == CHECK_MODE]


def dynamic_release_problems(release: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the release doesn't know the threshold of dynamic speculation, if its parser doesn't."""
    version = Version.parse(str(release["sglang_version"]))
    if version not in Specifier.parse(DYNAMIC_SINCE):
        yield f"dynamic: SGLang {version.text} is too old for it: take 0.5.14 or newer (sglang_release_version), or leave dynamic out"
    elif DYNAMIC_PATCH_SET not in [one["name"] for one in release.get("patch_sets") or ()]:
        yield (
            f"dynamic: patch set {DYNAMIC_PATCH_SET} is not active in release {release['id']}: add it to sglang_patches_sets and run "
            "playbooks/patch.yml, or leave dynamic out"
        )
    else:
        yield f"dynamic: release {release['id']} was verified before it got patch set {DYNAMIC_PATCH_SET}: run playbooks/patch.yml again"


def adaptive_release_problems(parser: server_flags.Parser) -> Iterator[str]:
    """Yield why the release can't choose its number of draft steps by batch size."""
    version = Version.parse(parser.version)
    if version not in Specifier.parse(ADAPTIVE_SINCE) or not parser.find(server_flags.ADAPTIVE_CONFIG_FLAG):
        yield (
            f"speculation.candidate_steps: SGLang {version.text} can't choose the number of draft steps by "
            "batch size: take 0.5.13 or newer (sglang_release_version), or leave candidate_steps out"
        )


def adaptive_problems(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield why SGLang would ignore ``candidate_steps`` with these flags (by dest)."""
    for dest in ADAPTIVE_ENDS_WITH:
        if flags.get(dest):
            flag = dest.replace("_", "-")
            yield (
                f"speculation.candidate_steps has no effect with {flag}, which turns SGLang's adaptive "
                f"speculation off: leave out candidate_steps or {flag}"
            )
    if not flags.get("enable_dp_attention") and _number(flags, "attn_dp_size", 1) > 1:
        yield (
            "speculation.candidate_steps has no effect with attn-dp-size above 1, which turns SGLang's "
            "adaptive speculation off: leave out candidate_steps or attn-dp-size"
        )


def _steps_in_file(path: Path) -> list[int]:
    """Return every number of draft steps in a file of --speculative-adaptive-config.

    Raise OSError or ValueError where SGLang could not read it.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        raise ValueError("it is no JSON object")
    # SGLang 0.5.15 adaptive_spec_params.py, _load_adaptive_config: only keys of digits are slots.
    slots = {key: slot for key, slot in content.items() if key.isdigit()}
    if not slots:
        raise ValueError('it has no batch size, such as {"1": {"candidate_steps": [3]}}')
    depths: list[int] = []
    for key, slot in slots.items():
        steps = slot.get("candidate_steps") if isinstance(slot, Mapping) else None
        if not isinstance(steps, list) or not all(isinstance(number, int) for number in steps):
            raise ValueError(f"{key} has no candidate_steps, a list of whole numbers")
        depths += steps
    return depths


def _dynamic_adaptive_problems(flags: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """Yield why adaptive speculation, set by hand, can't choose the depth beside ``dynamic``.

    Its step 0 verifies one token where ``dynamic`` decodes, and SGLang's default table has step 0.
    A relative path counts from ``directory``, in which the server runs.
    """
    fix = "set the arm's speculation.candidate_steps instead of speculative-adaptive"
    config = flags.get("speculative_adaptive_config")
    if not config:
        yield (
            "dynamic speculation decodes without speculation itself, and the default table of "
            f"speculative-adaptive has step 0 for that: {fix}"
        )
        return
    path = directory / str(config)
    try:
        depths = _steps_in_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        yield f"speculative-adaptive-config {path} can't be read ({reason}): correct it, or {fix}"
        return
    if 0 in depths:
        yield (
            f"speculative-adaptive-config {path} has step 0, and dynamic speculation decodes without "
            f"speculation itself: take 0 out of its candidate_steps, or {fix}"
        )


def dynamic_problems(
    flags: Mapping[str, Any],
    draft: Config | None,
    environment: Mapping[str, str],
    adaptive: Mapping[str, Any] | None = None,
    directory: Path = Path(),
) -> Iterator[str]:
    """Yield why a server with these flags (by dest) can't turn speculation off and on; the server itself refuses the same, but later.

    ``adaptive`` are the slots that an arm's candidate_steps give; they never have step 0.
    """
    threshold = flags.get("speculative_dynamic_disable_threshold")
    if threshold is None:
        return
    algorithm = str(flags.get("speculative_algorithm") or "").upper()
    if not algorithm:
        yield "a threshold of dynamic speculation needs speculation: set the arm's speculation, or leave dynamic out"
    elif algorithm != "EAGLE3":
        yield f"dynamic speculation is for EAGLE-3 drafts, which can catch up exactly: set speculation.algorithm to EAGLE3 (is {algorithm})"

    topk = _number(flags, "speculative_eagle_topk", 1)
    if topk != 1:
        yield f"dynamic speculation is for chains of drafted tokens, not for trees: set speculation.topk to 1 (is {topk})"
    layers = text_config(draft).get("num_hidden_layers") if draft else None
    if flags.get("enable_multi_layer_eagle"):
        yield "dynamic speculation: the K/V of a multi-layer draft can't be written without running it: leave out enable-multi-layer-eagle"
    elif isinstance(layers, int) and layers > 1:
        yield f"dynamic speculation: the K/V of a draft of {layers} layers can't be written without running it: use one of one layer"
    if flags.get("enable_dp_attention") or _number(flags, "attn_dp_size", 1) > 1:
        yield "dynamic speculation: with DP attention each rank has its own batches, and would decide alone: leave out enable-dp-attention"
    if _number(flags, "pp_size", 1) > 1:
        yield f"dynamic speculation is not for pipeline parallelism: set pp-size to 1, and tp-size instead (is {flags['pp_size']})"
    if flags.get("enable_lora") or flags.get("lora_paths"):
        yield "dynamic speculation was not tried with LoRA: leave out enable-lora and lora-paths"
    if flags.get("speculative_adaptive") and not adaptive:
        yield from _dynamic_adaptive_problems(flags, directory)
    if flags.get("enable_two_batch_overlap"):
        yield "dynamic speculation was not tried with two batches overlapped: leave out enable-two-batch-overlap"
    if str(flags.get("disaggregation_mode") or "null") != "null" or flags.get("enable_pdmux"):
        yield "dynamic speculation was not tried with prefill and decode apart: leave out disaggregation-mode and enable-pdmux"
    for dest, default, why in DYNAMIC_REFUSED_FLAGS:
        value = flags.get(dest)
        if value is not None and str(value) != str(default):
            yield f"dynamic speculation {why}: leave out {dest.replace('_', '-')} (is {value})"
    if str(threshold) == "auto":
        if not environment.get("AERIE_DYNAMIC_CALIBRATION"):
            yield "a threshold auto needs a calibration: set the arm's dynamic.threshold to auto instead of the flag, or give a number"
    elif not str(threshold).isdigit():
        yield f"the threshold of dynamic speculation must be a number of requests, 0 or more, or auto (is {threshold})"
    elif int(threshold) >= (most := _number(flags, "max_running_requests", MAX_RUNNING_REQUESTS)):
        yield (
            f"a threshold of {threshold} never decodes plainly, since no more than {most} requests run at once: set max-running-requests "
            f"above {threshold} (without it {MAX_RUNNING_REQUESTS} with speculation), or a lower threshold"
        )


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES


def exposure_problems(instance: str, host: str, api_key: str | None) -> Iterator[str]:
    """Yield why ``instance`` may not listen on ``host``."""
    if not api_key and not is_loopback(host):
        yield f"instance {instance}: listening on {host} lets others reach it: set sglang_server_api_key, or host to 127.0.0.1"


PARALLEL_FLAGS = {
    "tp-size": "tp_size",
    "tensor-parallel-size": "tp_size",
    "pp-size": "pp_size",
    "pipeline-parallel-size": "pp_size",
    "dp-size": "dp_size",
    "data-parallel-size": "dp_size",
    "attn-dp-size": "attn_dp_size",
    "attention-data-parallel-size": "attn_dp_size",
    "enable-dp-attention": "enable_dp_attention",
    "base-gpu-id": "base_gpu_id",
    "gpu-id-step": "gpu_id_step",
}
"""Flags that decide how many GPUs a server uses, and which, with their dest. Source: server_args.py of SGLang 0.5.9 and 0.5.23."""


def _number(flags: Mapping[str, Any], dest: str, default: int) -> int:
    """Return a flag's whole number; ``default`` where it is left out or none."""
    value = str(flags.get(dest, default))
    return int(value) if value.isdigit() else default


PARALLEL_SIZES = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "base_gpu_id", "gpu_id_step")


def parallel_flags(*layers: Any) -> dict[str, Any]:
    """Return by dest the flags of ``layers``, from general to special, that decide which GPUs a server uses.

    It needs no parser, so that a controller can judge what a host would run.
    """
    flags: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items() if isinstance(layer, Mapping) else ():
            if dest := PARALLEL_FLAGS.get(server_flags.plain(str(name))):
                flags[dest] = value
    return {dest: value for dest, value in flags.items() if value not in (None, False)}


def gpus_used(gpus: list[int] | None, flags: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the GPUs that a server with these flags (by dest) uses; ``gpus`` are all it sees, None is every GPU."""
    if gpus is not None:
        return gpus
    first, step = _number(flags, "base_gpu_id", 0), _number(flags, "gpu_id_step", 1)
    return [first + step * rank for rank in range(gpus_needed(flags))]


def gpus_needed(flags: Mapping[str, Any]) -> int:
    """Return how many GPUs the flags (by argparse dest) use."""
    # server_args.py: with DP attention the replicas share the tensor-parallel GPUs.
    shared = flags.get("enable_dp_attention") or _number(flags, "attn_dp_size", 1) > 1
    return _number(flags, "tp_size", 1) * _number(flags, "pp_size", 1) * (1 if shared else _number(flags, "dp_size", 1))


def gpu_problems(instance: str, gpus: list[int] | None, flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the GPUs of ``instance`` and its parallelism contradict each other."""
    if gpus is None:
        return
    needed = gpus_needed(flags)
    if len(set(gpus)) != len(gpus):
        yield f"instance {instance}: gpus {gpus} names one twice"
    elif len(gpus) < needed:
        cure = f"list {needed}, or set tp-size to {len(gpus)}"
        yield f"instance {instance}: its flags use {needed} GPUs (tp-size x pp-size x dp-size), gpus gives {len(gpus)}: {cure}"
    elif len(gpus) > needed:
        yield f"instance {instance}: gpus gives {len(gpus)}, its flags use {needed}: set tp-size to {len(gpus)}, or list {needed}"


def shared_gpu_problems(instance: str, gpus: Collection[int], running: Mapping[str, Collection[int]]) -> Iterator[str]:
    """Yield which of an instance's GPUs other instances of this host use now; ``running`` has the GPUs of each by name."""
    for other, used in running.items():
        if shared := sorted(set(gpus) & set(used)):
            subject = f"GPU {shared[0]} is" if len(shared) == 1 else f"GPUs {listing(shared)} are"
            yield (
                f"instance {instance}: {subject} used by instance {other}, which runs on this host: give instance {instance} other GPUs "
                f"(gpus in sglang_server_instances), or stop {other} (playbooks/stop.yml, with {other} among sglang_server_instances)"
            )


def flags_of_argv(argv: Sequence[str]) -> dict[str, Any]:
    """Return the flags of a server's command line by name, a flag without a value as True."""
    flags: dict[str, Any] = {}
    for word, following in zip(argv, (*argv[1:], "--"), strict=True):
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            flags[name] = value if has_value else True if following.startswith("--") else following
    return flags


def port_problems(instance: str, root: str, host: str, port: int, ours: Callable[[], Container[int]]) -> Iterator[str]:
    """Yield who holds the port, unless it is one of ``ours`` (tells the process ids of this instance)."""
    holders = processes.holders(port)
    # Asked after the listeners: our server may have begun to listen in between.
    known = ours()
    strangers = [process for process in holders or () if process.pid not in known]
    for process in strangers:
        other = process.variable("AERIE_INSTANCE")
        whose = (
            f", instance {other} of {process.variable('AERIE_ROOT')}"
            if other and (other, process.variable("AERIE_ROOT")) != (instance, root)
            else ""
        )
        yield f"instance {instance}: port {port} is taken by process {process.pid} ({process.title}{whose}): stop it, or take another port"
    if holders == [] and not _can_bind(host, port):
        yield f"instance {instance}: port {port} is taken by a process of another user: stop it, or choose another port"


def _can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
