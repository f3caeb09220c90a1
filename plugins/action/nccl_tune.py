# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Starts a search on the host, shows how it goes and brings its files; plans what confirms it, and decides, on the controller alone."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import terminal  # makes ansible.module_utils.aerie importable
from aerie_controller.detached import DetachedAction
from aerie_controller.terminal_reports import nccl_search
from aerie_controller.variables_file import plain

HEAD = """---
# Written by playbooks/tune_nccl.yml, run {run_id}, for {host}. To use it: nccl_tuned_file: {path}
# Of the two sets, nccl_tuned_for chooses one; docs/reference/nccl.md says what the rest means.
"""


class ActionModule(DetachedAction):
    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        state = self._task.args.get("state", "searched")
        try:
            if state == "planned":
                return {"changed": False, "experiments": self._planned(dict(self._task.args))}
            if state == "decided":
                return self._decided(dict(self._task.args))
            result = super().run(tmp, task_vars)
            return result if result.get("failed") or "files" not in result else self._bring(result, task_vars or {})
        except AerieError as error:
            return {"failed": True, "msg": str(error)}

    def _planned(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        from ansible.module_utils.aerie.tuning import decision

        found = decision.confirmations(
            decision.require_result(given.get("result")),
            given.get("arm") or {},
            given.get("in_force") or {},
            given.get("arm_options") or [],
            given.get("workloads") or {},
            int(given.get("confirm_repeats") or 4),
            int(given.get("confirm_timeout_seconds") or 1800),
        )
        return [asdict(one) for one in found]

    def _decided(self, given: dict[str, Any]) -> dict[str, Any]:
        from ansible.module_utils.aerie.files import write_atomic
        from ansible.module_utils.aerie.tuning import decision

        result = decision.require_result(given.get("result"))
        records = given.get("records")
        decisions = decision.decide(result, records)
        options = decision.option_findings(records, given.get("arm_options") or [])
        tuned = decision.tuned(result, decisions, options)
        path = Path(self._loader.path_dwim(given["path"]))
        text = HEAD.format(run_id=result["run_id"], host=result["host"], path=path) + yaml.safe_dump(
            {"nccl_tuned": plain(tuned)}, sort_keys=False, allow_unicode=True, width=130
        )
        report = nccl_search.parts(result, decisions, options, {"variables": str(path)})
        terminal.show([terminal.gap(), *report])
        changed = not path.is_file() or path.read_text() != text
        if changed and not self._task.check_mode:
            write_atomic(path, text)
        return {"changed": changed, "tuned": tuned, "table": terminal.render(report, terminal.DEFAULT_WIDTH), "path": str(path)}

    def _bring(self, result: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        from ansible.module_utils.aerie.measuring import collection

        dest = self._task.args.get("dest")
        if not dest:
            return result
        lacking = collection.missing(result["files"], Path(dest))
        if lacking:
            self.bring(lacking, Path(dest), task_vars, "search", state="packed", root=self._task.args["root"])
        return result | {"fetched": [entry["place"] for entry in lacking]}
