"""What the host did for a server within a window: whether its processes ran, or wanted to and waited for a core.

A scheduler that runs as long as in other windows, waits for no core, and yet makes fewer steps has met a slower core; one that waits has
neighbours. Source: proc(5) for stat; the kernel's sched-stats.rst for schedstat (nanoseconds run, nanoseconds waited, slices).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cores  # noqa: F401
from ansible.module_utils.aerie.processes import PROC, Process

CPU = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
TICKS = os.sysconf("SC_CLK_TCK")
NANO = 1e-9


def snapshot(processes: Iterable[Process], proc: Path = PROC) -> dict[str, Any]:
    """Return seconds since the machine began: of all cores by kind, and of each process's first thread, run and waited."""
    ticks_of = (proc / "stat").read_text().splitlines()[0].split()[1:]
    found: dict[str, Any] = {"cores": {kind: int(ticks) / TICKS for kind, ticks in zip(CPU, ticks_of, strict=False)}, "processes": {}}
    for process in processes:
        try:
            ran, waited, _slices = (proc / str(process.pid) / "schedstat").read_text().split()
        except OSError:  # it ended
            continue
        name = Path(process.argv[0]).name if process.argv else ""
        found["processes"][f"{name} {process.pid}"] = [int(ran) * NANO, int(waited) * NANO]
    return found


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds between two snapshots: processes that did nothing are left out."""
    kinds = {kind: round(after["cores"][kind] - seconds, 2) for kind, seconds in before["cores"].items()}
    processes = {
        name: [round(now - then, 4) for now, then in zip(seconds, before["processes"][name], strict=True)]
        for name, seconds in after["processes"].items()
        if name in before["processes"]
    }
    return {"cores": kinds, "processes": {name: seconds for name, seconds in processes.items() if any(seconds)}}
