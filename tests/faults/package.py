"""A small installed package that is patched over three directories, and what must hold of it after whatever happened."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ansible.module_utils.aerie.patching import patch_plan, patch_transaction
from ansible.module_utils.aerie.patching.patch_set import PatchSet
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree

FILES = {
    "pkg/__init__.py": b"from pkg import a, low\n",
    "pkg/a.py": b'"""A."""\nimport os\n\n\ndef f(batch):\n    return os\n',
    "pkg/low/__init__.py": b"from pkg.low import b, c\n",
    "pkg/low/b.py": b"def h(x):\r\n    return x",
    "pkg/low/c.py": b"def k():\n    return 1\n",
    "pkg/low/data.bin": bytes(range(256)),
}
MODES = {"pkg/low/b.py": 0o640, "pkg/low/data.bin": 0o755}


def patch_set(name: str, hooked: dict[str, str], overlay: dict[str, str], marker: str) -> PatchSet:
    """Hooks at the start of the functions ``hooked`` (file: function), which call the module ``marker`` of the overlay."""
    module = marker.rpartition(".")[2]
    hooks = [
        {"name": f"in {file}", "file": file, "at": [{"function": function}], "where": "start", "insert": f"{module}.mark('{name}')"}
        for file, function in hooked.items()
    ]
    definition = {"name": name, "summary": "s", "why": "w", "versions": ">=1", "import": f"import {marker} as {module}", "hooks": hooks}
    return PatchSet.of({"name": name, "definition": definition, "overlay": overlay})


def marks(text: str) -> str:
    return f'"""{text}"""\n\n\ndef mark(name):\n    pass\n'


WIDE = patch_set(
    "wide",
    {"pkg/a.py": "f", "pkg/low/b.py": "h", "pkg/low/c.py": "k"},
    {"pkg/low/marks_1.py": marks("wide"), "pkg/new/deep/marks_2.py": "", "pkg/zz_last.py": ""},
    "pkg.low.marks_1",
)
NARROW = patch_set("narrow", {"pkg/low/b.py": "h"}, {"pkg/low/zz_marks.py": marks("narrow")}, "pkg.low.zz_marks")
ANEW = patch_set("wide", {"pkg/a.py": "f", "pkg/low/c.py": "k"}, {"pkg/low/marks_1.py": marks("anew" * 1500)}, "pkg.low.marks_1")

WAYS = {"apply": ((), (WIDE,)), "remove": ((WIDE,), ()), "apply another": ((WIDE, NARROW), (ANEW,))}

Content = dict[str, tuple[bytes, int]]


class Site:
    """A site-packages with the package and its dist-info, and a store, both below ``root`` or apart."""

    def __init__(self, root: Path, store: Path | None = None) -> None:
        self.path = root / "site-packages"
        self.store_path = store or root / "store"
        for name, data in FILES.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(data)
            (self.path / name).chmod(MODES.get(name, 0o644))
        info = self.path / "pkg-1.5.dist-info"
        info.mkdir()
        rows = [
            f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
            for name, data in FILES.items()
        ]
        (info / "RECORD").write_text("\n".join(rows) + "\n")

    @property
    def tree(self) -> SourceTree:
        return SourceTree.open(self.path, "pkg")

    @property
    def store(self) -> PatchStore:
        return PatchStore.beside(self.tree, self.store_path)

    def plan(self, *sets: PatchSet) -> patch_plan.Plan:
        return patch_plan.plan(self.tree, self.store, sets)

    def apply(
        self, *sets: PatchSet, verify: Callable[[], None] | None = None, step: Callable[[str], None] = lambda name: None
    ) -> patch_plan.Plan:
        """What the module does: lock, plan, apply; the usual verifier compiles everything."""
        store = self.store
        with store.locked():
            planned = self.plan(*sets)
            patch_transaction.apply(self.tree, store, planned, {"user": "ops"}, verify or self.compile, step)
        return planned

    def compile(self) -> None:
        for path in sorted((self.path / "pkg").rglob("*.py")):
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)

    @property
    def content(self) -> Content:
        """All that an importer can see: each file's bytes and mode. Hidden names are no modules."""
        return visible(self.path / "pkg")

    @property
    def names(self) -> set[str]:
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*")}

    def copy_to(self, place: Path) -> None:
        for path in (self.path, self.store_path):
            if path.exists():
                _copy(path, place / path.name)

    def restore_from(self, place: Path) -> None:
        for path in (self.path, self.store_path):
            shutil.rmtree(path, ignore_errors=True)
            if (place / path.name).exists():
                _copy(place / path.name, path)

    def assert_clean(self, *sets: PatchSet) -> None:
        """Exactly ``sets`` are applied, and nothing is left of any run."""
        content, names = ideal(sets)
        assert self.content == content
        assert self.names == names
        assert self.store.journal() is None
        leftovers = [path for path in self.store_path.rglob("*") if path.is_file() and path.parent.name in {"unfinished", "journals"}]
        assert leftovers == []
        assert [one["name"] for one in patch_plan.applied(self.store)] == [one.name for one in sets]

    def assert_goes_on(self, *sets: PatchSet) -> None:
        """The next run ends in ``sets``, the one after changes nothing, and the way back leads to the originals."""
        self.apply(*sets)
        self.assert_clean(*sets)
        assert not self.apply(*sets).changed
        self.apply()
        self.assert_clean()


def _copy(source: Path, target: Path) -> None:
    """Copy a directory; what is one file under two names stays so."""
    made: dict[int, str] = {}

    def copy(one: str, other: str) -> None:
        inode = Path(one).stat().st_ino
        if inode in made:
            os.link(made[inode], other)
        else:
            shutil.copy2(one, other)
            made[inode] = other

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def visible(package: Path) -> Content:
    found: Content = {}
    for top, directories, files in os.walk(package):
        directories[:] = [one for one in directories if not one.startswith(".") and one != "__pycache__"]
        for name in files:
            if not name.startswith("."):
                path = Path(top, name)
                found[str(path.relative_to(package))] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
    return found


@functools.cache
def _ideal(sets: tuple[str, ...]) -> tuple[Content, set[str]]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        site = Site(Path(directory))
        if sets:
            site.apply(*(_known[one] for one in sets))
        return site.content, site.names


_known: dict[str, PatchSet] = {}


def ideal(sets: tuple[PatchSet, ...]) -> tuple[Content, set[str]]:
    """What an importer sees of a package with ``sets``, made in one go elsewhere, and all names below its site-packages."""
    _known.update({one.sha256: one for one in sets})
    return _ideal(tuple(one.sha256 for one in sets))


_imported: dict[str, str] = {}


def import_error(site: Site) -> str:
    """Import the whole package in a Python of its own; return the end of what went wrong. The same content is imported once."""
    key = hashlib.sha256(repr(sorted(site.content.items())).encode()).hexdigest()
    if key not in _imported:
        command = [sys.executable, "-Bc", "import pkg; pkg.a.f(1); pkg.low.b.h(1); pkg.low.c.k()"]
        done = subprocess.run(command, cwd=site.path, capture_output=True, text=True, check=False)
        _imported[key] = done.stderr.strip() if done.returncode else ""
    return _imported[key]
