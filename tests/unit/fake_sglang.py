"""Stands in SGLang's place: listens, generates, and misbehaves as FAKE_BEHAVIOUR says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BEHAVIOUR = os.environ.get("FAKE_BEHAVIOUR", "")
ACCEPT_LENGTH = float(os.environ.get("FAKE_ACCEPT_LENGTH", "2.5"))
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def argument(flag: str) -> str | None:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else None


def api_key() -> str | None:
    path = argument("--config")
    if not path:
        return None
    return str(json.loads(Path(path).read_text().removeprefix("api-key: ")))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if BEHAVIOUR == "never-ready" else 200)
        elif self.path == "/server_info":
            self.answer(200, {"internal_states": [{"avg_spec_accept_length": ACCEPT_LENGTH}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = api_key()
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer(401)
        elif not (body.get("text") or body.get("input_ids")):
            self.answer(400)
        else:
            self.answer(200, {"text": "word " * body["sampling_params"]["max_new_tokens"]})

    def answer(self, status: int, body: Any = None) -> None:
        self.send_response(status)
        self.end_headers()
        if body is not None:
            self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: Any) -> None:
        pass


def main() -> None:
    print("arguments:", *sys.argv[1:], f"api_key={api_key()}", flush=True)
    if BEHAVIOUR == "dies":
        time.sleep(0.3)
        sys.exit("RuntimeError: not enough memory for the KV cache")
    if BEHAVIOUR == "leaves-children":
        # One in a session of its own, one as SGLang's schedulers are: renamed, its environment overwritten.
        subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
        subprocess.Popen(["sglang::scheduler", "-c", SLEEP], executable=sys.executable, env={}, start_new_session=True)
        time.sleep(0.5)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ThreadingHTTPServer((argument("--host") or "", int(argument("--port") or 0)), Handler).serve_forever()


if __name__ == "__main__":
    main()
