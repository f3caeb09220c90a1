"""Words for messages: near matches, lists, and text that is safe to show. Standard library only."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

# ECMA-48: a string sequence (OSC, DCS, SOS, PM, APC) with its content, a control sequence (CSI),
# and any other escape; each with its 8-bit introducer too. A string without an end keeps its words.
_SEQUENCES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f\n]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
_MOST_PASSES = 8
_PLAIN_LINE = re.compile(r"[^\x20-\x7e]")
_PLAIN_LINES = re.compile(r"[^\x20-\x7e\n\t]")
# Letters, marks and symbols by their category that show nothing, so they can hide a difference.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)


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


def clean(text: object) -> str:
    """Return ``text`` on one line, safe for a terminal.

    Escape sequences are removed as a whole, also with what they carry (a title, a link, a
    clipboard's content). Other control characters become spaces; invisible ones, such as those that
    reverse or join words, are removed; what is no character becomes visible.
    """
    return _cleaned(str(text), _PLAIN_LINE).strip()


def clean_lines(text: object) -> str:
    """Return ``text`` as :func:`clean` does, with its newlines and tabs: for logs and long messages."""
    return _cleaned(str(text).replace("\r\n", "\n"), _PLAIN_LINES)


def cut(text: object, width: int) -> str:
    """Return cleaned ``text``, shortened to ``width`` with a mark where it was cut."""
    cleaned = clean(text)
    return cleaned if len(cleaned) <= width else f"{cleaned[: width - 1]}…"


def _cleaned(text: str, not_plain: re.Pattern[str]) -> str:
    if not not_plain.search(text):
        return text
    # What stands around a removed sequence can form another one.
    for _ in range(_MOST_PASSES):
        text, count = _SEQUENCES.subn("", text)
        if not count:
            break
    return not_plain.sub(lambda match: _visible(match[0]), text)


def _visible(character: str) -> str:
    """Return what stands for a character that is not plain ASCII."""
    category = unicodedata.category(character)
    if category == "Cs":
        code = ord(character)
        # Python decodes a byte that is not UTF-8 to one of these; a person can look for the byte.
        return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
    if category in ("Cc", "Zs", "Zl", "Zp"):
        return " "
    if category == "Cf" or character in _INVISIBLE:
        return ""
    return "\ufffd" if category in ("Cn", "Co") else character
