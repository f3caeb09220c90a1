"""Runs the kernel of patch set triton_target_verify on the CPU, by Triton's interpreter, against float64.

target_verify_numerics.py KERNEL CASE...    KERNEL is the overlay's file, a CASE is JSON with fields of Case
Prints a line of JSON for each case: its largest error. In Triton's interpreter every program runs one after
the other, so that this says nothing about speed or races. It multiplies bfloat16 as if its bits were whole
numbers (Triton 3.6): cases are of the other types, and tests/gpu looks at bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """Shapes and options of one verification; ``prefixes`` are the lengths of its requests' prefixes."""

    prefixes: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    value_size: int = 64
    drafted: int = 4
    splits: int = 1
    tile: tuple[int, int] = (16, 16)
    is_tree: bool = False
    logit_cap: float = 0.0
    window: int = -1
    has_sinks: bool = False
    dtype: str = "float32"
    cache_dtype: str | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    seed: int = 0


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("target_verify_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def error(kernel: Any, case: Case) -> float:
    """Return the largest difference from float64, in parts of the largest value; NaN counts as infinite."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    requests, drafted = len(case.prefixes), case.drafted
    dtype = TYPES[case.dtype]
    cache_dtype = TYPES[case.cache_dtype or case.dtype]
    is_mla = case.head_size in kernel.LATENT
    seen = [min(prefix, case.window) if case.window > 0 else prefix for prefix in case.prefixes]
    slots = torch.randperm(sum(seen) + requests * drafted + 7, generator=generator) + 1
    keys = draw(len(slots) + 1, case.kv_heads, case.head_size)
    keys = (keys / case.k_scale).to(cache_dtype)
    values = keys[..., : case.value_size] if is_mla else (draw(*keys.shape[:2], case.value_size) / case.v_scale).to(cache_dtype)
    queries = draw(requests * drafted, case.heads, case.head_size).to(dtype)
    indptr = torch.tensor([0, *seen]).cumsum(0).int()
    indices, own = slots[: sum(seen)], slots[sum(seen) : sum(seen) + requests * drafted]
    allowed = torch.ones(requests, drafted, drafted, dtype=torch.bool).tril()
    if case.is_tree:
        allowed &= (torch.rand(allowed.shape, generator=generator) < 0.5) | torch.eye(drafted, dtype=torch.bool)
    rows = [
        torch.cat([torch.ones(drafted, prefix, dtype=torch.bool), tree], 1).flatten()
        for prefix, tree in zip(case.prefixes, allowed, strict=True)
    ]
    mask_indptr = torch.tensor([0, *map(len, rows)]).cumsum(0)
    offsets = torch.tensor([prefix - kept for prefix, kept in zip(case.prefixes, seen, strict=True)]).int()
    sinks = draw(case.heads) if case.has_sinks else None
    out = torch.full((requests * drafted, case.heads, case.value_size), float("nan"), dtype=dtype)
    scale = case.head_size**-0.5
    kernel.attend(
        queries,
        out,
        keys,
        values,
        indptr,
        indices,
        own,
        torch.cat(rows) if case.is_tree else None,
        mask_indptr,
        drafted,
        scale * case.k_scale,
        case.v_scale,
        case.logit_cap,
        case.window,
        offsets,
        sinks,
        tile=kernel.Tile(*case.tile, 4, 1),
        splits=case.splits,
    )
    worst, largest = 0.0, 1e-6
    for request in range(requests):
        place = torch.cat([indices[indptr[request] : indptr[request + 1]], own[request * drafted : (request + 1) * drafted]])
        group = case.heads // case.kv_heads
        k = (keys[place].double() * case.k_scale).repeat_interleave(group, 1)
        v = (values[place].double() * case.v_scale).repeat_interleave(group, 1)
        q = queries[request * drafted : (request + 1) * drafted].double()
        scores = torch.einsum("lhd,nhd->hln", q, k) * scale
        if case.logit_cap:
            scores = case.logit_cap * torch.tanh(scores / case.logit_cap)
        is_seen = torch.ones(drafted, len(place), dtype=torch.bool)
        is_seen[:, seen[request] :] = allowed[request]
        if case.window > 0:
            is_seen &= (seen[request] + torch.arange(drafted))[:, None] <= torch.arange(len(place))[None, :] + case.window
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, drafted, 1)], 2)
        shares = scores.softmax(-1)[..., : len(place)]
        expected = torch.einsum("hln,nhd->lhd", shares, v)
        difference = (out[request * drafted : (request + 1) * drafted].double() - expected).abs().nan_to_num(nan=float("inf"))
        worst, largest = max(worst, difference.max().item()), max(largest, expected.abs().max().item())
    return worst / largest


def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``empty`` so that what nobody wrote is NaN, and is seen where it is read."""

    def full_of_nan(*size: Any, **options: Any) -> torch.Tensor:
        return empty(*size, **options).fill_(float("nan"))

    return full_of_nan


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel's file imports Triton
    torch.empty = poisoned(torch.empty)
    kernel = load(Path(sys.argv[1]))
    for text in sys.argv[2:]:
        fields = json.loads(text)
        case = Case(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        print(json.dumps(error(kernel, case)), flush=True)


if __name__ == "__main__":
    main()
