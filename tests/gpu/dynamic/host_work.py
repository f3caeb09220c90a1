"""What the host did for a server within a window: whether its processes ran, or wanted to and waited for a core.

A scheduler that runs as long as in other windows, waits for no core, and yet makes fewer steps has met a slower core; one that waits has
neighbours. Source: proc(5) for stat; the kernel's sched-stats.rst for schedstat (nanoseconds run, nanoseconds waited, slices).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
CPU = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
TICKS = os.sysconf("SC_CLK_TCK")
NANO = 1e-9


def family(pid: int, proc: Path = PROC) -> dict[int, str]:
    """Return a process and all that it began, by id, with their names."""
    parents, names = {}, {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it ended
            continue
        opened, closed = text.index("("), text.rindex(")")
        number = int(text[:opened])
        names[number], parents[number] = text[opened + 1 : closed], int(text[closed + 2 :].split()[1])
    found = {pid} & names.keys()
    while more := {number for number, parent in parents.items() if parent in found} - found:
        found |= more
    return {number: names[number] for number in sorted(found)}


def snapshot(pid: int, proc: Path = PROC) -> dict[str, Any]:
    """Return seconds since the machine began: of all cores by kind, and of each process's first thread, run and waited."""
    cores = (proc / "stat").read_text().splitlines()[0].split()[1:]
    found: dict[str, Any] = {"cores": {kind: int(ticks) / TICKS for kind, ticks in zip(CPU, cores, strict=False)}, "processes": {}}
    for number, name in family(pid, proc).items():
        try:
            ran, waited, _slices = (proc / str(number) / "schedstat").read_text().split()
        except OSError:
            continue
        found["processes"][f"{name} {number}"] = [int(ran) * NANO, int(waited) * NANO]
    return found


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds between two snapshots: processes that did nothing are left out."""
    cores = {kind: round(after["cores"][kind] - seconds, 2) for kind, seconds in before["cores"].items()}
    processes = {
        name: [round(now - then, 4) for now, then in zip(seconds, before["processes"][name], strict=True)]
        for name, seconds in after["processes"].items()
        if name in before["processes"]
    }
    return {"cores": cores, "processes": {name: seconds for name, seconds in processes.items() if any(seconds)}}
