"""What a provisioning run did to a fleet, host by host: gathered while it runs, and kept as JSON.

terminal_reports/provisioning.py shows it. No Ansible import.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.words import clean

SCHEMA = "aerie-provision/1"
OK, FAILED, UNREACHABLE, NOT_BEGUN = "ok", "failed", "unreachable", "not begun"


@dataclass
class HostRecord:
    """One host's part of the run. ``status`` stays ``not begun`` until the run says otherwise."""

    batch: int = 0
    status: str = NOT_BEGUN
    changed: list[str] = field(default_factory=list)
    """Names of the tasks that changed something, or in check mode would."""
    task: str | None = None
    reason: str | None = None
    reboot: dict[str, Any] = field(default_factory=lambda: {"required": False, "done": False, "reason": None})
    begun: float | None = None
    seconds: float | None = None


@dataclass
class Fleet:
    """The hosts of a run in their order, canaries first."""

    canaries: Sequence[str]
    batch: int
    check: bool = False
    hosts: dict[str, HostRecord] = field(default_factory=dict)
    started: float = field(default_factory=time.time)

    @classmethod
    def of(cls, plan: Mapping[str, Any], check: bool) -> Fleet:
        """Begin with the plan of the role ``provision``: ``order``, ``canaries`` and ``batch``."""
        canaries, batch = list(plan["canaries"]), int(plan["batch"])
        order = list(plan["order"])
        after = [host for host in order if host not in canaries]
        hosts = {host: HostRecord(batch=0) for host in order if host in canaries}
        first = 1 if canaries else 0
        hosts |= {host: HostRecord(batch=first + number // batch) for number, host in enumerate(after)}
        return cls(canaries, batch, check, hosts)

    def begin(self, host: str) -> None:
        if (record := self.hosts.get(host)) and record.begun is None:
            record.begun = time.monotonic()

    def change(self, host: str, task: str) -> None:
        if record := self.hosts.get(host):
            record.changed.append(task)

    def lose(self, host: str, task: str, reason: str) -> None:
        """The host stopped answering in the middle of its work, so it could say nothing about itself."""
        self._end(host, UNREACHABLE, task, reason)

    def end(self, host: str, outcome: Mapping[str, Any]) -> None:
        """Take what the role says of the host (``status``, ``task``, ``reason``, ``reboot``)."""
        if record := self.hosts.get(host):
            record.reboot |= outcome.get("reboot") or {}
            self._end(host, str(outcome["status"]), outcome.get("task"), outcome.get("reason"))

    def _end(self, host: str, status: str, task: str | None, reason: str | None) -> None:
        if record := self.hosts.get(host):
            record.status, record.task, record.reason = status, task or None, clean(reason) if reason else None
            record.seconds = round(time.monotonic() - record.begun, 1) if record.begun is not None else None

    def close(self) -> None:
        """Say of hosts that were never begun why."""
        for record in self.hosts.values():
            if record.status == NOT_BEGUN and record.begun is not None and not record.reason:
                record.status, record.reason = FAILED, "the run ended before this host was done"
        bad = [f"{host} {self.hosts[host].status}" for host in self.canaries if self.hosts[host].status != OK]
        why = f"a canary failed: {', '.join(bad)}" if bad else "the run ended before its batch"
        for record in self.hosts.values():
            if record.status == NOT_BEGUN:
                record.reason = record.reason or why

    def content(self) -> dict[str, Any]:
        """Return what the JSON file holds."""
        return {
            "schema": SCHEMA,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "check": self.check,
            "canaries": list(self.canaries),
            "batch": self.batch,
            "hosts": {
                host: {
                    "status": record.status,
                    "batch": record.batch,
                    "changed": record.changed,
                    "reboot": record.reboot,
                    "failed_at": record.task,
                    "reason": record.reason,
                    "seconds": record.seconds,
                }
                for host, record in self.hosts.items()
            },
        }
