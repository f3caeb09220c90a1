# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Brings the data set to the host, starts the cells there and shows how they go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.utils.hashing import checksum

sys.path.insert(0, str(Path(__file__).parents[1]))
import aerie_controller  # noqa: F401  makes ansible.module_utils.aerie importable
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    TRANSFERS_FILES = True

    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """Send the data set unless the host has it already: a run's launches share one."""
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.files import sha256_file

        dataset = arguments.get("dataset")
        if not dataset or self._task.check_mode:
            return arguments
        source = Path(dataset["path"])
        if sha256_file(source) != dataset["sha256"]:
            raise AerieError(f"data set {source} has changed since the experiment was planned: run again")
        there = Path(arguments["root"]) / "runs" / arguments["run_id"] / "datasets" / f"{dataset['sha256']}.json"
        found = self._execute_remote_stat(str(there), all_vars=task_vars, follow=True)
        if found.get("exists") and found.get("checksum") == checksum(str(source)):
            return arguments
        temporary = self._connection._shell.tmpdir or self._make_tmp_path()
        staged = self._connection._shell.join_path(temporary, "dataset.json")
        self._transfer_file(str(source), staged)
        self._fixup_perms2((temporary, staged))
        return arguments | {"staged_dataset": staged}
