"""Times the phases of decode cycles of the EAGLE workers, v1 and v2 alike, without synchronizing.

Hooks in the worker call :func:`begin`, :func:`mark`, :func:`draft_step` and :func:`end`. Cycles are timed while the file ``on`` exists in
the directory that the environment variable ``AERIE_PROFILE_DIR`` names; without the variable, never. What is timed is a sample: the first
cycle, and then one of every four, or of as many as ``on`` holds as a number. On a GPU each mark records an event, and a finished cycle is
read later, when its last event has happened. Lines go to ``phases-<pid>.jsonl`` there. While the file ``trace`` is there too, each phase of
every cycle is also a range ``aerie:<phase>`` of torch's profiler, so that its traces can be cut by phase.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import pathlib
import random
import time

logger = logging.getLogger(__name__)

PHASES = ("target_verify", "draft", "draft_extend", "tree_and_acceptance", "kv", "remainder")
EVERY = 4
LOOK_NS = 20_000_000  # how long what the files say is taken for granted
MAX_PENDING = 256
monotonic_ns = time.monotonic_ns
encode = json.JSONEncoder(separators=(",", ":")).encode


class MonotonicClock:
    """For devices that compute while Python waits, such as a CPU."""

    name = "monotonic"
    now = staticmethod(time.perf_counter_ns)

    def reader(self):
        return self.now

    def is_past(self, _moment):
        return True

    def milliseconds(self, earlier, later):
        return (later - earlier) / 1e6

    def recycle(self, moments):
        pass


class CudaClock:
    """Moments are events on the stream that a cycle begins on; used events are used again."""

    name = "cuda"

    def __init__(self):
        import torch

        self.new_event = lambda: torch.cuda.Event(enable_timing=True)
        self.current_stream = torch.cuda.current_stream
        self.free = []

    def reader(self):
        stream, free = self.current_stream(), self.free  # asked for once a cycle, as it costs more than an event

        def read():
            event = free.pop() if free else self.new_event()
            event.record(stream)
            return event

        return read

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
    """One decode cycle. Marks are (phase, draft step or None, moment), the last one is its end; a cycle that is only traced has none."""

    __slots__ = ("batch", "follows", "graph", "marks", "phase", "read", "started", "steps", "trace", "worker")

    def __init__(self, worker, trace):
        self.worker = worker
        self.trace = trace
        self.phase = None
        self.graph = False
        self.steps = 0
        self.read = None

    def time(self, batch, follows, read):
        self.started = time.time()
        self.batch = batch
        self.follows = follows
        self.read = read
        self.marks = []

    def enter(self, phase, step=None):
        self.phase = phase
        if self.read is not None:
            self.marks.append((phase, step, self.read()))
        if phase == "target_verify":  # before and after it, an adaptive worker may change its number of steps
            self.steps = int(self.worker.speculative_num_steps)
        if self.trace is not None:
            self.trace.enter(phase)

    def leave(self):
        """The cycle is over, or nothing comes of it."""
        self.worker = None
        if self.trace is not None:
            self.trace.leave()


class Sample:
    """Which cycles are timed: the first, then one at random of every ``every``. A fixed stride could keep step with what recurs."""

    draw = random.Random(1).random  # not the generator that the server seeds

    def __init__(self, every):
        self.every = every
        self.place = 0  # of the cycle timed last or next, among its ``every``
        self.left = 1  # cycles until the next timed one, itself included

    def takes(self):
        """Say whether the cycle that begins now is timed."""
        self.left -= 1
        if self.left:
            return False
        place = int(self.draw() * self.every)
        self.left = self.every - self.place + place
        self.place = place
        return True


class Profiler:
    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.switch = self.directory / "on"
        self.trace_switch = self.directory / "trace"
        self.next_look = 0
        self.seen = None  # the file ``on`` as it was read
        self.sample = None  # while switched on
        self.trace = None  # while traced
        self.tracing = None
        self.clock = None
        self.writes = False
        self.output = None
        self.pending = collections.deque()
        self.closing = False  # the cycle before a timed one runs: its end is a moment to take
        self.last_end = None  # the end of the cycle just before, while nothing else came between
        self.written_end = None  # the end of the cycle written last, kept until the gap after it is measured
        self.dropped = 0

    def begin(self, worker, batch):
        """Return the cycle that begins, or None where it is neither timed nor traced."""
        moment = monotonic_ns()
        if moment >= self.next_look:
            self.next_look = moment + LOOK_NS
            self.look(worker)
        if self.pending:
            self.drain()
        follows, self.last_end, self.closing = self.last_end, None, False
        if self.sample is None or batch.forward_mode.is_idle():
            return None
        timed = self.sample.takes()
        self.closing = self.sample.left == 1
        if not timed and self.trace is None:
            return None
        cycle = Cycle(worker, self.trace)
        if timed:
            cycle.time(len(batch.seq_lens), follows, self.clock.reader())
        cycle.enter("remainder")
        return cycle

    def look(self, worker):
        """See what the files say."""
        try:
            found = self.switch.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen != self.seen:
                self.sample = Sample(wanted(self.switch) if found.st_size else EVERY)
                self.seen = seen
        except OSError:
            self.sample = self.seen = self.trace = None
            return
        if self.clock is None:
            self.clock = CudaClock() if str(worker.device).startswith("cuda") else MonotonicClock()
            self.writes = tensor_parallel_rank(worker) == 0
        if not self.writes:
            self.sample = None
        self.trace = self.wanted_trace() if self.writes else None

    def wanted_trace(self):
        try:
            self.trace_switch.stat()
        except OSError:
            return None
        self.tracing = self.tracing or Trace()
        return self.tracing

    def end(self, cycle):
        closing, self.closing = self.closing, False
        if cycle is None or cycle.read is None:
            if closing:
                self.last_end = self.clock.reader()()
            if cycle is not None:
                cycle.leave()
            return
        self.last_end = moment = cycle.read()
        cycle.leave()
        cycle.marks.append((None, None, moment))
        if len(self.pending) >= MAX_PENDING:
            self.pending.popleft()
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("Aerie's phase profiler drops cycles: the GPU is %d of them behind", MAX_PENDING)
        self.pending.append(cycle)
        self.drain()

    def drain(self):
        """Write the cycles whose last event has happened, at once: whoever switches off and reads finds them."""
        lines = []
        while self.pending and self.clock.is_past(self.pending[0].marks[-1][2]):
            cycle = self.pending.popleft()
            lines.append(encode(self.measured(cycle)) + "\n")
            # The cycle's last moment may still be needed for the gap before the next one, and it may itself be what this one follows.
            done = [moment for _, _, moment in cycle.marks[:-1]]
            done += [moment for moment in (cycle.follows, self.written_end) if moment is not None]
            if cycle.follows is not None and cycle.follows is self.written_end:
                done.pop()
            self.clock.recycle(done)
            self.written_end = cycle.marks[-1][2]
        if lines:
            self.write("".join(lines))

    def measured(self, cycle):
        phases = dict.fromkeys(PHASES, 0.0)
        steps = []
        milliseconds, marks = self.clock.milliseconds, iter(cycle.marks)
        phase, step, moment = next(marks)
        for following, following_step, following_moment in marks:
            elapsed = milliseconds(moment, following_moment)
            phases[phase] += elapsed
            if step is not None:
                steps.append(elapsed)
            phase, step, moment = following, following_step, following_moment
        if cycle.graph and cycle.steps:
            steps = [phases["draft"] / cycle.steps] * cycle.steps
        phases = {phase: round(elapsed, 6) for phase, elapsed in phases.items()}
        gap = None if cycle.follows is None else round(milliseconds(cycle.follows, cycle.marks[0][2]), 6)
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

    def write(self, lines):
        if self.output is None:
            path = self.directory / f"phases-{os.getpid()}.jsonl"
            self.output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self.output, lines.encode())


def wanted(switch):
    """Of how many cycles one is timed, as the file ``on`` says."""
    text = switch.read_text(errors="replace").strip()
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
        return int(text)
    if text:
        logger.warning("%s holds %r, which is no number of cycles above 0: one of %d is timed", switch, text, EVERY)
    return EVERY


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
_is_skipped = False


def _give_up():
    """A profiler may fail, the server may not: log once, and never try again in this process."""
    global _profiler, _cycle
    failed, _profiler, _cycle = _profiler, None, None
    logger.exception("Aerie's phase profiler failed and is off until the server is restarted")
    try:
        if failed is not None and failed.tracing is not None:
            failed.tracing.leave()
    except Exception:
        logger.exception("Aerie's phase profiler could not close its range in the trace")


def _drop():
    """Forget a cycle that did not reach its end, as when an exception cut it off."""
    global _cycle
    dropped, _cycle = _cycle, None
    if dropped is not None:
        dropped.leave()


def skip():
    """What would begin next is no decode cycle."""
    global _is_skipped
    _is_skipped = True


def begin(worker, batch):
    """A decode cycle begins; whatever phase isn't marked is remainder."""
    global _cycle, _is_skipped
    if _profiler is None:
        return
    if _is_skipped:
        _is_skipped = False
        interrupted()
        return
    try:
        if _cycle is not None:
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
        _profiler.last_end, _profiler.closing = None, False
    except Exception:
        _give_up()


def mark(phase, graph=False):
    """From here on the cycle is in ``phase``; ``graph``: as one captured graph, whose steps can't be told apart."""
    if _cycle is None:
        return
    try:
        _cycle.enter(phase)
        _cycle.graph = _cycle.graph or graph
    except Exception:
        _give_up()


def draft_step(number):
    """From here on the cycle is in step ``number`` of the draft; elsewhere a draft is captured or tried out, and not timed."""
    if _cycle is None or _cycle.phase != "draft" or _cycle.graph:
        return
    try:
        _cycle.enter("draft", number)
    except Exception:
        _give_up()


def end():
    """The decode cycle ends."""
    global _cycle
    if _profiler is None or (_cycle is None and not _profiler.closing):
        return
    cycle, _cycle = _cycle, None
    try:
        _profiler.end(cycle)
    except Exception:
        _give_up()
