"""What a preflight found, host by host: made from surveys, kept as JSON, and what of it fails a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.host import host_info
from ansible.module_utils.aerie.words import near

from . import rules
from .rules import Finding, Rule, Unjudged

SCHEMA = "aerie-preflight/1"
EXAMPLE_INVENTORY = "-i inventory/mine"
"""What rules write in a command."""
NEVER = "never"
FAIL_ON = (rules.ERROR, rules.WARNING, NEVER)


@dataclass(frozen=True)
class HostResult:
    """One host: what was found, or why it could not be asked."""

    host: str
    profile: str | None = None
    machine: str = ""
    findings: tuple[Finding, ...] = ()
    ignored: tuple[tuple[Finding, str], ...] = ()
    """Findings that preflight_ignore names, each with its reason."""
    unjudged: tuple[Unjudged, ...] = ()
    fine: tuple[str, ...] = ()
    unreachable: str | None = None
    probes: Mapping[str, Any] = field(default_factory=dict)
    want: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, fail_on: str) -> bool:
        """Say whether this host fails a run that fails on findings of ``fail_on`` and worse; one that could not be asked does, too."""
        if fail_on == NEVER:
            return False
        worse = rules.SEVERITIES[: rules.SEVERITIES.index(fail_on) + 1]
        return self.unreachable is not None or any(finding.severity in worse for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return what the host's JSON file holds."""
        return {
            "schema": SCHEMA,
            "host": self.host,
            "profile": self.profile,
            "machine": self.machine,
            "unreachable": self.unreachable,
            "counts": {severity: self.count(severity) for severity in rules.SEVERITIES},
            "findings": [asdict(finding) for finding in self.findings],
            "ignored": [asdict(finding) | {"reason": reason} for finding, reason in self.ignored],
            "unjudged": [asdict(one) for one in self.unjudged],
            "fine": list(self.fine),
            "want": self.want,
            "info": self.info,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> HostResult:
        """Read what :meth:`as_dict` gave; raises KeyError or TypeError for anything else."""
        if value["schema"] != SCHEMA:
            raise KeyError(f"schema {value['schema']!r}")
        return cls(
            host=value["host"],
            profile=value["profile"],
            machine=value["machine"],
            findings=tuple(_finding(one) for one in value["findings"]),
            ignored=tuple((_finding(one), str(one["reason"])) for one in value["ignored"]),
            unjudged=tuple(Unjudged(one["id"], tuple(one["why"])) for one in value["unjudged"]),
            fine=tuple(value["fine"]),
            unreachable=value["unreachable"],
            probes=(value["info"] or {}).get("probes") or {},
            want=value["want"],
            info=value["info"],
        )


def with_inventory(result: HostResult, options: str) -> HostResult:
    """Return ``result`` with commands for the inventory of this run (``-i``, quoted) instead of an example's."""

    def named(finding: Finding) -> Finding:
        commands = tuple(line.replace(EXAMPLE_INVENTORY, options) for line in finding.commands)
        return replace(finding, commands=commands)

    return replace(
        result,
        findings=tuple(named(finding) for finding in result.findings),
        ignored=tuple((named(finding), reason) for finding, reason in result.ignored),
    )


def _finding(value: Mapping[str, Any]) -> Finding:
    texts = {key: str(value[key]) for key in ("id", "severity", "cause", "cure", "reference")}
    return Finding(
        evidence=tuple(value["evidence"]),
        not_known=tuple(value["not_known"]),
        # A result of an earlier Aerie has none.
        commands=tuple(value.get("commands", ())),
        **texts,
    )


def examine(
    known: Sequence[Rule], host: str, info: Mapping[str, Any], want: Mapping[str, Any], ignore: Mapping[str, str] | None = None
) -> HostResult:
    """Judge one host's info."""
    judged = rules.judge(known, info, want)
    ignore = ignore or {}
    return HostResult(
        host=host,
        profile=want.get("profile"),
        machine=machine(info),
        findings=tuple(finding for finding in judged.findings if finding.id not in ignore),
        ignored=tuple((finding, ignore[finding.id]) for finding in judged.findings if finding.id in ignore),
        unjudged=judged.unjudged,
        fine=judged.fine,
        probes=info.get("probes") or {},
        want=want,
        info=info,
    )


def ignored(entries: Iterable[Any], known: Sequence[Rule]) -> dict[str, str]:
    """Return rule id to reason of ``preflight_ignore``: ids, or mappings with id and reason. Raise for ids that no rule has."""
    ids = [rule.id for rule in known]
    found, problems = {}, []
    for entry in entries:
        name, reason = (entry.get("id"), entry.get("reason")) if isinstance(entry, Mapping) else (entry, None)
        if isinstance(entry, Mapping) and not set(entry) <= {"id", "reason"}:
            problems.append(f"{entry!r} must have id and reason, and nothing else")
        elif name not in ids:
            problems.append(f"no rule is called {name!r}{near(str(name), ids)}")
        else:
            found[str(name)] = str(reason or "no reason told")
    raise_all(problems, "preflight_ignore")
    return found


def machine(info: Mapping[str, Any]) -> str:
    """Return a host in one line: its GPUs, driver, CPUs and system."""
    gpus = [str(gpu.get("name") or "GPU") for gpu in info.get("gpus") or []]
    driver, cpu, system = info.get("driver") or {}, info.get("cpu") or {}, info.get("os") or {}
    words = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    words += [f"driver {driver['version']}"] if driver.get("version") else []
    words += [f"{cpu['logical']} CPUs"] if cpu.get("logical") else []
    words += [str(system["name"])] if system.get("name") else []
    return ", ".join(words)


def of_place(place: str, known: Sequence[Rule], want: Mapping[str, Any], ignore: Mapping[str, str]) -> HostResult:
    """Return the result that a path stands for: a host's JSON file of an earlier preflight, or a recording to be surveyed and judged."""
    path = Path(place)
    try:
        if path.is_dir():
            root = Path(want["root"]) if want.get("root") else None
            paths = (str(root),) if root else ()
            question = host_info.Question(aerie_root=root, paths=paths, catalog=want.get("models") or {})
            return examine(known, path.name, host_info.survey(host_info.open_host(path), question), want, ignore)
        return HostResult.from_dict(untrusted.read(path, untrusted.SURVEY, follow=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AerieError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AerieError(f"{place}: neither a host of this run, nor a recording, nor a JSON file of a preflight: {reason}") from error


def kept(output: Path) -> list[HostResult]:
    """Return the results that lie in a directory; files that are none are passed over."""
    found = []
    for path in sorted(output.glob("*.json")):
        try:
            found.append(HostResult.from_dict(untrusted.read(path, untrusted.SURVEY, follow=True)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
