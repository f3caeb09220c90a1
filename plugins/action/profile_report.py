# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reports a profile on the controller: the work happens here, once for a play, and no host is asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import report, terminal  # importing the package makes ansible.module_utils.aerie importable
from aerie_controller.terminal_reports import profile

# isort: split
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.measuring import bench_runner
from ansible.module_utils.aerie.profiling import profile_levels

ARGUMENTS: dict[str, dict[str, Any]] = {
    "results": {"type": "path", "required": True},
    "run_id": {"type": "str", "required": True},
    "path": {"type": "path"},
}
PAGE, FIGURES = "profile.html", "profile.json"


class ActionModule(ActionBase):
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        results = Path(self._loader.path_dwim(arguments["results"]))
        page = Path(self._loader.path_dwim(arguments["path"])) if arguments["path"] else results / PAGE
        try:
            return result | self._report(results / "profile" / arguments["run_id"], page)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        except OSError as error:
            return result | {"failed": True, "msg": f"the profile can't be reported: {error.filename}: {error.strerror}"}

    def _report(self, run: Path, page: Path) -> dict[str, Any]:
        told = {"path": str(page), "json": str(run / FIGURES), "levels_failed": 0, "table": ""}
        found = profile_levels.whole(run) if run.is_dir() else {"hosts": {}}
        for problem in found.get("problems", []):
            terminal.warn(f"left out of the profile: {problem}")
        if not found["hosts"]:
            message = f"There is no profile below {run} yet, so there is nothing to report."
            terminal.show([terminal.gap(), terminal.paragraph(message)])
            return told | {"changed": False, "msg": message}
        paths = {"page": str(page), "figures": str(run / FIGURES)}
        parts = profile.parts(found, paths)
        terminal.show([terminal.gap(), *parts])
        written = {run / FIGURES: (json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()}
        try:
            written[page] = report.render_profile(found).encode()
        except AerieError as error:  # the figures are there, and the page can be made elsewhere
            terminal.warn(f"no page: {error}")
        changed = [path for path, content in written.items() if not path.is_file() or path.read_bytes() != content]
        if not self._task.check_mode:
            for path in changed:
                write_atomic(path, written[path])
        levels = [level for host in found["hosts"].values() for arm in host["arms"] for level in arm["levels"]]
        failed = sum(level["status"] != bench_runner.COMPLETED for level in levels)
        told |= {"changed": bool(changed), "table": terminal.render(parts, terminal.DEFAULT_WIDTH), "levels_failed": failed}
        if failed and failed == len(levels):
            return told | {"failed": True, "msg": f"no level was profiled: {levels[0]['reason']}"}
        return told
