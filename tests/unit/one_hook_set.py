"""Patch sets of one hook, for tests of the engine."""

from __future__ import annotations

from ansible.module_utils.aerie.patching.patch_set import PatchSet


def patch_set(name: str, mark: str, *, file: str = "pkg/a.py", function: str = "f", overlay: dict[str, str] | None = None) -> PatchSet:
    """Return a set that calls ``mark`` at the start of ``function`` and imports it."""
    hook = {
        "name": f"{name} {file}",
        "file": file,
        "at": [{"function": function}],
        "where": "start",
        "insert": f"{mark}()",
        "import": f"import {mark}",
    }
    definition = {"name": name, "summary": "s", "why": "w", "versions": ">=1", "hooks": [hook]}
    return PatchSet.of({"name": name, "definition": definition, "overlay": overlay or {}})
