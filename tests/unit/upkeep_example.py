"""A root with releases of a small SGLang as Aerie makes them, patched by the engine itself; made without pip, in milliseconds."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.patching import patch_plan, patch_transaction
from ansible.module_utils.aerie.patching.patch_set import PatchSet
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.paths import HostPaths

sys.path.insert(0, str(Path(__file__).parent))
import fake_wheels

VERSION = "1.2.3"
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
SOURCES = {
    "sglang/__init__.py": f"__version__ = '{VERSION}'\n",
    "sglang/worker.py": "def forward(batch):\n    return batch\n",
    "sglang/other.py": "value = 1\n",
    "sglang/srt/plugins/__init__.py": "",
}
WORKER, ADDED, OTHER = "sglang/worker.py", "sglang/mark.py", "sglang/other.py"
OWNER = {"run": "1.2", "user": "ops", "controller": "deploy01"}


def patch_set(name: str = "marks", *, upstream_since: str | None = None) -> PatchSet:
    hook = {
        "name": "forward begins",
        "file": WORKER,
        "at": [{"function": "forward"}],
        "where": "start",
        "insert": "mark.hit()",
        "import": "from sglang import mark",
    }
    definition: dict[str, Any] = {"name": name, "summary": "s", "why": "w", "versions": ">=1", "hooks": [hook]}
    if upstream_since:
        definition["upstream_since"] = upstream_since
    return PatchSet.of({"name": name, "definition": definition, "overlay": {ADDED: "def hit():\n    pass\n"}})


MARKS = patch_set()


@dataclass(frozen=True)
class Made:
    """A release that was made: its id, directory and site-packages."""

    id: str
    path: Path
    site_packages: Path

    def tree(self) -> SourceTree:
        return SourceTree.open(self.site_packages, "sglang")


@dataclass(frozen=True)
class Root:
    """A host's root below a directory of the test."""

    paths: HostPaths

    def release(
        self,
        digest: str,
        *sets: PatchSet,
        verified_at: str | None = "2026-01-01T00:00:00Z",
        environment: str = "cpu-0123456789ab",
        asked: tuple[PatchSet, ...] | None = None,
    ) -> Made:
        """Make a release whose id ends in ``digest``, apply ``sets``, and let its ``release.json`` name these, or those ``asked`` for."""
        name = f"{VERSION}-{digest}"
        path = self.paths.release(name)
        site_packages = path / "lib" / f"python{MINOR}" / "site-packages"
        for file, text in SOURCES.items():
            (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
            (site_packages / file).write_text(text)
        info = site_packages / f"sglang-{VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n")
        (info / "RECORD").write_text("".join(f"{file},{fake_wheels.record_hash(text)},{len(text)}\n" for file, text in SOURCES.items()))
        (path / "bin").mkdir()
        (path / "bin/python").symlink_to(sys.executable)
        (path / "pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).parent}\n")  # type: ignore[attr-defined]
        made = Made(name, path, site_packages)
        self.patch(made, *sets)
        value = {
            "id": name,
            "sglang_version": VERSION,
            "profile": "cpu",
            "python_version": f"{MINOR}.0",
            "environment": {"id": environment, "path": str(self.paths.environments / environment)},
            "package": {"path": str(self.paths.packages / f"sglang-{VERSION}-01234567"), "sha256": "0" * 64},
            "patch_sets": [{"name": one.name, "sha256": one.sha256} for one in (sets if asked is None else asked)],
            "verified": verified_at is not None,
            "verified_at": verified_at,
        }
        (path / "release.json").write_text(json.dumps(value))
        return made

    def patch(self, made: Made, *sets: PatchSet) -> None:
        tree = made.tree()
        store = PatchStore.beside(tree, self.paths.originals)
        patch_transaction.apply(tree, store, patch_plan.plan(tree, store, sets), OWNER)

    def cut_off(self, made: Made, *sets: PatchSet) -> None:
        """Let a run that patches ``made`` be killed after its first file."""
        pid = os.fork()
        if not pid:
            tree = made.tree()
            store = PatchStore.beside(tree, self.paths.originals)
            patch_transaction.apply(
                tree,
                store,
                patch_plan.plan(tree, store, sets),
                OWNER,
                step=lambda name: os._exit(0) if name.startswith("replaced") else None,
            )
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0

    def store(self, made: Made) -> PatchStore:
        return PatchStore.beside(made.tree(), self.paths.originals)

    def value(self, made: Made) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((made.path / "release.json").read_text())
        return value

    def link(self, name: str, made: Made) -> None:
        link = self.paths.root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path(*[".."] * (len(Path(name).parts) - 1)) / "releases" / made.id)

    def environment(self, name: str, *, whole: bool = True) -> Path:
        path = self.paths.environments / name
        (path / "bin").mkdir(parents=True)
        (path / "bin/python").symlink_to(sys.executable)
        if whole:
            (path / ".aerie-environment.json").write_text("{}")
        return path

    def package(self, name: str) -> Path:
        path = self.paths.packages / name
        path.mkdir(parents=True)
        (path / ".aerie-package.json").write_text("{}")
        return path


def make(directory: Path) -> Root:
    return Root(HostPaths(directory / "host"))
