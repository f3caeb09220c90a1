"""What a patch set requires of other installed packages, looked up in their sources' syntax trees. Standard library only.

Nothing is imported: a package may need a GPU, or minutes, to be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.patching.patch_set import PatchSet, Requirement
from ansible.module_utils.aerie.words import listing, near

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check(sets: Sequence[PatchSet], search_path: Sequence[Path]) -> None:
    """Raise one error with every requirement of ``sets`` that the packages in ``search_path`` don't fulfil."""
    found = (f"{one.name}: {problem}" for one in sets for need in one.requires if (problem := unfulfilled(need, search_path)))
    raise_all(list(found), "patch sets")


def unfulfilled(need: Requirement, search_path: Sequence[Path]) -> str | None:
    """Say in what way ``need`` is not fulfilled, or None."""
    places = [place for place in search_path if (place / need.file).is_file()]
    if not places:
        where = listing(str(place) for place in search_path)
        return f"needs {need.package}, to see what it supports, but {need.file} is not in {where}: {need.why}: {need.cure}"
    path = places[0] / need.file
    package = f"{need.package}{_version(places[0], need.package)} in {places[0]}"
    try:
        tree = ast.parse(path.read_bytes())
        node = _only(list(_found(tree, need)), tree, need)
        values = ast.literal_eval(node)
    except (SyntaxError, ValueError, TypeError, AerieError) as error:
        return f"{package}: {need.place} in {need.file} can't be told ({error}), so that it isn't known whether it has {need.contains!r}"
    if not isinstance(values, list | tuple | set | dict):
        return f"{package}: {need.place} in {need.file} is {values!r}, and no list in which {need.contains!r} could be"
    if need.contains in values:
        return None
    return f"{package} has {listing(values)} as {need.place} ({need.file}), not {need.contains!r}: {need.why}: {need.cure}"


def _found(tree: ast.Module, need: Requirement) -> Iterator[ast.expr]:
    """Yield each expression that ``need`` could mean."""
    if need.value is not None:
        yield from _assigned(tree.body, need.value.split("."))
        return
    for node in ast.walk(tree):
        if not isinstance(node, DEFINITIONS) or node.name != need.function:
            continue
        if need.decorator is not None:
            for one in node.decorator_list:
                if isinstance(one, ast.Call) and one.args and ast.unparse(one.func).split(".")[-1] == need.decorator:
                    yield one.args[0]
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                yield from (keyword.value for keyword in call.keywords if keyword.arg == need.argument)


def _assigned(body: Sequence[ast.stmt], names: Sequence[str]) -> Iterator[ast.expr]:
    name, *rest = names
    for statement in body:
        if rest and isinstance(statement, ast.ClassDef) and statement.name == name:
            yield from _assigned(statement.body, rest)
        elif not rest and isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield statement.value


def _only(found: list[ast.expr], tree: ast.Module, need: Requirement) -> ast.expr:
    if len(found) == 1:
        return found[0]
    names = [node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
    hint = near(need.function, names) if need.function and need.function not in names else ""
    lines = f" (lines {listing(node.lineno for node in found)})" if found else ""
    raise AerieError(f"looked for it once, it is there {len(found)} times{lines}{hint}")


def _version(place: Path, package: str) -> str:
    """Return `` 1.2`` for a package with dist-info beside it; its name may go on after the package's, as in flashinfer_python."""
    found = [path.name.removesuffix(".dist-info").partition("-") for path in place.glob(f"{package}*.dist-info")]
    ranked = sorted((name not in (package, f"{package}_python"), name, version) for name, _, version in found)
    return f" {ranked[0][2]}" if ranked else ""
