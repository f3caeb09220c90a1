#!/usr/bin/env python3
"""Traces some steps of the resident servers under one load, and says where a plain step of the dynamic server differs from a baseline's.

    compare_traces.py --root ROOT --out OUT [--arms baseline dynamic] [--concurrency 64] [--steps 24]

It profiles as playbooks/profile.yml does, with the same files, but on servers that run already: no restart. The concurrency must be above
the dynamic server's threshold. OUT gets trace-<arm>.json (the summary), trace-<arm>.names.json (kernels a step by name) and trace.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cores
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.profiling import profile_levels, profile_request, profile_run, trace_summary

TOLD = (trace_summary.IDLE, "attention", "gemm, dense")
FIGURES = (
    ("step ms", lambda one: one["step_ms"]),
    ("GPU idle ms", lambda one: one["categories"].get(trace_summary.IDLE, {}).get("ms", 0.0)),
    ("attention ms", lambda one: one["categories"].get("attention", {}).get("ms", 0.0)),
    ("GEMM ms", lambda one: one["categories"].get("gemm, dense", {}).get("ms", 0.0)),
    ("rest of the GPU ms", lambda one: sum(part["ms"] for name, part in one["categories"].items() if name not in TOLD)),
    ("host launches", lambda one: one["host"]["launches"]),
    ("host synchronizations", lambda one: one["host"]["syncs"]),
    ("ms in synchronizations", lambda one: one["host"]["sync_ms"]),
    ("values read back", lambda one: one["host"]["items"]),
    ("copies to the host", lambda one: one["host"]["copies_to_host"]),
)


def request(arm: str, instance: Mapping[str, Any], asked: argparse.Namespace) -> profile_request.Request:
    """Return what the profile task would be asked for, of the arm that the instance serves."""
    models = {name: dict(model) for name, model in instance["models"].items()}
    return profile_request.Request.of(
        {
            "run_id": asked.run_id,
            "host": "localhost",
            "instance": arm,
            "arm": instance["arm"],
            "models": models,
            "target": "target",
            "host_info": {},
            "api_key": None,
            "client": asked.client,
            "concurrency": [asked.concurrency],
            "seconds": asked.seconds,
            "window_seconds": 0.5,
            "seed": 1,
            "workload": {"input_len": 128, "output_len": asked.output_len},
            "trace_concurrency": asked.concurrency,
            "trace_steps": asked.steps,
            "timeout_seconds": 150,
        }
    )


def profiled(arm: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Profile one arm; return its level as the profile's report would have it."""
    paths = HostPaths(asked.root)
    instance = json.loads((paths.instance(arm) / "instance.json").read_text())
    job = profile_request.prepare(paths, request(arm, instance, asked))
    profile_run.run(job, lambda said, _done, _all: print(said, flush=True))
    place = job.directory / f"c{asked.concurrency}"
    level = profile_levels.read(place)
    if level["trace"] is None:
        sys.exit(f"no trace of {arm}: {level.get('trace_reason') or level['reason']}")
    traces = sorted((job.directory / profile_levels.TRACES).rglob("*.trace.json.gz"))
    (asked.out / f"trace-{arm}.json").write_text(json.dumps(level, indent=1, sort_keys=True) + "\n")
    names = kernels(trace_summary.load(traces[0]))
    (asked.out / f"trace-{arm}.names.json").write_text(json.dumps(names, indent=1) + "\n")
    return {**level["trace"], "names": names}


def kernels(found: Sequence[trace_summary.Event]) -> dict[str, float]:
    """Return how often each kernel, copy and fill ran in a step, over all steps of the trace."""
    steps = sum(event.kind == "user_annotation" and bool(trace_summary.STEP.match(event.name)) for event in found)
    wanted = trace_summary.ON_GPU if any(event.kind in trace_summary.ON_GPU for event in found) else {"cpu_op": None}
    counts = Counter(short(event.name) for event in found if event.kind in wanted)
    return {name: round(count / max(1, steps), 2) for name, count in counts.most_common()}


def short(name: str) -> str:
    """Return a kernel's name without what templates make of it, so that the same kernel at another tile is told as one."""
    return re.sub(r"<.*", "", name.removeprefix("void "))[:80]


def compared(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the arms' figures side by side, and what ran in one only."""
    arms = list(found)
    lines = [f"| a step | {' | '.join(arms)} |", f"| --- |{' --- |' * len(arms)}"]
    lines += [f"| {name} | {' | '.join(f'{figure(one):.3f}' for one in found.values())} |" for name, figure in FIGURES]
    first = found[arms[0]]["names"]
    for arm in arms[1:]:
        names = found[arm]["names"]
        more = {name: round(count - first.get(name, 0.0), 2) for name, count in names.items() if count - first.get(name, 0.0) >= 0.2}
        fewer = {name: round(count - names.get(name, 0.0), 2) for name, count in first.items() if count - names.get(name, 0.0) >= 0.2}
        lines += ["", f"More often a step in {arm} than in {arms[0]}:", *(f"- {count} × `{name}`" for name, count in more.items())]
        lines += ["", f"Less often a step in {arm} than in {arms[0]}:", *(f"- {count} × `{name}`" for name, count in fewer.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=["baseline", "dynamic"])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--run-id", default="dynamic")
    parser.add_argument("--client", help="a Rust load client instead of the release's own")
    asked = parser.parse_args()
    asked.client = asked.client or cores.environment("AERIE_GPU_CLIENT")
    said = compared({arm: profiled(arm, asked) for arm in asked.arms})
    (asked.out / "trace.md").write_text(said)
    print(said)


if __name__ == "__main__":
    main()
