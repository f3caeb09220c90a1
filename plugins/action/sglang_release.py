"""Adds to sglang_release what only the controller knows: the content hashes of the patch sets that a release is named after."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import patch_sets
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        names = arguments.get("patch_sets") or []
        return arguments | {"patch_set_hashes": {one.name: one.sha256 for one in patch_sets.load(names)}}
