"""Adds to sglang_environment what only the controller knows: versions.yml, the locks and the stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.utils.display import Display

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        from ansible.module_utils.aerie import versions

        data = yaml.safe_load((PROJECT / "versions.yml").read_text())
        build = versions.resolve(data, str(arguments["profile"]), arguments.get("version"))
        if message := versions.unverified(build, arguments.get("architectures") or ()):
            Display().warning(f"{task_vars.get('inventory_hostname')}: {message}")
        return arguments | {
            "version": build.version,
            "build": build.as_dict(),
            "lock_text": (PROJECT / build.lock).read_text(),
            "supervisor_lock_text": (PROJECT / data["supervisor"]["lock"]).read_text() if arguments.get("supervisor") else None,
            "stand_ins": _texts(PROJECT / build.stand_ins) if build.stand_ins else {},
        }


def _texts(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): path.read_text() for path in sorted(directory.rglob("*.py"))}
