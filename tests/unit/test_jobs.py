"""Work that was started goes on without whoever started it, and tells how far it is and how it ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return jobs.new_directory(tmp_path / "jobs", "test")


def finished(directory: Path) -> dict:
    deadline = time.monotonic() + 20
    while (result := jobs.read(directory)) is None:
        assert time.monotonic() < deadline, "the job did not end"
        time.sleep(0.02)
    return result


def test_a_job_runs_in_a_session_of_its_own_and_returns_its_result(directory):
    pid = jobs.start(directory, lambda progress: {"session": os.getsid(0), "pid": os.getpid()})
    result = finished(directory)
    assert result["ok"] and result["pid"] == pid
    assert result["session"] != os.getsid(0)


def test_progress_can_be_read_while_the_job_works(directory):
    go_on = directory / "go-on"

    def work(progress: jobs.Progress) -> dict:
        progress.update("half", done=1, total=2)
        while not go_on.exists():
            time.sleep(0.01)
        return {}

    jobs.start(directory, work)
    while not (directory / jobs.PROGRESS).exists():
        time.sleep(0.01)
    told = read_json(directory / jobs.PROGRESS)
    assert (told["message"], told["done"], told["total"]) == ("half", 1, 2)
    assert jobs.is_running(directory) and jobs.read(directory) is None
    go_on.touch()
    assert finished(directory)["ok"]


@pytest.mark.parametrize(("error", "message"), [(AerieError("too little disk"), "too little disk"), (ValueError("x"), "ValueError: x")])
def test_a_failing_job_says_why(directory, error, message):
    def work(_: jobs.Progress) -> dict:
        raise error

    jobs.start(directory, work)
    result = finished(directory)
    assert not result["ok"] and result["msg"] == message


def test_a_killed_job_is_a_failure_and_not_a_wait_for_ever(directory):
    pid = jobs.start(directory, lambda _: time.sleep(60) or {})
    os.kill(pid, signal.SIGKILL)
    result = finished(directory)
    assert not result["ok"] and "without a result" in result["msg"]
