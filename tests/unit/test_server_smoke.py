"""A server that fails with several requests, or with a long one, does not count as started; one that forgets a long text is told of."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ansible.module_utils.aerie.serving import launch_checks, server_smoke
from ansible.module_utils.aerie.serving.server_http import Endpoint, ServerError
from ansible.module_utils.aerie.specifiers import Version


class Model(ThreadingHTTPServer):
    """Repeats what it read before, up to a distance, and serves only so many at once and so long ones."""

    daemon_threads = True

    def __init__(self, remembers: int = 10**6, at_once: int = 100, longest: int = 10**6, takes: int | None = 4096) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.remembers, self.at_once, self.longest, self.takes = remembers, at_once, longest, takes
        self.busy, self.lock, self.lengths = 0, threading.Lock(), []


class Handler(BaseHTTPRequestHandler):
    server: Model

    def log_message(self, *_: object) -> None:
        return

    def answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer({"max_req_input_len": self.server.takes})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = request.get("input_ids") or []
        with self.server.lock:
            self.server.busy += 1
            crowded = self.server.busy > self.server.at_once
            self.server.lengths.append(len(tokens))
        time.sleep(0.1)
        with self.server.lock:
            self.server.busy -= 1
        if crowded or len(tokens) > self.server.longest:
            self.answer({"error": "illegal memory access"}, 500)
            return
        count = request["sampling_params"]["max_new_tokens"]
        self.answer({"output_ids": repeat(tokens, count) if len(tokens) <= self.server.remembers else [0] * count})


def repeat(tokens: list[int], count: int) -> list[int]:
    last = tokens[-8:]
    for start in range(len(tokens) - 16 if last else 0):
        if tokens[start : start + 8] == last:
            return tokens[start + 8 : start + 8 + count]
    return [0] * count


@pytest.fixture
def serve() -> Iterator[Any]:
    started = []

    def start(**about: Any) -> tuple[Endpoint, Model]:
        model = Model(**about)
        threading.Thread(target=model.serve_forever, daemon=True).start()
        started.append(model)
        return Endpoint("127.0.0.1", model.server_port), model

    yield start
    for model in started:
        model.shutdown()
        model.server_close()


def test_a_sound_server_is_asked_at_once_and_at_length_and_nothing_is_said(serve):
    endpoint, model = serve()
    assert server_smoke.smoke(endpoint) == []
    assert max(model.lengths) == 4096 - 2 * server_smoke.NEEDLE


def test_a_server_that_fails_with_several_requests_has_not_started(serve):
    endpoint, _ = serve(at_once=1)
    with pytest.raises(ServerError, match=r"answers one request and fails with 4 at once: .*illegal memory access"):
        server_smoke.smoke(endpoint)


def test_a_server_that_fails_with_a_long_request_has_not_started(serve):
    endpoint, _ = serve(longest=1000)
    with pytest.raises(ServerError, match="fails with a request of 3968 tokens"):
        server_smoke.smoke(endpoint)


def test_a_model_that_loses_a_long_text_is_told_of(serve):
    endpoint, _ = serve(remembers=1000)
    (said,) = server_smoke.smoke(endpoint)
    assert said.startswith("it repeats 16 of 16 tokens that it read 64 tokens before, and 0 of 16 after 3968")


@pytest.mark.parametrize("about", [{"remembers": 0}, {"takes": None}, {"takes": 200}], ids=["a tiny model", "tells no length", "short"])
def test_what_can_not_be_concluded_is_not_said(serve, about):
    endpoint, _ = serve(**about)
    assert server_smoke.smoke(endpoint) == []


@pytest.mark.parametrize(
    ("flags", "attention", "said"),
    [
        ({"attention_backend": "trtllm_mla"}, "mha", True),
        ({"attention_backend": "triton", "decode_attention_backend": "flashmla"}, "mha", True),
        ({"attention_backend": "trtllm_mla", "speculative_draft_attention_backend": "triton"}, "mha", False),
        ({"attention_backend": "trtllm_mla"}, "mla", False),
        ({"attention_backend": "triton"}, "mha", False),
        ({}, "mha", False),
    ],
)
def test_a_draft_does_not_inherit_a_backend_that_only_mla_has(flags, attention, said):
    assert bool(list(launch_checks.draft_backend_problems("draft d", flags, attention))) is said


@pytest.mark.parametrize(
    ("flags", "own", "said"),
    [
        ({"quantization": "modelopt_fp4"}, None, True),
        ({"quantization": "modelopt_fp4", "speculative_draft_model_quantization": "unquant"}, None, False),
        ({"quantization": "modelopt_fp4"}, "nvfp4", False),
        ({"quantization": "fp8"}, None, False),
        ({}, None, False),
    ],
)
def test_a_draft_does_not_inherit_a_quantization_that_its_weights_lack(flags, own, said):
    assert bool(list(launch_checks.draft_quantization_problems("draft d", flags, own))) is said


@pytest.mark.parametrize(
    ("version", "algorithm", "environment", "said"),
    [
        ("0.5.9", "NEXTN", {}, True),
        ("0.5.9", "NEXTN", {"SGLANG_ENABLE_SPEC_V2": "1"}, False),
        ("0.5.9", "EAGLE3", {}, False),
        ("0.5.15.post1", "NEXTN", {}, False),
    ],
)
def test_nextn_of_old_versions_is_warned_of(version, algorithm, environment, said):
    assert bool(list(launch_checks.nextn_memory_warnings(Version.parse(version), algorithm, environment))) is said


@pytest.mark.parametrize(
    ("flags", "draft_tokens", "said"),
    [
        ({"cuda_graph_max_bs": 512}, 4, "set cuda-graph-max-bs to 256 or less"),
        ({"cuda_graph_max_bs_decode": 300}, 8, "hold 2400 tokens"),
        ({"cuda_graph_max_bs": 128}, 4, None),
        ({"cuda_graph_max_bs": 512, "disable_cuda_graph": True}, 4, None),
        ({}, 4, None),
        ({"cuda_graph_max_bs": 512}, None, None),
    ],
)
def test_large_graphs_of_speculation_are_warned_of(flags, draft_tokens, said):
    found = " ".join(launch_checks.graph_batch_warnings(flags, draft_tokens))
    assert said in found if said else found == ""
