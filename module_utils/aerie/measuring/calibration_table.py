"""A calibration as plain text for a terminal, at most 100 columns. Pure; standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.aerie.measuring import calibration
from ansible.module_utils.aerie.measuring.terminal_table import WIDTH, clean, cut, number
from ansible.module_utils.aerie.profiling import overhead


def render(found: Mapping[str, Any], places: Mapping[str, str] | None = None) -> str:
    """Return the text of a calibration; ``places`` are lines such as {"page": path} for its end."""
    told = found["calibration"]
    title = f"calibration · {told['host']} · arm {told['arm']['name']} · {told['release']} · run {told['run_id']}"
    lines = [cut(title, WIDTH), "─" * WIDTH, *_levels(found), "", *_wrap(found["sentence"])]
    lines += _wrap(f"Before: {limits(found['before'])}. Now: {limits(told)}; a mode is kept for {told['dwell_steps']} steps at least.")
    lines += [line for text in remarks(found) for line in _wrap(text)]
    if found["confirmed"]:
        lines += ["", "Measured: the thresholds now against those before, in pairs of windows under one load", *_confirmed(found)]
    lines += ["", *(f"{name}: {clean(place)}" for name, place in (places or {}).items())]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _levels(found: Mapping[str, Any]) -> list[str]:
    head = ("requests", "plain tok/s", "spec. tok/s", "speed-up", "90 %", "n", "before", "of better", "now", "of better")
    rows = []
    for point, row in zip(found["calibration"]["evidence"]["levels"], found["table"], strict=True):
        rows.append(
            (
                str(point["concurrency"]),
                number(point["plain_tok_s"]) if point["plain_tok_s"] else "–",
                number(point["speculative_tok_s"]) if point["speculative_tok_s"] else "–",
                f"{point['ratio']:.3f}×",
                f"{point['low']:.3f}–{point['high']:.3f}" if point["low"] is not None else "–",
                str(point["pairs"]),
                *(text for when in ("before", "after") for text in (short(row[when]["mode"]), share(row[when]["of_better"]))),
            )
        )
    return _table(head, rows)


def short(mode: str) -> str:
    return {calibration.SPECULATIVE: "spec.", calibration.PLAIN: "plain"}.get(mode, mode)


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def limits(given: Mapping[str, Any] | None) -> str:
    """Return thresholds in words."""
    if not given:
        return "always speculative"
    if given.get("verdict") == calibration.ALWAYS:
        return f"always speculative (up to {given['high']} requests, the most that run)"
    if given["high"] == 0:
        return "always plain"
    return f"plain above {given['high']} requests, speculative again at {given['low']}"


def _confirmed(found: Mapping[str, Any]) -> list[str]:
    head = ("requests", "before tok/s", "now tok/s", "now/before", "90 %")
    rows = [
        (
            str(one["concurrency"]),
            *(number(one[name]) if one[name] else "–" for name in ("before_tok_s", "after_tok_s")),
            f"{one['after_over_before']:.3f}" if one["after_over_before"] else "–",
            f"{one['low']:.3f}–{one['high']:.3f}" if one["low"] is not None else "–",
        )
        for one in found["confirmed"]
    ]
    return _table(head, rows)


def remarks(found: Mapping[str, Any]) -> list[str]:
    """Return what a reader should know beside the figures, a sentence each."""
    told = found["calibration"]
    said = []
    if told["acceptance_simulated"]:
        said.append("Acceptance is simulated (pinned by the environment): the crossover is the engine's and not a real draft's.")
    cost = told["evidence"]["switch_ms"]
    # Noise of single changes may be far above what one costs: a mean below zero says that it is too little to see.
    known = [
        f"{cost[mode]:.1f} ms to {mode}" if cost[mode] > 0 else f"nothing that shows to {mode}"
        for mode in (calibration.PLAIN, calibration.SPECULATIVE)
        if cost[mode] is not None
    ]
    if known:
        said.append(f"A change costs {' and '.join(known)}.")
    if told["evidence"]["source"] == calibration.RECORDS:
        said.append("From records of two servers: luck of their launches is in the figures.")
    if any(point["basis"] == overhead.TOKENS for point in told["evidence"]["levels"]) and told["evidence"]["source"] != calibration.RECORDS:
        said.append("Where no decode steps ran without a prefill between them, tokens are compared with prefills: longer answers help.")
    said += [f"{one['concurrency']} requests: {one['status']}: {str(one['reason']).splitlines()[0]}" for one in found["failures"]]
    return said


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    gap = "  " if sum(widths) + 2 * (len(head) - 1) <= WIDTH else " "
    return [gap.join(cell.rjust(room) for cell, room in zip(cells, widths, strict=True)) for cells in (head, *rows)]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(clean(text), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
