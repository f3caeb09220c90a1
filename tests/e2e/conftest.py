"""The demo's host in .cache/e2e: environments are kept between runs of the tests, everything else is made anew."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from runs import HOST_OF_TESTS, Run, playbook, processes_of

KEPT = {"environments", "packages"}  # addressed by what they were made from, so an old one is as good as a new one


@dataclass(frozen=True)
class Demo:
    root: Path
    results: Path
    port: int
    variables: dict[str, Any]
    scratch: Path

    def run(self, *arguments: str, **more: Any) -> Run:
        return playbook(*arguments, variables=self.variables | more, scratch=self.scratch)


@pytest.fixture(scope="session", autouse=True)
def environments(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All hosts of these tests share their environments: whichever worker comes first makes what is missing, and the others wait."""
    HOST_OF_TESTS.mkdir(parents=True, exist_ok=True)
    with HOST_OF_TESTS.with_name("environments.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(HOST_OF_TESTS.glob("environments/cpu-*/bin/python")):
            variables = {
                "aerie_root": str(HOST_OF_TESTS),
                "aerie_results": str(HOST_OF_TESTS.with_name("results")),
                "sglang_server_instances": {},
            }
            playbook("playbooks/install.yml", variables=variables, scratch=tmp_path_factory.mktemp("runs")).require_success()


@pytest.fixture(scope="session")
def torch_python() -> Path:
    """A Python with SGLang's torch, for what needs no server."""
    # by another way than that host's own, so that tests of the host, which may run at the same time, don't take it for a process of theirs
    beside = HOST_OF_TESTS.with_name("python")
    if not beside.is_symlink():
        beside.symlink_to(HOST_OF_TESTS / "environments")
    return max(beside.glob("cpu-*/bin/python"))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    root, results = HOST_OF_TESTS, HOST_OF_TESTS.with_name("results")
    port = free_port()
    variables = {
        "aerie_root": str(root),
        "aerie_results": str(results),
        "sglang_benchmark_experiment": "smoke",
        "sglang_server_instances": {"main": {"arm": "eagle3", "model": "target", "port": port}},
    }
    made = Demo(root, results, port, variables, tmp_path_factory.mktemp("runs"))
    if processes_of(root):  # an earlier run of the tests was cut off
        made.run("playbooks/stop.yml", aerie_lease_break=True)
    for path in root.glob("*"):
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(results, ignore_errors=True)
    yield made
    if processes_of(root):
        made.run("playbooks/stop.yml", aerie_lease_break=True)


@pytest.fixture(scope="session")
def deployed(demo: Demo) -> Run:
    """The first run of everything."""
    return demo.run("deploy_eagle3.yml").require_success()
