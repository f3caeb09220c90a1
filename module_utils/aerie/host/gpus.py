"""GPUs as the driver reports them, and how they reach each other. Standard library only: this runs on hosts.

Sources: ``nvidia-smi --help-query-gpu``; the document type nvsmi_device_v13.dtd of ``nvidia-smi -q -x``; ``nvidia-smi topo -h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree

from ansible.module_utils.aerie.host.hosts import Completed, Host, integer, line

GPU_FIELDS = ("index", "name", "uuid", "driver_version", "memory.total", "memory.used", "compute_cap", "pci.bus_id")
GPU_QUERY = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
GPU_XML = ("nvidia-smi", "-q", "-x")
HEADING = ("nvidia-smi",)
TOPOLOGY = ("nvidia-smi", "topo", "-m")
P2P_READ = ("nvidia-smi", "topo", "-p2p", "r")
COMMANDS = (GPU_XML, GPU_QUERY, TOPOLOGY, P2P_READ)

UNKNOWN = ("N/A", "Not Supported", "Unknown Error", "Requested functionality has been deprecated", "GPU is lost", "ERR!", "")
SKUS = (("server edition", "server"), ("max-q", "max-q"), ("workstation edition", "workstation"))
THROTTLE = re.compile(r"clocks_(?:event|throttle)_reason_(\w+)")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def read_gpus(host: Host) -> tuple[list[dict[str, Any]], str | None]:
    """Return the GPUs that the driver reports, and why there are none.

    What identifies a GPU comes from the CSV query (the XML has no compute capability), all else from the XML; each stands in for
    the other where that gave no answer.
    """
    by_query, query_reason = _from_query(host.run(GPU_QUERY))
    by_xml = _from_xml(read_xml(host))
    details = {address(gpu["pci_bus_id"]): gpu for gpu in by_xml}
    gpus = [{**_BLANK, **details.get(address(gpu["pci_bus_id"]), {}), **gpu} for gpu in by_query] or by_xml
    for gpu in gpus:
        node = integer(line(host, f"/sys/bus/pci/devices/{address(gpu['pci_bus_id'])}/numa_node")) if gpu["pci_bus_id"] else None
        gpu["numa_node"] = node if node is not None and node >= 0 else None
    return gpus, None if gpus else query_reason


def address(bus_id: str | None) -> str:
    """Return a PCI address as the kernel writes it, ``0000:01:00.0``, from the driver's ``00000000:01:00.0``."""
    domain, _, rest = (bus_id or "").lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def sku(name: str | None) -> str | None:
    """Return which of the RTX PRO 6000's editions a product's name says; their power limits and cooling differ."""
    return next((kind for words, kind in SKUS if words in (name or "").lower()), None)


def _from_query(answer: Completed) -> tuple[list[dict[str, Any]], str | None]:
    if not answer.ok:
        return [], answer.reason or f"{GPU_QUERY[0]} exited with {answer.rc}: {answer.stdout.strip()[:500]}"
    gpus = []
    for row in answer.stdout.splitlines():
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != len(GPU_FIELDS):
            continue
        index, name, uuid, driver, total, used, capability, bus = (None if cell.strip("[]") in UNKNOWN else cell for cell in cells)
        gpus.append(
            {
                "index": integer(index),
                "name": name,
                "uuid": uuid,
                "driver": driver,
                "memory_total_mib": integer(total),
                "memory_used_mib": integer(used),
                "compute_capability": capability,
                "pci_bus_id": bus,
                "sku": sku(name),
            }
        )
    return gpus, None if gpus else f"{GPU_QUERY[0]} lists no GPU: {answer.stdout.strip()[:200] or 'empty answer'}"


def read_xml(host: Host) -> ElementTree.Element | None:
    """Return the driver's own document, None where there is none."""
    answer = host.run(GPU_XML)
    try:
        return ElementTree.fromstring(answer.stdout) if answer.stdout.strip() else None
    except ElementTree.ParseError:
        return None


def _from_xml(document: ElementTree.Element | None) -> list[dict[str, Any]]:
    if document is None:
        return []
    driver = _value(document, "driver_version")
    return [_gpu(index, gpu, driver) for index, gpu in enumerate(document.findall("gpu"))]


def _value(element: ElementTree.Element, *paths: str) -> str | None:
    """Return the text at the first of ``paths`` that has one; drivers renamed elements over time."""
    for path in paths:
        found = (element.findtext(path) or "").strip()
        if found.strip("[]") not in UNKNOWN:
            return found
    return None


def _watts(element: ElementTree.Element, *names: str) -> float | None:
    value = _value(element, *(f"{block}/{name}" for block in ("gpu_power_readings", "power_readings") for name in names))
    try:
        return float(value.split()[0]) if value else None
    except ValueError:
        return None


def _flag(value: str | None, yes: Iterable[str] = ("Enabled", "Yes")) -> bool | None:
    return None if value is None else value in yes


def _gpu(index: int, gpu: ElementTree.Element, driver: str | None) -> dict[str, Any]:
    name, link = _value(gpu, "product_name"), "pci/pci_gpu_link_info"
    ecc, ecc_pending = (_flag(_value(gpu, f"ecc_mode/{when}_ecc")) for when in ("current", "pending"))
    recovery = _value(gpu, "gpu_recovery_action")
    return {
        "index": index,
        "name": name,
        "uuid": _value(gpu, "uuid"),
        "driver": driver,
        "memory_total_mib": integer(_value(gpu, "fb_memory_usage/total")),
        "memory_used_mib": integer(_value(gpu, "fb_memory_usage/used")),
        "compute_capability": None,
        "pci_bus_id": _value(gpu, "pci/pci_bus_id") or gpu.get("id"),
        "sku": sku(name),
        "architecture": _value(gpu, "product_architecture"),
        "vbios": _value(gpu, "vbios_version"),
        "bar1_total_mib": integer(_value(gpu, "bar1_memory_usage/total")),
        "persistence": _flag(_value(gpu, "persistence_mode")),
        "mig": _flag(_value(gpu, "mig_mode/current_mig")),
        "compute_mode": _value(gpu, "compute_mode"),
        "performance_state": _value(gpu, "performance_state"),
        "temperature_c": integer(_value(gpu, "temperature/gpu_temp")),
        "utilization_percent": integer(_value(gpu, "utilization/gpu_util")),
        "numa_node": None,
        "recovery_action": None if recovery == "None" else recovery,
        "power": {
            "draw_w": _watts(gpu, "instant_power_draw", "average_power_draw", "power_draw"),
            "limit_w": _watts(gpu, "current_power_limit", "power_limit"),
            "default_w": _watts(gpu, "default_power_limit"),
            "min_w": _watts(gpu, "min_power_limit"),
            "max_w": _watts(gpu, "max_power_limit"),
        },
        "clocks": {
            "sm_mhz": integer(_value(gpu, "clocks/sm_clock")),
            "sm_max_mhz": integer(_value(gpu, "max_clocks/sm_clock")),
            "memory_mhz": integer(_value(gpu, "clocks/mem_clock")),
            "memory_max_mhz": integer(_value(gpu, "max_clocks/mem_clock")),
        },
        "throttle": _throttle(gpu),
        "pcie": {
            "generation": integer(_value(gpu, f"{link}/pcie_gen/current_link_gen")),
            "generation_max": integer(_value(gpu, f"{link}/pcie_gen/max_link_gen")),
            "generation_max_gpu": integer(_value(gpu, f"{link}/pcie_gen/max_device_link_gen")),
            "generation_max_slot": integer(_value(gpu, f"{link}/pcie_gen/max_host_link_gen")),
            "width": _width(_value(gpu, f"{link}/link_widths/current_link_width")),
            "width_max": _width(_value(gpu, f"{link}/link_widths/max_link_width")),
            "replays": integer(_value(gpu, "pci/replay_counter")),
        },
        "ecc": {
            "enabled": ecc,
            "pending": None if ecc is None or ecc_pending is None else ecc != ecc_pending,
            "uncorrectable": _uncorrectable(gpu),
        },
        "remapped_rows": {
            "pending": _flag(_value(gpu, "remapped_rows/remapped_row_pending")),
            "failed": _flag(_value(gpu, "remapped_rows/remapped_row_failure")),
        },
        "processes": [
            {
                "pid": integer(_value(process, "pid")),
                "name": _value(process, "process_name"),
                "memory_mib": integer(_value(process, "used_memory")),
            }
            for process in gpu.findall("processes/process_info")
        ],
    }


def _throttle(gpu: ElementTree.Element) -> list[str]:
    reasons = [*gpu.findall("clocks_event_reasons/*"), *gpu.findall("clocks_throttle_reasons/*")]
    active = [match.group(1) for reason in reasons if (reason.text or "").strip() == "Active" and (match := THROTTLE.fullmatch(reason.tag))]
    return [name for name in active if name != "gpu_idle"]


def _width(value: str | None) -> int | None:
    return integer((value or "").removesuffix("x"))


def _uncorrectable(gpu: ElementTree.Element) -> int | None:
    counts = [integer(element.text) for element in gpu.findall("ecc_errors/volatile/*") if "uncorrectable" in element.tag]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


_BLANK = _gpu(0, ElementTree.Element("gpu"), None)
"""A GPU of which nothing is known."""


def read_cuda_driver_version(host: Host) -> str | None:
    """Return the newest CUDA version that the driver supports, from its document or else from the heading of ``nvidia-smi``."""
    document = read_xml(host)
    told = _value(document, "cuda_version") if document is not None else None
    if told:
        return told
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", host.run(HEADING).stdout)
    return found.group(1) if found else None


def read_topology(host: Host) -> dict[str, Any]:
    """Return how each pair of GPUs is linked, and whether the driver lets one read the other's memory."""
    links, p2p = host.run(TOPOLOGY), host.run(P2P_READ)
    reasons = [f"{' '.join(argv)}: {answer.reason}" for argv, answer in ((TOPOLOGY, links), (P2P_READ, p2p)) if not answer.ok]
    return {"links": _pairs(links), "p2p_read": _pairs(p2p), "reason": "; ".join(reasons) or None}


def _pairs(answer: Completed) -> dict[str, str]:
    """Return the upper half of a table whose rows and columns are GPUs."""
    columns: list[int] | None = None
    pairs: dict[str, str] = {}
    for row in ESCAPES.sub("", answer.stdout if answer.ok else "").splitlines():
        cells = row.split()
        numbers = [int(cell.removeprefix("GPU")) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        if columns is None:
            columns = numbers or None
        elif len(numbers) == 1 and cells[0].startswith("GPU"):
            pairs |= {f"{numbers[0]}-{other}": cell for other, cell in zip(columns, cells[1:], strict=False) if other > numbers[0]}
    return pairs
