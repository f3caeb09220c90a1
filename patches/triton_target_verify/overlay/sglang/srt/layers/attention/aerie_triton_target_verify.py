"""Gives target verifications of the triton backend, and the draft's extend after each, their own kernel.

Made by Aerie (patch set triton_target_verify). SGLang runs both through the kernel for prefills,
which goes serially over the prefix once for each query head; aerie_target_verify_kernel.py reads it
as a decode does.
AERIE_TARGET_VERIFY chooses: ``grouped`` (also where it is not set), ``extend`` or ``0`` (SGLang's own), or
``check`` (both: SGLang's answer is used, and the server ends where the two differ by more than rounding).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import torch
from sglang.srt.layers.attention import aerie_target_verify_kernel as kernel

VARIABLE = "AERIE_TARGET_VERIFY"
GROUPED, EXTEND, CHECK = "grouped", "extend", "check"
QUERY_TYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE_TYPES = (*QUERY_TYPES, torch.float8_e4m3fn, torch.float8_e5m2)
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-3}
"""The largest difference that is rounding, by type, in parts of the largest value of the answer."""
LOOK_SECONDS = 5.0
QUIET_SECONDS = 60.0
"""After a CUDA graph was captured: a copy from the GPU, from whichever thread, ends a capture."""

logger = logging.getLogger(__name__)


def how() -> str:
    """Return what the environment asks for."""
    value = os.environ.get(VARIABLE) or GROUPED
    if value == "0":
        return EXTEND
    if value not in (GROUPED, EXTEND, CHECK):
        raise ValueError(f"{VARIABLE} must be {GROUPED}, {EXTEND} or {CHECK} (is {value}): correct it, or leave it out")
    return value


HOW = how()
reported: set[str] = set()
pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []
"""In check mode, of what SGLang's kernel computes next: the layer's name, the answer of ours, and the
slots of the cache, of shape (requests, drafted)."""


# For hooks


def attend(
    backend: Any,
    layer: Any,
    forward_batch: Any,
    q: torch.Tensor,
    out: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    window_offsets: torch.Tensor | None,
    window: int,
    causal: bool,
    logit_cap: float,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
    score_mod: Any = None,
) -> bool:
    """Attend for a verification or the draft's extend after it.

    Return True where ``out`` is written, and False where SGLang's kernel is to write it.
    """
    if HOW == EXTEND or not is_served(forward_batch.forward_mode):
        return False
    metadata = backend.forward_metadata
    drafted = int(metadata.max_extend_len)
    k_buffer = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    v_buffer = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    slots = drafted_slots(backend.token_to_kv_pool, metadata, forward_batch, window)
    rows = drafted * (queries.shape[1] // k_buffer.shape[-2])
    requests = queries.shape[0] // drafted
    choice = kernel.choose(gpu(queries.device), requests, k_buffer.shape[-2], rows, layer.qk_head_dim, queries.element_size())
    reason = refusal(layer, queries, k_buffer, v_buffer, kv_indptr, kv_indices, slots, drafted, causal, score_mod)
    name = f"{'target' if forward_batch.forward_mode.is_target_verify() else 'draft'} layer {layer.layer_id}"
    if reason is not None or choice is None or slots is None:
        report(name, reason or "its keys are too large for this GPU's shared memory")
        return False
    answer = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
    if HOW == CHECK:
        answer = torch.empty_like(answer)
        pending.append((name, answer, slots.view(-1, drafted)))
    tile, splits = choice
    kernel.attend(
        queries,
        answer,
        k_buffer,
        v_buffer,
        kv_indptr,
        kv_indices,
        slots,
        metadata.custom_mask,
        metadata.mask_indptr,
        drafted,
        layer.scaling * k_scale,
        v_scale,
        logit_cap,
        window,
        window_offsets,
        sinks,
        tile=tile,
        splits=splits,
    )
    return HOW == GROUPED


def compare(out: torch.Tensor) -> None:
    """Compare, in check mode, SGLang's answer with the kernel's. Nothing waits: a thread looks at the results."""
    if pending:
        name, answer, slots = pending.pop()
        checks.note(name, answer, out.view_as(answer), slots)


def graph_buffers_begin(backend: Any, requests: int, tokens: int, indices: torch.Tensor | None) -> None:
    """Have a backend whose graphs only verify, or extend the draft, make next to no decode buffers.

    SGLang makes those of a decode of all ``tokens`` (init_cuda_graph_state of triton_backend.py):
    tokens x heads x splits x value size x 4 bytes, 2.1 GB for Kimi-K2.5 at TP 8 with 128 requests.
    Its metadata of a verification and of the draft's extend have none of them.
    The draft's steps decode, and are given their ``indices``.
    """
    drafted = backend.num_draft_tokens or 0
    if HOW != EXTEND and indices is None and drafted > 1 and tokens == requests * drafted:
        backend.aerie_kv_splits, backend.max_kv_splits = backend.max_kv_splits, 1


def graph_buffers_end(backend: Any) -> None:
    """Put back the number of splits, and leave no decode buffer that is too small."""
    splits = vars(backend).pop("aerie_kv_splits", None)
    if splits is None:
        return
    backend.max_kv_splits = splits
    backend.cuda_graph_attn_logits = backend.cuda_graph_attn_lse = backend.cuda_graph_swa_attn_logits = None
    for name in ("cuda_graph_num_kv_splits", "cuda_graph_window_num_kv_splits"):
        counts = getattr(backend, name, None)
        if counts is not None:
            counts.fill_(splits)


# What it is for


def is_served(mode: Any) -> bool:
    """Return whether the kernel is for a forward mode: each request has as many tokens as were drafted."""
    return bool(mode.is_target_verify() or mode.is_draft_extend_v2())


def drafted_slots(pool: Any, metadata: Any, forward_batch: Any, window: int) -> torch.Tensor | None:
    """Return where the cache has the drafted tokens of a layer; None where that can't be told."""
    if getattr(metadata, "out_cache_loc_full_physical", None) is not None:
        return None
    # SWAKVPool keeps layers with a window elsewhere, by slots of their own.
    if window > -1 and hasattr(pool, "translate_loc_from_full_to_swa"):
        return getattr(metadata, "swa_out_cache_loc", None)
    return forward_batch.out_cache_loc


def refusal(
    layer: Any,
    queries: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None,
    slots: torch.Tensor | None,
    drafted: int,
    causal: bool,
    score_mod: Any,
) -> str | None:
    """Return why the kernel can't serve a verification; None where it can."""
    requests = kv_indptr.shape[0] - 1
    if not causal or score_mod is not None:
        return "its attention is not causal or has a score function"
    if (layer.xai_temperature_len or -1) > 0:
        return "its scores have a temperature by position"
    if slots is None or k_buffer.dim() != 3 or v_buffer.dim() != 3:
        return "its cache shares memory by pages"
    if not 0 < drafted <= kernel.MOST_DRAFTED:
        return f"{drafted} tokens are drafted, and {kernel.MOST_DRAFTED} are the most"
    if kv_indices is None:
        return "the keys in its window are not listed"
    if queries.shape[0] != requests * drafted or slots.shape[0] != queries.shape[0]:
        return "requests have different numbers of drafted tokens"
    if queries.dtype not in QUERY_TYPES or k_buffer.dtype not in CACHE_TYPES or v_buffer.dtype != k_buffer.dtype:
        return f"queries are {queries.dtype} and the cache is {k_buffer.dtype}"
    if queries.shape[1] % k_buffer.shape[1]:
        return "its query heads are no multiple of its KV heads"
    if layer.qk_head_dim in kernel.LATENT and v_buffer.data_ptr() != k_buffer.data_ptr():
        return "its values are no part of its keys"
    return None


def report(name: str, reason: str) -> None:
    """Log once that layers with this reason are left to SGLang."""
    if reason not in reported:
        reported.add(reason)
        logger.warning("target verification: %s and those alike run on SGLang's extend kernel: %s", name, reason)


def gpu(device: torch.device) -> kernel.Gpu:
    if device.type != "cuda":
        return kernel.Gpu((0, 0), 1)
    properties = torch.cuda.get_device_properties(device)
    return kernel.Gpu((properties.major, properties.minor), properties.multi_processor_count)


class Checks:
    """The largest difference of each layer, on the GPU, and a thread that reads them now and then."""

    def __init__(self) -> None:
        self.worst: dict[str, torch.Tensor] = {}
        self.tolerance = 0.0
        self._quiet_until = 0.0
        self._thread: threading.Thread | None = None

    def note(self, layer: str, answer: torch.Tensor, expected: torch.Tensor, slots: torch.Tensor) -> None:
        """Note the difference in parts of the largest expected value; a CUDA graph captures it.

        The tokens of a request that pads a graph's batch, and of those that warm up a capture, share
        one slot of the cache (out_cache_loc is 0, or 1, in SGLang's
        eagle_draft_extend_cuda_graph_runner.py), so that there is one key for all of them. Nobody
        reads their answers.
        """
        self.tolerance = TOLERANCES[expected.dtype]
        if expected.is_cuda and torch.cuda.is_current_stream_capturing():
            self._quiet_until = time.monotonic() + QUIET_SECONDS
        is_padding = (slots[:, 1:] == slots[:, :1]).any(1).repeat_interleave(slots.shape[1])[:, None, None]
        expected = expected.float().masked_fill(is_padding, 0.0)
        difference = (answer.float().masked_fill(is_padding, 0.0) - expected).abs().amax()
        share = torch.nan_to_num(difference / expected.abs().amax().clamp_min(1e-6), nan=float("inf"))
        worst = self.worst.setdefault(layer, torch.zeros_like(share))
        worst.copy_(torch.maximum(worst, share))
        if self._thread is None:
            self._quiet_until = time.monotonic() + QUIET_SECONDS  # graphs are captured next
            self._thread = threading.Thread(target=self._watch, daemon=True, name="aerie-target-verify")
            self._thread.start()

    def read(self) -> dict[str, float]:
        return {layer: float(worst) for layer, worst in list(self.worst.items())}

    def _watch(self) -> None:
        seen: dict[str, float] = {}
        while True:
            time.sleep(LOOK_SECONDS)
            if time.monotonic() < self._quiet_until:
                continue
            shares = self.read()
            if shares != seen:
                seen = shares
                layer = max(shares, key=lambda name: shares[name])
                logger.info(
                    "target verification, check: layers differ by %s at most, %s most",
                    f"{shares[layer]:.2e}",
                    layer,
                )
                if not shares[layer] <= self.tolerance:
                    logger.error("target verification, check: %s differs by %s: ending", layer, shares[layer])
                    os.kill(os.getpid(), signal.SIGTERM)


checks = Checks()
