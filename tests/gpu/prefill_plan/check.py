#!/usr/bin/env python3
"""Plans prefills on a GPU with lengths of the host and with lengths of the GPU: are plan and attention the same, and who waits.

    IMAGE_PYTHON tests/gpu/prefill_plan/check.py [--rounds 200] [--out FILE]

It takes FlashInfer's own wrappers, ragged and paged, of Llama 8B's shape in bf16, and the overlay of the patch set flashinfer_prefill_plan.
Each round has other lengths, and prefixes or none. Then the host plans behind work that keeps the GPU busy for a while: how long it is
held up is told in milliseconds. Exits with 1 where a plan or an answer differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
OVERLAY = PROJECT / "patches/flashinfer_prefill_plan/overlay/sglang/srt/layers/attention/aerie_flashinfer_prefill_plan.py"
HEADS, KV_HEADS, SIZE, POOL = 32, 8, 128, 65536
BUSY_MATRIX = 8192


def overlay() -> ModuleType:
    os.environ["AERIE_FLASHINFER_PREFILL_PLAN"] = "host"
    spec = importlib.util.spec_from_file_location("aerie_flashinfer_prefill_plan", OVERLAY)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Attention:
    """One pair of wrappers, as SGLang's backend has it, with K and V that all pairs share."""

    def __init__(self, kv: Any) -> None:
        import flashinfer
        import torch

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.ragged: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self.paged: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self.kv = kv

    def plan(self, planners: tuple[Any, Any], queries: Any, cached: Any, indices: Any, last_pages: Any) -> None:
        import torch

        ragged, paged = planners
        ragged.begin_forward(queries, queries, HEADS, KV_HEADS, SIZE, q_data_type=torch.bfloat16)
        paged.begin_forward(
            queries, cached, indices, last_pages, HEADS, KV_HEADS, SIZE, 1, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            custom_mask=None, non_blocking=True, fixed_split_size=None,
        )  # fmt: skip

    def run(self, q: Any, k: Any, v: Any, *, is_cached: bool) -> list[Any]:
        scale = SIZE**-0.5
        fresh = self.ragged.forward_return_lse(q, k, v, causal=True, sm_scale=scale)
        return [*fresh, *(self.paged.forward_return_lse(q, self.kv, causal=False, sm_scale=scale) if is_cached else ())]


def layout(lengths: list[int], prefixes: list[int]) -> tuple[Any, Any, Any, Any]:
    """Return what SGLang plans with, on the GPU: query and cache offsets, slots, tokens on last pages."""
    import torch

    def offsets(values: list[int]) -> Any:
        return torch.tensor([0, *values], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)

    slots = torch.randint(0, POOL, (sum(prefixes) + 256,), dtype=torch.int32, device="cuda")
    queries = offsets([length - prefix for length, prefix in zip(lengths, prefixes, strict=True)])
    return queries, offsets(prefixes), slots, torch.ones(len(lengths), dtype=torch.int32, device="cuda")


def drawn(chance: random.Random, number: int) -> tuple[list[int], list[int]]:
    """Return whole lengths and prefixes; every third round has no prefix, as without a prefix cache."""
    new = [chance.choice((1, chance.randint(2, 128), chance.randint(128, 700))) for _ in range(chance.randint(1, 12))]
    prefixes = [0 if number % 3 == 0 else chance.choice((0, chance.randint(1, 900))) for _ in new]
    return [length + prefix for length, prefix in zip(new, prefixes, strict=True)], prefixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import flashinfer
    import torch

    ours = overlay()
    kv = tuple(torch.randn(POOL, 1, KV_HEADS, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    theirs_pair, ours_pair = Attention(kv), Attention(kv)
    chance = random.Random(1)

    def planned_by_host(lengths: list[int], prefixes: list[int]) -> tuple[Any, Any]:
        ours.note(None, True, torch.empty(len(lengths)), torch.tensor(lengths), prefixes)
        return tuple(ours.planners(ours_pair.ragged, ours_pair.paged))  # type: ignore[return-value]

    differ = {"plans": 0, "answers": 0}
    for number in range(asked.rounds):
        lengths, prefixes = drawn(chance, number)
        where = layout(lengths, prefixes)
        tokens = int(where[0][-1])
        q, k, v = (torch.randn(tokens, heads, SIZE, dtype=torch.bfloat16, device="cuda") for heads in (HEADS, KV_HEADS, KV_HEADS))
        theirs_pair.plan((theirs_pair.ragged, theirs_pair.paged), *where)
        planners = planned_by_host(lengths, prefixes)
        if planners[0] is ours_pair.ragged:
            sys.exit(f"FlashInfer {flashinfer.__version__} has another backend: {ours_pair.ragged._backend}")
        ours_pair.plan(planners, *where)
        for name in ("ragged", "paged"):
            plans = [list(getattr(pair, name)._plan_info) for pair in (theirs_pair, ours_pair)]
            differ["plans"] += plans[0] != plans[1]
        answers = zip(*(pair.run(q, k, v, is_cached=any(prefixes)) for pair in (theirs_pair, ours_pair)), strict=True)
        differ["answers"] += not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in answers)

    # Who waits
    matrix = torch.randn(BUSY_MATRIX, BUSY_MATRIX, dtype=torch.bfloat16, device="cuda")
    lengths, prefixes = [128, 300], [0, 100]
    where = layout(lengths, prefixes)
    held: dict[str, list[float]] = {"lengths on the GPU": [], "lengths on the host": []}
    busy: list[float] = []
    for _ in range(20):
        for name in held:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(6):
                matrix @ matrix
            end.record()
            started = time.perf_counter()
            if name == "lengths on the GPU":
                theirs_pair.plan((theirs_pair.ragged, theirs_pair.paged), *where)
            else:
                ours_pair.plan(planned_by_host(lengths, prefixes), *where)
            held[name].append(1e3 * (time.perf_counter() - started))
            torch.cuda.synchronize()
            busy.append(begin.elapsed_time(end))
    told = {
        "gpu": torch.cuda.get_device_name(),
        "flashinfer": flashinfer.__version__,
        "backends": [ours_pair.ragged._backend, ours_pair.paged._backend],
        "rounds": asked.rounds,
        "differ": differ,
        "busy_ms": round(statistics.median(busy), 3),
        "plan_ms": {name: round(statistics.median(values), 3) for name, values in held.items()},
    }
    print(json.dumps(told))
    if asked.out:
        asked.out.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(1 if any(differ.values()) else 0)


if __name__ == "__main__":
    main()
