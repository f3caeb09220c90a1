"""Patch sets as they lie in the project: ``patches/<name>/patchset.yml`` and ``patches/<name>/overlay/``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.patching.patch_set import PatchSet
from ansible.module_utils.aerie.words import listing, near

from aerie_controller import PROJECT

PATCHES = PROJECT / "patches"


def available(directory: Path = PATCHES) -> list[str]:
    """Return the names of the patch sets in ``directory``."""
    return sorted(path.parent.name for path in directory.glob("*/patchset.yml"))


def load(names: Iterable[str], directory: Path = PATCHES) -> list[PatchSet]:
    """Return the named patch sets, in order, checked; raise one error with everything that is wrong in any of them.

    ``.shipped`` of each is what travels to a host, ``.sha256`` what a release is named after.
    """
    problems, sets = [], []
    for name in names:
        try:
            sets.append(PatchSet.of(_read(name, directory)))
        except AerieError as error:
            problems.append(str(error))
    raise_all(problems, "patch sets")
    return sets


def _read(name: str, directory: Path) -> dict[str, Any]:
    path = directory / name / "patchset.yml"
    try:
        definition = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        known = available(directory)
        raise AerieError(f"there is no patch set {name!r} in {directory}{near(name, known) or f': there is {listing(known)}'}") from None
    except yaml.YAMLError as error:
        raise AerieError(f"{path} is no valid YAML: {error}") from error
    overlay_root = path.parent / "overlay"
    overlay = {}
    for file in sorted(overlay_root.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            try:
                overlay[file.relative_to(overlay_root).as_posix()] = file.read_bytes().decode()
            except UnicodeDecodeError:
                raise AerieError(f"{file} is no UTF-8 text: overlays are sources, not binaries") from None
    return {"name": name, "definition": definition, "overlay": overlay}
