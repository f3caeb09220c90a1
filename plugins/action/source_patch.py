# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reads patch sets on the controller and ships them to the module of the same name, in one call; brings originals back if asked to."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import patch_sets  # makes ansible.module_utils.aerie importable


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        names = arguments.get("sets")
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        if "definitions" in arguments:
            return result | {"failed": True, "msg": "definitions is filled in from the patches directory: give sets, their names"}
        try:
            if names is not None:
                arguments["definitions"] = [one.shipped for one in patch_sets.load(names)]
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        done: dict[str, Any] = result | self._execute_module(module_args=arguments, task_vars=task_vars or {})
        copies = arguments.get("originals_on_controller")
        if not copies or done.get("failed"):
            return done
        try:
            return done | {"fetched": self._fetch(done, Path(self._loader.path_dwim(copies)), task_vars or {})}
        except (AerieError, OSError) as error:
            reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            return done | {"failed": True, "msg": f"the host was patched, but its originals are not all on the controller: {reason}"}

    def _fetch(self, done: dict[str, Any], copies: Path, task_vars: dict[str, Any]) -> int:
        """Bring what the applied sets need and ``copies`` lacks; return how many originals that were."""
        from ansible.module_utils.aerie.files import write_atomic
        from ansible.module_utils.aerie.patching import patch_store

        kept = done.get("kept")
        if kept is None or self._task.check_mode:
            return 0
        store = Path(kept["manifest"]).parents[1]
        lacking = [one for one in kept["originals"] if not _has(patch_store.object_path(copies, one), one)]
        for sha256 in lacking:
            data = self._read(patch_store.object_path(store, sha256), sha256, task_vars)
            write_atomic(patch_store.object_path(copies, sha256), data, 0o444)
        host = re.sub(r"[^\w.:-]", "_", str(task_vars.get("inventory_hostname", "host")))
        manifest = copies / patch_store.MANIFESTS / host / Path(kept["manifest"]).name
        if not _has(manifest, kept["sha256"]):
            write_atomic(manifest, self._read(Path(kept["manifest"]), kept["sha256"], task_vars))
        return len(lacking)

    def _read(self, path: Path, sha256: str, task_vars: dict[str, Any]) -> bytes:
        """Return the content of a file on the host, read as the user that the task becomes, and checked."""
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.files import sha256_bytes

        read = self._execute_module(module_name="ansible.legacy.slurp", module_args={"src": str(path)}, task_vars=task_vars)
        if read.get("failed"):
            raise AerieError(f"{path} can't be read on the host: {read.get('msg')}")
        data = base64.b64decode(read["content"])
        if sha256_bytes(data) != sha256:
            raise AerieError(f"{path} arrived with another hash than {sha256}: it is damaged, or another run is at work: run this again")
        return data


def _has(path: Path, sha256: str) -> bool:
    from ansible.module_utils.aerie.files import sha256_file

    return path.is_file() and sha256_file(path) == sha256
