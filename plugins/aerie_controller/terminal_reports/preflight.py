"""What a preflight found: a summary of all hosts, then each finding once for all that share it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.words import listing

from ..figures import NONE
from ..preflight.compare import Comparison
from ..preflight.results import HostResult
from ..preflight.rules import SEVERITIES, Finding
from ..preflight.wording import probed, reasons, shown
from ..terminal import Part, Words, command, figures, gap, heading, paragraph, places, severity, table

MOST_EVIDENCE = 4
MOST_RULES = 8
MOST_HOSTS = 4
MOST_DIFFERENCES = 40
MOST_IN_SUMMARY = 5
Shared = tuple[str, Finding]
"""A finding and the host that it is of."""


def parts(results: Sequence[HostResult], paths: Mapping[str, str] | None = None) -> list[Part]:
    """Return the summary of all hosts, then what was found, the worst first."""
    report: list[Part] = [heading("Preflight"), _summary(results)]
    for level in SEVERITIES:
        report += _findings(results, level)
    for section in (_probes(results), _ignored(results), _unjudged(results)):
        report += [gap(), *section] if section else []
    return [*report, gap(), *places(paths)] if paths else report


def _summary(results: Sequence[HostResult]) -> Part:
    rows: list[tuple[Words, ...]] = []
    for result in results:
        if result.unreachable is not None:
            reason = f"not asked: {result.unreachable}"
            rows.append((result.host, NONE, NONE, NONE, NONE, [(reason, "error")]))
        else:
            counts = [[(str(result.count(level) or NONE), _style(result, level))] for level in SEVERITIES]
            rows.append((result.host, *counts, str(len(result.unjudged) or NONE), result.machine))
    return table(["host", *figures("errors", "warnings", "notes", "not judged"), "what it is"], rows)


def _style(result: HostResult, level: str) -> str | None:
    return level if result.count(level) and level != "note" else None


def _findings(results: Sequence[HostResult], level: str) -> Iterator[Part]:
    by_rule: dict[str, list[Shared]] = {}
    for result in results:
        for finding in result.findings:
            if finding.severity == level:
                by_rule.setdefault(finding.id, []).append((result.host, finding))
    several = len(results) > 1
    for name, findings in by_rule.items():
        where = f" on {_hosts([host for host, _ in findings])}" if several else ""
        yield gap()
        yield paragraph([severity(level), (f"  {name}{where}", "strong")])
        yield from _evidence(findings, several)
        first = findings[0][1]
        yield paragraph(f"why: {first.cause}", indent=4)
        yield from _fixes(findings)
        yield paragraph([("see: ", "quiet"), (first.reference, "quiet")], indent=4)


def _fixes(findings: Sequence[Shared]) -> Iterator[Part]:
    """Yield what to do, and its commands; once where all hosts have the same, else by host."""
    by_fix: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for host, finding in findings:
        by_fix.setdefault((finding.cure, finding.commands), []).append(host)
    for (cure, commands), hosts in by_fix.items():
        where = f" on {_hosts(hosts)}" if len(by_fix) > 1 else ""
        yield paragraph(f"fix{where}: {cure}", indent=4)
        yield from (command(_limited(line, hosts), indent=8) for line in commands)


def _limited(line: str, hosts: Sequence[str]) -> str:
    """Return a command; a playbook is run for the hosts that it is for."""
    if not line.startswith("ansible-playbook "):
        return line
    return f"{line} --limit {shlex.quote(','.join(hosts))}"


def _hosts(hosts: Sequence[str]) -> str:
    return listing(hosts) if len(hosts) <= MOST_HOSTS else f"{len(hosts)} hosts"


def _evidence(findings: Iterable[Shared], several: bool) -> Iterator[Part]:
    """Yield the evidence; hosts that show the same share it."""
    by_evidence: dict[tuple[str, ...], list[str]] = {}
    for host, finding in findings:
        sentences = (*finding.evidence, *(f"not judged: {why}" for why in finding.not_known))
        by_evidence.setdefault(sentences, []).append(host)
    for evidence, hosts in by_evidence.items():
        few = len(hosts) <= MOST_HOSTS
        where = listing(hosts) if few else f"{hosts[0]}, {hosts[1]} and {len(hosts) - 2} more"
        if several and len(evidence) == 1:
            yield paragraph(f"{where}: {evidence[0]}", indent=2)
            continue
        if several:
            yield paragraph(f"{where}:", indent=2)
        sentences = evidence[:MOST_EVIDENCE] if len(evidence) > MOST_EVIDENCE + 1 else evidence
        if len(sentences) < len(evidence):
            sentences = (*sentences, f"and {len(evidence) - len(sentences)} more")
        yield from (paragraph(sentence, indent=4 if several else 2) for sentence in sentences)


def _probes(results: Sequence[HostResult]) -> list[Part]:
    probes = [paragraph(f"{result.host}: {probed(result.probes)}", indent=2) for result in results if result.probes]
    return [paragraph("Active probes:"), *probes] if probes else []


def _ignored(results: Sequence[HostResult]) -> list[Part]:
    return [
        paragraph(f"ignored on {result.host}: {finding.severity} {finding.id}: {reason}")
        for result in results
        for finding, reason in result.ignored
    ]


def _unjudged(results: Sequence[HostResult]) -> list[Part]:
    """Return the rules that could not be judged, by reason; hosts with the same share a line."""
    by_reason: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for result in results:
        for why, ids in reasons(result.unjudged).items():
            by_reason.setdefault((tuple(ids), why), []).append(result.host)
    report: list[Part] = [paragraph("Not known, so not judged:")] if by_reason else []
    for (names, why), hosts in by_reason.items():
        where = f" ({_hosts(hosts)})" if len(results) > 1 else ""
        few = len(names) <= MOST_RULES
        rules = ", ".join(names) if few else f"{', '.join(names[:3])} and {len(names) - 3} more rules"
        report.append(paragraph(f"{why}{where}: {rules}", indent=2))
    return report


def comparison(difference: Comparison) -> list[Part]:
    """Return what sets one host apart from the other."""
    report: list[Part] = [heading(f"{difference.bad} compared with {difference.good}")]
    if difference.empty:
        sentence = "No difference: the same rules fire, and their infos differ in identities only."
        report.append(paragraph(sentence))
    for host, findings in ((difference.bad, difference.only_bad), (difference.good, difference.only_good)):
        for finding in findings:
            evidence = finding.evidence[0] if finding.evidence else ""
            title = f"  {finding.id}, on {host} only: {evidence}"
            report.append(paragraph([severity(finding.severity), (title, None)]))
            report.append(paragraph(f"fix: {finding.cure}", indent=4))
            report += [command(line, indent=8) for line in finding.commands]
    if difference.differences:
        if difference.only_bad or difference.only_good:
            report.append(gap())
        entries = difference.differences[:MOST_DIFFERENCES]
        rows = [(entry.path, shown(entry.good), shown(entry.bad)) for entry in entries]
        report.append(table(["differs", difference.good, difference.bad], rows))
        if len(difference.differences) > MOST_DIFFERENCES:
            report.append(paragraph(f"and {len(difference.differences) - MOST_DIFFERENCES} more"))
    return report


def run_summary(results: Sequence[HostResult], page: str, label: str = "page") -> list[dict[str, Any]]:
    """Return what a run came to, as data for ``run_summary``: who has errors, the worst first."""
    unreachable = [result for result in results if result.unreachable is not None]
    hosts = f"{len(results)} host{'' if len(results) == 1 else 's'}"
    entries: list[dict[str, Any]] = []
    for level, word in (("error", "errors"), ("warning", "warnings")):
        concerned = [result for result in results if result.count(level)]
        concerned.sort(key=lambda result: -result.count(level))
        if concerned:
            entries.append({"text": f"{len(concerned)} of {hosts} {_have(concerned)} {word}: {_named(concerned, level)}", "style": level})
            break
    if unreachable:
        names = _few([result.host for result in unreachable])
        entries.append({"text": f"{len(unreachable)} of {hosts} could not be asked: {names}", "style": "error"})
    if not entries:
        notes = sum(result.count("note") for result in results)
        entries.append({"text": f"no errors or warnings on {hosts}, {notes} note{'' if notes == 1 else 's'}"})
    return [*entries, {"text": label, "path": page}]


def _have(results: Sequence[HostResult]) -> str:
    return "has" if len(results) == 1 else "have"


def _named(results: Sequence[HostResult], level: str) -> str:
    named = []
    for result in results:
        ids = [finding.id for finding in result.findings if finding.severity == level]
        named.append(f"{result.host} ({_few(ids)})")
    return _few(named)


def _few(names: Sequence[str]) -> str:
    if len(names) <= MOST_IN_SUMMARY:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_IN_SUMMARY])} and {len(names) - MOST_IN_SUMMARY} more"
