"""A server that decodes plainly or speculates, as it is told or by thresholds, and says in its log how fast, as SGLang does.

    fake_dynamic_server.py PORT STATE_DIRECTORY

It decodes for as many clients as the file ``clients`` in the state directory says. A step takes STEP_MS with speculation, which accepts 2.4
tokens, and a share of it plainly, so that both are as fast with CROSSOVER clients. Without it,
each ``/generate`` is five steps in the mode that is due. The file ``stubborn`` keeps it from obeying, ``leaky`` makes one step more.
With the file ``depths``, it can draft 3 steps too, which are as fast as 1 step with DEPTH_CROSSOVER clients. Settings that it does not know
are refused.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, STATE_DIRECTORY = int(sys.argv[1]), Path(sys.argv[2])
MOST, CROSSOVER, STEEP = 16, 6.0, 0.25
STEPS, STEP_MS, ACCEPTED = 10, 3.0, 2.4
SETTINGS = {"high": 0, "low": 0, "force": None}
if (STATE_DIRECTORY / "depths").exists():
    SETTINGS["num_steps"] = None
DEPTH_CROSSOVER = 2.5
STEPS_MADE = {"plain": 0, "speculative": 0}
MODE = ["speculative"]
DRAWS = random.Random(3)


def clients() -> int:
    try:
        return int((STATE_DIRECTORY / "clients").read_text())
    except (OSError, ValueError):
        return 0


def wanted(batch: int) -> str:
    if SETTINGS["force"]:
        return str(SETTINGS["force"])
    if batch > int(SETTINGS["high"] or 0):
        return "plain"
    return "speculative" if batch <= int(SETTINGS["low"] or 0) else MODE[0]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return

    def answer(self, found: object) -> None:
        text = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        state = {"mode": MODE[0], "steps": dict(STEPS_MADE), "refused": "it is stubborn", "switches": 0, **SETTINGS}
        if "num_steps" in SETTINGS:
            state |= {"candidate_steps": [1, 3], "num_steps_now": SETTINGS["num_steps"] or 3}
        internal = {"effective_max_running_requests_per_dp": MOST, "speculative_dynamic": state}
        self.answer({"disable_cuda_graph": True, "internal_states": [internal]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path != "/set_internal_state":
            if self.path == "/generate" and not clients():
                MODE[0] = wanted(1)
                STEPS_MADE[MODE[0]] += 5
                if (STATE_DIRECTORY / "leaky").exists():
                    STEPS_MADE["speculative"] += 1
            self.answer({})
            return
        changes = body["server_args"]["speculative_dynamic"]
        obeys = not (STATE_DIRECTORY / "stubborn").exists() and changes.keys() <= SETTINGS.keys()
        if obeys:
            SETTINGS.update(changes)
        with (STATE_DIRECTORY / "told.jsonl").open("a") as told:
            told.write(json.dumps(body["server_args"]["speculative_dynamic"]) + "\n")
        self.answer([obeys])


def say(text: str) -> None:
    with (STATE_DIRECTORY / "server.log").open("a") as log:
        log.write(f"[2026-11-29 10:00:00] {text}\n")


def decode() -> None:
    while True:
        batch = clients()
        if not batch:
            time.sleep(0.01)
            continue
        MODE[0] = wanted(batch)
        gain = (CROSSOVER / batch) ** STEEP
        step_ms, accepted = (STEP_MS, ACCEPTED) if MODE[0] == "speculative" else (STEP_MS * gain / ACCEPTED, 1.0)
        forced = SETTINGS["force"], SETTINGS.get("num_steps")
        if MODE[0] == "speculative" and forced[1] == 3:
            step_ms /= (DEPTH_CROSSOVER / batch) ** STEEP
        step_ms *= DRAWS.uniform(0.98, 1.02)
        for _ in range(STEPS):
            # The rest of the line is in the other mode
            if wanted(batch) != MODE[0] or forced != (SETTINGS["force"], SETTINGS.get("num_steps")):
                break
            time.sleep(step_ms / 1000)
            STEPS_MADE[MODE[0]] += 1
        speed = batch * accepted * 1000 / step_ms
        say(f"Decode batch, #running-req: {batch}, accept len: {accepted:.2f}, gen throughput (token/s): {speed:.2f}, #queue-req: 0")


threading.Thread(target=decode, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
