"""What a server must bear before it counts as started: several requests at once and a long one, whose text it still knows.

A kernel that serves one sequence can fail for two, and P2P settings were seen to spoil long contexts without any error: the model then
can't repeat what it repeats easily after a few tokens. Standard library only: this runs on hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.aerie.serving.server_http import PROMPTS, Endpoint, ServerError

LONGEST = 8192
"""Tokens of the long request, where the server takes as many."""
SECONDS = 300
NEEDLE, SHOWN, ASKED = 64, 32, 16
"""Tokens that are to be remembered, how many of them are shown again, and how many must follow."""
SHORT = 64
REPEATS, FORGETS = 12, 4
"""Of the tokens that are asked for: how many a model gets right that can repeat at all, and below how many it has lost the text."""


def smoke(endpoint: Endpoint, tokens: int = 16) -> list[str]:
    """Send requests at once, then a long one; raise ServerError where the server fails, return what is odd about its answers."""
    try:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            list(pool.map(lambda prompt: endpoint.generate(tokens=tokens, text=prompt, timeout=SECONDS), PROMPTS))
    except ServerError as error:
        raise ServerError(f"it answers one request and fails with {len(PROMPTS)} at once: {error}") from error
    takes = endpoint.server_info().get("max_req_input_len")
    length = min(takes - 2 * NEEDLE, LONGEST) if isinstance(takes, int) else 0
    if length <= 2 * (SHORT + NEEDLE):
        return []
    try:
        found = recall(endpoint, length)
    except ServerError as error:
        raise ServerError(f"it fails with a request of {length} tokens: {error}") from error
    return [found] if found else []


def recall(endpoint: Endpoint, length: int) -> str | None:
    """Say that the model no longer repeats, after ``length`` tokens, what it repeats after a few; None where it does, or never could."""
    near, far = (_repeated(endpoint, tokens) for tokens in (SHORT, length))
    if near < REPEATS or far >= FORGETS:
        return None
    return (
        f"it repeats {near} of {ASKED} tokens that it read {SHORT} tokens before, and {far} of {ASKED} after {length}: a P2P setting can "
        "spoil long contexts without an error: look at RegistryDwords (ForceP2P) and NCCL's P2P variables, and run "
        "playbooks/preflight.yml with preflight_active=true"
    )


def _repeated(endpoint: Endpoint, length: int) -> int:
    needle = _ids(1, NEEDLE)
    prompt = (
        [*needle, *_ids(2, length - NEEDLE - SHOWN), *needle[:SHOWN]]
        if length > NEEDLE + SHOWN
        else [*needle, *_ids(2, 8), *needle[:SHOWN]]
    )
    sampling = {"temperature": 0, "max_new_tokens": ASKED, "ignore_eos": True}
    answer = endpoint.request("/generate", {"input_ids": prompt, "sampling_params": sampling}, SECONDS)
    return sum(one == other for one, other in zip(_output(answer), needle[SHOWN:], strict=False))


def _ids(seed: int, count: int) -> list[int]:
    """Return token ids that every vocabulary has, in an order that doesn't repeat early."""
    found, state = [], seed
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        found.append(20 + (state >> 16) % 200)
    return found


def _output(answer: Any) -> Sequence[int]:
    tokens = answer.get("output_ids") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) else ()
