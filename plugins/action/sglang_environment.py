"""Adds to sglang_environment what only the controller knows: versions.yml, the locks and the stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, terminal
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        from ansible.module_utils.aerie.releases import versions

        data = self._versions()
        supervisor_lock = (PROJECT / data["supervisor"]["lock"]).read_text() if arguments.get("supervisor") else None
        if _adopts(arguments):
            return arguments | {"supervisor_lock_text": supervisor_lock}
        build = versions.resolve(data, str(arguments["profile"]), arguments.get("version"))
        if message := versions.unverified(build, arguments.get("architectures") or ()):
            terminal.warn(f"{task_vars.get('inventory_hostname')}: {message}")
        return arguments | {
            "version": build.version,
            "build": build.as_dict(),
            "lock_text": (PROJECT / build.lock).read_text(),
            "supervisor_lock_text": supervisor_lock,
            "stand_ins": _texts(PROJECT / build.stand_ins) if build.stand_ins else {},
        }

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.releases import versions

        result = super().run(tmp, task_vars)
        if _adopts(self._task.args) and "environment" in result:  # which version is there, the host had to say first
            torch = result["environment"]["torch_version"]
            verified_on, message = versions.adopted(self._versions(), result["profile"], result["version"], torch)
            terminal.warn(f"{(task_vars or {}).get('inventory_hostname')}: {message}")
            result["verified_on"] = list(verified_on)
        return result

    @staticmethod
    def _versions() -> Any:
        return yaml.safe_load((PROJECT / "versions.yml").read_text())


def _adopts(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("adopt_environment") or arguments.get("adopt_tree"))


def _texts(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): path.read_text() for path in sorted(directory.rglob("*.py"))}
