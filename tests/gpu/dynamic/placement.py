"""Puts every arm's scheduler on one core, and all other work on others, so that arms differ by what they do and not by where they ran.

On a lent machine a core can be slower than its neighbour for seconds, though nobody waits for it and no time is stolen: a prompt, whose
work is the host's, then takes up to twice as long. Before each measurement all cores are timed with the same little work. The schedulers
(only one has a load; the others sleep) stay on their core while it is as fast as the fastest, else move to that one. A core does not stay
fast for long: while it is measured, theirs is looked at again and again, and left for a fast one when it has become slow. Nothing of it
depends on the arm. Linux; source: sched_setaffinity(2), and the kernel's cputopology.rst for ``thread_siblings_list``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import cores  # noqa: F401
from ansible.module_utils.aerie.processes import PROC, Process
from ansible.module_utils.aerie.serving import server_processes

CPUS = Path("/sys/devices/system/cpu")
SCHEDULER = f"{server_processes.TITLE}scheduler"
UNPLACED = -1
FEWEST = 8
"""Cores below which nothing is moved: the rest of the work needs some of its own."""
AS_FAST = 1.05
"""A core within this of the fastest is kept."""
SLOW = 1.25
"""A core that takes this many times what the fastest took is left."""
LOOK_SECONDS = 0.5
AGAIN_SECONDS = 0.05
"""A core that is slow for less than that is kept."""
ROUNDS = 6
WORK = 30_000
"""Additions of a round: about a millisecond."""
LOOK_WORK = 10_000
"""Additions of a look at the core of a scheduler that is at work: it loses a thousandth of its time by it."""


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


def milliseconds(core: int, rounds: int = ROUNDS, work: int = WORK) -> float:
    """Return what ``WORK`` takes on ``core``, by the fastest of ``rounds`` of ``work``; the calling thread may then run where it could."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return min(_round(work) for _ in range(rounds)) * WORK / work
    finally:
        os.sched_setaffinity(0, before)


def _round(work: int) -> float:
    began = time.thread_time()  # who else runs there is not what is asked
    total = 0
    for number in range(work):
        total += number & 7
    return 1e3 * (time.thread_time() - began)


def chosen(speeds: Mapping[int, float], now: int) -> int:
    """Return the core to run on, of the milliseconds that each took: the present one while it is as fast as the fastest."""
    fastest = min(speeds, key=lambda core: (speeds[core], core))
    return now if now in speeds and speeds[now] <= AS_FAST * speeds[fastest] else fastest


class Placement:
    """Where the schedulers of some servers run."""

    def __init__(self, processes: Iterable[Process], fewest: int = FEWEST, cpus: Path = CPUS) -> None:
        self._processes = list(processes)
        self._cpus = cpus
        self._allowed = frozenset(os.sched_getaffinity(0))
        self._is_on = bool(self._processes) and len(self._allowed) >= fewest
        self._core = UNPLACED

    @contextlib.contextmanager
    def kept(self) -> Iterator[dict[str, float]]:
        """Place everything on good cores until the block ends. What is yielded is complete then; it is empty where there are too few cores.

        It tells the core; what the work took there, on the fastest and on the slowest; how often it was looked at, found slow and left for
        another; and what the work takes in the end, when the scheduler has no load any more.
        """
        said = self.settle()
        if not said:
            yield said
            return
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(said, ended), daemon=True)
        watcher.start()
        try:
            yield said
        finally:
            ended.set()
            watcher.join()
            said["after_ms"] = round(milliseconds(self._core), 3)

    def settle(self) -> dict[str, float]:
        """Time the cores and place everything; return core and milliseconds, empty where there are too few cores."""
        if not self._is_on:
            return {}
        self.leave()
        speeds = {core: milliseconds(core) for core in sorted(self._allowed)}
        self._move(chosen(speeds, self._core))
        said = {"core": self._core, "ms": speeds[self._core], "fastest_ms": min(speeds.values()), "slowest_ms": max(speeds.values())}
        return {name: round(value, 3) for name, value in said.items()}

    def _watch(self, said: dict[str, float], ended: threading.Event) -> None:
        said |= {"looks": 0, "slow": 0, "moves": 0}
        fastest = said["fastest_ms"]
        while not ended.wait(LOOK_SECONDS):
            said["looks"] += 1
            if not self._is_slow(fastest) or ended.wait(AGAIN_SECONDS) or not self._is_slow(fastest):
                continue
            said["slow"] += 1
            # Looked for from the next core on, for neighbours may be slow by the same cause.
            rest = sorted(self._allowed - {self._core}, key=lambda core: (core < self._core, core))
            found = next((core for core in rest if milliseconds(core, 2) <= AS_FAST * fastest), None)
            if found is not None:
                self._move(found)
                said["moves"] += 1

    def _is_slow(self, fastest: float) -> bool:
        return milliseconds(self._core, 1, LOOK_WORK) > SLOW * fastest

    def _move(self, core: int) -> None:
        self._core = core
        self._apply({core}, set(self._allowed) - siblings(core, self._cpus) or set(self._allowed))

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
