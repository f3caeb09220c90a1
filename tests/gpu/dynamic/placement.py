"""Puts every arm's scheduler on one core, and all other work on others, so that arms differ by what they do and not by where they ran.

On a lent machine a core can be slower than its neighbour for seconds, though nobody waits for it and no time is stolen: a prompt, whose
work is the host's, then takes up to twice as long. Before each measurement all cores are timed with the same little work. The schedulers
(only one has a load; the others sleep) stay on their core while it is as fast as the fastest, else move to that one. Nothing of it depends
on the arm. Linux; source: sched_setaffinity(2), and the kernel's cputopology.rst for ``thread_siblings_list``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cores  # noqa: F401
from ansible.module_utils.aerie.processes import PROC, Process
from ansible.module_utils.aerie.serving import server_processes

CPUS = Path("/sys/devices/system/cpu")
SCHEDULER = f"{server_processes.TITLE}scheduler"
FEWEST = 8
"""Cores below which nothing is moved: the rest of the work needs some of its own."""
AS_FAST = 1.05
"""A core within this of the fastest is kept."""
ROUNDS = 6
WORK = 30_000
"""Additions of a round: about a millisecond."""


def core_numbers(text: str) -> set[int]:
    """Return the cores of a list as the kernel writes it: ``0-2,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def siblings(core: int, cpus: Path = CPUS) -> set[int]:
    """Return the cores that share ``core``'s circuits, itself included."""
    try:
        return core_numbers((cpus / f"cpu{core}/topology/thread_siblings_list").read_text()) | {core}
    except (OSError, ValueError):
        return {core}


def milliseconds(core: int) -> float:
    """Return what a fixed little work takes on ``core``, the fastest of a few rounds; the calling thread may then run where it could."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return min(_round() for _ in range(ROUNDS))
    finally:
        os.sched_setaffinity(0, before)


def _round() -> float:
    began = time.perf_counter()
    total = 0
    for number in range(WORK):
        total += number & 7
    return 1e3 * (time.perf_counter() - began)


def chosen(speeds: Mapping[int, float], now: int | None) -> int:
    """Return the core to run on, of the milliseconds that each took: the present one while it is as fast as the fastest."""
    fastest = min(speeds, key=lambda core: (speeds[core], core))
    return now if now in speeds and speeds[now] <= AS_FAST * speeds[fastest] else fastest


class Placement:
    """Where the schedulers of some servers run."""

    def __init__(self, processes: Iterable[Process], fewest: int = FEWEST) -> None:
        self._processes = list(processes)
        self._allowed = frozenset(os.sched_getaffinity(0))
        self._is_on = bool(self._processes) and len(self._allowed) >= fewest
        self._core: int | None = None

    def settle(self) -> dict[str, Any]:
        """Time the cores and place everything; return core and milliseconds, empty where there are too few cores."""
        if not self._is_on:
            return {}
        self.leave()
        speeds = {core: milliseconds(core) for core in sorted(self._allowed)}
        self._core = chosen(speeds, self._core)
        self._apply({self._core}, set(self._allowed) - siblings(self._core) or set(self._allowed))
        said = {"core": self._core, "ms": speeds[self._core], "fastest_ms": min(speeds.values()), "slowest_ms": max(speeds.values())}
        return {name: round(value, 3) for name, value in said.items()}

    def after(self) -> dict[str, float]:
        """Return what the same work takes now on the schedulers' core, which has no load any more."""
        return {} if self._core is None else {"after_ms": round(milliseconds(self._core), 3)}

    def leave(self) -> None:
        """Let everything run everywhere again."""
        if self._is_on:
            self._apply(set(self._allowed), set(self._allowed))

    def _apply(self, schedulers: set[int], others: set[int]) -> None:
        for process in self._processes:
            is_scheduler = bool(process.argv) and process.argv[0].startswith(SCHEDULER)
            for thread in _threads(process.pid):
                _allow(thread, schedulers if is_scheduler and thread == process.pid else others)
        for thread in _threads(os.getpid()):
            _allow(thread, others)


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in (PROC / str(pid) / "task").iterdir()]
    except OSError:  # it ended
        return []


def _allow(thread: int, where: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, where)
    except ProcessLookupError:  # it ended since
        return
