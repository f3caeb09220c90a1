"""Runs the processes of a probe: each in a session of its own, bounded in time, and gone afterwards. Standard library only.

What a process does it tells by events (see ``probe_programs/common.py``), so that one that hangs, or dies by a signal, has told where.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import probe_programs
from ansible.module_utils.aerie.host.probe_programs import all_reduce, common, custom_all_reduce, kernels, link, p2p, wedge

MARK = "AERIE_PROBE"
"""A variable that every process of one run of a probe carries."""
SHARED_MEMORY = "/dev/shm/"
POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0
"""How long the other ranks have to say why they fail when one has died."""
KILL_SECONDS = 10.0
TELL_SECONDS = 3.0

# What the programs import travels with the module by these names; chase.py, which needs Triton, is only read here.
PROGRAMS = (all_reduce, common, custom_all_reduce, kernels, link, p2p, wedge)


def sources() -> dict[str, str]:
    """Return the programs, file name to text, from wherever this module was imported: a directory, or the archive that Ansible sends."""
    package = probe_programs.__name__
    names = [package, *(module.__name__ for module in PROGRAMS), f"{package}.chase"]
    texts = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        # Of a directory's loader and an archive's alike, though they have no class in common.
        text = getattr(spec.loader, "get_source", lambda _: None)(name) if spec is not None else None
        if text is None:
            raise AerieError(f"the source of {name} did not come along: is this module run as Ansible sends it?")
        texts[f"{'__init__' if name == package else name.rpartition('.')[2]}.py"] = text
    return texts


@dataclass(frozen=True)
class Part:
    """One process of a probe: what it is called in messages, what it is asked, and its own variables."""

    name: str
    request: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """What one process gave, and how far it came."""

    name: str
    status: int | None
    """Its exit status, negative for a signal; None: it was killed by us."""
    order: int
    """Which one ended first; those that we ended share the last place."""
    stages: tuple[str, ...]
    figures: tuple[tuple[str, Any], ...]
    problems: tuple[dict[str, Any], ...]
    done: bool
    where: tuple[str, ...]
    """The innermost calls of a process that did not end by itself."""
    log: str

    @property
    def stage(self) -> str:
        """Return what it was doing last."""
        return self.stages[-1] if self.stages else "start"

    @property
    def signal(self) -> str | None:
        """Return the name of the signal that ended it, if one did that was not ours."""
        return signal.Signals(-self.status).name if self.status is not None and self.status < 0 else None

    @property
    def passed(self) -> bool:
        return self.status == 0 and self.done and not self.problems

    def all(self, name: str) -> list[Any]:
        """Return every value of the figure ``name``, in order."""
        return [value for figure, value in self.figures if figure == name]

    def last(self, name: str) -> Any:
        """Return the last value of the figure ``name``, None where there is none."""
        return (self.all(name) or [None])[-1]


@dataclass(frozen=True)
class Outcome:
    """What a probe's processes gave together."""

    parts: tuple[Ended, ...]
    seconds: float
    timed_out: bool
    left: tuple[int, ...]
    """Processes that not even SIGKILL ended: they wait inside the driver."""

    @property
    def passed(self) -> bool:
        return not self.timed_out and all(part.passed for part in self.parts)


class _Process:
    """A part while it runs."""

    def __init__(self, part: Part, number: int, runner: Runner, program: str, seconds: float) -> None:
        self.part = part
        self.events = runner.scratch / f"{number}.jsonl"
        self.log = runner.scratch / f"{number}.log"
        request = runner.scratch / f"{number}.request.json"
        self.events.write_text("")
        told = {**part.request, "events": str(self.events), "seconds": seconds, "parent": os.getpid()}
        request.write_text(json.dumps(told))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(runner.python), "-m", f"probe_programs.{program}", str(request)],
                cwd=runner.scratch,
                env={**runner.environment, **part.environment, MARK: runner.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.status: int | None = None
        self.order: int | None = None

    def read(self) -> list[dict[str, Any]]:
        events = []
        for line in self.events.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed process may be half
                events.append(json.loads(line))
        return events

    def stage(self) -> str | None:
        return next((event["stage"] for event in reversed(self.read()) if "stage" in event), None)

    def poll(self, order: int) -> bool:
        """Say whether it still runs."""
        if self.order is None and (status := self.process.poll()) is not None:
            self.status, self.order = status, order
        return self.order is None

    def ended(self, last: int) -> Ended:
        events, log = self.read(), self.log.read_text(errors="replace")
        return Ended(
            name=self.part.name,
            status=self.status,
            order=last if self.order is None else self.order,
            stages=tuple(event["stage"] for event in events if "stage" in event),
            figures=tuple((event["figure"], event["value"]) for event in events if "figure" in event),
            problems=tuple({"message": event["problem"], **event} for event in events if "problem" in event),
            done=any("done" in event for event in events),
            where=innermost_calls(log) if self.order is None or self.status else (),
            log=log[-2000:],
        )


class Runner:
    """Runs programs with one Python in one scratch directory, which is the caller's to remove."""

    def __init__(
        self,
        python: Path,
        scratch: Path,
        environment: Mapping[str, str],
        programs: Mapping[str, str],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.python = python
        self.scratch = scratch
        self.environment = dict(environment)
        self.tell = tell
        self.mark = uuid.uuid4().hex
        package = scratch / "probe_programs"
        package.mkdir(parents=True, exist_ok=True)
        for name, text in programs.items():
            (package / name).write_text(text)

    def run(
        self,
        title: str,
        program: str,
        parts: Iterable[Part],
        seconds: float,
        together: bool = False,
        watch: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Run ``program`` once for each part, all at once, for ``seconds`` at most; afterwards none of their processes is left.

        ``together`` says that they need each other: when one dies, the others end soon after. ``watch`` is called again and again
        with the stage of the first.
        """
        started = time.monotonic()
        shared_before, shared = _shared_memory(), set[str]()
        running = [_Process(part, number, self, program, seconds) for number, part in enumerate(parts)]
        deadline, told, timed_out, order = started + seconds, started, False, 0
        try:
            while True:
                order += 1
                alive = [process for process in running if process.poll(order)]
                if not alive:
                    break
                now = time.monotonic()
                if together and any(process.order is not None and process.status for process in running):
                    deadline, together = min(deadline, now + GRACE_SECONDS), False
                if now >= deadline:
                    timed_out = now >= started + seconds
                    for process in alive:
                        _show_stack(process.process.pid)
                    time.sleep(0.5)
                    break
                shared |= _mapped_shared_memory(process.process.pid for process in alive)
                if watch is not None:
                    watch(alive[0].stage() or "")
                if now - told > TELL_SECONDS:
                    told = now
                    self.tell(f"{title}: {alive[0].stage() or 'start'} ({now - started:.0f} s)")
                time.sleep(POLL_SECONDS)
        finally:
            shared |= _mapped_shared_memory(process.process.pid for process in running if process.order is None)
            left = self._end(running)
            for name in shared - shared_before:
                with contextlib.suppress(OSError):
                    Path(SHARED_MEMORY, name).unlink()
        return Outcome(tuple(process.ended(order + 1) for process in running), time.monotonic() - started, timed_out, left)

    def _end(self, running: list[_Process]) -> tuple[int, ...]:
        """Kill everything of this run, children that left their group included; return what does not die."""
        sessions = {process.process.pid for process in running}
        deadline = time.monotonic() + KILL_SECONDS
        while True:
            for program in running:
                # Once it was waited for, its number may be another group's.
                if program.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(program.process.pid, signal.SIGKILL)
            left = [process for process in processes.scan() if process.variable(MARK) == self.mark or _session(process.pid) in sessions]
            for process in left:
                with contextlib.suppress(PermissionError):
                    processes.kill(process)
            for program in running:
                program.process.poll()  # or it stays a zombie
            if not left or time.monotonic() > deadline:
                return tuple(process.pid for process in left)
            time.sleep(0.05)


def innermost_calls(log: str, count: int = 3) -> tuple[str, ...]:
    """Return the innermost calls of the last stack that faulthandler wrote into ``log``, innermost first."""
    stacks = re.split(r"^(?:Current thread|Thread|Stack) .*\(most recent call first\):.*$", log, flags=re.MULTILINE)
    if len(stacks) < 2:
        return ()
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in (.+)$', stacks[-1], re.MULTILINE)
    return tuple(f"{name} ({Path(file).name}:{line})" for file, line, name in frames[:count])


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _show_stack(pid: int) -> None:
    """Let a program write where it is; one that has not got that far yet would die of the signal, and is about to anyway."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)


def _shared_memory() -> set[str]:
    try:
        return {entry.name for entry in Path(SHARED_MEMORY).iterdir()}
    except OSError:
        return set()


def _mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the names of files in /dev/shm that these processes have mapped: what a killed one can't remove itself."""
    files = {file for pid in pids for file in processes.mapped_files(pid)}
    shared = (file for file in files if file.startswith(SHARED_MEMORY))
    return {file.removeprefix(SHARED_MEMORY) for file in shared if not file.endswith(" (deleted)")}
