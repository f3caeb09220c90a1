"""The one writer and reader of variables files that are made from what hosts report.

A file of variables is trusted: Ansible evaluates templates in it, wherever its words came from. So
every text of a host that could be one is written as ``!unsafe``, which Ansible's loader never
evaluates, and comments are cleaned to one line. Texts of plain characters stay as they are, so that
files read well. No Ansible import.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.words import clean, clean_lines

WIDTH = 120
WIDEST_HEAD = 140
UNSAFE = "!unsafe"
PLAIN = re.compile(r"[\w .,:;/+@=~*<>&!^-]*", re.ASCII)
"""Texts of these characters alone are no template, no expression that does anything, and no header of Jinja2's."""
LIMITS = untrusted.Limits(size=8 << 20, depth=24, values=100_000, finite=False)
_TEXT = "tag:yaml.org,2002:str"
_RESOLVER = yaml.resolver.Resolver()


class _Data(str):
    """A text that is written as ``!unsafe``."""


class _Dumper(yaml.SafeDumper):
    """Writes no anchors: a reader would have to know them."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  PyYAML's signature
        return True


_Dumper.add_representer(_Data, lambda dumper, data: dumper.represent_scalar(UNSAFE, str.__str__(data), style="'"))


class _Loader(yaml.SafeLoader):
    """Takes ``!unsafe`` for what it is here: a text."""


def _construct(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, f"{UNSAFE} stands before what is no text", node.start_mark)
    return loader.construct_scalar(node)


_Loader.add_constructor(UNSAFE, _construct)


def comment(text: object) -> str:
    """Return a line of a comment: no text of a host ends it."""
    return f"# {clean(text)}"


def head(lines: Sequence[object]) -> list[str]:
    """Return the first lines of a file, each a comment that is wrapped where it is long."""
    wrapped: list[str] = ["---"]
    for line in map(comment, lines):
        wrapped += [line] if len(line) <= WIDEST_HEAD else textwrap.wrap(line, WIDEST_HEAD - 2, subsequent_indent="# ")
    return wrapped


def variable(name: str, value: Any, width: int = WIDTH) -> str:
    """Return the text of one variable; raise Malformed where its value is not what a file should hold."""
    marked = _marked(plain(value))
    # A character that shows nothing, or turns what follows around, is escaped, with all that is not ASCII.
    visible = all(clean_lines(text) == text for text in _texts(marked))
    return yaml.dump({name: marked}, Dumper=_Dumper, sort_keys=False, allow_unicode=visible, width=width).rstrip("\n")


def document(lines: Sequence[object], values: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return the text of a whole file: comments, then variables. The caller names the variables, and no host does."""
    return "\n".join([*head(lines), *(variable(name, value, width) for name, value in values.items())]) + "\n"


def load(text: str) -> Any:
    """Return what a variables file says as plain values; nothing in it is a template. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def read(path: Path) -> Any:
    """Return what a variables file says; raise Malformed where it is none, or larger than such a file is."""
    try:
        value = load(untrusted.read_bytes(path, LIMITS.size, follow=True).decode())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise untrusted.Malformed(f"{path}: it is no YAML file of variables ({clean(error)[:200]})") from error
    if not isinstance(value, Mapping):
        raise untrusted.Malformed(f"{path}: it holds no variables")
    return value


def plain(value: Any) -> Any:
    """Return the value in plain types: what Ansible gives may be tagged, which YAML would write. Bounded, and all Unicode."""
    _require_bounds(value)
    return _plain(value)


def _require_bounds(value: Any) -> None:
    level, count = [value], 0
    for _ in range(LIMITS.depth):
        count += len(level)
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            break
    if level:
        raise untrusted.Malformed(f"the value of a variable is nested deeper than {LIMITS.depth} levels")
    if count > LIMITS.values:
        raise untrusted.Malformed(f"the value of a variable has more than {LIMITS.values:,} values")


def _inside(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    return list(item) if isinstance(item, Sequence) and not isinstance(item, str | bytes) else []


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_unicode(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, str):
        return _unicode(str.__str__(value))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 64 else float("inf")
    return float(value) if isinstance(value, float) else _unicode(str(value))


def _unicode(text: str) -> str:
    """Return a text without lone surrogates, which no file can hold: they become visible."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def _marked(value: Any) -> Any:
    if isinstance(value, dict):
        return {_mark(name): _marked(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return _mark(value) if isinstance(value, str) else value


def _mark(text: str) -> str:
    """Return a text, marked unless it is plain.

    Ansible works out the type of what stands behind ``!unsafe`` anew, whatever quotes it has. What would be a number, a date or a merge
    key then, with a newline or without, is no template, and stays as it is.
    """
    if PLAIN.fullmatch(text) or _RESOLVER.resolve(yaml.ScalarNode, text, (True, False)) != _TEXT:
        return text
    return _Data(text)


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in (name, *_texts(item))]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []
