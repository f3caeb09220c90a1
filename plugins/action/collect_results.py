# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Brings a host's raw files and records to the controller: what it lacks, in one transfer, checked and put in place atomically."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import fetching, terminal  # makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import collection, placing


class ActionModule(ActionBase):
    TRANSFERS_FILES = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables, arguments = task_vars or {}, dict(self._task.args)
        try:
            limits = fetching.take_limits(arguments)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        dest = arguments.get("dest")
        if answer.get("failed") or not dest:
            return result | answer
        try:
            with untrusted.reading("the host's answer"):
                return result | self._collect(answer, Path(dest), limits, variables)
        except (AerieError, OSError) as error:
            return result | {"failed": True, "msg": _message(error)}

    def _collect(self, answer: dict[str, Any], dest: Path, limits: placing.Limits, variables: dict[str, Any]) -> dict[str, Any]:
        host = placing.require_host(variables.get("inventory_hostname"))
        untrusted.require(answer, {"problems?": untrusted.ListOf(untrusted.TEXT)})
        placed = placing.of_cells(answer.get("files"), answer.get("records"), host, self._task.args.get("run_id"))
        lacking = collection.missing(placed.entries, dest)
        problems = [*answer.get("problems", []), *placed.problems]
        if lacking and not self._task.check_mode:
            packing = {"root": self._task.args["root"]}
            problems += fetching.bring(self, lacking, dest, variables, "results", limits, packing, examine=collection.cell_agrees)
        for problem in problems:
            terminal.warn(f"{host}: not collected: {problem}")
        if not self._task.check_mode:
            lacking = [entry for entry in lacking if (dest / entry.place).is_file()]
        places = {entry.path: entry.place for entry in placed.entries}
        return answer | {
            "changed": bool(answer.get("changed")) or bool(lacking),
            "files": [entry | {"place": places[entry["path"]]} for entry in answer["files"] if entry["path"] in places],
            "fetched": [entry.place for entry in lacking],
            "problems": problems,
        }


def _message(error: AerieError | OSError) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
