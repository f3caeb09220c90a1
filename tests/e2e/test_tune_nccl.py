"""`tune_nccl.yml` measures real ranks: finds the faster set, survives one that hangs, writes it, and a server's start would read it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ports import free_port
from runs import PROJECT, Run, generated, playbook

# gloo on the processor knows nothing of NCCL's variables: the program's own ones for tests make sets slow, or hang.
SPACE = {"dimensions": {"AERIE_NCCL_TEST_UNDELAYED": [None, "1"], "AERIE_NCCL_TEST_HANG": [None, "1"]}}
APPLY = """
- hosts: gpu_hosts
  gather_facts: false
  roles: [gpu_host, nccl]
"""
MEASURE = """
import json, sys
import ansible.module_utils
ansible.module_utils.__path__.append(sys.argv[1] + "/module_utils")
from pathlib import Path
from ansible.module_utils.aerie.tuning import micro
bench = micro.Bench(Path(sys.argv[2]), 2, "gloo", None, (8192, 262144), repeats=3, warmup=1, seconds=float(sys.argv[4]))
with micro.Program.open(bench, Path(sys.argv[3])) as program:
    for environment in json.loads(sys.argv[5]):
        print(json.dumps(program.measure(environment, 1)), flush=True)
"""


def measure(python: Path, scratch: Path, seconds: float, *environments: dict[str, str]) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", MEASURE, str(PROJECT), str(python), str(scratch), str(seconds), json.dumps(environments)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def ranks_of(scratch: Path) -> list[int]:
    """The program and its ranks: they have its path in their argv."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if str(scratch / "program.py") in read(path)]


def read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_sums_are_checked_and_a_rank_that_dies_does_not_keep_the_others(torch_python, tmp_path):
    moods = ({}, {"AERIE_NCCL_TEST_WRONG": "1"}, {"AERIE_NCCL_TEST_DIE": "1"}, {})
    output, _ = measure(torch_python, tmp_path, 60, *moods).communicate(timeout=200)
    right, wrong, died, again = (json.loads(line) for line in output.splitlines())
    assert right["status"] == again["status"] == "completed"
    assert {size: len(samples) for size, samples in right["samples_us"].items()} == {"8192": 3, "262144": 3}
    assert wrong["status"] == "failed"
    assert "wrong sums" in wrong["reason"]
    assert died["status"] == "failed"
    assert "rank 1: ended with status 3" in died["reason"]


def test_ranks_end_with_the_one_who_asked_even_when_that_is_killed(torch_python, tmp_path):
    asked = measure(torch_python, tmp_path, 600, {"AERIE_NCCL_TEST_HANG": "1"})
    deadline = time.monotonic() + 100
    while len(ranks_of(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(ranks_of(tmp_path)) == 3
    asked.send_signal(signal.SIGKILL)
    asked.communicate()
    while ranks_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(tmp_path) == []


class Tuning:
    def __init__(self, python: Path, scratch: Path) -> None:
        self.scratch, self.root, self.results = scratch, scratch / "root", scratch / "results"
        (scratch / "space.yml").write_text(yaml.safe_dump(SPACE))
        (scratch / "apply.yml").write_text(APPLY)
        self.variables: dict[str, Any] = {
            "aerie_root": str(self.root),
            "aerie_results": str(self.results),
            "sglang_server_instances": {"main": {"arm": "eagle3", "model": "target", "port": free_port()}},
            "nccl_environment": {"AERIE_NCCL_TEST_DELAY_US": "12000"},
            "nccl_tune_space": str(scratch / "space.yml"),
            "nccl_tune_python": str(python),
            "nccl_tune_run_id": "tested",
            "nccl_tune_launch_seconds": 6,
            "nccl_tune_final_rounds": 5,
            "nccl_tune_finalists": 1,
            "nccl_tune_repeats": 3,
            "nccl_tune_concurrency": [1],
            "nccl_tune_prefill_tokens": [256],
            "nccl_tune_confirm": False,
        }

    def run(self, *arguments: str, **more: Any) -> Run:
        return playbook(*arguments, variables=self.variables | more, scratch=self.scratch)

    @property
    def tuned(self) -> dict[str, Any]:
        found: dict[str, Any] = generated(self.results / "nccl/localhost.yml")["nccl_tuned"]
        return found


@pytest.fixture(scope="module")
def tuning(torch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    return Tuning(torch_python, tmp_path_factory.mktemp("tune"))


def test_a_check_says_what_would_be_tried_and_measures_nothing(tuning):
    run = tuning.run("playbooks/tune_nccl.yml", "--check").require_success()
    assert "3 sets would be tried on 2 ranks with gloo" in run.output
    assert not (tuning.root / "nccl").exists()
    assert not tuning.results.exists()


def test_the_faster_set_wins_the_hanging_one_is_out_and_the_evidence_is_on_the_controller(tuning):
    run = tuning.run("playbooks/tune_nccl.yml").require_success()
    for objective in ("latency", "throughput"):
        assert tuning.tuned[objective]["verdict"] == "unconfirmed", "as asked: nothing was confirmed end to end"
        assert tuning.tuned[objective]["environment"] == {"AERIE_NCCL_TEST_UNDELAYED": "1"}
        assert tuning.tuned[objective]["micro_benchmark"]["ratio"]["low"] > 1
    assert "AERIE_NCCL_TEST_HANG=1 hung and is disqualified" in run.output or "HANG=1: timeout" in run.output
    assert "about" in run.output
    assert "left" in run.output
    raw = tuning.results / "nccl/tested/localhost/search"
    result = json.loads((raw / "result.json").read_text())
    assert {one["candidate"] for one in result["disqualified"]} >= {"AERIE_NCCL_TEST_HANG=1"}
    assert len(list((raw / "launches").glob("final*-default.json"))) == 5


def test_going_on_with_a_complete_run_measures_nothing_and_says_the_same(tuning):
    before = tuning.tuned
    run = tuning.run("playbooks/tune_nccl.yml").require_success()
    assert run.changed == {}
    assert tuning.tuned == before


def test_what_was_found_with_gloo_is_applied_where_there_are_no_gpus_and_taken_away(tuning):
    applied = {"nccl_tuned_file": str(tuning.results / "nccl/localhost.yml")}
    apply = str(tuning.scratch / "apply.yml")
    assert tuning.run(apply, **applied).require_success().changed["localhost"] == ["nccl : Set NCCL's environment"]
    assert "AERIE_NCCL_TEST_UNDELAYED=1\n" in (tuning.root / "nccl.env").read_text()
    assert tuning.run(apply, **applied).require_success().changed == {}
    assert tuning.run(apply, nccl_state="absent").require_success().changed["localhost"] == ["nccl : Set NCCL's environment"]
    assert not (tuning.root / "nccl.env").exists()
