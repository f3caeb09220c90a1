# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Judges a host's survey on the controller; the host itself is not asked again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, terminal

OPTIONS = {
    "info": {"type": "dict", "required": True},
    "profile": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
    "root": {"type": "path", "required": True},
    "python": {"type": "str", "default": "python3"},
    "adopt_environment": {"type": "str"},
    "adopt_tree": {"type": "str"},
    "version": {"type": "str"},
    "instances": {"type": "dict", "default": {}},
    "models": {"type": "dict", "default": {}},
    "disk_gib": {"type": "float"},
    "memory_gib": {"type": "float"},
}


class ActionModule(ActionBase):
    """Fails with everything that stands in the way of the deployment, at once."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError, raise_all
        from ansible.module_utils.aerie.host import requirements

        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=OPTIONS)
        host = (task_vars or {}).get("inventory_hostname", "the host")
        instances, environment = arguments["instances"], arguments["adopt_environment"]
        adopted = bool(environment or arguments["adopt_tree"])
        wanted = requirements.Wanted(
            profile=arguments["profile"],
            root=arguments["root"],
            python=environment or arguments["python"],
            adopted=adopted,
            python_setting="sglang_release_adopt_environment" if environment else "sglang_release_python",
            python_versions=() if adopted else self._python_versions(arguments["profile"], arguments["version"]),
            ports={name: instance["port"] for name, instance in instances.items()},
            gpus={name: tuple(instance.get("gpus") or ()) for name, instance in instances.items()},
            models={name: model["path"] for name, model in arguments["models"].items() if model.get("source", "host") == "host"},
            disk_gib=arguments["disk_gib"],
            memory_gib=arguments["memory_gib"],
        )
        findings = requirements.check(arguments["info"], wanted)
        for warning in findings.warnings:
            terminal.warn(f"{host}: {warning}")
        result |= {"changed": False, "notes": list(findings.warnings)}
        try:
            raise_all(findings.problems, f"{host} can't take this deployment, and nothing was touched")
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        return result

    def _python_versions(self, profile: str, version: str | None) -> tuple[str, ...]:
        """Return the Pythons that the wanted SGLang has a build for; an unknown version is validate_variables' to refuse."""
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.releases import versions

        try:
            return tuple(versions.resolve(self._loader.load_from_file(str(PROJECT / "versions.yml")), profile, version).sglang_sha256)
        except AerieError:
            return ()
