"""The sources of one real wheel, as contract tests look at them."""

from __future__ import annotations

import ast
import zipfile

import wheels
from ansible.module_utils.aerie.specifiers import Version

import adopt_version

Definition = ast.ClassDef | ast.FunctionDef


class Sources:
    def __init__(self, package: str, version: str) -> None:
        self.version = Version.parse(version)
        self.wheel = wheels.wheel(package, version)
        self.release = adopt_version.Release(version, self.wheel)

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release.archive.close()

    def text(self, path: str) -> str:
        found = self.release.read(path)
        assert found is not None, f"{path} is gone"
        return found.decode()

    def find(self, path: str, *names: str) -> Definition:
        node: ast.AST = ast.parse(self.text(path))
        for name in names:
            found = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name]
            assert len(found) == 1, f"{'.'.join(names)} in {path}"
            node = found[0]
        assert isinstance(node, ast.ClassDef | ast.FunctionDef)
        return node

    def parameters(self, path: str, *names: str) -> list[str]:
        node = self.find(path, *names)
        assert isinstance(node, ast.FunctionDef)
        return [one.arg for one in [*node.args.posonlyargs, *node.args.args]]

    def unparsed(self, path: str, *names: str) -> str:
        """Return the source of a function or class, without its comments and line ends."""
        return ast.unparse(self.find(path, *names))

    def metadata(self) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
            return archive.read(name).decode()
