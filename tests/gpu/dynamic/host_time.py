#!/usr/bin/env python3
"""Says what the host does for a step in one resident server and in another: microseconds of the scheduler's thread, by parts.

    AERIE_DYNAMIC_HOST_TIME=1 bench.sh [--rehearse] BACKEND OUT start
    host_time.py --root ROOT --out OUT [--arms baseline dynamic] [--clients 120] [--seconds 20] [--passes 2]

A GPU waits for the host after a prefill, and in each step that is the host's (flashinfer's verifications). What is done there by one
server and not by the other is what it loses. Parts: choosing what is run next; running it, without the model and without the draft's K
and V, and what of that comes before the model; the model, on a GPU its launches, and what of that plans attention; reading the results of
the step before, waiting for them included on a GPU. There also for how long the stream of the forwards had nothing to do before the step,
and how long it took there to the model, over the model and from it to the end, waiting for launches included. Where one server's model is
slower than the other's on a CPU, so is all else: a launch has its luck. Code that runs once a step is cold, and a loop around it tells
little. Each pass loads one server after the other, in random order.
AERIE_DYNAMIC_TIMED, at the start, names calls that are timed by themselves, where they are made in what is timed: module:name and
module:Class.method, apart by commas. OUT gets host_time.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench
import load

ALWAYS = ("choosing", "before the model", "running", "model", "reading")
PARTS = (*ALWAYS, "planning", "GPU gap before", "GPU before the model", "GPU model", "GPU after the model")
NO_PARTS = ("mode", "requests")
PREFILL = "a prefill"
KINDS = ("a step after a step", PREFILL, "a step after a prefill")
FEWEST = 10

Samples = dict[tuple[str, str], list[float]]
"""Microseconds by kind of step and part."""


def samples(steps: Iterable[Mapping[str, Any]], clients: int) -> Samples:
    """Sort steps with nearly all clients running by what they are and by what was before them."""
    found: Samples = defaultdict(list)
    kinds: list[str] = []
    full = False
    for step in steps:
        is_prefill = step["mode"] != "DECODE"
        full = full if is_prefill else step["requests"] >= 0.85 * clients
        before, kinds = kinds, [*kinds[-1:], PREFILL if is_prefill else "a step"]
        if not before or not full or (is_prefill and before[-1] == PREFILL):
            continue
        kind = PREFILL if is_prefill else f"a step after {before[-1]}"
        for part in dict.fromkeys((*ALWAYS, *step)):
            if part not in NO_PARTS:
                found[kind, part].append(float(step.get(part, 0.0)))
    return found


def measured(instance: bench.Instance, asked: argparse.Namespace, seed: int) -> Samples:
    path = instance.log.parent / "host_time.jsonl"
    if not path.exists():
        sys.exit(f"{path} is not there: start the servers with AERIE_DYNAMIC_HOST_TIME=1")
    begin = path.stat().st_size
    workload = load.Workload(asked.input_len, asked.output_len)
    run = load.Load(instance.host, instance.port, workload, lambda _: asked.clients, asked.clients, seed)

    def watch() -> None:
        run.broken.wait(asked.seconds)

    run.run(watch)
    with path.open() as stream:
        stream.seek(begin)
        return samples((json.loads(line) for line in stream if line.endswith("\n")), asked.clients)


def table(found: Mapping[str, Samples]) -> str:
    """Return a row for each kind and part: medians, and how much more the last arm has than the first."""
    arms = list(found)
    lines = [f"| | part | {' | '.join(f'{arm}, µs' for arm in arms)} | more |", "| --- | --- |" + " --- |" * (len(arms) + 1)]
    for kind in KINDS:
        for part in dict.fromkeys((*PARTS, *(part for arm in arms for _, part in found[arm]))):
            values = [found[arm].get((kind, part), []) for arm in arms]
            if max(map(len, values)) < FEWEST or (part in ALWAYS and min(map(len, values)) < FEWEST):
                continue
            medians = [statistics.median(one) if one else None for one in values]
            told = " | ".join("–" if median is None else f"{median:.0f} ({len(one)})" for median, one in zip(medians, values, strict=True))
            more = "" if None in medians else f"{medians[-1] - medians[0]:+.0f}"
            lines.append(f"| {kind} | {part} | {told} | {more} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="aerie_root of the servers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs=2, default=["baseline", "dynamic"])
    parser.add_argument("--clients", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, for each arm and pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=150)
    asked = parser.parse_args(arguments)
    found: dict[str, Samples] = {arm: defaultdict(list) for arm in asked.arms}
    for number in range(asked.passes):
        for arm in random.Random(number).sample(asked.arms, len(asked.arms)):
            for key, values in measured(bench.Instance.of(asked.root, arm), asked, number).items():
                found[arm][key] += values
            print(f"{number + 1}/{asked.passes}  {arm}", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    kept = {arm: [{"kind": kind, "part": part, "us": values} for (kind, part), values in one.items()] for arm, one in found.items()}
    (asked.out / "host_time.json").write_text(json.dumps({"clients": asked.clients, "arms": kept}) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
