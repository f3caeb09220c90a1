# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Chooses the arm, starts its profile on the host, shows how it goes and brings its files to the controller."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import aerie_controller  # noqa: F401  makes ansible.module_utils.aerie importable
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    TRANSFERS_FILES = True

    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return self.choose_arm(arguments, "sglang_profile_arms")

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        if result.get("failed"):
            return result
        arm = self._task.args.get("arm")
        name = arm.get("name") if isinstance(arm, dict) else arm
        where = {key: self._task.args[key] for key in ("root", "instance")}
        return self.bring_run(result, task_vars or {}, "profile", str(name), state="off", **where)
