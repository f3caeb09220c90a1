"""What the scheduler's thread and the GPU did for a step is what a made-up server did."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from gpu_scripts import HERE, beside, named  # noqa: F401 (a fixture)


def test_steps_are_sorted_by_what_was_before_them_and_those_without_a_full_load_left_out():
    host_time = named("host_time")
    step = {"mode": "DECODE", "requests": 10, "choosing": 1.0, "before the model": 2.0, "running": 3.0, "reading": 4.0}
    prompt = {"mode": "EXTEND", "requests": 1, "choosing": 10.0, "running": 30.0}
    few = {**step, "requests": 5}
    told = [few, few, prompt, step, step, {**step, "choosing": 7.0}, prompt, prompt, {**step, "choosing": 9.0}, few, step]
    found = host_time.samples(told, 10)
    assert found["a step after a step", "choosing"] == [1.0, 7.0, 1.0]
    assert found["a prefill", "choosing"] == [10.0], "of a second prefill in a row the time is another"
    assert found["a prefill", "reading"] == [0.0]
    assert found["a step after a prefill", "choosing"] == [1.0, 9.0]
    many = {key: 5 * values for key, values in found.items()}
    slower = {key: [value + 0.6 for value in values] for key, values in many.items()}
    assert "| a step after a step | running | 3 (15) | 4 (15) | +1 |" in host_time.table({"baseline": many, "dynamic": slower})
    assert "| a prefill | running" not in host_time.table({"baseline": many, "dynamic": slower}), "five of them say little"


class Clock:
    """What host and GPU of a made-up server have done so far: the GPU does what it is given one after the other, and later."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0

    def __call__(self) -> float:
        return self.host

    def launch(self, seconds: float) -> None:
        self.gpu = max(self.gpu, self.host) + seconds


class Event:
    def __init__(self, now: Clock) -> None:
        self.now, self.at = now, 0.0

    def record(self, stream: str | None = None) -> None:
        assert stream in (None, "forward")
        self.at = max(self.now.gpu, self.now.host)

    def query(self) -> bool:
        return self.at <= self.now.host

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A scheduler whose model the GPU computes in 300 s, what the spy wrote about it, and its clock."""
    monkeypatch.syspath_prepend(HERE / "site")
    monkeypatch.delitem(sys.modules, "host_time_spy", raising=False)
    spy = importlib.import_module("host_time_spy")
    now = Clock()
    monkeypatch.setattr(spy, "clock", now)
    monkeypatch.setattr(spy, "event_class", lambda: None)

    def taking(seconds: float) -> None:
        now.host += seconds

    class Backend:
        def init_forward_metadata(self) -> None:
            self.init_forward_metadata_out_graph()

        def init_forward_metadata_out_graph(self) -> None:
            taking(30.0)

    class ModelRunner:
        def forward(self, deeper: bool = True) -> None:
            taking(70.0)
            Backend().init_forward_metadata()
            now.launch(150.0)
            if deeper:
                self.forward(False)

    class Writer:
        def write(self) -> None:
            taking(1000.0)

    class Scheduler:
        forward_stream = "forward"

        def get_next_batch_to_run(self) -> None:
            taking(1.0)

        def run_batch(self, batch: Any) -> None:  # noqa: ARG002 (as it is called)
            taking(2.0)
            ModelRunner().forward()
            Writer().write()
            taking(4.0)
            now.launch(5.0)

        def process_batch_result(self) -> None:
            taking(8.0)

    module = ModuleType("made up")
    Backend.__module__ = module.__name__
    vars(module).update(Backend=Backend, ModelRunner=ModelRunner, Writer=Writer, Scheduler=Scheduler)
    written = tmp_path / "host_time.jsonl"
    for change in (spy.models, spy.draft, spy.attention, spy.scheduler(written), spy.calls("made up:Writer.write")["made up"]):
        change(module)
    scheduler = Scheduler()
    batch = type("Batch", (), {"reqs": [1, 2], "forward_mode": type("Mode", (), {"name": "DECODE"})})

    def steps(count: int) -> list[dict[str, Any]]:
        for _ in range(count):
            scheduler.get_next_batch_to_run()
            scheduler.run_batch(batch)
            scheduler.process_batch_result()
        return [json.loads(line) for line in written.read_text().splitlines()]

    return SimpleNamespace(spy=spy, now=now, steps=steps)


def test_the_spy_writes_what_a_step_took_without_the_model(made_up):
    first, second = made_up.steps(3)
    assert first == second
    assert {key: value for key, value in first.items() if key in {"mode", "requests"}} == {"mode": "DECODE", "requests": 2}
    assert {part: value / 1e6 for part, value in first.items() if part not in {"mode", "requests"}} == {
        "choosing": 1.0,
        "before the model": 2.0,
        "running": 6.0,
        "planning": 60.0,
        "model": 200.0,
        "the draft's K and V": 1000.0,
        "Writer.write": 1000.0,
        "reading": 8.0,
    }


def test_the_spy_writes_when_the_gpu_began_and_ended_and_waits_for_it(made_up, monkeypatch):
    monkeypatch.setattr(made_up.spy, "event_class", lambda: lambda: Event(made_up.now))
    first, second = made_up.steps(3)
    gpu = {part: value / 1e6 for part, value in second.items() if part.startswith("GPU")}
    # The host is late: of a step's 1,215 s it launches the model's halves in the 103rd and the 203rd, and what comes last in the 1,207th.
    assert gpu == {"GPU gap before": 4.0, "GPU before the model": 2.0, "GPU model": 400.0, "GPU after the model": 809.0}
    assert sum(gpu.values()) == 1215.0
    assert "GPU gap before" not in first


def test_a_step_that_the_gpu_has_not_ended_is_not_written(made_up, monkeypatch):
    monkeypatch.setattr(made_up.spy, "event_class", lambda: lambda: Event(made_up.now))
    made_up.now.gpu = 2000.0
    assert len(made_up.steps(2)) == 0
    assert len(made_up.steps(3)) == 4
