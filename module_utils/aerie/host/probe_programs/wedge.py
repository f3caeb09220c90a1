"""Asks one GPU for the least that a working one does: allocate, run a kernel, free. Standard library and torch only."""

from __future__ import annotations

import time
from typing import Any

from .common import Events, run, synchronize

SIZE = 64 << 20


def main(request: dict[str, Any], events: Events) -> None:
    """Use the one visible GPU."""
    events.stage("import torch")
    import torch

    started = time.monotonic()
    device = torch.device("cuda", 0) if request.get("device", "cuda") == "cuda" else torch.device("cpu")
    events.stage("allocate")
    data = torch.full((SIZE // 4,), 3, dtype=torch.int32, device=device)
    synchronize(torch, device)
    events.stage("run a kernel")
    total = int((data * 2 + 1).sum())
    if total != SIZE // 4 * 7:
        events.problem(f"wrong result: a sum on the GPU is {total}, not {SIZE // 4 * 7}")
    events.stage("free")
    del data
    if device.type == "cuda":
        torch.cuda.empty_cache()
        synchronize(torch, device)
    events.figure("seconds", round(time.monotonic() - started, 3))


if __name__ == "__main__":
    run(main)
