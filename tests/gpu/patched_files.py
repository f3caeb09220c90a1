#!/usr/bin/env python3
"""Writes the files that patch sets change in, or add to, a release of SGLang, to lay over one elsewhere.

    patched_files.py VERSION OUT SET...

The release's wheel comes from .cache/wheels, or from pip. For a GPU machine that has SGLang without
Aerie: copy OUT over its site-packages.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / "tools"), str(PROJECT / "plugins")]
from aerie_controller import patch_sets  # noqa: E402  makes the cores importable

from ansible.module_utils.aerie.patching import patch_plan  # noqa: E402  isort: skip
from ansible.module_utils.aerie.patching.patch_store import PatchStore  # noqa: E402
from ansible.module_utils.aerie.patching.source_tree import SourceTree  # noqa: E402

import adopt_version  # noqa: E402


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    version, out, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch, "site")
        with zipfile.ZipFile(adopt_version.fetch("sglang", version)) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if name.endswith(".py") or ".dist-info/" in name])
        tree = SourceTree.open(site, "sglang")
        plan = patch_plan.plan(tree, PatchStore.beside(tree, Path(scratch, "store")), patch_sets.load(names))
        for file in plan.files:
            if file.wanted is not None:
                path = Path(out, file.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.wanted)
                print(file.path)


if __name__ == "__main__":
    main()
