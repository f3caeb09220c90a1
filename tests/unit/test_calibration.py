"""From where on plain decoding is faster is found, with how sure that is; what is set follows from it, and holds for that server only."""

from __future__ import annotations

import json
import math
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import (
    bench_clients,
    bench_runner,
    calibration,
    calibration_files,
    calibration_request,
    calibration_run,
    dynamic_control,
)
from ansible.module_utils.aerie.measuring.calibration import ALWAYS, CROSSES, NEVER, PLAIN, SPECULATIVE, Level
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.profiling import overhead

from aerie_controller import report, terminal
from aerie_controller.terminal_reports import calibration as calibration_report

HERE = Path(__file__).parent
GRAPHS = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
ARM: dict[str, Any] = {
    "name": "dynamic",
    "speculation": {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4},
    "dynamic": {"threshold": "auto"},
    "flags": {},
    "environment": {},
}

# ---- the estimate, on servers of known truth -----------------------------------------------------------------------------------------


def measured(truth: Callable[[float], float], seed: int, pairs: int = 6, noise: float = 0.02, most: int = 128) -> list[Level]:
    """A whole sweep: levels of a first look, then finer ones; few requests are noisier, as their windows hold fewer tokens."""
    draws = random.Random(seed)

    def level(size: int) -> Level:
        spread = noise * (1 + 2 / math.sqrt(size))
        return Level(size, tuple(truth(size) * math.exp(draws.gauss(0, spread)) for _ in range(pairs)))

    levels = [level(size) for size in calibration.first_levels(most)]
    for _ in range(4):
        finer = calibration.next_level(calibration.estimate(levels, draws=200), most)
        if finer is None:
            break
        levels.append(level(finer))
    return levels


@pytest.mark.parametrize(
    ("truth", "at"), [(lambda size: 1.7 * size**-0.2, 1.7**5), (lambda size: 1.35 * size**-0.1, 1.35**10)], ids=["steep", "shallow"]
)
def test_the_interval_holds_the_true_crossover_nine_times_of_ten(truth, at):
    found = [calibration.estimate(measured(truth, seed), draws=200) for seed in range(100)]
    assert sum((one.low or 0) <= at <= (one.high or math.inf) for one in found) >= 85
    assert all(one.verdict == CROSSES for one in found)
    widths = [math.log((one.high or 128) / (one.low or 1)) for one in found]
    assert math.exp(sum(widths) / len(widths)) < 1.6


@pytest.mark.parametrize(
    ("truth", "verdict"),
    [(lambda size: 1.6 * size**-0.05, ALWAYS), (lambda size: 0.9 * size**-0.05, NEVER), (lambda size: 1.7 * size**-0.2, CROSSES)],
    ids=["always faster", "never faster", "crossing"],
)
def test_no_crossover_in_the_range_is_an_answer(truth, verdict):
    found = [calibration.estimate(measured(truth, seed), draws=200) for seed in range(40)]
    assert sum(one.verdict == verdict for one in found) >= 39
    if verdict != CROSSES:
        assert all(one.at is None for one in found if one.verdict == verdict)
        assert sum(one.settled for one in found) >= 36
    limits = calibration.thresholds(found[0], 128)
    assert {ALWAYS: (128, 128), NEVER: (0, 0)}.get(verdict, (limits.high, limits.low)) == (limits.high, limits.low)


def test_an_answer_that_the_figures_do_not_settle_says_so():
    noisy = [Level(size, (0.99, 1.02, 0.96, 1.05)) for size in (1, 8, 64)]
    found = calibration.estimate(noisy)
    assert not found.settled
    assert "Not settled" in calibration.sentence(found)


def test_the_same_figures_give_the_same_estimate():
    levels = measured(lambda size: 1.7 * size**-0.2, 3)
    assert calibration.estimate(levels) == calibration.estimate(list(reversed(levels)))


def test_finer_steps_go_where_the_crossover_is_and_end():
    def truth(size: float) -> float:
        return 1.7 * size**-0.2  # 14.2

    levels = [Level(size, (truth(size),) * 3) for size in calibration.first_levels(128, GRAPHS)]
    added = []
    while (finer := calibration.next_level(calibration.estimate(levels, draws=50), 128, GRAPHS)) is not None:
        added.append(finer)
        levels.append(Level(finer, (truth(finer),) * 3))
    assert added == [12]
    assert calibration.next_level(calibration.estimate([Level(1, (1.2,)), Level(64, (1.1,))]), 128) is None


# ---- what follows from it --------------------------------------------------------------------------------------------------------------


def estimated(truth: Callable[[float], float], spread: float = 0.003, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)) -> Any:
    return calibration.estimate([Level(size, tuple(truth(size) * (1 + spread * off) for off in (-1, 0, 1, 0))) for size in sizes])


def test_thresholds_are_sizes_that_a_batch_can_have_and_leave_room_between_them():
    found = estimated(lambda size: 1.7 * size**-0.2)  # crosses at 14.2
    limits = calibration.thresholds(found, 128, GRAPHS)
    assert (limits.high, limits.low) == (12, 8)
    without_graphs = calibration.thresholds(found, 128)
    assert without_graphs.low < without_graphs.high
    assert 13 <= without_graphs.low <= 14 <= without_graphs.high <= 15
    assert calibration.thresholds(found, 14).high <= 14


def test_a_wide_interval_does_not_make_a_band_that_loses():
    unsure = estimated(lambda size: 1.7 * size**-0.2, spread=0.25)
    assert unsure.high is None or unsure.high > 20
    limits = calibration.thresholds(unsure, 128)
    for size in (limits.low, limits.high):
        assert abs(math.log(1.7 * size**-0.2)) < 3 * calibration.TOLERANCE


def test_a_crossover_at_few_requests_keeps_speculation_for_the_smallest_batch():
    limits = calibration.thresholds(estimated(lambda size: 1.05 * size**-0.2), 128, GRAPHS)
    assert (limits.high, limits.low) == (1, 1)


def test_a_mode_lasts_long_enough_to_pay_for_changing():
    free = calibration.dwell({PLAIN: [-1.0, 1.0], SPECULATIVE: [0.2, -0.2]}, 5.0)
    assert (free.seconds, free.steps) == (0.1, 20)
    dear = calibration.dwell({PLAIN: [10.0], SPECULATIVE: [30.0]}, 5.0)
    assert dear.seconds == pytest.approx(2.0)
    assert dear.steps == 400
    assert calibration.dwell({}, None).steps == calibration.FEWEST_DWELL_STEPS
    noisy = calibration.dwell({PLAIN: [-400.0, 700.0, 150.0], SPECULATIVE: [500.0, -300.0, 200.0]}, 5.0)
    assert (noisy.seconds, noisy.to_plain_ms) == (0.1, 150.0)


def test_what_thresholds_lose_is_told_by_level():
    found = estimated(lambda size: 1.7 * size**-0.2)
    rows = calibration_files.rows(found, {"high": 64, "low": 64}, calibration.thresholds(found, 128, GRAPHS), GRAPHS)
    by_level = {row["concurrency"]: row for row in rows}
    assert by_level[8]["before"] == by_level[8]["after"] == {"mode": SPECULATIVE, "of_better": 1.0}
    assert by_level[64]["before"]["of_better"] == pytest.approx(1.7 * 64**-0.2, abs=0.001)
    assert by_level[64]["after"] == {"mode": PLAIN, "of_better": 1.0}


@pytest.mark.parametrize(
    ("before", "after", "levels"),
    [
        ((20, 18), (30, 28), [8, 16, 26, 32]),  # apart at 26 alone
        ((64, 64), (20, 18), [8, 16, 26, 64]),  # apart at 26 to 64, most at 64
        ((30, 28), (26, 24), [8, 16, 30, 64]),  # nowhere surely apart: both sides
    ],
)
def test_thresholds_are_measured_against_each_other_where_their_modes_differ(before, after, levels):
    ratios = {8: 1.4, 16: 1.25, 26: 1.1, 30: 1.01, 32: 0.97, 64: 0.65}
    points = [calibration.Point(size, ratio, None, None, ratio, 3, 100.0, 100.0 * ratio, "steps") for size, ratio in ratios.items()]
    assert calibration.levels_to_confirm(points, calibration.Thresholds(*before), calibration.Thresholds(*after), None, 4) == levels


def test_upstreams_adaptive_gets_slots_at_the_same_sizes():
    limits = calibration.Thresholds(48, 40)
    assert calibration.adaptive_config(limits, 3, 128) == {"1": {"candidate_steps": [3]}, "49": {"candidate_steps": [0]}}
    assert calibration.adaptive_config(calibration.Thresholds(0, 0), 3, 128) == {"1": {"candidate_steps": [0]}}
    assert calibration.adaptive_config(calibration.Thresholds(128, 128), 3, 128) == {"1": {"candidate_steps": [3]}}


def test_a_change_costs_what_its_steps_gave_too_little():
    windows = [overhead.Window(0, SPECULATIVE, 100.0, 101.0), overhead.Window(0, PLAIN, 101.0, 102.0)]
    # 800 and 1000 tokens a second; the line over the change lacks 5 ms of the latter
    lines = [overhead.Interval(100 + step / 10, 100.1 + step / 10, 800, 10, clean=True) for step in range(9)]
    lines += [overhead.Interval(100.9, 101.1, (80 + 100 - 5) / 0.2, 10, clean=True)]
    lines += [overhead.Interval(101.1 + step / 10, 101.2 + step / 10, 1000, 10, clean=True) for step in range(9)]
    assert calibration.switch_ms(windows, lines, [100.0, 101.0]) == {PLAIN: [pytest.approx(5.0)]}


def test_records_of_two_servers_give_levels_paired_by_repeat():
    def record(arm: str, level: int, repeat: int, speed: float, status: str = "completed") -> dict[str, Any]:
        return {
            "arm": {"name": arm},
            "kind": "measure",
            "status": status,
            "concurrency": level,
            "repeat": repeat,
            "metrics": {"output_throughput_tok_s": speed},
        }

    kept = [record("baseline", 8, repeat, 100.0) for repeat in (1, 2, 3)] + [record("eagle3", 8, repeat, 120.0) for repeat in (1, 2)]
    kept += [record("eagle3", 8, 3, 900.0, status="failed"), record("eagle3", 16, 1, 50.0)]
    (level,) = calibration.from_records(kept, "baseline", "eagle3")
    assert level.pairs == (pytest.approx(1.2), pytest.approx(1.2))
    with pytest.raises(AerieError, match="no concurrency at which baseline and eagle4"):
        calibration.from_records(kept, "baseline", "eagle4")


# ---- what it holds for -----------------------------------------------------------------------------------------------------------------

HELD = {
    "schema": "aerie-calibration/1",
    "high": 24,
    "low": 16,
    "host": "gpu-01",
    "host_fingerprint": {"fingerprint": "f1", "kernel": "6.8", "gpus": [{"name": "H200"}]},
    "release": "0.5.23-abc",
    "models": {"target": {"name": "target", "identity": "t1"}, "draft": {"name": "draft", "identity": "d1"}},
    "arm": {"name": "dynamic", "speculation": ARM["speculation"]},
}
THERE = calibration.Situation(
    arm="dynamic",
    speculation=ARM["speculation"],
    release="0.5.23-abc",
    models={"target": {"name": "target", "identity": "t1"}, "draft": {"name": "draft", "identity": "d1"}},
    host_fingerprint={"fingerprint": "f1", "kernel": "6.8", "gpus": [{"name": "H200"}]},
    most=48,
)


def test_the_server_that_was_calibrated_may_use_it():
    assert calibration.problems(HELD, THERE) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host_fingerprint": {"fingerprint": "f2", "kernel": "6.8", "gpus": [{"name": "B200"}]}}, "of another host (gpu-01; gpus differ)"),
        ({"release": "0.5.23-def"}, "of release 0.5.23-abc, and 0.5.23-def would serve"),
        ({"models": {"target": {"name": "target", "identity": "t2"}}}, "of another target (target; now target, other files)"),
        ({"speculation": {**ARM["speculation"], "steps": 5}}, "steps 3"),
        ({"most": 20}, "high is 24, and the server runs 20 requests at most"),
    ],
    ids=["host", "release", "model", "draft settings", "requests"],
)
def test_another_server_may_not_and_is_told_why(changes, reason):
    (problem,) = calibration.problems(HELD, replace(THERE, **changes))
    assert reason in problem
    assert "playbooks/calibrate.yml" in problem


def test_a_calibration_that_is_none_is_refused():
    assert "there is no calibration" in calibration.problems({}, THERE)[0]
    assert "schema" in calibration.problems({"high": 3}, THERE)[0]
    assert "0 <= low <= high" in calibration.problems(HELD | {"low": 30}, THERE)[0]


# ---- one server, calibrated ------------------------------------------------------------------------------------------------------------

CLIENT = """
import pathlib, sys, time
if __name__ == "__main__":
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    (pathlib.Path(arguments["--tokenizer"]) / "clients").write_text(arguments["--max-concurrency"])
    time.sleep(60)
"""


class Lab:
    """A host's root with an instance that a fake server serves."""

    def __init__(self, root: Path, depths: bool = False) -> None:
        self.paths = HostPaths(root)
        self.state = self.paths.instance("main")
        self.state.mkdir(parents=True)
        if depths:
            (self.state / "depths").touch()
        (self.state / "server.log").touch()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.process = subprocess.Popen([sys.executable, str(HERE / "fake_dynamic_server.py"), str(self.port), str(self.state)])
        while not processes.is_listening(self.port):
            time.sleep(0.01)
        (root / "fake_load.py").write_text(CLIENT)
        self.lines: list[str] = []
        self.server = bench_runner.Server("127.0.0.1", self.port, self.state / "server.log", self.state / "profile")

    @property
    def run_directory(self) -> Path:
        return self.paths.root / "calibrations/r1"

    def run(self, before: dict[str, int] | None = None, arm: dict[str, Any] = ARM, **changes: Any) -> dict[str, Any]:
        workload = {"dataset": "random-ids", "input_len": 8, "output_len": 16}
        settings = replace(calibration_run.Settings((1, 4, 16), 1, 1.2, 0.2, 1, workload, True, 60), **changes)
        release = {"id": "0.5.23-abc", "sglang_version": "0.5.23", "patch_sets": [{"name": "dynamic_speculation", "sha256": "ab"}]}
        definition = {
            "run_id": "r1",
            "host": "gpu-01",
            "started": "2026-11-29T10:00:00Z",
            "arm": arm,
            "acceptance_simulated": True,
            "argv": ["python", "-m", "sglang.launch_server"],
            "environment": {},
            "release": release,
            "models": HELD["models"],
            "settings": calibration_run.describe(settings),
            "host_fingerprint": HELD["host_fingerprint"],
        }
        job = calibration_run.Job(
            directory=self.run_directory,
            server=self.server,
            client=bench_clients.Client("fake", "1", (sys.executable, "-m", "fake_load")),
            client_environment={"PYTHONPATH": str(self.paths.root)},
            tokenizer=self.state,
            settings=settings,
            before=before,
            definition=definition,
            lock=self.state / "benchmark.lock",
        )
        return calibration_run.run(job, lambda line, *_: self.lines.append(line))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, dict[str, Any]]]:
    lab = Lab(tmp_path_factory.mktemp("calibrated"))
    lab.run(before={"high": 16, "low": 16}, seconds=2.4, window_seconds=0.4)  # a busy machine may stop all of it for a while
    yield lab, calibration_files.read(lab.run_directory)
    lab.process.kill()
    lab.process.wait()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_a_servers_crossover_is_found_in_one_launch(calibrated):
    _, found = calibrated
    told = found["calibration"]
    assert told["verdict"] == CROSSES
    assert told["crossover"]["at"] == pytest.approx(6.0, rel=0.15)
    assert [point["concurrency"] for point in told["evidence"]["levels"]] in ([1, 4, 7, 16], [1, 4, 6, 16])
    assert 4 <= told["low"] < told["high"] <= 7
    first = told["evidence"]["levels"][0]
    assert first["ratio"] == pytest.approx(6**0.25, rel=0.03)
    assert first["speculative_tok_s"] == pytest.approx(800, rel=0.03)


def test_the_thresholds_before_and_after_are_measured_against_each_other(calibrated):
    _, found = calibrated
    by_level = {one["concurrency"]: one for one in found["confirmed"]}
    assert by_level[16]["after_over_before"] == pytest.approx((16 / 6) ** 0.25, rel=0.04)
    assert by_level[1]["after_over_before"] == pytest.approx(1.0, abs=0.03)
    row = {row["concurrency"]: row for row in found["table"]}[16]
    assert (row["before"]["mode"], row["after"]["mode"]) == (SPECULATIVE, PLAIN)


def test_nothing_is_forced_afterwards_and_progress_told_what_is_left(calibrated):
    lab, _ = calibrated
    assert dynamic_control.state(lab.server)["force"] is None
    assert any("left ~00:" in line for line in lab.lines)
    assert any("c=16" in line and "×" in line for line in lab.lines)


def test_table_and_page_show_before_and_now_and_fit(calibrated):
    _, found = calibrated
    text = terminal.render(calibration_report.parts(found, {"variables": "/x/gpu-01.yml"}), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "Plain decoding wins above about" in text
    assert "Before: plain above 16 requests" in text
    assert "/x/gpu-01.yml" in text
    page = report.render_calibration(found)
    assert page == report.render_calibration(found)
    assert page.count('<svg class="plot"') == 2
    assert "Acceptance is simulated" in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_the_server_that_was_measured_may_use_what_came_of_it(calibrated):
    _, found = calibrated
    assert calibration.problems(found["calibration"], replace(THERE, most=16)) == []


def test_a_server_that_does_not_obey_is_told_with_its_reason_and_left_unforced(lab):
    (lab.state / "stubborn").touch()
    told = lab.run(concurrency=(2,))
    assert "it is stubborn" in told["levels"][0]["reason"]
    with pytest.raises(AerieError, match="gave no figures: the server refused"):
        calibration_files.read(lab.run_directory)
    assert json.loads((lab.state / "told.jsonl").read_text().splitlines()[-1]) == {"force": None}


def test_more_clients_than_the_server_runs_are_refused_before_anything_is_measured(lab):
    with pytest.raises(AerieError, match="the server runs 16 requests at most"):
        lab.run(concurrency=(8, 64))
    assert not lab.run_directory.exists()


def test_batches_are_padded_to_the_graphs_that_the_server_tells_of():
    assert calibration_run.batch_sizes({"graph_batch_sizes": [4, 1, 2]}, {}) == [1, 2, 4]
    assert calibration_run.batch_sizes({}, {"cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 8]}}}) == [1, 8]
    assert calibration_run.batch_sizes({}, {"cuda_graph_config": {"decode": {"backend": "disabled", "bs": [1, 8]}}}) is None
    assert calibration_run.batch_sizes({}, {"disable_cuda_graph": True, "cuda_graph_bs": [1]}) is None


GIVEN: dict[str, Any] = {
    "run_id": "r1",
    "host": "h",
    "instance": "main",
    "arm": ARM,
    "models": {},
    "target": "target",
    "host_info": {},
    "api_key": None,
    "client": None,
    "concurrency": [],
    "finer_levels": 4,
    "workload": {},
    "seconds": 10.0,
    "window_seconds": 1.0,
    "seed": 1,
    "confirm": True,
    "timeout_seconds": 60.0,
}


def test_everything_that_is_wrong_with_a_request_is_told_at_once():
    wrong = {"concurrency": [1, 1], "workload": {"inputlen": 8}, "window_seconds": 0.01, "arm": {"name": "eagle3"}, "finer_levels": -1}
    with pytest.raises(AerieError) as raised:
        calibration_request.Request.of(GIVEN | wrong)
    for text in (
        "sglang_calibrate_concurrency",
        "did you mean 'input_len'",
        "window_seconds",
        "arm eagle3 has no `dynamic`",
        "finer_levels",
    ):
        assert text in str(raised.value)


def test_a_server_in_check_mode_is_not_calibrated(tmp_path, monkeypatch):
    found = SimpleNamespace(
        instance={"environment": {"AERIE_TARGET_VERIFY": "check"}},
        release={"id": "r", "patch_sets": [{"name": "dynamic_speculation"}, {"name": "triton_target_verify"}]},
        client=SimpleNamespace(identity=dict),
    )
    monkeypatch.setattr(calibration_request.served, "find", lambda *arguments: found)
    request = calibration_request.Request.of(GIVEN)
    with pytest.raises(AerieError, match="runs triton_target_verify in check mode, a test whose speeds are no results"):
        calibration_request.prepare(HostPaths(tmp_path), request)


def test_records_of_check_mode_are_no_base_for_a_calibration(tmp_path):
    place = tmp_path / "demo/r1/h/eagle3-c1-r1"
    place.mkdir(parents=True)
    record = {"host": "h", "arm": {"name": "eagle3"}, "patch_sets_in_check": ["triton_target_verify"]}
    (place / "record.json").write_text(json.dumps(record))
    wanted = {"experiment": "demo", "run_id": "r1", "plain": "baseline", "speculative": "eagle3", "most": 16}
    with pytest.raises(AerieError, match="arm eagle3 of run r1 ran triton_target_verify in check mode"):
        calibration_files.of_records(tmp_path, "h", wanted)


def test_a_release_that_can_not_change_over_is_refused_with_the_variable_to_set(tmp_path):
    (tmp_path / "releases/0.5.23-abc").mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/0.5.23-abc")
    (tmp_path / "current/release.json").write_text(json.dumps({"id": "0.5.23-abc", "patch_sets": []}))
    with pytest.raises(AerieError, match="add dynamic_speculation to sglang_patches_sets"):
        calibration_request.require_release(HostPaths(tmp_path), calibration_request.Request.of(GIVEN))
