"""Who uses a tree that is to be patched in place is found among real processes; our own servers are not foreign."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.patching import tree_users
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.testing import patch_module_args

import tree_users_info

SLEEP = "import time; time.sleep(600)"
Start = Callable[..., int]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "checkout/python"
    (tree / "sglang").mkdir(parents=True)
    return tree


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    return HostPaths(tmp_path / "root")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that sleeps, and wait until it is what it was started as."""
    started: list[subprocess.Popen[bytes]] = []

    def call(*argv: str, cwd: Path | str = "/", executable: str | None = None, **environment: str) -> int:
        process = subprocess.Popen(argv, cwd=cwd, executable=executable, env=environment)
        started.append(process)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0] != argv[0].encode() and time.monotonic() < deadline:
            time.sleep(0.01)
        return process.pid

    yield call
    for process in started:
        process.kill()
        process.wait()


def found(paths: HostPaths, tree: Path, python: Path | None = None, instances: tuple[str, ...] = ()) -> dict[int, str]:
    return {user.process.pid: user.why for user in tree_users.foreign(paths, tree, python, instances)}


def test_a_working_directory_a_command_line_and_a_pythonpath_in_the_tree_count(paths, tree, start):
    works = start(sys.executable, "-c", SLEEP, cwd=tree)
    names = start(sys.executable, "-c", SLEEP, f"--model={tree}/sglang/x.py")
    imports = start(sys.executable, "-c", SLEEP, PYTHONPATH=f"{tree.parents[1]}/elsewhere:{tree}")
    other = start(sys.executable, "-c", SLEEP, PYTHONPATH=str(tree.parent / "python-other"))
    users = found(paths, tree)
    assert users[works] == f"works in {tree}"
    assert users[names] == f"has {tree}/sglang/x.py on its command line"
    assert users[imports] == f"has {tree} in its PYTHONPATH"
    assert other not in users


def test_a_link_to_the_tree_is_the_tree(paths, tree, start, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tree)
    assert start(sys.executable, "-c", SLEEP, PYTHONPATH=str(link)) in found(paths, tree)


def test_only_python_runs_its_code(paths, tree, start):
    sleep = shutil.which("sleep")
    assert start("sleep", "600", executable=sleep, cwd=tree) not in found(paths, tree)


def test_the_adopted_interpreter_counts_when_it_runs_sglang_and_another_environment_of_it_does_not(paths, tree, start, tmp_path):
    python = Path(sys.executable)
    runs = start(str(python), "-c", SLEEP, "-m", "sglang.launch_server")
    idle = start(str(python), "-c", SLEEP)
    renamed = start("sglang::scheduler", "-c", SLEEP, executable=str(python.resolve()))
    other = tmp_path / "other/bin/python"
    other.parent.mkdir(parents=True)
    other.symlink_to(python.resolve())
    elsewhere = start(str(other), "-c", SLEEP, "-m", "sglang.launch_server")
    users = found(paths, tree, python)
    assert users[runs] == users[renamed] == f"runs SGLang with {python}"
    assert idle not in users
    assert elsewhere not in users
    assert not {runs, renamed} & set(found(paths, tree))


def test_a_process_that_sglang_renamed_is_its_parents_as_long_as_that_lives(paths, tree, start, tmp_path):
    other = tmp_path / "other/bin/python"
    other.parent.mkdir(parents=True)
    other.symlink_to(Path(sys.executable).resolve())
    child = f"subprocess.Popen(['sglang::scheduler', '-c', {SLEEP!r}], executable={str(Path(sys.executable).resolve())!r})"
    parent = start(str(other), "-c", f"import subprocess, time; {child}; time.sleep(600)", "-m", "sglang.launch_server")
    deadline = time.monotonic() + 10
    children: list[int] = []
    while not children and time.monotonic() < deadline:
        children = [one.pid for one in processes.scan() if one.ppid == parent and one.argv[:1] == ("sglang::scheduler",)]
    (scheduler,) = children
    try:
        assert not {parent, scheduler} & set(found(paths, tree, Path(sys.executable)))
        assert {parent, scheduler} <= set(found(paths, tree, other))
    finally:
        os.kill(scheduler, signal.SIGKILL)


def test_servers_that_will_be_stopped_and_what_started_us_are_not_foreign(paths, tree, start):
    ours = start(sys.executable, "-c", SLEEP, cwd=tree, AERIE_INSTANCE="main", AERIE_ROOT=str(paths.root))
    theirs = start(sys.executable, "-c", SLEEP, cwd=tree, AERIE_INSTANCE="main", AERIE_ROOT="/another/root")
    users = found(paths, tree, instances=("main",))
    assert ours not in users
    assert theirs in users
    assert ours in found(paths, tree), "an instance that nobody named is not stopped, so it counts"


def test_what_started_us_is_not_foreign(paths, tree, tmp_path, monkeypatch):
    ours, stranger = 7_000_001, 7_000_002  # beyond the highest process id that Linux gives
    for pid, parent in ((os.getpid(), ours), (ours, 1), (stranger, 1)):
        process = tmp_path / f"proc/{pid}"
        process.mkdir(parents=True)
        (process / "stat").write_text(f"{pid} (python) S {parent} 0")
        (process / "cmdline").write_text("python\0run.py\0")
        (process / "cwd").symlink_to(tree)
    monkeypatch.setattr(processes, "machine", processes.Machine(tmp_path / "proc"))
    assert set(found(paths, tree)) == {stranger}


def test_the_module_names_each_process_and_what_to_do(paths, tree, start, capsys):
    pid = start(sys.executable, "-c", SLEEP, cwd=tree)
    with patch_module_args({"root": str(paths.root), "path": str(tree)}), pytest.raises(SystemExit):
        tree_users_info.main()
    result = json.loads(capsys.readouterr().out)
    assert [one["pid"] for one in result["foreign"]] == [pid]
    assert not result.get("failed")
    assert f"process {pid} ({sys.executable}" in result["msg"]
    assert "Nothing was touched. Stop that" in result["msg"]
