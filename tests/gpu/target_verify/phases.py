#!/usr/bin/env python3
"""Where a decode cycle's time goes, by the phase profiler, in the eagle3 server of a group of servers.py.

    phases.py --root ROOT/GROUP --out OUT.json [--levels 1,8,32,64,128] [--seconds 2.5]

At each number of clients one steady load runs, and cycles are timed while it is full.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dynamic"))
import bench
import load
from ansible.module_utils.aerie.profiling import decode_load, phases


def timed(instance: bench.Instance, profile: Path, level: int, seconds: float) -> tuple[float, float]:
    """Time cycles under a steady load; return when that began and ended (Unix time)."""
    workload = load.Workload(128, 512)
    run = load.Load(instance.host, instance.port, workload, lambda _second: level, level, level)
    window = (0.0, 0.0)
    with decode_load.following(instance.log) as follower:

        def watch() -> None:
            nonlocal window
            if not bench.filled(run, follower, level):
                return
            time.sleep(0.5)
            (profile / "on").touch()
            begun = time.time()
            run.broken.wait(seconds)
            window = (begun, time.time())
            (profile / "on").unlink()

        run.run(watch)
    return window


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--levels", default="1,8,32,64,128")
    parser.add_argument("--seconds", type=float, default=2.5)
    options = parser.parse_args()
    instance = bench.Instance.of(options.root, "eagle3")
    profile = options.root / "instances/eagle3/profile"
    summaries: dict[str, Any] = {}
    for level in map(int, options.levels.split(",")):
        window = timed(instance, profile, level, options.seconds)
        files = sorted(profile.glob("phases-*.jsonl"))
        cycles = [cycle for file in files for cycle in phases.read(file.read_text(), file.name)]
        summary = phases.summarise(phases.between(cycles, *window))
        summaries[str(level)] = summary.as_dict()
        parts = "  ".join(f"{phase.name} {phase.median_ms:.2f} ({phase.share:.0%})" for phase in summary.phases)
        print(f"{level}: {summary.median_cycle_ms:.2f} ms, {summary.cycles} cycles: {parts}", flush=True)
    options.out.write_text(json.dumps(summaries, indent=1) + "\n")


if __name__ == "__main__":
    main()
