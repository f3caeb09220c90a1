# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Adds to host_tuning what only the controller knows: the profiles; and shows what a person should know."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, terminal

PROFILES = PROJECT / "tuning/profiles.yml"


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if arguments.get("profiles"):
            arguments["definitions"] = yaml.safe_load(PROFILES.read_text())["profiles"]
        answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        for note in answer.get("notes", []):
            terminal.warn(f"{(task_vars or {}).get('inventory_hostname', '?')}: {note}")
        (answer.get("invocation", {}).get("module_args") or {}).pop("definitions", None)
        return result | answer
