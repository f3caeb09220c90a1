"""PCI devices from sysfs: the configuration space, parsed. Standard library only: this runs on hosts.

Sources: PCI Express Base Specification 5.0, 7.5 (headers, capabilities) and 7.7.11 (ACS, extended capability 0x000d);
Documentation/PCI/sysfs-pci.rst, Linux. Who is not root is given the first 64 bytes only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ansible.module_utils.aerie.host.hosts import Host, integer, line

DEVICES = "/sys/bus/pci/devices"
CAPABILITIES_POINTER, SECONDARY_BUS, HEADER_TYPE = 0x34, 0x19, 0x0E
STATUS, HAS_CAPABILITIES = 0x06, 0x10
EXPRESS, EXTENDED, ACS = 0x10, 0x100, 0x000D
READABLE_BY_ALL, CONFIG_BYTES = 64, 4096
ACS_CONTROL = 0x06
ACS_BITS = (
    "source_validation",
    "translation_blocking",
    "request_redirect",
    "completion_redirect",
    "upstream_forwarding",
    "egress_control",
    "direct_translated",
)
PORTS = {4: "root_port", 5: "upstream_port", 6: "downstream_port"}
SPEEDS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}

Acs = Mapping[str, bool]


@dataclass(frozen=True)
class Link:
    """A PCI Express link: generation and width now, and what the device could at best."""

    generation: int | None = None
    width: int | None = None
    generation_max: int | None = None
    width_max: int | None = None

    def as_dict(self) -> dict[str, int | None]:
        return {
            "generation": self.generation,
            "generation_max": self.generation_max,
            "width": self.width,
            "width_max": self.width_max,
        }


@dataclass(frozen=True)
class Device:
    """One PCI function; ``secondary`` is the bus behind a bridge, ``truncated`` says that its capabilities could not be read."""

    address: str
    device_class: str
    vendor: str
    device: str
    name: str
    kind: str | None
    secondary: int | None
    acs: Acs | None
    link: Link
    responds: bool
    truncated: bool

    @property
    def domain(self) -> str:
        return self.address.partition(":")[0]

    @property
    def bus(self) -> int:
        return int(self.address.split(":")[1], 16)

    @property
    def is_bridge(self) -> bool:
        return self.device_class == "0604"


def read_devices(host: Host) -> tuple[Device, ...]:
    """Return the PCI devices that sysfs lists."""
    return tuple(_read_device(host, place) for place in host.names(DEVICES) or ())


def _read_device(host: Host, place: str) -> Device:
    base = f"{DEVICES}/{place}"
    device_class, vendor, device = ((line(host, f"{base}/{name}") or "").removeprefix("0x")[:4] for name in ("class", "vendor", "device"))
    config = host.read(f"{base}/config") if device_class == "0604" or vendor == "10de" else None
    config = config or b""
    kind, acs, link = parse_config(config)
    return Device(
        address=place,
        device_class=device_class,
        vendor=vendor,
        device=device,
        name=f"[{vendor}:{device}]",
        kind=kind,
        secondary=config[SECONDARY_BUS] if device_class == "0604" and len(config) > SECONDARY_BUS else None,
        acs=acs,
        link=link if link.width is not None else _link_of_sysfs(host, base),
        responds=not config or config[:2] != b"\xff\xff",
        truncated=len(config) <= READABLE_BY_ALL,
    )


def parse_config(config: bytes) -> tuple[str | None, Acs | None, Link]:
    """Return a function's kind of port, its ACS control bits and its link; a recording leaves zeros at the end out."""
    if len(config) > READABLE_BY_ALL:
        config = config.ljust(CONFIG_BYTES, b"\0")
    express = _capability(config, EXPRESS)
    kind, link = None, Link()
    if express is not None:
        kind = PORTS.get((_word(config, express + 2) >> 4) & 0xF)
        capability, status = struct.unpack_from("<I", config, express + 0x0C)[0], _word(config, express + 0x12)
        link = Link(status & 0xF or None, (status >> 4) & 0x3F or None, capability & 0xF or None, (capability >> 4) & 0x3F or None)
    acs = _extended_capability(config, ACS)
    if acs is None:
        return kind, None, link
    control = _word(config, acs + ACS_CONTROL)
    return kind, {name: bool(control >> bit & 1) for bit, name in enumerate(ACS_BITS)}, link


def _word(config: bytes, offset: int) -> int:
    return int(struct.unpack_from("<H", config, offset)[0])


def _capability(config: bytes, wanted: int) -> int | None:
    if len(config) <= READABLE_BY_ALL or not config[STATUS] & HAS_CAPABILITIES:
        return None
    offset, seen = config[CAPABILITIES_POINTER] & 0xFC, set()
    while READABLE_BY_ALL <= offset < len(config) and offset not in seen:
        if config[offset] == wanted:
            return offset
        seen.add(offset)
        offset = config[offset + 1] & 0xFC
    return None


def _extended_capability(config: bytes, wanted: int) -> int | None:
    offset, seen = EXTENDED, set()
    while EXTENDED <= offset <= len(config) - 4 and offset not in seen:
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == wanted:
            return offset
        seen.add(offset)
        offset = header >> 20
    return None


def _link_of_sysfs(host: Host, base: str) -> Link:
    """Return the link by the kernel's own files, which all may read."""

    def speed(name: str) -> int | None:
        return SPEEDS.get((line(host, f"{base}/{name}") or "").split(" ")[0])

    def width(name: str) -> int | None:
        value = integer(line(host, f"{base}/{name}"))
        return value if value and value != 255 else None

    return Link(speed("current_link_speed"), width("current_link_width"), speed("max_link_speed"), width("max_link_width"))
