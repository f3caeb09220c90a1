"""Adds to host_lease who is asking: this run, its user and its controller."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import owner, terminal


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args) | {"owner": owner.owner()}
        answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        holder = answer.get("holder")
        # A run of this very controller that has died can't give its lease back: ask once more, knowing that.
        run = holder.get("run") if isinstance(holder, dict) else None
        if answer.get("failed") and isinstance(run, str) and owner.is_dead(run):
            answer = self._execute_module(module_args=arguments | {"dead_runs": [run]}, task_vars=task_vars)
        if answer.get("message"):
            terminal.warn(answer["message"])
        return result | answer
