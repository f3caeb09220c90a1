"""What the patch set ``phase_profiler`` wrote, summed up: which phase of a decode cycle costs how much. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError

PHASES = ("target_verify", "draft", "draft_extend", "tree_and_acceptance", "kv", "remainder")
MEASURED, DIVIDED, MIXED, NONE = "measured", "divided", "mixed", "none"
TOLERANCE_MS = 1e-3


@dataclass(frozen=True)
class Cycle:
    """One decode cycle that was timed, as one line of the profile says it; times are in milliseconds."""

    time: float
    batch: int
    steps: int
    graph: bool
    clock: str
    cycle_ms: float
    gap_ms: float | None
    phases: dict[str, float]
    draft_steps_ms: tuple[float, ...]


@dataclass(frozen=True)
class Phase:
    """One phase over many cycles; ``share`` is its part of all the time that they took together."""

    name: str
    share: float
    mean_ms: float
    median_ms: float


@dataclass(frozen=True)
class Summary:
    """Many cycles; ``draft_steps_ms`` are medians by step, and ``draft_steps`` says how they came about.

    ``cycles`` are those that were timed, a random sample of those that ran: shares and means are fair, counting ran cycles by it is not.

    ``measured``: each step on its own; the last holds no forward pass, as the first token comes from draft extend. ``divided``: the draft
    ran as one graph, whose steps can't be told apart, so that each is an equal part of it. ``mixed``: both, summed up from the measured.
    """

    cycles: int
    clock: str
    mean_batch: float
    mean_cycle_ms: float
    median_cycle_ms: float
    median_gap_ms: float | None
    phases: tuple[Phase, ...]
    draft_steps: str
    draft_steps_ms: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "cycles": self.cycles,
            "clock": self.clock,
            "mean_batch": self.mean_batch,
            "mean_cycle_ms": self.mean_cycle_ms,
            "median_cycle_ms": self.median_cycle_ms,
            "median_gap_ms": self.median_gap_ms,
            "phases": {phase.name: {"share": phase.share, "mean_ms": phase.mean_ms, "median_ms": phase.median_ms} for phase in self.phases},
            "draft_steps": self.draft_steps,
            "draft_steps_ms": list(self.draft_steps_ms),
        }


def read(text: str, name: str) -> list[Cycle]:
    """Return the cycles of a profile ``text``; ``name`` is for errors. A last line that was cut off while it was written is left out."""
    cycles = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            cycles.append(_cycle(untrusted.parse(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if number == len(lines):  # no newline came after it
                break
            raise AerieError(
                f"{name}, line {number}: no cycle of a phase profile ({error}): was the file edited, or cut in the middle?"
            ) from error
    return cycles


def _cycle(line: dict[str, Any]) -> Cycle:
    phases = {phase: float(line["phases"][phase]) for phase in PHASES}
    unknown = sorted(line["phases"].keys() - phases.keys())
    if unknown:
        raise ValueError(f"unknown phases {unknown}")
    if abs(sum(phases.values()) - line["cycle_ms"]) > TOLERANCE_MS:
        raise ValueError(f"its phases sum to {sum(phases.values())} ms and not to cycle_ms, {line['cycle_ms']}")
    return Cycle(
        time=float(line["t"]),
        batch=int(line["batch"]),
        steps=int(line["steps"]),
        graph=bool(line["graph"]),
        clock=str(line["clock"]),
        cycle_ms=float(line["cycle_ms"]),
        gap_ms=None if line["gap_ms"] is None else float(line["gap_ms"]),
        phases=phases,
        draft_steps_ms=tuple(float(step) for step in line["draft_steps_ms"]),
    )


def between(cycles: Iterable[Cycle], start: float, end: float) -> list[Cycle]:
    """Return the cycles that began between two moments (Unix time), such as those of one cell."""
    return [cycle for cycle in cycles if start <= cycle.time < end]


def summarise(cycles: Sequence[Cycle]) -> Summary:
    """Sum up at least one cycle."""
    if not cycles:
        raise AerieError(
            "the profile has no decode cycle: was it switched on while requests ran, on a server with this patch set and with speculation?"
        )
    total = sum(cycle.cycle_ms for cycle in cycles)
    kind, steps = _draft_steps(cycles)
    gaps = [cycle.gap_ms for cycle in cycles if cycle.gap_ms is not None]
    clocks = sorted({cycle.clock for cycle in cycles})
    return Summary(
        cycles=len(cycles),
        clock="+".join(clocks),
        mean_batch=statistics.fmean(cycle.batch for cycle in cycles),
        mean_cycle_ms=total / len(cycles),
        median_cycle_ms=statistics.median(cycle.cycle_ms for cycle in cycles),
        median_gap_ms=statistics.median(gaps) if gaps else None,
        phases=tuple(_phase(name, [cycle.phases[name] for cycle in cycles], total) for name in PHASES),
        draft_steps=kind,
        draft_steps_ms=steps,
    )


def _phase(name: str, times: Sequence[float], total: float) -> Phase:
    return Phase(name, share=sum(times) / total if total else 0.0, mean_ms=statistics.fmean(times), median_ms=statistics.median(times))


def _draft_steps(cycles: Sequence[Cycle]) -> tuple[str, tuple[float, ...]]:
    drafting = [cycle for cycle in cycles if cycle.draft_steps_ms]
    measured = [cycle for cycle in drafting if not cycle.graph]
    chosen = measured or drafting
    if not chosen:
        return NONE, ()
    kind = DIVIDED if not measured else MEASURED if len(measured) == len(drafting) else MIXED
    length = max(len(cycle.draft_steps_ms) for cycle in chosen)
    by_step = ([cycle.draft_steps_ms[step] for cycle in chosen if step < len(cycle.draft_steps_ms)] for step in range(length))
    return kind, tuple(statistics.median(times) for times in by_step)
