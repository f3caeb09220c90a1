"""What is known to fail before a model is loaded: drafts that don't fit, ports in use. Standard library only: this runs on hosts."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from ansible.module_utils.aerie import processes

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


def gpus_needed(flags: Mapping[str, Any]) -> int:
    """Return how many GPUs the flags (by argparse dest) use."""

    def size(dest: str) -> int:
        value = str(flags.get(dest, 1))
        return int(value) if value.isdigit() else 1

    # server_args.py: with DP attention the replicas share the tensor-parallel GPUs.
    shared = flags.get("enable_dp_attention") or size("attn_dp_size") > 1
    return size("tp_size") * size("pp_size") * (1 if shared else size("dp_size"))


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
