"""A server with SGLang's endpoints and counters, and none of its work: what the runner's tests measure.

    fake_server.py PORT STATE_DIRECTORY

Files in the state directory steer it: ``die`` ends it at the next request of load, ``profile`` is its profiler's directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, STATE = int(sys.argv[1]), Path(sys.argv[2])
COUNT = {"requests": 0, "tokens": 0, "steps": 0, "flushed": 0}
TOKENS, STEPS = 21, 10  # acceptance: (21 - 1) / 10 = 2


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return

    def answer(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(
                f'sglang:num_requests_total{{model_name="m"}} {COUNT["requests"]}\n'
                f'sglang:generation_tokens_total{{model_name="m"}} {COUNT["tokens"]}\n'
                f'sglang:prompt_tokens_total{{model_name="m"}} {COUNT["requests"] * 100}\n'
                f'sglang:spec_verify_calls_total{{model_name="m"}} {COUNT["steps"]}\n'
            )
        elif self.path == "/server_info":
            self.answer(json.dumps({"version": "0.0.1", "api_key": "s3cret", "internal_states": [{}], "flushed": COUNT["flushed"]}))
        else:
            self.answer("", 404)

    def do_POST(self) -> None:
        if self.path == "/flush_cache":
            COUNT["flushed"] += 1
            self.answer("Cache flushed.")
        elif (STATE / "die").exists():
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(1)
        else:
            COUNT["requests"] += 1
            COUNT["tokens"] += TOKENS
            COUNT["steps"] += STEPS
            profile = STATE / "profile"
            if (profile / "on").exists():
                line = {"t": time.time(), "batch": 1, "steps": 3, "graph": False, "clock": "monotonic", "cycle_ms": 10.0, "gap_ms": None}
                phases = {"target_verify": 4.0, "draft": 3.0, "draft_extend": 1.0, "tree_and_acceptance": 1.0, "kv": 0.5, "remainder": 0.5}
                with (profile / f"phases-{os.getpid()}.jsonl").open("a") as stream:
                    stream.write(json.dumps(line | {"phases": phases, "draft_steps_ms": [1.0, 1.0, 1.0]}) + "\n")
            self.answer("{}")


print("The server is fired up", flush=True)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
