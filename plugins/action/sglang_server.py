"""Adds to sglang_server what only the controller knows: the profile's settings, GPU table, the arm that a name means; shows progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, patch_sets
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        arms = arguments.pop("arms", None) or {}
        if isinstance(arguments.get("arm"), str):
            arguments["arm"] = chosen_arm(arguments["arm"], arms)
        if isinstance(arguments.get("profile"), str):
            arguments.setdefault("gpu_table", self._gpu_table(arguments["profile"]))
            arguments["profile"] = {"name": arguments["profile"], **self._profile(arguments["profile"])}
        if not is_calibrated(arguments.get("arm")):  # nothing of it is needed there
            arguments.pop("calibration", None)
            arguments.pop("host_info", None)
        if arguments.get("patch_sets") is not None:
            arguments["patch_sets"] = [active(one) for one in patch_sets.load(arguments["patch_sets"])]
        return arguments

    def _profile(self, name: str) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.words import listing

        path = PROJECT / "profiles" / name / "server.yml"
        if not path.is_file():
            known = sorted(found.parent.name for found in (PROJECT / "profiles").glob("*/server.yml"))
            raise AerieError(f"aerie_profile: no profile {name!r} ({path} is missing): choose {listing(known, last='or')}")
        settings: dict[str, Any] = self._loader.load_from_file(str(path))
        return settings

    def _gpu_table(self, profile: str) -> dict[str, Any]:
        path = PROJECT / "profiles" / profile / "gpu_settings.yml"
        table: dict[str, Any] = self._loader.load_from_file(str(path)) if path.is_file() else {}
        return table


def active(patch_set: Any) -> dict[str, Any]:
    """Return what a host needs to tell whether a patch set is active."""
    since = patch_set.upstream_since
    return {"name": patch_set.name, "sha256": patch_set.sha256, "upstream_since": since.text if since else None}


def is_calibrated(arm: Any) -> bool:
    """Say whether an arm takes its thresholds from a calibration."""
    dynamic = arm.get("dynamic") if isinstance(arm, dict) else None
    return isinstance(dynamic, dict) and dynamic.get("threshold") == "auto"


def chosen_arm(name: str, arms: dict[str, Any]) -> dict[str, Any]:
    """Return arm ``name`` with its name in it; raise when there is none."""
    from ansible.module_utils.aerie.errors import AerieError
    from ansible.module_utils.aerie.words import listing, near

    if name not in arms:
        raise AerieError(f"arm {name!r} is not in sglang_server_arms{near(name, arms)}; it has {listing(arms)}")
    return {**(arms[name] or {}), "name": name}
