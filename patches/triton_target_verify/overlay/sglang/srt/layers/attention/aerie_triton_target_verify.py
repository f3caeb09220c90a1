"""Gives target verifications of the triton backend an attention kernel of their own.

Made by Aerie (patch set triton_target_verify). SGLang runs them through the kernel for prefills, which goes
serially over the prefix once for each query head; aerie_target_verify_kernel.py reads it as a decode does.
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
import triton
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
pending: dict[int, torch.Tensor] = {}
"""In check mode, by layer, the kernel's answer of the verification that SGLang's kernel computes next."""


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
    """Attend for a target verification and return True, or return False where SGLang's kernel is to run."""
    if HOW == EXTEND or not forward_batch.forward_mode.is_target_verify():
        return False
    metadata = backend.forward_metadata
    drafted = int(metadata.max_extend_len)
    k_buffer = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    v_buffer = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    slots = drafted_slots(backend.token_to_kv_pool, metadata, forward_batch, window)
    rows = drafted * (queries.shape[1] // k_buffer.shape[-2])
    tile = kernel.choose_tile(capability(queries.device), layer.qk_head_dim, rows, queries.element_size())
    reason = refusal(layer, queries, k_buffer, v_buffer, kv_indptr, slots, drafted, causal, score_mod)
    if reason is not None or tile is None or slots is None:
        report(layer, reason or "its keys are too large for this GPU's shared memory")
        return False
    answer = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
    if HOW == CHECK:
        answer = torch.empty_like(answer)
        pending[layer.layer_id] = answer
    is_mla = layer.qk_head_dim in kernel.LATENT
    programs = queries.shape[0] // drafted * k_buffer.shape[1] * triton.cdiv(rows, tile.rows)
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
        splits=kernel.choose_splits(programs, multiprocessors(queries.device), is_mla),
    )
    return HOW == GROUPED


def compare(layer: Any, out: torch.Tensor) -> None:
    """Compare, in check mode, SGLang's answer with the kernel's. Nothing waits: a thread looks at the results."""
    answer = pending.pop(layer.layer_id, None)
    if answer is not None:
        checks.note(layer.layer_id, answer, out.view_as(answer))


# What it is for


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
    if queries.shape[0] != requests * drafted or slots.shape[0] != queries.shape[0]:
        return "requests have different numbers of drafted tokens"
    if queries.dtype not in QUERY_TYPES or k_buffer.dtype not in CACHE_TYPES or v_buffer.dtype != k_buffer.dtype:
        return f"queries are {queries.dtype} and the cache is {k_buffer.dtype}"
    if queries.shape[1] % k_buffer.shape[1]:
        return "its query heads are no multiple of its KV heads"
    if layer.qk_head_dim in kernel.LATENT and v_buffer.data_ptr() != k_buffer.data_ptr():
        return "its values are no part of its keys"
    return None


def report(layer: Any, reason: str) -> None:
    """Log once that layers with this reason are left to SGLang."""
    if reason not in reported:
        reported.add(reason)
        logger.warning("target verification of layer %s and those alike runs on SGLang's extend kernel: %s", layer.layer_id, reason)


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Checks:
    """The largest difference of each layer, on the GPU, and a thread that reads them now and then."""

    def __init__(self) -> None:
        self.worst: dict[int, torch.Tensor] = {}
        self.tolerance = 0.0
        self._quiet_until = 0.0
        self._thread: threading.Thread | None = None

    def note(self, layer: int, answer: torch.Tensor, expected: torch.Tensor) -> None:
        """Note the difference in parts of the largest expected value; a CUDA graph captures it."""
        self.tolerance = TOLERANCES[expected.dtype]
        if expected.is_cuda and torch.cuda.is_current_stream_capturing():
            self._quiet_until = time.monotonic() + QUIET_SECONDS
        difference = (answer.float() - expected.float()).abs().amax()
        share = torch.nan_to_num(difference / expected.float().abs().amax().clamp_min(1e-6), nan=float("inf"))
        worst = self.worst.setdefault(layer, torch.zeros_like(share))
        worst.copy_(torch.maximum(worst, share))
        if self._thread is None:
            self._quiet_until = time.monotonic() + QUIET_SECONDS  # graphs are captured next
            self._thread = threading.Thread(target=self._watch, daemon=True, name="aerie-target-verify")
            self._thread.start()

    def read(self) -> dict[int, float]:
        return {layer: float(worst) for layer, worst in list(self.worst.items())}

    def _watch(self) -> None:
        seen: dict[int, float] = {}
        while True:
            time.sleep(LOOK_SECONDS)
            if time.monotonic() < self._quiet_until:
                continue
            shares = self.read()
            if shares != seen:
                seen = shares
                layer = max(shares, key=lambda number: shares[number])
                logger.info(
                    "target verification, check: layers differ by %s at most, layer %s most",
                    f"{shares[layer]:.2e}",
                    layer,
                )
                if not shares[layer] <= self.tolerance:
                    logger.error("target verification, check: layer %s differs by %s: ending", layer, shares[layer])
                    os.kill(os.getpid(), signal.SIGTERM)


checks = Checks()
