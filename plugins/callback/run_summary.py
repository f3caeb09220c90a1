# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Prints last of all, after PLAY RECAP, what a run came to, so that it has not scrolled off.

An action plugin adds ``run_summary`` to its result, a list of plain data that is shown in its order:

    {"run_summary": [{"text": "1 of 4 hosts has errors: gpu-01", "style": "error"},
                     {"command": "ssh gpu-01"},
                     {"text": "page", "path": "/srv/preflight.html"}]}

``text`` wraps; ``style`` is one of aerie_controller.terminal.STYLES and may be left out. A
``command`` stands on a line of its own, which is never broken; so does ``page: /srv/…``. Hosts that
add the same entry share it. Entries are taken only from action plugins that work without a host
(``_requires_connection = False``): a host's answer must not put a command before a person.

After a provisioning run it also prints what became of each host, and keeps that as JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

# Resolved, since playbooks/callback_plugins is a link to this directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from aerie_controller import fleet, terminal
from aerie_controller.terminal_reports import provisioning

# isort: split
from ansible.module_utils.aerie.files import write_json

DOCUMENTATION = r"""
name: run_summary
type: aggregate
short_description: What a run came to, after the recap
description:
  - Prints after C(PLAY RECAP) the entries that tasks added as C(run_summary) to their results, such
    as which hosts have errors and where the report is.
  - After a provisioning run, prints a table of all hosts of the role C(provision) (outcome, changes,
    reboot, where and why it failed), and writes the same as JSON to C(<aerie_results>/provision/).
  - A play can't do this - hosts that can't be reached, and all after a failed canary, run no more
    tasks.
  - Prints nothing in other runs.
author: Aerie contributors (!UNKNOWN)
"""

PLAN = "__provision_plan"
OUTCOME = "__provision_outcome"
MARK = "__provision_play"
WORK = "work"
SUMMARY = "run_summary"


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "run_summary"

    def __init__(self) -> None:
        super().__init__()
        self.fleet: fleet.Fleet | None = None
        self.results: Path | None = None
        self.part: str | None = None
        self.entries: list[Any] = []

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self.part = play.vars.get(MARK)
        if self.part is None:
            self._show_fleet()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:  # noqa: ARG002  Ansible's signature
        if self.part == WORK and self.fleet:
            self.fleet.begin(host.get_name())

    def v2_runner_on_ok(self, result: Any) -> None:
        self._collect(result)
        if self.part is None:
            return
        from ansible.context import CLIARGS  # bound anew when the command line was read

        content, host = result.result, result.host.get_name()
        facts = content.get("ansible_facts") or {}
        if PLAN in facts and self.fleet is None and facts[PLAN]["order"]:
            self.results = Path(facts[PLAN]["results"])
            self.fleet = fleet.Fleet.of(facts[PLAN], bool(CLIARGS.get("check")))
        if self.fleet is None:
            return
        if OUTCOME in facts:
            self.fleet.end(host, facts[OUTCOME])
        if content.get("changed"):
            self.fleet.change(host, result.task.get_name())

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:  # noqa: ARG002  Ansible's signature
        self._collect(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        if self.part and self.fleet and not result.task.ignore_unreachable:
            self.fleet.lose(result.host.get_name(), result.task.get_name(), str(result.result.get("msg", "")))

    def v2_playbook_on_stats(self, stats: Any) -> None:  # noqa: ARG002  Ansible's signature
        self._show_fleet()
        entries, self.entries = self.entries, []
        if parts := terminal.from_data(entries):
            terminal.show(parts)

    def _collect(self, result: Any) -> None:
        entries = result.result.get(SUMMARY)
        if not isinstance(entries, list) or not _works_without_host(result.task):
            return
        for entry in entries:
            if entry not in self.entries:
                self.entries.append(entry)

    def _show_fleet(self) -> None:
        finished, self.fleet = self.fleet, None
        if finished is None or self.results is None:
            return
        finished.close()
        self._display.banner("PROVISIONED" if not finished.check else "WOULD BE PROVISIONED")
        terminal.show(provisioning.parts(finished))
        if finished.check:
            return
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(finished.started))
        path = self.results / f"{started}.json"
        try:
            write_json(path, finished.content())
        except OSError as error:
            terminal.warn(f"the summary could not be written: {error}")
            return
        terminal.show(terminal.places({"summary": path}))


def _works_without_host(task: Any) -> bool:
    from ansible.plugins.loader import action_loader

    plugin = action_loader.get(task.action, class_only=True)
    return plugin is not None and not plugin._requires_connection
