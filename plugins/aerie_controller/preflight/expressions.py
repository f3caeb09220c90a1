"""Expressions and texts of rules: sandboxed Jinja2 over a host's info, in which a value that isn't known is no value and never a guess.

A missing or null value becomes :class:`NotKnown`, whatever is asked of it raises, and the exception says which path is not known and,
where the survey tells, why. ``and`` and ``or`` stop early as in Python, so ``x is defined and x > 1`` asks nothing of a value that is not
known.
"""

from __future__ import annotations

import functools
import re
import shlex
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError, UndefinedError
from jinja2.nativetypes import NativeEnvironment
from jinja2.sandbox import ImmutableSandboxedEnvironment

# isort: split
from ansible.module_utils.aerie.words import clean, near

from .schema import Shape

METHODS = ("items", "keys", "values")
REASONS = {"gpus": "gpu_reason", "xids": "kernel_log_reason"}
"""Where the survey says why something is missing, if not in ``<key>_reason``."""
ELEMENT_FILTERS = ("selectattr", "rejectattr", "map", "sort", "unique", "max", "min", "sum", "groupby")
"""Filters whose attribute is a path of the list's elements."""
SAME_LIST = ("selectattr", "rejectattr", "select", "reject", "sort", "unique", "list", "reverse")
ONE_OF_LIST = ("first", "last", "max", "min", "random")
UNKNOWN_SHAPE: Shape = {"*": ...}
"""The shape of something that the loader can't follow: nothing is refused below it."""


class NotKnownError(UndefinedError):
    """A rule asked something of a value that is not known."""


class NotKnown(jinja2.StrictUndefined):
    """A value that the survey did not give; ``is defined`` is false, and anything else raises :class:`NotKnownError`."""

    __slots__ = ()

    def __init__(self, hint: str | None = None, obj: Any = None, name: str | None = None, exc: type[Exception] = NotKnownError) -> None:  # noqa: ARG002
        super().__init__(hint=hint or f"{name} is not known", obj=obj, name=name, exc=NotKnownError)

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        raise NotKnownError(self._undefined_hint)

    __lt__ = __le__ = __gt__ = __ge__ = __call__ = _fail

    @property
    def path(self) -> str:
        return str(self._undefined_name)

    @property
    def why(self) -> str:
        return str(self._undefined_hint)


class Section(dict[str, Any]):
    """A mapping of the info that knows its path, and why parts of it may be missing."""

    path: str
    reason: str | None
    reasons: dict[str, str]


class Rows(list[Any]):
    """A list of the info that knows its path."""

    path: str


def wrap(value: Any, path: str, reason: str | None = None) -> Any:
    """Return ``value`` with paths in it; ``reason`` is the nearest one that the survey gave for what is missing."""
    if isinstance(value, Mapping):
        section = Section()
        section.path = path
        section.reason = value.get("reason") if isinstance(value.get("reason"), str) else reason
        section.reasons = {}
        for key, inner in value.items():
            own = value.get(REASONS.get(str(key), f"{key}_reason"))
            if isinstance(own, str):
                section.reasons[str(key)] = own
            section[str(key)] = wrap(inner, f"{path}.{key}", section.reasons.get(str(key), section.reason))
        return section
    if isinstance(value, list | tuple):
        rows = Rows(wrap(inner, f"{path}[{position}]", reason) for position, inner in enumerate(value))
        rows.path = path
        return rows
    return value


def missing(path: str, reason: str | None) -> NotKnown:
    """Return the value that stands where nothing is known."""
    shown = path.removeprefix("info.")
    return NotKnown(hint=f"{shown} is not known" + (f": {reason}" if reason else ""), name=shown)


class _Paths:
    """How both environments below look up what is in a host's info."""

    undefined: type[jinja2.Undefined]

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, NotKnown):
            return obj
        if isinstance(obj, Section):
            if attribute in METHODS and attribute not in obj:
                return {"items": obj.items, "keys": obj.keys, "values": obj.values}[attribute]
            return self._of(obj, attribute)
        return missing(f"{getattr(obj, 'path', type(obj).__name__)}.{attribute}", None)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, NotKnown):
            return obj
        if isinstance(argument, NotKnown):
            return argument
        if isinstance(obj, Section):
            return self._of(obj, str(argument))
        try:
            return obj[argument]
        except (LookupError, TypeError):
            return missing(f"{getattr(obj, 'path', type(obj).__name__)}[{argument}]", None)

    @staticmethod
    def _of(section: Section, key: str) -> Any:
        value, own = section.get(key), section.reasons.get(key)
        # An empty list beside a reason is a list that could not be read.
        return missing(f"{section.path}.{key}", own or section.reason) if value is None or (own and value == []) else value


class _Expressions(_Paths, ImmutableSandboxedEnvironment, NativeEnvironment):
    pass


class _Texts(_Paths, ImmutableSandboxedEnvironment):
    pass


def _version(text: Any) -> tuple[int, ...]:
    found = re.search(r"\d+(?:\.\d+)*", str(text))
    if not found:
        raise NotKnownError(f"{text!r} is no version")
    return tuple(int(part) for part in found.group().split("."))


def older_than(version: Any, other: Any) -> bool:
    """Jinja test: ``'12.8' is older_than('12.9')``; what comes after the numbers does not count."""
    one, two = _version(version), _version(other)
    length = max(len(one), len(two))
    return one + (0,) * (length - len(one)) < two + (0,) * (length - len(two))


def matching(text: Any, pattern: Any) -> bool:
    """Jinja test: whether the regular expression is found in the text."""
    return re.search(str(pattern), str(text)) is not None


def major(version: Any) -> int:
    """Jinja filter: the first number of a version."""
    return _version(version)[0]


def modprobe_options(text: Any) -> list[Section]:
    """Jinja filter: the options that lines of a modprobe.d file set, each with module, name and value; the last one of a name counts."""
    found: dict[tuple[str, str], str] = {}
    for line in str(text).splitlines():
        match line.split(None, 2):
            case ["options", module, rest]:
                for name, quoted, plain in re.findall(r'(\w+)=(?:"([^"]*)"|(\S*))', rest):
                    found[module.replace("-", "_"), name] = quoted or plain
    options = []
    for (module, name), value in found.items():
        option = Section(module=module, name=name, value=value)
        option.path, option.reason, option.reasons = f"{module}.{name}", None, {}
        options.append(option)
    return options


def modprobe_value(value: Any) -> str:
    """Jinja filter: a module parameter's value in one spelling: sysfs shows booleans as Y and N."""
    text = str(value).strip().strip('"')
    return {"Y": "1", "N": "0"}.get(text) or (str(int(text, 0)) if re.fullmatch(r"0x[0-9a-fA-F]+|[1-9]\d*|0", text) else text)


def gib(value: Any) -> str:
    """Jinja filter: bytes as GiB."""
    return f"{value / 2**30:.0f} GiB"


def known(values: Any) -> list[Any]:
    """Jinja filter: the values of a list that are known."""
    return [value for value in values if not isinstance(value, NotKnown) and value is not None]


def finalize(value: Any) -> Any:
    """Show what is not known as these words, and lists without brackets."""
    if isinstance(value, NotKnown) or value is None:
        return "not known"
    return ", ".join(str(finalize(one)) for one in value) if isinstance(value, list) else value


_PLAIN = frozenset(string.ascii_letters + string.digits + " !#%&()*+,-./:;<=>?@[]^_{|}~$")
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")


def quoted(value: Any) -> str:
    """Return a host's value as words of a shell: whatever it holds, it is an argument and no command.

    A list becomes several words. A value with characters that a terminal does not show is written with
    escapes ($'…'), so that what is copied is what was meant.
    """
    if isinstance(value, NotKnown) or value is None:
        raise NotKnownError(value.why if isinstance(value, NotKnown) else "a value is not known")
    if isinstance(value, list):
        return " ".join(quoted(entry) for entry in value)
    words = str(value)
    if clean(words) == words:
        return shlex.quote(words)
    # Byte by byte: bash writes the byte, not the character, for \xe9. Half a character has no bytes of its own.
    data = words.encode("utf-8", "surrogateescape" if _HALF.search(words) is None else "surrogatepass")
    escaped = (chr(byte) if chr(byte) in _PLAIN else f"\\x{byte:02x}" for byte in data)
    return f"$'{''.join(escaped)}'"


def _prepared(environment: jinja2.Environment) -> Any:
    environment.tests |= {"older_than": older_than, "matching": matching}
    environment.filters |= {
        "gib": gib,
        "known": known,
        "major": major,
        "modprobe_options": modprobe_options,
        "modprobe_value": modprobe_value,
    }
    environment.globals.clear()
    return environment


_expressions = _prepared(_Expressions(undefined=NotKnown))
_texts = _prepared(_Texts(undefined=NotKnown, finalize=finalize, trim_blocks=True, lstrip_blocks=True))
_commands = _prepared(_Texts(undefined=NotKnown, finalize=quoted, trim_blocks=True, lstrip_blocks=True))

Expression = Callable[[Mapping[str, Any]], Any]
Text = Callable[[Mapping[str, Any]], str]
Command = Callable[[Mapping[str, Any]], str | None]


@functools.cache
def expression(source: str) -> Expression:
    """Return the compiled expression; raise jinja2's TemplateError where it is none. Its call raises :class:`NotKnownError`."""
    compiled = _expressions.compile_expression(source, undefined_to_none=False)

    def evaluate(scope: Mapping[str, Any]) -> Any:
        return compiled(**scope)

    return evaluate


@functools.cache
def text(source: str) -> Text:
    """Return the compiled text; values that are not known are shown as such."""
    if "{" not in source:
        return lambda _scope: source
    template = _texts.from_string(source)

    def render(scope: Mapping[str, Any]) -> str:
        try:
            return str(template.render(**scope)).strip()
        except (NotKnownError, TypeError, ValueError) as error:
            return f"({error})"

    return render


@functools.cache
def command(source: str) -> Command:
    """Return the compiled command; its call gives None where it needs a value that is not known."""
    template = _commands.from_string(source)

    def render(scope: Mapping[str, Any]) -> str | None:
        try:
            return str(template.render(**scope)).strip()
        except (NotKnownError, TypeError, ValueError):
            return None

    return render


def expression_problems(source: str, scope: Mapping[str, Shape]) -> Iterator[str]:
    """Yield what is wrong with an expression: its syntax, and names and paths that no survey has."""
    try:
        expression(source)
        tree = _expressions.parse("{{ " + source + " }}")
    except TemplateError as error:
        yield f"{source!r} is no expression: {error}"
        return
    yield from _Paths_of(scope).problems(tree)


def text_problems(source: str, scope: Mapping[str, Shape]) -> Iterator[str]:
    """Yield what is wrong with a text."""
    try:
        tree = _texts.parse(source)
        text(source)
    except TemplateError as error:
        yield f"{source!r} is no text: {error}"
        return
    yield from _Paths_of(scope).problems(tree)


def shape_of(source: str, scope: Mapping[str, Shape]) -> Shape:
    """Return the shape of what an expression gives, as far as it can be followed."""
    tree = _expressions.parse("{{ " + source + " }}")
    output = tree.body[0]
    assert isinstance(output, nodes.Output)
    return _Paths_of(scope).shape(output.nodes[0])


def element(shape: Shape) -> Shape:
    """Return the shape of what iterating over ``shape`` gives: a list's elements, and of a mapping its entries with key and value."""
    if isinstance(shape, list):
        return shape[0]
    if isinstance(shape, dict) and shape is not UNKNOWN_SHAPE:
        return {"key": None, "value": shape.get("*", UNKNOWN_SHAPE)}
    return UNKNOWN_SHAPE


class _Paths_of:
    """Follows the paths that a parsed expression takes."""

    def __init__(self, scope: Mapping[str, Shape]) -> None:
        self._scope = dict(scope)
        self._problems: list[str] = []

    def problems(self, tree: nodes.Node) -> list[str]:
        self._problems = []
        self.shape(tree)
        return list(dict.fromkeys(self._problems))

    def shape(self, node: nodes.Node) -> Shape:
        match node:
            case nodes.Name(name=name):
                if name not in self._scope:
                    self._problems.append(f"{name}: there is no such name, only {', '.join(sorted(self._scope))}")
                    return UNKNOWN_SHAPE
                return self._scope[name]
            case nodes.Getattr(node=inner, attr=key):
                return self._below(self.shape(inner), key, node)
            case nodes.Getitem(node=inner, arg=nodes.Const(value=str(key))):
                return self._below(self.shape(inner), key, node)
            case nodes.Getitem(node=inner, arg=argument):
                self.shape(argument)
                shape = self.shape(inner)
                return shape[0] if isinstance(shape, list) else shape.get("*", UNKNOWN_SHAPE) if isinstance(shape, dict) else UNKNOWN_SHAPE
            case nodes.Call(node=nodes.Getattr(node=inner, attr=method)) if method in METHODS:
                shape = self.shape(inner)
                inside = shape.get("*", UNKNOWN_SHAPE) if isinstance(shape, dict) else UNKNOWN_SHAPE
                return {"values": [inside], "keys": [None], "items": [UNKNOWN_SHAPE]}[method]
            case nodes.Filter(name=name):
                return self._filtered(node, name)
            case nodes.For(target=nodes.Name(name=name), iter=iterated):
                before = dict(self._scope)
                self._scope[name] = element(self.shape(iterated))
                for child in (*node.body, *([node.test] if node.test else [])):
                    self.shape(child)
                self._scope = before
                return UNKNOWN_SHAPE
        for child in node.iter_child_nodes():
            self.shape(child)
        return UNKNOWN_SHAPE

    def _filtered(self, node: nodes.Filter, name: str) -> Shape:
        shape = self.shape(node.node) if node.node is not None else UNKNOWN_SHAPE
        attribute = next((keyword.value for keyword in node.kwargs if keyword.key == "attribute"), None)
        if attribute is None and name in ("selectattr", "rejectattr") and node.args:
            attribute = node.args[0]
        for child in (*node.args, *(keyword.value for keyword in node.kwargs)):
            if not isinstance(child, nodes.Const):
                self.shape(child)
        inner = element(shape)
        if name in ELEMENT_FILTERS and isinstance(attribute, nodes.Const) and isinstance(attribute.value, str):
            for key in attribute.value.split("."):
                inner = self._below(inner, key, node)
            if name == "map":
                return [inner]
        if name in SAME_LIST:
            return shape if isinstance(shape, list) else [inner]
        return element(shape) if name in ONE_OF_LIST else UNKNOWN_SHAPE

    def _below(self, shape: Shape, key: str, node: nodes.Node) -> Shape:
        if shape is UNKNOWN_SHAPE or shape is ...:
            return UNKNOWN_SHAPE
        if isinstance(shape, dict):
            if key in shape or "*" in shape:
                return shape.get(key, shape.get("*"))
            self._problems.append(f"{_written(node)}: no host's info has {key} there{near(key, map(str, shape))}")
        elif isinstance(shape, list):
            self._problems.append(f"{_written(node)}: {key} is asked of a list: take its elements by each, selectattr or map")
        else:
            self._problems.append(f"{_written(node)}: {key} is asked of a plain value")
        return UNKNOWN_SHAPE


def _written(node: nodes.Node) -> str:
    match node:
        case nodes.Name(name=name):
            return name
        case nodes.Getattr(node=inner, attr=key):
            return f"{_written(inner)}.{key}"
        case nodes.Getitem(node=inner, arg=nodes.Const(value=key)):
            return f"{_written(inner)}[{key!r}]"
        case nodes.Filter(node=inner, name=name) if inner is not None:
            return f"{_written(inner)} | {name}"
        case nodes.Call(node=inner):
            return f"{_written(inner)}()"
    return "…"


def entries(value: Any) -> Sequence[Any]:
    """Return what a rule's ``each`` goes through: a list's elements, a mapping's entries as {key, value}."""
    if isinstance(value, NotKnown):
        raise NotKnownError(value.why)
    if isinstance(value, Section):
        found = []
        for key, inner in value.items():
            entry = Section(key=key, value=inner)
            entry.path, entry.reason, entry.reasons = f"{value.path}.{key}", value.reason, {}
            found.append(entry)
        return found
    return list(value)
