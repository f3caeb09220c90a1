#!/usr/bin/env python3
"""Measure what a fleet costs: preflight and a provisioning that has nothing to do, on booted test hosts.

    .venv/bin/python tests/targets/measure_fleet.py [N]     boot N hosts (default 10), provision them, then measure; needs root

AERIE_TARGETS and AERIE_TARGETS_HOSTS are those of conftest.py: with the second, hosts that run already are used and not powered off. Prints
a table: wall seconds, CPU seconds of the controller and of the hosts together, and modules sent to a host.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "fakes")]
import host as fake_host  # noqa: E402
import repository  # noqa: E402
import scenarios  # noqa: E402

from booted_hosts import CONTROLLER, PROJECT, BootedHosts, Host, HostsError, control_groups  # noqa: E402
from runs import Run, playbook  # noqa: E402

WANTED: dict[str, Any] = {
    "nvidia_cuda_state": "present",
    "host_tuning_settings": {"kernel_command_line": ["iommu=pt"], "sysctl": {"vm.swappiness": "0"}, "acs": "cleared"},
    "nccl_environment": {"NCCL_P2P_LEVEL": "SYS"},
    "sglang_server_arms": {},
    "sglang_server_instances": {},
}


def hosts_cpu(hosts: list[Host]) -> float:
    """CPU seconds of everything that ran on the hosts so far, by their control groups."""
    total = 0
    for host in hosts:
        text = next(path.read_text() for group in control_groups(host.namespace) if (path := group / "cpu.stat").exists())
        total += int(dict(line.split() for line in text.splitlines())["usage_usec"])
    return total / 1e6


def inventory(directory: Path, fleet: BootedHosts, hosts: list[Host], variables: dict[str, Any]) -> Path:
    common = {
        "ansible_user": "root",
        "ansible_ssh_common_args": f"-F '{fleet.ssh_config}'",
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    named = {host.name: {"ansible_host": host.address} for host in hosts}
    path = directory / "hosts.yml"
    path.write_text(yaml.safe_dump({"gpu_hosts": {"hosts": named, "vars": common | variables}}, sort_keys=False))
    return path


def timed(hosts: list[Host], *arguments: str | Path, scratch: Path) -> tuple[Run, dict[str, float]]:
    before = (time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN), hosts_cpu(hosts))
    run = playbook(*arguments, scratch=scratch, variables={"host_reboot_allowed": True, "preflight_fail_on": "never"})
    wall, used = time.monotonic() - before[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    controller = used.ru_utime + used.ru_stime - before[1].ru_utime - before[1].ru_stime
    return run, {"wall": wall, "controller": controller, "hosts": hosts_cpu(hosts) - before[2]}


def measure(fleet: BootedHosts, hosts: list[Host]) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        keys = repository.make(scratch / "repository")
        server = repository.server(scratch / "repository")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{CONTROLLER}:{server.server_port}/"
        scenario = scenarios.named("workstation")
        key = (scratch / "repository/system/fake-system.asc").read_text()
        with ThreadPoolExecutor(4) as workers:
            made_bare = [workers.submit(fake_host.prepare, fleet.ssh_config, host.address, url, key, scenario) for host in hosts]
            for one in made_bare:
                one.result()
        ours = {
            "nvidia_cuda_repository_url": f"{url}cuda/",
            "nvidia_cuda_repository_key_url": f"{url}cuda/fake-cuda.asc",
            "nvidia_cuda_repository_key_fingerprint": keys["cuda"],
            "aerie_results": str(scratch / "results"),
            "sglang_models_catalog": {"target": {"path": str(PROJECT / "models/tiny/target"), "source": "controller"}},
        }
        where = inventory(scratch, fleet, hosts, WANTED | ours)
        rows = []
        for what, book in (
            ("provision, from bare", "playbooks/provision.yml"),
            ("provision, nothing to do", "playbooks/provision.yml"),
            ("preflight", "playbooks/preflight.yml"),
        ):
            run, cost = timed(hosts, book, "-i", where, scratch=scratch)
            run.require_success()
            calls = max(len(run.calls.get(host.name, [])) for host in hosts)
            rows.append((what, len(hosts), cost, calls, sum(map(len, run.changed.values()))))
        server.shutdown()
    print(f"\n{'':26}{'hosts':>6}{'wall s':>9}{'controller CPU s':>18}{'hosts CPU s':>13}{'modules a host':>16}{'changed':>9}")
    for what, count, cost, calls, changed in rows:
        print(f"{what:26}{count:>6}{cost['wall']:>9.1f}{cost['controller']:>18.1f}{cost['hosts']:>13.1f}{calls:>16}{changed:>9}")


def main(arguments: list[str]) -> int:
    fleet = BootedHosts(Path(os.environ.get("AERIE_TARGETS", PROJECT / ".cache/targets")))
    if named := os.environ.get("AERIE_TARGETS_HOSTS"):
        with fleet.network():
            measure(fleet, [fleet.host(int(name.removeprefix("gpu"))) for name in named.split(",")])
        return 0
    hosts = fleet.up(int(arguments[0]) if arguments else 10, owner=os.getpid())
    try:
        with fleet.network():
            measure(fleet, hosts)
    finally:
        fleet.down()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HostsError as error:
        sys.exit(f"measure_fleet: {error}")
