"""A load client that takes SGLang's flags, sends that many requests, and writes its kind of result.

A ``fail`` or ``hang`` file beside the data set makes it do so at the concurrency written in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("backend", "host", "dataset-name", "dataset-path", "random-range-ratio", "output-file", "model"):
    parser.add_argument(f"--{flag}")
for flag in ("port", "num-prompts", "max-concurrency", "seed", "sharegpt-output-len", "warmup-requests"):
    parser.add_argument(f"--{flag}", type=int)
parser.add_argument("--disable-tqdm", action="store_true")
args = parser.parse_args()
steer = Path(args.dataset_path).parent


def steered(name: str) -> bool:
    return (steer / name).exists() and (steer / name).read_text() == str(args.max_concurrency)


if steered("fail"):
    sys.exit("the client can't: bad tokenizer")
if steered("hang"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (steer / "hanging").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
(steer / "proxy").write_text(os.environ.get("http_proxy", "none"))
completed = 0
for _ in range(args.num_prompts):
    with contextlib.suppress(OSError):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(urllib.request.Request(f"http://{args.host}:{args.port}/generate", method="POST", data=b"{}"), timeout=10).read()
        completed += 1
times = {f"{part}_{kind}_ms": 10.0 for part in ("mean", "median", "std", "p99") for kind in ("ttft", "tpot", "itl", "e2e_latency")}
result = {"completed": completed, "duration": 0.5, "total_input_tokens": 100 * completed, "total_output_tokens": 21 * completed}
result |= {"output_throughput": 42.0 * completed, "input_throughput": 200.0 * completed, "request_throughput": 2.0 * completed}
with Path(args.output_file).open("a") as stream:
    stream.write(json.dumps(result | times | {"server_info": {"api_key": os.environ.get("OPENAI_API_KEY")}}) + "\n")
