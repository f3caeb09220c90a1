"""One reader for what comes from outside: JSON within bounds, and its shape. Standard library only.

A file of a host, a module's result and a record are data of somebody else. :func:`read` and
:func:`parse` bound size, nesting and numbers before anything interprets a value, and
:func:`require` compares it with a shape. What is wrong is a :class:`Malformed` with one line that
is safe to show: callers report it for that file alone and go on with the others.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.words import clean_lines, cut, listing

MOST_PROBLEMS = 3
"""How many problems one message names."""
_SHOWN = 80
_DIGITS = 20
"""The longest integer of 64 bits, with its sign."""
_LARGEST = 1 << 64


class Malformed(AerieError, ValueError):
    """What somebody else wrote is not what it should be; the message is one line, safe to show."""


@dataclass(frozen=True)
class Limits:
    """What is refused unread, or as soon as it is seen."""

    size: int = 16 << 20
    """Bytes of one document."""
    depth: int = 32
    values: int = 500_000
    finite: bool = True
    """Refuse NaN and infinity, which JSON does not have."""
    unicode: bool = True
    """Refuse lone surrogates, which stand for bytes that are no UTF-8."""


RECORD = Limits()
"""For definitions, outcomes, records, job results and small files of a run."""
SURVEY = Limits(size=32 << 20)
FILE = Limits(size=256 << 20, depth=64, values=5_000_000, finite=False)
"""For every other JSON file of a host: what Aerie itself wrote there."""
RAW = 64 << 20
"""Bytes of a raw text file, such as /metrics or a profiler's lines."""


def parse(data: bytes | str, limits: Limits = RECORD) -> Any:
    """Return the value of a JSON text; raise Malformed where it exceeds ``limits``."""
    if len(data) > limits.size:
        raise Malformed(f"it has more than {limits.size:,} bytes")
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text, parse_int=_whole)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed(f"it is nested deeper than {limits.depth} levels") from None
    except ValueError as error:  # also of bytes that are no UTF-8
        raise Malformed(f"it is not JSON ({cut(error, _SHOWN)})") from None
    check(value, limits)
    return value


def read(path: Path, limits: Limits = RECORD, *, follow: bool = False) -> Any:
    """Return the value of a JSON file; raise Malformed as :func:`parse` does, naming the file.

    Raises FileNotFoundError and other OSError as they are. A symbolic link is refused, unless
    ``follow`` says that its directory is nobody else's.
    """
    data = read_bytes(path, limits.size, follow=follow)
    try:
        return parse(data, limits)
    except Malformed as error:
        raise Malformed(f"{path}: {error}") from None


def read_bytes(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes; else raise Malformed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    if not follow and path.is_symlink():
        raise Malformed(f"{path}: it is a symbolic link")
    with os.fdopen(os.open(path, flags), "rb") as stream:
        about = os.fstat(stream.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise Malformed(f"{path}: it is not a regular file")
        data = stream.read(most + 1) if about.st_size <= most else b""
    if about.st_size > most or len(data) > most:
        raise Malformed(f"{path}: it has more than {most:,} bytes")
    return data


def check(value: Any, limits: Limits = RECORD) -> None:
    """Raise Malformed where a value that was parsed elsewhere exceeds ``limits``, or is no JSON.

    It is walked level by level, so no nesting can exhaust the stack. A text must be Unicode: what
    holds a lone surrogate can be written nowhere.
    """
    level, depth, count = [value], 0, 0
    while level:
        count += len(level)
        if depth > limits.depth:
            raise Malformed(f"it is nested deeper than {limits.depth} levels")
        if count > limits.values:
            raise Malformed(f"it has more than {limits.values:,} values")
        following: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _require_unicode(item, limits)
            elif isinstance(item, Mapping):
                for key in item:
                    if not isinstance(key, str):
                        raise Malformed(f"a name is {_kind(key)}, not text")
                    _require_unicode(key, limits)
                following.extend(item.values())
            elif isinstance(item, list | tuple):
                following.extend(item)
            elif not (item is None or isinstance(item, bool)):
                _require_number(item, limits)
        level, depth = following, depth + 1


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise Malformed(f"a number has {len(text):,} digits")
    return int(text)


def _require_unicode(text: str, limits: Limits) -> None:
    if text.isascii() or not limits.unicode:
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{cut(text, _SHOWN)!r} is not Unicode text") from None


def _require_number(value: Any, limits: Limits) -> None:
    if isinstance(value, int):
        if not -_LARGEST < value < _LARGEST:
            raise Malformed("a number has more than 64 bits")
    elif isinstance(value, float):
        if limits.finite and not math.isfinite(value):
            raise Malformed(f"a number is {value}")
    else:
        raise Malformed(f"a value is {_kind(value)}, which JSON does not have")


def made_unicode(value: Any) -> Any:
    """Return a value within bounds, its every text Unicode: a byte that is none becomes visible."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return clean_lines(value)
        return value
    if isinstance(value, Mapping):
        return {made_unicode(name): made_unicode(item) for name, item in value.items()}
    return [made_unicode(item) for item in value] if isinstance(value, list | tuple) else value


# ---- shapes ----


@dataclass(frozen=True)
class Kind:
    """A value by itself: what it is called, and the test for it."""

    name: str
    test: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


ANYTHING = Kind("anything", lambda _: True)
TEXT = Kind("text", lambda value: isinstance(value, str))
WORD = Kind("a word", lambda value: isinstance(value, str) and bool(value) and len(value) <= 1000)
WHOLE = Kind("a whole number of 64 bits", _is_whole)
COUNT = Kind("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0)
NUMBER = Kind("a number", _is_number)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
MAPPING = Kind("an object", lambda value: isinstance(value, Mapping))
LIST = Kind("a list", lambda value: isinstance(value, list | tuple))


@dataclass(frozen=True)
class Maybe:
    """A shape, or null."""

    shape: Shape


@dataclass(frozen=True)
class ListOf:
    """A list, each item of one shape."""

    shape: Shape


@dataclass(frozen=True)
class MapOf:
    """An object of any names, each value of one shape."""

    shape: Shape


Shape = Kind | Maybe | ListOf | MapOf | Mapping[str, Any]
"""A mapping lists the keys of an object; one whose name ends with ``?`` may be missing."""


def require(value: Any, shape: Shape, what: str = "it") -> None:
    """Raise Malformed that names what in ``value`` is not as ``shape`` says."""
    problems = []
    for where, expected, item in mismatches(value, shape):
        name = cut(".".join(where), _SHOWN) or what
        problems.append(f"{name} is missing" if item is MISSING else f"{name} is {_kind(item)}, not {expected}")
        if len(problems) == MOST_PROBLEMS:
            break
    if problems:
        raise Malformed(listing(problems))


MISSING: Any = object()


def mismatches(value: Any, shape: Shape, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield place, expected kind and value (or MISSING) of each part that has another shape."""
    if isinstance(shape, Maybe):
        if value is not None:
            yield from mismatches(value, shape.shape, where)
    elif isinstance(shape, Kind):
        if not shape.test(value):
            yield where, shape.name, value
    elif isinstance(shape, ListOf):
        if not LIST.test(value):
            yield where, LIST.name, value
            return
        for number, item in enumerate(value):
            yield from mismatches(item, shape.shape, (*where, str(number)))
    elif not isinstance(value, Mapping):
        yield where, MAPPING.name, value
    elif isinstance(shape, MapOf):
        for name, item in value.items():
            yield from mismatches(item, shape.shape, (*where, str(name)))
    else:
        for name, inner in shape.items():
            key = name.removesuffix("?")
            if key in value:
                yield from mismatches(value[key], inner, (*where, key))
            elif name == key:
                yield (*where, key), "there", MISSING


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Make a Malformed of whatever it costs to interpret ``what`` as if it were right.

    Shapes say what is read; this holds for what they leave open, such as figures that only together
    make no sense.
    """
    try:
        yield
    except AerieError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Malformed(f"{what}: it does not fit together ({type(error).__name__}: {cut(error, _SHOWN)})") from error


def conform(value: Any, shape: Shape) -> tuple[Any, list[str]]:
    """Return ``value`` as ``shape`` says, and what was otherwise.

    For evidence that may be missing anyway: what has the wrong type is as unknown as what could not
    be read. It is null where the shape allows that, and else left out, with the object around it
    where that needs it.
    """
    problems: list[str] = []
    found = _conform(value, shape, (), problems)
    return (None if found is MISSING else found), problems


def _conform(value: Any, shape: Shape, where: tuple[str, ...], problems: list[str]) -> Any:
    """Return what is right of a value, and MISSING where nothing is."""
    if isinstance(shape, Maybe):
        return None if value is None else _conform(value, shape.shape, where, problems)
    kind = shape if isinstance(shape, Kind) else LIST if isinstance(shape, ListOf) else MAPPING
    if not kind.test(value):
        problems.append(f"{cut('.'.join(where), _SHOWN) or 'it'} is {_kind(value)}, not {kind.name}")
        return MISSING
    if isinstance(shape, ListOf):
        items = [_conform(item, shape.shape, (*where, str(number)), problems) for number, item in enumerate(value)]
        return [item for item in items if item is not MISSING]
    if isinstance(shape, MapOf):
        values = {name: _conform(item, shape.shape, (*where, str(name)), problems) for name, item in value.items()}
        return {name: item for name, item in values.items() if item is not MISSING}
    if isinstance(shape, Mapping):
        changed = dict(value)
        for name, inner in shape.items():
            key = name.removesuffix("?")
            item = _conform(value[key], inner, (*where, key), problems) if key in value else MISSING
            if key in value and item is not MISSING:
                changed[key] = item
            elif key in value and isinstance(inner, Maybe):
                changed[key] = None
            elif name == key:  # without it the object says nothing
                problems += [] if key in value else [f"{cut('.'.join((*where, key)), _SHOWN)} is missing"]
                return MISSING
            else:
                changed.pop(key, None)
        return changed
    return value


def shown(text: object) -> str:
    """Return a text of somebody else as a message quotes it."""
    return repr(cut(text, _SHOWN))


def _kind(value: Any) -> str:
    """Return what a value of the wrong kind is, in a word or two; its content is not shown."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text" if value else "empty"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return "a list"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
