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
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import collection
        from ansible.module_utils.aerie.profiling import profile_levels

        result = super().run(tmp, task_vars)
        dest = self._task.args.get("dest")
        if result.get("failed") or not dest or "files" not in result:
            return result
        try:
            lacking = collection.missing(result["files"], Path(dest))
            if lacking:
                # All files of an arm are of one profile of it.
                profile_levels.set_aside(Path(dest, *Path(result["files"][0]["place"]).parts[:4]))
                lacking = result["files"]
                self.bring(
                    lacking,
                    Path(dest),
                    task_vars or {},
                    "profile",
                    state="off",
                    **{name: self._task.args[name] for name in ("root", "instance")},
                )
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        return result | {"fetched": [entry["place"] for entry in lacking]}
