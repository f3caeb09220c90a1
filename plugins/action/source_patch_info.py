"""Runs the module, adds which originals the controller has a copy of, and shows it all as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import terminal  # makes ansible.module_utils.aerie importable
from aerie_controller.terminal_reports import upkeep


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.parsing.convert_bool import boolean

        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        copies = arguments.pop("copies", None)
        show = boolean(arguments.pop("show", False))
        found = result | self._execute_module(module_args=arguments, task_vars=task_vars)
        if found.get("failed"):
            return found
        if copies:
            note_copies(found["releases"], Path(self._loader.path_dwim(str(copies))))
        if show:
            host = str((task_vars or {}).get("inventory_hostname", "?"))
            report = upkeep.status(host, found["releases"])
            found["table"] = terminal.render(report, terminal.DEFAULT_WIDTH)
            terminal.show([terminal.gap(), *report])
        return found


def note_copies(releases: list[dict[str, Any]], copies: Path) -> None:
    """Add to each original that is kept on the host whether ``copies``, laid out as a store, has it too."""
    from ansible.module_utils.aerie.patching.patch_store import object_path

    for release in releases:
        for file in release["files"]:
            original = file["original"]
            if original["sha256"]:
                original["copied"] = object_path(copies, original["sha256"]).is_file()
