"""Times the phases of each decode cycle of the EAGLE workers, v1 and v2 alike, without synchronizing.

Hooks in the worker call :func:`begin`, :func:`mark`, :func:`draft_step` and :func:`end`. A cycle is timed while the file ``on`` exists in
the directory that the environment variable ``AERIE_PROFILE_DIR`` names; without the variable, never. On a GPU each mark records an event on
the current stream, and a finished cycle is read later, when its last event has happened. Lines go to ``phases-<pid>.jsonl`` there. While
the file ``trace`` is there too, each phase is also a range ``aerie:<phase>`` of torch's profiler, so that its traces can be cut by phase.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import pathlib
import time

logger = logging.getLogger(__name__)

PHASES = ("target_verify", "draft", "draft_extend", "tree_and_acceptance", "kv", "remainder")
MAX_PENDING = 256


class MonotonicClock:
    """For devices that compute while Python waits, such as a CPU."""

    name = "monotonic"
    now = staticmethod(time.perf_counter_ns)

    def read(self):
        return self.now()

    def is_past(self, _moment):
        return True

    def milliseconds(self, earlier, later):
        return (later - earlier) / 1e6

    def recycle(self, moments):
        pass


class CudaClock:
    """Moments are events on the current stream; used events are used again."""

    name = "cuda"

    def __init__(self):
        import torch

        self.new_event = lambda: torch.cuda.Event(enable_timing=True)
        self.free = []

    def read(self):
        event = self.free.pop() if self.free else self.new_event()
        event.record()
        return event

    def is_past(self, moment):
        return moment.query()

    def milliseconds(self, earlier, later):
        return earlier.elapsed_time(later)

    def recycle(self, moments):
        self.free.extend(moments)


class Trace:
    """The phase that a cycle is in as a range of torch's profiler; phases follow one another, so that one range is open at most."""

    def __init__(self):
        import torch

        self.new_range = torch.profiler.record_function
        self.phase = None
        self.range = None

    def enter(self, phase):
        if phase != self.phase:
            self.leave()
            entered = self.new_range(f"aerie:{phase}")
            entered.__enter__()
            self.phase, self.range = phase, entered

    def leave(self):
        left, self.phase, self.range = self.range, None, None
        if left is not None:
            left.__exit__(None, None, None)


class Cycle:
    """One decode cycle: marks are (phase, draft step or None, moment); the last one is its end."""

    __slots__ = ("batch", "follows", "graph", "marks", "started", "steps", "trace", "worker")

    def __init__(self, worker, batch, follows, trace):
        self.worker = worker
        self.batch = batch
        self.started = time.time()
        self.follows = follows
        self.trace = trace
        self.graph = False
        self.steps = 0
        self.marks = []

    def enter(self, phase, moment, step=None):
        self.marks.append((phase, step, moment))
        if phase == "target_verify":  # before and after it, an adaptive worker may change its number of steps
            self.steps = int(self.worker.speculative_num_steps)
        if self.trace is not None:
            self.trace.enter(phase)

    def leave(self):
        """The cycle is over, or nothing comes of it."""
        self.worker = None
        if self.trace is not None:
            self.trace.leave()


class Profiler:
    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.switch = self.directory / "on"
        self.trace_switch = self.directory / "trace"
        self.trace = None
        self.clock = None
        self.writes = False
        self.output = None
        self.pending = collections.deque()
        self.last_end = None  # the end of the cycle just before, while nothing else came between
        self.written_end = None  # the end of the cycle written last, kept until the gap after it is measured
        self.dropped = 0

    def begin(self, worker, batch):
        try:
            self.switch.stat()
        except OSError:
            self.last_end = None
            self.drain()
            return None
        if self.clock is None:
            self.clock = CudaClock() if str(worker.device).startswith("cuda") else MonotonicClock()
            self.writes = tensor_parallel_rank(worker) == 0
        if not self.writes or batch.forward_mode.is_idle():
            self.last_end = None
            return None
        self.drain()
        cycle = Cycle(worker, len(batch.seq_lens), self.last_end, self.wanted_trace())
        cycle.enter("remainder", self.clock.read())
        return cycle

    def wanted_trace(self):
        try:
            self.trace_switch.stat()
        except OSError:
            return None
        self.trace = self.trace or Trace()
        return self.trace

    def end(self, cycle):
        moment = self.clock.read()
        cycle.leave()
        cycle.marks.append((None, None, moment))
        self.last_end = moment
        if len(self.pending) >= MAX_PENDING:
            self.pending.popleft()
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("Aerie's phase profiler drops cycles: the GPU is %d of them behind", MAX_PENDING)
        self.pending.append(cycle)
        self.drain()

    def drain(self):
        """Write the cycles whose last event has happened."""
        while self.pending and self.clock.is_past(self.pending[0].marks[-1][2]):
            cycle = self.pending.popleft()
            self.write(self.measured(cycle))
            # The cycle's last moment is still needed for the gap before the next one.
            self.clock.recycle([moment for _, _, moment in cycle.marks[:-1]])
            if self.written_end is not None:
                self.clock.recycle([self.written_end])
            self.written_end = cycle.marks[-1][2]

    def measured(self, cycle):
        phases = dict.fromkeys(PHASES, 0.0)
        steps = []
        for (phase, step, moment), (_, _, following) in zip(cycle.marks, cycle.marks[1:], strict=False):
            elapsed = self.clock.milliseconds(moment, following)
            phases[phase] += elapsed
            if step is not None:
                steps.append(elapsed)
        if cycle.graph and cycle.steps:
            steps = [phases["draft"] / cycle.steps] * cycle.steps
        phases = {phase: round(elapsed, 6) for phase, elapsed in phases.items()}
        gap = None if cycle.follows is None else round(self.clock.milliseconds(cycle.follows, cycle.marks[0][2]), 6)
        return {
            "t": round(cycle.started, 6),
            "batch": cycle.batch,
            "steps": cycle.steps,
            "graph": cycle.graph,
            "clock": self.clock.name,
            "cycle_ms": round(sum(phases.values()), 6),
            "gap_ms": gap,
            "phases": phases,
            "draft_steps_ms": [round(step, 6) for step in steps],
        }

    def write(self, record):
        if self.output is None:
            path = self.directory / f"phases-{os.getpid()}.jsonl"
            self.output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self.output, (json.dumps(record, separators=(",", ":")) + "\n").encode())


def tensor_parallel_rank(worker):
    """The worker's tensor-parallel rank, wherever this version of SGLang keeps it."""
    target = getattr(worker, "target_worker", None)
    runner = getattr(target, "model_runner", None)
    for holder in (worker, target, runner, getattr(target, "ps", None), getattr(runner, "ps", None)):
        rank = getattr(holder, "tp_rank", None)
        if isinstance(rank, int):
            return rank
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)
    except ImportError:
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())


_profiler = Profiler(os.environ["AERIE_PROFILE_DIR"]) if os.environ.get("AERIE_PROFILE_DIR") else None
_cycle = None


def _give_up():
    """A profiler may fail, the server may not: log once, and never try again in this process."""
    global _profiler, _cycle
    failed, _profiler, _cycle = _profiler, None, None
    logger.exception("Aerie's phase profiler failed and is off until the server is restarted")
    try:
        if failed is not None and failed.trace is not None:
            failed.trace.leave()
    except Exception:
        logger.exception("Aerie's phase profiler could not close its range in the trace")


def _drop():
    """Forget a cycle that did not reach its end, as when an exception cut it off."""
    global _cycle
    dropped, _cycle = _cycle, None
    if dropped is not None:
        dropped.leave()


def begin(worker, batch):
    """A decode cycle begins; whatever phase isn't marked is remainder."""
    global _cycle
    if _profiler is None:
        return
    try:
        _drop()
        _cycle = _profiler.begin(worker, batch)
    except Exception:
        _give_up()


def interrupted():
    """Something else than a decode cycle runs: the time to the next cycle is no gap."""
    if _profiler is None:
        return
    try:
        _drop()
        _profiler.last_end = None
    except Exception:
        _give_up()


def mark(phase, graph=False):
    """From here on the cycle is in ``phase``; ``graph``: as one captured graph, whose steps can't be told apart."""
    if _cycle is None:
        return
    try:
        _cycle.enter(phase, _profiler.clock.read())
        _cycle.graph = _cycle.graph or graph
    except Exception:
        _give_up()


def draft_step(number):
    """From here on the cycle is in step ``number`` of the draft; elsewhere a draft is captured or tried out, and not timed."""
    if _cycle is None or _cycle.marks[-1][0] != "draft" or _cycle.graph:
        return
    try:
        _cycle.enter("draft", _profiler.clock.read(), number)
    except Exception:
        _give_up()


def end():
    """The decode cycle ends."""
    global _cycle
    if _cycle is None:
        return
    cycle, _cycle = _cycle, None
    try:
        _profiler.end(cycle)
    except Exception:
        _give_up()
