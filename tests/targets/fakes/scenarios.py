"""What the fake tools of a host answer at first: one recording for each scenario, in the form of tests/fixtures/hosts.

`{"commands": {"nvidia-smi -q -x": {"rc": 0, "stdout": …}, …}}`. An answer may hold `@DRIVER@` for the version of the driver that is
loaded and `@CUDA@` for the newest CUDA version that it knows; what the tools change (power limits, persistence, ACS) they keep in
their state and show in these answers. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LSPCI = "lspci -Dvvvnn"
UBUNTU_KERNEL = "6.8.0-88-generic"
SMI_XML = "nvidia-smi -q -x"


@dataclass(frozen=True)
class Scenario:
    """A host with RTX PRO 6000 GPUs, two below each PCIe switch."""

    gpus: int = 2
    name: str = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    power_w: tuple[int, int, int] = (150, 600, 600)  # lowest, default, highest limit
    bar1_mib: int = 131072
    acs: bool = True  # request redirection is on after a boot, as firmware leaves it
    generation: int = 5
    container: str | None = None  # kind, when the host is a container
    loaded_driver: str | None = None  # loaded whatever is installed, as below a container
    kernel: str | None = None  # release of the running kernel, else the machine's own


SCENARIOS = {
    "workstation": Scenario(),
    "server": Scenario(gpus=8, name="NVIDIA RTX PRO 6000 Blackwell Server Edition", power_w=(300, 600, 600)),
    "max-q": Scenario(gpus=4, name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", power_w=(250, 300, 325)),
    "sick": Scenario(bar1_mib=256, generation=1),
    "container": Scenario(container="docker", loaded_driver="580.105.08"),
    "ubuntu": Scenario(kernel=UBUNTU_KERNEL),
}


def named(name: str, gpus: int | None = None) -> Scenario:
    scenario = SCENARIOS[name]
    return scenario if gpus is None else replace(scenario, gpus=gpus)


def recording(scenario: Scenario) -> dict[str, Any]:
    """What the tools of such a host answer."""
    answers = {
        "nvidia-smi": heading(),
        SMI_XML: smi_xml(scenario),
        "nvidia-smi topo -m": topology(scenario),
        "nvidia-smi topo -p2p r": p2p(scenario),
        LSPCI: lspci(scenario),
    }
    commands = {command: {"rc": 0, "stdout": text} for command, text in answers.items()}
    host = {"container": scenario.container, "loaded_driver": scenario.loaded_driver, "kernel": scenario.kernel}
    return {"commands": commands, **host}


def bus(gpu: int) -> str:
    """PCI address of a GPU: two below each switch, switches eight buses apart."""
    return f"0000:{16 * (gpu // 2) + 3 + gpu % 2:02x}:00.0"


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{gpu:012d}"


def heading() -> str:
    line = f"| NVIDIA-SMI @DRIVER@             Driver Version: @DRIVER@     CUDA Version: {'@CUDA@':8} |"
    return f"+{'-' * 89}+\n{line}\n+{'-' * 89}+\n"


def smi_xml(scenario: Scenario) -> str:
    gpus = "".join(gpu_xml(scenario, number) for number in range(scenario.gpus))
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>\n'
        "\t<timestamp>Sun Nov 29 21:11:06 2026</timestamp>\n\t<driver_version>@DRIVER@</driver_version>\n"
        f"\t<cuda_version>@CUDA@</cuda_version>\n\t<attached_gpus>{scenario.gpus}</attached_gpus>\n{gpus}</nvidia_smi_log>\n"
    )


def element(name: str, value: Any, depth: int = 2) -> str:
    tabs = "\t" * depth
    if isinstance(value, dict):
        return f"{tabs}<{name}>\n{''.join(element(key, inner, depth + 1) for key, inner in value.items())}{tabs}</{name}>\n"
    return f"{tabs}<{name}>{value}</{name}>\n"


def gpu_xml(scenario: Scenario, gpu: int) -> str:
    lowest, default, highest = scenario.power_w
    address = bus(gpu).upper()
    reasons = ("applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sync_boost")
    values: dict[str, Any] = {
        "product_name": scenario.name,
        "product_brand": "NVIDIA RTX",
        "product_architecture": "Blackwell",
        "persistence_mode": "Disabled",
        "mig_mode": {"current_mig": "Disabled", "pending_mig": "Disabled"},
        "serial": f"00000000000{gpu:02d}",
        "uuid": uuid(gpu),
        "minor_number": gpu,
        "vbios_version": "98.02.55.00.00",
        "gpu_virtualization_mode": {"virtualization_mode": "None"},
        "gpu_recovery_action": "None",
        "gsp_firmware_version": "@DRIVER@",
        "pci": {
            "pci_bus": address[5:7],
            "pci_device": "00",
            "pci_domain": "0000",
            "pci_device_id": "2BB110DE",
            "pci_bus_id": f"0000{address}",
            "pci_gpu_link_info": {
                "pcie_gen": {
                    "max_link_gen": 5,
                    "current_link_gen": scenario.generation,
                    "device_current_link_gen": scenario.generation,
                    "max_device_link_gen": 5,
                    "max_host_link_gen": 5,
                },
                "link_widths": {"max_link_width": "16x", "current_link_width": "16x"},
            },
            "replay_counter": 0,
            "replay_rollover_counter": 0,
        },
        "fan_speed": "30 %",
        "performance_state": "P8",
        "clocks_event_reasons": {
            "clocks_event_reason_gpu_idle": "Active",
            **{f"clocks_event_reason_{reason}": "Not Active" for reason in reasons},
        },
        "fb_memory_usage": {"total": "97887 MiB", "reserved": "637 MiB", "used": "1 MiB", "free": "97250 MiB"},
        "bar1_memory_usage": {"total": f"{scenario.bar1_mib} MiB", "used": "1 MiB", "free": f"{scenario.bar1_mib - 1} MiB"},
        "compute_mode": "Default",
        "utilization": {"gpu_util": "0 %", "memory_util": "0 %"},
        "ecc_mode": {"current_ecc": "Enabled", "pending_ecc": "Enabled"},
        "ecc_errors": {
            "volatile": {"sram_correctable": 0, "sram_uncorrectable_parity": 0, "sram_uncorrectable_secded": 0, "dram_uncorrectable": 0},
            "aggregate": {"sram_correctable": 0, "sram_uncorrectable_parity": 0, "sram_uncorrectable_secded": 0, "dram_uncorrectable": 0},
        },
        "remapped_rows": {
            "remapped_row_corr": 0,
            "remapped_row_unc": 0,
            "remapped_row_pending": "No",
            "remapped_row_failure": "No",
        },
        "temperature": {"gpu_temp": "34 C", "gpu_temp_max_threshold": "N/A"},
        "gpu_power_readings": {
            "power_state": "P8",
            "average_power_draw": "15.20 W",
            "instant_power_draw": "15.10 W",
            "current_power_limit": f"{default}.00 W",
            "requested_power_limit": f"{default}.00 W",
            "default_power_limit": f"{default}.00 W",
            "min_power_limit": f"{lowest}.00 W",
            "max_power_limit": f"{highest}.00 W",
        },
        "clocks": {"graphics_clock": "180 MHz", "sm_clock": "180 MHz", "mem_clock": "405 MHz", "video_clock": "600 MHz"},
        "max_clocks": {"graphics_clock": "3090 MHz", "sm_clock": "3090 MHz", "mem_clock": "14001 MHz", "video_clock": "3090 MHz"},
        "processes": "\n\t\t",
    }
    inner = "".join(element(name, value) for name, value in values.items())
    return f'\t<gpu id="0000{address}">\n{inner}\t</gpu>\n'


def link(one: int, other: int) -> str:
    return "PIX" if one // 2 == other // 2 else "NODE"


def topology(scenario: Scenario) -> str:
    names = [f"GPU{number}" for number in range(scenario.gpus)]
    rows = [
        "\t".join([name, *(" X " if one == other else link(one, other) for other in range(scenario.gpus)), "0-1", "0", "", "N/A"])
        for one, name in enumerate(names)
    ]
    heading_row = "\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    return "\n".join([heading_row, *rows, "", "Legend:", "", "  X    = Self", ""])


def p2p(scenario: Scenario) -> str:
    names = [f"GPU{number}" for number in range(scenario.gpus)]
    rows = [" " + "\t".join([name, *("X" if one == other else "OK" for other in range(scenario.gpus))]) for one, name in enumerate(names)]
    return "\n".join([" \t" + "\t".join(names), *rows, "", "Legend:", "", "  X    = Self", "  OK   = Status Ok", ""])


def lspci(scenario: Scenario) -> str:
    """Root port, switch with two downstream ports, and GPUs, as pciutils shows them with -Dvvvnn."""
    speed = {1: "2.5GT/s", 2: "5GT/s", 3: "8GT/s", 4: "16GT/s", 5: "32GT/s"}
    blocks = []

    def device(address: str, title: str, *lines: str) -> None:
        blocks.append("\n".join([f"{address} {title}", *(f"\t{line}" for line in lines)]))

    def bridge(address: str, kind: str, title: str, buses: tuple[int, int, int], *, acs: bool) -> None:
        primary, secondary, subordinate = buses
        control = "ACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
        if not scenario.acs:
            control = control.replace("+", "-")
        capability = "ACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+"
        device(
            address,
            f"PCI bridge [0604]: {title}",
            "Control: I/O+ Mem+ BusMaster+ SpecCycle- MemWINV- VGASnoop- ParErr- Stepping- SERR+ FastB2B- DisINTx+",
            f"Bus: primary={primary:02x}, secondary={secondary:02x}, subordinate={subordinate:02x}, sec-latency=0",
            f"Capabilities: [58] Express (v2) {kind}, MSI 00",
            "\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <64us",
            "\tLnkSta:\tSpeed 32GT/s, Width x16",
            *(("Capabilities: [2a0 v1] Access Control Services", f"\t{capability}", f"\t{control}") if acs else ()),
            "Kernel driver in use: pcieport",
        )

    for pair in range((scenario.gpus + 1) // 2):
        first = 16 * pair
        members = [gpu for gpu in range(scenario.gpus) if gpu // 2 == pair]
        port = "Advanced Micro Devices, Inc. [AMD] Turin PCIe GPP Bridge [1022:153b] (rev 01)"
        switch = "Broadcom / LSI PEX890xx PCIe Gen 5 Switch [1000:c030] (rev b0)"
        bridge(f"0000:00:{pair + 1:02x}.1", "Root Port (Slot+)", port, (0, first + 1, first + 4), acs=True)
        bridge(f"0000:{first + 1:02x}:00.0", "Upstream Port", switch, (first + 1, first + 2, first + 4), acs=False)
        for gpu in members:
            slot, below = gpu % 2, first + 3 + gpu % 2
            bridge(f"0000:{first + 2:02x}:{slot:02x}.0", "Downstream Port (Slot+)", switch, (first + 2, below, below), acs=True)
        for gpu in members:
            slow = " (downgraded)" if scenario.generation < 5 else ""
            device(
                bus(gpu),
                f"3D controller [0302]: NVIDIA Corporation GB202GL [{scenario.name.removeprefix('NVIDIA ')}] [10de:2bb1] (rev a1)",
                "Control: I/O- Mem+ BusMaster+ SpecCycle- MemWINV- VGASnoop- ParErr- Stepping- SERR- FastB2B- DisINTx+",
                "Region 0: Memory at 40000000 (32-bit, non-prefetchable) [size=64M]",
                f"Region 1: Memory at 38000000000 (64-bit, prefetchable) [size={scenario.bar1_mib // 1024 or scenario.bar1_mib}"
                f"{'G' if scenario.bar1_mib >= 1024 else 'M'}]",
                "Capabilities: [60] Express (v2) Endpoint, IntMsgNum 0",
                "\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <4us",
                f"\tLnkSta:\tSpeed {speed[scenario.generation]}{slow}, Width x16",
                "Kernel driver in use: nvidia",
            )
    return "\n\n".join(blocks) + "\n"
