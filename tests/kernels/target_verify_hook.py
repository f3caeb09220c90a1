"""Runs what patch set triton_target_verify hooks into SGLang's triton backend, on the CPU, by Triton's interpreter.

target_verify_hook.py OVERLAY HOW    OVERLAY is the directory of the overlay's files, HOW the value of AERIE_TARGET_VERIFY
Prints one JSON object. A backend stands for SGLang's: two requests of four tokens each, with a cache that has
their keys; the expected answer is attention in float64.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PREFIXES, DRAFTED, HEADS, KV_HEADS, SIZE = (21, 6), 4, 4, 2, 32


class Step:
    """One forward pass of one layer: what SGLang's backend has when it is about to call its kernel."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        tokens = sum(PREFIXES) + len(PREFIXES) * DRAFTED
        places = torch.randperm(tokens, generator=generator) + 1
        self.keys, self.values = draw(tokens + 1, KV_HEADS, SIZE), draw(tokens + 1, KV_HEADS, SIZE)
        self.indices, self.slots = places[: sum(PREFIXES)], places[sum(PREFIXES) :]
        self.indptr = torch.tensor([0, *PREFIXES]).cumsum(0).int()
        self.queries = draw(len(PREFIXES) * DRAFTED, HEADS * SIZE)
        self.out = torch.full_like(self.queries, float("nan"))
        self.layer = SimpleNamespace(
            layer_id=3, tp_q_head_num=HEADS, qk_head_dim=SIZE, v_head_dim=SIZE, scaling=SIZE**-0.5, xai_temperature_len=-1
        )
        self.metadata = SimpleNamespace(max_extend_len=DRAFTED, custom_mask=None, mask_indptr=None, swa_out_cache_loc=None)
        self.window, self.causal = -1, True

    def attend(self, hook: Any, mode: str) -> bool:
        pool = SimpleNamespace(get_key_buffer=lambda _: self.keys, get_value_buffer=lambda _: self.values)
        backend = SimpleNamespace(forward_metadata=self.metadata, token_to_kv_pool=pool)
        forward_mode = SimpleNamespace(
            is_target_verify=lambda: mode == "TARGET_VERIFY", is_draft_extend_v2=lambda: mode == "DRAFT_EXTEND_V2"
        )
        batch = SimpleNamespace(forward_mode=forward_mode, out_cache_loc=self.slots)
        return bool(
            hook.attend(
                *(backend, self.layer, batch, self.queries, self.out, self.indptr, self.indices, None, self.window),
                *(self.causal, 0.0, None, 1.0, 1.0),
            )
        )

    def expected(self) -> torch.Tensor:
        answers = []
        for request, prefix in enumerate(PREFIXES):
            own = self.slots[request * DRAFTED : (request + 1) * DRAFTED]
            place = torch.cat([self.indices[self.indptr[request] : self.indptr[request + 1]], own])
            keys, values = (cache[place].double().repeat_interleave(HEADS // KV_HEADS, 1) for cache in (self.keys, self.values))
            queries = self.queries[request * DRAFTED : (request + 1) * DRAFTED].view(DRAFTED, HEADS, SIZE).double()
            scores = torch.einsum("lhd,nhd->hln", queries, keys) * SIZE**-0.5
            is_later = torch.arange(len(place))[None, :] > prefix + torch.arange(DRAFTED)[:, None]
            shares = scores.masked_fill(is_later, float("-inf")).softmax(-1)
            answers.append(torch.einsum("hln,nhd->lhd", shares, values).reshape(DRAFTED, -1))
        return torch.cat(answers).float()


def splits_of_buffers(hook: Any, requests: int, tokens: int, drafted: int | None, indices: Any = None) -> list[int | None]:
    """Return the splits that graph buffers are made for, what is left of them, and the splits afterwards."""
    backend = SimpleNamespace(num_draft_tokens=drafted, max_kv_splits=16)
    hook.graph_buffers_begin(backend, requests, tokens, indices)
    made = backend.max_kv_splits
    for name in ("attn_logits", "attn_lse", "swa_attn_logits"):
        setattr(backend, f"cuda_graph_{name}", torch.zeros(tokens, made))
    backend.cuda_graph_num_kv_splits = torch.full((tokens,), made)
    hook.graph_buffers_end(backend)
    left = None if backend.cuda_graph_attn_logits is None else backend.cuda_graph_attn_logits.shape[1]
    assert (left is None) == (backend.cuda_graph_attn_lse is None) == (backend.cuda_graph_swa_attn_logits is None)
    assert set(vars(backend)) <= {"num_draft_tokens", "max_kv_splits"} | {name for name in vars(backend) if name.startswith("cuda_graph_")}
    return [made, left, backend.max_kv_splits, int(backend.cuda_graph_num_kv_splits[0])]


def error(answer: torch.Tensor, expected: torch.Tensor) -> float:
    return (answer - expected).abs().nan_to_num(nan=float("inf")).max().item()


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["AERIE_TARGET_VERIFY"] = sys.argv[2]
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(sys.argv[1]))] if name.endswith("attention") else []
        sys.modules[name] = package
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang").addHandler(handler)
    hook = importlib.import_module("sglang.srt.layers.attention.aerie_triton_target_verify")
    hook.checks._thread = object()  # nothing looks at the results but this script
    result: dict[str, Any] = {}

    for mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2", "EXTEND", "DECODE"):
        step = Step(1)
        served = step.attend(hook, mode)
        result[mode] = {"served": served, "error": error(step.out, step.expected()) if served else None}
        step.out.copy_(step.expected())  # what SGLang's kernel would have written, where the hook leaves it to that
        if not served:
            hook.compare(step.out)
    result["worst"] = hook.checks.read()

    for name, change in {
        "not causal": lambda step: setattr(step, "causal", False),
        "a temperature by position": lambda step: setattr(step.layer, "xai_temperature_len", 8),
        "no indices": lambda step: setattr(step, "indices", None),
        "different numbers of tokens": lambda step: setattr(step.metadata, "max_extend_len", DRAFTED - 1),
        "pages of memory": lambda step: setattr(step.metadata, "out_cache_loc_full_physical", step.slots),
        "integers": lambda step: setattr(step, "keys", step.keys.to(torch.int8)),
    }.items():
        for _ in range(2):
            step = Step(2)
            change(step)
            result[name] = {"served": step.attend(hook, "TARGET_VERIFY")}
    result["messages"] = messages

    result["buffers"] = {
        "verification": splits_of_buffers(hook, 8, 32, 4),
        "decode beside speculation": splits_of_buffers(hook, 8, 8, 4),
        "decode": splits_of_buffers(hook, 8, 8, None),
        "the draft's steps": splits_of_buffers(hook, 8, 32, 4, torch.zeros(1)),
    }

    hook.checks.worst.clear()
    wrong, padded = Step(3), Step(4)
    if not wrong.attend(hook, "TARGET_VERIFY"):
        hook.compare(wrong.expected() + 1.0)
    result["worst where the answers differ"] = hook.checks.read()
    hook.checks.worst.clear()
    padded.slots[DRAFTED:] = 0  # the second request pads the batch
    if not padded.attend(hook, "TARGET_VERIFY"):
        answer = padded.expected()
        answer[DRAFTED:] = 7.0
        hook.compare(answer)
    result["worst where a request pads the batch"] = hook.checks.read()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
