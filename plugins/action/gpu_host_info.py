# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Writes a host's recording on the controller; personal details were taken out on the host, the inventory's names are here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
import aerie_controller  # noqa: F401  makes ansible.module_utils.aerie importable


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.files import write_json
        from ansible.module_utils.aerie.host import anonymize, recordings

        result: dict[str, Any] = super().run(tmp, task_vars)
        variables, target = task_vars or {}, self._task.args.get("record_to")
        answer = self._execute_module(module_args=dict(self._task.args), task_vars=task_vars)
        recording = answer.get("recording")
        if answer.get("failed") or not recording:
            return result | answer
        name = str(variables.get("inventory_hostname", "host"))
        answer["recording"] = anonymize.anonymize(recording, besides=(name, str(variables.get("ansible_host", name))))
        if target and not self._task.check_mode:
            path = Path(str(target)).expanduser() / name / recordings.RECORDING
            try:
                write_json(path, answer["recording"])
            except OSError as error:
                return result | answer | {"failed": True, "msg": f"{error.filename}: {error.strerror}: choose another record_to"}
            answer["recording_path"] = str(path)
        if not boolean(self._task.args.get("record", False)):
            del answer["recording"]
        return result | answer
