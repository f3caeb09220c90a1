"""What is asked of a running SGLang server over HTTP. Standard library only: this runs on hosts."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.aerie.errors import AerieError

POLL_SECONDS = 0.25
USELESS_ACCEPTANCE = 1.05
"""An accept length (with the bonus token) up to which a draft helps nothing; a random draft gives about 1.03."""

TOKEN_IDS = [10, 11, 12, 13, 14, 15, 16, 17]
PROMPTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def read(path):\n    with open(path) as stream:\n        return",
    "Once upon a time there was a",
    "The capital of France is Paris. The capital of Italy is",
)


class ServerError(AerieError):
    """The server answered with an error, or did not answer."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and the key it wants."""

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Return the base URL at which this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host.strip("[]"), self.host.strip("[]"))
        return f"http://{'[' + host + ']' if ':' in host else host}:{self.port}"

    def request(self, path: str, body: Any = None, timeout: float = 10) -> Any:
        """GET ``path``, or POST ``body`` to it, and return the JSON answer (None where it is empty)."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as response:
                content = response.read()
            return json.loads(content) if content.strip() else None
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(300).decode(errors="replace").strip()
            raise ServerError(f"{path} answered {error.code} {error.reason}{': ' + detail if detail else ''}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerError(f"{path}: {error}") from error

    def generate(self, tokens: int = 4, text: str | None = None, timeout: float = 60) -> Any:
        """Generate ``tokens`` tokens greedily; token ids as the prompt need no tokenizer. Never an empty prompt: it kills the scheduler."""
        prompt: dict[str, Any] = {"text": text} if text else {"input_ids": TOKEN_IDS}
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return self.request("/generate", {**prompt, "sampling_params": sampling}, timeout)

    def answers(self, timeout: float = 60) -> bool:
        """Say whether the server generates."""
        try:
            self.generate(timeout=timeout)
        except ServerError:
            return False
        return True

    def server_info(self, timeout: float = 20) -> dict[str, Any]:
        """Return ``/server_info``, or its old name where the release has no other."""
        try:
            info: dict[str, Any] = self.request("/server_info", timeout=timeout)
        except ServerError as error:
            if " 404 " not in str(error):
                raise
            info = self.request("/get_server_info", timeout=timeout)
        return info


def wait_ready(
    endpoint: Endpoint, seconds: float, death: Callable[[], str | None], waiting: Callable[[float], None] = lambda _elapsed: None
) -> float:
    """Wait until a real generation succeeds and return how long it took.

    ``death`` returns why the server can't get ready any more, or None; it is asked before each try, so that a server that
    dies is noticed at once. ``waiting`` is told the seconds passed after each failed try.
    """
    started = time.monotonic()
    last = "it has not listened yet"
    while True:
        if reason := death():
            raise ServerError(reason)
        left = started + seconds - time.monotonic()
        if left <= 0:
            raise ServerError(f"not ready after {seconds:g} s: {last}; raise sglang_server_ready_seconds if it only needs more time")
        try:
            # While it starts, /health answers 503; a generation sent then would wait for the model.
            endpoint.request("/health", timeout=min(left, 5))
            endpoint.generate(timeout=left)
            return time.monotonic() - started
        except ServerError as error:
            last = str(error)
        waiting(time.monotonic() - started)
        time.sleep(POLL_SECONDS)


def acceptance(endpoint: Endpoint, tokens: int = 48) -> float | None:
    """Generate a little and return the average accept length since the server started; None where it tells none."""
    for prompt in PROMPTS:
        endpoint.generate(tokens=tokens, text=prompt, timeout=120)
    states = endpoint.server_info().get("internal_states") or []
    lengths = [state["avg_spec_accept_length"] for state in states if state.get("avg_spec_accept_length")]
    return sum(lengths) / len(lengths) if lengths else None
