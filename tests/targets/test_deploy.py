"""One command takes two bare hosts over SSH to patched, measured servers that systemd owns."""

from __future__ import annotations

import json
import time

import pytest

MODULE_CALLS = 25
LOOKED_AT = {"gpu_host_info", "model_identity", "sglang_environment", "sglang_release", "source_patch", "sglang_server"}
ROOT = "/opt/aerie"
PORT = 30000
GENERATE = f"""
import json, urllib.request
body = json.dumps({{"text": "import os", "sampling_params": {{"max_new_tokens": 8, "temperature": 0}}}}).encode()
request = urllib.request.Request("http://127.0.0.1:{PORT}/generate", body, {{"Content-Type": "application/json"}})
print(json.load(urllib.request.urlopen(request, timeout=60))["meta_info"]["completion_tokens"])
"""


@pytest.fixture(scope="module")
def first(deploy):
    return deploy("deploy_eagle3.yml").require_success()


@pytest.fixture(scope="module")
def second(first, deploy):
    return deploy("deploy_eagle3.yml", "--skip-tags", "benchmark").require_success()


def test_one_command_deploys_and_measures_both_hosts(first, targets):
    assert {host: numbers["failures"] + numbers["unreachable"] for host, numbers in first.stats.items()} == {"gpu1": 0, "gpu2": 0}
    outcomes = {
        host.name: [json.loads(path.read_text())["status"] for path in targets.results.glob(f"smoke/*/{host.name}/*/outcome.json")]
        for host in targets.hosts
    }
    # two arms at two levels, and the profile of one arm at both
    assert outcomes == {"gpu1": ["completed"] * 6, "gpu2": ["completed"] * 6}
    assert (targets.results / "report.html").stat().st_size > 0


def test_a_second_run_changes_nothing(second):
    assert second.changed == {}
    assert [numbers["changed"] for numbers in second.stats.values()] == [0, 0]
    for host in ("gpu1", "gpu2"):  # and it was looked: nothing is unchanged because it was left out
        assert set(second.calls[host]) >= LOOKED_AT


def test_a_second_run_sends_few_modules_to_a_host(second):
    counts = {host: len(modules) for host, modules in second.calls.items() if host.startswith("gpu")}
    assert set(counts) == {"gpu1", "gpu2"}
    assert max(counts.values()) <= MODULE_CALLS, json.dumps(second.calls, indent=1)


def test_a_check_of_a_deployed_host_foresees_no_change(second, deploy):
    run = deploy("deploy_eagle3.yml", "--check", "--diff", "--skip-tags", "benchmark").require_success()
    assert run.changed == {}


def test_the_server_is_a_unit_that_runs_now_and_at_boot(second, targets):
    for host in targets.hosts:
        assert targets.on(host, "systemctl is-active sglang@main") == "active"
        assert targets.on(host, "systemctl is-enabled sglang@main") == "enabled"


def test_systemd_accepts_the_unit(second, targets):
    for host in targets.hosts:
        done = targets.fleet.ssh(host, "systemd-analyze verify --man=no sglang@main.service")
        assert [row for row in (done.stdout + done.stderr).splitlines() if "sglang@" in row] == []


def test_the_server_runs_the_patched_release(second, targets):
    modules = ("sglang", "sglang.srt.speculative.aerie_phase_profiler")
    find = f"import importlib.util as u; [print(u.find_spec(name).origin) for name in {modules}]"
    for host in targets.hosts:
        release = targets.on(host, f"readlink -f {ROOT}/current")
        places = targets.on(host, f'{release}/bin/python -c "{find}"').splitlines()
        assert [place for place in places if not place.startswith(f"{release}/")] == []
        assert json.loads(targets.on(host, f"cat {release}/release.json"))["verified"] is True
        pid = targets.on(host, "systemctl show --property MainPID --value sglang@main")
        argv = targets.on(host, f"tr '\\0' ' ' < /proc/{pid}/cmdline")
        assert release in argv or f"{ROOT}/current" in argv


def test_a_profiled_cell_has_phases_that_sum_to_its_cycles(first, targets):
    for host in targets.hosts:
        files = list(targets.results.glob(f"smoke/*/{host.name}/*/phases.jsonl"))
        cycles = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        assert cycles, f"no cycle was profiled on {host.name}"
        assert all(sum(cycle["phases"].values()) == pytest.approx(cycle["cycle_ms"], abs=0.01) for cycle in cycles)


def test_a_reboot_brings_the_server_back(second, targets):
    host = targets.hosts[1]
    before = targets.on(host, "systemctl show --property UserspaceTimestampMonotonic --value")
    targets.fleet.ssh(host, "systemctl reboot")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            if targets.on(host, "systemctl show --property UserspaceTimestampMonotonic --value") != before:
                assert targets.python(host, GENERATE) == "8"
                return
        except Exception:  # not up yet: asked again until the deadline
            time.sleep(2)
    pytest.fail(f"{host.name} served nothing 240 s after its reboot: {targets.on(host, 'journalctl -u sglang@main -n 40 --no-pager')}")


@pytest.mark.long
def test_stop_leaves_no_process_and_start_brings_the_server_back(second, targets, deploy):
    deploy("playbooks/stop.yml").require_success()
    for host in targets.hosts:
        assert targets.processes(host) == []
        assert targets.fleet.ssh(host, "systemctl is-active sglang@main").stdout.strip() != "active"
    deploy("playbooks/start.yml").require_success()
    assert [targets.python(host, GENERATE) for host in targets.hosts] == ["8", "8"]
