"""What tests put into SGLang 0.5.23 on the CPU. Python imports this at its start where the directory is on PYTHONPATH.

AERIE_TEST_OVERLAP=1 gives speculation the overlap scheduler, which SGLang turns off for it on the CPU. Everything on its way runs there but
one Triton kernel. GPU hosts have it without this, and never see this directory.

AERIE_TEST_STEPS=FILE makes the worker write a line of JSON for each decode step, so that tests don't rest on the counters that they check:
for each request its name, its length before the step, how many tokens it was given, and what the draft had proposed, null without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

WORKER = "sglang.srt.speculative.eagle_worker_v2"


def keep_overlap(module: ModuleType) -> None:
    vars(module)["_disable_overlap_schedule_for_cpu"] = lambda server_args: None


def gather_without_triton(module: ModuleType) -> None:
    def gather_spec_extras(indices: Any, topk_p: Any, topk_index: Any, output_tokens: Any, hidden_states: Any = None) -> tuple[Any, ...]:
        return topk_p[indices], topk_index[indices], output_tokens[indices], None if hidden_states is None else hidden_states[indices]

    vars(module)["gather_spec_extras"] = gather_spec_extras


def write_steps(module: ModuleType) -> None:
    worker, drafter = module.EAGLEWorkerV2, module.EagleDraftWorker
    forward_batch_generation, draft = worker.forward_batch_generation, drafter.draft
    stream = open(os.environ["AERIE_TEST_STEPS"], "a", buffering=1)  # noqa: PTH123, SIM115 (open as long as the server)
    proposed: list[list[int]] = []

    def noted_draft(self: Any, batch: Any, *more: Any, **named: Any) -> Any:
        verify_input = draft(self, batch, *more, **named)
        proposed[:] = verify_input.draft_token.view(len(batch.reqs), -1).tolist()
        return verify_input

    def noted_step(self: Any, batch: Any, *more: Any, **named: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return forward_batch_generation(self, batch, *more, **named)
        proposed.clear()
        names, lengths = [request.rid for request in batch.reqs], batch.seq_lens.tolist()
        result = forward_batch_generation(self, batch, *more, **named)
        given = [1] * len(names) if result.accept_lens is None else result.accept_lens.tolist()
        chains: list[list[int] | None] = [*proposed] or [None] * len(names)
        rows = [list(row) for row in zip(names, lengths, given, chains, strict=True)]
        stream.write(json.dumps(rows) + "\n")
        return result

    worker.forward_batch_generation, drafter.draft = noted_step, noted_draft


CHANGES: dict[str, Callable[[ModuleType], None]] = {}
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    if os.environ.get("AERIE_TEST_OVERLAP") == "1":
        CHANGES["sglang.srt.arg_groups.speculative_hook"] = keep_overlap
        CHANGES["sglang.srt.managers.overlap_utils"] = gather_without_triton
    if os.environ.get("AERIE_TEST_STEPS"):
        CHANGES[WORKER] = write_steps


class Changed(importlib.abc.MetaPathFinder):
    """Finds the modules of CHANGES as usual, and changes each right after it ran."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002 (as it is called)
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in CHANGES else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            CHANGES[fullname](module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Changed())
