"""A Python with Triton and a CPU build of torch, in which kernels are interpreted and compiled without a GPU."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
REQUIREMENTS = PROJECT / "requirements/kernels.txt"
CACHE = Path(os.environ.get("AERIE_CACHE") or PROJECT / ".cache") / "kernels"


@pytest.fixture(scope="session")
def kernel_python() -> Path:
    """Return that Python; its environment is made once, and anew when its requirements change."""
    CACHE.mkdir(parents=True, exist_ok=True)
    environment = CACHE / hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
            pip = [environment / "bin/python", "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS]
            done = subprocess.run(pip, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                pytest.fail(f"tests/kernels has no Python with Triton: {done.stderr[-1500:]}")
            (environment / "complete").touch()
    return environment / "bin/python"
