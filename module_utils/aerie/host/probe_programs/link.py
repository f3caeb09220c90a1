"""Copies between host and each GPU, long enough for the link to be watched meanwhile. Standard library and torch only."""

from __future__ import annotations

import time
from typing import Any

from .common import Events, digits, run, seconds_of, spread, synchronize

SIZE = 256 << 20
COPIES = 4


def main(request: dict[str, Any], events: Events) -> None:
    """Load the link of one GPU after the other, each for the request's ``load_seconds``."""
    events.stage("import torch")
    import torch

    cuda = request.get("device", "cuda") == "cuda"
    size = int(request.get("bytes") or SIZE)
    for number, gpu in enumerate(request["gpus"]):
        events.stage(f"take GPU {gpu}")
        device = torch.device("cuda", number) if cuda else torch.device("cpu")
        host = torch.arange(size // 4, dtype=torch.int32)
        back = torch.zeros_like(host)
        if cuda:
            torch.cuda.set_device(device)
            host, back = host.pin_memory(), back.pin_memory()
        room = torch.zeros(size // 4, dtype=torch.int32, device=device)
        # Not what the copy back is compared with in the host's memory.
        changed = host + 7
        found: dict[str, Any] = {"gpu": gpu}
        for name, way, source, target in (
            ("h2d_gb_s", f"copy from the host to GPU {gpu}", host, room),
            ("d2h_gb_s", f"copy from GPU {gpu} to the host", room, back),
        ):
            events.stage(way)

            def work(source: Any = source, target: Any = target) -> None:
                for _ in range(COPIES):
                    target.copy_(source, non_blocking=True)

            work()
            synchronize(torch, device)
            rates: list[float] = []
            started = time.monotonic()
            while not rates or time.monotonic() - started < request["load_seconds"]:
                rates.append(COPIES * size / seconds_of(torch, device, work) / 1e9)
            found[name] = spread(rates)
            if name == "h2d_gb_s":
                events.stage(f"add on GPU {gpu}")
                room += 7
                synchronize(torch, device)
        events.stage(f"compare what came back from GPU {gpu}")
        wrong = int((back != changed).sum())
        if wrong:
            events.problem(f"wrong data: {wrong} of {back.numel()} values differ after GPU {gpu} had them", gpu=gpu)
        events.figure("gpu", {**digits(found), "wrong": wrong})
        del room


if __name__ == "__main__":
    run(main)
