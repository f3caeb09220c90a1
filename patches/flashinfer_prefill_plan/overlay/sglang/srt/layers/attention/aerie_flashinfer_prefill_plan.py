"""Gives FlashInfer a prefill's lengths as the host knows them: to plan with those on the GPU, it copies them back and waits.

Made by Aerie (patch set flashinfer_prefill_plan). Without AERIE_FLASHINFER_PREFILL_PLAN in the environment nothing changes.

FlashInfer's ``plan`` takes lengths on the host or on the GPU, and needs both: those on the host for the plan, those on the GPU for its
kernels. It writes the plan to page-locked memory of the wrapper and has it copied to the GPU, behind all that was launched before. Waiting
for lengths kept the next plan from overwriting what was not copied yet; here an event does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

VARIABLE = "AERIE_FLASHINFER_PREFILL_PLAN"
HOST, CHECK = "host", "check"
BACKENDS = ("auto", "fa2", "fa3")
"""FlashInfer's backends whose plan is made on the host."""


class Lengths(NamedTuple):
    """Of each request, on the host: tokens that are computed, and those whose K and V are read from the cache."""

    queries: list[int]
    cached: list[int]


noted: Lengths | None = None


def how() -> str:
    """Return what the environment asks for: nothing, ``host`` or ``check``."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", HOST, CHECK):
        raise ValueError(f"{VARIABLE} must be {HOST} or {CHECK} (is {value}): correct it, or leave it out")
    return value if value in (HOST, CHECK) else ""


HOW = how()


# For hooks


def note(
    spec_info: Any,
    is_ragged: bool,
    seq_lens: torch.Tensor,
    on_host: torch.Tensor | None,
    prefixes: Sequence[int] | None,
    indices: Any = None,
) -> None:
    """Note the lengths of the prefill that is planned next, where the host knows them; with ``indices`` of its own a cache has others."""
    global noted
    is_ordinary = spec_info is None and indices is None
    noted = lengths(is_ragged, len(seq_lens), on_host, prefixes) if HOW and is_ordinary else None


def planners(ragged: Any, paged: Any) -> tuple[Any, Any]:
    """Return wrappers that plan with the noted lengths, or those given where none were noted, or where they plan otherwise."""
    global noted
    known, noted = noted, None
    if known is None or not (is_planned_on_host(ragged) and is_planned_on_host(paged)):
        return ragged, paged
    queries, cached = (torch.tensor([0, *values], dtype=torch.int32).cumsum(0, dtype=torch.int32) for values in known)
    layout = torch.cat([queries, cached, torch.ones(len(known.queries), dtype=torch.int32)])
    if paged.device.type == "cuda":
        layout = layout.pin_memory()
    parts = layout.split([len(queries), len(cached), len(known.queries)])
    return RaggedPlanner(ragged, *parts), PagedPlanner(paged, *parts)


# What it is for


def lengths(is_ragged: bool, count: int, on_host: torch.Tensor | None, prefixes: Sequence[int] | None) -> Lengths | None:
    """Return the lengths of ``count`` requests, or None where the host does not know them."""
    if on_host is None or prefixes is None or not len(on_host) == len(prefixes) == count:
        return None
    whole, before = on_host.tolist(), [int(one) for one in prefixes]
    queries = [length - prefix for length, prefix in zip(whole, before, strict=True)]
    return Lengths(queries, before if is_ragged else whole) if min(queries, default=0) > 0 else None


def is_planned_on_host(wrapper: Any) -> bool:
    """Say whether FlashInfer's plan of this wrapper is its ordinary one, made on the host, and no graph's."""
    return getattr(wrapper, "_backend", None) in BACKENDS and not wrapper.is_cuda_graph_enabled


class Planner:
    """A wrapper of FlashInfer that plans with lengths of the host."""

    def __init__(self, wrapper: Any, queries: torch.Tensor, cached: torch.Tensor, last_pages: torch.Tensor) -> None:
        self.wrapper = wrapper
        self.queries, self.cached, self.last_pages = queries, cached, last_pages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapper, name)

    def check(self, given: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> None:
        for there, here in zip(given, known, strict=True):
            if HOW == CHECK and not torch.equal(there.cpu(), here):
                raise AssertionError(f"lengths to plan with are {there.tolist()}, and not {here.tolist()}")

    def plan(self, *arguments: Any, **named: Any) -> None:
        wrapper = self.wrapper
        before = getattr(wrapper, "aerie_copied", None)
        if before is not None:
            before.synchronize()
        wrapper.begin_forward(*arguments, **named)
        if wrapper.device.type == "cuda":
            wrapper.aerie_copied = torch.cuda.Event()
            wrapper.aerie_copied.record()


class RaggedPlanner(Planner):
    """For what is computed, which attends to itself."""

    def begin_forward(self, queries: torch.Tensor, keys: torch.Tensor, *others: Any, **named: Any) -> None:
        self.check((queries, keys), (self.queries, self.queries))
        self.plan(self.queries, self.queries, *others, **named)


class PagedPlanner(Planner):
    """For what is in the cache."""

    def begin_forward(
        self, queries: torch.Tensor, cached: torch.Tensor, indices: torch.Tensor, last_pages: torch.Tensor, *others: Any, **named: Any
    ) -> None:
        self.check((queries, cached, last_pages), (self.queries, self.cached, self.last_pages))
        self.plan(self.queries, self.cached, indices, self.last_pages, *others, **named)
