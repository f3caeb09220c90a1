"""Looks first and shows what goes, with its size; then lets the module free it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import terminal  # makes ansible.module_utils.aerie importable
from aerie_controller.figures import human
from aerie_controller.terminal_reports import upkeep


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        host = str((task_vars or {}).get("inventory_hostname", "?"))
        arguments = dict(self._task.args)
        found = self._execute_module(module_args=arguments | {"look": True}, task_vars=task_vars)
        if found.get("failed"):
            return result | found
        report = upkeep.pruned(host, found, done=False)
        terminal.show([terminal.gap(), *report])
        table = terminal.render(report, terminal.DEFAULT_WIDTH)
        if self._task.check_mode or arguments.get("look") or not found["removed"]:
            return result | found | {"table": table}
        freed = self._execute_module(module_args=arguments, task_vars=task_vars)
        if not freed.get("failed"):
            terminal.progress(host, f"{human(freed['freed_bytes'])} freed")
        return result | freed | {"table": table}
