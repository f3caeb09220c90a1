"""A search for NCCL's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.tuning import decision, space
from ansible.module_utils.aerie.tuning.tune_run import size_text

from ..figures import NONE, interval, number
from ..terminal import Part, command, cut, figures, gap, heading, paragraph, places, table

MOST_LISTED = 6
LONGEST_NAME = 46
VERDICTS = {
    decision.CONFIRMED: "faster, confirmed end to end",
    decision.UNCONFIRMED: "faster in the micro-benchmark, not confirmed end to end",
    decision.REFUTED: "faster in the micro-benchmark, not end to end: not adopted",
    decision.SAME: "no difference beyond noise: leave NCCL as it is",
}


def parts(
    result: Mapping[str, Any],
    decisions: Sequence[decision.Decision],
    options: Mapping[str, Any],
    paths: Mapping[str, str],
) -> list[Part]:
    """Return what a person reads after a search."""
    return [*_report(result, decisions, options), gap(), *places(paths)]


def _report(result: Mapping[str, Any], decisions: Sequence[decision.Decision], options: Mapping[str, Any]) -> Iterator[Part]:
    bench, versions = result["bench"], result["versions"]
    yield heading(f"NCCL on {result['host']} · run {result['run_id']}")
    yield paragraph(
        f"{bench['ranks']} ranks with {bench['backend']}, torch {versions.get('torch')}, "
        f"NCCL {versions.get('nccl') or NONE}; {result['candidates']} sets, {result['launches']} launches; "
        f"profile {result['profile'] or 'none'}"
    )
    for judged in decisions:
        yield gap()
        yield from _decision(judged, result["objectives"][judged.objective])
    for name, option in options.items():
        yield gap()
        yield paragraph(f"option {name}, end to end: {option['words']}")
    for title, key in (("disqualified", "disqualified"), ("refused, not tried", "refused")):
        entries = result[key]
        if entries:
            yield gap()
            yield paragraph(f"{len(entries)} {title}:")
            for entry in entries[:MOST_LISTED]:
                yield paragraph(f"{entry['candidate']}: {entry['why']}", indent=2)
            if len(entries) > MOST_LISTED:
                yield paragraph(f"and {len(entries) - MOST_LISTED} more", indent=2)
    if result["left_out"]:
        yield gap()
        yield paragraph(f"{result['left_out']} further combinations were left out (nccl_tune_candidates)")


def _decision(judged: decision.Decision, objective: Mapping[str, Any]) -> Iterator[Part]:
    yield paragraph(f"{judged.objective}: {VERDICTS[judged.verdict]}")
    yield paragraph(judged.why, indent=2)
    sizes = sorted(map(int, objective["medians_us"].get(space.REFERENCE, {})))
    if sizes:
        yield _medians(objective, sizes)
    changes = [f"{name}={'(left out)' if value is None else value}" for name, value in judged.environment.items()]
    if changes:
        yield command(f"set: {' '.join(changes)}", indent=2)


def _medians(objective: Mapping[str, Any], sizes: Sequence[int]) -> Part:
    """Return median microseconds by set and size."""
    rows = []
    for name, medians in objective["medians_us"].items():
        ratio = objective["finalists"].get(name)
        rows.append(
            (
                cut(name, LONGEST_NAME),
                *(number(medians[str(size)]) for size in sizes),
                f"{ratio['value']:.3f}×" if ratio else "",
                interval(ratio) if ratio else "",
            )
        )
    names = [size_text(size) for size in sizes]
    return table(["µs, median of launches", *figures(*names, "speed-up", "interval")], rows, indent=2)
