#!/usr/bin/python3
"""What firmware, kernel and driver would do at the boot of a test host, which shares its kernel with the machine. Standard library only.

    boot.py           all of it: run by fake-host.service early in each boot
    boot.py load      load the NVIDIA driver that is installed, where it was built for the running kernel
    boot.py unload

- the kernel's release in /proc/sys/kernel is the recording's; uname(2) goes on to tell the machine's;
- /proc/cmdline is what update-grub wrote to /boot/grub/grub.cfg, the machine's own where nothing was written;
- /proc/driver/nvidia/{version,params} and /sys/module/nvidia*/parameters come from the driver's version and /etc/modprobe.d;
- a few files below /proc/sys can be written, and take what /etc/sysctl.d says; cpufreq's below /sys/devices/system/cpu too;
- /sys/kernel/iommu_groups follows the kernel command line;
- the host does not look like a container, unless the recording says that it is one; what the tools kept is forgotten.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PLACE = Path("/var/lib/fake-host")
RUN = Path("/run/fake-host")
DRIVER_VERSION = Path("/usr/share/fake-host/driver-version")
PARAMETERS = {
    "EnableMSI": "1",
    "ModifyDeviceFiles": "1",
    "EnableStreamMemOPs": "0",
    "DmaRemapPeerMmio": "1",
    "RegistryDwords": '""',
    "RegistryDwordsPerDevice": '""',
    "RmMsg": '""',
}
UVM = {"uvm_disable_hmm": "N", "uvm_ats_mode": "1"}
SYSCTLS = (
    "vm/swappiness",
    "vm/zone_reclaim_mode",
    "vm/max_map_count",
    "vm/overcommit_memory",
    "kernel/numa_balancing",
    "kernel/sched_autogroup_enabled",
    "net/core/rmem_max",
    "net/core/wmem_max",
    "fs/file-max",
)
CPUS = Path("/sys/devices/system/cpu")
RELEASE = Path("/proc/sys/kernel/osrelease")


def mounted(path: Path) -> bool:
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def bind(source: Path, target: Path) -> None:
    """Show `source` at `target`; nothing where there is no `target` to cover."""
    if target.exists() and not mounted(target):
        subprocess.run(["mount", "--bind", source, target], check=True)


def cover(target: Path) -> Path | None:
    """An empty directory in memory over `target`, made once; None where there is no `target`."""
    if not target.is_dir():
        return None
    if not mounted(target):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", target], check=True)
    return target


def recording() -> dict:
    try:
        return json.loads((PLACE / "recording.json").read_text())
    except FileNotFoundError:
        return {}


def kernel() -> None:
    (RUN / "osrelease").write_text(f"{recording().get('kernel') or os.uname().release}\n")
    bind(RUN / "osrelease", RELEASE)


def command_line() -> None:
    try:
        text = Path("/boot/grub/grub.cfg").read_text()
    except FileNotFoundError:
        text = ""
    found = re.search(r"^\s*linux\s+(\S+) (.*)$", text, re.MULTILINE)
    line = f"BOOT_IMAGE={found.group(1)} {found.group(2)}" if found else "BOOT_IMAGE=/boot/vmlinuz root=UUID=0 ro quiet"
    (RUN / "cmdline").write_text(f"{line}\n")
    bind(RUN / "cmdline", Path("/proc/cmdline"))
    words = line.split()
    groups = cover(Path("/sys/kernel/iommu_groups"))
    if groups and not {"iommu=off", "amd_iommu=off", "intel_iommu=off"} & set(words):
        for number in range(8):
            (groups / str(number) / "devices").mkdir(parents=True, exist_ok=True)
            (groups / str(number) / "type").write_text("identity\n" if "iommu=pt" in words else "DMA-FQ\n")


def not_a_container() -> None:
    kind = recording().get("container")
    marker = Path("/run/systemd/container")
    if kind:
        marker.write_text(f"{kind}\n")
        return
    marker.unlink(missing_ok=True)
    (RUN / "environ").write_bytes(b"HOME=/\0TERM=linux\0")
    bind(RUN / "environ", Path("/proc/1/environ"))


def sysctls() -> None:
    for name in SYSCTLS:
        target = Path("/proc/sys") / name
        if target.exists() and not mounted(target):
            copy = RUN / "sysctl" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(target.read_text())
            bind(copy, target)
    settings: dict[str, Path] = {}
    for directory in ("/usr/lib/sysctl.d", "/run/sysctl.d", "/etc/sysctl.d"):  # a later directory's file of the same name wins
        settings |= {path.name: path for path in Path(directory).glob("*.conf")}
    for _, path in sorted(settings.items()):
        for line in path.read_text().splitlines():
            name, separator, value = line.strip().removeprefix("-").partition("=")
            place = name.strip().replace(".", "/")
            if separator and not line.startswith(("#", ";")) and place in SYSCTLS and (Path("/proc/sys") / place).exists():
                (Path("/proc/sys") / place).write_text(f"{value.strip()}\n")


def cpu_frequency() -> None:
    count = os.sysconf("SC_NPROCESSORS_CONF")
    kept = {name: (CPUS / name).read_text() for name in ("online", "possible", "present") if (CPUS / name).exists()}
    cpus = cover(CPUS)
    if cpus is None:
        return
    for name, text in kept.items():
        (cpus / name).write_text(text)
    for number in range(count):
        for part in ("topology", "node0"):
            (cpus / f"cpu{number}" / part).mkdir(parents=True, exist_ok=True)
        policy, link = cpus / "cpufreq" / f"policy{number}", cpus / f"cpu{number}" / "cpufreq"
        policy.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(f"../cpufreq/{policy.name}")
        answers = {
            "scaling_driver": "acpi-cpufreq",
            "scaling_available_governors": "performance schedutil powersave",
            "scaling_governor": "schedutil",
        }
        for name, text in answers.items():
            (policy / name).write_text(f"{text}\n")


def options(module: str) -> dict[str, str]:
    """Options of a module by modprobe.d(5): files in order of name, a later value wins."""
    found: dict[str, str] = {}
    for path in sorted(Path("/etc/modprobe.d").glob("*.conf")):
        for line in path.read_text().splitlines():
            words = line.split(None, 2)
            if len(words) == 3 and words[0] == "options" and words[1].replace("-", "_") == module:
                found |= dict(part.partition("=")[::2] for part in re.findall(r'[^\s"]+=(?:"[^"]*"|[^\s"]*)|\S+', words[2]))
    return found


def load_driver() -> int:
    """0 where the driver is loaded now."""
    if Path("/proc/driver/nvidia/version").exists():
        return 0
    outer = recording().get("loaded_driver")  # the driver of a container's host
    if not outer and not DRIVER_VERSION.exists():
        return 1
    version, release = outer or DRIVER_VERSION.read_text().strip(), RELEASE.read_text().strip()
    if not outer and not Path(f"/var/lib/dkms/nvidia/{version}/{release}").exists():
        print(f"modprobe: FATAL: Module nvidia not found in directory /lib/modules/{release}", file=sys.stderr)
        return 1
    driver = cover(Path("/proc/driver"))
    if driver is None:
        return 1
    given = {name.removeprefix("NVreg_"): value for name, value in options("nvidia").items() if name.startswith("NVreg_")}
    values = PARAMETERS | {
        name: f'"{value.strip(chr(34))}"' if PARAMETERS.get(name, "").startswith('"') else value for name, value in given.items()
    }
    (driver / "nvidia").mkdir(exist_ok=True)
    (driver / "nvidia/params").write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
    (driver / "nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder@fake)  \n"
        "GCC version:  gcc version 12.2.0\n"
    )
    modules = cover(Path("/sys/module"))
    if modules is not None:
        for module, defaults in (("nvidia", {}), ("nvidia_uvm", UVM)):
            directory = modules / module / "parameters"
            directory.mkdir(parents=True, exist_ok=True)
            for name, value in (defaults | {name: value for name, value in options(module).items() if module != "nvidia"}).items():
                shown = {"0": "N", "1": "Y"}.get(value, value) if defaults.get(name) in ("N", "Y") else value
                (directory / name).write_text(f"{shown}\n")
        (modules / "nvidia/version").write_text(f"{version}\n")
    return 0


def unload_driver() -> int:
    for target in (Path("/proc/driver"), Path("/sys/module")):
        if mounted(target):
            subprocess.run(["umount", target], check=True)
    return 0


def main() -> int:
    RUN.mkdir(parents=True, exist_ok=True)
    if sys.argv[1:] == ["load"]:
        return load_driver()
    if sys.argv[1:] == ["unload"]:
        return unload_driver()
    (PLACE / "state.json").unlink(missing_ok=True)
    kernel()
    command_line()
    not_a_container()
    sysctls()
    cpu_frequency()
    load_driver()
    return 0


if __name__ == "__main__":
    sys.exit(main())
