"""Counts what a run really does on each host: every module that Ansible sends there, also those that action plugins send.

Tasks say little about it: `template` sends two or three modules, `debug` none. So the one method by which modules are sent is
wrapped, before Ansible forks its workers. Writes to the file named by AERIE_RUN_REPORT, at the end of the run:
{"calls": {host: [module, …]}, "changed": {host: [task, …]}, "stats": {host: {"ok": n, "changed": n, "failures": n, …}}}
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: count_module_calls
type: aggregate
short_description: Count the modules sent to each host
description: Writes the modules sent, the tasks that changed something and the statistics of a run to the file in E(AERIE_RUN_REPORT).
author: Aerie contributors (!UNKNOWN)
requirements: ["enabled in C(callbacks_enabled)"]
"""


def record_calls(journal: Path) -> None:
    """Have every module call append its host and name to the journal; workers are other processes, so memory would not do."""
    send = ActionBase._execute_module

    @functools.wraps(send)
    def recording(self: ActionBase, module_name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        task_vars = kwargs.get("task_vars") or (args[2] if len(args) > 2 else None) or {}
        host = str(task_vars.get("inventory_hostname", "unknown"))
        line = json.dumps([host, str(module_name or self._task.action)]) + "\n"
        with journal.open("a") as opened:  # one short write in append mode: never interleaved
            opened.write(line)
        return send(self, module_name, *args, **kwargs)

    ActionBase._execute_module = recording


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "count_module_calls"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.report = Path(os.environ["AERIE_RUN_REPORT"])
        self.journal = self.report.with_suffix(".journal")
        self.journal.write_text("")
        self.changed: dict[str, list[str]] = {}
        record_calls(self.journal)

    def v2_runner_on_ok(self, result: Any) -> None:
        if result.result.get("changed"):
            self.changed.setdefault(result.host.get_name(), []).append(result.task.get_name())

    def v2_playbook_on_stats(self, stats: Any) -> None:
        calls: dict[str, list[str]] = {}
        for line in self.journal.read_text().splitlines():
            host, module = json.loads(line)
            calls.setdefault(host, []).append(module)
        summaries = {host: stats.summarize(host) for host in sorted(stats.processed)}
        self.report.write_text(json.dumps({"calls": calls, "changed": self.changed, "stats": summaries}, indent=1))
        self.journal.unlink()
