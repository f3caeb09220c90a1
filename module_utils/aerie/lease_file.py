"""The reader of ``lease.json``: who holds a host and until when, or that the file says no such thing. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import untrusted

SHAPE = {
    "owner": {"run": untrusted.WORD, "user": untrusted.WORD, "controller": untrusted.WORD},
    "seconds": untrusted.COUNT,
    "expires": untrusted.NUMBER,
}


def read(path: Path) -> dict[str, Any]:
    """Return a lease; raise FileNotFoundError, another OSError, or Malformed (a ValueError) where the file is no lease."""
    value: dict[str, Any] = untrusted.read(path)
    try:
        untrusted.require(value, SHAPE)
    except untrusted.Malformed as error:
        raise untrusted.Malformed(f"{path}: {error}") from None
    return value
