"""What a provisioning run did to a fleet: a row a host, and below them the reasons."""

from __future__ import annotations

from ..figures import NONE
from ..fleet import Fleet, HostRecord
from ..terminal import Part, Span, figures, paragraph, table

STYLES = {"ok": "good", "failed": "error", "unreachable": "error", "not begun": "warning"}


def parts(fleet: Fleet) -> list[Part]:
    """Return the table of hosts in the run's order, then the reasons, too long for a row."""
    rows = [
        (
            f"{host}{' (canary)' if host in fleet.canaries else ''}",
            str(record.batch),
            [_outcome(record)],
            _changed(record, fleet.check),
            _reboot(record),
            f"{record.seconds:.0f}" if record.seconds is not None else NONE,
        )
        for host, record in fleet.hosts.items()
    ]
    report: list[Part] = [table(["host", *figures("batch"), "outcome", "changed", "reboot", *figures("s")], rows)]
    for host, record in fleet.hosts.items():
        if record.reason:
            at = f" at “{record.task}”" if record.task else ""
            report.append(paragraph(f"{host}: {record.status}{at}: {record.reason}"))
        if record.reboot["required"] and not record.reboot["done"]:
            report.append(paragraph(f"{host}: reboot required: {record.reboot['reason'] or 'no reason told'}"))
    return report


def _outcome(record: HostRecord) -> Span:
    return record.status, STYLES.get(record.status)


def _changed(record: HostRecord, check: bool) -> str:
    if not record.changed:
        return NONE
    return f"{len(record.changed)} would" if check else str(len(record.changed))


def _reboot(record: HostRecord) -> str:
    if record.reboot["done"]:
        return "done"
    return "required" if record.reboot["required"] else NONE
