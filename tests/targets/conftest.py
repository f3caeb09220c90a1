"""Booted hosts, and what they install, served from the controller's address on their network: wheels and fake CUDA packages.

`AERIE_TARGETS_HOSTS=gpu4,gpu5` uses hosts that run already (`booted_hosts.py up 6`) instead of booting and powering off a set of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).parent / "fakes"))
import host as fake_host
import repository
import scenarios

import booted_hosts
from booted_hosts import CONTROLLER, NETWORK, POWEROFF_SECONDS, USER, BootedHosts, Host
from runs import PROCESSES_OF, PROJECT, playbook

CACHE = PROJECT / ".cache"
ROOT_ON_HOSTS = Path("/opt/aerie")
HOSTS = 19  # the deployment's two, ten of a fleet, and some for each role's own tests


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


@dataclass
class Pool:
    """Hosts that run, handed out once each, so that no test finds what another one left."""

    fleet: BootedHosts
    free: list[Host]

    def power_off(self, host: Host) -> Host:
        """The host, off and out of reach."""
        self.fleet.ssh(host, "systemctl poweroff")
        deadline = time.monotonic() + POWEROFF_SECONDS
        while self.fleet.ssh(host, "true").returncode == 0:
            assert time.monotonic() < deadline, f"{host.name} did not power off"
            time.sleep(0.2)
        return host

    def nowhere(self, name: str) -> Host:
        """A host at an address where nobody is."""
        namespace = f"{self.fleet.namespace}-{name}"
        return Host(name, str(NETWORK[254]), self.fleet.state / name, namespace)

    def take(self, count: int, least: int | None = None) -> list[Host]:
        """The next `count` hosts; fewer, though `least`, where hosts that run already were named and are not enough."""
        if len(self.free) < (least or count):
            pytest.fail(f"{count} more test hosts are needed and {len(self.free)} are left: raise HOSTS in tests/targets/conftest.py")
        taken, self.free = self.free[:count], self.free[count:]
        return taken


_running: list[BootedHosts] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run these tests in the hosts' network, and all others of this process in the machine's."""
    # pytest calls this hook for every item, not only for those beside this file.
    is_ours = item.path.is_relative_to(Path(__file__).parent)
    with _running[0].network() if _running and is_ours else booted_hosts.machine_network():
        return (yield)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The hosts themselves. A machine that can't boot them fails the tests and says why: nothing is skipped."""
    fleet = BootedHosts(Path(os.environ.get("AERIE_TARGETS", CACHE / "targets")))
    named = os.environ.get("AERIE_TARGETS_HOSTS")
    names = named.split(",") if named else []
    hosts = [fleet.host(int(name.removeprefix("gpu"))) for name in names]
    hosts = hosts or fleet.up(HOSTS, owner=os.getpid())
    # Ansible names a kept SSH connection after the address, which a host of another clone has, too.
    connections = tempfile.mkdtemp(prefix="aerie-ssh-")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ANSIBLE_SSH_CONTROL_PATH_DIR", connections)
        _running.append(fleet)
        with fleet.network():
            yield Pool(fleet, hosts)
        _running.clear()
    shutil.rmtree(connections)
    if not named:
        fleet.down()


@pytest.fixture(scope="session")
def booted(pool: Pool) -> tuple[BootedHosts, list[Host]]:
    """The two hosts of a deployment, gpu1 and gpu2."""
    return pool.fleet, pool.take(2)


@dataclass(frozen=True)
class CudaRepository:
    """A signed repository of fake packages, served to the hosts; how is told at the head of fakes/repository.py."""

    fleet: BootedHosts
    url: str
    directory: Path
    fingerprints: dict[str, str]

    @property
    def variables(self) -> dict[str, Any]:
        """What an inventory says to use it."""
        return {
            "nvidia_cuda_repository_url": f"{self.url}cuda/",
            "nvidia_cuda_repository_key_url": f"{self.url}cuda/fake-cuda.asc",
            "nvidia_cuda_repository_key_fingerprint": self.fingerprints["cuda"],
        }

    def make_bare(self, host: Host, scenario: str = "workstation", gpus: int | None = None) -> None:
        """Make the host look like a GPU host that has no package of NVIDIA's yet."""
        key = (self.directory / "system/fake-system.asc").read_text()
        fake_host.prepare(self.fleet.ssh_config, host.address, self.url, key, scenarios.named(scenario, gpus))


@pytest.fixture(scope="session")
def cuda_repository(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaRepository]:
    directory = tmp_path_factory.mktemp("repository")
    fingerprints = repository.make(directory)
    server = repository.server(directory)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield CudaRepository(pool.fleet, f"http://{CONTROLLER}:{server.server_port}/", directory, fingerprints)
    server.shutdown()


@pytest.fixture(scope="session")
def inventory_of(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write an inventory of some hosts with the variables given; every second host is logged in to as a user who becomes root by sudo."""

    def write(hosts: list[Host], variables: dict[str, Any], of_hosts: dict[str, dict[str, Any]] | None = None) -> Path:
        logins = [{"ansible_user": "root"}, {"ansible_user": USER, "ansible_become": True}]
        addressed = {
            host.name: {"ansible_host": host.address} | logins[number % 2] | (of_hosts or {}).get(host.name, {})
            for number, host in enumerate(hosts)
        }
        common = {
            "ansible_ssh_common_args": f"-F '{pool.fleet.ssh_config}'",
            "ansible_python_interpreter": "/usr/bin/python3",
            "aerie_root": str(ROOT_ON_HOSTS),
        }
        path = tmp_path_factory.mktemp("inventory") / "hosts.yml"
        content = {"gpu_hosts": {"hosts": addressed, "vars": common | variables}}
        path.write_text(yaml.safe_dump(content, sort_keys=False))  # the order of hosts is that of a run
        return path

    return write


@pytest.fixture(scope="session")
def wheels(pool: Pool) -> Iterator[str]:
    """URL of a page of all wheels that a host needs, reachable from the hosts."""
    directory = CACHE / "wheels"
    with booted_hosts.machine_network():
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
