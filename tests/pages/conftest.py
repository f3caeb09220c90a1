"""A real browser for the pages that Aerie writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "plugins"), str(TESTS / "unit")]
PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-liberation")
APT = ("apt-get", "-o", "DPkg::Lock::Timeout=600", "-qq")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of Chromium; it and the fonts are installed where that can be done."""
    program = shutil.which("chromium")
    fonts = subprocess.run(["fc-list"], capture_output=True, text=True, check=False).stdout if shutil.which("fc-list") else ""
    if program and "DejaVu Serif" in fonts and "Liberation Serif" in fonts:
        return program
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"pages are looked at in Chromium: as root, apt-get install {' '.join(PACKAGES)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (("update",), ("install", "--yes", "--no-install-recommends", *PACKAGES)):
        subprocess.run([*APT, *words], env=environment, check=True, capture_output=True, text=True)
    program = shutil.which("chromium")
    assert program
    return program
