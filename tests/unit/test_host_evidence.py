"""Each pain that evidence can show is told from a recorded host, and a healthy host shows none of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.host import collectives, driver, installed, kernel, pci_config
from ansible.module_utils.aerie.host.gpus import sku
from ansible.module_utils.aerie.host.host_info import Question, open_host, survey
from ansible.module_utils.aerie.host.pci import parse_lspci

HOSTS = Path(__file__).parents[1] / "fixtures/hosts"
MODEL = "/data/models/Kimi-K2.5"
QUESTION = Question(aerie_root=Path("/data/aerie"), models=(MODEL,), paths=("/data/aerie",))


def recorded(name: str) -> dict[str, Any]:
    return survey(open_host(HOSTS / name), QUESTION)


@pytest.fixture(scope="module")
def healthy() -> dict[str, Any]:
    return recorded("rtx-pro-6000")


def redirecting(info: dict[str, Any]) -> int:
    return sum(bool(bridge["acs"] and bridge["acs"]["request_redirect"]) for bridge in info["pci"]["bridges"])


def wedged(info: dict[str, Any]) -> list[int]:
    return [
        gpu["index"] for gpu in info["gpus"] if gpu["utilization_percent"] == 100 and not gpu["processes"] and gpu["power"]["draw_w"] > 100
    ]


SIGNS = [
    ("acs-redirect", lambda info: redirecting(info), 0, 12),
    ("bar1-256-mib", lambda info: {gpu["bar1_total_mib"] for gpu in info["gpus"]}, {131072}, {256}),
    ("link-degraded", lambda info: info["gpus"][3]["pcie"]["width"], 16, 8),
    ("link-degraded", lambda info: info["gpus"][3]["pcie"]["generation_max"], 5, 1),
    ("link-degraded", lambda info: info["pci"]["gpu_links"][3]["link"]["width"], 16, 8),
    ("force-p2p-loaded", lambda info: "ForceP2P=0x11" in info["driver"]["registry_dwords"], False, True),
    ("force-p2p-not-loaded", lambda info: "ForceP2P" in str(info["driver"]["modprobe_files"]), False, True),
    ("force-p2p-not-loaded", lambda info: info["driver"]["registry_dwords"], "", ""),
    (
        "stray-cuda-12",
        lambda info: [one["path"] for one in info["libraries"]["cuda"] if (one["name"], one["major"]) == ("libcudart", 12)],
        [],
        ["/opt/conda/lib/libcudart.so.12", "/usr/local/cuda-12.8/lib64/libcudart.so.12"],
    ),
    ("nvcc-12.8", lambda info: info["tools"]["nvcc"]["version"], "13.0", "12.8"),
    ("nvcc-12.8", lambda info: info["tools"]["triton_ptxas"]["version"], "12.9", "12.4"),
    ("nccl-graph-file-empty", lambda info: [(one["path"], one["exists"]) for one in info["nccl"]["graph_files"]], [], [("", False)]),
    ("nccl-conf-stale", lambda info: [(one["from"], one["gpus"]) for one in info["nccl"]["graph_files"]], [], [("/etc/nccl.conf", 4)]),
    (
        "caches-stale",
        lambda info: [one["kind"] for one in info["caches"] if one["age_s"] > info["driver"]["installed_age_s"]],
        [],
        ["triton", "flashinfer", "sglang_p2p"],
    ),
    ("gpu-lost", lambda info: [xid["xid"] for xid in info["driver"]["xids"]], [], [79]),
    ("gpu-lost", lambda info: [one["address"] for one in info["pci"]["gpu_links"] if not one["responds"]], [], ["0000:83:00.0"]),
    ("gpu-lost", lambda info: len(info["gpus"]), 8, 7),
    ("gpu-missing", lambda info: (len(info["gpus"]), len(info["pci"]["gpu_links"])), (8, 8), (7, 7)),
    (
        "xid-8",
        lambda info: [(xid["xid"], xid["pci"], xid["seconds"]) for xid in info["driver"]["xids"]],
        [],
        [(8, "0000:24:00.0", 41207.220981)],
    ),
    ("gpu-wedged", wedged, [], [2]),
    ("gpu-wedged", lambda info: info["gpus"][2]["memory_used_mib"], 6, 624),
    ("gpu-memory-held", lambda info: [one["pid"] for gpu in info["gpus"] for one in gpu["processes"]], [], [40117]),
    ("gpu-throttled", lambda info: info["gpus"][1]["throttle"], [], ["hw_thermal_slowdown"]),
    ("gpu-throttled", lambda info: (info["gpus"][1]["persistence"], info["gpus"][1]["power"]["limit_w"]), (True, 600.0), (False, 300.0)),
    ("model-shard-missing", lambda info: "1 of the 64 weight files" in str(info["models"][MODEL]["problems"]), False, True),
    (
        "driver-mismatch",
        lambda info: (info["driver"]["loaded_version"], info["driver"]["version"]),
        ("580.105.08", "580.105.08"),
        ("580.95.05", "580.105.08"),
    ),
    ("driver-mismatch", lambda info: "version mismatch" in (info["gpu_reason"] or ""), False, True),
    (
        "iommu-on",
        lambda info: info["iommu"],
        {"groups": 0, "enabled": False, "passthrough": None},
        {"groups": 6, "enabled": True, "passthrough": False},
    ),
    ("iommu-on", lambda info: info["kernel_parameters"]["amd_iommu"], ["off"], ["on"]),
    ("governor-powersave", lambda info: info["cpu"]["governors"], {"performance": 8}, {"powersave": 8}),
    ("memlock-limited", lambda info: info["limits"], {"memlock": "unlimited", "nofile": 1048576}, {"memlock": 8388608, "nofile": 1048576}),
    ("untuned", lambda info: info["sysctl"]["kernel.numa_balancing"], "0", "1"),
    ("untuned", lambda info: info["driver"]["uvm_parameters"]["uvm_disable_hmm"], "Y", "N"),
    ("bare", lambda info: (info["driver"]["loaded"], len(info["gpus"]), len(info["pci"]["gpu_links"])), (True, 8, 8), (False, 0, 8)),
    ("bare", lambda info: info["release"], "0.5.15.post1-0123456789ab", None),
]


@pytest.mark.parametrize(
    ("host", "sign", "at_healthy", "at_sick"), SIGNS, ids=[f"{host}-{number}" for number, (host, *_) in enumerate(SIGNS)]
)
def test_a_sick_host_differs_from_a_healthy_one_in_what_it_suffers_from(healthy, host, sign, at_healthy, at_sick):
    assert sign(healthy) == at_healthy
    assert sign(recorded(host)) == at_sick


def test_every_sick_host_has_a_sign():
    based = {path.parent.name for path in HOSTS.glob("*/recording.json") if '"base"' in path.read_text()}
    assert {host for host, *_ in SIGNS} == based


def test_gpus_are_told_with_their_place_their_power_and_their_links(healthy):
    gpu = healthy["gpus"][5]
    assert (gpu["sku"], gpu["architecture"], gpu["numa_node"], gpu["mig"], gpu["recovery_action"]) == (
        "server",
        "Blackwell",
        1,
        False,
        None,
    )
    assert gpu["power"] == {"draw_w": 36.4, "limit_w": 600.0, "default_w": 600.0, "min_w": 300.0, "max_w": 600.0}
    assert gpu["clocks"] == {"sm_mhz": 180, "sm_max_mhz": 2430, "memory_mhz": 405, "memory_max_mhz": 12481}
    assert gpu["pcie"]["generation_max_slot"] == 5
    assert (gpu["ecc"], gpu["remapped_rows"]) == (
        {"enabled": True, "pending": False, "uncorrectable": 0},
        {"pending": False, "failed": False},
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "max-q"),
        ("NVIDIA H200", None),
    ],
)
def test_editions_are_told_by_name(name, kind):
    assert sku(name) == kind


def test_pairs_are_told_by_how_they_are_linked(healthy):
    links = healthy["topology"]["links"]
    assert len(links) == len(healthy["topology"]["p2p_read"]) == 28
    assert (links["0-1"], links["0-2"], links["3-4"]) == ("PIX", "NODE", "SYS")


def test_bridges_are_told_with_what_hangs_on_them(healthy):
    bridges = {bridge["address"]: bridge for bridge in healthy["pci"]["bridges"]}
    root, down = bridges["0000:20:01.1"], bridges["0000:22:01.0"]
    assert (root["kind"], root["parent"], root["to_gpus"]) == ("root_port", None, [2, 3])
    assert (down["kind"], down["parent"], down["to_gpus"]) == ("downstream_port", "0000:21:00.0", [3])
    assert bridges["0000:21:00.0"]["acs"] is None
    assert healthy["pci"]["gpu_links"][3]["parent"] == down["address"]


def test_the_release_and_the_system_tell_their_packages(healthy):
    release = healthy["packages"]["release"]
    assert {key: release[key] for key in ("torch", "torch_cuda", "sglang", "kernel_cuda", "nccl", "flashinfer")} == {
        "torch": "2.9.1+cu130",
        "torch_cuda": "13.0",
        "sglang": "0.5.15.post1",
        "kernel_cuda": "13.0",
        "nccl": "2.28.9",
        "flashinfer": "0.6.1",
    }
    assert healthy["packages"]["system"]["libnvidia-compute"] == "580.105.08-1ubuntu1"
    assert healthy["packages"]["held"] == ["cuda-toolkit-13-0", "libnccl-dev", "libnccl2", "nvidia-open"]
    assert healthy["nccl"]["system_version"] == "2.28.3"


def test_a_half_installed_package_is_told(tmp_path):
    half_installed = {" ".join(installed.DPKG): {"replace": {"13.0.2-1\thi ": "13.0.2-1\tiF "}}}
    (tmp_path / "recording.json").write_text(json.dumps({"base": str(HOSTS / "rtx-pro-6000"), "commands": half_installed}))
    packages = survey(open_host(tmp_path), QUESTION)["packages"]
    assert packages["broken"] == ["cuda-toolkit-13-0"]
    assert "cuda-toolkit-13-0" in packages["system"]


def test_caches_of_a_release_are_told_apart_from_those_of_the_user():
    keyed = {cache["path"]: cache["release_keyed"] for cache in recorded("caches-stale")["caches"]}
    assert keyed["/home/user1/.triton/cache"] is False
    assert keyed["/data/aerie/caches/0.5.15.post1-0123456789ab-580.105.08/triton"] is True


def config(*, acs: int | None, port: int = 6) -> bytes:
    """A bridge's configuration space with an Express capability behind another, and ACS behind a serial number."""
    space = bytearray(4096)
    space[0:4], space[0x06], space[0x0E], space[0x19], space[0x34] = b"\x22\x10\x3f\x15", 0x10, 1, 0x21, 0x40
    space[0x40:0x42] = b"\x01\x58"
    struct.pack_into("<BBH", space, 0x58, 0x10, 0x00, port << 4 | 2)
    struct.pack_into("<I", space, 0x58 + 0x0C, 16 << 4 | 5)
    struct.pack_into("<H", space, 0x58 + 0x12, 8 << 4 | 4)
    struct.pack_into("<I", space, 0x100, 0x0003 | 1 << 16 | 0x140 << 20)
    if acs is not None:
        struct.pack_into("<IHH", space, 0x140, 0x000D | 1 << 16, 0x7F, acs)
    return bytes(space)


@pytest.mark.parametrize(("control", "redirect", "forwarding"), [(0x00, False, False), (0x04, True, False), (0x1D, True, True)])
def test_acs_is_read_from_the_configuration_space(control, redirect, forwarding):
    kind, acs, link = pci_config.parse_config(config(acs=control))
    assert kind == "downstream_port"
    assert acs is not None
    assert (acs["request_redirect"], acs["upstream_forwarding"]) == (redirect, forwarding)
    assert link.as_dict() == {"generation": 4, "generation_max": 5, "width": 8, "width_max": 16}


@pytest.mark.parametrize("space", [config(acs=None), config(acs=0x1D)[:256], config(acs=0x1D)[:64], b"", b"\xff" * 4096])
def test_a_configuration_space_without_acs_or_cut_off_says_nothing_of_it(space):
    assert pci_config.parse_config(space)[1] is None


def test_a_configuration_space_whose_capabilities_go_round_ends():
    space = bytearray(config(acs=0))
    space[0x59] = 0x40
    struct.pack_into("<I", space, 0x140, 0x0001 | 1 << 16 | 0x100 << 20)
    assert pci_config.parse_config(bytes(space))[1] is None


def test_bridges_are_found_in_sysfs_where_there_is_no_lspci(tmp_path):
    devices = tmp_path / "sys/bus/pci/devices"
    for place, device_class, vendor, space in (
        ("0000:20:01.1", "0x060400", "0x1022", config(acs=0x04, port=4)),
        ("0000:21:00.0", "0x030200", "0x10de", b"\xde\x10" + bytes(62)),
        ("0000:30:00.0", "0x010802", "0x144d", b""),
    ):
        (devices / place).mkdir(parents=True)
        (devices / place / "class").write_text(f"{device_class}\n")
        (devices / place / "vendor").write_text(f"{vendor}\n")
        (devices / place / "config").write_bytes(space)
    (devices / "0000:21:00.0/current_link_speed").write_text("32.0 GT/s PCIe\n")
    (devices / "0000:21:00.0/current_link_width").write_text("16\n")
    (tmp_path / "recording.json").write_text("{}")
    found = survey(open_host(tmp_path), Question())["pci"]
    assert (found["source"], found["reason"]) == ("sysfs", None)
    assert [(bridge["address"], bridge["kind"], bridge["acs"]["request_redirect"]) for bridge in found["bridges"]] == [
        ("0000:20:01.1", "root_port", True)
    ]
    assert [(one["address"], one["parent"], one["gpu"], one["link"]["generation"]) for one in found["gpu_links"]] == [
        ("0000:21:00.0", "0000:20:01.1", None, 5)
    ]


def test_who_may_not_read_capabilities_is_told_so():
    head = "0000:00:01.1 PCI bridge [0604]: AMD Device [1022:153f]"
    (device,) = parse_lspci(f"{head}\n\tBus: primary=00, secondary=01, subordinate=02\n\tCapabilities: <access denied>\n")
    assert (device.truncated, device.acs, device.secondary) == (True, None, 1)


@pytest.mark.parametrize(
    ("line", "parameters"),
    [
        ("quiet iommu=pt pci=noacs,realloc pci=nomsi", {"quiet": [""], "iommu": ["pt"], "pci": ["noacs,realloc", "nomsi"]}),
        ('dyndbg="file a.c +p" ro -- --single iommu=off', {"dyndbg": ["file a.c +p"], "ro": [""]}),
        ("", {}),
    ],
)
def test_the_kernel_command_line_is_read_as_the_kernel_does(tmp_path, line, parameters):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text(f"{line}\n")
    (tmp_path / "recording.json").write_text("{}")
    assert kernel.read_command_line(open_host(tmp_path))["kernel_parameters"] == parameters


@pytest.mark.parametrize(
    ("line", "xid"),
    [
        (
            "[ 9.5] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            {"seconds": 9.5, "xid": 79, "pci": "0000:41:00.0", "message": "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."},
        ),
        (
            "Nov 29 10:00:00 gpu kernel: NVRM: Xid (PCI:0000:C1:00): 8, pid=7, Channel 1",
            {"seconds": None, "xid": 8, "pci": "0000:c1:00.0", "message": "pid=7, Channel 1"},
        ),
    ],
)
def test_an_xid_is_read_from_a_line_of_any_log(line, xid):
    assert driver.parse_xids(f"{line}\n[ 10.0] usb 1-1: new device\n") == [xid]


XID = "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(
    ("commands", "files", "source", "xids"),
    [
        ({"dmesg": f"[ 0.0] boot\n[ 9.0] {XID}"}, {}, "dmesg", 1),
        (
            {"dmesg": "[ 900.0] the beginning was overwritten\n", driver.JOURNAL: f"[ 0.0] host kernel: boot\n[ 9.0] host kernel: {XID}"},
            {},
            "journalctl",
            1,
        ),
        ({}, {"/var/log/kern.log": f"Nov 29 host kernel: [ 9.0] {XID}"}, "/var/log/kern.log", 1),
        ({"dmesg": ""}, {}, None, 0),
    ],
)
def test_xids_come_from_whichever_log_answers_and_reaches_furthest_back(tmp_path, commands, files, source, xids):
    answers = {argv if isinstance(argv, str) else " ".join(argv): {"rc": 0, "stdout": stdout} for argv, stdout in commands.items()}
    (tmp_path / "recording.json").write_text(json.dumps({"commands": answers, "files": files}))
    found = survey(open_host(tmp_path), Question())["driver"]
    assert (found["kernel_log"], len(found["xids"])) == (source, xids)
    assert (found["kernel_log_reason"] is None) == (source is not None)


@pytest.mark.parametrize(
    ("content", "count"), [(b"<system><gpu dev='0'/><gpu dev='1'/></system>", 2), (b"not XML", None), (b"<graphs/>", 0)]
)
def test_the_gpus_that_a_graph_was_made_for_are_counted(content, count):
    assert collectives.count_gpus(content) == count


def test_a_real_host_is_read_whole():
    info = survey(open_host(HOSTS / "h200"), Question())
    gpu = info["gpus"][0]
    assert (gpu["name"], gpu["compute_capability"], gpu["architecture"], gpu["bar1_total_mib"]) == ("NVIDIA H200", "9.0", "Hopper", 262144)
    assert (info["pci"]["source"], info["pci"]["gpu_links"][0]["gpu"], info["pci"]["gpu_links"][0]["link"]["width"]) == ("sysfs", 0, 16)
    assert (info["driver"]["module"], info["driver"]["loaded_version"], info["tools"]["nvcc"]["version"]) == ("open", "580.159.04", "13.0")
    assert info["nccl"]["system_version"] == "2.28.3"


def test_a_real_host_with_two_gpus_is_read_whole_from_what_the_project_recorded_there():
    info = survey(open_host(HOSTS / "h200-x2"), Question())
    assert [(gpu["name"], gpu["pcie"]["generation"], gpu["pcie"]["width"]) for gpu in info["gpus"]] == [("NVIDIA H200", 5, 16)] * 2
    assert (info["topology"]["links"], info["topology"]["p2p_read"]) == ({"0-1": "NV18"}, {"0-1": "OK"})
    assert len({gpu["uuid"] for gpu in info["gpus"]}) == 2
    assert [link["gpu"] for link in info["pci"]["gpu_links"]] == [0, 1]
    assert [file["path"] for file in info["nccl"]["configs"]] == ["/etc/nccl.conf", "/home/user1/.nccl.conf"]
