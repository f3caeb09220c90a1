"""Example records for tests, never results: figures modelled on one pass on an H200 with acceptance pinned at 2.4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FLASHINFER = {"baseline": {1: 205, 8: 1454, 32: 5249, 64: 8812}, "eagle3": {1: 309, 8: 1771, 32: 6018, 64: 7844}}
TRITON = {"baseline": {1: 209, 8: 1492, 32: 5289, 64: 8797}, "eagle3": {1: 352, 8: 1698, 32: 4786, 64: 6165}}
WOBBLE = (1.0, 0.99, 1.012, 1.004)
PARTS = {"target_verify": 6.1, "draft": 1.9, "draft_extend": 0.9, "tree_and_acceptance": 0.5, "kv": 0.2, "remainder": 0.6}
SPECULATION = {"algorithm": "EAGLE3", "draft_model": "eagle3-one-layer", "steps": 3, "topk": 1, "draft_tokens": 4}


def record(arm: str, concurrency: int, speed: float | None, repeat: int = 1, **changes: Any) -> dict[str, Any]:
    """One record; ``speed`` None is a failed cell."""
    kind = changes.get("kind", "measure")
    cell = f"{arm}-c{concurrency}-r{repeat}" + ("-profile" if kind == "profile" else "")
    run_id, host = changes.get("run_id", "20260102T030405-example"), changes.get("host", "gpu-1")
    speculates = arm != "baseline"
    made = {
        "schema": "aerie-record/1",
        "record_id": f"{run_id}/{host}/{cell}",
        "run_id": run_id,
        "experiment": "example",
        "host": host,
        "cell": cell,
        "arm": {
            "name": arm,
            "description": "EAGLE-3, three steps, one branch" if speculates else "No speculation",
            "speculation": SPECULATION if speculates else None,
            "flags": {},
            "environment": {},
        },
        "workload": {"dataset": "random-ids", "input_len": 128, "output_len": 256, "seed": 20260102},
        "concurrency": concurrency,
        "repeat": repeat,
        "kind": kind,
        "launch": repeat,
        "status": "completed" if speed else "failed",
        "reason": None if speed else "the server ran out of memory while it captured CUDA graphs",
        "metrics": {
            "output_throughput_tok_s": speed,
            "ttft_ms": {"mean": 21.0 + concurrency, "median": 20.0 + concurrency, "p99": 60.0},
            "tpot_ms": {"mean": 1000 * concurrency / speed, "median": 1000 * concurrency / speed, "p99": 9.0},
            "accept_length": 2.4 if speculates else None,
        }
        if speed
        else None,
        "phases": None,
        "release": {
            "id": "0.5.15.post1-3f9a1c2b7d04",
            "sglang_version": "0.5.15.post1",
            "profile": "cuda",
            "patch_sets": [{"name": "phase_profiler", "sha256": "9d1f" * 16}],
            "python_version": "3.11.9",
            "torch_version": "2.11.0+cu130",
        },
        "instance": "main",
        "models": {
            "target": {"name": "llama-8b-shaped", "identity": "a1b2" * 16},
            **({"draft": {"name": "eagle3-one-layer", "identity": "c3d4" * 16}} if speculates else {}),
        },
        "host_fingerprint": {
            "fingerprint": "e5f6" * 16,
            "kernel": "6.8.0-60-generic",
            "cuda_driver_version": "13.0",
            "os": {"id": "ubuntu", "version_id": "24.04", "name": "Ubuntu 24.04.3 LTS"},
            "cpu": {"model": "AMD EPYC 9654", "sockets": 1, "cores": 16, "logical": 32},
            "gpus": [{"index": index, "name": "NVIDIA H200", "uuid": f"GPU-{index}", "driver": "580.65.06"} for index in (0, 1)],
        },
        "client": {"name": "sglang-serving", "version": "0.5.15.post1", "sha256": "0a1b" * 16},
        "argv": [
            "python",
            "-m",
            "sglang.launch_server",
            "--attention-backend",
            "flashinfer",
            *(["--speculative-algorithm", "EAGLE3"] if speculates else []),
        ],
        "environment": {},
        "times": {"started": f"2026-01-02T03:{repeat:02d}:00Z", "finished": f"2026-01-02T03:{repeat:02d}:59Z"},
    }
    made.update({key: value for key, value in changes.items() if key in made})
    return made


def campaign(
    table: dict[str, dict[int, float]] | None = None, repeats: int = 3, profile: bool = True, **changes: Any
) -> list[dict[str, Any]]:
    """All records of one run: measured cells with a small wobble per launch, then profile cells."""
    table = table or FLASHINFER
    made = [
        record(arm, level, speed * WOBBLE[(repeat + position) % 4] if repeats > 1 else speed, repeat, **changes)
        for position, (arm, levels) in enumerate(table.items())
        for level, speed in levels.items()
        for repeat in range(1, repeats + 1)
    ]
    if profile:
        for level in (1, 64):
            means = {part: value * (1 + level / 64 * (part == "target_verify")) for part, value in PARTS.items()}
            summary = {
                "cycles": 400,
                "phases": {part: {"share": mean / sum(means.values()), "mean_ms": mean, "median_ms": mean} for part, mean in means.items()},
                "draft_steps": "divided",
                "draft_steps_ms": [0.63, 0.63, 0.63],
            }
            made.append(record("eagle3", level, 900.0, kind="profile", phases=summary, **changes))
    return made


def write(results: Path, records: list[dict[str, Any]]) -> None:
    """Lay records out as collect_results does."""
    for each in records:
        file = results / each["experiment"] / each["run_id"] / each["host"] / each["cell"] / "record.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(each, sort_keys=True, indent=1) + "\n")
