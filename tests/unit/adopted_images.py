"""Images as hosts have them: a Python with torch and SGLang, as a wheel or editable, made of small packages; and a checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fake_wheels

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "init.defaultBranch=main")

FINDER = """
import sys
from importlib.machinery import PathFinder

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{source!r}]) if name == "sglang" else None

def install():
    sys.meta_path.insert(0, Finder)
"""
"""An editable installation's, as build tools write it; this one even comes first."""


def image(path: Path, torch: Mapping[str, str] = fake_wheels.TORCH_CPU, version: str = "1.9.1") -> Path:
    """Make a Python with torch and a library, as a container image has it; return its site-packages."""
    venv.create(path, symlinks=True, with_pip=False)
    install(path, "torch", version, torch)
    return install(path, "small_library", "1.0", fake_wheels.LIBRARY)


def install(path: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """Unpack a wheel into a Python, as an installer does; return its site-packages."""
    site_packages = path / "lib" / f"python{MINOR}" / "site-packages"
    with zipfile.ZipFile(fake_wheels.make(path / "wheels", name, version, dict(files))) as wheel:
        wheel.extractall(site_packages)
    return site_packages


def checkout(path: Path) -> Path:
    """Make a git checkout with SGLang committed below ``python``; return that directory."""
    for name, text in fake_wheels.SGLANG.items():
        file = path / "python" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (path / ".gitignore").write_text("__pycache__/\n")
    commit(path)
    return path / "python"


def commit(path: Path) -> None:
    """Commit everything in a checkout."""
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "a commit")):
        subprocess.run([*GIT, *arguments], cwd=path, check=True, capture_output=True)


def install_editable(path: Path, source: Path, *, finder: bool) -> None:
    """Install the checkout's SGLang editable, by a finder or by a line with its path."""
    site_packages = path / "lib" / f"python{MINOR}" / "site-packages"
    info = site_packages / "sglang-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 1.2.3\n")
    (info / "RECORD").write_text("sglang-1.2.3.dist-info/METADATA,,\n")
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))
    line = str(source)
    if finder:
        (site_packages / "__editable___sglang_finder.py").write_text(FINDER.format(source=str(source)))
        line = "import __editable___sglang_finder; __editable___sglang_finder.install()"
    (site_packages / "__editable__.sglang-1.2.3.pth").write_text(f"{line}\n")
