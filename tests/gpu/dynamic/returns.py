#!/usr/bin/env python3
"""Says what it costs the resident dynamic server to stop speculating and to speculate again: milliseconds for one switch there and back.

    returns.py --root ROOT --out OUT [--clients 32] [--every 16] [--passes 5] [--window 2]

Under one steady load it is told to decode plainly, to speculate, and to change its mode every few steps, in turn. What the last takes more
than its steps would have taken in either mode alone is what the switches cost: the draft's extend over what it missed, and all else that
is done at the seams. The clients must be more than the smallest plain graph holds, or plain steps are padded. OUT gets returns.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import analysis
import bench
import load
from ansible.module_utils.aerie.measuring import dynamic_control
from ansible.module_utils.aerie.profiling import decode_load

PLAIN, SPECULATIVE, BOTH = "plain", "speculative", "both"
SETTLE_SECONDS = 0.6


def cost(windows: Mapping[str, Mapping[str, float]]) -> float:
    """Return milliseconds for a switch there and back, of windows [seconds, steps of both kinds, switches] by mode."""
    step = {mode: windows[mode]["seconds"] / windows[mode][mode] for mode in (PLAIN, SPECULATIVE)}
    mixed = windows[BOTH]
    alone = sum(mixed[mode] * seconds for mode, seconds in step.items())
    return 1e3 * (mixed["seconds"] - alone) / (mixed["switches"] / 2)


def measured(instance: bench.Instance, asked: argparse.Namespace, number: int) -> dict[str, dict[str, float]]:
    """Return the windows of one pass, all under one load."""
    server, found = instance.server, {}
    settings = {PLAIN: {"force": PLAIN}, SPECULATIVE: {"force": SPECULATIVE}, BOTH: {"force": None, "flip_every": asked.every}}
    run = load.Load(instance.host, instance.port, load.Workload(128, asked.output_len), lambda _: asked.clients, asked.clients, number)
    with decode_load.following(instance.log) as follower:

        def watch() -> None:
            if not bench.filled(run, follower, asked.clients):
                return
            for mode in random.Random(number).sample(list(settings), len(settings)):
                dynamic_control.change(server, {"flip_every": 0, **settings[mode]})
                run.broken.wait(SETTLE_SECONDS)
                began, before = time.monotonic(), dynamic_control.state(server)
                run.broken.wait(asked.window)
                after, ended = dynamic_control.state(server), time.monotonic()
                steps = {kind: after["steps"][kind] - before["steps"][kind] for kind in (PLAIN, SPECULATIVE)}
                found[mode] = {"seconds": ended - began, **steps, "switches": after["switches"] - before["switches"]}

        run.run(watch)
    return found


def said(passes: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    costs = sorted(cost(windows) for windows in passes)
    switches = sum(windows[BOTH]["switches"] for windows in passes)
    steps = {mode: 1e3 * statistics.median(one[mode]["seconds"] / one[mode][mode] for one in passes) for mode in (PLAIN, SPECULATIVE)}
    return (
        f"a switch there and back costs {statistics.median(costs):.2f} ms ({costs[0]:.2f} to {costs[-1]:.2f} in {len(costs)} passes, "
        f"{switches:.0f} switches); a plain step takes {steps[PLAIN]:.2f} ms, a speculative one {steps[SPECULATIVE]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="aerie_root of the servers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--every", type=int, default=16, help="steps in a mode")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--window", type=float, default=2.0)
    parser.add_argument("--output-len", type=int, default=512)
    asked = parser.parse_args()
    instance = bench.Instance.of(asked.root, analysis.DYNAMIC)
    passes: list[dict[str, Any]] = []
    try:
        for number in range(asked.passes):
            windows = measured(instance, asked, number)
            if len(windows) < 3:
                sys.exit(f"the load did not come to {asked.clients} running requests: see {instance.log}")
            passes.append(windows)
            print(f"{number + 1}/{asked.passes}  {cost(windows):.2f} ms", flush=True)
    finally:
        dynamic_control.change(instance.server, {"force": None, "flip_every": 0})
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "returns.json").write_text(json.dumps({"clients": asked.clients, "every": asked.every, "passes": passes}, indent=1) + "\n")
    print(said(passes))


if __name__ == "__main__":
    main()
