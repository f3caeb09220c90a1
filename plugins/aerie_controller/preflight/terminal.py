"""What a preflight found, as plain text: no colour needed, at most 100 columns, safe to print whatever a host says of itself."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.measuring.terminal_table import WIDTH, clean, cut
from ansible.module_utils.aerie.releases.upkeep_tables import table
from ansible.module_utils.aerie.words import listing

from .compare import Comparison
from .results import HostResult
from .rules import SEVERITIES, Finding, Unjudged

HEADS = {"error": "ERROR", "warning": "WARNING", "note": "note"}
MOST_EVIDENCE = 4
MOST_RULES = 8
MOST_HOSTS = 4
MOST_DIFFERENCES = 40


def render(results: Sequence[HostResult], places: Mapping[str, str] | None = None, width: int = WIDTH) -> str:
    """Return the summary of all hosts, then what was found, the worst first, each finding once for all hosts that share it."""
    lines = ["Preflight", "─" * width, *_summary(results, width)]
    for severity in SEVERITIES:
        lines += _findings(results, severity, width)
    lines += _probes(results, width)
    lines += _ignored(results, width)
    lines += _unjudged(results, width)
    if places:
        lines += ["", *(f"{name}: {clean(place)}" for name, place in places.items())]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _summary(results: Sequence[HostResult], width: int) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for result in results:
        if result.unreachable is not None:
            rows.append((result.host, "–", "–", "–", "–", f"not asked: {result.unreachable}"))
        else:
            counts = [str(result.count(severity) or "–") for severity in SEVERITIES]
            rows.append((result.host, *counts, str(len(result.unjudged) or "–"), result.machine))
    return table(("host", "errors", "warnings", "notes", "not judged", "what it is"), rows, width, right=(1, 2, 3, 4))


def _findings(results: Sequence[HostResult], severity: str, width: int) -> list[str]:
    alike: dict[str, list[tuple[str, Finding]]] = {}
    for result in results:
        for finding in result.findings:
            if finding.severity == severity:
                alike.setdefault(finding.id, []).append((result.host, finding))
    lines: list[str] = []
    for name, found in alike.items():
        hosts = [host for host, _ in found]
        where = "" if len(results) == 1 else f" on {listing(hosts) if len(hosts) <= MOST_HOSTS else f'{len(hosts)} hosts'}"
        lines += ["", cut(f"{HEADS[severity]}  {name}{where}", width)]
        lines += _evidence(found, len(results) > 1, width)
        first = found[0][1]
        lines += _wrap(f"why: {first.cause}", width)
        lines += _wrap(f"cure: {first.cure}", width)
        lines += _wrap(f"see: {first.reference}", width)
    return lines


def _evidence(found: Iterable[tuple[str, Finding]], several: bool, width: int) -> list[str]:
    """Return the evidence; hosts that show the same are told together."""
    by_evidence: dict[tuple[str, ...], list[str]] = {}
    for host, finding in found:
        by_evidence.setdefault((*finding.evidence, *(f"not judged: {why}" for why in finding.not_known)), []).append(host)
    lines = []
    for evidence, hosts in by_evidence.items():
        shown = evidence[:MOST_EVIDENCE] if len(evidence) > MOST_EVIDENCE + 1 else evidence
        rest = [f"and {len(evidence) - len(shown)} more"] if len(shown) < len(evidence) else []
        where = listing(hosts) if len(hosts) <= MOST_HOSTS else f"{hosts[0]}, {hosts[1]} and {len(hosts) - 2} more"
        if several and len(evidence) == 1:
            lines += _wrap(f"{where}: {evidence[0]}", width, "  ")
        else:
            lines += _wrap(f"{where}:", width, "  ") if several else []
            for line in (*shown, *rest):
                lines += _wrap(line, width, "    " if several else "  ")
    return lines


def _probes(results: Sequence[HostResult], width: int) -> list[str]:
    lines = []
    for result in results:
        if result.probes:
            lines += _wrap(f"{result.host}: {probed(result.probes)}", width, "  ")
    return ["", "Active probes:", *lines] if lines else []


def probed(probes: Mapping[str, Any]) -> str:
    """Return what became of each active probe; why one failed is its finding's to tell."""
    said = []
    for name, probe in probes.items():
        told = f"{name} {probe.get('status')}"
        told += f": {probe['reason']}" if probe.get("status") == "skipped" and probe.get("reason") else f" ({probe.get('seconds')} s)"
        said.append(told)
    return "; ".join(said)


def _ignored(results: Sequence[HostResult], width: int) -> list[str]:
    lines = []
    for result in results:
        for finding, reason in result.ignored:
            lines += _wrap(f"ignored on {result.host}: {finding.severity} {finding.id}: {reason}", width, "")
    return ["", *lines] if lines else []


def _unjudged(results: Sequence[HostResult], width: int) -> list[str]:
    """Return the rules that nobody could judge, by why, hosts that have the same together."""
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for result in results:
        for why, ids in reasons(result.unjudged).items():
            alike.setdefault((tuple(ids), why), []).append(result.host)
    if not alike:
        return []
    lines = ["", "Not known, so not judged:"]
    for (names, why), hosts in alike.items():
        where = f" ({listing(hosts) if len(hosts) <= MOST_HOSTS else f'{len(hosts)} hosts'})" if len(results) > 1 else ""
        rules = ", ".join(names) if len(names) <= MOST_RULES else f"{', '.join(names[:3])} and {len(names) - 3} more rules"
        lines += _wrap(f"{why}{where}: {rules}", width, "  ")
    return lines


def reasons(unjudged: Sequence[Unjudged]) -> dict[str, list[str]]:
    """Return each first reason with the rules that it keeps from being judged."""
    found: dict[str, list[str]] = {}
    for one in unjudged:
        found.setdefault(one.why[0], []).append(one.id)
    return found


def comparison(found: Comparison, width: int = WIDTH) -> str:
    """Return what sets one host apart from the other."""
    lines = [cut(f"{found.bad} compared with {found.good}", width), "─" * width]
    if found.empty:
        lines.append("No difference: the same rules fire, and their infos differ in identities only.")
    for host, findings in ((found.bad, found.only_bad), (found.good, found.only_good)):
        for finding in findings:
            lines += _wrap(
                f"{HEADS[finding.severity]}  {finding.id}, on {host} only: {finding.evidence[0] if finding.evidence else ''}", width, ""
            )
            lines += _wrap(f"cure: {finding.cure}", width)
    if found.differences:
        if found.only_bad or found.only_good:
            lines.append("")
        rows = [(one.path, shown(one.good), shown(one.bad)) for one in found.differences[:MOST_DIFFERENCES]]
        lines += table(("differs", cut(found.good, 30), cut(found.bad, 30)), rows, width)
        if len(found.differences) > MOST_DIFFERENCES:
            lines.append(f"and {len(found.differences) - MOST_DIFFERENCES} more")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def shown(value: Any) -> str:
    """Return a value of an info in words; a dash for what a host hasn't got."""
    if isinstance(value, list):
        return " ".join(str(one) for one in value) or "none"
    return {None: "–", True: "yes", False: "no", "": '""'}.get(value, str(value)) if isinstance(value, bool | str | None) else str(value)


def _wrap(text: str, width: int, indent: str = "    ") -> list[str]:
    return textwrap.wrap(clean(text), width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
