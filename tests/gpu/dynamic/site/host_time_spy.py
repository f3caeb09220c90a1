"""Writes what the scheduler's thread did for each step, besides launching and waiting for the model. For host_time.py, which says more.

On a GPU also when the step's work began and ended there, by events on the stream of its forwards: a host that is late leaves a gap before
a step's first work, and one that launches more slowly than the GPU computes makes the model longer.
"""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler"
RUNNER = "sglang.srt.model_executor.model_runner"
DRAFT = "sglang.srt.speculative.aerie_dynamic_draft"
ATTENTION = tuple(f"sglang.srt.layers.attention.{name}_backend" for name in ("flashinfer", "triton", "intel_amx"))
PLANS = ("init_forward_metadata", "init_forward_metadata_out_graph")

BEGUN, MODEL_BEGUN, MODEL_ENDED, ENDED = "begun", "model begun", "model ended", "ended"
ON_THE_GPU = (
    ("GPU before the model", BEGUN, MODEL_BEGUN),
    ("GPU model", MODEL_BEGUN, MODEL_ENDED),
    ("GPU after the model", MODEL_ENDED, ENDED),
)
GAP = "GPU gap before"

clock = time.perf_counter
spent: defaultdict[str, float] = defaultdict(float)
events: dict[str, Any] = {}
depth = 0
launched_at = 0.0


@functools.cache
def event_class() -> Callable[[], Any] | None:
    import torch

    return functools.partial(torch.cuda.Event, enable_timing=True) if torch.cuda.is_available() else None


def mark(name: str, stream: Any = None) -> None:
    if (new_event := event_class()) is not None:
        event = new_event()
        event.record(*(() if stream is None else (stream,)))
        events[name] = event


def around(owner: Any, name: str, part: str) -> None:
    """Count the seconds within a method, but those within another one that is counted so."""
    method = getattr(owner, name)

    def timed(*given: Any, **named: Any) -> Any:
        global depth
        begun = clock()
        if part == "model" and not depth and "before the model" not in spent:
            spent["before the model"] = begun - launched_at
            mark(MODEL_BEGUN)
        depth += 1
        try:
            return method(*given, **named)
        finally:
            depth -= 1
            if not depth:
                spent[part] += clock() - begun
                if part == "model":
                    mark(MODEL_ENDED)

    setattr(owner, name, timed)


def calls(names: str) -> dict[str, Callable[[ModuleType], None]]:
    """Return the changes that time some calls by themselves, of ``module:name`` and ``module:Class.method``, apart by commas."""
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for name in filter(None, names.split(",")):
        module, _, path = name.partition(":")
        wanted[module].append(path)

    def change(module: ModuleType) -> None:
        for path in wanted[module.__name__]:
            *parents, last = path.split(".")
            _call(functools.reduce(getattr, parents, module), last, path)

    return dict.fromkeys(wanted, change)


def _call(owner: Any, name: str, part: str) -> None:
    """Count the seconds within a call under ``part``, those of a call within it once."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def timed(*given: Any, **named: Any) -> Any:
        begun, before = clock(), spent[part]
        try:
            return call(*given, **named)
        finally:
            spent[part] = before + clock() - begun

    setattr(owner, name, timed)


def models(module: ModuleType) -> None:
    around(module.ModelRunner, "forward", "model")


def draft(module: ModuleType) -> None:
    around(module.Writer, "write", "the draft's K and V")


def attention(module: ModuleType) -> None:
    """Count what is planned for attention, within the model: flashinfer waits there for the GPU before a prefill."""
    owners = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    for owner in owners:
        for name in PLANS:
            if name in vars(owner):
                _call(owner, name, "planning")


class Steps:
    """Steps that are over for the host, written once they are over for the GPU too."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w", buffering=1)
        self._waiting: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
        self._ended: Any = None

    def add(self, step: dict[str, Any], marks: dict[str, Any]) -> None:
        self._waiting.append((step, marks))
        while self._waiting:
            told, known = self._waiting[0]
            if ENDED in known:
                if not known[ENDED].query():
                    return
                told |= self._on_the_gpu(known)
            self._waiting.popleft()
            self._stream.write(json.dumps(told) + "\n")

    def _on_the_gpu(self, known: dict[str, Any]) -> dict[str, float]:
        def between(first: Any, last: Any) -> float:
            return round(1e3 * first.elapsed_time(last), 1)

        told = {part: between(known[first], known[last]) for part, first, last in ON_THE_GPU if first in known and last in known}
        if self._ended is not None:
            told[GAP] = between(self._ended, known[BEGUN])
        self._ended = known[ENDED]
        return told


def scheduler(path: Path) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        owner, steps = module.Scheduler, Steps(path)
        choose, run, read = owner.get_next_batch_to_run, owner.run_batch, owner.process_batch_result
        step: dict[str, Any] = {}

        def get_next_batch_to_run(self: Any, *given: Any, **named: Any) -> Any:
            if "mode" in step:
                steps.add({**step, **{part: round(1e6 * seconds, 1) for part, seconds in spent.items()}}, dict(events))
            step.clear()
            spent.clear()
            events.clear()
            begun = clock()
            plan = choose(self, *given, **named)
            spent["choosing"] = clock() - begun
            return plan

        def run_batch(self: Any, batch: Any, *given: Any, **named: Any) -> Any:
            global launched_at
            stream = getattr(self, "forward_stream", None)
            mark(BEGUN, stream)
            launched_at = clock()
            result = run(self, batch, *given, **named)
            whole = clock() - launched_at
            mark(ENDED, stream)
            step.update(mode=batch.forward_mode.name, requests=len(batch.reqs))
            spent["running"] = whole - spent["model"] - spent["the draft's K and V"]
            return result

        def process_batch_result(self: Any, *given: Any, **named: Any) -> Any:
            begun = clock()
            try:
                return read(self, *given, **named)
            finally:
                spent["reading"] += clock() - begun

        owner.get_next_batch_to_run, owner.run_batch, owner.process_batch_result = get_next_batch_to_run, run_batch, process_batch_result

    return change


def changes(path: Path) -> dict[str, Callable[[ModuleType], None]]:
    return {SCHEDULER: scheduler(path), RUNNER: models, DRAFT: draft, **dict.fromkeys(ATTENTION, attention)}
