"""A search as plain text for a terminal. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.aerie.measuring.terminal_table import WIDTH, clean, cut, number
from ansible.module_utils.aerie.tuning import decision, space
from ansible.module_utils.aerie.tuning.tune_run import size_text
from ansible.module_utils.aerie.words import listing

MOST_LISTED = 6
VERDICTS = {
    decision.CONFIRMED: "faster, confirmed end to end",
    decision.UNCONFIRMED: "faster in the micro-benchmark, not confirmed end to end",
    decision.REFUTED: "faster in the micro-benchmark, not end to end: not adopted",
    decision.SAME: "no difference beyond noise: leave NCCL as it is",
}


def render(result: Mapping[str, Any], decisions: Sequence[decision.Decision], options: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Return what a person reads after a search."""
    bench, versions = result["bench"], result["versions"]
    lines = [
        cut(f"NCCL on {result['host']} · run {result['run_id']}", WIDTH),
        "─" * WIDTH,
        f"{bench['ranks']} ranks with {bench['backend']}, torch {versions.get('torch')}, NCCL {versions.get('nccl') or '–'}; "
        f"{result['candidates']} sets, {result['launches']} launches; profile {result['profile'] or 'none'}",
    ]
    for one in decisions:
        found = result["objectives"][one.objective]
        sizes = sorted(map(int, found["medians_us"].get(space.REFERENCE, {})))
        lines += ["", f"{one.objective}: {VERDICTS[one.verdict]}", f"  {clean(one.why)}"]
        if sizes:
            lines += _table(found, sizes)
        changes = [f"{name}={'(left out)' if value is None else value}" for name, value in one.environment.items()]
        if changes:
            lines.append(f"  set: {clean(' '.join(changes))}")
    for name, option in options.items():
        lines += ["", f"option {name}, end to end: {clean(option['words'])}"]
    for title, key in (("disqualified", "disqualified"), ("refused, not tried", "refused")):
        listed = result[key]
        if listed:
            lines += ["", f"{len(listed)} {title}:"]
            lines += ["  " + cut(f"{one['candidate']}: {one['why']}", WIDTH - 2) for one in listed[:MOST_LISTED]]
            lines += [f"  and {len(listed) - MOST_LISTED} more"] if len(listed) > MOST_LISTED else []
    if result["left_out"]:
        lines += ["", f"{result['left_out']} further combinations were left out (nccl_tune_candidates)"]
    lines += ["", *(f"{name}: {clean(place)}" for name, place in places.items())]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _table(found: Mapping[str, Any], sizes: Sequence[int]) -> list[str]:
    """Return median microseconds by set and size."""
    heads = ["  µs, median of launches", *map(size_text, sizes), "speed-up", "interval"]
    rows = []
    for name, medians in found["medians_us"].items():
        ratio = found["finalists"].get(name)
        figures = [number(medians[str(size)]) for size in sizes]
        rows.append(
            [
                f"  {cut(name, 46)}",
                *figures,
                f"{ratio['value']:.3f}×" if ratio else "",
                f"{ratio['low']:.3f}–{ratio['high']:.3f}" if ratio else "",
            ]
        )
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in [heads, *rows]
    ]


def would_do(job: Any) -> dict[str, Any]:
    """Return what a search would try, for check mode."""
    bench = job.bench.as_dict()
    return {
        "would_try": [candidate.name for candidate in job.choice.candidates],
        "refused": [{"candidate": name, "why": why} for name, why in job.choice.refused],
        "messages": [message.as_dict() for message in job.messages],
        "expected_launches": job.expected,
        "msg": f"{len(job.choice.candidates) - 1} sets would be tried on {bench['ranks']} ranks with {bench['backend']}, in about "
        f"{job.expected} launches, at {listing(size_text(size) for size in bench['sizes'])}",
    }
