"""Words for messages: near matches and lists. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def listing(items: Iterable[object], last: str = "and") -> str:
    """Return ``a, b and c``; an empty list reads ``none``."""
    words = [str(item) for item in items]
    if not words:
        return "none"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def near(word: str, candidates: Iterable[str], count: int = 3) -> str:
    """Return ``; did you mean 'x' or 'y'?`` for the candidates that look like ``word``, or an empty string."""
    matches = difflib.get_close_matches(word, sorted(set(candidates)), n=count, cutoff=0.6)
    return f"; did you mean {listing((repr(match) for match in matches), last='or')}?" if matches else ""


def tail(text: str, lines: int = 20) -> str:
    """Return the last ``lines`` lines of ``text`` that are not blank, indented for a message."""
    kept = [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"    {line}" for line in kept)
