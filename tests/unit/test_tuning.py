"""Host tuning: wishes are refused before anything is touched, files and commands are exact, and taking back leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import tuning_files, tuning_found
from ansible.module_utils.aerie.host.tuning_settings import CONDITIONS, PROFILE_KEYS, Settings, check, parse, resolve

import host_tuning

PROJECT = Path(__file__).parents[2]
TABLE = yaml.safe_load((PROJECT / "tuning/profiles.yml").read_text())["profiles"]
sys.path.append(str(PROJECT / "tests/targets/fakes"))
import scenarios  # noqa: E402

GPU = {
    "name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "sku": "workstation",
    "persistence": False,
    "power": {"limit_w": 600.0, "min_w": 150.0, "max_w": 600.0},
}
INFO: dict[str, Any] = {
    "cpu": {"model": "AMD EPYC 9575F 64-Core Processor", "sockets": 1, "logical": 128},
    "gpus": [GPU | {"index": number, "uuid": f"GPU-{number}"} for number in range(2)],
    "topology": {"links": {"0-1": "PHB"}, "reason": None},
    "pci": {
        "source": "lspci",
        "reason": None,
        "bridges": [
            {"address": "0000:00:01.1", "kind": "root_port", "parent": None, "acs": {"request_redirect": True}},
            {"address": "0000:01:00.0", "kind": "upstream_port", "parent": "0000:00:01.1", "acs": {"request_redirect": True}},
            {"address": "0000:02:00.0", "kind": "downstream_port", "parent": "0000:01:00.0", "acs": None},
            {"address": "0000:00:02.1", "kind": "root_port", "parent": None, "acs": {"request_redirect": True}},
        ],
        "gpu_links": [{"parent": "0000:02:00.0"}],
    },
    "container": {"kind": None},
}
ALL = {
    "kernel_command_line": ["iommu=pt", "pcie_aspm=off"],
    "modprobe": {"nvidia-uvm": {"uvm_disable_hmm": 1}, "nvidia": {"NVreg_RegistryDwords": "ForceP2P=0x11;RMForceP2PType=1"}},
    "acs": "cleared",
    "cpu_governor": "performance",
    "sysctl": {"vm.swappiness": 0},
    "limits": {"memlock": "unlimited", "nofile": 1048576},
    "power_limit_w": 450,
    "persistence": True,
}


def settings(**value: Any) -> Settings:
    parsed, problems = parse(value)
    assert problems == []
    return parsed


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host's tree, with the tools that tuning uses, none of which is run."""
    for path, text in {
        "proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz ro quiet\n",
        "proc/sys/vm/swappiness": "60\n",
        "proc/driver/nvidia/params": 'EnableMSI: 1\nRegistryDwords: ""\n',
        "sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "N\n",
        "run/systemd/system/.keep": "",
        "etc/default/grub": 'GRUB_CMDLINE_LINUX_DEFAULT="quiet splash"\nGRUB_CMDLINE_LINUX=""\n',
        "etc/systemd/system/multi-user.target.wants/.keep": "",
        "var/lib/.keep": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for cpu in range(2):
        cpufreq = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        cpufreq.mkdir(parents=True)
        (cpufreq / "scaling_governor").write_text("schedutil\n")
        (cpufreq / "scaling_available_governors").write_text("performance schedutil\n")
    (tmp_path / "usr/sbin").mkdir(parents=True)
    for tool in ("update-grub", "update-initramfs", "setpci", "lspci", "nvidia-smi", "systemctl"):
        (tmp_path / "usr/sbin" / tool).write_text("")
        (tmp_path / "usr/sbin" / tool).chmod(0o755)
    return tmp_path


class Commands:
    """Runs nothing: keeps the calls, answers reading setpci, and links units as systemctl does."""

    def __init__(self, root: Path, failing: str | None = None) -> None:
        self.root, self.failing, self.calls = root, failing, []
        self.active: set[str] = set()

    def __call__(self, argv: tuple[str, ...]) -> tuple[int, str]:
        line = " ".join(argv)
        if "is-active" in argv:
            return (0 if argv[-1] in self.active else 3), ""
        if argv[0].endswith("setpci") and "=" not in argv[-1]:
            return 0, "001d"
        self.calls.append(line)
        if self.failing and self.failing in line:
            return 1, "no space left on device"
        link = self.root / f"etc/systemd/system/multi-user.target.wants/{argv[-1]}"
        if argv[1:2] == ("enable",):
            link.symlink_to(f"/etc/systemd/system/{argv[-1]}")
        elif argv[1:2] == ("restart",):
            self.active.add(argv[-1])
        elif argv[1:2] == ("disable",):
            link.unlink(missing_ok=True)
            self.active.discard(argv[-1])
        return 0, ""


def tune(root: Path, run: Commands, *, check: bool = False, info: dict[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    defaults = {"state": "present", "profiles": [], "settings": {}, "definitions": TABLE, "manage_kernel": "auto", "lease": None}
    return host_tuning.tuned(defaults | {"info": info or INFO} | asked, check=check, root=root, run=run)


def tree(root: Path) -> dict[str, str]:
    return {
        str(
            path.relative_to(root)
        ): f"{path.lstat().st_mode:o} {path.readlink() if path.is_symlink() else path.read_text() if path.is_file() else ''}"
        for path in sorted(root.rglob("*"))
    }


# -- settings and profiles


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kernel_comand_line": []}, "unknown key 'kernel_comand_line'; did you mean 'kernel_command_line'?"),
        ({"kernel_command_line": "iommu=pt"}, "must be a list of words"),
        ({"kernel_command_line": ["iommu=pt quiet"]}, "'iommu=pt quiet' is no word of a kernel command line"),
        ({"kernel_command_line": ['x="$(reboot)"']}, "is no word of a kernel command line"),
        ({"kernel_command_line": ["x=a;b"]}, "is no word of a kernel command line"),
        ({"modprobe": {"nvidia": {"RegistryDwords": "x"}}}, "did you mean NVreg_RegistryDwords?"),
        ({"modprobe": {"nvidia": {"NVreg_RegistryDwords": 'a" install nvidia /bin/sh'}}}, "no blanks, quotes"),
        ({"modprobe": {"nvi dia": {}}}, "no name of a kernel module"),
        ({"sysctl": {"swappiness": 0}}, "no name of a kernel variable, such as vm.swappiness"),
        ({"sysctl": {"vm.swappiness": "0\nkernel.x = 1"}}, "one line of numbers or words"),
        ({"limits": {"memlok": "unlimited"}}, "did you mean 'memlock'?"),
        ({"limits": {"memlock": "lots"}}, "must be unlimited or a number (KiB"),
        ({"limits": {"nofile": "unlimited"}}, "nobody can log in"),
        ({"acs": "off"}, "it must be cleared, or null"),
        ({"cpu_governor": "turbo"}, "it must be conservative, ondemand, performance"),
        ({"power_limit_w": "450W"}, "a whole number of watts"),
        ({"persistence": "on"}, "it must be true, or null"),
    ],
)
def test_a_setting_that_no_tool_would_take_is_refused(value, message):
    _, problems = parse(value)
    assert any(message in problem for problem in problems), problems


def test_what_is_wrong_on_any_host_is_found_without_asking_one():
    assert check(["iommu_off", "p2p_registry"], TABLE, {"power_limit_w": 450}) == []
    problems = check(["iommu_off", "iommu_passthrough", "no"], TABLE, {"acs": "off"})
    assert [problem.partition(" ")[0] for problem in problems] == ["profiles", "host_tuning_profiles:", "host_tuning_settings.acs"]


def test_every_profile_of_the_table_is_whole_and_its_conflicts_are_mutual():
    for name, entry in TABLE.items():
        assert set(entry) <= set(PROFILE_KEYS), name
        assert entry["summary"] and entry["why"] and entry["sources"], name
        assert parse(entry["settings"])[1] == [], name
        assert set(entry.get("when", {})) <= set(CONDITIONS), name
        assert [other for other in entry.get("conflicts", []) if name not in TABLE[other].get("conflicts", [])] == [], name
    assert {name for name, entry in TABLE.items() if entry.get("measure") == "both"} == {"p2p_registry", "p2p_registry_short"}


def test_any_two_profiles_either_go_together_or_say_that_they_conflict():
    for one in TABLE:
        for other in TABLE:
            info = INFO | {"cpu": INFO["cpu"] | {"model": "Intel Xeon" if "iommu_off_intel" in (one, other) else "AMD EPYC"}}
            if other in TABLE[one].get("conflicts", []):
                with pytest.raises(AerieError, match="can't be together: choose one"):
                    resolve([one, other], TABLE, {}, info)
            elif not ({one, other} & {"iommu_off_intel"} and {one, other} & {"iommu_off", "iommu_passthrough_amd"}):
                resolve([one, other], TABLE, {}, info)


@pytest.mark.parametrize(
    ("profile", "change", "message"),
    [
        ("iommu_off", {"cpu": {"model": "AMD EPYC", "logical": 384}}, "at most 255 logical CPUs, and there are 384"),
        ("iommu_off", {"cpu": {"model": "Intel(R) Xeon(R) 6980P", "logical": 128}}, "for CPUs of amd, and this is Intel"),
        ("acs_cleared", {"gpus": INFO["gpus"][:1]}, "for 2 GPUs or more, and there are 1"),
        ("p2p_registry", {"topology": {"links": {"0-1": "PIX"}}}, "connected by PHB or NODE, and 0-1 are by PIX"),
        ("p2p_registry", {"topology": {"links": {}, "reason": "nvidia-smi: not found"}}, "can't be told here: nvidia-smi: not found"),
        ("power_500w", {"gpus": [GPU | {"sku": "max-q"}]}, "for workstation or server cards, and there are max-q"),
        ("iommu_of", {}, "did you mean 'iommu_off'"),
    ],
)
def test_a_profile_that_is_not_for_this_host_is_refused(profile, change, message):
    with pytest.raises(AerieError, match=message):
        resolve([profile], TABLE, {}, INFO | change)


def test_the_iommu_stays_on_where_interrupts_need_it_whoever_asks():
    own = {"kernel_command_line": ["amd_iommu=off"]}
    with pytest.raises(AerieError, match="on a host of 256 logical CPUs"):
        resolve([], TABLE, own, INFO | {"cpu": {"model": "AMD EPYC", "logical": 256}})
    assert resolve([], TABLE, own, INFO)[0].kernel_command_line == ("amd_iommu=off",)


def test_own_settings_win_over_profiles_and_null_takes_away():
    own = {
        "kernel_command_line": ["iommu=soft", "pci=realloc=off"],
        "sysctl": {"vm.swappiness": 10, "kernel.numa_balancing": None},
        "modprobe": {"nvidia_uvm": None},
        "power_limit_w": None,
    }
    merged, _ = resolve(["iommu_passthrough", "pci_no_acs", "memory_stays", "uvm_without_hmm", "power_500w"], TABLE, own, INFO)
    assert merged == Settings(kernel_command_line=("pci=noacs", "iommu=soft", "pci=realloc=off"), sysctl={"vm.swappiness": "10"})


def test_a_profile_that_must_be_measured_both_ways_says_so():
    _, notes = resolve(["p2p_registry"], TABLE, {}, INFO)
    assert notes == ["profile p2p_registry helped some hosts and harmed others: measure with it and without it, and keep what wins"]


# -- files, commands, live values


def test_nothing_wanted_on_a_host_that_was_never_tuned_is_not_even_looked_at(host):
    before = tree(host)
    run = Commands(host)
    for state in ("present", "absent", "verified"):
        answer = host_tuning.tuned({"state": state, "profiles": [], "settings": {}, "info": None}, check=False, root=host, run=run)
        assert (answer["changed"], answer["reboot_required"]) == (False, False)
    assert (tree(host), run.calls) == (before, [])


def test_files_are_exact(host):
    run = Commands(host)
    tune(host, run, settings=ALL)
    note = "# Written by Aerie (role host_tuning); changes are overwritten.\n"
    expected = {
        "etc/default/grub.d/99-aerie-tuning.cfg": 'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt pcie_aspm=off"\n',
        "etc/modprobe.d/aerie-tuning.conf": 'options nvidia NVreg_RegistryDwords="ForceP2P=0x11;RMForceP2PType=1"\n'
        "options nvidia_uvm uvm_disable_hmm=1\n",
        "etc/sysctl.d/90-aerie-tuning.conf": "vm.swappiness = 0\n",
        "etc/security/limits.d/90-aerie-tuning.conf": "* soft memlock unlimited\n* hard memlock unlimited\nroot soft memlock unlimited\n"
        "root hard memlock unlimited\n* soft nofile 1048576\n* hard nofile 1048576\nroot soft nofile 1048576\nroot hard nofile 1048576\n",
        "etc/systemd/system/sglang@.service.d/90-aerie-tuning.conf": "[Unit]\nAfter=aerie-acs.service aerie-power.service\n\n"
        "[Service]\nLimitMEMLOCK=infinity\nLimitNOFILE=1048576\n",
        "etc/systemd/system/aerie-power.service": "[Unit]\nDescription=CPU governor and GPU power (Aerie)\n"
        "After=nvidia-persistenced.service\n\n"
        "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        "ExecStart=/bin/sh -c 'for file in /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; "
        'do echo performance > "$$file" || exit 1; done\'\n'
        "ExecStart=/usr/sbin/nvidia-smi -pm 1\nExecStart=/usr/sbin/nvidia-smi -pl 450\n\n[Install]\nWantedBy=multi-user.target\n",
    }
    assert {path: (host / path).read_text() for path in expected} == {path: note + text for path, text in expected.items()}
    assert (host / "usr/local/lib/aerie/clear-acs").stat().st_mode & 0o777 == 0o755


def test_commands_are_exact_and_only_those_that_the_change_needs(host):
    run = Commands(host)
    answer = tune(host, run, settings=ALL)
    assert run.calls == [
        "/usr/sbin/update-grub",
        "/usr/sbin/update-initramfs -u -k all",
        "/usr/sbin/systemctl daemon-reload",
        "/usr/sbin/systemctl enable aerie-acs.service",
        "/usr/sbin/systemctl restart aerie-acs.service",
        "/usr/sbin/systemctl enable aerie-power.service",
        "/usr/sbin/systemctl restart aerie-power.service",
    ]
    assert [" ".join(argv) for argv in answer["commands"]] == run.calls
    quiet = Commands(host)
    quiet.active = run.active
    tune(host, quiet, settings=ALL | {"sysctl": {"vm.swappiness": 1}})
    assert [call for call in quiet.calls if "acs" not in call and "power" not in call] == []


def test_live_values_are_set_and_what_comes_at_boot_is_told(host):
    answer = tune(host, Commands(host), settings=ALL)
    assert (host / "proc/sys/vm/swappiness").read_text() == "0\n"
    assert {"what": "/proc/sys/vm/swappiness", "before": "60", "after": "0"} in answer["live"]
    assert {"what": "acs of 0000:00:01.1", "before": "001d", "after": "0000"} in answer["live"]
    assert [live["what"] for live in answer["live"] if "acs" in live["what"]] == ["acs of 0000:00:01.1"]  # no upstream port
    assert {"what": "power_limit of GPU-1", "before": "600", "after": "450"} in answer["live"]
    assert answer["reboot_reason"] == (
        "the running kernel was booted without iommu=pt and pcie_aspm=off; nvidia_uvm runs with uvm_disable_hmm=N, and 1 is wanted; "
        'nvidia runs with NVreg_RegistryDwords="", and ForceP2P=0x11;RMForceP2PType=1 is wanted'
    )


def test_check_mode_says_what_the_run_does_and_only_reads(host):
    before = tree(host)
    run = Commands(host)
    checked = tune(host, run, check=True, settings=ALL)
    assert (tree(host), run.calls) == (before, [])
    assert tune(host, run, settings=ALL) == checked


def as_tuned(root: Path, *, rebooted: bool = False) -> dict[str, Any]:
    """What the units, which nothing runs here, would have done."""
    for path in root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"):
        path.write_text("performance\n")
    if rebooted:
        (root / "proc/cmdline").write_text("ro quiet iommu=pt pcie_aspm=off\n")
        (root / "proc/driver/nvidia/params").write_text('RegistryDwords: "ForceP2P=0x11;RMForceP2PType=1"\n')
        (root / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm").write_text("Y\n")
    return INFO | {"gpus": [gpu | {"persistence": True, "power": gpu["power"] | {"limit_w": 450.0}} for gpu in INFO["gpus"]]}


class Cleared(Commands):
    def __call__(self, argv: tuple[str, ...]) -> tuple[int, str]:
        return (0, "0000") if argv[0].endswith("setpci") and "=" not in argv[-1] else super().__call__(argv)


def test_a_second_run_changes_nothing_and_a_value_that_moved_is_set_again(host):
    run = Cleared(host)
    tune(host, run, settings=ALL)
    info = as_tuned(host)
    before, calls = tree(host), list(run.calls)
    assert tune(host, run, info=info, settings=ALL)["changed"] is False
    assert (tree(host), run.calls) == (before, calls)
    (host / "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor").write_text("schedutil\n")
    answer = tune(host, run, info=info, settings=ALL)
    assert (answer["files"], run.calls[len(calls) :]) == ([], ["/usr/sbin/systemctl restart aerie-power.service"])


def test_taking_it_back_leaves_no_trace_and_the_values_that_were(host):
    before = tree(host)
    run = Commands(host)
    tune(host, run, settings=ALL)
    info = as_tuned(host)
    run.calls.clear()
    answer = tune(host, run, info=info, state="absent")
    assert tree(host) == before
    assert run.calls == [
        "/usr/sbin/systemctl disable --now aerie-acs.service",
        "/usr/sbin/systemctl disable --now aerie-power.service",
        "/usr/sbin/update-grub",
        "/usr/sbin/update-initramfs -u -k all",
        "/usr/sbin/systemctl daemon-reload",
        "/usr/sbin/setpci -s 0000:00:01.1 ECAP_ACS+0x6.w=001d",
        "/usr/sbin/nvidia-smi -i 0 -pm 0",
        "/usr/sbin/nvidia-smi -i 1 -pm 0",
        "/usr/sbin/nvidia-smi -i 0 -pl 600",
        "/usr/sbin/nvidia-smi -i 1 -pl 600",
    ]
    assert (answer["changed"], answer["reboot_required"]) == (True, False)
    assert tune(host, run, state="absent")["changed"] is False


def test_what_was_taken_back_and_is_still_in_force_asks_for_a_reboot_until_there_was_one(host):
    run = Cleared(host)
    tune(host, run, settings=ALL)
    info = as_tuned(host, rebooted=True)
    assert tune(host, run, info=info, settings=ALL)["reboot_required"] is False
    for _ in range(2):
        answer = tune(host, run, info=info, state="absent")
        assert "the running kernel was booted with iommu=pt and pcie_aspm=off, which was taken back" in answer["reboot_reason"]
    (host / "proc/cmdline").write_text("ro quiet\n")
    (host / "run/aerie-host-tuning.json").unlink()  # as a boot does
    assert tune(host, run, info=info, state="absent")["reboot_required"] is False


def test_what_a_gpu_was_is_remembered_while_its_driver_does_not_answer(host):
    run = Commands(host)
    tune(host, run, settings=ALL)
    silent = as_tuned(host) | {"gpus": [], "gpu_reason": "nvidia-smi has failed"}
    run.calls.clear()
    tune(host, run, info=silent, settings=ALL | {"power_limit_w": 400}, driver_pending=True)
    assert not [call for call in run.calls if "aerie-power" in call]  # its nvidia-smi would fail
    assert "nvidia-smi -pl 400" in (host / "etc/systemd/system/aerie-power.service").read_text()
    assert (host / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text() == "performance\n"
    tune(host, run, info=as_tuned(host), state="absent")
    assert "/usr/sbin/nvidia-smi -i 1 -pl 600" in run.calls


def test_a_profile_that_is_dropped_is_taken_back_alone(host):
    run = Commands(host)
    tune(host, run, profiles=["memory_lockable"], settings={"sysctl": {"vm.swappiness": 0}})
    tune(host, run, profiles=["memory_lockable"])
    assert (host / "proc/sys/vm/swappiness").read_text() == "60\n"
    assert not (host / "etc/sysctl.d/90-aerie-tuning.conf").exists()
    assert (host / "etc/security/limits.d/90-aerie-tuning.conf").exists()


@pytest.mark.parametrize("failing", ["update-grub", "update-initramfs", "restart aerie-power"])
def test_what_fails_on_the_way_is_put_back(host, failing):
    before = tree(host)
    run = Commands(host, failing)
    with pytest.raises(AerieError, match=r"no space left on device.*put back as they were"):
        tune(host, run, settings=ALL)
    assert tree(host) == before
    assert run.active == set()
    assert {"/usr/sbin/setpci -s 0000:00:01.1 ECAP_ACS+0x6.w=001d", "/usr/sbin/nvidia-smi -i 1 -pl 600"} <= set(run.calls)


def test_a_value_that_the_kernel_refuses_puts_everything_back(host, monkeypatch):
    before = tree(host)
    real = Path.write_text

    def refusing(self: Path, text: str, *rest: Any) -> int:
        if self.name == "swappiness":
            raise OSError(22, "Invalid argument", str(self))
        return real(self, text, *rest)

    monkeypatch.setattr(Path, "write_text", refusing)
    with pytest.raises(AerieError, match="the kernel does not take 0: Invalid argument"):
        tune(host, Commands(host), settings=ALL)
    assert tree(host) == before


def test_a_run_that_was_killed_is_finished_by_the_next(host):
    class Killed(BaseException):
        pass

    def dies(argv: tuple[str, ...]) -> tuple[int, str]:
        os._exit(9) if argv[0].endswith("update-initramfs") else None
        return Commands(host)(argv)

    if (child := os.fork()) == 0:
        tune(host, dies, settings=ALL)  # type: ignore[arg-type]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    run = Commands(host)
    tune(host, run, settings=ALL)
    assert run.calls[:3] == ["/usr/sbin/update-grub", "/usr/sbin/update-initramfs -u -k all", "/usr/sbin/systemctl daemon-reload"]


# -- what others say


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("etc/default/grub", 'GRUB_CMDLINE_LINUX="quiet iommu=off"\n', "/etc/default/grub:1 says iommu=off, and iommu=pt is wanted"),
        ("etc/default/grub", "GRUB_CMDLINE_LINUX=intel_iommu=off\n", "/etc/default/grub:1 says intel_iommu=off, and iommu=pt is wanted"),
        ("etc/default/grub.d/50-cloud.cfg", 'GRUB_CMDLINE_LINUX_DEFAULT="pcie_aspm=force"\n', "50-cloud.cfg:1 says pcie_aspm=force"),
        ("etc/default/grub.d/99-site.cfg", '\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\n', "99-site.cfg:2 sets GRUB_CMDLINE_LINUX_DEFAULT anew"),
        (
            "etc/modprobe.d/p2p.conf",
            'options nvidia NVreg_EnableMSI=1 \\\n NVreg_RegistryDwords="ForceP2P=0x1"\n',
            "p2p.conf:1 says NVreg_Reg",
        ),
        ("usr/lib/modprobe.d/uvm.conf", "options nvidia-uvm uvm_disable_hmm=0\n", "/usr/lib/modprobe.d/uvm.conf:1 says uvm_disable_hmm=0"),
        ("etc/sysctl.conf", "# x\nvm.swappiness=60\n", "/etc/sysctl.conf:2 says vm.swappiness = 60"),
        ("usr/lib/sysctl.d/99-late.conf", "vm/swappiness = 60\n", "/usr/lib/sysctl.d/99-late.conf:1 says vm.swappiness = 60"),
        ("etc/security/limits.conf", "*  hard  memlock  64\n", "/etc/security/limits.conf:1 says memlock 64"),
        ("etc/default/cpufrequtils", 'GOVERNOR="ondemand"\n', "/etc/default/cpufrequtils:1 says ondemand"),
        ("etc/modprobe.d/aerie-tuning.conf", "options nvidia x=1\n", "was not written by Aerie"),
    ],
)
def test_what_others_set_differently_is_refused_with_its_place(host, path, text, message):
    (host / path).parent.mkdir(parents=True, exist_ok=True)
    (host / path).write_text(text)
    before = tree(host)
    with pytest.raises(AerieError) as caught:
        tune(host, Commands(host), settings=ALL)
    assert message in str(caught.value)
    assert tree(host) == before


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/default/grub.d/99-site.cfg", 'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT quiet"\n'),
        (
            "etc/default/grub",
            '#GRUB_CMDLINE_LINUX="iommu=off"\nGRUB_CMDLINE_LINUX_DEFAULT="iommu=off"\nGRUB_CMDLINE_LINUX_DEFAULT="pci=realloc"\n',
        ),
        ("usr/lib/sysctl.d/10-distribution.conf", "vm.swappiness = 60\n"),
        ("usr/lib/modprobe.d/aerie-tuning.conf", "options nvidia_uvm uvm_disable_hmm=0\n"),  # hidden by ours of the same name
        ("etc/security/limits.conf", "@students hard memlock 64\n"),
    ],
)
def test_what_does_not_stand_against_ours_is_let_be(host, path, text):
    (host / path).parent.mkdir(parents=True, exist_ok=True)
    (host / path).write_text(text)
    assert tune(host, Commands(host), check=True, settings=ALL)["changed"] is True


CLOUD_IMAGE = """\
# Cloud Image specific Grub settings for Generic Cloud Images
# CLOUD_IMG: This file was created/modified by the Cloud Image build process

# Set the recordfail timeout
GRUB_RECORDFAIL_TIMEOUT=0

# Do not wait on grub prompt
GRUB_TIMEOUT=0

# Set the default commandline
GRUB_CMDLINE_LINUX_DEFAULT="console=tty1 console=ttyS0"

# Set the grub console type
GRUB_TERMINAL=console
"""
"""/etc/default/grub.d/50-cloudimg-settings.cfg of Ubuntu's cloud images."""
CRASH_KERNEL = 'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT crashkernel=2G-4G:320M,4G-32G:512M"\n'


def command_line(root: Path) -> str:
    """What grub-mkconfig of Debian and Ubuntu makes of the settings: it reads the file, then the drop-ins as the shell lists them."""
    script = '. ./grub; for x in ./grub.d/*.cfg; do if [ -e "$x" ]; then . "$x"; fi; done; printf %s "$GRUB_CMDLINE_LINUX_DEFAULT"'
    return subprocess.run(["sh", "-e", "-c", script], cwd=root / "etc/default", capture_output=True, text=True, check=True).stdout


def test_a_cloud_images_words_are_kept_and_ours_come_after_them(host):
    drop_ins = host / "etc/default/grub.d"
    drop_ins.mkdir()
    (drop_ins / "50-cloudimg-settings.cfg").write_text(CLOUD_IMAGE)
    assert command_line(host) == "console=tty1 console=ttyS0"
    run, wanted = Commands(host), {"kernel_command_line": ALL["kernel_command_line"]}
    tune(host, run, settings=wanted)
    assert run.calls == ["/usr/sbin/update-grub"]
    assert command_line(host) == "console=tty1 console=ttyS0 iommu=pt pcie_aspm=off"
    (drop_ins / "kdump-tools.cfg").write_text(CRASH_KERNEL)
    assert command_line(host) == "console=tty1 console=ttyS0 iommu=pt pcie_aspm=off crashkernel=2G-4G:320M,4G-32G:512M"
    assert tune(host, Commands(host), check=True, settings=wanted)["changed"] is False
    (drop_ins / "kdump-tools.cfg").unlink()
    tune(host, Commands(host), state="absent")
    assert command_line(host) == "console=tty1 console=ttyS0"
    assert [path.name for path in drop_ins.iterdir()] == ["50-cloudimg-settings.cfg"]


def test_a_word_that_a_cloud_image_takes_away_again_is_not_taken_for_set(host):
    (host / "etc/default/grub").write_text('GRUB_CMDLINE_LINUX_DEFAULT="quiet splash iommu=pt pcie_aspm=off"\n')
    (host / "etc/default/grub.d").mkdir()
    (host / "etc/default/grub.d/50-cloudimg-settings.cfg").write_text(CLOUD_IMAGE)
    tune(host, Commands(host), settings=ALL)
    assert command_line(host) == "console=tty1 console=ttyS0 iommu=pt pcie_aspm=off"


def test_what_others_say_already_is_not_said_again(host):
    (host / "etc/default/grub").write_text('GRUB_CMDLINE_LINUX="iommu=pt pcie_aspm=off"\n')
    (host / "etc/modprobe.d").mkdir()
    (host / "etc/modprobe.d/uvm.conf").write_text("options nvidia_uvm uvm_disable_hmm=1\n")
    wanted = {key: ALL[key] for key in ("kernel_command_line",)} | {"modprobe": {"nvidia_uvm": {"uvm_disable_hmm": "1"}}}
    answer = tune(host, Commands(host), settings=wanted)
    assert (answer["changed"], answer["reboot_required"]) == (False, True)


# -- what this host can't


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("update-grub", "there is no update-grub here, and what boots it can't be told"),
        ("setpci", "acs: setpci not found: install pciutils"),
    ],
)
def test_a_tool_that_is_missing_is_named_with_its_cure(host, tool, message):
    (host / "usr/sbin" / tool).unlink()
    with pytest.raises(AerieError, match=message):
        tune(host, Commands(host), settings=ALL)


def test_a_host_without_grub_says_what_seems_to_boot_it(host):
    (host / "usr/sbin/update-grub").unlink()
    (host / "etc/kernelstub").mkdir()
    (host / "etc/kernelstub/configuration").write_text("{}")
    with pytest.raises(AerieError, match=r"boot by kernelstub .*: set iommu=pt and pcie_aspm=off by its own means"):
        tune(host, Commands(host), settings=ALL)


@pytest.mark.parametrize(
    ("gpu", "watts", "message"),
    [
        (GPU, 700, "GPU 0 .* takes 150 to 600 W, as its driver says"),
        (GPU | {"sku": "server", "power": {}}, 250, "takes 300 to 600 W, as a server card says"),
        (GPU | {"sku": None, "power": {}}, 250, "can't be told: leave it out"),
    ],
)
def test_a_power_limit_that_a_card_does_not_take_is_refused(host, gpu, watts, message):
    info = INFO | {"gpus": [gpu | {"index": 0, "uuid": "GPU-0"}]}
    with pytest.raises(AerieError, match=message):
        tune(host, Commands(host), info=info, settings={"power_limit_w": watts})


def test_governors_kernel_variables_and_gpus_that_are_not_there_are_refused_together(host):
    wanted = {"cpu_governor": "powersave", "sysctl": {"vm.swapiness": 0}, "persistence": True}
    with pytest.raises(AerieError) as caught:
        tune(host, Commands(host), info=INFO | {"gpus": [], "gpu_reason": "nvidia-smi: not found"}, settings=wanted)
    for message in (
        "cpu0 offers performance and schedutil, not powersave",
        "has no vm.swapiness",
        "no GPU answers (nvidia-smi: not found)",
    ):
        assert message in str(caught.value)


def test_in_a_container_limits_are_set_and_all_else_is_refused(host):
    info = INFO | {"container": {"kind": "docker"}}
    with pytest.raises(AerieError, match=r"kernel_command_line, modprobe.*container \(docker\).*the machine that runs it"):
        tune(host, Commands(host), info=info, settings=ALL)
    (host / "run/systemd/system/.keep").unlink()
    (host / "run/systemd/system").rmdir()
    run = Commands(host)
    answer = tune(host, run, info=info, settings={"limits": {"memlock": "unlimited"}})
    assert (answer["files"], run.calls) == (["/etc/security/limits.d/90-aerie-tuning.conf"], [])
    assert tune(host, run, check=True, info=info, settings={"sysctl": {"vm.swappiness": 0}}, manage_kernel="true")["changed"] is True


# -- what is in force


def test_verification_names_everything_that_did_not_take_and_passes_when_all_did(host):
    run = Cleared(host)
    tune(host, run, settings=ALL)
    for path in host.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"):
        path.write_text("schedutil\n")
    with pytest.raises(AerieError) as caught:
        tune(host, Commands(host), state="verified", settings=ALL)
    for message in (
        "kernel_command_line: iommu=pt is not in /proc/cmdline",
        'nvidia runs with NVreg_RegistryDwords="", not ForceP2P',
        "acs: bridge 0000:00:01.1 has 0x001d, not 0",
        "cpu_governor: 2 of 2 have schedutil, not performance",
        "power_limit_w: 2 of 2 have 600, not 450",
        "persistence: 2 of 2 have 0, not 1",
    ):
        assert message in str(caught.value)
    info = as_tuned(host, rebooted=True)
    assert tune(host, run, info=info, state="verified", settings=ALL)["mismatches"] == []


def test_the_boot_program_clears_ports_on_the_way_to_gpus_and_no_others(tmp_path):
    """Fed with what pciutils prints of two switches, of which only one has GPUs below it."""
    text = scenarios.lspci(scenarios.named("workstation", 4))
    blocks = [block for block in text.strip("\n").split("\n\n") if not block.startswith(("0000:13:", "0000:14:"))]
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "lspci.txt").write_text("\n\n".join(blocks) + "\n")
    for name, body in {"lspci": f'[ "$*" = -Dvvvnn ] && cat {tmp_path}/lspci.txt', "setpci": f'echo "$*" >> {tmp_path}/calls'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    program = tmp_path / "clear-acs"
    program.write_text(tuning_files.CLEAR_ACS)
    subprocess.run(["sh", program], env={"PATH": f"{tools}:{os.environ['PATH']}"}, check=True)
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"-s {address} ECAP_ACS+0x6.w=0000" for address in ("0000:00:01.1", "0000:02:00.0", "0000:02:01.0")
    ]


def test_a_damaged_state_file_is_no_guess(host):
    state = host / tuning_found.STATE.lstrip("/")
    state.parent.mkdir()
    state.write_text("{")
    with pytest.raises(AerieError, match="it says how this host was before it was tuned"):
        tune(host, Commands(host), settings=ALL)


def test_the_state_says_what_capturing_a_host_needs(host):
    tune(host, Commands(host), settings=ALL)
    kept = json.loads((host / tuning_found.STATE.lstrip("/")).read_text())
    assert parse(kept["settings"]) == (settings(**ALL), [])
    assert kept["previous"]["sysctl"] == {"vm.swappiness": "60"}
