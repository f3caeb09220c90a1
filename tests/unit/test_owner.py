"""A run of Ansible is told from any other, on whichever machine that is, and only where it runs is known whether it has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aerie_controller import owner


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_place", lambda: "here")


def test_a_run_is_the_same_for_all_its_tasks_and_lives():
    run = owner.owner()["run"]
    assert run == owner.owner()["run"]
    assert not owner.is_dead(run)


def test_a_run_that_was_started_here_and_ended_is_dead():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run = f"{process.pid}.{owner._start_ticks(process.pid)}.here"
        assert not owner.is_dead(run)
        process.communicate()
    assert owner.is_dead(run)


@pytest.mark.parametrize("run", ["999999999.1.elsewhere", "999999999.1", "x.1.here", "", "1.2.3.here"])
def test_nothing_is_known_of_runs_elsewhere_though_the_host_has_the_same_name(run):
    assert not owner.is_dead(run)


def test_two_machines_of_one_name_have_different_runs_for_one_pid(monkeypatch):
    first = owner.owner()
    monkeypatch.setattr(owner, "_place", lambda: "another boot")
    second = owner.owner()
    assert first["controller"] == second["controller"]
    assert first["run"] != second["run"]
