# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Chooses the arm, starts its profile on the host, shows how it goes and brings its files to the controller."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import aerie_controller  # noqa: F401  makes ansible.module_utils.aerie importable
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    TRANSFERS_FILES = True

    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.words import listing, near

        arms = arguments.pop("arms", None) or {}
        name = arguments.get("arm")
        if isinstance(name, str):
            if name not in arms:
                raise AerieError(f"sglang_profile_arms: {name!r} is not in sglang_server_arms{near(name, arms)}; it has {listing(arms)}")
            arguments["arm"] = {**(arms[name] or {}), "name": name}
        return arguments

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import collection
        from ansible.module_utils.aerie.profiling import profile_levels

        result = super().run(tmp, task_vars)
        dest = self._task.args.get("dest")
        if result.get("failed") or not dest or "files" not in result:
            return result
        try:
            lacking = collection.missing(result["files"], Path(dest))
            if lacking:
                # All files of an arm are of one profile of it.
                profile_levels.set_aside(Path(dest, *Path(result["files"][0]["place"]).parts[:4]))
                lacking = result["files"]
                self._fetch(lacking, Path(dest), task_vars or {})
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        return result | {"fetched": [entry["place"] for entry in lacking]}

    def _fetch(self, lacking: list[dict[str, Any]], dest: Path, task_vars: dict[str, Any]) -> None:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import collection

        shell = self._connection._shell
        remote = shell.join_path(shell.tmpdir or self._make_tmp_path(), "profile.tar.gz")
        arguments = {name: self._task.args[name] for name in ("root", "instance")}
        arguments |= {"state": "off", "archive": remote, "wanted": [entry["path"] for entry in lacking]}
        packed = self._execute_module(module_args=arguments, task_vars=task_vars)
        if packed.get("failed"):
            raise AerieError(f"the host could not pack its profile: {packed.get('msg')}")
        try:
            with tempfile.TemporaryDirectory() as scratch:
                local = Path(scratch) / "profile.tar.gz"
                self._connection.fetch_file(remote, str(local))
                collection.unpack(local, lacking, dest)
        finally:
            self._remove_tmp_path(shell.tmpdir, force=True)
