"""The verdict of an experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.measuring import verdict

from ..figures import NONE, number, range_text
from ..terminal import Column, Part, cut, figures, gap, heading, paragraph, places, table

SHORT_PARTS = {"target_verify": "verify", "draft_extend": "extend", "tree_and_acceptance": "tree"}
MOST_STEPS = 20
"""Characters of the draft's steps, which are a list."""


def parts(groups: Sequence[verdict.Group], paths: Mapping[str, str] | None = None) -> list[Part]:
    """Return the report; ``paths`` are lines such as {"report": path} for its end."""
    report: list[Part] = []
    for group in groups:
        report += [*_group(group), gap()]
    return [*report, *places(paths)]


def _group(group: verdict.Group) -> Iterator[Part]:
    release = group.release.get("id") or "unknown release"
    yield heading(f"{group.title} · {release} · run {group.run_id}")
    if group.points:
        columns: list[str | Column] = [
            "arm",
            *figures("clients", "tok/s"),
            "",
            *figures("speed-up", "95 %", "range", "n", "TTFT ms", "TPOT ms", "accept"),
        ]
        yield table(columns, [_row(group, point) for point in group.points], gaps=_level_gaps(group))
        if any(point.fastest for point in group.points):
            yield paragraph("* the fastest at that number of clients; range and n: of the launches that gave a figure")
        yield gap()
    for crossing in group.crossovers:
        yield paragraph(" ".join((crossing.sentence, *crossing.doubts)))
    if group.failures:
        yield gap()
        yield paragraph(f"{len(group.failures)} of {group.cells} cells gave no figure:", style="error")
        for failure in group.failures:
            # The end of a log is in the record and on the page.
            reason = (failure.reason or "no reason told").splitlines()[0]
            yield paragraph(f"{failure.cell}: {failure.status}: {reason}", indent=2)
    if group.phases:
        yield from _phases(group)
    if group.notes:
        yield gap()
        yield from (paragraph(note) for note in group.notes)


def _phases(group: verdict.Group) -> Iterator[Part]:
    yield gap()
    yield paragraph("Where the time of a decode cycle goes, % (profiled cells)")
    names = [SHORT_PARTS.get(part, label) for part, label in verdict.PARTS]
    rows = [
        (
            phases.arm,
            str(phases.concurrency),
            number(phases.cycle_ms),
            *(f"{100 * phases.shares[part]:.1f}" for part, _ in verdict.PARTS),
            cut(" ".join(number(step) for step in phases.draft_steps_ms), MOST_STEPS) or NONE,
        )
        for phases in group.phases
    ]
    yield table(["arm", *figures("clients", "cycle ms", *names, "draft steps ms")], rows)
    if any(phases.draft_steps == "divided" for phases in group.phases):
        yield paragraph("draft steps: equal parts of the draft, which ran as one CUDA graph whose steps can't be told apart")


def _row(group: verdict.Group, point: verdict.Point) -> tuple[str, ...]:
    pinned = any(arm.pinned and arm.name == point.arm for arm in group.arms)
    ratio, speed = point.ratio, point.throughput
    known = ratio is not None and ratio.low is not None and ratio.high is not None
    return (
        point.arm,
        str(point.concurrency),
        number(speed.value) if speed else "failed",
        "*" if point.fastest else "",
        f"{ratio.value:.2f}×" if ratio else NONE,
        f"{ratio.low:.2f}–{ratio.high:.2f}" if ratio and known else NONE,
        range_text(speed),
        str(speed.launches) if speed else "0",
        number(point.ttft_ms.value) if point.ttft_ms else NONE,
        number(point.tpot_ms.value) if point.tpot_ms else NONE,
        (f"{point.accept_length:.2f}" + (" sim" if pinned else "")) if point.accept_length else NONE,
    )


def _level_gaps(group: verdict.Group) -> set[int]:
    """Return the rows with an empty line before them: where the number of clients changes."""
    points = group.points
    if len(group.arms) < 3:
        return set()
    return {index for index in range(1, len(points)) if points[index].concurrency != points[index - 1].concurrency}
