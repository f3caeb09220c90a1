#!/usr/bin/env python3
"""Shows on a real GPU that the phase profiler works and what it costs: patch, serve EAGLE-3, load, switch it off and on, compare.

    python3 tests/gpu/phase_profiler.py SITE MODELS OUT [--attention triton]

SITE is a directory with an installed SGLang (it is patched in place, as a release is), MODELS holds target/ and draft/ (config.json and
tokenizer; weights are made up, so acceptance is pinned by SGLang's own simulation and says nothing). Prints one JSON summary a
concurrency and writes it, the profiler's raw lines and the server's log to OUT. Needs a GPU; no test of `make test` runs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
PORT = 30500
ORDER = ("off", "on", "on", "off", "off", "on", "on", "off")


def cores() -> None:
    """Make the cores importable without Ansible, which a GPU machine needs not have."""
    shim = Path(tempfile.mkdtemp())
    (shim / "ansible/module_utils").mkdir(parents=True)
    (shim / "ansible/__init__.py").touch()
    (shim / "ansible/module_utils/__init__.py").touch()
    (shim / "ansible/module_utils/aerie").symlink_to(PROJECT / "module_utils/aerie")
    sys.path[:0] = [str(shim), str(PROJECT / "plugins")]


def patch(site: Path) -> dict[str, Any]:
    """Apply the patch set to ``site`` with the engine, and say what was done."""
    from ansible.module_utils.aerie import patch_plan, patch_transaction
    from ansible.module_utils.aerie.patch_store import PatchStore
    from ansible.module_utils.aerie.source_tree import SourceTree

    from aerie_controller import patch_sets

    tree = SourceTree.open(site, "sglang")
    store = PatchStore.beside(tree, site.parent / "originals")
    planned = patch_plan.plan(tree, store, patch_sets.load(["phase_profiler"]))
    verifier = [[sys.executable, "-c", "import sglang.srt.speculative.eagle_worker_v2"]]
    patch_transaction.apply(tree, store, planned, verify=lambda: patch_transaction.run_verifiers(verifier, tree.path))
    return {"version": tree.version.text, "sets": planned.applied_after, "files": [file.path for file in planned.changed_files]}


def get(path: str, timeout: float = 5) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=timeout) as answer:
        return bytes(answer.read())


def serve(models: Path, out: Path, attention: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(models / "target"), "--load-format", "dummy"]
    argv += ["--host", "127.0.0.1", "--port", str(PORT), "--attention-backend", attention, "--sampling-backend", "pytorch"]
    argv += ["--grammar-backend", "none", "--disable-radix-cache", "--mem-fraction-static", "0.6", "--enable-metrics", "--random-seed", "1"]
    argv += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(models / "draft"), "--speculative-num-steps", "3"]
    argv += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--max-running-requests", "128"]
    with (out / "server.log").open("wb") as log:
        server = subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 420
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit("the server died:\n" + (out / "server.log").read_text(errors="replace")[-4000:])
        try:
            get("/health")
            return server
        except OSError:
            time.sleep(1)
    server.kill()
    sys.exit("the server is not healthy after 420 s")


def load(concurrency: int, out: Path, name: str, environment: dict[str, str]) -> float:
    """Load the server for some seconds; return output tokens per second as the client tells."""
    result = out / f"client-{name}.jsonl"
    argv = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1", "--port", str(PORT)]
    argv += ["--dataset-name", "random-ids", "--random-input-len", "128", "--random-output-len", "256", "--random-range-ratio", "1.0"]
    argv += ["--num-prompts", str(max(6, 3 * concurrency)), "--max-concurrency", str(concurrency), "--seed", "7"]
    argv += ["--output-file", str(result)]
    subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=200)
    return float(json.loads(result.read_text().splitlines()[-1])["output_throughput"])


def main() -> None:
    """Run everything; exit status 1 when the phases are wrong."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("site", type=Path)
    asked.add_argument("models", type=Path)
    asked.add_argument("out", type=Path)
    asked.add_argument("--attention", default="triton")
    asked.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    options = asked.parse_args()
    cores()
    from ansible.module_utils.aerie import phases

    profile = options.out / "profile"
    profile.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(options.site),
        "AERIE_PROFILE_DIR": str(profile),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_SIMULATE_ACC_LEN": "2.4",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }
    os.environ["PYTHONPATH"] = str(options.site)
    print(json.dumps(patch(options.site)), flush=True)
    started = time.monotonic()
    server = serve(options.models, options.out, options.attention, environment)
    print(f"healthy after {time.monotonic() - started:.0f} s", flush=True)
    wrong = []
    try:
        for concurrency in options.concurrency:
            load(concurrency, options.out, f"{concurrency}-warm", environment)
            speed: dict[str, list[float]] = {"off": [], "on": []}
            cycles: list[phases.Cycle] = []
            for number, state in enumerate(ORDER):
                (profile / "on").touch() if state == "on" else (profile / "on").unlink(missing_ok=True)
                begin = time.time()
                speed[state].append(load(concurrency, options.out, f"{concurrency}-{number}-{state}", environment))
                end = time.time()
                (profile / "on").unlink(missing_ok=True)
                if state == "on":
                    lines = [line for path in sorted(profile.glob("phases-*.jsonl")) for line in path.read_text().splitlines()]
                    cycles += phases.between(phases.read("\n".join(lines), "profile"), begin, end)
            ratios = [math.log(on / off) for on, off in zip(speed["on"], speed["off"], strict=True)]
            summary = {
                "attention": options.attention,
                "concurrency": concurrency,
                "tok_s": speed,
                "on_over_off": math.exp(statistics.mean(ratios)),
                "on_over_off_each": [math.exp(ratio) for ratio in ratios],
                "phases": phases.summarise(cycles).as_dict() if cycles else None,
            }
            print(json.dumps(summary), flush=True)
            with (options.out / "summary.jsonl").open("a") as stream:
                stream.write(json.dumps(summary) + "\n")
            if not cycles:
                wrong.append(f"no cycle at {concurrency}")
    finally:
        os.killpg(server.pid, 15)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
    raw = [json.loads(line) for path in profile.glob("phases-*.jsonl") for line in path.read_text().splitlines()]
    wrong += [f"parts of a cycle do not sum to it: {line}" for line in raw if abs(sum(line["phases"].values()) - line["cycle_ms"]) > 0.01][
        :3
    ]
    wrong += [f"not timed by CUDA events: {line}" for line in raw if line["clock"] != "cuda"][:3]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(raw)} cycles, all by CUDA events, all sum up", flush=True)


if __name__ == "__main__":
    main()
