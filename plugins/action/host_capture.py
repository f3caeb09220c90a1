# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Writes a host's captured variables on the controller: asks the host what only it can tell, and renders the rest here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, variables_file

# isort: split
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.host import capture, survey_shape

PROFILES = PROJECT / "tuning/profiles.yml"
SOURCES = untrusted.ListOf(
    {
        "url": untrusted.TEXT,
        "suite": untrusted.Maybe(untrusted.TEXT),
        "components": untrusted.ListOf(untrusted.TEXT),
        "signed_by": untrusted.Maybe(untrusted.TEXT),
        "file": untrusted.TEXT,
        "fingerprint": untrusted.Maybe(untrusted.TEXT),
    }
)


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        to = Path(self._loader.path_dwim(arguments["to"]))
        host = str((task_vars or {}).get("inventory_hostname"))
        info = arguments.get("info") or {}
        if not info.get("os"):
            return result | {"failed": True, "msg": "info is not a survey: pass what gpu_host_info returned"}
        asked = {"info": {}, "to": str(to)} | {key: arguments[key] for key in ("root",) if key in arguments}
        answer = self._execute_module(module_args=asked, task_vars=task_vars)
        if answer.get("failed") or answer.get("unreachable"):
            return result | answer
        try:
            info, _ = survey_shape.checked({key: value for key, value in info.items() if not key.startswith("_ansible")})
            untrusted.check(answer.get("sources"))
            untrusted.require(answer.get("sources"), SOURCES, "sources")
            with untrusted.reading("the survey"):
                sections = capture.sections(info, answer["sources"], arguments.get("given") or {}, self._sysctls())
                text = variables_file.render(host, info, sections)
        except AerieError as error:
            return result | {"failed": True, "msg": f"what the host says can't be captured: {error}"}
        try:
            before = to.read_text() if to.is_file() else ""
            changed = variables_file.without_date(before) != variables_file.without_date(text)
            if changed and not self._task.check_mode:
                write_atomic(to, text)
        except (AerieError, OSError) as error:
            return result | {"failed": True, "msg": f"{to} can't be written: {error}"}
        values = {name: value for section in sections for name, value in section.values.items()}
        diff = {"before": before, "after": text if changed else before, "before_header": str(to), "after_header": str(to)}
        return result | {"changed": changed, "path": str(to), "variables": values, "sources": answer["sources"], "diff": diff}

    def _sysctls(self) -> set[str]:
        """Return the kernel variables that some tuning profile sets."""
        table = self._loader.load_from_file(str(PROFILES)) if PROFILES.is_file() else {}
        profiles = (table.get("profiles") or {}).values()
        return {name for profile in profiles for name in (profile.get("settings") or {}).get("sysctl") or {}}
