"""The verdict as plain text for a terminal: no colour needed, at most 100 columns, safe to print whatever a name contains."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence

from ansible.module_utils.aerie.measuring import verdict

WIDTH = 100
_SHORT_PARTS = {"target_verify": "verify", "draft_extend": "extend", "tree_and_acceptance": "tree"}
Cells = Sequence[str]


def render(groups: Sequence[verdict.Group], places: Mapping[str, str] | None = None, width: int = WIDTH) -> str:
    """Return the text; ``places`` are lines such as {"report": path} for its end."""
    lines: list[str] = []
    for group in groups:
        lines += [*_group(group, width), ""]
    lines += [f"{name}: {clean(place)}" for name, place in (places or {}).items()]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def clean(text: object) -> str:
    """Return ``text`` on one line and without control characters, so that no name can move the cursor or hide a line."""
    return "".join(" " if unicodedata.category(letter)[0] in "CZ" else letter for letter in str(text)).strip()


def cut(text: object, width: int) -> str:
    """Return cleaned ``text``, shortened to ``width`` with a mark where it was cut."""
    cleaned = clean(text)
    return cleaned if len(cleaned) <= width else f"{cleaned[: width - 1]}…"


def _group(group: verdict.Group, width: int) -> list[str]:
    release = group.release.get("id") or "unknown release"
    lines = [cut(f"{group.title} · {release} · run {group.run_id}", width), "─" * width]
    if group.points:
        lines += _table(
            ("arm", "clients", "tok/s", "speed-up", "95 %", "range", "n", "TTFT ms", "TPOT ms", "accept"),
            [_row(group, point) for point in group.points],
            width,
            gaps=_level_gaps(group),
        )
        if any(point.fastest for point in group.points):
            lines.append("* the fastest at that number of clients; range and n: of the launches that gave a figure")
        lines.append("")
    for crossing in group.crossovers:
        lines += _wrap(" ".join((crossing.sentence, *crossing.doubts)), width)
    if group.failures:
        lines += ["", f"{len(group.failures)} of {group.cells} cells gave no figure:"]
        for failure in group.failures:
            # The end of a log is in the record and on the page.
            reason = (failure.reason or "no reason told").splitlines()[0]
            lines += _wrap(f"{failure.cell}: {failure.status}: {reason}", width, "  ")
    if group.phases:
        lines += ["", "Where the time of a decode cycle goes, % (profiled cells)"]
        heads = ("arm", "clients", "cycle ms", *(_SHORT_PARTS.get(part, label) for part, label in verdict.PARTS), "draft steps ms")
        lines += _table(heads, [_phase_row(phases) for phases in group.phases], width)
        if any(phases.draft_steps == "divided" for phases in group.phases):
            lines += _wrap("draft steps: equal parts of the draft, which ran as one CUDA graph whose steps can't be told apart", width)
    if group.notes:
        lines.append("")
        for note in group.notes:
            lines += _wrap(note, width)
    return lines


def _row(group: verdict.Group, point: verdict.Point) -> Cells:
    pinned = any(arm.pinned and arm.name == point.arm for arm in group.arms)
    ratio = point.ratio
    return (
        clean(point.arm),
        str(point.concurrency),
        (number(point.throughput.value) + (" *" if point.fastest else "  ")) if point.throughput else "failed  ",
        f"{ratio.value:.2f}×" if ratio else "–",
        f"{ratio.low:.2f}–{ratio.high:.2f}" if ratio and ratio.low is not None and ratio.high is not None else "–",
        range_text(point.throughput),
        str(point.throughput.launches) if point.throughput else "0",
        number(point.ttft_ms.value) if point.ttft_ms else "–",
        number(point.tpot_ms.value) if point.tpot_ms else "–",
        (f"{point.accept_length:.2f}" + (" sim" if pinned else "")) if point.accept_length else "–",
    )


def _phase_row(phases: verdict.Phases) -> Cells:
    return (
        clean(phases.arm),
        str(phases.concurrency),
        number(phases.cycle_ms),
        *(f"{100 * phases.shares[part]:.1f}" for part, _ in verdict.PARTS),
        cut(" ".join(number(step) for step in phases.draft_steps_ms), 20) or "–",
    )


def range_text(spread: verdict.Spread | None) -> str:
    """Return lowest to highest launch; a dash where there is one launch only."""
    return f"{number(spread.low)}–{number(spread.high)}" if spread and spread.launches > 1 else "–"


def number(value: float) -> str:
    """Return three or more significant digits, without an exponent."""
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _level_gaps(group: verdict.Group) -> set[int]:
    """Return the rows before which a blank line helps the eye: where the number of clients changes."""
    points = group.points
    if len(group.arms) < 3:
        return set()
    return {index for index in range(1, len(points)) if points[index].concurrency != points[index - 1].concurrency}


def _table(head: Cells, rows: Sequence[Cells], width: int, gaps: set[int] | None = None) -> list[str]:
    """Return the lines of a table whose first column, the only one of names, gives way where ``width`` is short."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    widths[0] = max(min(widths[0], width - sum(widths[1:]) - 2 * (len(head) - 1)), 6)

    def line(cells: Cells) -> str:
        rest = [cell.rjust(room) for cell, room in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join((cut(cells[0], widths[0]).ljust(widths[0]), *rest))

    lines = [line(head)]
    for index, row in enumerate(rows):
        if index in (gaps or ()):
            lines.append("")
        lines.append(line(row))
    return lines


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(clean(text), width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
