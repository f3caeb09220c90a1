"""The overlay of phase_profiler, on its own: parts sum to the cycle, nothing waits for a GPU, and it can't break a server."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import types
from pathlib import Path

import pytest
from ansible.module_utils.aerie import phases

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
    """Load the overlay as a server with AERIE_PROFILE_DIR=tmp_path would; the clock ticks by 1, 2, 3, … ms."""

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
        return module

    return make


def cycle(profiler, of=None, graph: bool = False) -> None:
    """What a patched worker calls in one decode cycle."""
    profiler.begin(of or worker(), batch())
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
    (tmp_path / "on").touch()
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
    (tmp_path / "on").touch()
    profiler = load()
    cycle(profiler)
    cycle(profiler)
    (file,) = tmp_path.glob("phases-*.jsonl")
    assert phases.summarise(phases.read(file.read_text(), file.name)).cycles == 2
    assert profiler.PHASES == phases.PHASES


def test_under_a_graph_steps_are_equal_parts_and_say_so(load, tmp_path):
    (tmp_path / "on").touch()
    cycle(load(), graph=True)
    (line,) = lines(tmp_path)
    assert line["graph"] is True
    assert line["draft_steps_ms"] == [line["phases"]["draft"] / 2] * 2


def test_it_is_switched_by_a_file_without_a_restart(load, tmp_path):
    profiler = load()
    cycle(profiler)
    (tmp_path / "on").touch()
    cycle(profiler)
    (tmp_path / "on").unlink()
    cycle(profiler)
    assert len(lines(tmp_path)) == 1


def test_without_the_variable_it_never_looks_at_a_file(load, monkeypatch):
    profiler = load(None)
    monkeypatch.setattr(profiler.pathlib.Path, "stat", lambda path: pytest.fail("looked"))
    cycle(profiler)
    assert profiler._profiler is None


def test_marks_outside_a_cycle_do_nothing(load, tmp_path):
    (tmp_path / "on").touch()
    profiler = load()
    profiler.mark("kv")
    profiler.draft_step(0)
    profiler.end()
    assert lines(tmp_path) == []


def test_only_rank_0_writes(load, tmp_path):
    (tmp_path / "on").touch()
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
    (tmp_path / "on").touch()
    profiler = load()
    cycle(profiler)
    cycle(profiler)
    profiler.interrupted()
    cycle(profiler)
    assert [line["gap_ms"] for line in lines(tmp_path)] == [None, 14, None]


def test_idle_batches_are_no_cycles(load, tmp_path):
    (tmp_path / "on").touch()
    profiler = load()
    profiler.begin(worker(), batch(idle=True))
    profiler.mark("kv")
    profiler.end()
    assert lines(tmp_path) == []


def test_steps_are_those_of_the_verification_when_an_adaptive_worker_changes_them(load, tmp_path):
    (tmp_path / "on").touch()
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
    (tmp_path / "on").touch()
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
    (tmp_path / "on").touch()
    profiler = load()
    profiler.begin(worker(), batch())
    profiler.mark("kv")
    cycle(profiler)
    assert [line["cycle_ms"] for line in lines(tmp_path)] == [sum(range(4, 16))]


def test_a_failure_is_logged_once_and_the_server_goes_on(load, tmp_path, caplog):
    (tmp_path / "on").touch()
    (tmp_path / f"phases-{os.getpid()}.jsonl").mkdir()
    profiler = load()
    cycle(profiler)
    cycle(profiler)
    assert [record.message for record in caplog.records] == ["Aerie's phase profiler failed and is off until the server is restarted"]


def test_a_broken_worker_costs_a_profile_and_no_request(load, tmp_path, caplog):
    (tmp_path / "on").touch()
    for broken in (types.SimpleNamespace(), worker(device=None), types.SimpleNamespace(device="cpu", tp_rank=0)):
        caplog.clear()
        profiler = load()
        cycle(profiler, broken)
        profiler.interrupted()
        cycle(profiler)
        assert len(caplog.records) <= 1


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
    (tmp_path / "on").touch()
    (tmp_path / "trace").touch()
    cycle(load())
    order = ["remainder", "kv", "draft", "tree_and_acceptance", "kv", "target_verify", "tree_and_acceptance"]
    assert closed(ranges) == [*order, "remainder", "draft_extend", "remainder"]
    assert len(lines(tmp_path)) == 1


def test_ranges_end_when_their_file_goes_and_timing_goes_on(load, tmp_path, ranges):
    (tmp_path / "on").touch()
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
    (tmp_path / "on").touch()
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
    (tmp_path / "on").touch()
    (tmp_path / "trace").touch()
    profiler = load()
    profiler.begin(worker(), batch())
    profiler._cycle.worker = None
    profiler.mark("target_verify")
    profiler.mark("kv")
    assert closed(ranges) == ["remainder"]
    assert len(caplog.records) == 1


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for torch.cuda: events happen when ``gpu.done`` reaches them; each mark is 1 ms after the one before."""
    state = types.SimpleNamespace(recorded=0, done=0, made=0)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            state.made += 1

        def record(self) -> None:
            state.recorded += 1
            self.at = state.recorded

        def query(self) -> bool:
            return self.at <= state.done

        def elapsed_time(self, later) -> float:
            assert self.query() and later.query(), "asked before it happened: that would wait"
            return float(later.at - self.at)

        def synchronize(self) -> None:
            pytest.fail("waited for the GPU")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(Event=Event)))
    return state


def test_on_a_gpu_a_cycle_is_read_only_when_its_events_have_happened(load, tmp_path, gpu):
    (tmp_path / "on").touch()
    profiler = load()
    cycle(profiler, worker("cuda:0"))
    assert lines(tmp_path) == []
    gpu.done = gpu.recorded
    cycle(profiler, worker("cuda:0"))
    assert [(line["clock"], line["cycle_ms"]) for line in lines(tmp_path)] == [("cuda", 12)]


def test_on_a_gpu_gaps_are_true_although_events_are_used_again(load, tmp_path, gpu):
    (tmp_path / "on").touch()
    profiler = load()
    for _ in range(20):
        cycle(profiler, worker("cuda"))
        gpu.done = gpu.recorded
    profiler.begin(worker("cuda"), batch())
    found = lines(tmp_path)
    assert [line["gap_ms"] for line in found] == [None] + [1] * 19
    assert {line["cycle_ms"] for line in found} == {12}
    assert gpu.made < 4 * 13


def test_on_a_gpu_that_falls_behind_the_oldest_cycles_are_dropped(load, tmp_path, gpu, caplog):
    (tmp_path / "on").touch()
    profiler = load()
    for _ in range(profiler.MAX_PENDING + 5):
        cycle(profiler, worker("cuda"))
    assert len(profiler._profiler.pending) == profiler.MAX_PENDING
    assert len(caplog.records) == 1
