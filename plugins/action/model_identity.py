"""Sends the models that lie on the controller: asks the host what it lacks, and sends only that."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT

CACHE = PROJECT / ".cache" / "identities"


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        catalog = arguments.get("models") or {}
        try:
            arguments["manifests"] = _manifests(catalog)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        if answer.get("failed") or self._task.check_mode or not answer.get("missing"):
            return result | answer
        try:
            arguments["incoming"] = self._send(
                catalog, arguments["manifests"], answer["missing"], str((task_vars or {}).get("inventory_hostname"))
            )
            received = self._execute_module(module_args=arguments, task_vars=task_vars)
            return result | received | {key: answer[key] for key in ("changed", "missing", "diff")}
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)

    def _send(self, catalog: Any, manifests: Any, missing: dict[str, list[str]], host: str) -> dict[str, dict[str, str]]:
        # The connecting user may not write to the root, so files go to Ansible's own directory first.
        shell = self._connection._shell
        if not shell.tmpdir:
            self._make_tmp_path()
        sent: dict[str, dict[str, str]] = {}
        number = 0
        for name, files in missing.items():
            for file in files:
                number += 1
                size = manifests[name]["files"][file]["size"]
                Display().display(f"  {host}  sending model {name}: {file} ({size / 1e6:.1f} MB)")
                remote = shell.join_path(shell.tmpdir, f"model-{number}")
                self._transfer_file(str(Path(catalog[name]["path"]) / file), remote)
                self._fixup_perms2((shell.tmpdir, remote), execute=False)
                sent.setdefault(name, {})[file] = remote
        return sent


def _manifests(catalog: Mapping[str, Any]) -> dict[str, Any]:
    from ansible.module_utils.aerie.errors import raise_all
    from ansible.module_utils.aerie.releases import model_identity

    found = model_identity.catalog_problems(catalog)
    raise_all(found, "sglang_models_catalog")
    here = {name: entry for name, entry in catalog.items() if entry["source"] == "controller"}
    for name, entry in here.items():
        found += [
            f"{name} (on the controller): {one}" for one in model_identity.problems(Path(entry["path"]), weights=entry.get("weights", True))
        ]
    raise_all(found, "sglang_models_catalog")
    return {name: model_identity.manifest(Path(entry["path"]), CACHE) for name, entry in here.items()}
