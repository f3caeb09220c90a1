# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Tells at the end of a provisioning run what became of each host, also of those that Ansible dropped on the way."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import fleet

# isort: split
from ansible.module_utils.aerie.files import write_json

DOCUMENTATION = r"""
name: provision_summary
type: aggregate
short_description: A summary per host of a provisioning run
description:
  - Prints a table of all hosts of the role C(provision) (outcome, changes, reboot, where and why it failed), and writes the same as JSON
    to C(<aerie_results>/provision/).
  - A play can't do this - hosts that can't be reached, and all after a failed canary, run no more tasks.
  - Says nothing in runs that don't provision.
author: Aerie contributors (!UNKNOWN)
"""

PLAN, OUTCOME, MARK, WORK = "__provision_plan", "__provision_outcome", "__provision_play", "work"


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "provision_summary"

    def __init__(self) -> None:
        super().__init__()
        self.fleet: fleet.Fleet | None = None
        self.results: Path | None = None
        self.part: str | None = None

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self.part = play.vars.get(MARK)
        if self.part is None:
            self._tell()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:  # noqa: ARG002  Ansible's signature
        if self.part == WORK and self.fleet:
            self.fleet.begin(host.get_name())

    def v2_runner_on_ok(self, result: Any) -> None:
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

    def v2_runner_on_unreachable(self, result: Any) -> None:
        if self.part and self.fleet and not result.task.ignore_unreachable:
            self.fleet.lose(result.host.get_name(), result.task.get_name(), str(result.result.get("msg", "")))

    def v2_playbook_on_stats(self, stats: Any) -> None:  # noqa: ARG002  Ansible's signature
        self._tell()

    def _tell(self) -> None:
        told, self.fleet = self.fleet, None
        if told is None or self.results is None:
            return
        told.close()
        self._display.banner("PROVISIONED" if not told.check else "WOULD BE PROVISIONED")
        self._display.display(told.table())
        if told.check:
            return
        path = self.results / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(told.started))}.json"
        try:
            write_json(path, told.content())
        except OSError as error:
            self._display.warning(f"the summary could not be written: {error}")
            return
        self._display.display(f"summary: {path}")
