"""Reports an experiment on the controller: the work happens here, once for a play, and no host is asked."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import report, terminal  # importing the package makes ansible.module_utils.aerie importable
from aerie_controller.preflight import results as preflight_results
from aerie_controller.terminal_reports import experiment

# isort: split
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.measuring import ledger, verdict

ARGUMENTS: dict[str, dict[str, Any]] = {
    "results": {"type": "path", "required": True},
    "path": {"type": "path"},
    "title": {"type": "str", "default": report.DEFAULT_TITLE},
    "run_ids": {"type": "list", "elements": "str", "default": []},
    "experiments": {"type": "list", "elements": "str", "default": []},
    "baseline": {"type": "str"},
}
PAGE = "report.html"


class ActionModule(ActionBase):
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        results = Path(self._loader.path_dwim(arguments["results"]))
        path = Path(self._loader.path_dwim(arguments["path"])) if arguments["path"] else results / PAGE
        try:
            return result | self._report(results, path, arguments)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        except OSError as error:
            return result | {"failed": True, "msg": f"the report can't be made: {error.filename}: {error.strerror}"}

    def _report(self, results: Path, path: Path, arguments: dict[str, Any]) -> dict[str, Any]:
        content = ledger.scan(results)
        for problem in content.problems:
            terminal.warn(f"left out of the report: {problem}")
        records = ledger.choose(content, arguments["run_ids"], arguments["experiments"])
        unfit: list[str] = []
        groups = verdict.groups(records, arguments["baseline"], unfit)
        for why in unfit:
            terminal.warn(f"left out of the report: {why}")
        found = {
            "path": str(path),
            "run_ids": sorted({group.run_id for group in groups}),
            "verdicts": [
                {"experiment": group.experiment, "host": group.host, "run_id": group.run_id} | asdict(crossing)
                for group in groups
                for crossing in group.crossovers
            ],
            "failed_cells": sum(len(group.failures) for group in groups),
            "problems": [asdict(problem) for problem in content.problems],
        }
        if not groups:
            message = f"There is no record below {results} yet, so there is nothing to report: run a benchmark, or name another directory."
            terminal.show([terminal.gap(), terminal.paragraph(message)])
            return found | {"changed": False, "table": "", "msg": message}
        page = report.render(groups, arguments["title"], preflight_results.kept(results / "preflight")).encode()
        changed = not path.is_file() or path.read_bytes() != page
        if changed and not self._task.check_mode:
            write_atomic(path, page)
        said = "would be written" if changed and self._task.check_mode else "written" if changed else "unchanged"
        parts = experiment.parts(groups, {"results": str(results), f"report ({said})": str(path)})
        terminal.show([terminal.gap(), *parts])
        return found | {
            "changed": changed,
            "table": terminal.render(parts, terminal.DEFAULT_WIDTH),
            "run_summary": [{"text": f"report ({said})", "path": str(path)}],
        }
