"""The overlay of phase_profiler, on its own: parts sum to the cycle, a fair sample is timed, nothing waits, and it can't break a server."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import os
import random
import sys
import types
from pathlib import Path

import pytest
from ansible.module_utils.aerie.profiling import phases

OVERLAY = Path(__file__).parents[2] / "patches/phase_profiler/overlay/sglang/srt/speculative/aerie_phase_profiler.py"


class Mode:
    def __init__(self, idle: bool = False) -> None:
        self.idle = idle

    def is_idle(self) -> bool:
        return self.idle


def worker(device: str = "cpu", rank: int = 0):
    return types.SimpleNamespace(device=device, speculative_num_steps=2, target_worker=types.SimpleNamespace(tp_rank=rank))


def batch(size: int = 3, idle: bool = False):
    return types.SimpleNamespace(seq_lens=list(range(size)), forward_mode=Mode(idle))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Load the overlay as a server with AERIE_PROFILE_DIR=tmp_path would; the clock ticks by 1, 2, 3, … ms, and each cycle looks."""

    def make(directory: Path | None = tmp_path):
        if directory is None:
            monkeypatch.delenv("AERIE_PROFILE_DIR", raising=False)
        else:
            monkeypatch.setenv("AERIE_PROFILE_DIR", str(directory))
        spec = importlib.util.spec_from_file_location("aerie_phase_profiler", OVERLAY)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ticks = itertools.accumulate(count * 1_000_000 for count in itertools.count(1))
        monkeypatch.setattr(module.MonotonicClock, "now", staticmethod(lambda: next(ticks)))
        monkeypatch.setattr(module, "LOOK_NS", 0)
        return module

    return make


def switch_on(directory: Path, every: int = 1) -> None:
    (directory / "on").write_text(f"{every}\n")


def cycle(profiler, of=None, graph: bool = False, idle: bool = False) -> None:
    """What a patched worker calls in one decode cycle."""
    profiler.begin(of or worker(), batch(idle=idle))
    profiler.mark("kv")
    profiler.mark("draft", graph=graph)
    if not graph:
        profiler.draft_step(0)
        profiler.draft_step(1)
    profiler.mark("tree_and_acceptance")
    profiler.mark("kv")
    profiler.mark("target_verify")
    profiler.mark("tree_and_acceptance")
    profiler.mark("remainder")
    profiler.mark("draft_extend")
    profiler.mark("remainder")
    profiler.end()


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for file in sorted(directory.glob("phases-*.jsonl")) for line in file.read_text().splitlines()]


def test_every_millisecond_lands_in_its_phase_and_parts_sum_to_the_cycle(load, tmp_path):
    switch_on(tmp_path)
    cycle(load())
    (line,) = lines(tmp_path)
    # The n-th moment comes n ms after the one before it.
    assert line["phases"] == {
        "remainder": 2 + 11 + 13,
        "kv": 3 + 8,
        "draft": 4 + 5 + 6,
        "tree_and_acceptance": 7 + 10,
        "target_verify": 9,
        "draft_extend": 12,
    }
    assert sum(line["phases"].values()) == pytest.approx(line["cycle_ms"])
    assert line["cycle_ms"] == sum(range(2, 14))
    assert line["draft_steps_ms"] == [5, 6]
    assert (line["batch"], line["steps"], line["graph"], line["clock"], line["gap_ms"]) == (3, 2, False, "monotonic", None)


def test_what_it_writes_is_what_the_summary_reads(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    cycle(profiler)
    cycle(profiler)
    (file,) = tmp_path.glob("phases-*.jsonl")
    assert phases.summarise(phases.read(file.read_text(), file.name)).cycles == 2
    assert profiler.PHASES == phases.PHASES


def test_under_a_graph_steps_are_equal_parts_and_say_so(load, tmp_path):
    switch_on(tmp_path)
    cycle(load(), graph=True)
    (line,) = lines(tmp_path)
    assert line["graph"] is True
    assert line["draft_steps_ms"] == [line["phases"]["draft"] / 2] * 2


def test_it_is_switched_by_a_file_without_a_restart(load, tmp_path):
    profiler = load()
    cycle(profiler)
    switch_on(tmp_path)
    cycle(profiler)
    (tmp_path / "on").unlink()
    cycle(profiler)
    assert len(lines(tmp_path)) == 1


def test_without_the_variable_it_never_looks_at_a_file(load, monkeypatch):
    profiler = load(None)
    monkeypatch.setattr(profiler.pathlib.Path, "stat", lambda path: pytest.fail("looked"))
    cycle(profiler)
    assert profiler._profiler is None


def test_files_are_looked_at_once_in_a_while_only(load, tmp_path, monkeypatch):
    profiler, now = load(), 0
    monkeypatch.setattr(profiler, "LOOK_NS", 20)
    monkeypatch.setattr(profiler, "monotonic_ns", lambda: now)
    looks = []
    look = profiler.Profiler.look
    monkeypatch.setattr(profiler.Profiler, "look", lambda self, worker: (looks.append(now), look(self, worker)))
    switch_on(tmp_path)
    for now in range(60):
        if now == 25:
            (tmp_path / "on").unlink()
        cycle(profiler)
    assert looks == [0, 20, 40]
    assert len(lines(tmp_path)) == 40


def test_marks_outside_a_cycle_do_nothing(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    profiler.mark("kv")
    profiler.draft_step(0)
    profiler.end()
    assert lines(tmp_path) == []


def test_only_rank_0_writes(load, tmp_path):
    switch_on(tmp_path)
    cycle(load(), worker(rank=1))
    assert lines(tmp_path) == []


@pytest.mark.parametrize(
    "holder",
    [
        types.SimpleNamespace(tp_rank=3),
        types.SimpleNamespace(target_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(tp_rank=3))),
        types.SimpleNamespace(target_worker=types.SimpleNamespace(ps=types.SimpleNamespace(tp_rank=3))),
        types.SimpleNamespace(target_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(ps=types.SimpleNamespace(tp_rank=3)))),
    ],
)
def test_the_rank_is_found_wherever_a_version_keeps_it(load, holder):
    assert load().tensor_parallel_rank(holder) == 3


def test_the_gap_is_the_time_between_two_cycles_unless_a_prefill_came_between(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    cycle(profiler)
    cycle(profiler)
    profiler.interrupted()
    cycle(profiler)
    assert [line["gap_ms"] for line in lines(tmp_path)] == [None, 14, None]


def test_a_step_that_was_said_to_be_none_is_no_cycle_and_leaves_no_gap(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    cycle(profiler)
    profiler.skip()
    cycle(profiler)
    cycle(profiler)
    cycle(profiler)
    assert [line["gap_ms"] for line in lines(tmp_path)] == [None, None, 27]


def test_time_in_a_cycle_that_was_cut_off_is_no_gap(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    cycle(profiler)
    profiler.begin(worker(), batch())
    profiler.mark("kv")
    cycle(profiler)
    assert [line["gap_ms"] for line in lines(tmp_path)] == [None, None]


def test_idle_batches_are_no_cycles(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    profiler.begin(worker(), batch(idle=True))
    profiler.mark("kv")
    profiler.end()
    assert lines(tmp_path) == []


def test_steps_are_those_of_the_verification_when_an_adaptive_worker_changes_them(load, tmp_path):
    switch_on(tmp_path)
    profiler, adaptive = load(), worker()
    profiler.begin(adaptive, batch())
    adaptive.speculative_num_steps = 4
    profiler.mark("draft", graph=True)
    profiler.mark("target_verify")
    profiler.mark("remainder")
    adaptive.speculative_num_steps = 7
    profiler.end()
    (line,) = lines(tmp_path)
    assert (line["steps"], len(line["draft_steps_ms"])) == (4, 4)


def test_a_draft_that_is_captured_in_the_middle_of_a_cycle_is_no_draft_step(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    profiler.begin(worker(), batch())
    profiler.mark("draft", graph=True)
    profiler.draft_step(0)
    profiler.mark("target_verify")
    profiler.draft_step(0)
    profiler.mark("remainder")
    profiler.draft_step(0)
    profiler.end()
    (line,) = lines(tmp_path)
    assert line["phases"]["draft"] == 3
    assert line["draft_steps_ms"] == [1.5, 1.5]


def test_a_cycle_that_an_exception_cut_off_is_forgotten(load, tmp_path):
    switch_on(tmp_path)
    profiler = load()
    profiler.begin(worker(), batch())
    profiler.mark("kv")
    cycle(profiler)
    assert [line["cycle_ms"] for line in lines(tmp_path)] == [sum(range(4, 16))]


def test_a_failure_is_logged_once_and_the_server_goes_on(load, tmp_path, caplog):
    switch_on(tmp_path)
    (tmp_path / f"phases-{os.getpid()}.jsonl").mkdir()
    profiler = load()
    cycle(profiler)
    cycle(profiler)
    assert [record.message for record in caplog.records] == ["Aerie's phase profiler failed and is off until the server is restarted"]


def test_a_broken_worker_costs_a_profile_and_no_request(load, tmp_path, caplog):
    switch_on(tmp_path)
    for broken in (types.SimpleNamespace(), worker(device=None), types.SimpleNamespace(device="cpu", tp_rank=0)):
        caplog.clear()
        profiler = load()
        cycle(profiler, broken)
        profiler.interrupted()
        cycle(profiler)
        assert len(caplog.records) <= 1


# Which cycles are timed


@pytest.mark.parametrize("every", [1, 2, 3, 4, 10, 97])
def test_the_first_cycle_is_timed_and_then_one_of_each_so_many(load, every):
    sample = load().Sample(every)
    taken = [sample.takes() for _ in range(every * 300)]
    assert taken[0]
    assert [sum(taken[start : start + every]) for start in range(0, len(taken), every)] == [1] * 300


@pytest.mark.parametrize("period", range(2, 9))
@pytest.mark.parametrize("every", [2, 4])
def test_work_that_recurs_with_any_period_is_timed_as_often_as_it_happens(load, every, period):
    sample = load().Sample(every)
    hits = [0] * period
    for number in range(every * 10_000):
        hits[number % period] += sample.takes()
    assert [hit / 10_000 for hit in hits] == pytest.approx([1 / period] * period, rel=0.12)


def test_a_file_without_a_number_asks_for_one_cycle_of_four(load, tmp_path):
    (tmp_path / "on").touch()
    profiler = load()
    for _ in range(400):
        cycle(profiler)
    assert len(lines(tmp_path)) == 100


def test_the_number_may_change_while_it_is_on(load, tmp_path):
    profiler = load()
    for every, expected in ((50, 2), (1, 102), (100, 103)):
        switch_on(tmp_path, every)
        for _ in range(100):
            cycle(profiler)
        assert len(lines(tmp_path)) == expected


@pytest.mark.parametrize("bad", ["0", "-3", "often", "2.5", "9" * 5000])
def test_what_is_no_number_of_cycles_is_said_once_and_the_default_holds(load, tmp_path, caplog, bad):
    (tmp_path / "on").write_text(bad)
    profiler = load()
    for _ in range(40):
        cycle(profiler)
    (record,) = caplog.records
    assert "one of 4 is timed" in record.message
    assert len(lines(tmp_path)) == 10


def test_cycles_that_are_not_timed_ask_no_clock_and_write_nothing(load, tmp_path, gpu):
    switch_on(tmp_path, 1000)
    profiler = load()
    cycle(profiler, worker("cuda"))
    gpu.done = gpu.recorded
    cycle(profiler, worker("cuda"))
    before = (gpu.recorded, gpu.queries, gpu.streams, (tmp_path / f"phases-{os.getpid()}.jsonl").stat().st_mtime_ns)
    for _ in range(900):
        cycle(profiler, worker("cuda"))
    assert (gpu.recorded, gpu.queries, gpu.streams, (tmp_path / f"phases-{os.getpid()}.jsonl").stat().st_mtime_ns) == before
    assert (before[0], before[2]) == (13, 1)


def test_gaps_are_those_before_the_timed_cycles(load, tmp_path, monkeypatch):
    switch_on(tmp_path, 3)
    profiler, now = load(), 0
    monkeypatch.setattr(profiler.MonotonicClock, "now", staticmethod(lambda: now))
    for number in range(600):
        profiler.begin(worker(), batch(number))
        now += 7_000_000
        profiler.end()
        now += number * 1_000_000
    found = lines(tmp_path)
    assert [line["gap_ms"] for line in found] == [None] + [line["batch"] - 1 for line in found[1:]]
    assert {line["cycle_ms"] for line in found} == {7}


def test_a_sample_sums_up_to_what_all_cycles_would(load, tmp_path, monkeypatch):
    switch_on(tmp_path, 4)
    profiler, now = load(), 0
    monkeypatch.setattr(profiler.MonotonicClock, "now", staticmethod(lambda: now))
    for number in range(8000):
        profiler.begin(worker(), batch())
        now += 1_000_000
        profiler.mark("target_verify")
        now += (number % 4 == 0) * 4_000_000 + 2_000_000
        profiler.end()
    (file,) = tmp_path.glob("phases-*.jsonl")
    found = phases.summarise(phases.read(file.read_text(), file.name))
    assert found.cycles == 2000
    assert found.mean_cycle_ms == pytest.approx(4, rel=0.05)
    assert found.phases[0].share == pytest.approx(3 / 4, rel=0.03)


@pytest.mark.parametrize("between", ["prefill", "idle", "cut off"])
def test_a_timed_cycle_after_anything_but_a_whole_cycle_has_no_gap(load, tmp_path, between):
    switch_on(tmp_path, 3)
    profiler = load()
    for _ in range(90):
        cycle(profiler)
        if between == "prefill":
            profiler.interrupted()
        elif between == "idle":
            cycle(profiler, idle=True)
        else:
            profiler.begin(worker(), batch())
    found = lines(tmp_path)
    assert len(found) > 10
    assert {line["gap_ms"] for line in found} == {None}


def test_switching_off_writes_every_cycle_that_was_timed(load, tmp_path, gpu):
    switch_on(tmp_path, 2)
    profiler = load()
    for _ in range(100):
        cycle(profiler, worker("cuda"))
    assert lines(tmp_path) == []
    (tmp_path / "on").unlink()
    gpu.done = gpu.recorded
    cycle(profiler, worker("cuda"))
    assert len(lines(tmp_path)) == 50


def test_the_random_numbers_that_a_server_seeds_are_left_alone(load, tmp_path):
    switch_on(tmp_path, 4)
    random.seed(5)
    before = random.getstate()
    profiler = load()
    for _ in range(20):
        cycle(profiler)
    assert random.getstate() == before


# The trace


@pytest.fixture
def ranges(monkeypatch):
    """A stand-in for torch.profiler: what was entered and left, in order."""
    seen: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            seen.append(f"+{self.name}")

        def __exit__(self, *error: object) -> None:
            seen.append(f"-{self.name}")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(profiler=types.SimpleNamespace(record_function=Range)))
    return seen


def closed(seen: list[str]) -> list[str]:
    """The names of ``seen``, of which each must be left before the next is entered."""
    entered, left = seen[::2], seen[1::2]
    assert [name.replace("+", "-") for name in entered] == left
    return [name.removeprefix("+aerie:") for name in entered]


def test_while_the_file_trace_is_there_phases_are_ranges_of_a_trace(load, tmp_path, ranges):
    switch_on(tmp_path)
    (tmp_path / "trace").touch()
    cycle(load())
    order = ["remainder", "kv", "draft", "tree_and_acceptance", "kv", "target_verify", "tree_and_acceptance"]
    assert closed(ranges) == [*order, "remainder", "draft_extend", "remainder"]
    assert len(lines(tmp_path)) == 1


def test_a_trace_has_the_ranges_of_every_cycle_also_of_those_that_are_not_timed(load, tmp_path, ranges):
    switch_on(tmp_path, 50)
    (tmp_path / "trace").touch()
    profiler = load()
    for _ in range(40):
        cycle(profiler)
    assert closed(ranges) == closed(ranges)[:10] * 40
    assert len(lines(tmp_path)) == 1


def test_gaps_are_true_also_while_a_trace_is_taken(load, tmp_path, ranges):
    switch_on(tmp_path, 3)
    (tmp_path / "trace").touch()
    profiler = load()
    for _ in range(30):
        cycle(profiler)
    found = lines(tmp_path)
    assert len(found) == 10
    assert all(line["gap_ms"] for line in found[1:])


def test_ranges_end_when_their_file_goes_and_timing_goes_on(load, tmp_path, ranges):
    switch_on(tmp_path)
    (tmp_path / "trace").touch()
    profiler = load()
    cycle(profiler)
    count = len(ranges)
    (tmp_path / "trace").unlink()
    cycle(profiler)
    assert (len(ranges), len(lines(tmp_path))) == (count, 2)


def test_without_the_file_on_no_range_is_entered(load, tmp_path, ranges):
    (tmp_path / "trace").touch()
    cycle(load())
    assert ranges == []


@pytest.mark.parametrize("following", ["interrupted", "cycle"])
def test_a_range_is_left_also_when_an_exception_cut_off_its_cycle(load, tmp_path, ranges, following):
    switch_on(tmp_path)
    (tmp_path / "trace").touch()
    profiler = load()
    profiler.begin(worker(), batch())
    profiler.mark("kv")
    if following == "cycle":
        profiler.begin(worker(), batch(idle=True))
    else:
        profiler.interrupted()
    assert closed(ranges) == ["remainder", "kv"]


def test_a_range_is_left_also_when_the_profiler_fails(load, tmp_path, ranges, caplog):
    switch_on(tmp_path)
    (tmp_path / "trace").touch()
    profiler = load()
    profiler.begin(worker(), batch())
    profiler._cycle.worker = None
    profiler.mark("target_verify")
    profiler.mark("kv")
    assert closed(ranges) == ["remainder"]
    assert len(caplog.records) == 1


# On a GPU


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for torch.cuda: events happen when ``gpu.done`` reaches them; each mark is 1 ms after the one before."""
    state = types.SimpleNamespace(recorded=0, done=0, made=0, queries=0, streams=0)

    def current_stream() -> str:
        state.streams += 1
        return "the worker's stream"

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            state.made += 1

        def record(self, stream: str) -> None:
            assert stream == "the worker's stream"
            state.recorded += 1
            self.at = state.recorded

        def query(self) -> bool:
            state.queries += 1
            return self.at <= state.done

        def elapsed_time(self, later) -> float:
            assert max(self.at, later.at) <= state.done, "asked before it happened: that would wait"
            return float(later.at - self.at)

        def synchronize(self) -> None:
            pytest.fail("waited for the GPU")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(Event=Event, current_stream=current_stream)))
    return state


def test_on_a_gpu_a_cycle_is_read_only_when_its_events_have_happened(load, tmp_path, gpu):
    switch_on(tmp_path)
    profiler = load()
    cycle(profiler, worker("cuda:0"))
    assert lines(tmp_path) == []
    gpu.done = gpu.recorded
    cycle(profiler, worker("cuda:0"))
    assert [(line["clock"], line["cycle_ms"]) for line in lines(tmp_path)] == [("cuda", 12)]


@pytest.mark.parametrize(("every", "behind"), [(1, 0), (1, 5), (2, 0), (2, 1), (3, 4), (4, 0)])
def test_on_a_gpu_gaps_are_true_although_events_are_used_again(load, tmp_path, gpu, every, behind):
    switch_on(tmp_path, every)
    profiler = load()
    recorded = collections.deque([0] * (behind + 1), maxlen=behind + 1)
    made = []
    for _ in range(20 * every):
        cycle(profiler, worker("cuda"))
        recorded.append(gpu.recorded)
        gpu.done = recorded[0]
        made.append(gpu.made)
    gpu.done = gpu.recorded
    profiler.begin(worker("cuda"), batch())
    found = lines(tmp_path)
    assert [line["gap_ms"] for line in found] == [None] + [1] * 19
    assert {line["cycle_ms"] for line in found} == {12}
    assert made[-1] - made[len(made) // 2] <= 1
    assert len(profiler._profiler.clock.free) == len(set(map(id, profiler._profiler.clock.free)))


def test_on_a_gpu_that_falls_behind_the_oldest_cycles_are_dropped(load, tmp_path, gpu, caplog):
    switch_on(tmp_path)
    profiler = load()
    for _ in range(profiler.MAX_PENDING + 5):
        cycle(profiler, worker("cuda"))
    assert len(profiler._profiler.pending) == profiler.MAX_PENDING
    assert len(caplog.records) == 1
