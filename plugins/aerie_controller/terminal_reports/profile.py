"""A profile: where the time of a decode cycle goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.measuring import bench_runner
from ansible.module_utils.aerie.profiling import trace_summary
from ansible.module_utils.aerie.profiling.phases import PHASES
from ansible.module_utils.aerie.words import listing

from ..figures import NONE, interval, number, number_or_none
from ..terminal import Part, cut, figures, gap, heading, paragraph, places, table

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
UNKNOWN_SHARE = 0.005
"""Kernels of no known kind are named where they take this share of a step."""
HOST_FIGURES = {
    "host ms": "step_ms",
    "waits ms": "sync_ms",
    "waits": "syncs",
    "launch ms": "launch_ms",
    "launches": "launches",
    "other ms": "other_ms",
    "items": "items",
    "to host": "copies_to_host",
}
Entry = tuple[Mapping[str, Any], Mapping[str, Any]]


def parts(content: Mapping[str, Any], paths: Mapping[str, str] | None = None) -> list[Part]:
    """Return the report of a whole profile, as profile.json holds it.

    ``paths`` are lines such as {"page": path} for its end.
    """
    report: list[Part] = []
    for host, profile in content["hosts"].items():
        entries = [(arm, level) for arm in profile["arms"] for level in arm["levels"]]
        report += [heading(f"profile · {host} · run {content['run_id']}"), *_levels(entries), gap()]
        traced = [entry for entry in entries if entry[1]["trace"]]
        if traced:
            report += [*_traces(traced), gap()]
        report += list(_remarks(entries))
    return [*report, *places(paths)]


def _levels(entries: Sequence[Entry]) -> Iterator[Part]:
    yield paragraph("Where a decode cycle goes, % of it by phase; tok/s with the profiler off; on/off: speed with it over without")
    names = ("clients", "tok/s", "cycle ms", *PHASE_HEADS.values(), "on/off", "90 %")
    yield table(["arm", *figures(*names)], [_level(arm, level) for arm, level in entries])


def _level(arm: Mapping[str, Any], level: Mapping[str, Any]) -> tuple[str, ...]:
    phases, cost = level["phases"], level["overhead"]
    shares = [f"{100 * phases['phases'][phase]['share']:.1f}" if phases else NONE for phase in PHASES]
    cycle = phases["mean_cycle_ms"] if phases else level["step_ms"]
    failed = level["status"] != bench_runner.COMPLETED
    speed = number(level["tok_s"]) if level["tok_s"] else "failed" if failed else NONE
    return (
        arm["arm"]["name"],
        str(level["concurrency"]),
        f"{speed} {SIMULATED}" if arm["acceptance_simulated"] and level["tok_s"] else speed,
        number_or_none(cycle),
        *shares,
        f"{cost['on_over_off']:.3f}" if cost else NONE,
        interval(cost),
    )


def _traces(entries: Sequence[Entry]) -> Iterator[Part]:
    kinds = [name for name in trace_summary.NAMES if any(name in level["trace"]["categories"] for _, level in entries)]
    on_gpu = any(level["trace"]["device"] == "gpu" for _, level in entries)
    device = "the GPU" if on_gpu else "the CPU, by operator"
    yield paragraph(f"A step under torch's profiler, ms of {device} by kind of work (slower than without)")
    rows = [
        (
            *_place(arm, level),
            number(level["trace"]["step_ms"]),
            *(number(level["trace"]["categories"].get(kind, {"ms": 0})["ms"]) for kind in kinds),
        )
        for arm, level in entries
    ]
    yield table(["arm", *figures("clients", "step ms", *(CATEGORY_HEADS[kind] for kind in kinds))], rows)
    yield gap()
    yield paragraph("And what the scheduler's thread did in it")
    host_rows = [(*_place(arm, level), *(number(level["trace"]["host"][key]) for key in HOST_FIGURES.values())) for arm, level in entries]
    yield table(["arm", *figures("clients", *HOST_FIGURES)], host_rows)


def _place(arm: Mapping[str, Any], level: Mapping[str, Any]) -> tuple[str, str]:
    return arm["arm"]["name"], str(level["concurrency"])


def _remarks(entries: Sequence[Entry]) -> Iterator[Part]:
    if any(arm["acceptance_simulated"] for arm, _ in entries):
        yield paragraph(f"{SIMULATED}: acceptance is simulated, so speeds are the engine's and not a real draft's")
    in_check = {arm["arm"]["name"]: arm["patch_sets_in_check"] for arm, _ in entries if arm.get("patch_sets_in_check")}
    for name, patch_sets in in_check.items():
        yield paragraph(f"{name}: {listing(patch_sets)} ran in check mode, a test that does the work twice: its speeds are no results")
    for arm, level in entries:
        where = f"{arm['arm']['name']} at {level['concurrency']}"
        if level["status"] != bench_runner.COMPLETED:
            yield paragraph(f"{where}: {level['status']}: {str(level['reason']).splitlines()[0]}")
        elif level["trace_reason"]:
            yield paragraph(f"{where}: no trace: {str(level['trace_reason']).splitlines()[0]}")
        if level["overhead"] and level["overhead"]["basis"] == "tokens":
            yield paragraph(f"{where}: on/off compares tokens, prefills included, since no decode steps ran without one between them")
        unknown = level["trace"]["unknown"] if level["trace"] else []
        if sum(kernel["share"] for kernel in unknown) >= UNKNOWN_SHARE:
            names = ", ".join(f"{cut(kernel['name'], 40)} {100 * kernel['share']:.1f} %" for kernel in unknown[:4])
            yield paragraph(f"{where}: kernels of no known kind: {names}")
