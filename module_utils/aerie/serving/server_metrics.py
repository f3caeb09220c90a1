"""What a server counted during a cell, from ``/metrics`` and ``/server_info`` before and after. Pure; standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Prometheus text format: name{labels} value [timestamp]
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")

VERIFY_CALLS = "sglang:spec_verify_calls_total"
GENERATED = "sglang:generation_tokens_total"
REQUESTS = "sglang:num_requests_total"
PROMPT = "sglang:prompt_tokens_total"
CACHED = "sglang:cached_tokens_total"
COUNTERS = (VERIFY_CALLS, GENERATED, REQUESTS, PROMPT, CACHED)


@dataclass(frozen=True)
class Acceptance:
    """The acceptance length of one cell and where it comes from; both null when nothing was verified."""

    length: float | None
    source: str | None


def counters(text: str) -> dict[str, float]:
    """Return the counters that records use, each summed over its labels (ranks, streaming or not, cache source)."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match and match[1] in COUNTERS:
            found[match[1]] = found.get(match[1], 0.0) + float(match[3])
    return found


def delta(before: str, after: str) -> dict[str, float]:
    """Return by how much each counter of ``after`` has grown; a counter that does not exist before starts at 0."""
    first, last = counters(before), counters(after)
    return {name: value - first.get(name, 0.0) for name, value in last.items()}


def acceptance(grown: Mapping[str, float], info_before: Mapping[str, Any] | None, info_after: Mapping[str, Any] | None) -> Acceptance:
    """Return the acceptance length of a cell: 1 + accepted drafts / verify steps, pooled over all steps.

    First choice, the counters of ``/metrics`` (0.5.13 on): each finished request adds its tokens and its verify steps
    (``TokenizerManager``, ``observe_one_finished_request``), its first token comes from the prefill, and every other one from
    a verify step, so the length is (tokens − requests) / verify steps. It is exact in what was delivered: tokens that the
    last step of a request accepts beyond its length don't count.

    Else ``avg_spec_accept_length`` of ``/server_info``, which ``/flush_cache`` resets. The runner flushes before each cell, so
    it covers this cell alone; it lacks the steps since the server's last decode log line (every 40 steps), so it is only a
    fallback. It is not used when it was already there before the cell: then earlier traffic is in it.

    A step in which speculation was off counts as a step of one token in both.
    """
    steps = grown.get(VERIFY_CALLS, 0.0)
    if steps > 0 and GENERATED in grown and REQUESTS in grown:
        return Acceptance((grown[GENERATED] - grown[REQUESTS]) / steps, "metrics")
    if _averages(info_before):
        return Acceptance(None, None)
    averages = _averages(info_after)
    return Acceptance(sum(averages) / len(averages), "server_info") if averages else Acceptance(None, None)


def _averages(info: Mapping[str, Any] | None) -> list[float]:
    states: Iterable[Any] = (info or {}).get("internal_states") or ()
    values = [state.get("avg_spec_accept_length") for state in states if isinstance(state, Mapping)]
    return [float(value) for value in values if value]
