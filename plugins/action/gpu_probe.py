# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Starts the probes on the host, shows how they go and removes the files of the detached work."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import aerie_controller  # noqa: F401  makes ansible.module_utils.aerie importable
from aerie_controller.detached import DetachedAction

REMOVE_JOB = """
import os, shutil, sys
job = sys.argv[1]
if os.path.exists(os.path.join(job, "result.json")):
    shutil.rmtree(job, ignore_errors=True)
    above = os.path.dirname(job)
    if os.path.basename(above).startswith("aerie-probe-job-"):
        os.rmdir(above)
"""


class ActionModule(DetachedAction):
    def _follow(self, job: str, task_vars: dict[str, Any]) -> dict[str, Any]:
        result = super()._follow(job, task_vars)
        if not result.get("unreachable"):
            self._low_level_execute_command(shlex.join([self._python(task_vars), "-c", REMOVE_JOB, job]), sudoable=True)
        return result
