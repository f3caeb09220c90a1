"""`profile.yml` says where a decode cycle goes, and leaves the host as it was."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

ASKED: dict[str, Any] = {
    "sglang_profile_run_id": "tested",
    "sglang_profile_concurrency": [1, 4],
    "sglang_profile_workload": {"input_len": 16, "output_len": 192},
    "sglang_profile_seconds": 3,
    "sglang_profile_window_seconds": 0.5,
    "sglang_profile_log_interval": 5,
    "sglang_profile_trace_concurrency": 4,
    "sglang_profile_trace_steps": 10,
}


@pytest.fixture(scope="module")
def profiled(deployed, demo):
    demo.run("playbooks/start.yml").require_success()  # whatever the tests before left
    (demo.root / "instances/main/profile/on").touch()  # as an interrupted profile leaves it
    run = demo.run("playbooks/profile.yml", **ASKED).require_success()
    figures = json.loads((demo.results / "profile/tested/profile.json").read_text())
    (arm,) = figures["hosts"]["localhost"]["arms"]
    return run, arm


def test_shares_sum_up_and_the_profilers_own_cost_has_an_interval(profiled):
    _, arm = profiled
    assert [level["status"] for level in arm["levels"]] == ["completed", "completed"]
    for level in arm["levels"]:
        assert sum(phase["share"] for phase in level["phases"]["phases"].values()) == pytest.approx(1)
        assert level["phases"]["mean_batch"] == level["concurrency"]
        assert level["tok_s"] > 0
        assert 0 < level["overhead"]["low"] <= level["overhead"]["on_over_off"] <= level["overhead"]["high"]


def test_the_trace_is_summed_up_on_the_host_and_stays_there(profiled, demo):
    _, arm = profiled
    (traced,) = [level for level in arm["levels"] if level["trace"]]
    assert traced["concurrency"] == 4
    assert traced["trace"]["steps"] >= 2
    assert sum(part["share"] for part in traced["trace"]["categories"].values()) == pytest.approx(1)
    assert list((demo.root / "profiles/tested/eagle3/traces/c4").glob("*.trace.json.gz"))
    assert list((demo.results / "profile/tested").rglob("*.trace.json.gz")) == []


def test_a_table_and_a_page_show_it(profiled, demo):
    run, _ = profiled
    assert "Where a decode cycle goes" in run.output
    assert "eagle3" in (demo.results / "profile.html").read_text()


def test_the_former_state_is_back_and_the_profiler_is_off(profiled, demo):
    assert not (demo.root / "instances/main/profile/on").exists()
    assert not (demo.root / "instances/main/profile/trace").exists()
    with urllib.request.urlopen(f"http://127.0.0.1:{demo.port}/health", timeout=30) as answer:
        assert answer.status == 200
    assert "decode-log-interval" not in (demo.root / "instances/main/launch").read_text()
    assert demo.run("playbooks/start.yml").require_success().changed == {}


def test_a_check_says_what_it_would_do_and_touches_nothing(profiled, demo):
    before = (demo.root / "instances/main/instance.json").read_bytes()
    run = demo.run("playbooks/profile.yml", "--check", **(ASKED | {"sglang_profile_run_id": "checked"})).require_success()
    assert "sglang_profile" in run.calls["localhost"]
    assert (demo.root / "instances/main/instance.json").read_bytes() == before
    assert not (demo.root / "profiles/checked").exists()


def test_arms_that_do_not_exist_are_refused_before_the_server_is_touched(profiled, demo):
    before = (demo.root / "instances/main/instance.json").read_bytes()
    run = demo.run("playbooks/profile.yml", sglang_profile_arms=["eagle"])
    assert run.status != 0
    assert "did you mean 'eagle3'" in run.output
    assert (demo.root / "instances/main/instance.json").read_bytes() == before
