"""Real wheels to test against, fetched once into a directory outside version control."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError

import adopt_version

CACHE = Path(os.environ.get("AERIE_CACHE") or Path(__file__).parents[2] / ".cache") / "wheels"


def wheel(package: str, version: str) -> Path:
    """Return the wheel of ``package``, downloading it with pip's own settings where it isn't there; fail the test where that can't be."""
    try:
        return adopt_version.fetch(package, version, CACHE)
    except AerieError as error:
        pytest.fail(str(error))


def unpack(package: str, version: str, directory: Path) -> Path:
    """Unpack the wheel's Python sources and dist-info into ``directory``, a site-packages; return that."""
    with zipfile.ZipFile(wheel(package, version)) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name])
    return directory
