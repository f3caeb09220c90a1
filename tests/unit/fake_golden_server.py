"""A server with the endpoints that golden prompts ask, whose answers are steered.

    fake_golden_server.py PORT STEERING

STEERING is JSON: ``other_at`` (from this position on, other tokens), ``gap`` (of every position's best two logits), ``logprobs`` (true,
"first" for the first token's only, as 0.5.9 does with SGLANG_ENABLE_SPEC_V2, or "refused"), ``dtype``, ``busy`` (refuses to flush).
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT, STEERING = int(sys.argv[1]), json.loads(sys.argv[2])
GAP = STEERING.get("gap", 5.0)
LOGPROBS = STEERING.get("logprobs", True)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return

    def answer(self, value: Any, code: int = 200) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.answer({"dtype": STEERING.get("dtype", "bfloat16"), "quantization": None, "kv_cache_dtype": "auto", "load_format": "auto"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.path == "/flush_cache":
            self.answer("Flush cache failed." if STEERING.get("busy") else "Cache flushed.\n", 400 if STEERING.get("busy") else 200)
        elif body.get("return_logprob") and LOGPROBS == "refused":
            self.answer({"error": {"message": "does not support return_logprob yet"}}, 400)
        else:
            other_at = STEERING.get("other_at", 1 << 30)
            tokens = [len(body["text"]) + at + (1000 if at >= other_at else 0) for at in range(body["sampling_params"]["max_new_tokens"])]
            meta: dict[str, Any] = {"cached_tokens": 0}
            if body.get("return_logprob"):
                told = tokens[:1] if LOGPROBS == "first" else tokens
                meta["output_token_logprobs"] = [[-1.0, token, None] for token in told]
                meta["output_top_logprobs"] = [[[-1.0, token, None], [-1.0 - GAP, token + 1, None]] for token in told]
            self.answer({"text": "words", "output_ids": tokens, "meta_info": meta})


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
