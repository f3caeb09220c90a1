"""Work that was started goes on without whoever started it, and tells how far it is and how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils.aerie import jobs, lease, processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json

from aerie_controller import detached


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


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the pid of a job that ended without a result."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("written", ["{pid}", "{pid} 1 {boot}", "{pid} {started} another-boot", "", "x"])
def test_a_job_whose_pid_is_a_strangers_does_not_run_and_has_no_process(directory, stranger, written):
    identity = processes.identify(stranger.pid)
    text = written.format(pid=stranger.pid, started=identity.started, boot=identity.boot)
    (directory / jobs.PID).write_text(text)
    assert jobs.process(directory) is None
    assert not jobs.is_running(directory)
    assert "ended without a result" in jobs.read(directory)["msg"]
    is_unknown = written in ("{pid}", "", "x")  # the module is asked again, which looks closer
    assert state(directory)["running"] is is_unknown


def test_a_job_of_an_older_version_is_one_while_it_is_a_module_of_ansible(directory, tmp_path):
    script = tmp_path / "AnsiballZ_sglang_server.py"
    script.write_text("import time; time.sleep(120)")
    with subprocess.Popen([sys.executable, str(script)]) as module:
        (directory / jobs.PID).write_text(str(module.pid))
        assert jobs.is_running(directory)
        module.kill()


def state(directory: Path) -> dict:
    """Return what the controller's look at a job says."""
    done = subprocess.run([sys.executable, "-c", detached.READ_JOB, str(directory)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_controller_sees_that_a_job_runs_until_it_ends(directory):
    go_on = directory / "go-on"

    def work(progress: jobs.Progress) -> dict:
        while not go_on.exists():
            time.sleep(0.01)
        return {}

    jobs.start(directory, work)
    assert state(directory)["running"] is True
    go_on.touch()
    finished(directory)
    deadline = time.monotonic() + 20
    while state(directory)["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_job_keeps_the_lease_that_its_module_was_given(directory, tmp_path):
    path, go_on = tmp_path / "lease.json", directory / "go-on"
    owner = lease.Owner("1.1", "ops", "here")
    lease.acquire(path, owner, seconds=1)
    lease.renew_if_given(path, {"run": "1.1", "user": "ops", "controller": "here"})

    def work(progress: jobs.Progress) -> dict:
        while not go_on.exists():
            time.sleep(0.01)
        return {}

    jobs.start(directory, work)
    assert lease.leave() is None, "the module itself is done"
    first, deadline = read_json(path)["expires"], time.monotonic() + 20
    while read_json(path)["expires"] < first + 1.5:
        assert time.monotonic() < deadline, "the job did not renew it"
        time.sleep(0.05)
    go_on.touch()
    assert finished(directory)["ok"]
