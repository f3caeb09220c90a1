"""The one exception that Aerie's cores raise on purpose. Standard library only: this runs on hosts."""

from __future__ import annotations

from collections.abc import Iterable


class AerieError(Exception):
    """What was asked for can't be done; the message says what, where, why and what to do."""


def raise_all(problems: Iterable[str], heading: str) -> None:
    """Raise one :class:`AerieError` that lists every problem below ``heading``; return when there is none."""
    found = list(problems)
    if len(found) == 1:
        raise AerieError(f"{heading}: {found[0]}")
    if found:
        raise AerieError(f"{heading}: {len(found)} problems\n" + "\n".join(f"  - {problem}" for problem in found))
