"""The one reader of ``release.json``: what a release says that it is. Standard library only: this runs on hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.untrusted import FLAG, MAPPING, TEXT, WORD, ListOf, Maybe

RELEASE = "release.json"
SHAPE = {
    "id": WORD,
    "sglang_version?": TEXT,
    "profile?": TEXT,
    "environment?": MAPPING,
    "package?": MAPPING,
    "adopted?": Maybe(TEXT),
    "tree?": Maybe(TEXT),
    "commit?": Maybe(TEXT),
    "patch_sets?": Maybe(ListOf({"name": WORD, "sha256?": Maybe(TEXT)})),
    "python_version?": TEXT,
    "torch_version?": Maybe(TEXT),
    "verified?": FLAG,
    "verified_at?": Maybe(TEXT),
    "before?": Maybe(MAPPING),
}


def read(directory: Path) -> dict[str, Any]:
    """Return the ``release.json`` of the release in ``directory``, or of the one that a link leads to.

    Raises FileNotFoundError and other OSError as they are, and Malformed (a ValueError) where it is no release's, or another's.
    """
    path = directory / RELEASE
    value: dict[str, Any] = untrusted.read(path)
    try:
        untrusted.require(value, SHAPE)
        if value["id"] != (name := directory.resolve().name):
            raise untrusted.Malformed(f"it says that it is {untrusted.shown(value['id'])}, and its directory is {name}")
    except untrusted.Malformed as error:
        raise untrusted.Malformed(f"{path}: {error}") from None
    return value
