# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Chooses the arm, starts its calibration on the host, shows how it goes and brings its files; decides on the controller alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import generated_yaml, terminal  # makes ansible.module_utils.aerie importable
from aerie_controller.detached import DetachedAction
from aerie_controller.terminal import clean
from aerie_controller.terminal_reports import calibration

WIDTH = 130


class ActionModule(DetachedAction):
    TRANSFERS_FILES = True

    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return self.choose_arm(arguments, "sglang_calibrate_arm")

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        try:
            if self._task.args.get("state") == "decided":
                return self._decided(dict(self._task.args))
            result = super().run(tmp, task_vars)
            if result.get("failed"):
                return result
            where = {name: self._task.args[name] for name in ("root", "instance")}
            return self.bring_run(result, task_vars or {}, "calibration", **where)
        except AerieError as error:
            return {"failed": True, "msg": str(error)}
        except OSError as error:
            return {"failed": True, "msg": f"{error.filename}: {error.strerror}"}

    def _decided(self, given: dict[str, Any]) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.files import write_atomic
        from ansible.module_utils.aerie.measuring import calibration_files

        dest = Path(self._loader.path_dwim(given["dest"]))
        asked = generated_yaml.plain(given.get("records") or {})
        found = (
            calibration_files.of_records(dest, given["host"], asked)
            if asked
            else calibration_files.read(dest / "calibration" / given["run_id"] / given["host"])
        )
        path = Path(self._loader.path_dwim(given["path"]))
        page = Path(self._loader.path_dwim(given["page"])) if given.get("page") else path.with_suffix(".html")
        told, host, run_id = found["calibration"], given["host"], str(asked.get("run_id") or given["run_id"])
        # The files say so too, and their host wrote them.
        if (told["host"], told["run_id"]) != (host, run_id):
            said = f"run {clean(told['run_id'])} of {clean(told['host'])}"
            raise AerieError(f"the files of run {run_id} of {host} say that they are of {said}: calibrate again")
        head = (
            f"Written by playbooks/calibrate.yml, run {run_id}, for {host}. Arms with dynamic.threshold auto use it at their next start.",
            found["sentence"],
            "It holds for this host, release, models and draft settings only: docs/reference/calibration.md",
        )
        text = generated_yaml.document(head, {"sglang_server_calibration": told}, WIDTH)
        figures = dest / "calibration" / run_id / host / "calibration.json"
        written = {path: text, figures: json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"}
        parts = calibration.parts(found, {"variables": str(path), "page": str(page)})
        terminal.show([terminal.gap(), *parts])
        try:
            from aerie_controller import report

            written[page] = report.render_calibration(found)
        except AerieError as error:  # the figures are there, and the page can be made elsewhere
            terminal.warn(f"no page: {error}")
        before = path.read_text() if path.is_file() else ""
        changed = [one for one, content in written.items() if not one.is_file() or one.read_text() != content]
        if not self._task.check_mode:
            for one in changed:
                write_atomic(one, written[one])
        told = {
            "changed": bool(changed),
            "calibration": told,
            "table": terminal.render(parts, terminal.DEFAULT_WIDTH),
            "path": str(path),
            "page": str(page),
        }
        diff = {"before_header": str(path), "after_header": str(path), "before": before, "after": text}
        return told | ({"diff": diff} if self._task.diff else {})
