"""Arms can be compared inside one server, without a restart; what was measured so says so, and is never taken for a server of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import example_records
import pytest
import yaml
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json, write_json
from ansible.module_utils.aerie.measuring import bench_clients, bench_runner, benchmark, dynamic_control, experiment, records, verdict
from ansible.module_utils.aerie.paths import HostPaths

HERE = Path(__file__).parent
SPECULATION = {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4}
ARMS = {
    "baseline": {"speculation": None},
    "eagle3": {"speculation": SPECULATION},
    "dynamic": {"description": "Decides", "speculation": SPECULATION, "dynamic": {"threshold": 24}},
}
DESCRIBED = {
    "name": "shared",
    "arms": ["baseline", "dynamic"],
    "share_launch": {"dynamic": ["policy", "plain", "speculative"]},
    "workload": {"dataset": "random-ids", "input_len": 8, "output_len": 8, "concurrency": [1, 8], "requests_per_client": 2},
    "repeats": 2,
}


def planned(**changes: Any) -> experiment.Plan:
    return experiment.plan(experiment.validate({**DESCRIBED, **changes}, ARMS), ARMS)


def test_modes_are_measured_in_turn_in_one_launch_and_backwards_in_the_next():
    launches = [[cell.id for cell in launch.cells] for launch in planned().launches if launch.arm == "dynamic"]
    assert [name.removesuffix("-r1") for name in launches[0]] == [
        "dynamic@policy-c1",
        "dynamic@plain-c1",
        "dynamic@speculative-c1",
        "dynamic@policy-c8",
        "dynamic@plain-c8",
        "dynamic@speculative-c8",
    ]
    assert [name.removesuffix("-r2") for name in launches[1]][:3] == ["dynamic@speculative-c1", "dynamic@plain-c1", "dynamic@policy-c1"]
    assert len(planned().launches) == 4
    cells = [cell for launch in planned().launches for cell in launch.cells if cell.concurrency == 8 and cell.repeat == 1]
    assert len({cell.seed for cell in cells}) == 1


def test_an_experiment_that_shares_nothing_stays_what_it_was():
    plain = planned(share_launch=None)
    assert "share_launch" not in plain.as_dict()["experiment"]
    assert plain.identity != planned().identity
    assert [cell.id for cell in plain.launches[1].cells] == ["dynamic-c1-r1", "dynamic-c8-r1"]


def test_what_can_not_be_shared_is_refused_with_everything_else():
    with pytest.raises(AerieError) as raised:
        experiment.validate(
            DESCRIBED | {"arms": ["eagle3", "dynamic"], "share_launch": {"eagle3": ["plain"], "dynamc": ["policy"], "dynamic": ["plan"]}},
            ARMS,
        )
    for text in (
        "share_launch.eagle3: the arm has no `dynamic`",
        "did you mean 'dynamic'?",
        "'plan' is no mode: it must be policy, plain or speculative; did you mean 'plain'?",
    ):
        assert text in str(raised.value)


def test_the_ready_experiment_compares_threshold_0_with_a_true_baseline():
    described = yaml.safe_load((HERE.parents[1] / "experiments/dynamic.yml").read_text())
    found = experiment.validate(described, ARMS)
    assert found.share_launch == {"dynamic": ("policy", "plain", "speculative")}
    assert "baseline" in found.arms


class Lab:
    """A host with a release and an instance that a fake server with dynamic speculation serves."""

    def __init__(self, root: Path) -> None:
        self.paths = HostPaths(root)
        self.state = self.paths.instance("main")
        (self.state / "profile").mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.process = subprocess.Popen([sys.executable, str(HERE / "fake_dynamic_server.py"), str(self.port), str(self.state)])
        while not processes.is_listening(self.port):
            time.sleep(0.01)
        client = self.paths.release("r") / "lib/python3.11/site-packages/sglang/benchmark/serving.py"
        client.parent.mkdir(parents=True)
        client.touch()
        write_json(self.paths.release("r") / "release.json", {"id": "r", "sglang_version": "0.5.23"})
        self.paths.current.symlink_to(self.paths.release("r"))
        instance = {
            "state": "ready",
            "arm": {"name": "dynamic"},
            "argv": ["python"],
            "environment": {},
            "release": "r",
            "host": "127.0.0.1",
        }
        write_json(self.state / "instance.json", instance | {"port": self.port})
        (root / "set.json").write_text("[]")

    def job(self, **changes: Any) -> bench_runner.Job:
        plan = planned(repeats=1, **changes).as_dict()
        given = {
            "run_id": "r1",
            "host": "gpu-01",
            "instance": "main",
            "experiment": plan["experiment"],
            "plan": plan["identity"],
            "launch": next(launch for launch in plan["launches"] if launch["arm"] == "dynamic"),
            "arm": ARMS["dynamic"],
            "models": {},
            "target": "target",
            "settings": {},
            "host_info": {},
        }
        job = benchmark.prepare(self.paths, benchmark.Request.of(given))
        client = bench_clients.Client("fake", "1", (sys.executable, str(HERE / "fake_client.py")))
        changed = {name: getattr(job, name) for name in job.__dataclass_fields__} | {"client": client}
        changed |= {"dataset": self.paths.root / "set.json"}
        changed["definitions"] = tuple({**one, "workload": {"dataset": "sharegpt", "output_len": 8}} for one in job.definitions)
        return bench_runner.Job(**changed)

    def run(self, **changes: Any) -> dict[str, Any]:
        return bench_runner.run(self.job(**changes), lambda *_: None)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_each_cell_is_decoded_in_its_mode_alone_and_nothing_is_forced_afterwards(lab):
    told = lab.run()
    assert [cell["status"] for cell in told["cells"]] == ["completed"] * 6
    for mode, other in (("plain", "speculative"), ("speculative", "plain")):
        cell = lab.paths.runs / f"r1/dynamic@{mode}-c8-r1"
        before, after = (
            dynamic_control.state_of(read_json(cell / name)) or {} for name in (bench_runner.INFO_BEFORE, bench_runner.INFO_AFTER)
        )
        assert after["steps"][mode] > before["steps"][mode]
        assert after["steps"][other] == before["steps"][other]
    asked = [json.loads(line) for line in (lab.state / "told.jsonl").read_text().splitlines()]
    assert asked[-1] == {"force": None}
    assert {"force": "plain"} in asked


def test_a_record_says_whose_launch_it_shared_and_is_no_record_of_a_server_of_its_own(lab):
    lab.run()
    found = records.make(lab.paths.runs / "r1/dynamic@plain-c1-r1")
    assert found["arm"]["name"] == "dynamic@plain"
    assert found["arm"]["share_launch"] == {"arm": "dynamic", "mode": "plain"}
    assert "forced to be plain, in a launch that dynamic shares" in found["arm"]["description"]
    identities = [one["identity"] for one in lab.job().definitions]
    assert len(set(identities)) == len(identities)
    alone = lab.job(share_launch=None).definitions
    assert not {one["identity"] for one in alone} & set(identities)
    assert all("share_launch" not in one["arm"] for one in alone)


def test_a_cell_with_a_step_in_the_other_mode_failed(lab):
    (lab.state / "leaky").touch()
    told = lab.run(share_launch={"dynamic": ["plain"]})
    assert {cell["status"] for cell in told["cells"]} == {"failed"}
    assert "forced to be plain, the server made" in told["cells"][0]["reason"]


def test_a_server_that_refuses_the_mode_is_the_cells_outcome(lab):
    (lab.state / "stubborn").touch()
    told = lab.run(share_launch={"dynamic": ["plain"]})
    assert "it is stubborn" in told["cells"][0]["reason"]


def test_plain_decoding_in_a_shared_launch_is_never_chosen_as_the_baseline():
    def shared(mode: str, speed: float, repeat: int) -> dict[str, Any]:
        made = example_records.record(f"dynamic@{mode}", 8, speed, repeat)
        made["arm"] |= {"share_launch": {"arm": "dynamic", "mode": mode}}
        return made

    kept = [shared(mode, speed, repeat) for mode, speed in (("plain", 99.0), ("speculative", 120.0)) for repeat in (1, 2, 3)]
    (group,) = verdict.groups(kept)
    assert group.baseline is None
    (group,) = verdict.groups([*kept, *(example_records.record("baseline", 8, 100.0, repeat) for repeat in (1, 2, 3))])
    assert group.baseline == "baseline"
    assert any("is no true baseline" in note for note in group.notes)
    (group,) = verdict.groups(kept, baseline="dynamic@plain")
    assert {point.arm: point.ratio.value for point in group.points if point.ratio} == {"dynamic@speculative": pytest.approx(120 / 99)}
