#!/usr/bin/env python3
"""Shows on a real GPU that a server is ready when it generates, is left alone when it is as asked, and gives the GPU back when stopped.

    python3 tests/gpu/server.py SITE MODELS ROOT --supervisord PROGRAM

SITE is a directory with an installed SGLang, MODELS holds target/ and draft/ (config.json and tokenizer; weights are made up), ROOT is
an empty directory that becomes `aerie_root`. Uses the cores as the module sglang_server does, without Ansible. Needs a GPU; no test of
`make test` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from phase_profiler import PROJECT, cores

PORT = 30600
EAGLE3 = {"name": "eagle3", "speculation": {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4}}
FLAGS = {
    "load-format": "dummy", "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
    "mem-fraction-static": 0.5, "disable-radix-cache": True, "max-running-requests": 32, "cuda-graph-max-bs": 32,
}  # fmt: skip
ENVIRONMENT = {"FLASHINFER_USE_CUDA_NORM": "1", "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}


def gpu_memory_mib() -> int:
    """Memory in use on all GPUs, whoever uses it."""
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    return sum(int(row) for row in answer.stdout.split())


def make_release(root: Path, site: Path) -> None:
    """Make a release whose Python is this one with ``site``, since a GPU machine at hand may have no index to install from."""
    from ansible.module_utils.aerie import release

    directory = root / "releases/0.5.15.post1-gpu"
    (directory / "bin").mkdir(parents=True)
    launcher = directory / "bin/python"
    launcher.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(site))} exec {shlex.quote(sys.executable)} "$@"\n')
    launcher.chmod(0o755)
    output = directory / "dump.json"
    subprocess.run([launcher, "-c", release.DUMP_PROGRAM, str(output)], check=True, capture_output=True)
    dumped = json.loads(output.read_text())
    (directory / "server_arguments.json").write_text(json.dumps(dumped.get("arguments", dumped) if isinstance(dumped, dict) else dumped))
    environment = {"id": "gpu", "path": str(Path(sys.executable).parents[1])}
    (directory / "release.json").write_text(
        json.dumps({"id": directory.name, "sglang_version": "0.5.15.post1", "environment": environment, "verified": True})
    )
    (root / "current").symlink_to(f"releases/{directory.name}")


def main() -> None:
    """Run everything; any broken promise is an AssertionError."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("site", type=Path)
    asked.add_argument("models", type=Path)
    asked.add_argument("root", type=Path)
    asked.add_argument("--supervisord", type=Path, required=True)
    options = asked.parse_args()
    cores()
    from ansible.module_utils.aerie import processes, server
    from ansible.module_utils.aerie.paths import HostPaths

    make_release(options.root, options.site)
    profile = yaml.safe_load((PROJECT / "profiles/cuda/server.yml").read_text())
    models: dict[str, Any] = {}
    for name in ("target", "draft"):
        path = options.models / name
        models[name] = {"path": str(path), "identity": name, "config": json.loads((path / "config.json").read_text())}
    host = server.Host(HostPaths(options.root), "supervisor", options.supervisord, 60)
    request = server.Request(
        name="main", instance={"model": "target", "port": PORT, "gpus": [0]}, arm=EAGLE3, models=models,
        profile={"name": "cuda", **profile}, flags=FLAGS, environment=ENVIRONMENT | {"PATH": os.environ["PATH"]}, driver="580",
    )  # fmt: skip
    before = gpu_memory_mib()
    wanted = server.plan(host, request)
    print("warnings:", wanted.warnings)
    started = time.monotonic()
    told = server.start(wanted, 480, print)
    print(
        f"ready in {time.monotonic() - started:.0f} s: {json.dumps({key: told.get(key) for key in ('pid', 'accept_length', 'warnings')})}"
    )
    held = gpu_memory_mib()
    status = server.status(host, "main")
    assert status["ready"] and processes.is_listening(PORT)
    assert held > before + 10_000, (before, held)
    assert server.is_running_as_planned(server.plan(host, request)), "asked for the same again, it must be left alone"
    print(f"GPU memory {before} MiB before, {held} MiB while it serves, processes {status['pids']}")
    stopping = time.monotonic()
    stopped = server.stop(host, "main", print)
    after = gpu_memory_mib()
    print(f"stopped in {time.monotonic() - stopping:.0f} s: killed {stopped['killed']}, GPU memory {after} MiB")
    assert after <= before + 50, (before, after)
    assert not processes.is_listening(PORT)
    assert [pid for pid in stopped["stopped"] if processes.alive(pid)] == []
    assert server.status(host, "main")["running"] is False
    print("ready meant a generation, the same again changed nothing, stop gave the GPU back")


if __name__ == "__main__":
    main()
