"""What differs between two hosts: rules that fire on one only first, then their infos, by what matters, without identities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from .results import HostResult
from .rules import SEVERITIES, Finding

IDENTITIES = (
    "hostname",
    "machine_id_hash",
    "user",
    "user.*",
    "fingerprint",
    "uptime_seconds",
    "survey",
    "survey.*",
    "gpus[*].uuid",
    "gpus[*].pci_bus_id",
    "gpus[*].processes*",
    "gpus[*].temperature_c",
    "gpus[*].utilization_percent",
    "gpus[*].memory_used_mib",
    "gpus[*].performance_state",
    "gpus[*].power.draw_w",
    "gpus[*].clocks.sm_mhz",
    "gpus[*].clocks.memory_mhz",
    "gpus[*].pcie.generation",
    "gpus[*].pcie.replays",
    "gpus[*].throttle*",
    "memory.available_bytes",
    "paths.*.free_bytes",
    "paths.*.total_bytes",
    "servers*",
    "ports*",
    "caches*",
    "driver.installed_age_s",
    "driver.xids*",
    "driver.kernel_log",
    "probes.*.seconds",
    "probes.*.figures.*",
    "pci.bridges[*].link.generation",
    "pci.gpu_links[*].link.generation",
    "release",
)
"""What two equal hosts may differ in: who they are, and what moves by itself. Xids, caches and probes are judged by rules."""

OWN_WORDS = ("BOOT_IMAGE", "root", "rootflags", "initrd", "resume", "resume_offset", "cryptdevice", "ip", "hostname", "systemd.machine_id")
"""Words of a kernel command line that name a host's own disks and addresses."""

WEIGHTS = (
    ("driver.", "packages.system", "kernel_command_line", "kernel_parameters", "driver.parameters", "iommu", "pci.", "topology"),
    ("gpus", "models.", "nccl.", "libraries", "tools", "packages", "cuda_driver_version"),
    ("cpu", "sysctl", "limits", "kernel", "os", "container", "memory"),
)
"""What matters, most first; everything else comes after."""


@dataclass(frozen=True)
class Difference:
    """One path that differs; ``good`` and ``bad`` are None where a host hasn't got it."""

    path: str
    good: Any
    bad: Any


@dataclass(frozen=True)
class Comparison:
    """What sets ``bad`` apart from ``good``."""

    good: str
    bad: str
    only_bad: tuple[Finding, ...]
    only_good: tuple[Finding, ...]
    differences: tuple[Difference, ...]

    @property
    def empty(self) -> bool:
        return not (self.only_bad or self.only_good or self.differences)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"empty": self.empty}


def compare(good: HostResult, bad: HostResult) -> Comparison:
    """Compare two hosts' findings and infos."""
    ids = {finding.id for finding in good.findings}, {finding.id for finding in bad.findings}
    return Comparison(
        good=good.host,
        bad=bad.host,
        only_bad=_sorted(finding for finding in bad.findings if finding.id not in ids[0]),
        only_good=_sorted(finding for finding in good.findings if finding.id not in ids[1]),
        differences=tuple(differences(good.info, bad.info)),
    )


def _sorted(findings: Iterator[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def differences(good: Mapping[str, Any], bad: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two infos, what matters first. Equal differences of several GPUs are told once."""
    one, other = dict(_flat(_comparable(good))), dict(_flat(_comparable(bad)))
    found = [
        Difference(path, one.get(path), other.get(path))
        for path in dict.fromkeys((*one, *other))
        if one.get(path) != other.get(path) and not _is_identity(path) and not _is_unknown(path, one, other)
    ]
    return sorted(_merged(found), key=lambda difference: (_weight(difference.path), difference.path))


def _comparable(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an info without what names a host's own disks, and with memory as people tell it."""
    found = dict(info)
    if isinstance(line := info.get("kernel_command_line"), str):
        found["kernel_command_line"] = " ".join(word for word in line.split() if word.partition("=")[0] not in OWN_WORDS)
    if isinstance(words := info.get("kernel_parameters"), Mapping):
        found["kernel_parameters"] = {name: value for name, value in words.items() if name not in OWN_WORDS}
    if isinstance(memory := info.get("memory"), Mapping) and memory.get("total_bytes"):
        found["memory"] = {**memory, "total_bytes": f"{memory['total_bytes'] / 2**30:.0f} GiB"}
    return found


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        yield f"{path}.length", len(value)
        for key, inner in _keyed(path, value):
            yield from _flat(inner, f"{path}[{key}]")
    elif isinstance(value, list | tuple):
        yield path, [str(inner) for inner in value]
    elif value is not None:
        yield path, value


def _keyed(path: str, rows: Any) -> Iterator[tuple[str, Any]]:
    """Name a list's elements by what they are, where they have a name, so that one more in the middle isn't a change of all."""
    name = {"caches": "path", "libraries.cuda": "path", "nccl.configs": "path", "nccl.graph_files": "path"}.get(path)
    for position, row in enumerate(rows):
        yield str(row.get(name, position)) if name else str(position), row


def _is_identity(path: str) -> bool:
    return any(fnmatchcase(path, pattern.replace("[", "[[]").replace("[[]*]", "[[]*]")) for pattern in IDENTITIES) or path.endswith(
        "reason"
    )


def _is_unknown(path: str, *hosts: Mapping[str, Any]) -> bool:
    """Say whether it is a model's identity that one host doesn't know: that tells nothing of its files."""
    return path.startswith("models.") and path.endswith(".identity") and any(path not in host for host in hosts)


def _merged(found: list[Difference]) -> list[Difference]:
    """Tell ``gpus[0].x`` to ``gpus[7].x`` once where they differ in the same way."""
    groups: dict[tuple[str, str, str], list[Difference]] = {}
    for difference in found:
        head, bracket, rest = difference.path.partition("gpus[")
        key = f"{head}gpus[*]{rest.partition(']')[2]}" if bracket and not head else difference.path
        groups.setdefault((key, repr(difference.good), repr(difference.bad)), []).append(difference)
    merged = []
    for (key, _, _), members in groups.items():
        if len(members) == 1:
            merged.append(members[0])
        else:
            numbers = ", ".join(member.path.partition("[")[2].partition("]")[0] for member in members)
            merged.append(Difference(key.replace("[*]", f"[{numbers}]"), members[0].good, members[0].bad))
    return merged


def _weight(path: str) -> int:
    return next((weight for weight, starts in enumerate(WEIGHTS) if path.startswith(starts)), len(WEIGHTS))
