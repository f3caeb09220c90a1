"""One rank of a real all_reduce: joins, sums, checks each sum against the known one and times it. Standard library and torch only."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from .common import Events, digits, mapped_libraries, run, seconds_of, spread, synchronize

# In float32 the products and their sums are exact: below 36 ranks × 97 they need 12 bits.
PATTERN = 97


def label(size: int) -> str:
    """Return a size as people write it."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB" if size >= 1 << 10 else f"{size} B"


class Rank:
    """One rank with its device."""

    def __init__(self, request: dict[str, Any], events: Events) -> None:
        self.request = request
        self.events = events
        self.rank = int(request["rank"])
        self.ranks = int(request["ranks"])
        events.stage("import torch")
        import torch
        import torch.distributed

        self.torch: Any = torch
        self.dist: Any = torch.distributed

    def join(self) -> None:
        """Take the device and join the others, in stages that a hang is told by."""
        torch, dist, events, request = self.torch, self.dist, self.events, self.request
        events.stage("take the device")
        cuda = request["backend"] == "nccl"
        self.device = torch.device("cuda", self.rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
            synchronize(torch, self.device)
        else:
            torch.set_num_threads(1)
        events.stage("arrive")
        bound = timedelta(seconds=request["seconds"])
        store = self.store = dist.FileStore(request["store"], self.ranks)
        store.set(f"arrived {self.rank}", "yes")
        # A rank that never gets here is told from those that wait for it.
        events.stage("wait for the other ranks")
        store.wait([f"arrived {rank}" for rank in range(self.ranks)], bound)
        events.stage("join the process group")
        dist.init_process_group(
            request["backend"], store=dist.PrefixStore("group", store), rank=self.rank, world_size=self.ranks, timeout=bound
        )

    def leave(self) -> None:
        """Wait until nobody needs this rank's memory; the process ends then, which frees more surely than NCCL's own end."""
        self.events.stage("wait for the other ranks to end")
        self.store.set(f"ended {self.rank}", "yes")
        self.store.wait([f"ended {rank}" for rank in range(self.ranks)], timedelta(seconds=self.request["seconds"]))

    def main(self) -> None:
        """Sum at every size, then in a CUDA graph."""
        torch, events, request = self.torch, self.events, self.request
        self.join()
        # NCCL makes its connections now: the first collective is what hangs with a wrong IOMMU or ACS.
        events.stage("first all_reduce")
        events.figure("first_seconds", digits(self._clock(lambda: self._check(1024, "first"))))
        for size in request["sizes"]:
            self._size(int(size))
        if self.device.type == "cuda":
            self._graph(int(request["sizes"][0]))
            events.figure("libraries", mapped_libraries())
            events.figure("nccl", ".".join(map(str, torch.cuda.nccl.version())))
        events.figure("torch", torch.__version__)
        events.figure("environment", {name: value for name, value in os.environ.items() if name.startswith("NCCL_")})
        self.leave()

    def _clock(self, work: Any) -> float:
        import time

        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def values(self, size: int) -> Any:
        """Return this rank's own values, different from every other's at every place."""
        places = self.torch.arange(size // 4, device=self.device, dtype=self.torch.float32)
        return (places % PATTERN + 1) * (self.rank + 1)

    def known(self, size: int) -> Any:
        """Return the sum of every rank's values."""
        return self.values(size) / (self.rank + 1) * (self.ranks * (self.ranks + 1) // 2)

    def _check(self, size: int, when: str) -> None:
        self.compare(self._reduced(size), size, when)

    def _reduced(self, size: int) -> Any:
        values = self.values(size)
        self.dist.all_reduce(values)
        synchronize(self.torch, self.device)
        return values

    def compare(self, values: Any, size: int, when: str) -> None:
        """Say where ``values`` are not the sum that they should be."""
        known = self.known(size)
        wrong = int((values != known).sum())
        if wrong:
            at = int((values != known).nonzero()[0])
            self.events.problem(
                f"wrong sum: {wrong} of {values.numel()} values of {label(size)} ({when}): place {at} is {float(values[at]):g}, "
                f"not {float(known[at]):g}",
                wrong=wrong,
                bytes=size,
                own=float(self.values(size)[at]),
                got=float(values[at]),
                known=float(known[at]),
            )

    def _size(self, size: int) -> None:
        """Check and time one size; the sums are checked before and after the timing."""
        self.events.stage(f"all_reduce of {label(size)}")
        self._check(size, "before timing")
        buffer = self.torch.zeros(size // 4, device=self.device)
        large = size > 1 << 20
        inner, repeats = (2, 8) if large else (10, 20) if self.device.type == "cuda" else (2, 8)

        def work() -> None:
            for _ in range(inner):
                self.dist.all_reduce(buffer)

        work()
        synchronize(self.torch, self.device)
        seconds = [seconds_of(self.torch, self.device, work) / inner for _ in range(repeats)]
        self._check(size, "after timing")
        # What each link carries, as nccl-tests count it (PERFORMANCE.md there): 2 (n - 1) / n of the data.
        factor = 2 * (self.ranks - 1) / self.ranks
        latency = spread([second * 1e6 for second in seconds])
        bandwidth = spread([factor * size / second / 1e9 for second in seconds])
        self.events.figure("size", {"bytes": size, "latency_us": digits(latency), "bus_gb_s": digits(bandwidth)})

    def _graph(self, size: int) -> None:
        """All-reduce in a CUDA graph, as a server decodes: capture, replay, check, time."""
        torch = self.torch
        self.events.stage("capture an all_reduce in a CUDA graph")
        buffer = torch.zeros(size // 4, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the watchdog of NCCL asks for events meanwhile
            self.dist.all_reduce(buffer)
        self.events.stage("replay the CUDA graph")
        buffer.copy_(self.values(size))
        graph.replay()
        synchronize(torch, self.device)
        self.compare(buffer.clone(), size, "by a CUDA graph")
        buffer.zero_()

        def work() -> None:
            for _ in range(20):
                graph.replay()

        work()
        synchronize(torch, self.device)
        seconds = [seconds_of(torch, self.device, work) / 20 for _ in range(20)]
        self.events.figure("graph", {"bytes": size, "latency_us": digits(spread([second * 1e6 for second in seconds]))})


def main(request: dict[str, Any], events: Events) -> None:
    """Be one rank."""
    Rank(request, events).main()


if __name__ == "__main__":
    run(main)
