"""A kernel that follows a chain of places in memory, one load after the other. Needs Triton, so only probe programs import it."""

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # the sanity check of a machine without it imports every file; programs look for Triton first
    triton = None


# Triton evaluates annotations, and knows none of Python's.
def _chase(chain, end, loads):  # type: ignore[no-untyped-def]
    """Follow ``chain`` from its start for ``loads`` loads and store where that ended."""
    place = tl.load(end) * 0
    for _ in range(loads):
        place = tl.load(chain + place, volatile=True)
    tl.store(end, place)


chase: Any = None if triton is None else triton.jit(_chase)
