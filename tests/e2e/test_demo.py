"""The demo keeps its promise on this machine: one command serves, measures and reports; again, it changes nothing; stop stops."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request

import pytest
import yaml

from ports import free_port
from runs import PROJECT, processes_of, snapshot

MODULE_CALLS = 25
LOOKED_AT = {"gpu_host_info", "model_identity", "sglang_environment", "sglang_release", "source_patch", "sglang_server"}


def generate(port: int) -> str:
    body = json.dumps({"text": "import os", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["text"]


@pytest.fixture(scope="module")
def second(deployed, demo):
    return demo.run("deploy_eagle3.yml", "--skip-tags", "benchmark").require_success()


def test_one_command_measures_every_cell_and_reports(deployed, demo):
    outcomes = [json.loads(path.read_text())["status"] for path in demo.results.glob("smoke/*/localhost/*/outcome.json")]
    assert outcomes == ["completed"] * 6  # two arms at two levels, and the profile of one arm at both
    page = (demo.results / "report.html").read_text()
    assert "eagle3" in page
    assert "baseline" in page


def test_the_server_generates(deployed, demo):
    assert generate(demo.port)


def test_a_second_run_changes_nothing_with_few_module_calls(second):
    assert second.changed == {}
    assert second.stats["localhost"]["changed"] == 0
    assert set(second.calls["localhost"]) >= LOOKED_AT, "nothing may be unchanged because it was left out"
    assert len(second.calls["localhost"]) <= MODULE_CALLS, json.dumps(second.calls, indent=1)


def test_a_check_foresees_no_change(second, demo):
    run = demo.run("deploy_eagle3.yml", "--check", "--diff", "--skip-tags", "benchmark").require_success()
    assert run.changed == {}


def test_a_check_of_a_bare_host_foresees_everything_and_makes_nothing(deployed, demo, tmp_path):
    root, results = tmp_path / "bare", tmp_path / "results"
    elsewhere = {
        "aerie_root": str(root),
        "aerie_results": str(results),
        "sglang_server_instances": {"main": {"arm": "eagle3", "model": "target", "port": free_port()}},
    }
    run = demo.run("deploy_eagle3.yml", "--check", "--diff", **elsewhere).require_success()
    assert {"sglang_environment", "sglang_release", "sglang_server", "model_identity"} <= set(run.calls["localhost"])
    assert run.stats["localhost"]["changed"] > 0
    assert [path for path in (root, results) if path.exists()] == []


def test_the_ledger_rebuilt_from_raw_files_is_the_same(deployed, demo, tmp_path):
    """Raw is truth: the ledger holds nothing that the files of the cells don't."""
    copy = tmp_path / "results"
    shutil.copytree(demo.results, copy)
    ledger = copy / "ledger.sqlite"
    before = ledger_rows(ledger)
    assert sum("eagle3" in row or "baseline" in row for row in before) >= 6
    records = {path: path.read_bytes() for path in copy.glob("smoke/*/*/*/record.json")}
    assert len(records) == 6
    ledger.unlink()
    for record in records:
        record.unlink()
    demo.run("playbooks/report.yml", aerie_results=str(copy)).require_success()
    assert {path: path.read_bytes() for path in records} == records
    assert ledger_rows(ledger) == before


def ledger_rows(ledger) -> list[str]:
    program = """
import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as ledger:
    tables = [name for (name,) in ledger.execute("select name from sqlite_master where type = 'table' order by name")]
    for table in tables:
        for row in ledger.execute(f"select * from {table} order by 1"):
            print(table, row)
"""
    argv = [sys.executable, "-c", program, str(ledger)]
    return sorted(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.mark.long
def test_a_server_that_does_not_start_is_the_outcome_of_its_cells_and_not_the_end(deployed, demo, tmp_path):
    arms = yaml.safe_load((PROJECT / "inventory/demo/group_vars/gpu_hosts.yml").read_text())["sglang_server_arms"]
    arms["baseline"]["environment"] = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "no_such_package"}
    run = demo.run("playbooks/benchmark.yml", sglang_server_arms=arms, aerie_results=str(tmp_path)).require_success()
    newest = max(tmp_path.glob("smoke/*"))  # collecting brings the host's earlier runs too
    records = {path.parent.name: json.loads(path.read_text()) for path in newest.glob("localhost/*/record.json")}
    failed = {name: record["reason"] for name, record in records.items() if record["status"] == "failed"}
    assert sorted(failed) == ["baseline-c1-r1", "baseline-c4-r1"]
    assert all("did not start" in reason and "no_such_package" in reason for reason in failed.values())
    assert len(records) == 6
    assert "baseline-c1-r1" in run.output


def test_status_tells_every_patched_file_and_changes_nothing(deployed, demo):
    before = snapshot(demo.root / "originals")
    run = demo.run("playbooks/status.yml").require_success()
    assert re.search(r"eagle_worker_v2\.py +patched by phase_profiler +\d+ +kept", run.output)
    assert run.changed == {}
    assert run.calls["localhost"].count("source_patch_info") == 1
    assert snapshot(demo.root / "originals") == before


def test_a_start_with_an_edited_patched_file_is_refused_and_told_by_status_until_it_is_put_back(deployed, demo):
    demo.run("playbooks/start.yml").require_success()
    (worker,) = (demo.root / "current").resolve().glob("lib/*/site-packages/sglang/srt/speculative/eagle_worker_v2.py")
    ours = worker.read_bytes()
    try:
        worker.write_bytes(ours + b"# edited\n")
        refused = demo.run("playbooks/start.yml")
        assert refused.status != 0
        assert "is not as it was patched" in refused.output
        assert "playbooks/patch.yml" in refused.output
        assert generate(demo.port), "a refusal touches no server"
        assert "changed by somebody" in demo.run("playbooks/status.yml").require_success().output
    finally:
        worker.write_bytes(ours)
    assert demo.run("playbooks/start.yml").require_success().changed == {}


def test_prune_frees_what_nothing_needs_once_and_leaves_the_server_and_its_release(deployed, demo):
    half_made = demo.root / "releases/0.5.23-000000000000"
    (half_made / "bin").mkdir(parents=True)
    foreseen = demo.run("playbooks/prune.yml", "--check").require_success()
    assert half_made.exists()
    assert "half made" in foreseen.output
    assert demo.run("playbooks/prune.yml").require_success().changed != {}
    assert not half_made.exists()
    assert demo.run("playbooks/prune.yml").require_success().changed == {}
    assert generate(demo.port)


def test_stop_leaves_no_process_and_start_brings_the_server_back(deployed, demo):
    demo.run("playbooks/start.yml").require_success()
    assert generate(demo.port)
    demo.run("playbooks/stop.yml").require_success()
    assert processes_of(demo.root) == []
