# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reads golden prompts from a file of the controller, and shows how they were answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, terminal

MOST_LINES, LONGEST_LINE = 200, 400
"""Of what a host sums up, which a person reads."""


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        variables = task_vars or {}
        result: dict[str, Any] = super().run(tmp, variables)
        arguments = dict(self._task.args)
        try:
            if isinstance(arguments.get("prompts"), str):
                arguments["prompts"] = _read(PROJECT / arguments["prompts"])
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        answer = self._execute_module(module_args=arguments, task_vars=variables)
        summary = answer.get("summary")
        for line in summary[:MOST_LINES] if isinstance(summary, list) else ():
            terminal.progress(variables.get("inventory_hostname", "?"), terminal.cut(line, LONGEST_LINE))
        return result | answer


def _read(path: Path) -> list[dict[str, str]]:
    from ansible.module_utils.aerie.errors import AerieError
    from ansible.module_utils.aerie.releases import golden

    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AerieError(f"sglang_patches_golden_prompts: {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return [{"name": prompt.name, "text": prompt.text} for prompt in golden.read_prompts(value)]
    except AerieError as error:
        raise AerieError(f"sglang_patches_golden_prompts: {path}: {error}") from error
