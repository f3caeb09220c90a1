"""PCI bridges with their access control (ACS), and the links that GPUs hang on. Standard library only: this runs on hosts.

Read from ``lspci -Dvvvnn`` where that answers, else from sysfs (:mod:`pci_config`). Either gives :class:`Device` s.
Sources: PCI Express Base Specification 5.0, 7.7.11 (ACS) and 7.5.3 (link registers); lspci's ls-caps.c and ls-ecaps.c.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.aerie.host import pci_config
from ansible.module_utils.aerie.host.gpus import address as normal
from ansible.module_utils.aerie.host.hosts import Host, integer, line
from ansible.module_utils.aerie.host.pci_config import Acs, Device, Link

LSPCI = ("lspci", "-Dvvvnn")
NVIDIA, BRIDGE, DISPLAY = "10de", "0604", "03"
FLAGS = {
    "SrcValid": "source_validation",
    "TransBlk": "translation_blocking",
    "ReqRedir": "request_redirect",
    "CmpltRedir": "completion_redirect",
    "UpstreamFwd": "upstream_forwarding",
    "EgressCtrl": "egress_control",
    "DirectTrans": "direct_translated",
}
KINDS = {"Root Port": "root_port", "Upstream Port": "upstream_port", "Downstream Port": "downstream_port"}
GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
NEEDS_ROOT = "the capabilities of PCI devices are root's to read: survey with ansible_become"

HEAD = re.compile(r"^(?P<address>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<name>.*)$")
CODES = re.compile(r"\[([0-9a-f]{4})\]: (.*?)\s*\[([0-9a-f]{4}):([0-9a-f]{4})\]")


@dataclass(frozen=True)
class Found:
    """The devices of a host, where they were read, and why something of them is unknown."""

    devices: tuple[Device, ...]
    source: str | None
    reason: str | None


def read_pci(host: Host, gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return bridges and GPU links; ``gpus`` are those that the driver reports."""
    found = read_devices(host)
    numbers = {normal(gpu["pci_bus_id"]): gpu["index"] for gpu in gpus}
    bridges = {(device.domain, device.secondary): device for device in found.devices if device.is_bridge}
    parents = {device.address: bridges.get((device.domain, device.bus)) for device in found.devices}
    below: dict[str, list[int]] = {}
    for place, number in numbers.items():
        parent = parents.get(place)
        while parent is not None and number not in below.get(parent.address, ()):
            below.setdefault(parent.address, []).append(number)
            parent = parents.get(parent.address)
    displays = [device for device in found.devices if device.vendor == NVIDIA and device.device_class.startswith(DISPLAY)]
    return {
        "source": found.source,
        "reason": found.reason,
        "bridges": [
            {
                "address": device.address,
                "name": device.name,
                "parent": above.address if (above := parents[device.address]) else None,
                "kind": device.kind,
                "to_gpus": sorted(below.get(device.address, [])),
                "acs": dict(device.acs) if device.acs else None,
                "link": device.link.as_dict(),
            }
            for device in found.devices
            if device.is_bridge
        ],
        "gpu_links": [
            {
                "address": device.address,
                "gpu": numbers.get(device.address),
                "name": device.name,
                "parent": above.address if (above := parents[device.address]) else None,
                "numa_node": _node(host, device.address),
                "responds": device.responds,
                "link": device.link.as_dict(),
            }
            for device in displays
        ],
    }


def _node(host: Host, place: str) -> int | None:
    node = integer(line(host, f"/sys/bus/pci/devices/{place}/numa_node"))
    return node if node is not None and node >= 0 else None


def read_devices(host: Host) -> Found:
    """Return the PCI devices by lspci, or by sysfs where lspci is not there or gave no answer."""
    answer = host.run(LSPCI)
    devices = parse_lspci(answer.stdout) if answer.ok else ()
    if devices:
        denied = "<access denied>" in answer.stdout
        return Found(devices, "lspci", NEEDS_ROOT if denied else None)
    devices = pci_config.read_devices(host)
    if not devices:
        return Found((), None, f"{answer.reason or 'lspci lists nothing'}; /sys/bus/pci/devices lists nothing either")
    denied = any(device.is_bridge and device.truncated for device in devices)
    return Found(devices, "sysfs", NEEDS_ROOT if denied else None)


def parse_lspci(output: str) -> tuple[Device, ...]:
    """Return the devices of ``lspci -Dvvvnn``."""
    devices = []
    for block in re.split(r"\n\s*\n", output):
        head, _, body = block.strip("\n").partition("\n")
        match = HEAD.match(head)
        if match and (codes := CODES.search(match["name"])):
            devices.append(_device(match["address"], head, body, codes))
    return tuple(devices)


def _device(place: str, head: str, body: str, codes: re.Match[str]) -> Device:
    kind = re.search(r"Express \(v\d+\) (Root Port|Upstream Port|Downstream Port)", body)
    buses = re.search(r"Bus: primary=\w+, secondary=(\w+)", body)
    return Device(
        address=place,
        device_class=codes.group(1),
        vendor=codes.group(3),
        device=codes.group(4),
        name=codes.group(2),
        kind=KINDS[kind.group(1)] if kind else None,
        secondary=int(buses.group(1), 16) if buses else None,
        acs=_acs(body),
        link=Link(*_link(body, "LnkSta"), *_link(body, "LnkCap")),
        responds="(rev ff)" not in head and "Unknown header type 7f" not in body,
        truncated="<access denied>" in body,
    )


def _acs(body: str) -> Acs | None:
    found = re.search(r"ACSCtl:\s*(.*)", body)
    return {FLAGS[name]: sign == "+" for name, sign in re.findall(r"(\w+)([+-])", found.group(1)) if name in FLAGS} if found else None


def _link(body: str, register: str) -> tuple[int | None, int | None]:
    found = re.search(rf"{register}:.*?Speed ([\d.]+)GT/s(?: \(\w+\))?, Width x(\d+)", body)
    return (GENERATIONS.get(found.group(1)), int(found.group(2))) if found else (None, None)
