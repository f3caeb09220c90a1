"""A search on a host: every launch bounded, a hang ends with its set, a cut run goes on where it was. The ranks are a pretence here."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json
from ansible.module_utils.aerie.measuring import placing
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.tuning import micro, search, tune_run

PROJECT = Path(__file__).parents[2]
PROFILES = yaml.safe_load((PROJECT / "nccl/profiles.yml").read_text())
SPACE = {"dimensions": {"FAKE_SPEED": [None, "1.5", "0.5"], "FAKE_MOOD": [None, "hangs", "timeout", "wrong"], "FAKE_OTHER": [None, "1"]}}

# Answers as the real program does: a launch's times follow from its environment alone.
RANKS = """
import json, pathlib, sys, time
state = pathlib.Path(sys.argv[1])
print(json.dumps({"ready": True, "versions": {"torch": "0.0", "python": "3"}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    with (state / "orders.jsonl").open("a") as stream:
        stream.write(line)
    environment = order["environment"]
    mood = environment.get("FAKE_MOOD")
    if (state / "wedged").exists():
        mood = "timeout"
    if mood == "hangs":
        time.sleep(600)
    if mood in ("timeout", "wrong"):
        status = {"timeout": "timeout", "wrong": "failed"}[mood]
        if mood == "timeout" and (state / "wedges").exists():
            (state / "wedged").touch()
        print(json.dumps({"number": order["number"], "status": status, "reason": mood, "stuck": [], "seconds": 0.1}), flush=True)
        continue
    samples = {size: [size / 1000 / float(environment.get("FAKE_SPEED") or 1) * (1 + order["seed"] % 7 / 1000)] for size in order["sizes"]}
    answer = {"number": order["number"], "status": "completed", "reason": None, "samples_us": samples, "stuck": [], "nccl": "2.0"}
    print(json.dumps(answer), flush=True)
"""


class Lab:
    """A host's root and a Python on it whose torch is a pretence."""

    def __init__(self, root: Path) -> None:
        self.paths, self.root = HostPaths(root), root
        program = root / "ranks.py"
        program.write_text(RANKS)
        self.python = root / "python"
        self.python.write_text(f"#!/bin/sh\nexec {sys.executable} {program} {root}\n")
        self.python.chmod(0o755)
        self.told: list[str] = []

    def given(self, **changes: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "run_id": "r1", "host": "h", "table": PROFILES, "space": SPACE, "profile": None, "environment": {}, "ranks": 2, "gpus": None,
            "backend": "gloo", "python": str(self.python), "most": 30, "finalists": 2, "final_rounds": 4, "minimum_effect": 0.02,
            "repeats": 3, "seconds": 0.3, "seed": 1, "target": {}, "draft_tokens": 1, "concurrency": [1], "prefill_tokens": [64],
            "objectives": ["latency", "throughput"], "host_info": {},
        }  # fmt: skip
        return base | changes

    def job(self, before: Any = lambda: None, **changes: Any) -> tune_run.Job:
        return tune_run.prepare(self.paths, tune_run.Request.of(self.given(**changes)), before)

    def run(self, **changes: Any) -> dict[str, Any]:
        return tune_run.run(self.job(**changes), self.told.append)

    @property
    def orders(self) -> list[dict[str, Any]]:
        path = self.root / "orders.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self) -> list[int]:
        return [process.pid for process in processes.scan() if str(self.root / "ranks.py") in process.argv]


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setattr(micro, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(micro.micro_program, "KILLED_SECONDS", 0.2)
    made = Lab(tmp_path)
    yield made
    assert made.left() == [], "ranks were left behind"


def test_the_fastest_set_is_found_and_hanging_and_wrong_ones_are_out_with_their_reasons(lab):
    result = lab.run()
    for objective in ("latency", "throughput"):
        found = result["objectives"][objective]
        assert (found["verdict"], found["changes"]["FAKE_SPEED"]) == ("better", "1.5")
        assert found["ratio"]["value"] == pytest.approx(1.5)
    out = {one["candidate"]: one["why"] for one in result["disqualified"]}
    assert "the program itself hung" in out["FAKE_MOOD=hangs"]
    assert out["FAKE_MOOD=timeout"].endswith("timeout: timeout")
    assert out["FAKE_MOOD=wrong"].endswith("failed: wrong")
    assert any("hung and is disqualified; the default set still works" in line for line in lab.told)
    assert any("left" in line and "µs" in line for line in lab.told)
    assert read_json(lab.root / "nccl/r1/search/result.json")["schema"] == tune_run.SCHEMA


def test_a_run_that_was_cut_goes_on_where_it_was_and_measures_nothing_twice(lab):
    class CutError(Exception):
        pass

    count = iter(range(1000))

    def cut() -> None:
        if next(count) == 7:
            raise CutError

    calm = {"dimensions": {"FAKE_SPEED": [None, "1.5", "0.5", "0.9", "1.1"], "FAKE_OTHER": [None, "1"]}}
    with pytest.raises(CutError):
        tune_run.run(lab.job(cut, space=calm), lab.told.append)
    assert len(lab.orders) == 7
    result = lab.run(space=calm)
    assert result["measured_now"] == result["launches"] - 7
    assert len(lab.orders) == result["launches"]
    again = lab.run(space=calm)
    assert again["measured_now"] == 0
    assert len(lab.orders) == result["launches"]
    assert again["objectives"] == result["objectives"]
    assert again["versions"] == result["versions"] == {"torch": "0.0", "python": "3", "nccl": "2.0"}


def test_a_run_is_not_gone_on_with_as_another(lab):
    calm = {"dimensions": {"FAKE_SPEED": [None, "1.5"]}}
    lab.run(space=calm)
    with pytest.raises(AerieError, match=r"run r1 was begun with another bench: go on with it as it was"):
        lab.job(space=calm, repeats=4)
    assert lab.job(space=calm, run_id="r2", repeats=4)


def test_a_gpu_that_hangs_for_good_ends_the_search_and_says_what_to_do(lab):
    (lab.root / "wedges").touch()
    with pytest.raises(
        AerieError, match=r"FAKE_MOOD=timeout hung .* a GPU may be wedged .* reset it or reboot, then .*nccl_tune_run_id=r1"
    ):
        lab.run(space={"dimensions": {"FAKE_MOOD": [None, "timeout"]}})
    # The outcome of the set is kept, that of the default set is not: going on tries it again.
    kept = sorted(path.name for path in (lab.root / "nccl/r1/search/launches").iterdir())
    assert [name for name in kept if "FAKE_MOOD" in name]
    (lab.root / "wedged").unlink()
    assert lab.run(space={"dimensions": {"FAKE_MOOD": [None, "timeout"]}})["objectives"]["latency"]["verdict"] == search.SAME


def test_a_program_that_hangs_itself_is_killed_in_time_and_the_next_launch_gets_another(lab):
    bench = micro.Bench(lab.python, 2, "gloo", None, (8192,), seconds=0.3)
    started = time.monotonic()
    with micro.Program.open(bench, lab.root / "work") as program:
        assert program.measure({"FAKE_MOOD": "hangs"}, 1)["status"] == micro.TIMEOUT
        assert lab.left() == []
        assert program.measure({}, 1)["status"] == micro.COMPLETED
    assert time.monotonic() - started < 60


def test_a_python_without_torch_is_named_with_the_cure(tmp_path):
    bench = micro.Bench(Path(sys.executable), 2, "gloo", None, (8192,))
    with (
        pytest.raises(AerieError, match=r"No module named 'torch'(.|\n)*name a Python with torch in nccl_tune_python"),
        micro.Program.open(bench, tmp_path) as program,
    ):
        program.measure({}, 1)


def test_what_is_wrong_with_a_request_is_told_at_once(lab):
    with pytest.raises(AerieError) as told:
        tune_run.Request.of(lab.given(run_id="../x", ranks=1, most=0, objectives=["speed"], concurrency=[]))
    for words in ("'../x'", "1 rank has nobody to talk to", "most is 0", "objectives are speed", "concurrency is []"):
        assert words in str(told.value)
    with pytest.raises(AerieError, match="is 4, and there are 2 GPUs"):
        tune_run.Request.of(lab.given(backend="nccl", ranks=4, host_info={"gpus": [{"index": 0}, {"index": 1}]}))


def test_ranks_and_backend_follow_from_the_host(lab):
    gpus = [{"index": number} for number in range(4)]
    on_gpus = tune_run.Request.of(lab.given(backend="auto", ranks=0, host_info={"gpus": gpus}))
    assert (on_gpus.backend, on_gpus.ranks) == ("nccl", 4)
    some = tune_run.Request.of(lab.given(backend="auto", ranks=0, gpus=[1, 3], host_info={"gpus": gpus}))
    assert (some.backend, some.ranks, some.gpus) == ("nccl", 2, (1, 3))
    without = tune_run.Request.of(lab.given(backend="auto", ranks=0))
    assert (without.backend, without.ranks) == ("gloo", 2)


def test_the_sizes_are_those_of_the_model_on_the_host(lab):
    model = lab.root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 7168, "torch_dtype": "bfloat16", "num_attention_heads": 64}))
    job = lab.job(target={"path": str(model)}, draft_tokens=4, prefill_tokens=[1024])
    assert job.bench.sizes == (57344, 7168 * 1024 * 2)


def test_a_bad_default_set_is_refused_before_anything_is_measured(lab):
    with pytest.raises(AerieError, match="graph-file-empty"):
        lab.job(environment={"NCCL_GRAPH_FILE": ""})
    assert not (lab.root / "nccl").exists()


def test_the_files_have_their_place_on_the_controller_and_the_program_stays(lab):
    lab.run(space={"dimensions": {"FAKE_SPEED": [None, "1.5"]}})
    found = tune_run.manifest(lab.paths, "r1")
    places = {entry.place for entry in placing.of_run(found, placing.NCCL, "r1", "h").entries}
    assert {"nccl/r1/h/search/result.json", "nccl/r1/h/search/definition.json"} <= places
    assert not any(entry["path"].endswith("program.py") for entry in found)
