"""One load tells a cycle's shares and what measuring them costs; whatever happens, the profiler is off afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_clients
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.profiling import preloaded_client, profile_levels, profile_request, profile_run

from aerie_controller import report, terminal
from aerie_controller.terminal_reports import profile
from ports import free_port

HERE = Path(__file__).parent
TRACE = HERE.parent / "fixtures/traces/eagle3-cpu.trace.json.gz"
CLIENT = """
import json, pathlib, sys, time
if __name__ == "__main__":
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    state = pathlib.Path(arguments["--tokenizer"])
    clients = arguments["--max-concurrency"]
    print("client of", clients, flush=True)
    if (state / "dies").exists():
        sys.exit(3)
    (state / "clients").write_text("1" if (state / "too-few").exists() else clients)
    time.sleep(60)
"""
EAGLE3 = {"name": "eagle3", "speculation": {"algorithm": "EAGLE3", "draft_model": "draft"}, "flags": {}, "environment": {}}


class Lab:
    """A host's root with an instance that a fake server serves."""

    def __init__(self, root: Path) -> None:
        self.paths = HostPaths(root)
        self.state = self.paths.instance("main")
        self.profile = self.state / "profile"
        self.profile.mkdir(parents=True)
        (self.state / "server.log").touch()
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_decoding_server.py"), str(self.port), str(self.state), str(TRACE)]
        )
        while not processes.is_listening(self.port):
            time.sleep(0.01)
        (root / "fake_load.py").write_text(CLIENT)
        self.client = bench_clients.Client("fake", "1", (sys.executable, "-m", "fake_load"))
        self.lines: list[str] = []

    def job(self, **changes: Any) -> profile_run.Job:
        settings = profile_run.Settings((2, 4), 1.6, 0.2, 1, {"dataset": "random-ids", "input_len": 8, "output_len": 16}, None, 12, 60)
        return profile_run.Job(
            directory=profile_request.root(self.paths) / "r1" / "eagle3",
            server=profile_run.Server("127.0.0.1", self.port, self.state / "server.log", self.profile),
            client=self.client,
            client_environment={"PYTHONPATH": str(self.paths.root)},
            tokenizer=self.state,
            settings=replace(settings, **changes),
            phases=True,
            definition={"arm": EAGLE3, "acceptance_simulated": True, "started": "2026-11-29T10:00:00Z", "settings": settings.as_dict()},
            lock=self.state / "benchmark.lock",
        )

    def run(self, **changes: Any) -> dict[str, Any]:
        job = self.job(**changes)
        (self.state / "clients").unlink(missing_ok=True)
        return profile_run.run(job, lambda line, *_: self.lines.append(line))

    def level(self, clients: int) -> dict[str, Any]:
        return profile_levels.read(profile_request.root(self.paths) / f"r1/eagle3/c{clients}")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def children() -> list[str]:
    return [process.title for process in processes.scan() if process.ppid == os.getpid() and "fake_load" in process.title]


def test_a_slowdown_by_the_profiler_is_seen_with_its_interval_and_shares_sum_up(lab):
    lab.run(concurrency=(2,), seconds=2.4)
    level = lab.level(2)
    assert level["status"] == "completed"
    assert level["overhead"]["on_over_off"] == pytest.approx(0.8, abs=0.01)
    assert level["overhead"]["low"] == pytest.approx(0.8, abs=0.02)
    assert level["overhead"]["high"] == pytest.approx(0.8, abs=0.02)
    assert level["step_ms"] == pytest.approx(3.0)
    assert level["step_ms_on"] == pytest.approx(3.75)
    assert level["tok_s"] == pytest.approx(1600, rel=0.01)
    assert sum(phase["share"] for phase in level["phases"]["phases"].values()) == pytest.approx(1)
    assert level["phases"]["phases"]["target_verify"]["share"] == pytest.approx(0.6)


def test_each_level_has_one_run_of_the_client_which_is_ended(lab):
    told = lab.run()
    assert [level["status"] for level in told["levels"]] == ["completed", "completed"]
    for clients in (2, 4):
        log = profile_request.root(lab.paths) / f"r1/eagle3/c{clients}/client.log"
        assert log.read_text() == f"client of {clients}\n"
    assert children() == []
    assert [path.name for path in lab.profile.iterdir() if not path.name.startswith("phases-")] == []


def test_a_trace_is_asked_for_with_the_phases_marked_and_summed_up(lab):
    lab.run(concurrency=(2,), trace_concurrency=2)
    asked = json.loads((lab.state / "asked.json").read_text())
    assert (asked["num_steps"], asked["activities"], asked["with_stack"]) == (12, ["CPU", "GPU"], False)
    assert {"on", "trace"} <= set(asked["marks"])
    level = lab.level(2)
    assert level["trace"]["steps"] >= 2
    assert list(level["traces"]) == ["eagle3-c2-1-TP-0.trace.json.gz"]
    assert not (lab.profile / "trace").exists()


def test_switches_that_an_interrupted_run_left_are_taken_away(lab):
    for name in ("on", "trace"):
        (lab.profile / name).touch()
    lab.run(concurrency=(2,))
    assert lab.level(2)["overhead"]["on_over_off"] == pytest.approx(0.8, abs=0.03)
    assert not (lab.profile / "on").exists()
    assert not (lab.profile / "trace").exists()


def test_a_client_that_dies_is_the_levels_outcome_with_its_own_words(lab):
    (lab.state / "dies").touch()
    told = lab.run(concurrency=(2,))
    assert told["levels_failed"] == 1
    assert "status 3" in lab.level(2)["reason"]
    assert "client of 2" in lab.level(2)["reason"]


def test_a_server_that_can_not_run_so_many_says_what_to_raise(lab, monkeypatch):
    monkeypatch.setattr(profile_run, "READY_SECONDS", 1.5)
    (lab.state / "too-few").touch()
    lab.run(concurrency=(4,))
    assert "only 1 of 4 requests ran at once: raise max-running-requests" in lab.level(4)["reason"]


def test_a_server_that_dies_ends_the_arm_and_leaves_nothing_on(lab):
    lab.process.kill()
    lab.process.wait()
    told = lab.run()
    assert told["levels_failed"] == 2
    assert "died" in lab.level(4)["reason"]


def test_two_profiles_of_one_instance_do_not_measure_each_other(lab):
    with profile_run.bench_runner.alone(lab.state / "benchmark.lock", "other"), pytest.raises(AerieError, match="still measuring"):
        lab.run()


def test_a_python_client_is_imported_once_for_all_runs(tmp_path):
    (tmp_path / "counted.py").write_text(
        "import os, pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "if __name__ == '__main__':\n    print(os.getppid(), sys.argv[-1])\n    sys.exit(int(sys.argv[2] == '::1'))\n"
        "else:\n    (here / 'imports').open('a').write('x')\n"
    )
    client = bench_clients.Client("counted", "1", (sys.executable, "-m", "counted"))
    load = bench_clients.Load(
        "127.0.0.1", 1, None, {"dataset": "random-ids", "input_len": 1, "output_len": 4}, None, 1, 1, 1, tmp_path / "out"
    )
    parents = set()
    with preloaded_client.Clients.open(client, {**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path / "import.log") as clients:
        for number in range(3):
            log = tmp_path / f"{number}.log"
            run = clients.start(load, log, 30)
            deadline = time.monotonic() + 20
            while run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert run.poll() == 0, log.read_text()
            parents.add(log.read_text().split()[0])
    assert len(parents) == 1
    assert (tmp_path / "imports").read_text() == "x"


def test_a_client_that_can_not_be_imported_is_told_with_its_error(tmp_path):
    client = bench_clients.Client("gone", "1", (sys.executable, "-m", "no_such_module_here"))
    load = bench_clients.Load(
        "127.0.0.1", 1, None, {"dataset": "random-ids", "input_len": 1, "output_len": 4}, None, 1, 1, 1, tmp_path / "out"
    )
    with (
        preloaded_client.Clients.open(client, dict(os.environ), tmp_path / "import.log") as clients,
        pytest.raises(AerieError, match=r"load client gone ended(.|\n)*no_such_module_here"),
    ):
        clients.start(load, tmp_path / "log", 30)


GIVEN: dict[str, Any] = {
    "run_id": "r1",
    "host": "h",
    "instance": "main",
    "arm": EAGLE3,
    "models": {},
    "target": "target",
    "host_info": {},
    "api_key": None,
    "client": None,
    "concurrency": [1, 4],
    "workload": {},
    "seconds": 10.0,
    "window_seconds": 1.0,
    "seed": 1,
    "trace_concurrency": None,
    "trace_steps": 24,
    "timeout_seconds": 60.0,
}


def test_everything_that_is_wrong_with_a_request_is_told_at_once():
    wrong = {"concurrency": [1, 1], "workload": {"inputlen": 8}, "window_seconds": 0.01, "trace_concurrency": 9, "trace_steps": 1}
    with pytest.raises(AerieError) as raised:
        profile_request.Request.of(GIVEN | wrong)
    for text in ("sglang_profile_concurrency", "did you mean 'input_len'", "window_seconds", "trace_concurrency is 9", "trace_steps is 1"):
        assert text in str(raised.value)


def test_a_release_without_the_profiler_is_refused_with_the_variable_to_set(tmp_path):
    (tmp_path / "releases/0.5.23-abc").mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/0.5.23-abc")
    (tmp_path / "current/release.json").write_text(json.dumps({"id": "0.5.23-abc", "patch_sets": []}))
    with pytest.raises(AerieError, match="add phase_profiler to sglang_patches_sets"):
        profile_request.require_release(HostPaths(tmp_path), profile_request.Request.of(GIVEN))
    baseline = {"name": "baseline", "speculation": None}
    assert profile_request.require_release(HostPaths(tmp_path), profile_request.Request.of(GIVEN | {"arm": baseline}))


@pytest.fixture
def figures(lab):
    """A profile of one host and two levels, one of them traced, with a kernel that the table of kinds lacks."""
    lab.run(trace_concurrency=4)
    run = lab.paths.root / "results/r1"
    (run / "gpu-1").mkdir(parents=True)
    (run / "gpu-1/eagle3").symlink_to(profile_request.root(lab.paths) / "r1/eagle3")
    found = profile_levels.whole(run)
    found["hosts"]["gpu-1"]["arms"][0]["levels"][1]["trace"]["unknown"] = [{"name": "frobnicate_v3", "share": 0.1, "ms": 1.0, "count": 1}]
    return found


def test_the_table_fits_a_terminal_and_names_what_is_simulated_or_unknown(figures):
    text = terminal.render(profile.parts(figures, {"page": "/x/profile.html"}), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "1 600 sim" in text
    assert "frobnicate_v3 10.0 %" in text
    assert "60.0" in text


def test_the_page_is_a_pure_function_of_the_figures_and_holds_all_it_shows(figures):
    page = report.render_profile(figures)
    assert page == report.render_profile(figures)
    assert page.count('<svg class="plot"') == 2
    assert "Acceptance is simulated in eagle3" in page
    assert "frobnicate_v3" in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_table_and_page_say_that_speeds_in_check_mode_are_no_results(figures):
    def shown() -> str:
        text = terminal.render(profile.parts(figures, {"page": "/x/profile.html"}), 100)
        return " ".join(text.split()) + report.render_profile(figures)

    assert "check mode" not in shown()
    figures["hosts"]["gpu-1"]["arms"][0]["patch_sets_in_check"] = ["triton_target_verify"]
    assert "eagle3: triton_target_verify ran in check mode" in shown()
    assert "Speeds of eagle3 are no results: triton_target_verify ran in check mode" in shown()


def test_an_arm_that_is_profiled_again_keeps_its_earlier_files_aside(lab):
    lab.run(concurrency=(2, 4), seconds=0.4)
    lab.run(concurrency=(2,), seconds=0.4)
    run = profile_request.root(lab.paths) / "r1"
    assert [path.name for path in (run / "eagle3").glob("c*") if path.is_dir()] == ["c2"]
    assert (run / ".superseded/eagle3.1/c4/level.json").is_file()
