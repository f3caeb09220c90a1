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
from aerie_controller import terminal  # makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_json
from ansible.module_utils.aerie.host import anonymize, recordings, survey_shape
from ansible.module_utils.aerie.measuring import placing
from ansible.module_utils.aerie.words import listing

BY_ANSIBLE = ("changed", "failed", "warnings", "deprecations", "invocation", "exception", "ansible_facts")
MOST_SHOWN = 5


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables, target = task_vars or {}, self._task.args.get("record_to")
        answer = self._execute_module(module_args=dict(self._task.args), task_vars=task_vars)
        name = str(variables.get("inventory_hostname", "host"))
        if answer.get("failed") or answer.get("unreachable"):
            return result | answer
        # One look for all that follows: rules, capture, settings of servers.
        said_by_ansible = {key: value for key, value in answer.items() if key in BY_ANSIBLE or key.startswith("_ansible")}
        try:
            survey, problems = survey_shape.checked({key: value for key, value in answer.items() if key not in said_by_ansible})
            with untrusted.reading("the recording"):
                recording = survey.get("recording")
                if recording:
                    besides = (name, str(variables.get("ansible_host", name)))
                    recording = survey["recording"] = anonymize.anonymize(recording, besides=besides)
            directory = placing.require_host(name)
        except AerieError as error:
            return result | {"failed": True, "msg": f"the host's survey can't be used: {error}"}
        if problems:
            more = f" and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
            terminal.warn(f"{name}: the survey is not as documented; taken as unknown: {listing(problems[:MOST_SHOWN])}{more}")
        answer = said_by_ansible | survey
        if not recording:
            return result | answer
        if target and not self._task.check_mode:
            path = Path(str(target)).expanduser() / directory / recordings.RECORDING
            try:
                write_json(path, answer["recording"])
            except OSError as error:
                return result | answer | {"failed": True, "msg": f"{error.filename}: {error.strerror}: choose another record_to"}
            answer["recording_path"] = str(path)
        if not boolean(self._task.args.get("record", False)):
            del answer["recording"]
        return result | answer
