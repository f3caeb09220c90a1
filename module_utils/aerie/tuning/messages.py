"""Which messages an all-reduce carries while a model is served: sizes of decode steps and of prefills. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ansible.module_utils.aerie.serving import launch_checks

LATENCY, THROUGHPUT = "latency", "throughput"
OBJECTIVES = (LATENCY, THROUGHPUT)
KIB = 1024
DECODE_LEAST, DECODE_MOST = 8 * KIB, 512 * KIB
"""Below, a message takes as long as this one; above, a decode step is bound by bandwidth, which the other objective measures."""
PREFILL_MOST = 128 * KIB * KIB
MOST_SIZES = 5
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GENERIC = {LATENCY: (8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB), THROUGHPUT: (4 * KIB * KIB, 32 * KIB * KIB)}


@dataclass(frozen=True)
class Message:
    """One size to measure, which objective it stands for, and where it comes from."""

    bytes: int
    objective: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def of_model(
    config: Mapping[str, Any], dtype: str | None, draft_tokens: int, concurrency: Sequence[int], prefill_tokens: Sequence[int]
) -> list[Message]:
    """Return the sizes that ``config``'s model has at these numbers of clients and of tokens of a prefill.

    Every layer reduces the hidden states of all tokens of a step: hidden size × tokens × bytes of a number. A verify step of
    speculation holds ``draft_tokens`` tokens of each client, a step without it one. Sharding divides none of this.
    """
    hidden = launch_checks.text_config(config).get("hidden_size")
    if not isinstance(hidden, int) or hidden < 1:
        return generic("the model's config.json has no hidden_size")
    width = hidden * BYTES.get(dtype or "", 2)
    found: list[Message] = []
    for clients in sorted(set(concurrency)):
        tokens = clients * max(1, draft_tokens)
        size = min(max(tokens * width, DECODE_LEAST), DECODE_MOST)
        shape = f"{clients} × {draft_tokens}" if draft_tokens > 1 else str(clients)
        bound = "" if size == tokens * width else f", {tokens * width} B brought into {DECODE_LEAST // KIB} to {DECODE_MOST // KIB} KiB"
        found.append(Message(_whole(size), LATENCY, f"decode: {shape} tokens × {hidden} × {width // hidden} B{bound}"))
    for tokens in sorted(set(prefill_tokens)):
        size = min(tokens * width, PREFILL_MOST)
        found.append(Message(_whole(size), THROUGHPUT, f"prefill: {tokens} tokens × {hidden} × {width // hidden} B"))
    return _thinned(found)


def generic(why: str) -> list[Message]:
    """Return sizes that stand for most models."""
    return [Message(size, objective, why) for objective in OBJECTIVES for size in GENERIC[objective]]


def _whole(size: int) -> int:
    """Return ``size`` as a multiple of 16 bytes: NCCL's vectors."""
    return max(16, size - size % 16)


def _thinned(found: Sequence[Message]) -> list[Message]:
    """Return one message a size and objective, at most ``MOST_SIZES`` an objective, the smallest and the largest among them."""
    kept = []
    for objective in OBJECTIVES:
        by_size: dict[int, Message] = {}
        for message in found:
            if message.objective == objective:
                by_size.setdefault(message.bytes, message)
        sizes = sorted(by_size)
        if len(sizes) > MOST_SIZES:
            sizes = [sizes[round(index * (len(sizes) - 1) / (MOST_SIZES - 1))] for index in range(MOST_SIZES)]
        kept += [by_size[size] for size in sizes]
    return kept
