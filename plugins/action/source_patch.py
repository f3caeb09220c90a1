# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reads patch sets on the controller and ships them to the module of the same name, in one call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import patch_sets  # makes ansible.module_utils.aerie importable


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        names = arguments.get("sets")
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        if "definitions" in arguments:
            return result | {"failed": True, "msg": "definitions is filled in from the patches directory: give sets, their names"}
        try:
            if names is not None:
                arguments["definitions"] = [one.shipped for one in patch_sets.load(names)]
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        return result | self._execute_module(module_args=arguments, task_vars=task_vars or {})
