"""A profile as plain text for a terminal, at most 100 columns. Pure; standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible.module_utils.aerie.measuring import bench_runner
from ansible.module_utils.aerie.measuring.terminal_table import WIDTH, clean, cut, number
from ansible.module_utils.aerie.profiling import trace_summary
from ansible.module_utils.aerie.profiling.phases import PHASES

PHASE_HEADS = {
    "target_verify": "verify",
    "draft": "draft",
    "draft_extend": "extend",
    "tree_and_acceptance": "tree",
    "kv": "kv",
    "remainder": "rest",
}
CATEGORY_HEADS = {
    "communication": "comm",
    "moe routing": "route",
    "gemm, moe": "moe",
    "kv and metadata": "kv",
    "attention": "attn",
    "sampling and tree": "sample",
    "norm, rope, activation": "norm",
    "gemm, dense": "gemm",
    "elementwise": "elem",
    "memcpy": "copy",
    "memset": "set",
    "other": "other",
    "idle": "idle",
}
SIMULATED = "sim"
Entry = tuple[Mapping[str, Any], Mapping[str, Any]]


def render(found: Mapping[str, Any], places: Mapping[str, str] | None = None) -> str:
    """Return the text of a whole profile (as profile.json holds it); ``places`` are lines such as {"page": path} for its end."""
    lines: list[str] = []
    for host, content in found["hosts"].items():
        entries = [(arm, level) for arm in content["arms"] for level in arm["levels"]]
        lines += [cut(f"profile · {host} · run {found['run_id']}", WIDTH), "─" * WIDTH, *_levels(entries), ""]
        traced = [entry for entry in entries if entry[1]["trace"]]
        if traced:
            lines += [*_traces(traced), ""]
        lines += list(_remarks(entries))
    lines += [f"{name}: {clean(place)}" for name, place in (places or {}).items()]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _levels(entries: Sequence[Entry]) -> list[str]:
    head = ("arm", "clients", "tok/s", "cycle ms", *PHASE_HEADS.values(), "on/off", "90 %")
    rows = [_level(arm, level) for arm, level in entries]
    said = ["Where a decode cycle goes, % of it by phase; tok/s with the profiler off; on/off: speed with it over without", ""]
    return [*textwrap.wrap(said[0], WIDTH), *_table(head, rows)]


def _level(arm: Mapping[str, Any], level: Mapping[str, Any]) -> tuple[str, ...]:
    phases, cost = level["phases"], level["overhead"]
    shares = [f"{100 * phases['phases'][phase]['share']:.1f}" if phases else "–" for phase in PHASES]
    cycle = phases["mean_cycle_ms"] if phases else level["step_ms"]
    speed = number(level["tok_s"]) if level["tok_s"] else ("failed" if level["status"] != bench_runner.COMPLETED else "–")
    return (
        _arm_name(arm),
        str(level["concurrency"]),
        f"{speed} {SIMULATED}" if arm["acceptance_simulated"] and level["tok_s"] else speed,
        number(cycle) if cycle else "–",
        *shares,
        f"{cost['on_over_off']:.3f}" if cost else "–",
        interval(cost),
    )


def interval(cost: Mapping[str, Any] | None) -> str:
    """Return the 90 % interval of an overhead, or a dash."""
    return f"{cost['low']:.3f}–{cost['high']:.3f}" if cost and cost["low"] is not None else "–"


def _traces(entries: Sequence[Entry]) -> list[str]:
    seen = [name for name in trace_summary.NAMES if any(name in level["trace"]["categories"] for _, level in entries)]
    head = ("arm", "clients", "step ms", *(CATEGORY_HEADS[name] for name in seen))
    rows = [
        (
            _arm_name(arm),
            str(level["concurrency"]),
            number(level["trace"]["step_ms"]),
            *(number(level["trace"]["categories"].get(name, {"ms": 0})["ms"]) for name in seen),
        )
        for arm, level in entries
    ]
    device = "the GPU" if any(level["trace"]["device"] == "gpu" for _, level in entries) else "the CPU, by operator"
    host = ("arm", "clients", "host ms", "waits ms", "waits", "launch ms", "launches", "other ms", "items", "to host")
    hosts = [
        (
            _arm_name(arm),
            str(level["concurrency"]),
            *(number(level["trace"]["host"][key]) for key in ("step_ms", "sync_ms", "syncs", "launch_ms", "launches", "other_ms")),
            *(number(level["trace"]["host"][key]) for key in ("items", "copies_to_host")),
        )
        for arm, level in entries
    ]
    return [
        f"A step under torch's profiler, ms of {device} by kind of work (slower than without)",
        *_table(head, rows),
        "",
        "And what the scheduler's thread did in it",
        *_table(host, hosts),
    ]


def _remarks(entries: Sequence[Entry]) -> Iterator[str]:
    if any(arm["acceptance_simulated"] for arm, _ in entries):
        yield f"{SIMULATED}: acceptance is simulated, so speeds are the engine's and not a real draft's"
    for arm, level in entries:
        where = f"{arm['arm']['name']} at {level['concurrency']}"
        if level["status"] != bench_runner.COMPLETED:
            yield from _wrap(f"{where}: {level['status']}: {str(level['reason']).splitlines()[0]}")
        elif level["trace_reason"]:
            yield from _wrap(f"{where}: no trace: {str(level['trace_reason']).splitlines()[0]}")
        if level["overhead"] and level["overhead"]["basis"] == "tokens":
            yield from _wrap(f"{where}: on/off compares tokens, prefills included, since no decode steps ran without one between them")
        unknown = level["trace"]["unknown"] if level["trace"] else []
        if sum(entry["share"] for entry in unknown) >= 0.005:
            names = ", ".join(f"{cut(entry['name'], 40)} {100 * entry['share']:.1f} %" for entry in unknown[:4])
            yield from _wrap(f"{where}: kernels of no known kind: {names}")


def _arm_name(arm: Mapping[str, Any]) -> str:
    return clean(arm["arm"]["name"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first column gives way, and whose gaps shrink, where 100 columns are too few."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    gap = 2 if widths[0] + sum(widths[1:]) + 2 * (len(head) - 1) <= WIDTH else 1
    widths[0] = max(min(widths[0], WIDTH - sum(widths[1:]) - gap * (len(head) - 1)), 6)
    return [
        (" " * gap).join(
            (cut(cells[0], widths[0]).ljust(widths[0]), *(cell.rjust(room) for cell, room in zip(cells[1:], widths[1:], strict=True)))
        )
        for cells in (head, *rows)
    ]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(clean(text), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
