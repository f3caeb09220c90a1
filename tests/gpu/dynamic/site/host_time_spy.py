"""Writes what the scheduler's thread did for each step, besides launching and waiting for the model. For host_time.py, which says more."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler"
RUNNER = "sglang.srt.model_executor.model_runner"
DRAFT = "sglang.srt.speculative.aerie_dynamic_draft"

clock = time.perf_counter
spent: defaultdict[str, float] = defaultdict(float)
depth = 0
launched_at = 0.0


def around(owner: Any, name: str, part: str) -> None:
    """Count the seconds within a method, but those within another one that is counted so."""
    method = getattr(owner, name)

    def timed(*given: Any, **named: Any) -> Any:
        global depth
        begun = clock()
        if part == "model" and not depth and "before the model" not in spent:
            spent["before the model"] = begun - launched_at
        depth += 1
        try:
            return method(*given, **named)
        finally:
            depth -= 1
            if not depth:
                spent[part] += clock() - begun

    setattr(owner, name, timed)


def models(module: ModuleType) -> None:
    around(module.ModelRunner, "forward", "model")


def draft(module: ModuleType) -> None:
    around(module.Writer, "write", "the draft's K and V")


def scheduler(path: Path) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        owner, stream = module.Scheduler, path.open("w", buffering=1)
        choose, run, read = owner.get_next_batch_to_run, owner.run_batch, owner.process_batch_result
        step: dict[str, Any] = {}

        def get_next_batch_to_run(self: Any, *given: Any, **named: Any) -> Any:
            if "mode" in step:
                stream.write(json.dumps({**step, **{part: round(1e6 * seconds, 1) for part, seconds in spent.items()}}) + "\n")
            step.clear()
            spent.clear()
            begun = clock()
            plan = choose(self, *given, **named)
            spent["choosing"] = clock() - begun
            return plan

        def run_batch(self: Any, batch: Any, *given: Any, **named: Any) -> Any:
            global launched_at
            launched_at = clock()
            result = run(self, batch, *given, **named)
            whole = clock() - launched_at
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
