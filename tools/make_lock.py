#!/usr/bin/env python3
"""Makes the files of locks/ again: hashed requirements that an environment is installed from.

usage: tools/make_lock.py [--upgrade] [NAME...]      such as: tools/make_lock.py cpu-0.5.23

Needs uv. Without --upgrade the versions that a lock already has are kept wherever they still fit. Host names of package
indexes are not written: a host asks the index that it is configured for, and the hashes say whether it got the same files.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[1]
LOCKS = PROJECT / "locks"


@dataclass(frozen=True)
class Lock:
    """How one lock is made: for which Python, with what is declared by the packages or exactly what the .in file lists."""

    name: str
    python: str
    options: tuple[str, ...]
    without: tuple[str, ...] = ()


MADE = (
    Lock("cpu-0.5.23", "3.11", ("--no-deps",)),
    Lock("cuda-0.5.15.post1", "3.12", ("--python-platform", "x86_64-manylinux_2_39"), without=("sglang",)),
    Lock("supervisor", "3.11", ("--no-deps",)),
    Lock("hub", "3.11", ("--no-deps",)),
)


def tidy(text: str, lock: Lock) -> str:
    """Return uv's output as we keep it: our header, requirements and hashes only, without ``lock.without``."""
    blocks = re.split(
        r"\n(?=[A-Za-z0-9])", "\n" + "\n".join(line for line in text.splitlines() if line.startswith(("    --hash=", *_NAME)))
    )
    kept = [block.strip("\n").removesuffix(" \\") for block in blocks if block.strip() and block.strip().split("==")[0] not in lock.without]
    header = f"# Made by tools/make_lock.py from {lock.name}.in for Python {lock.python}; docs/reference/versions.md tells the format.\n"
    return header + "\n".join(kept) + "\n"


_NAME = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")


def make(lock: Lock, uv: str, upgrade: bool) -> bool:
    """Make one lock; say whether it differs from what was there."""
    path = LOCKS / f"{lock.name}.txt"
    before = path.read_text() if path.exists() else ""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        if before:
            output.write_text(before)  # uv keeps the versions that it finds here
        argv = [
            uv,
            "pip",
            "compile",
            "--quiet",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
            "--no-emit-index-url",
            "--no-emit-find-links",
        ]
        argv += [
            "--python-version",
            lock.python,
            *lock.options,
            *(["--upgrade"] if upgrade else []),
            "-o",
            str(output),
            str(LOCKS / f"{lock.name}.in"),
        ]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        after = tidy(output.read_text(), lock)
    path.write_text(after)
    return after != before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("names", nargs="*", metavar="NAME", help="locks to make, all by default")
    arguments = parser.parse_args()
    known = {lock.name: lock for lock in MADE}
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"no lock is called {', '.join(unknown)}: there are {', '.join(known)}")
    beside = Path(sys.executable).parent / "uv"
    uv = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if uv is None:
        sys.exit("tools/make_lock.py needs uv: install it into the development environment")
    for name in arguments.names or known:
        print(f"locks/{name}.txt: {'changed' if make(known[name], uv, arguments.upgrade) else 'unchanged'}")


if __name__ == "__main__":
    main()
