"""The summary of a provisioning run names every host once, whatever became of it, and its reason."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ansible.plugins.callback  # noqa: F401  it looks at the machine when it is imported
import pytest

from aerie_controller import terminal
from aerie_controller.fleet import Fleet
from aerie_controller.terminal_reports import provisioning

PLAN = {"order": ["c", "a", "b", "d", "e"], "canaries": ["c"], "batch": 2}
OK = {"status": "ok", "task": None, "reason": None, "reboot": {"required": False, "done": False, "reason": None}}


def run(ends: dict, *, begun: str = "cabde", check: bool = False) -> Fleet:
    fleet = Fleet.of(PLAN, check)
    for host in begun:
        fleet.begin(host)
    for host, outcome in ends.items():
        fleet.end(host, outcome)
    return fleet


def lines_of(fleet: Fleet) -> list[str]:
    return terminal.render(provisioning.parts(fleet), 100).splitlines()


def test_hosts_come_in_the_order_of_the_run_with_their_batches():
    assert {host: record.batch for host, record in Fleet.of(PLAN, False).hosts.items()} == {"c": 0, "a": 1, "b": 1, "d": 2, "e": 2}


def test_without_a_canary_batches_begin_at_once():
    assert [record.batch for record in Fleet.of(PLAN | {"canaries": []}, False).hosts.values()] == [0, 0, 1, 1, 2]


def test_a_failed_host_is_told_with_its_task_and_reason_and_others_are_not_touched_by_it():
    fleet = run(dict.fromkeys("cade", OK) | {"b": {"status": "failed", "task": "Bring the models", "reason": "disk\nfull"}})
    fleet.close()
    assert [record.status for record in fleet.hosts.values()] == ["ok", "ok", "failed", "ok", "ok"]
    assert lines_of(fleet)[-1] == "b: failed at “Bring the models”: disk full"


def test_hosts_behind_a_failed_canary_are_told_as_not_begun_and_why():
    fleet = run({"c": {"status": "failed", "task": "Tune the host", "reason": "no"}}, begun="c")
    fleet.close()
    assert fleet.content()["hosts"]["e"]["status"] == "not begun"
    assert lines_of(fleet)[-1] == "e: not begun: a canary failed: c failed"


def test_a_host_that_was_lost_on_the_way_is_unreachable():
    fleet = run(dict.fromkeys("cabd", OK))
    fleet.lose("e", "Install", "Connection timed out")
    fleet.close()
    assert lines_of(fleet)[-1] == "e: unreachable at “Install”: Connection timed out"


def test_a_host_that_was_in_the_middle_of_its_work_when_the_run_ended_is_not_told_as_ready():
    fleet = run({"c": OK})
    fleet.close()
    assert fleet.hosts["a"].status == "failed"
    assert fleet.hosts["a"].reason == "the run ended before this host was done"


def test_a_reboot_that_is_due_is_told_with_its_reason_and_one_that_was_done_as_done():
    due = {"required": True, "done": False, "reason": "driver 580.105.08 is not loaded"}
    fleet = run({"c": OK | {"reboot": due}, "a": OK | {"reboot": due | {"done": True}}, "b": OK, "d": OK, "e": OK})
    fleet.close()
    table = lines_of(fleet)
    assert "required" in table[1] and "done" in table[2]
    assert table[-1] == "c: reboot required: driver 580.105.08 is not loaded"


@pytest.mark.parametrize(("check", "cell"), [(False, "1"), (True, "1 would")])
def test_changes_are_counted_and_in_check_mode_foreseen(check, cell):
    fleet = run(dict.fromkeys("cabde", OK), check=check)
    fleet.change("b", "Tune the host")
    fleet.change("somebody else", "Tune the host")
    assert cell in next(line for line in lines_of(fleet) if line.startswith("b "))
    assert fleet.content()["hosts"]["b"]["changed"] == ["Tune the host"]


def test_no_name_or_reason_can_draw_on_the_terminal():
    fleet = run({"c": {"status": "failed", "task": "x", "reason": "\x1b[2Jred"}}, begun="c")
    fleet.close()
    assert "\x1b" not in "\n".join(lines_of(fleet))
    assert "\x1b" not in json.dumps(fleet.content(), ensure_ascii=False)


CALLBACK = Path(__file__).parents[2] / "plugins/callback/run_summary.py"


@pytest.fixture
def callback(monkeypatch):
    """The callback plugin run_summary, as Ansible loads it."""
    spec = importlib.util.spec_from_file_location("run_summary_callback", CALLBACK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("ansible.context.CLIARGS", {"check": False})
    return module.CallbackModule()


def result_of(host: str, task: str = "Install", **content: Any) -> SimpleNamespace:
    named = SimpleNamespace(get_name=lambda: task, action="set_fact", ignore_unreachable=False)
    return SimpleNamespace(result=content, host=SimpleNamespace(get_name=lambda: host), task=named)


def test_the_callback_prints_the_fleet_last_and_keeps_it_as_json(callback, tmp_path, capfd):
    play = SimpleNamespace(vars={"__provision_play": "work"})
    plan = {"order": ["a", "b"], "canaries": [], "batch": 2, "results": str(tmp_path)}
    callback.v2_playbook_on_play_start(play)
    callback.v2_runner_on_ok(result_of("a", ansible_facts={"__provision_plan": plan}))
    for host in plan["order"]:
        callback.v2_runner_on_start(SimpleNamespace(get_name=lambda host=host: host), None)
    callback.v2_runner_on_ok(result_of("a", changed=True, ansible_facts={"__provision_outcome": OK}))
    callback.v2_runner_on_unreachable(result_of("b", msg="no \x1b[31mroute"))
    callback.v2_playbook_on_stats(None)
    lines = capfd.readouterr().out.splitlines()
    (path,) = tmp_path.glob("*.json")
    assert lines[-2:] == ["b: unreachable at “Install”: no route", f"summary: {path}"]
    assert [line.split()[:3] for line in lines[-4:-2]] == [["a", "0", "ok"], ["b", "0", "unreachable"]]
    assert json.loads(path.read_text())["hosts"]["a"]["changed"] == ["Install"]
    callback.v2_playbook_on_stats(None)
    assert capfd.readouterr().out == ""
