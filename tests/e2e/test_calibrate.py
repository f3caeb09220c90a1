"""`calibrate.yml` finds where plain decoding begins to win on a real server, and the next start uses that; another server's is refused."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from runs import HOST_OF_TESTS, Run, generated, playbook, processes_of

SPECULATION = {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4}
SHORT = {
    "sglang_calibrate_run_id": "tested",
    "sglang_calibrate_concurrency": [1, 4],
    "sglang_calibrate_workload": {"input_len": 16, "output_len": 192},
    "sglang_calibrate_seconds": 3,
    "sglang_calibrate_window_seconds": 0.5,
    "sglang_calibrate_log_interval": 5,
    "sglang_calibrate_finer_levels": 0,
    "sglang_calibrate_confirm": False,
}


class Host:
    """This machine as a host of its own, whose arm has a threshold that only a calibration tells."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.scratch, self.port = root, scratch, free_port()
        self.results = scratch / "results"

    @property
    def calibration(self) -> Path:
        return self.results / "calibration/localhost.yml"

    def run(self, *arguments: str, **more: Any) -> Run:
        variables = {
            "aerie_root": str(self.root),
            "aerie_results": str(self.results),
            "sglang_patches_sets": ["dynamic_speculation"],
            "sglang_server_flags": {"decode_log_interval": 40},  # calibrating needs another, and says it in the other spelling
            "sglang_server_arms": {
                "baseline": {"speculation": None},
                "eagle3": {"speculation": SPECULATION},
                "dynamic": {"speculation": SPECULATION | {"candidate_steps": [1, 3]}, "dynamic": {"threshold": "auto"}},
            },
            "sglang_server_instances": {"main": {"arm": "dynamic", "model": "target", "port": self.port}},
        }
        return playbook(*arguments, variables=variables | more, scratch=self.scratch)

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())["internal_states"][0]["speculative_dynamic"]
        return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = HOST_OF_TESTS.with_name("calibrate")
    made = Host(root, tmp_path_factory.mktemp("calibrate"))
    if processes_of(root):  # an earlier run of the tests was cut off
        made.run("playbooks/stop.yml", aerie_lease_break=True)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in ("environments", "packages"):
        (root / name).symlink_to(HOST_OF_TESTS / name)
    made.run("deploy_eagle3.yml", "--skip-tags", "benchmark,start").require_success()
    yield made
    if processes_of(root):
        made.run("playbooks/stop.yml", aerie_lease_break=True)


def test_without_a_calibration_a_start_is_refused_with_what_to_do(host):
    run = host.run("playbooks/start.yml")
    assert run.status != 0
    assert "there is no calibration: run playbooks/calibrate.yml" in run.output


def test_an_arm_that_can_not_change_over_is_refused_before_anything_is_started(host):
    run = host.run("playbooks/calibrate.yml", sglang_calibrate_arm="eagle3", **SHORT)
    assert run.status != 0
    assert "arm eagle3 has no `dynamic`" in run.output
    assert processes_of(host.root) == []


def test_a_check_says_what_would_be_measured_and_writes_nothing(host):
    run = host.run("playbooks/calibrate.yml", "--check", **SHORT).require_success()
    assert "would be measured in turn at 1 and 4 clients" in " ".join(run.output.split())
    assert not host.calibration.exists()
    assert not (host.root / "calibrations").exists()


@pytest.fixture(scope="module")
def calibrated(host: Host) -> tuple[Run, dict[str, Any]]:
    run = host.run("playbooks/calibrate.yml", **SHORT).require_success()
    found: dict[str, Any] = generated(host.calibration)["sglang_server_calibration"]
    return run, found


@pytest.mark.long
def test_both_modes_are_measured_in_one_launch_and_what_came_of_it_is_shown(host, calibrated):
    run, found = calibrated
    assert found["verdict"] in ("crosses", "always", "never")
    assert [level["concurrency"] for level in found["evidence"]["levels"]] == [1, 4]
    assert all(level["pairs"] >= 3 and level["plain_tok_s"] > 0 for level in found["evidence"]["levels"])
    assert 0 <= found["low"] <= found["high"] <= found["evidence"]["most"]
    assert found["steps_by_batch"].keys() >= {"1"}
    assert set(found["steps_by_batch"].values()) <= {1, 3}
    comparisons = found["evidence"]["comparisons"]
    assert [(entry["deeper"], entry["shallower"]) for entry in comparisons] == [(3, 1), (1, 0)]
    assert all([point["concurrency"] for point in entry["levels"]] == [1, 4] for entry in comparisons)
    assert "spec. tok/s" in run.output
    assert "running requests" in host.calibration.with_suffix(".html").read_text()
    assert processes_of(host.root) == [], "the instance did not run before"


@pytest.mark.long
def test_the_next_start_uses_it_and_a_second_one_changes_nothing(host, calibrated):
    _, found = calibrated
    host.run("playbooks/start.yml").require_success()
    state = host.state()
    assert (state["high"], state["low"], state["force"]) == (found["high"], found["low"], None)
    assert state["min_dwell_steps"] == found["dwell_steps"]
    slots = json.loads((host.root / "instances/main/adaptive.json").read_text())
    assert slots == {size: {"candidate_steps": [steps]} for size, steps in found["steps_by_batch"].items()}
    assert state["candidate_steps"] == sorted(set(found["steps_by_batch"].values()))
    assert state["num_steps"] is None
    assert host.run("playbooks/start.yml").require_success().changed == {}


@pytest.mark.long
def test_a_calibration_of_another_host_is_refused_and_the_server_goes_on(host, calibrated):
    _, found = calibrated
    other = found | {"host": "gpu-77", "host_fingerprint": {"fingerprint": "0" * 64}}
    run = host.run("playbooks/start.yml", sglang_server_calibration=other)
    assert run.status != 0
    assert "the calibration is of another host (gpu-77" in run.output
    assert host.state()["high"] == found["high"]
