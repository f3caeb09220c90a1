# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Brings a host's raw files and records to the controller: what it lacks, in one transfer, checked and put in place atomically."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
import aerie_controller  # noqa: F401  makes ansible.module_utils.aerie importable


class ActionModule(ActionBase):
    TRANSFERS_FILES = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import collection

        result: dict[str, Any] = super().run(tmp, task_vars)
        found = self._execute_module(module_args=dict(self._task.args), task_vars=task_vars)
        dest = self._task.args.get("dest")
        if found.get("failed") or not dest:
            return result | found
        try:
            lacking = collection.missing(found["files"], Path(dest))
            if lacking and not self._task.check_mode:
                self._fetch(lacking, Path(dest), task_vars)
        except AerieError as error:
            return result | found | {"failed": True, "msg": str(error)}
        return result | found | {"changed": found["changed"] or bool(lacking), "fetched": [entry["place"] for entry in lacking]}

    def _fetch(self, lacking: list[dict[str, Any]], dest: Path, task_vars: dict[str, Any] | None) -> None:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import collection

        shell = self._connection._shell
        remote = shell.join_path(shell.tmpdir or self._make_tmp_path(), "results.tar.gz")
        arguments = {"root": self._task.args["root"], "archive": remote, "wanted": [entry["path"] for entry in lacking]}
        packed = self._execute_module(module_args=arguments, task_vars=task_vars)
        if packed.get("failed"):
            raise AerieError(f"the host could not pack its results: {packed.get('msg')}")
        try:
            with tempfile.TemporaryDirectory() as scratch:
                local = Path(scratch) / "results.tar.gz"
                self._connection.fetch_file(remote, str(local))
                collection.unpack(local, lacking, dest)
        finally:
            self._remove_tmp_path(shell.tmpdir, force=True)
