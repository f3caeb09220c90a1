"""Real wheels to test against, fetched once into a directory outside version control."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("AERIE_CACHE") or Path(__file__).parents[2] / ".cache") / "wheels"
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "any")


def wheel(package: str, version: str) -> Path:
    """Return the wheel of ``package``, downloading it with pip's own settings where it isn't there; fail the test where that can't be."""
    found = sorted(CACHE.glob(f"{package}-{version}-*.whl"))
    if found:
        return found[0]
    CACHE.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", *platforms, "--dest", str(CACHE)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"], capture_output=True, text=True, check=False
    )
    found = sorted(CACHE.glob(f"{package}-{version}-*.whl"))
    if not found:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        pytest.fail(f"{package} {version} can't be had: {reason[0]}")
    return found[0]


def unpack(package: str, version: str, directory: Path) -> Path:
    """Unpack the wheel's Python sources and dist-info into ``directory``, a site-packages; return that."""
    with zipfile.ZipFile(wheel(package, version)) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name])
    return directory
