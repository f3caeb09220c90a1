"""One rank of SGLang's own all_reduce over peer memory, which NCCL has no part in: directly and in a CUDA graph, checked and timed.

Only what hangs, crashes or sums wrongly is a problem; an SGLang without it, or one that would not use it here, is told.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

from .all_reduce import Rank, label
from .common import Events, describe, digits, run, seconds_of, spread, synchronize

PLACE = "sglang.srt.distributed.device_communicators.custom_all_reduce"
STATE = "sglang.srt.distributed.parallel_state"


class CustomRank(Rank):
    """One rank that sums as a server of the release would."""

    def main(self) -> None:
        if importlib.util.find_spec("sglang") is None:
            self.events.figure("untried", "SGLang is not installed")
            return
        self.join()
        if (communicator := self._communicator()) is not None:
            for size in self.request["sizes"]:
                self._sum(communicator, int(size))
        self.leave()

    def _communicator(self) -> Any:
        """Return what SGLang would sum with, None where it would not."""
        self.events.stage("import SGLang's all_reduce")
        try:
            dispatch = importlib.import_module(PLACE).dispatch_custom_allreduce
            group = self.dist.new_group(backend="gloo")
            self.events.stage("set up SGLang's all_reduce")
            # Its check for peer access asks the world group; ours is taken over, since torch has one already.
            importlib.import_module(STATE).init_distributed_environment(
                world_size=self.ranks, rank=self.rank, local_rank=self.device.index, backend=self.request["backend"]
            )
            asked = {"group": group, "device": self.device}
            chosen = dispatch(**{name: asked[name] for name in inspect.signature(dispatch).parameters if name in asked})
            communicator = chosen(**asked)
        except Exception as error:
            self.events.figure("untried", describe(error))
            return None
        self.events.figure("kind", chosen.__name__)
        if communicator.disabled:
            self.events.figure("untried", "SGLang does not use it on these GPUs: see the log of its server")
            return None
        return communicator

    def _sum(self, communicator: Any, size: int) -> None:
        torch = self.torch
        values = self.values(size)
        if not communicator.should_custom_ar(values):
            return
        self.events.stage(f"SGLang's all_reduce of {label(size)}")
        # It may sum in place, so that each sum gets a copy of its own, as each layer of a model has new values.
        found = communicator.custom_all_reduce(values.clone())
        synchronize(torch, self.device)
        self.compare(found, size, "by SGLang's all_reduce")
        self.events.stage(f"capture SGLang's all_reduce of {label(size)} in a CUDA graph")
        graph = torch.cuda.CUDAGraph()
        summed = torch.empty_like(values)
        with communicator.capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            summed.copy_(values)
            found = communicator.custom_all_reduce(summed)
        self.events.stage(f"replay SGLang's all_reduce of {label(size)}")
        graph.replay()
        synchronize(torch, self.device)
        self.compare(found, size, "by SGLang's all_reduce in a CUDA graph")

        def work() -> None:
            for _ in range(20):
                graph.replay()

        seconds = [seconds_of(torch, self.device, work) / 20 for _ in range(20)]
        self.events.figure("size", {"bytes": size, "latency_us": digits(spread([second * 1e6 for second in seconds]))})


def main(request: dict[str, Any], events: Events) -> None:
    """Be one rank."""
    CustomRank(request, events).main()


if __name__ == "__main__":
    run(main)
