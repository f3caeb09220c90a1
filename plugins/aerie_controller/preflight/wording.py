"""Words for what a preflight found, the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .rules import Unjudged


def probed(probes: Mapping[str, Any]) -> str:
    """Return what became of each active probe; its finding says why one failed."""
    outcomes = []
    for name, probe in probes.items():
        skipped = probe.get("status") == "skipped" and probe.get("reason")
        detail = f": {probe['reason']}" if skipped else f" ({probe.get('seconds')} s)"
        outcomes.append(f"{name} {probe.get('status')}{detail}")
    return "; ".join(outcomes)


def reasons(unjudged: Sequence[Unjudged]) -> dict[str, list[str]]:
    """Return each first reason with the rules that it keeps from being judged."""
    rules_by_reason: dict[str, list[str]] = {}
    for rule in unjudged:
        rules_by_reason.setdefault(rule.why[0], []).append(rule.id)
    return rules_by_reason


def shown(value: Any) -> str:
    """Return a value of an info in words; a dash for what a host hasn't got."""
    if isinstance(value, list):
        return " ".join(str(entry) for entry in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return str(value) if value != "" else '""'
