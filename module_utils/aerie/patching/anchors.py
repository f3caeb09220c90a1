"""Anchors: places in Python sources, found in the syntax tree, and the insertion of lines there. Standard library only.

Only whole lines are inserted; every other byte stays. A place that isn't there, or is there twice, is a problem that names near matches.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ansible.module_utils.aerie.patching.patch_set import Hook, Step
from ansible.module_utils.aerie.words import listing, near

BOM = b"\xef\xbb\xbf"
PLACEHOLDER = re.compile(r"\{(?:param\[(\d+)\]|(target))\}")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
LOOPS = {"for": (ast.For, ast.AsyncFor), "while": (ast.While,)}
LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)


class NoPlace(Exception):
    """The place that a hook means can't be told; the message says what was looked for and what is there."""


@dataclass(frozen=True)
class Insertion:
    """``text`` at byte ``offset`` of the original, for ``hook``; ``line`` is the original's line that it comes before."""

    offset: int
    text: bytes
    hook: str
    line: int


@dataclass(frozen=True)
class Derived:
    """An original with its insertions."""

    data: bytes
    insertions: tuple[Insertion, ...]


@dataclass(frozen=True)
class _Scope:
    body: list[ast.stmt]
    words: str
    documented: bool
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    loop: ast.For | ast.AsyncFor | None = None


@dataclass(frozen=True)
class _Place:
    offset: int
    indent: bytes
    newline: bytes
    after: bool
    line: int
    at_end: bool = False


def derive(original: bytes, hooks: Sequence[Hook], file: str) -> tuple[Derived | None, list[str]]:
    """Return ``original`` with the lines of ``hooks`` in it, or None and every problem that stands in the way."""
    try:
        source = _Source(original)
    except (SyntaxError, ValueError) as error:
        return None, [f"{file}: its original is not Python that this interpreter reads: {error}"]
    problems = []
    placed: list[tuple[_Place, str, str]] = []
    imported: set[str] = set()
    for hook in hooks:
        try:
            place, text = source.place(hook)
            if hook.imports and hook.imports not in imported:
                imported.add(hook.imports)
                placed.append((source.import_place(), hook.imports, hook.name))
            placed.append((place, text, hook.name))
        except NoPlace as problem:
            problems.append(f"{file}: hook {hook.name!r}: {problem}")
    if problems:
        return None, problems
    # Lines after a nested block come before lines after the block around it, and both before lines that belong to what follows.
    ordered = sorted(placed, key=lambda one: (one[0].offset, not one[0].after, -len(one[0].indent) if one[0].after else 0))
    insertions = tuple(Insertion(place.offset, _lines(place, text), name, place.line) for place, text, name in ordered)
    result = splice(original, insertions)
    try:
        check_compiles(result, file)
    except (SyntaxError, ValueError) as error:
        return None, [
            f"{file}: with its hooks it is no valid Python: {error}: check the inserts of {listing(sorted({hook.name for hook in hooks}))}"
        ]
    return Derived(result, insertions), []


def locate(original: bytes, hooks: Sequence[Hook]) -> list[tuple[Hook, int | NoPlace]]:
    """Return for each of ``hooks`` the line of ``original`` that its lines come before, or why there is no telling."""
    source = _Source(original)
    found: list[tuple[Hook, int | NoPlace]] = []
    for hook in hooks:
        try:
            found.append((hook, source.place(hook)[0].line))
        except NoPlace as problem:
            found.append((hook, problem))
    return found


def splice(original: bytes, insertions: Sequence[Insertion]) -> bytes:
    """Return ``original`` with ``insertions``, which are in order of offset."""
    parts, position = [], 0
    for insertion in insertions:
        parts += [original[position : insertion.offset], insertion.text]
        position = insertion.offset
    return b"".join([*parts, original[position:]])


def check_compiles(data: bytes, file: str) -> None:
    """Raise SyntaxError or ValueError unless ``data`` is Python that compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(data, file, "exec", dont_inherit=True)


def _lines(place: _Place, text: str) -> bytes:
    lines = [place.indent + line.encode() if line.strip() else b"" for line in text.split("\n")]
    joined = place.newline.join(lines)
    return place.newline + joined if place.at_end else joined + place.newline


def dotted(node: ast.expr) -> str | None:
    """Return ``a.b.c`` for such an expression, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _own(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of ``body`` and of the blocks in it, but not those of functions and classes defined there."""
    for statement in body:
        yield statement
        if not isinstance(statement, DEFINITIONS):
            for block in _blocks(statement):
                yield from _own(block)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
        yield part.body


def _calls(statement: ast.stmt) -> Iterator[str]:
    """The dotted calls on the statement's own lines: for a block those of its header."""
    if isinstance(statement, DEFINITIONS):
        return
    queue: list[ast.AST] = [statement]
    while queue:
        for child in ast.iter_child_nodes(queue.pop()):
            if isinstance(child, ast.stmt):
                continue
            queue.append(child)
            if isinstance(child, ast.Call) and (name := dotted(child.func)):
                yield name


def _first_line(statement: ast.stmt) -> int:
    """The statement's first line; that of a definition is its first decorator's."""
    return min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])


class _Source:
    """One file: its tree, and its lines as bytes."""

    def __init__(self, data: bytes) -> None:
        self.start = len(BOM) if data.startswith(BOM) else 0
        data[self.start :].decode()
        self.tree = ast.parse(data[self.start :])
        self.lines = data[self.start :].splitlines(keepends=True)
        self.newline = next((self.ending(line) for line in self.lines if self.ending(line)), b"\n")
        self.offsets = [self.start]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line))

    @staticmethod
    def ending(line: bytes) -> bytes:
        return line[len(line.rstrip(b"\r\n")) :]

    # Places

    def place(self, hook: Hook) -> tuple[_Place, str]:
        scope = self.scope(hook.at)
        if hook.call is not None:
            statement = self.statement(scope, hook.call)
            place = self.before(statement) if hook.where == "before" else self.after(statement)
        else:
            place = self.body_start(scope) if hook.where == "start" else self.body_end(scope)
        return place, self.fill(hook.insert, scope)

    def import_place(self) -> _Place:
        body = self.tree.body
        imports = [statement for statement in body if isinstance(statement, ast.Import | ast.ImportFrom)]
        if imports:
            return self.after(imports[-1])
        if body and ast.get_docstring(self.tree, clean=False) is not None:
            return self.after(body[0])
        return self.before(body[0]) if body else _Place(self.offsets[-1], b"", self.newline, True, len(self.lines) + 1)

    def body_start(self, scope: _Scope) -> _Place:
        rest = scope.body[1:] if scope.documented else scope.body
        return self.before(rest[0]) if rest else self.after(scope.body[0])

    def body_end(self, scope: _Scope) -> _Place:
        last = scope.body[-1]
        return self.before(last) if isinstance(last, LEAVES) else self.after(last)

    def before(self, statement: ast.stmt) -> _Place:
        first = _first_line(statement)
        return _Place(
            self.offsets[first - 1], self.indent(statement, first), self.ending(self.lines[first - 1]) or self.newline, False, first
        )

    def after(self, statement: ast.stmt) -> _Place:
        if isinstance(statement, LEAVES):
            raise NoPlace(f"nothing runs after the statement in line {statement.lineno}, which leaves its block: say before")
        indent = self.indent(statement, _first_line(statement))
        last = statement.end_lineno or statement.lineno
        line = self.lines[last - 1]
        rest = line[statement.end_col_offset or 0 :].strip()
        if rest and not rest.startswith(b"#"):
            raise NoPlace(f"line {last} goes on after the statement ({rest.decode()}): lines can only be inserted between lines")
        ending = self.ending(line)
        return _Place(self.offsets[last], indent, ending or self.newline, True, last + 1, at_end=not ending)

    def indent(self, statement: ast.stmt, line: int) -> bytes:
        text = self.lines[line - 1]
        indent = text[: len(text) - len(text.lstrip(b" \t\f"))]
        if line == statement.lineno and (len(indent) != statement.col_offset or text.startswith(b"elif", len(indent))):
            raise NoPlace(
                f"the statement in line {line} does not begin its line ({text.strip().decode()}): lines can only be inserted between lines"
            )
        return indent

    # Finding

    def scope(self, steps: Sequence[Step]) -> _Scope:
        scope = _Scope(self.tree.body, "the module", ast.get_docstring(self.tree, clean=False) is not None)
        for step in steps:
            scope = getattr(self, f"into_{step.kind}")(scope, step.value)
        return scope

    def into_class(self, scope: _Scope, name: str) -> _Scope:
        node = self.definition(scope, name, (ast.ClassDef,), "class")
        return _Scope(node.body, f"class {name}", ast.get_docstring(node, clean=False) is not None)

    def into_function(self, scope: _Scope, name: str) -> _Scope:
        node = self.definition(scope, name, FUNCTIONS, "function")
        assert not isinstance(node, ast.ClassDef)
        words = f"{scope.words.removeprefix('class ')}.{name}" if scope.words.startswith("class ") else f"function {name}"
        return _Scope(node.body, words, ast.get_docstring(node, clean=False) is not None, node)

    def into_branch(self, scope: _Scope, branch: str) -> _Scope:
        found = [statement for statement in scope.body if isinstance(statement, ast.If)]
        if len(found) != 1:
            raise NoPlace(f"looked for the only top-level if of {scope.words}, but it has {self.at_lines(found)}")
        words = f"the {branch} branch in {scope.words}"
        if branch == "if":
            return _Scope(found[0].body, words, False, scope.function, scope.loop)
        orelse = found[0].orelse
        if not orelse:
            raise NoPlace(f"the if in line {found[0].lineno} of {scope.words} has no else")
        if self.lines[orelse[0].lineno - 1].lstrip().startswith(b"elif"):
            raise NoPlace(f"the if in line {found[0].lineno} of {scope.words} has an elif, so that its else could be either")
        return _Scope(orelse, words, False, scope.function, scope.loop)

    def into_loop(self, scope: _Scope, value: str) -> _Scope:
        loops = [statement for statement in _own(scope.body) if isinstance(statement, ast.For | ast.AsyncFor | ast.While)]
        if value in LOOPS:
            found = [loop for loop in loops if isinstance(loop, LOOPS[value])]
        else:
            found = [loop for loop in loops if not isinstance(loop, ast.While) and ast.unparse(loop.iter) == value]
        if len(found) != 1:
            over = [ast.unparse(loop.iter) for loop in loops if not isinstance(loop, ast.While)]
            hint = near(value, over) or (f"; its loops are over {listing(over)}" if over else "")
            raise NoPlace(f"looked for the only loop {value!r} in {scope.words}, but it has {self.at_lines(found)}{hint}")
        loop = found[0]
        return _Scope(loop.body, f"the loop in {scope.words}", False, scope.function, None if isinstance(loop, ast.While) else loop)

    def definition(
        self, scope: _Scope, name: str, types: tuple[type, ...], what: str
    ) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
        there = [statement for statement in _own(scope.body) if isinstance(statement, DEFINITIONS) and isinstance(statement, types)]
        found = [statement for statement in there if statement.name == name]
        if len(found) == 1:
            return found[0]
        hint = ""
        if not found:
            elsewhere = [
                f"{words} (line {node.lineno})" for words, node in self.definitions() if isinstance(node, types) and node.name == name
            ]
            hint = f"; there is {listing(elsewhere)}" if elsewhere else near(name, [statement.name for statement in there])
        raise NoPlace(f"looked for the {what} {name!r} in {scope.words}, but it has {self.at_lines(found)}{hint}")

    def statement(self, scope: _Scope, call: str) -> ast.stmt:
        found, there = [], set()
        for statement in _own(scope.body):
            names = set(_calls(statement))
            there |= names
            if call in names:
                found.append(statement)
        if len(found) == 1:
            return found[0]
        hint = ""
        if not found:
            elsewhere = [
                f"{words} (line {statement.lineno})"
                for words, node in self.definitions()
                if isinstance(node, FUNCTIONS)
                for statement in _own(node.body)
                if call in _calls(statement)
            ]
            hint = f"; it is called in {listing(elsewhere)}" if elsewhere else near(call, there)
        raise NoPlace(f"looked for the only statement that calls {call!r} in {scope.words}, but it has {self.at_lines(found)}{hint}")

    def definitions(self) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
        queue: list[tuple[str, Sequence[ast.stmt]]] = [("", self.tree.body)]
        while queue:
            prefix, body = queue.pop(0)
            for statement in _own(body):
                if isinstance(statement, DEFINITIONS):
                    yield f"{prefix}{statement.name}", statement
                    queue.append((f"{prefix}{statement.name}.", statement.body))

    @staticmethod
    def at_lines(found: Sequence[ast.stmt]) -> str:
        return f"{len(found)} (lines {listing(statement.lineno for statement in found)})" if found else "none"

    # Text

    def fill(self, text: str, scope: _Scope) -> str:
        def value(match: re.Match[str]) -> str:
            if match[2]:
                if scope.loop is None or not isinstance(scope.loop.target, ast.Name):
                    raise NoPlace(f"{match[0]} stands for a loop's variable, but {scope.words} is no for loop with one")
                return scope.loop.target.id
            if scope.function is None:
                raise NoPlace(f"{match[0]} stands for a parameter, but {scope.words} is in no function")
            names = [argument.arg for argument in [*scope.function.args.posonlyargs, *scope.function.args.args]]
            if int(match[1]) >= len(names):
                raise NoPlace(f"{match[0]}: {scope.function.name} has only the parameters {listing(names)} (the first is number 0)")
            return names[int(match[1])]

        return PLACEHOLDER.sub(value, text)
