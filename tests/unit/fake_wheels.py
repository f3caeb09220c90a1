"""Wheels that are made on the spot: small packages under real names, so that pip, venv and imports are the real ones."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

SGLANG = {
    "sglang/__init__.py": "__version__ = '1.2.3'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/big.so": "x" * (1 << 20),
    "sglang/srt/big.py": "#" * (1 << 20),
    "sglang/srt/server_args.py": (
        "import argparse\n\n\nclass DeprecatedStoreTrueAction(argparse._StoreTrueAction):\n    pass\n\n\n"
        "class ServerArgs:\n    @staticmethod\n    def add_cli_args(parser):\n"
        "        parser.add_argument('--tp-size', '--tensor-parallel-size', type=int, default=1, help='GPUs')\n"
        "        parser.add_argument('--backend', choices={'b', 'a', 'c'}, default=object)\n"
        "        parser.add_argument('--old', action=DeprecatedStoreTrueAction)\n"
        "        parser.add_argument('--older', help='(Deprecated: use --old)')\n"
        "        parser.add_argument('--values', nargs='+', type=float, default=(1.0, 2.0))\n"
    ),
    "sglang/srt/speculative/__init__.py": "",
    "sglang/srt/speculative/eagle_worker_v2.py": "class EAGLEWorkerV2:\n    pass\n",
}
TORCH_CPU = {
    "torch/__init__.py": "from torch.version import __version__, cuda\n",
    "torch/version.py": "from typing import Optional\n__version__ = '1.9.1+cpu'\ncuda: Optional[str] = None\n",
}
TORCH_CUDA = TORCH_CPU | {"torch/version.py": "__version__ = '1.9.1+cu130'\ncuda = '13.0'\n"}
SUPERVISOR = {
    "supervisor/__init__.py": "",
    "supervisor/supervisord.py": "import sys\nprint('4.3.0' if '--version' in sys.argv else '')\n",
}
LIBRARY = {"small_library/__init__.py": "value = 1\n"}


def make(directory: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a wheel of pure Python and return its path."""
    info = f"{name}-{version}.dist-info"
    contents = dict(files) | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{record_hash(text)},{len(text.encode())}\n" for path, text in contents.items())
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return wheel


def record_hash(text: str) -> str:
    """Return a hash as RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def sha256(path: Path) -> str:
    """Return the hash of a wheel as a lock has it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock(*wheels: Path) -> str:
    """Return a lock of these wheels."""
    entries = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        entries.append(f"{name}=={version} \\\n    --hash=sha256:{sha256(wheel)}\n")
    return "".join(entries)
