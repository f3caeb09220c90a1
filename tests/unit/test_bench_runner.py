"""One call measures every cell of a launch, whatever becomes of each; the tests run real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json
from ansible.module_utils.aerie.measuring import bench_clients, bench_runner

from ports import free_port

HERE = Path(__file__).parent
CLIENT = bench_clients.Client("fake", "1", (sys.executable, str(HERE / "fake_client.py")))


class Lab:
    """A served instance and a run's directory; ``steer`` makes client or server misbehave."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = directory / "runs" / "r1"
        self.state = directory / "instance"
        (self.state / "profile").mkdir(parents=True)
        self.dataset = directory / "data" / "set.json"
        self.dataset.parent.mkdir()
        self.dataset.write_text("[]")
        self.port = free_port()
        self.lines: list[str] = []
        self.serve()

    def serve(self) -> None:
        log = (self.state / "server.log").open("ab")
        self.process = subprocess.Popen([sys.executable, str(HERE / "fake_server.py"), str(self.port), str(self.state)], stdout=log)
        log.close()
        while not processes.is_listening(self.port):
            time.sleep(0.01)

    def steer(self, name: str, concurrency: int) -> None:
        (self.dataset.parent / name).write_text(str(concurrency))

    def definition(self, concurrency: int, kind: str = "measure", **changes: object) -> dict:
        definition = {
            "schema": bench_runner.SCHEMA,
            "run_id": "r1",
            "launch": 1,
            "cell": f"eagle3-c{concurrency}-r1" + ("-profile" if kind == "profile" else ""),
            "arm": {"name": "eagle3"},
            "workload": {"dataset": "sharegpt", "output_len": 48},
            "concurrency": concurrency,
            "repeat": 1,
            "kind": kind,
            "seed": 5,
            "requests": 2 * concurrency,
        } | changes
        return definition | {"identity": bench_runner.identity(definition)}

    def job(self, *definitions: dict, **changes: object) -> bench_runner.Job:
        server = bench_runner.Server("127.0.0.1", self.port, self.state / "server.log", self.state / "profile", "s3cret")
        job = bench_runner.Job(self.run, server, CLIENT, {}, None, self.dataset, definitions, self.directory / "lock", timeout_seconds=20)
        return replace(job, **changes)

    def measure(self, *definitions: dict, **changes: object) -> dict:
        return bench_runner.run(self.job(*definitions, **changes), lambda line, *_: self.lines.append(line))

    def outcome(self, cell: str) -> dict:
        return read_json(self.run / cell / bench_runner.OUTCOME)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_runner, "GONE_SECONDS", 0.5)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    made = Lab(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_a_completed_cell_leaves_all_its_raw_files_and_says_its_speed_and_acceptance(lab):
    result = lab.measure(lab.definition(1), lab.definition(4))
    assert (result["cells_completed"], result["cells_failed"], result["changed"]) == (2, 0, True)
    cell = lab.run / "eagle3-c4-r1"
    server = {"metrics_after.txt", "metrics_before.txt", "server_after.json", "server_before.json"}
    assert {path.name for path in cell.iterdir()} == server | {"client.jsonl", "client.log", "definition.json", "outcome.json"}
    outcome = lab.outcome("eagle3-c4-r1")
    assert (outcome["status"], outcome["reason"], outcome["exit_status"]) == ("completed", None, 0)
    assert lab.lines[1].startswith("cell 2 of 2  eagle3 c=4 r=1  336 tok/s  accept 2.00")
    assert "left ~" in lab.lines[0]


def test_the_cache_is_flushed_after_the_warm_up_and_the_counters_hold_the_cell_alone(lab):
    lab.measure(lab.definition(1), lab.definition(4))
    before, after = (lab.run / "eagle3-c4-r1" / name for name in ("metrics_before.txt", "metrics_after.txt"))
    counts = [int(path.read_text().splitlines()[0].split()[-1]) for path in (before, after)]
    # cell c=1: 1 warm-up + 2; warm-up of c=4: 4; then the 8 requests of the cell
    assert counts == [7, 15]
    assert read_json(lab.run / "eagle3-c4-r1" / "server_before.json")["flushed"] == 2


def test_the_client_reaches_the_loopback_past_any_proxy_and_leaves_no_key_behind(lab):
    lab.measure(lab.definition(1))
    assert (lab.dataset.parent / "proxy").read_text() == "none"
    written = b"".join(path.read_bytes() for path in (lab.run / "eagle3-c1-r1").iterdir())
    assert b"s3cret" not in written and bench_runner.REDACTED.encode() in written


def test_a_failing_client_is_the_outcome_of_its_cell_and_not_of_the_next(lab):
    lab.steer("fail", 1)
    result = lab.measure(lab.definition(1), lab.definition(4))
    assert [cell["status"] for cell in result["cells"]] == ["failed", "completed"]
    assert "warm-up: the client ended with status 1" in lab.outcome("eagle3-c1-r1")["reason"]
    assert "bad tokenizer" in lab.outcome("eagle3-c1-r1")["reason"]
    assert "FAILED" in lab.lines[0]


def test_a_hanging_client_is_ended_with_all_its_children_and_recorded_as_a_time_out(lab):
    lab.steer("hang", 4)
    started = time.monotonic()
    result = lab.measure(lab.definition(4), lab.definition(1), timeout_seconds=1)
    assert time.monotonic() - started < 10
    assert [cell["status"] for cell in result["cells"]] == ["timeout", "completed"]
    pids = [int(pid) for pid in (lab.dataset.parent / "hanging").read_text().split()]
    assert processes.wait_gone([found for pid in pids if (found := processes.read(pid))], 2) == []


def test_a_server_that_dies_fails_its_cell_and_those_left_with_the_end_of_its_log(lab):
    lab.measure(lab.definition(1))
    (lab.state / "die").touch()
    result = lab.measure(lab.definition(1), lab.definition(4), lab.definition(16))
    assert [cell["status"] for cell in result["cells"]] == ["completed", "failed", "failed"]
    for cell in ("eagle3-c4-r1", "eagle3-c16-r1"):
        assert "died" in lab.outcome(cell)["reason"]
        assert "illegal memory access" in lab.outcome(cell)["reason"]


def test_a_server_that_was_started_again_underneath_is_not_measured_as_the_same_launch(lab):
    def restart() -> None:
        if (lab.run / "eagle3-c1-r1").exists():
            lab.process.kill()
            lab.process.wait()
            lab.serve()

    result = lab.measure(lab.definition(1), lab.definition(4), before_cell=restart)
    assert [cell["status"] for cell in result["cells"]] == ["completed", "failed"]
    assert "was started again" in lab.outcome("eagle3-c4-r1")["reason"]


def test_going_on_with_a_run_measures_only_what_is_not_complete(lab):
    lab.steer("fail", 4)
    lab.measure(lab.definition(1), lab.definition(4))
    first = (lab.run / "eagle3-c1-r1" / "client.jsonl").stat().st_mtime_ns
    (lab.dataset.parent / "fail").unlink()
    again = (lab.definition(1), lab.definition(4))
    assert bench_runner.pending(lab.run, again) == ["eagle3-c4-r1"]
    result = lab.measure(*again)
    assert [cell["earlier"] for cell in result["cells"]] == [True, False]
    assert (lab.run / "eagle3-c1-r1" / "client.jsonl").stat().st_mtime_ns == first
    assert read_json(lab.run / ".superseded" / "eagle3-c4-r1.1" / "outcome.json")["status"] == "failed"


def test_a_cell_of_the_same_name_but_another_definition_is_measured_again(lab):
    lab.measure(lab.definition(1))
    assert bench_runner.pending(lab.run, (lab.definition(1, run_id="r2", launch=7),)) == []
    assert bench_runner.pending(lab.run, (lab.definition(1, seed=6),)) == ["eagle3-c1-r1"]


def test_an_interrupted_cell_is_measured_again(lab):
    lab.measure(lab.definition(1))
    (lab.run / "eagle3-c1-r1" / "outcome.json").unlink()
    assert bench_runner.pending(lab.run, (lab.definition(1),)) == ["eagle3-c1-r1"]


def test_a_profile_cell_keeps_the_lines_of_its_own_window_and_switches_the_profiler_off(lab):
    earlier = lab.state / "profile" / f"phases-{lab.process.pid}.jsonl"
    earlier.write_text('{"t": 1}\n')
    lab.measure(lab.definition(4), lab.definition(4, kind="profile"))
    lines = (lab.run / "eagle3-c4-r1-profile" / "phases.jsonl").read_text().splitlines()
    assert len(lines) == 8 and all(json.loads(line)["cycle_ms"] == 10.0 for line in lines)
    assert not (lab.state / "profile" / "on").exists()
    assert not (lab.run / "eagle3-c4-r1" / "phases.jsonl").exists()


def test_a_profile_cell_without_a_profiler_fails_and_says_what_is_missing(lab):
    (lab.state / "profile").rmdir()
    lab.measure(lab.definition(1, kind="profile"))
    assert "phase_profiler" in lab.outcome("eagle3-c1-r1-profile")["reason"]


def test_two_benchmarks_of_one_instance_never_run_at_once(lab):
    (lab.directory / "lock").write_text("run r0")
    hold = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(lab.directory / "lock")], stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(AerieError, match="run r0 is still measuring"):
            lab.measure(lab.definition(1))
        other.send_signal(signal.SIGKILL)
    assert lab.measure(lab.definition(1))["cells_completed"] == 1


def test_a_lost_lease_stops_before_the_next_cell(lab):
    def renew() -> None:
        if (lab.run / "eagle3-c1-r1").exists():
            raise AerieError("this host was taken over by eve")

    with pytest.raises(AerieError, match="taken over by eve"):
        lab.measure(lab.definition(1), lab.definition(4), before_cell=renew)
    assert lab.outcome("eagle3-c1-r1")["status"] == "completed"
    assert not (lab.run / "eagle3-c4-r1").exists()


def test_secrets_of_environment_and_argv_never_reach_a_definition():
    assert bench_runner.redacted_environment({"HF_TOKEN": "x", "OMP_NUM_THREADS": 1}) == {"HF_TOKEN": "<redacted>", "OMP_NUM_THREADS": "1"}
    argv = ["serve", "--api-key", "x", "--port", "1", "--admin-api-key=y"]
    assert bench_runner.redacted_argv(argv) == ["serve", "--api-key", "<redacted>", "--port", "1", "--admin-api-key=<redacted>"]
