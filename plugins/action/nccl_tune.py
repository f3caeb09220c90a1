# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Starts a search on the host, shows how it goes and brings its files; plans what confirms it, and decides, on the controller alone."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import generated_yaml, terminal  # makes ansible.module_utils.aerie importable
from aerie_controller.detached import DetachedAction
from aerie_controller.terminal import clean
from aerie_controller.terminal_reports import nccl_search

# isort: split
from ansible.module_utils.aerie import untrusted

WIDTH = 130


class ActionModule(DetachedAction):
    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        state = self._task.args.get("state", "searched")
        try:
            if state == "planned":
                with untrusted.reading("the result of the search"):
                    return {"changed": False, "experiments": self._planned(dict(self._task.args))}
            if state == "decided":
                return self._decided(dict(self._task.args), str((task_vars or {}).get("inventory_hostname")))
            result = super().run(tmp, task_vars)
            if result.get("failed"):
                return result
            return self.bring_run(result, task_vars or {}, "nccl", state="packed", root=self._task.args["root"])
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

    def _decided(self, given: dict[str, Any], host: str) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.files import write_atomic
        from ansible.module_utils.aerie.tuning import decision

        path = Path(self._loader.path_dwim(given["path"]))
        with untrusted.reading("the result of the search"):
            result = decision.require_result(given.get("result"))
            if result["host"] != host:
                raise AerieError(f"the result of the search says that it is of {clean(result['host'])}, and it came from {host}")
            records = given.get("records")
            decisions = decision.decide(result, records)
            options = decision.option_findings(records, given.get("arm_options") or [])
            tuned = decision.tuned(result, decisions, options)
            head = (
                f"Written by playbooks/tune_nccl.yml, run {result['run_id']}, for {host}. To use it: nccl_tuned_file: {path}",
                "Of the two sets, nccl_tuned_for chooses one; docs/reference/nccl.md says what the rest means.",
            )
            text = generated_yaml.document(head, {"nccl_tuned": tuned}, WIDTH)
            report = nccl_search.parts(result, decisions, options, {"variables": str(path)})
        terminal.show([terminal.gap(), *report])
        changed = not path.is_file() or path.read_text() != text
        if changed and not self._task.check_mode:
            write_atomic(path, text)
        return {"changed": changed, "tuned": tuned, "table": terminal.render(report, terminal.DEFAULT_WIDTH), "path": str(path)}
