"""Bare hosts become ready ones by one command, a fleet survives its bad hosts, and a good host can be captured and made again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runs import PROJECT, generated, playbook

MODULE_CALLS = 40
FLEET = 10
DRIVER, TOOLKIT, NCCL = "580.105.08-1", "13.0.2-1", "2.28.9-1+cuda13.0"
WANTED = {
    "nvidia_cuda_state": "present",
    "nvidia_cuda_driver_version": DRIVER,
    "nvidia_cuda_toolkit_version": TOOLKIT,
    "nvidia_cuda_nccl_version": NCCL,
    "host_tuning_settings": {
        "kernel_command_line": ["iommu=pt"],
        "modprobe": {"nvidia_uvm": {"uvm_disable_hmm": "1"}},
        "acs": "cleared",
        "cpu_governor": "performance",
        "sysctl": {"vm.swappiness": "0"},
        "power_limit_w": 450,
    },
    "nccl_environment": {"NCCL_P2P_LEVEL": "SYS", "NCCL_IB_DISABLE": "1"},
}
MODELS = {
    "target": {"path": str(PROJECT / "models/tiny/target"), "source": "controller"},
    "draft": {"path": str(PROJECT / "models/tiny/draft-eagle3"), "source": "controller"},
}
STATE = "dpkg-query --show; find /etc /opt /boot -xdev -type f ! -name ld.so.cache -exec sha256sum {} + | sort"
PLAYBOOK = "playbooks/provision.yml"


def identity(directory: str) -> str:
    """What docs/reference/models.md says that a model's identity is."""
    suffixes = (".safetensors", ".json", ".jinja")
    files = sorted(path for path in Path(directory).iterdir() if path.suffix in suffixes)
    entries = [[path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
    return hashlib.sha256(json.dumps(entries, separators=(",", ":")).encode()).hexdigest()


class Fleet:
    """The hosts of these tests and the runs over them. Two take part from the beginning; the others are made bare for the fleet."""

    def __init__(self, pool, repository, inventory_of, directory):
        self.pool, self.repository, self.inventory_of, self.directory = pool, repository, inventory_of, directory
        self.hosts = pool.take(FLEET, least=2)
        self.results = directory / "results"

    def variables(self, **more):
        return {"aerie_results": str(self.results), "sglang_models_catalog": MODELS} | self.repository.variables | more

    def run(self, hosts, *arguments, wanted=WANTED, command=PLAYBOOK, **variables):
        inventory = self.inventory_of(hosts, self.variables(**wanted))
        return playbook(command, "-i", inventory, *arguments, variables=variables, scratch=self.directory)

    def bare(self, hosts):
        with ThreadPoolExecutor(4) as workers:
            list(workers.map(self.repository.make_bare, hosts))

    def on(self, host, command):
        done = self.pool.fleet.ssh(host, command)
        assert done.returncode == 0, f"{host.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def summary(self):
        """What the last run told as JSON."""
        return json.loads(max((self.results / "provision").glob("*.json"), key=lambda path: path.stat().st_mtime_ns).read_text())["hosts"]


@pytest.fixture(scope="module")
def fleet(pool, cuda_repository, inventory_of, tmp_path_factory):
    fleet = Fleet(pool, cuda_repository, inventory_of, tmp_path_factory.mktemp("provision"))
    fleet.bare(fleet.hosts[:2])
    return fleet


@pytest.fixture(scope="module")
def pair(fleet):
    return fleet.hosts[:2]


@pytest.fixture(scope="module")
def checked(fleet, pair):
    """A check of bare hosts, and their state before and after it."""
    before = [fleet.on(host, STATE) for host in pair]
    run = fleet.run(pair, "--check", "--diff", host_reboot_allowed=True).require_success()
    return run, before, [fleet.on(host, STATE) for host in pair]


@pytest.fixture(scope="module")
def interrupted(fleet, pair, checked):
    """A run whose controller is killed as soon as the first host has its driver."""
    inventory = fleet.inventory_of(pair, fleet.variables(**WANTED))
    argv = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), PLAYBOOK, "-e", "host_reboot_allowed=true"]
    environment = os.environ | {"ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
    run = subprocess.Popen(
        argv,
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while fleet.pool.fleet.ssh(pair[0], "dpkg-query --show nvidia-open").returncode != 0:
        assert run.poll() is None, f"the run ended with {run.returncode} before it installed the driver"
        assert time.monotonic() < deadline, "the driver was not installed in 120 s"
        time.sleep(0.2)
    os.killpg(run.pid, 9)
    run.wait()
    return pair


@pytest.fixture(scope="module")
def first(fleet, interrupted):
    return fleet.run(interrupted, host_reboot_allowed=True).require_success()


@pytest.fixture(scope="module")
def second(fleet, pair, first):
    return fleet.run(pair, host_reboot_allowed=True).require_success()


def test_a_check_of_bare_hosts_completes_and_predicts_without_touching_them(checked, pair):
    run, before, after = checked
    assert after == before
    for host in pair:
        assert len(run.changed[host.name]) >= 4, run.changed  # packages, tuning, NCCL's settings, models
    for word in (DRIVER, "iommu=pt", "NCCL_P2P_LEVEL=SYS"):
        assert word in run.output


def test_an_interrupted_run_is_continued_to_the_end_by_the_next(first, fleet, pair):
    told = fleet.summary()
    assert {host: about["status"] for host, about in told.items()} == {host.name: "ok" for host in pair}
    assert [about["reboot"]["done"] for about in told.values()] == [True, True]
    assert [told[host.name]["batch"] for host in pair] == [0, 1]  # the first of the inventory is the canary


def test_what_was_asked_for_is_effective_after_the_reboot(first, fleet, pair):
    for host in pair:
        assert DRIVER.partition("-")[0] in fleet.on(host, "cat /proc/driver/nvidia/version")
        assert "iommu=pt" in fleet.on(host, "cat /proc/cmdline").split()
        assert fleet.on(host, "cat /sys/module/nvidia_uvm/parameters/uvm_disable_hmm /proc/sys/vm/swappiness").split() == ["Y", "0"]
        assert fleet.on(host, "lspci -vv | grep ACSCtl | grep -c ReqRedir+ || true") == "0"
        assert "NCCL_P2P_LEVEL=SYS" in fleet.on(host, "cat /opt/aerie/nccl.env")
        assert fleet.on(host, "ls /opt/aerie/models/target/model.safetensors")


def test_a_second_run_changes_nothing_with_few_modules(second, pair):
    assert second.changed == {}
    counts = {host.name: len(second.calls[host.name]) for host in pair}
    assert max(counts.values()) <= MODULE_CALLS, json.dumps(second.calls, indent=1)
    assert {"gpu_host_info", "nvidia_packages", "host_tuning", "nccl_environment", "model_identity"} <= set(second.calls[pair[0].name])


def test_a_reboot_that_is_not_allowed_is_reported_and_the_rest_is_done(second, fleet, pair):
    more = WANTED["host_tuning_settings"] | {"kernel_command_line": ["iommu=pt", "pcie_aspm=off"]}
    other = {"host_tuning_settings": more, "nccl_environment": {"NCCL_P2P_LEVEL": "PHB"}}
    fleet.run(pair[:1], wanted=WANTED | other).require_success()
    about = fleet.summary()[pair[0].name]
    assert (about["status"], about["reboot"]["required"], about["reboot"]["done"]) == ("ok", True, False)
    assert "pcie_aspm=off" in about["reboot"]["reason"]
    assert "NCCL_P2P_LEVEL=PHB" in fleet.on(pair[0], "cat /opt/aerie/nccl.env")
    fleet.run(pair[:1]).require_success()


def test_a_host_that_is_captured_can_be_made_again(second, fleet, pair):
    good = pair[1]
    other = fleet.hosts[2] if len(fleet.hosts) > 2 else pair[0]
    kept = fleet.directory / "captured.yml"
    arguments = ("--limit", good.name)
    foreseen = fleet.run(pair, *arguments, "--check", "--diff", command="playbooks/capture.yml", capture_to=str(kept)).require_success()
    assert not kept.exists() and "+nvidia_cuda_driver_version: 580.105.08-1" in foreseen.output
    fleet.run(pair, *arguments, command="playbooks/capture.yml", capture_to=str(kept)).require_success()
    values = generated(kept)
    found = values["host_tuning_settings"]
    found["sysctl"].pop("kernel.numa_balancing", None)  # the machine's own kernel may have it off
    assert found == WANTED["host_tuning_settings"]
    assert values["nvidia_cuda_driver_version"] == DRIVER
    assert values["sglang_models_catalog"] == {name: model | {"identity": identity(model["path"])} for name, model in MODELS.items()}
    assert fleet.run(pair, *arguments, command="playbooks/capture.yml", capture_to=str(kept)).require_success().changed == {}

    if other not in pair:
        fleet.bare([other])
    fleet.run([other], "-e", f"@{kept}", wanted={}, host_reboot_allowed=True).require_success()
    asked = {"preflight_compare": [good.name, other.name], "preflight_fail_on": "never"}
    fleet.run([good, other], command="playbooks/preflight.yml", **asked).require_success()
    assert json.loads((fleet.results / "preflight/comparison.json").read_text())["differences"] == []

    # the same name and sizes, other content
    draft = fleet.directory / "draft-eagle3"
    shutil.copytree(MODELS["draft"]["path"], draft)
    content = bytearray((draft / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (draft / "model.safetensors").write_bytes(content)
    catalog = values["sglang_models_catalog"]
    catalog["draft"]["path"] = str(draft)
    before = fleet.on(other, STATE)
    run = fleet.run([other], "-e", f"@{kept}", wanted={}, sglang_models_catalog=catalog)
    about = fleet.summary()[other.name]
    assert run.status != 0 and about["status"] == "failed"
    assert f"draft: {draft} on the controller is another model than the one asked for" in about["reason"]
    assert f"{identity(MODELS['draft']['path'])[:12]} is asked for" in about["reason"]
    assert fleet.on(other, STATE) == before


@pytest.fixture(scope="module")
def bad_hosts(fleet, pair, second):
    """A fleet with one host that is off and one whose disk is full."""
    hosts = fleet.hosts
    full = hosts[-1]
    rest, dead = (hosts[:-2], fleet.pool.power_off(hosts[-2])) if len(hosts) > 3 else (hosts[:-1], fleet.pool.nowhere("gpu-dead"))
    fleet.bare([host for host in hosts[2:] if host.name != dead.name and host != full])
    fleet.bare([full])
    fleet.on(full, "mount -t tmpfs -o size=64k tmpfs /opt && dd if=/dev/zero of=/opt/fill bs=1k count=64 2>/dev/null; true")
    yield rest, dead, full
    fleet.on(full, "umount --lazy /opt")


def test_a_failed_canary_keeps_every_other_host_untouched_and_the_end_says_why(bad_hosts, fleet):
    rest, _, full = bad_hosts
    run = fleet.run([*rest, full], provision_canary=full.name, host_reboot_allowed=True)
    assert run.status != 0
    assert set(run.calls) == {full.name}
    told = fleet.summary()
    assert told[full.name]["status"] == "failed"
    assert {told[host.name]["status"] for host in rest} == {"not begun"}
    assert all(full.name in told[host.name]["reason"] for host in rest)


def test_bad_hosts_stop_no_other_one_and_the_summary_names_them_with_their_reasons(bad_hosts, fleet):
    rest, dead, full = bad_hosts
    run = fleet.run([*rest, dead, full], provision_batch=4, host_reboot_allowed=True)
    assert run.status != 0
    told = fleet.summary()
    assert {host.name: told[host.name]["status"] for host in rest} == {host.name: "ok" for host in rest}
    assert (told[dead.name]["status"], told[full.name]["status"]) == ("unreachable", "failed")
    assert "space" in told[full.name]["reason"]
    for host in rest:
        assert fleet.on(host, "cat /proc/driver/nvidia/version")
    table = run.output[run.output.index("PROVISIONED") :]
    assert f"{dead.name}: unreachable" in table and f"{full.name}: failed at" in table


def test_in_a_container_user_space_is_brought_and_kernel_and_boot_are_left_alone(fleet, pool, cuda_repository, inventory_of):
    (host,) = pool.take(1)
    cuda_repository.make_bare(host, "container")
    user_space = {"host_tuning_settings": {}, "nvidia_cuda_driver_version": None}
    before = fleet.on(host, "cat /proc/sys/kernel/random/boot_id")
    fleet.run([host], wanted=WANTED | user_space, host_reboot_allowed=True).require_success()
    assert fleet.summary()[host.name]["reboot"] == {"required": False, "done": False, "reason": None}
    assert fleet.on(host, "cat /proc/sys/kernel/random/boot_id") == before
    installed = fleet.on(host, "dpkg-query --show --showformat='${Package}\\n'").splitlines()
    assert "cuda-toolkit-13-0" in installed
    assert [name for name in installed if name in ("nvidia-open", "nvidia-kernel-open-dkms")] == []
