#!/usr/bin/env python3
"""Starts servers of one patched SGLang side by side on a GPU, for bench.py and tokens.py of ../dynamic.

    servers.py --root ROOT --models MODELS start GROUP...     and waits until they answer or have ended
    servers.py --root ROOT --models MODELS stop [GROUP...]

GROUP/SERVER names one of a group.

Python must find the patched SGLang: PYTHONPATH=SITE. MODELS is what tests/gpu/models.py wrote. ROOT/GROUP
gets instances/<server>/ with instance.json and server.log, as Aerie's own hosts have them.

GROUP of llama and mla, each on triton, acceptance pinned (simulated) by depth:
    baseline, eagle3 (three steps), shallow (one step), dynamic (three steps up to 96 requests, then one)
llama-flashinfer and mla-flashinfer: the same without shallow, on FlashInfer.
llama-check and mla-check: one server that runs both verification kernels and ends where they differ.
tokens and mla-tokens: float32 and exact dots; tokens-baseline, tokens-dynamic, and in the first
tokens-extend, which verifies by SGLang's kernel. The pair of models/tiny, and MLA of eight layers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
SITE = PROJECT / "tests/gpu/dynamic/site"
READY_SECONDS = 420.0
PINNED = {
    "SGLANG_SIMULATE_ACC_LEN": "2.4",
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    # The same chance, 0.665, for each drafted token.
    "AERIE_TEST_ACCEPTANCE": '{"1": 1.665, "2": 2.107, "3": 2.4}',
}
EXACT = {
    # Triton's dot takes float32 as TF32 otherwise, and sgl-kernel's norms know no float32.
    "TRITON_F32_DEFAULT": "ieee",
    "AERIE_TEST_NATIVE": "RMSNorm SiluAndMul RotaryEmbedding",
}
COMMON = {
    "random-seed": 1,
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "decode-log-interval": 10,
    "sleep-on-idle": True,
}
SERVED = COMMON | {
    "load-format": "dummy",
    "disable-radix-cache": True,
    "max-running-requests": 128,
    "cuda-graph-max-bs-decode": 128,
    "cuda-graph-bs-prefill": [128, 512, 2048, 8192],
    "max-total-tokens": 65536,
    "mem-fraction-static": 0.97,
}
COMPARED = COMMON | {
    "dtype": "float32",
    "attention-backend": "triton",
    "max-running-requests": 32,
    "cuda-graph-max-bs-decode": 32,
    "disable-prefill-cuda-graph": True,
    "max-total-tokens": 65536,
    "mem-fraction-static": 0.97,
}


@dataclass(frozen=True)
class Server:
    """One server: the directory of its models, flags by name, and variables."""

    name: str
    port: int
    target: Path
    draft: Path
    flags: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    steps: int = 0

    def argv(self) -> list[str]:
        flags = {"model-path": self.target, "host": "127.0.0.1", "port": self.port, **self.flags}
        if self.steps:
            flags |= {
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": self.draft,
                "speculative-num-steps": self.steps,
                "speculative-eagle-topk": 1,
                "speculative-num-draft-tokens": self.steps + 1,
            }
        words: list[str] = []
        for name, value in flags.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *map(str, values)]
        return [sys.executable, "-m", "sglang.launch_server", *words]


def dynamic_flags(models: Path, threshold: int, most: int) -> dict[str, Any]:
    return {
        "speculative-dynamic-disable-threshold": threshold,
        "speculative-adaptive": True,
        "speculative-adaptive-config": models / "depths.json",
        "max-running-requests": most,
    }


def loaded(port: int, pair: Path, models: Path, backend: str) -> Iterator[Server]:
    """Yield the servers that a load compares."""
    flags = SERVED | {"attention-backend": backend}
    variables = {"AERIE_FLASHINFER_PREFILL_PLAN": "host"} if backend == "flashinfer" else {}
    pinned = PINNED | variables
    target, draft = pair / "target", pair / "draft"
    yield Server("baseline", port, target, draft, flags, variables)
    yield Server("eagle3", port + 1, target, draft, flags, pinned | {"AERIE_PROFILE_DIR": "profile"}, steps=3)
    if backend == "triton":
        yield Server("shallow", port + 2, target, draft, flags, pinned, steps=1)
    # On triton no decode without speculation is expected up to 128 requests; on FlashInfer from 97 on.
    changes = dynamic_flags(models, 144, 160) if backend == "triton" else dynamic_flags(models, 96, 128)
    yield Server("dynamic", port + 3, target, draft, flags | changes, pinned, steps=3)


def compared(port: int, target: Path, draft: Path, flags: dict[str, Any], variables: dict[str, str], root: Path) -> Iterator[Server]:
    """Yield the servers whose tokens are compared; the dynamic one changes its depth too."""
    flags, variables = COMPARED | flags, EXACT | variables
    root.mkdir(parents=True, exist_ok=True)
    depths = root / "depths.json"
    depths.write_text(json.dumps({"1": {"candidate_steps": [3]}, "3": {"candidate_steps": [2]}, "6": {"candidate_steps": [1]}}))
    dynamic = flags | {
        "speculative-dynamic-disable-threshold": 4,
        "speculative-adaptive": True,
        "speculative-adaptive-config": depths,
    }
    yield Server("tokens-baseline", port, target, draft, flags, variables)
    steps = {"AERIE_TEST_STEPS": str(root / "steps.jsonl")}
    yield Server("tokens-dynamic", port + 1, target, draft, dynamic, variables | steps, steps=3)
    if "load-format" not in flags:
        yield Server("tokens-extend", port + 2, target, draft, flags, variables | {"AERIE_TARGET_VERIFY": "extend"}, steps=3)


def checked(name: str, port: int, pair: Path) -> Server:
    flags = SERVED | {"attention-backend": "triton", "max-total-tokens": 57344}
    return Server(name, port, pair / "target", pair / "draft", flags, PINNED | {"AERIE_TARGET_VERIFY": "check"}, steps=3)


def groups(root: Path, models: Path) -> dict[str, list[Server]]:
    tiny = PROJECT / "models/tiny"
    weights = {"AERIE_TEST_WEIGHTS": "normal"}
    mla, small, dummy = models / "mla", models / "mla-tiny", {"load-format": "dummy"}
    return {
        "llama": list(loaded(30101, models, models, "triton")),
        "mla": list(loaded(30111, mla, models, "triton")),
        "llama-flashinfer": list(loaded(30121, models, models, "flashinfer")),
        "mla-flashinfer": list(loaded(30131, mla, models, "flashinfer")),
        "llama-check": [checked("check", 30141, models)],
        "mla-check": [checked("check", 30142, mla)],
        "tokens": list(compared(30151, tiny / "target", tiny / "draft-eagle3", {}, {}, root / "tokens")),
        "mla-tokens": list(compared(30161, small / "target", small / "draft", dummy, weights, root / "mla-tokens")),
    }


# ---- running them ----------------------------------------------------------------------------------


def home(root: Path, server: Server) -> Path:
    return root / "instances" / server.name


def start(root: Path, server: Server) -> subprocess.Popen[bytes]:
    directory = home(root, server)
    directory.mkdir(parents=True, exist_ok=True)
    variables = server.environment | {
        "AERIE_ROOT": str(root),
        "AERIE_INSTANCE": server.name,
        "PYTHONUNBUFFERED": "1",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{SITE}:{os.environ['PYTHONPATH']}",
    }
    if "AERIE_PROFILE_DIR" in server.environment:
        (directory / "profile").mkdir(exist_ok=True)
        variables["AERIE_PROFILE_DIR"] = str(directory / "profile")
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            server.argv(),
            env=os.environ | variables,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    facts = {"name": server.name, "state": "starting", "host": "127.0.0.1", "port": server.port, "pid": process.pid}
    facts |= {"argv": server.argv(), "environment": variables, "gpus": [0], "started": time.time()}
    (directory / "instance.json").write_text(json.dumps(facts, indent=1))
    return process


def answers(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def follow(waiting: list[tuple[Path, Server, subprocess.Popen[bytes]]]) -> int:
    """Wait for all servers, each below its root; return how many ended instead of answering."""
    begun, dead = time.monotonic(), 0
    while waiting and time.monotonic() - begun < READY_SECONDS:
        for entry in list(waiting):
            root, server, process = entry
            ended = process.poll() is not None
            if not ended and not answers(server):
                continue
            waiting.remove(entry)
            state = "failed" if ended else "ready"
            path = home(root, server) / "instance.json"
            facts = json.loads(path.read_text()) | {"state": state, "reason": None}
            path.write_text(json.dumps(facts, indent=1))
            print(f"{root.name}/{server.name}: {state} after {time.monotonic() - begun:.0f} s", flush=True)
            if ended:
                dead += 1
                log = (home(root, server) / "server.log").read_text(errors="replace")
                print("\n".join(line[:300] for line in log.splitlines()[-25:]), flush=True)
        time.sleep(0.5)
    for root, server, _ in waiting:
        print(f"{root.name}/{server.name}: no answer after {READY_SECONDS:.0f} s", flush=True)
    return dead + len(waiting)


def stop(root: Path, server: Server) -> None:
    path = home(root, server) / "instance.json"
    if not path.exists():
        return
    facts = json.loads(path.read_text())
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(facts["pid"], number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline and Path(f"/proc/{facts['pid']}").exists():
            time.sleep(0.2)
    path.write_text(json.dumps(facts | {"state": "stopped"}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("groups", nargs="*", metavar="GROUP")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    known = groups(options.root.resolve(), options.models.resolve())
    root = options.root.resolve()
    servers = []
    for word in options.groups or known:
        group, _, name = word.partition("/")
        servers += [(root / group, server) for server in known[group] if name in ("", server.name)]
    if options.action == "stop":
        for place, server in servers:
            stop(place, server)
        return
    processes = [(place, server, start(place, server)) for place, server in servers]
    sys.exit(1 if follow(processes) else 0)


if __name__ == "__main__":
    main()
