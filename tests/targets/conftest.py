"""Two booted hosts, and the wheels that they install, served from the controller's address on their network."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from booted_hosts import CONTROLLER, USER, BootedHosts, Host
from runs import PROCESSES_OF, PROJECT, playbook

CACHE = PROJECT / ".cache"
ROOT_ON_HOSTS = Path("/opt/aerie")


@dataclass(frozen=True)
class Targets:
    """Two hosts with an inventory of them. `gpu1` is logged in to as root, `gpu2` as a user who becomes root by sudo."""

    fleet: BootedHosts
    hosts: list[Host]
    inventory: Path
    results: Path

    def on(self, host: Host, *command: str) -> str:
        """What the command prints on the host, which must succeed."""
        done = self.fleet.ssh(host, *command)
        assert done.returncode == 0, f"{host.name}: {' '.join(command)}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def python(self, host: Host, program: str, *arguments: str) -> str:
        """What a program for the host's own Python prints."""
        argv = ["ssh", "-F", str(self.fleet.ssh_config), host.address, "python3", "-", *arguments]
        return subprocess.run(argv, input=program, capture_output=True, text=True, check=True, timeout=120).stdout.strip()

    def processes(self, host: Host) -> list[str]:
        """The host's processes that belong to Aerie, each as "pid argv"."""
        lines = self.python(host, PROCESSES_OF, str(ROOT_ON_HOSTS)).splitlines()
        return [line for line in lines if f"python3 - {ROOT_ON_HOSTS}" not in line]


def download_wheels(directory: Path) -> None:
    """All that a CPU host installs, once for each state of the locks."""
    catalog = yaml.safe_load((PROJECT / "versions.yml").read_text())
    version = str(catalog["default"]["cpu"])
    build = catalog["versions"][version]["builds"]["cpu"]
    locks = [PROJECT / build["lock"], PROJECT / catalog["supervisor"]["lock"]]
    unlocked = [f"sglang=={version}"] + ([] if build["torch_in_lock"] else [f"torch=={build['torch']}"])
    state = hashlib.sha256("\n".join([*unlocked, *(lock.read_text() for lock in locks)]).encode()).hexdigest()[:12]
    if (directory / f".complete-{state}").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory)]
    pip += ["--only-binary=:all:", "--python-version=3.11"]  # the hosts' Python, whatever the controller's
    for wanted in (["-r", str(locks[0])], ["-r", str(locks[1])], unlocked):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            pytest.fail(f"pip could not download the hosts' wheels ({' '.join(wanted)}):\n{done.stderr[-3000:]}")
    (directory / f".complete-{state}").touch()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def booted() -> Iterator[tuple[BootedHosts, list[Host]]]:
    """The hosts themselves. A machine that can't boot them fails the tests and says why: nothing is skipped."""
    fleet = BootedHosts(Path(os.environ.get("AERIE_TARGETS", CACHE / "targets")))
    hosts = fleet.up(2, owner=os.getpid())
    yield fleet, hosts
    fleet.down()


@pytest.fixture(scope="session")
def wheels(booted: tuple[BootedHosts, list[Host]]) -> Iterator[str]:
    """URL of a page of all wheels that a host needs, reachable from the hosts."""
    directory = CACHE / "wheels"
    download_wheels(directory)
    server = ThreadingHTTPServer((CONTROLLER, 0), functools.partial(QuietHandler, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{CONTROLLER}:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def targets(booted: tuple[BootedHosts, list[Host]], wheels: str, tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """The demo's variables for two remote hosts instead of this machine."""
    fleet, hosts = booted
    directory = tmp_path_factory.mktemp("targets")
    results = directory / "results"
    demo = yaml.safe_load((PROJECT / "inventory/demo/group_vars/gpu_hosts.yml").read_text())
    ours = {
        "aerie_root": str(ROOT_ON_HOSTS),
        "aerie_results": str(results),
        "sglang_release_python": "/usr/bin/python3",
        "sglang_release_wheels": wheels,
        "sglang_benchmark_experiment": "smoke",
        "ansible_ssh_common_args": f"-F '{fleet.ssh_config}'",
    }
    text = yaml.safe_dump(demo | ours, width=10**6)
    variables = yaml.safe_load(text.replace("{{ inventory_dir | dirname | dirname }}", str(PROJECT)))
    logins = [{"ansible_user": "root"}, {"ansible_user": USER, "ansible_become": True}]
    addressed = {host.name: {"ansible_host": host.address} | login for host, login in zip(hosts, logins, strict=True)}
    inventory = directory / "inventory"
    inventory.mkdir()
    (inventory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": addressed, "vars": variables}}))
    return Targets(fleet, hosts, inventory, results)


@pytest.fixture(scope="session")
def deploy(targets: Targets, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run a playbook on both hosts."""
    scratch = tmp_path_factory.mktemp("runs")
    return functools.partial(playbook, "-i", targets.inventory, scratch=scratch)
