"""Figures as a person reads them, the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.measuring import verdict

NONE = "–"


def number(value: float) -> str:
    """Return three or more significant digits, without an exponent."""
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def number_or_none(value: float | None) -> str:
    """Return :func:`number`, or a dash where nothing was measured."""
    return number(value) if value else NONE


def range_text(spread: verdict.Spread | None) -> str:
    """Return lowest to highest launch; a dash where there is one launch only."""
    return f"{number(spread.low)}–{number(spread.high)}" if spread and spread.launches > 1 else NONE


def interval(entry: Mapping[str, Any] | None) -> str:
    """Return an interval's ends, ``low`` and ``high``, or a dash."""
    known = entry is not None and entry["low"] is not None
    return f"{entry['low']:.3f}–{entry['high']:.3f}" if entry is not None and known else NONE


def human(size: int) -> str:
    """Return a size for a person: three digits and a unit."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    whole = units[0] == "B" or value >= 100
    return f"{value:.0f} {units[0]}" if whole else f"{value:.1f} {units[0]}"
