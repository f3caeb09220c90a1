"""A booted GPU host is tuned in one call, keeps it over a reboot, and is afterwards as if it had never been tuned."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from booted_hosts import Host
from runs import Run, playbook

# Those for any CPU: a booted host has the one of the machine that the tests run on.
PROFILES = ["iommu_passthrough", "acs_cleared", "link_stability", "uvm_without_hmm", "persistence", "cpu_performance", "memory_stays"]
# Test hosts may lower limits and not raise them.
SETTINGS = {"power_limit_w": 450, "limits": {"memlock": 4096}, "modprobe": {"nvidia": {"NVreg_EnableStreamMemOPs": 1}}}
WANTED = {"host_tuning_profiles": PROFILES, "host_tuning_settings": SETTINGS}
BRIDGES = ("0000:00:01.1", "0000:02:00.0", "0000:02:01.0")
UNITS = ("aerie-acs.service", "aerie-power.service")

STEP = [
    {
        "name": "Tune or verify",
        "ansible.builtin.include_role": {"name": "host_tuning", "tasks_from": "{{ step.entry | default('main') }}"},
        "vars": {"host_tuning_state": "{{ step.state | default('present') }}"},
    },
    {
        "name": "Keep what was registered",
        "ansible.builtin.copy": {"content": "{{ __host_tuning | to_json }}", "dest": "{{ answers }}/{{ number }}.json", "mode": "0600"},
        "delegate_to": "localhost",
        "become": False,
        "check_mode": False,
        "changed_when": False,
        "diff": False,
    },
]
PLAY = {
    "hosts": "gpu_hosts",
    "gather_facts": False,
    "tasks": [
        {
            "name": "Take each step",
            "ansible.builtin.include_tasks": "step.yml",
            "loop": "{{ steps }}",
            "loop_control": {"loop_var": "step", "index_var": "number"},
        },
        {"name": "Give the host back", "ansible.builtin.include_role": {"name": "aerie", "tasks_from": "release"}},
    ],
}

TREE = r"""
import hashlib, json, os, stat
# Not a matter of tuning: what tools and the run itself write
LEFT_OUT = ("/proc", "/sys", "/dev", "/run", "/tmp", "/opt/aerie", "/var/lib/fake-host", "/var/lib/systemd", "/var/log", "/var/cache",
            "/var/tmp", "/root", "/home", "/etc/machine-id", "/etc/resolv.conf", "/etc/mtab")
state = {}
for place, directories, names in os.walk("/"):
    directories[:] = [name for name in directories if os.path.join(place, name) not in LEFT_OUT]
    if place.startswith("/usr/") and not place.startswith(("/usr/local", "/usr/lib/systemd", "/usr/lib/modprobe.d", "/usr/lib/sysctl.d")):
        continue
    for name in (*directories, *names):
        path = os.path.join(place, name)
        if path in LEFT_OUT:
            continue
        about = os.lstat(path)
        what = (os.readlink(path) if stat.S_ISLNK(about.st_mode)
                else hashlib.sha256(open(path, "rb").read()).hexdigest() if stat.S_ISREG(about.st_mode) else "")
        state[path] = f"{about.st_mode:o} {about.st_uid} {what}"
print(json.dumps(state))
"""

VALUES = r"""
import json, pathlib, resource, subprocess
def say(*argv):
    return subprocess.run(argv, capture_output=True, text=True).stdout.strip()
print(json.dumps({
    "sysctl": [pathlib.Path("/proc/sys/" + name).read_text().strip() for name in ("vm/swappiness", "kernel/numa_balancing")],
    "governors": sorted({path.read_text().strip() for path in pathlib.Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/*_governor")}),
    "acs": [say("setpci", "-s", address, "ECAP_ACS+0x6.w") for address in BRIDGES],
    "gpus": say("nvidia-smi", "--query-gpu=persistence_mode,power.limit", "--format=csv,noheader,nounits").splitlines(),
    "words": [word for word in pathlib.Path("/proc/cmdline").read_text().split() if "iommu" in word or word.startswith("pcie_")],
    "params": [line for line in pathlib.Path("/proc/driver/nvidia/params").read_text().splitlines() if "StreamMem" in line],
    "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    "uvm": pathlib.Path("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm").read_text().strip(),
    "units": [say("systemctl", "is-active", unit) + " " + say("systemctl", "is-enabled", unit) for unit in UNITS],
}))
"""

STOCK = {
    "sysctl": ["60", "1"],
    "governors": ["schedutil"],
    "acs": ["001d"] * 3,
    "gpus": ["Disabled, 600.00"] * 2,
    "words": [],
    "params": ["EnableStreamMemOPs: 0"],
    "memlock": 8192 << 10,
    "uvm": "N",
    "units": ["inactive "] * 2,
}
AT_ONCE = ("sysctl", "governors", "acs", "gpus", "memlock", "units")
TUNED_AT_ONCE = STOCK | {
    "sysctl": ["0", "0"],
    "governors": ["performance"],
    "acs": ["0000"] * 3,
    "gpus": ["Enabled, 450.00"] * 2,
    "memlock": 4096 << 10,
    "units": ["active enabled"] * 2,
}
TUNED = TUNED_AT_ONCE | {
    "words": ["iommu=pt", "pcie_aspm=off", "pcie_port_pm=off"],
    "params": ["EnableStreamMemOPs: 1"],
    "uvm": "Y",
}


@dataclass(frozen=True)
class Tuned:
    """The host, and how to tune it."""

    host: Host
    ssh_config: Path
    inventory: Path
    scratch: Path

    def run(self, *arguments: str, steps: list[dict[str, str]]) -> tuple[Run, list[dict[str, Any]]]:
        """One ansible-playbook run; what each step that got that far registered."""
        for name, content in (("step.yml", STEP), ("play.yml", [PLAY])):
            (self.scratch / name).write_text(yaml.safe_dump(content, sort_keys=False))
        for left in self.scratch.glob("[0-9].json"):
            left.unlink()
        given = WANTED | {"steps": steps, "answers": str(self.scratch)}
        run = playbook("-i", self.inventory, self.scratch / "play.yml", *arguments, variables=given, scratch=self.scratch)
        return run, [json.loads(path.read_text()) for path in sorted(self.scratch.glob("[0-9].json"))]

    def on(self, program: str) -> str:
        argv = ["ssh", "-F", str(self.ssh_config), self.host.address, "sh", "-s"]
        done = subprocess.run(argv, input=program, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{program}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def python(self, program: str) -> Any:
        text = f"BRIDGES, UNITS = {BRIDGES!r}, {UNITS!r}\n{program}"
        argv = ["ssh", "-F", str(self.ssh_config), self.host.address, "python3", "-"]
        return json.loads(subprocess.run(argv, input=text, capture_output=True, text=True, timeout=120, check=True).stdout)

    def tree(self) -> dict[str, str]:
        return self.python(TREE)

    def values(self) -> dict[str, Any]:
        return self.python(VALUES)

    def reboot(self) -> None:
        before = self.on("stat -c %Y /proc/1; systemctl reboot >/dev/null 2>&1 & echo")
        deadline = time.monotonic() + 60
        while True:
            argv = ["ssh", "-F", str(self.ssh_config), "-o", "ConnectTimeout=1", self.host.address]
            done = subprocess.run([*argv, "stat -c %Y /proc/1 && systemctl is-system-running --wait"], capture_output=True, text=True)
            if done.stdout and done.stdout.split()[0] != before.split()[0] and "running" in done.stdout:
                return
            assert time.monotonic() < deadline, f"{self.host.name} did not come back: {done.stdout}{done.stderr}"
            time.sleep(0.2)


DRIVER = """
cat > /etc/apt/sources.list.d/cuda.sources <<SOURCES
Types: deb
URIs: {url}cuda/
Suites: /
Trusted: yes
SOURCES
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update && apt-get -qq install --yes --no-install-recommends nvidia-open linux-headers-$(uname -r) >/dev/null
modprobe nvidia && nvidia-smi -L
echo 60 > /proc/sys/vm/swappiness
echo 1 > /proc/sys/kernel/numa_balancing
"""


@pytest.fixture(scope="module")
def tuned(pool, cuda_repository, inventory_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    (host,) = pool.take(1)
    cuda_repository.make_bare(host)
    scratch = tmp_path_factory.mktemp("tuning")
    found = Tuned(host, pool.fleet.ssh_config, inventory_of([host], {"sglang_server_arms": {}, "sglang_server_instances": {}}), scratch)
    found.on(DRIVER.format(url=cuda_repository.url))
    return found


@dataclass(frozen=True)
class Story:
    """What one host was at each step of being tuned, rebooted and taken back."""

    bare: dict[str, str]
    check: Run
    checked: dict[str, Any]
    after_check: dict[str, str]
    apply: Run
    applied: dict[str, Any]
    again: dict[str, Any]
    at_once: dict[str, Any]
    after_boot: dict[str, Any]
    withdraw: Run
    withdrawn: dict[str, Any]
    after: dict[str, str]
    values_after: dict[str, Any]


@pytest.fixture(scope="module")
def story(tuned: Tuned) -> Story:
    assert tuned.values() == STOCK, "the fake host's values"
    bare = tuned.tree()
    check, answers = tuned.run("--check", "--diff", steps=[{}])
    check.require_success()
    (checked,) = answers
    after_check = tuned.tree()
    apply, (applied, again) = tuned.run(steps=[{}, {}, {"entry": "verify"}])
    at_once = tuned.values()
    tuned.reboot()
    after_boot = tuned.values()
    withdraw, (*_, withdrawn) = tuned.run(steps=[{}, {"entry": "verify"}, {"state": "absent"}])
    return Story(
        bare=bare,
        check=check,
        checked=checked,
        after_check=after_check,
        apply=apply,
        applied=applied,
        again=again,
        at_once=at_once,
        after_boot=after_boot,
        withdraw=withdraw,
        withdrawn=withdrawn,
        after=tuned.tree(),
        values_after=tuned.values(),
    )


def told(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: answer[key] for key in ("changed", "files", "commands", "live", "diff", "reboot_required", "reboot_reason", "settings")}


def test_a_check_predicts_exactly_and_touches_nothing(story):
    assert story.after_check == story.bare
    assert told(story.checked) == told(story.applied)
    assert '+GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt pcie_aspm=off pcie_port_pm=off"' in story.check.output


def test_what_can_be_set_at_once_is_and_the_rest_asks_for_a_reboot(story):
    assert story.at_once == TUNED_AT_ONCE
    assert (story.applied["changed"], story.applied["reboot_required"]) == (True, True)
    reason = story.applied["reboot_reason"]
    assert "the running kernel was booted without iommu=pt, pcie_aspm=off and pcie_port_pm=off" in reason
    assert "nvidia_uvm runs with uvm_disable_hmm=N, and 1 is wanted" in reason


def test_all_of_it_is_one_module_call(story):
    (calls,) = (modules for host, modules in story.check.calls.items() if host.startswith("gpu"))
    assert calls.count("host_tuning") == 1
    assert "gpu_host_info" not in calls


def test_a_second_run_changes_nothing_and_still_asks_for_the_reboot(story):
    assert [story.again[key] for key in ("changed", "files", "commands", "live", "reboot_required")] == [False, [], [], [], True]


def test_verification_before_the_reboot_says_what_is_not_in_force_and_nothing_else(story):
    assert story.apply.status != 0
    for message in ("iommu=pt is not in /proc/cmdline", "nvidia runs with NVreg_EnableStreamMemOPs=0, not 1"):
        assert message in story.apply.output
    assert [kind for kind in ("acs:", "power_limit_w:", "cpu_governor:", "sysctl:", "limits:") if kind in story.apply.output] == []


def test_everything_is_in_force_after_the_reboot(story):
    assert story.after_boot == TUNED
    story.withdraw.require_success()


def test_taking_it_back_leaves_no_trace(story):
    assert story.withdrawn["changed"] is True
    assert story.after == story.bare
    assert {key: story.values_after[key] for key in AT_ONCE} == {key: STOCK[key] for key in AT_ONCE}
    assert "was taken back" in story.withdrawn["reboot_reason"]


def test_what_others_set_differently_is_refused_with_its_place_and_nothing_is_touched(story, tuned):
    tuned.on("echo 'options nvidia_uvm uvm_disable_hmm=0' > /etc/modprobe.d/site.conf")
    tuned.on("echo 'GRUB_CMDLINE_LINUX=\"quiet iommu=off\"' >> /etc/default/grub")
    before = tuned.tree()
    run, _ = tuned.run(steps=[{}])
    after = tuned.tree()
    tuned.on("rm /etc/modprobe.d/site.conf && sed -i /iommu=off/d /etc/default/grub")
    assert run.status != 0
    assert "/etc/modprobe.d/site.conf:1 says uvm_disable_hmm=0" in run.output
    assert "says iommu=off, and iommu=pt is wanted" in run.output
    assert after == before
