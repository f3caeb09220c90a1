"""The kernel of patch set triton_target_verify on a GPU: errors against float64, and times beside SGLang's kernels.

kernel_times.py OUT.json [check] [time]    with a patched SGLang on PYTHONPATH; both parts by default

Errors are of random prefixes, chains and trees, in the type of a server, ours and those of SGLang's kernel
for prefills. Times are of equal prefixes, four drafted tokens a request, by replays of a CUDA graph; a decode
is SGLang's own with the best of its numbers of splits.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from sglang.srt.layers.attention import aerie_target_verify_kernel as kernel
from sglang.srt.layers.attention import aerie_triton_target_verify
from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

DEVICE = "cuda"
PREFIXES = (0, 3, 517, 1200, 64, 2000, 31, 700)
REPLAYS = 30
MODELS = {"Llama-8B, TP 1": (32, 8, 128, 128), "MLA, 8 heads": (8, 1, 576, 512), "MLA, 64 heads": (64, 1, 576, 512)}
SIZES = (
    *((1, 512), (8, 512), (32, 512), (64, 512), (128, 512)),
    *((1, 8192), (8, 8192), (32, 8192), (1, 32768), (1, 131072)),
)
"""Requests, and tokens of the prefix of each."""


@dataclass
class Verification:
    """The tensors of one target verification, as SGLang's triton backend has them."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    prefixes: tuple[int, ...]
    drafted: int = 4
    is_tree: bool = False
    window: int = -1
    has_sinks: bool = False
    logit_cap: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        requests, drafted, cache_dtype = len(self.prefixes), self.drafted, self.cache_dtype or self.dtype
        self.is_mla = self.head_size in kernel.LATENT
        self.seen = [min(prefix, self.window) if self.window > 0 else prefix for prefix in self.prefixes]
        slots = torch.randperm(sum(self.seen) + requests * drafted, device=DEVICE) + 1
        self.keys = torch.randn(len(slots) + 1, self.kv_heads, self.head_size, device=DEVICE).to(cache_dtype)
        values = torch.randn(len(slots) + 1, self.kv_heads, self.value_size, device=DEVICE).to(cache_dtype)
        self.values = self.keys[..., : self.value_size] if self.is_mla else values
        self.queries = torch.randn(requests * drafted, self.heads, self.head_size, device=DEVICE).to(self.dtype)
        self.indices, self.slots = slots[: sum(self.seen)], slots[sum(self.seen) :]
        self.indptr = torch.tensor([0, *self.seen], device=DEVICE).cumsum(0).int()
        self.allowed = torch.ones(requests, drafted, drafted, dtype=torch.bool).tril()
        if self.is_tree:
            self.allowed &= (torch.rand(self.allowed.shape) < 0.5) | torch.eye(drafted, dtype=torch.bool)
        rows = [
            torch.cat([torch.ones(drafted, prefix, dtype=torch.bool), tree], 1).flatten()
            for prefix, tree in zip(self.prefixes, self.allowed, strict=True)
        ]
        self.mask = torch.cat(rows).to(DEVICE)
        self.mask_indptr = torch.tensor([0, *map(len, rows)]).cumsum(0).to(DEVICE)
        cut = [prefix - seen for prefix, seen in zip(self.prefixes, self.seen, strict=True)]
        self.window_offsets = torch.tensor(cut, dtype=torch.int32, device=DEVICE)
        self.sinks = torch.randn(self.heads, device=DEVICE) if self.has_sinks else None
        self.scale = self.head_size**-0.5
        self.query_indptr = torch.arange(0, (requests + 1) * drafted, drafted, device=DEVICE, dtype=torch.int32)
        self.own_keys = self.keys[self.slots].to(self.dtype)
        own_values = self.own_keys[..., : self.value_size] if self.is_mla else self.values[self.slots].to(self.dtype)
        self.own_values = own_values.contiguous()

    def empty(self) -> torch.Tensor:
        return torch.full((len(self.queries), self.heads, self.value_size), float("nan"), dtype=self.dtype, device=DEVICE)

    def tile_and_splits(self) -> tuple[kernel.Tile, int]:
        gpu = aerie_triton_target_verify.gpu(self.queries.device)
        rows = self.drafted * self.heads // self.kv_heads
        choice = kernel.choose(gpu, len(self.prefixes), self.kv_heads, rows, self.head_size, self.queries.element_size())
        assert choice is not None
        return choice

    def ours(self, out: torch.Tensor) -> None:
        tile, splits = self.tile_and_splits()
        kernel.attend(
            *(self.queries, out, self.keys, self.values, self.indptr, self.indices, self.slots, self.mask),
            *(self.mask_indptr, self.drafted, self.scale, 1.0, self.logit_cap, self.window, self.window_offsets),
            self.sinks,
            tile=tile,
            splits=splits,
        )

    def extend(self, out: torch.Tensor) -> None:
        extend_attention_fwd(
            *(self.queries, self.own_keys, self.own_values, out, self.keys, self.values, self.query_indptr, self.indptr),
            *(self.indices, self.mask, True, self.mask_indptr, self.drafted, 1.0, 1.0, self.scale, self.logit_cap),
            sliding_window_size=self.window,
            sinks=self.sinks,
            window_kv_offsets=self.window_offsets,
        )

    def decode_us(self) -> float:
        """Return the time of a decode of as many requests, with the best number of splits."""
        requests = len(self.prefixes)
        queries = self.queries[:requests].contiguous()
        out = torch.empty(requests, self.heads, self.value_size, dtype=self.dtype, device=DEVICE)
        times = []
        for splits in (1, 2, 4, 8, 16, 32):
            partial = torch.empty(requests, self.heads, splits, self.value_size, device=DEVICE)
            lse = torch.empty(requests, self.heads, splits, device=DEVICE)
            counts = torch.full((requests,), splits, device=DEVICE, dtype=torch.int32)
            arguments = (queries, self.keys, self.values, out, self.indptr, self.indices, partial, lse, counts, splits)
            times.append(graph_us(functools.partial(decode_attention_fwd, *arguments, self.scale, 1.0, 1.0)))
        return min(times)

    def expected(self, request: int) -> torch.Tensor:
        """Return the attention of one request in float64."""
        group, drafted, seen = self.heads // self.kv_heads, self.drafted, self.seen[request]
        own = slice(request * drafted, (request + 1) * drafted)
        places = torch.cat([self.indices[self.indptr[request] : self.indptr[request + 1]], self.slots[own]])
        keys, values = (cache[places].double().repeat_interleave(group, 1) for cache in (self.keys, self.values))
        scores = torch.einsum("lhd,nhd->hln", self.queries[own].double(), keys) * self.scale
        if self.logit_cap:
            scores = self.logit_cap * torch.tanh(scores / self.logit_cap)
        is_seen = torch.ones(drafted, len(places), dtype=torch.bool, device=DEVICE)
        is_seen[:, seen:] = self.allowed[request].to(DEVICE)
        if self.window > 0:
            positions = torch.arange(len(places), device=DEVICE)
            is_seen &= (seen + torch.arange(drafted, device=DEVICE))[:, None] <= positions[None, :] + self.window
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, drafted, 1)
            scores = torch.cat([scores, sinks], 2)
        return torch.einsum("hln,nhd->lhd", scores.softmax(-1)[..., : len(places)], values)

    def error(self, run: Callable[[torch.Tensor], None]) -> float:
        """Return the largest difference from float64, in parts of the largest value."""
        out = self.empty()
        run(out)
        worst, largest = 0.0, 1e-6
        for request in range(len(self.prefixes)):
            expected = self.expected(request)
            answer = out[request * self.drafted : (request + 1) * self.drafted].double()
            worst = max(worst, (answer - expected).abs().nan_to_num(nan=float("inf")).max().item())
            largest = max(largest, expected.abs().max().item())
        return worst / largest


def graph_us(run: Callable[[], None]) -> float:
    """Return the median microseconds of a replay of what ``run`` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS * 1000)
    return sorted(times[1:])[1]


CHECKS: dict[str, dict[str, Any]] = {
    "Llama, a chain": {"shape": (32, 8, 128, 128)},
    "Llama, a tree of 16": {"shape": (32, 8, 128, 128), "drafted": 16, "is_tree": True},
    "Llama, one request at 9,000": {"shape": (32, 8, 128, 128), "prefixes": (9000,)},
    "Llama, float16": {"shape": (32, 8, 128, 128), "dtype": torch.float16},
    "Llama, FP8 cache": {"shape": (32, 8, 128, 128), "cache_dtype": torch.float8_e4m3fn},
    "MLA, 8 heads, a chain": {"shape": (8, 1, 576, 512)},
    "MLA, 8 heads, a tree of 16": {"shape": (8, 1, 576, 512), "drafted": 16, "is_tree": True},
    "MLA, 8 heads, FP8 cache": {"shape": (8, 1, 576, 512), "cache_dtype": torch.float8_e4m3fn},
    "MLA, 64 heads, 32 requests": {"shape": (64, 1, 576, 512), "prefixes": PREFIXES * 4},
    "MLA, 64 heads, one request at 9,000": {"shape": (64, 1, 576, 512), "prefixes": (9000,)},
    "MLA of 288": {"shape": (8, 1, 288, 256)},
    "gpt-oss, sliding window and sinks": {"shape": (64, 8, 64, 64), "window": 128, "has_sinks": True},
    "gpt-oss, the same, a tree": {"shape": (64, 8, 64, 64), "drafted": 9, "is_tree": True, "window": 128, "has_sinks": True},
    "a logit cap": {"shape": (16, 4, 256, 256), "logit_cap": 30.0},
}


def main() -> None:
    out, parts = Path(sys.argv[1]), sys.argv[2:] or ["check", "time"]
    torch.manual_seed(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), **versions, "errors": {}, "times_us": []}
    for name, options in CHECKS.items() if "check" in parts else ():
        fields = {"prefixes": PREFIXES, **options}
        verification = Verification(*fields.pop("shape"), **fields)
        errors = {"ours": verification.error(verification.ours), "extend": verification.error(verification.extend)}
        result["errors"][name] = errors
        print(f"{name:38s} ours {errors['ours']:.1e}  extend {errors['extend']:.1e}", flush=True)
    for name, shape in MODELS.items() if "time" in parts else ():
        for requests, prefix in SIZES:
            verification = Verification(*shape, prefixes=(prefix,) * requests)
            answer = verification.empty()
            row: dict[str, Any] = {"model": name, "requests": requests, "prefix": prefix}
            row["extend"] = graph_us(functools.partial(verification.extend, answer))
            row["decode"] = verification.decode_us()
            row["ours"] = graph_us(functools.partial(verification.ours, answer))
            result["times_us"].append(row)
            ratio = row["ours"] / row["decode"]
            shown = {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}
            print(shown, f"{ratio:.2f}", flush=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
