"""A server that says in its log how it decodes, as SGLang does, and is slower by a quarter while its profiler is on.

    fake_decoding_server.py PORT STATE_DIRECTORY TRACE

It decodes for as many clients as the file ``clients`` in the state directory says; ``/start_profile`` leaves a copy of TRACE.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, STATE, TRACE = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
PROFILE = STATE / "profile"
PHASES = {"target_verify": 0.6, "draft": 0.2, "draft_extend": 0.1, "tree_and_acceptance": 0.05, "kv": 0.03, "remainder": 0.02}
STEPS, STEP_MS, SLOWER = 10, 3.0, 1.25


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/start_profile":
            (STATE / "asked.json").write_text(json.dumps(body | {"marks": sorted(path.name for path in PROFILE.iterdir())}))
            shutil.copy(TRACE, Path(body["output_dir"]) / f"{body['profile_prefix']}-1-TP-0.trace.json.gz")
            say("Profiling done. Traces are saved to: somewhere")
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


def say(text: str) -> None:
    with (STATE / "server.log").open("a") as log:
        log.write(f"[2026-11-29 10:00:00] {text}\n")


def decode() -> None:
    while True:
        try:
            clients = int((STATE / "clients").read_text())
        except (OSError, ValueError):
            time.sleep(0.01)
            continue
        on = (PROFILE / "on").exists()
        step_ms = STEP_MS * (SLOWER if on else 1.0)
        started = time.time()
        time.sleep(STEPS * step_ms / 1000)
        if on:
            cycle = {"t": started, "batch": clients, "steps": 3, "graph": False, "clock": "cuda", "cycle_ms": step_ms, "gap_ms": None}
            line = cycle | {"phases": {phase: share * step_ms for phase, share in PHASES.items()}, "draft_steps_ms": []}
            with (PROFILE / "phases-1.jsonl").open("a") as output:
                output.write((json.dumps(line) + "\n") * STEPS)
        speed = clients * 2.4 * 1000 / step_ms
        say(f"Decode batch, #running-req: {clients}, accept len: 2.40, gen throughput (token/s): {speed:.2f}, #queue-req: 0")


threading.Thread(target=decode, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
