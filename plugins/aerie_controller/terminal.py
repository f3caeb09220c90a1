"""What Aerie prints on a terminal: parts such as tables and commands, made into text that fits.

Every report is a list of parts; :func:`render` makes plain or coloured text of it, and :func:`show`
prints it. All text is cleaned here, whatever host it comes from. The layout is rich's, which never
sees markup.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.words import clean, clean_lines, cut

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["clean", "clean_lines", "cut"]

NARROWEST, WIDEST = 60, 140
DEFAULT_WIDTH = 100
"""Where output is no terminal, and for texts that are kept in results."""
STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "good": "green",
    "strong": "bold",
    "quiet": "dim",
}
SEVERITIES = {"error": "ERROR", "warning": "WARNING", "note": "note"}
LEFT, RIGHT = "left", "right"
_GAP, _NARROW_GAP = 2, 1
_LONGEST_WORD = 20
"""A column of text gets at least its longest word, up to so many characters."""
_WORD = re.compile(r"\S+ *| +")
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_TRAILING = re.compile(r"[ ]+((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)

Span = tuple[object, str | None]
Words = object | Sequence[Span]
"""A text, or pieces of one as a list of (text, style)."""


def _columns_of_terminal() -> int | None:
    try:
        return os.get_terminal_size(1).columns or None
    except OSError:
        return None


# Ansible's workers are forked, and detached from the terminal: they use what the main process saw
# when a callback plugin imported this module there.
_COLUMNS_AT_START = _columns_of_terminal()


@dataclass(frozen=True)
class Column:
    """A table's column. Figures are set to the right and never wrapped."""

    name: str
    justify: str = LEFT


@dataclass(frozen=True)
class Heading:
    """A line with a rule below it."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Text that wraps between words; ``hang`` is how much further its other lines are indented."""

    spans: tuple[Span, ...]
    indent: int = 0
    hang: int = 2


@dataclass(frozen=True)
class Lines:
    """Text whose lines stay as they are, as the end of a log."""

    text: str
    indent: int = 0
    style: str | None = None


@dataclass(frozen=True)
class Command:
    """One line that is never wrapped or cut, so that it can be copied as a whole."""

    text: str
    indent: int = 4


@dataclass(frozen=True)
class Table:
    """Rows of cells; ``gaps`` are the rows with an empty line before them."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Words, ...], ...]
    gaps: frozenset[int] = frozenset()
    indent: int = 0


@dataclass(frozen=True)
class Gap:
    """An empty line."""


Part = Heading | Paragraph | Lines | Command | Table | Gap


def heading(text: object) -> Part:
    """Return a title with a rule as wide as the terminal."""
    return Heading(clean(text))


def paragraph(text: Words, indent: int = 0, style: str | None = None, hang: int = 2) -> Part:
    """Return text that wraps between words, all of it in ``style`` unless pieces have their own."""
    return Paragraph(tuple(_spans(text, style)), indent, hang)


def lines(text: object, indent: int = 0, style: str | None = None) -> Part:
    """Return a text of several lines that keeps them."""
    return Lines(clean_lines(text), indent, style)


def command(text: object, indent: int = 4) -> Part:
    """Return a command or path on a line of its own, which is never broken."""
    return Command(clean(text), indent)


def gap() -> Part:
    """Return an empty line."""
    return Gap()


def table(
    columns: Iterable[str | Column],
    rows: Iterable[Sequence[Words]],
    *,
    gaps: Collection[int] = (),
    indent: int = 0,
) -> Part:
    """Return a table. Columns that are only named are text, set to the left.

    Where a row is too wide, text wraps between words, and a path is shortened at its start. Where
    even that is not enough, each row becomes a paragraph, so that no figure is lost.
    """
    named = (column if isinstance(column, Column) else Column(column) for column in columns)
    cleaned = tuple(Column(clean(column.name), column.justify) for column in named)
    return Table(cleaned, tuple(tuple(row) for row in rows), frozenset(gaps), indent)


def figures(*names: str) -> list[Column]:
    """Return columns of figures."""
    return [Column(name, RIGHT) for name in names]


def severity(name: str) -> Span:
    """Return the word for a severity in its colour."""
    return SEVERITIES.get(name, name), name if name in STYLES else None


def places(paths: Mapping[str, object] | None) -> list[Part]:
    """Return a line for each named path, such as {"report": path}; paths are never broken."""
    return [command(f"{name}: {path}", indent=0) for name, path in (paths or {}).items()]


def from_data(entries: object) -> list[Part]:
    """Return the parts that plain data means, as in a result's ``run_summary``.

    Each entry has ``text``, with an optional ``style`` of :data:`STYLES`; or ``command``; or
    ``path`` with ``text``, what lies there. Anything else is passed over: a summary must not end a
    run.
    """
    parts: list[Part] = []
    for entry in entries if isinstance(entries, Sequence) and not isinstance(entries, str) else ():
        if not isinstance(entry, Mapping):
            continue
        if entry.get("command"):
            parts.append(command(entry["command"]))
        elif entry.get("path"):
            parts += places({str(entry.get("text") or "path"): entry["path"]})
        elif entry.get("text"):
            style = entry.get("style")
            parts.append(paragraph(str(entry["text"]), style=style if style in STYLES else None))
    return parts


def terminal_width() -> int:
    """Return the width that text should have, within what reads well."""
    columns = _columns_of_terminal() or _COLUMNS_AT_START
    if columns is None:
        setting = os.environ.get("COLUMNS", "")
        is_number = setting.isascii() and setting.isdigit()
        columns = int(setting) if is_number else DEFAULT_WIDTH
    return min(max(columns, NARROWEST), WIDEST)


def colours() -> bool:
    """Say whether Ansible colours what it prints; it heeds NO_COLOR and its own settings."""
    from ansible.utils.color import ANSIBLE_COLOR

    return bool(ANSIBLE_COLOR)


def render(parts: Iterable[Part], width: int | None = None, colour: bool = False) -> str:
    """Return the text of ``parts``, and a newline; without ``colour`` it holds no escape."""
    console = _console(terminal_width() if width is None else width, colour)
    for part in parts:
        _print(console, part)
    output = console.file
    assert isinstance(output, io.StringIO)
    return _TRAILING.sub(r"\1", output.getvalue()).rstrip("\n") + "\n"


def show(parts: Iterable[Part]) -> None:
    """Print ``parts`` through Ansible's Display: in colour on the screen, and plain in its log."""
    from ansible.utils.display import Display

    display, chosen, width = Display(), list(parts), terminal_width()
    plain = render(chosen, width)
    if colours():
        display.display(render(chosen, width, colour=True), screen_only=True)
        display.display(plain, log_only=True)
    else:
        display.display(plain)


def progress(host: object, text: object) -> None:
    """Print one line about what happens on ``host``."""
    from ansible.utils.display import Display

    Display().display(f"  {clean(host)}  {clean(text)}")


def warn(text: object) -> None:
    """Print a warning as Ansible does, cleaned."""
    from ansible.utils.display import Display

    Display().warning(clean_lines(text))


def guard(display: Any) -> None:
    """Have all that an Ansible Display prints pass :func:`clean_lines`; only colours stay.

    Results are cleaned before they are shown. This holds for the rest: names of tasks that hold a
    host's words, and what other plugins print.
    """
    if getattr(display, "_aerie_guarded", False):
        return
    print_raw, print_banner = display.display, display.banner

    # Ansible's own names of arguments, since it passes them by name from its workers.
    @functools.wraps(print_raw)
    def display_cleaned(msg: str, *arguments: Any, **options: Any) -> None:
        cleaned = _without_control(msg)
        if cleaned == (plain := _COLOUR.sub("", cleaned)) or options.get("screen_only"):
            print_raw(cleaned, *arguments, **options)
            return
        # Ansible colours differences before it prints them, and would log the colours too.
        if not options.get("log_only"):
            print_raw(cleaned, *arguments, **options | {"screen_only": True})
        print_raw(plain, *arguments, **options | {"log_only": True})

    @functools.wraps(print_banner)
    def banner_cleaned(msg: str, *arguments: Any, **options: Any) -> None:
        print_banner(clean(msg), *arguments, **options)

    display.display, display.banner, display._aerie_guarded = display_cleaned, banner_cleaned, True


def _without_control(text: str) -> str:
    if "\x1b" not in text or not colours():
        return clean_lines(text)
    pieces = _COLOUR.split(text)
    return "".join(piece if _COLOUR.fullmatch(piece) else clean_lines(piece) for piece in pieces)


def _spans(text: Words, style: str | None = None) -> Iterator[Span]:
    """Yield the cleaned pieces of a text; spaces between pieces stay."""
    if not isinstance(text, list):
        yield clean(text), style
        return
    for piece, own in text:
        words = str(piece)
        cleaned, inner = clean(words), words.lstrip(" ")
        before, after = len(words) - len(inner), len(inner) - len(inner.rstrip(" "))
        yield f"{' ' * before}{cleaned}{' ' * after}", own or style


def _console(width: int, colour: bool) -> Console:
    try:
        from rich.console import Console
    except ImportError as error:
        raise AerieError(f"this output needs rich on the controller ({error}): install requirements/controller.txt") from error
    # What rich would find out by itself is given, so that the same parts give the same text.
    return Console(
        file=io.StringIO(),
        width=width,
        height=10_000,
        color_system="standard" if colour else None,
        force_terminal=colour,
        no_color=not colour,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        _environ={},
    )


def _text(spans: Iterable[Span]) -> Text:
    from rich.text import Text

    text = Text()
    for words, style in spans:
        text.append(str(words), STYLES[style] if style else None)
    return text


def _print(console: Console, part: Part) -> None:
    from rich.text import Text

    match part:
        case Gap():
            _print_line(console, Text())
        case Heading(text=title):
            for line in _wrapped(_text([(title, "strong")]), console.width):
                _print_line(console, line)
            _print_line(console, Text("─" * console.width, STYLES["quiet"]))
        case Paragraph(spans=spans, indent=indent, hang=hang):
            wrapped = _wrapped(_text(spans), console.width - indent - hang)
            for number, line in enumerate(wrapped):
                _print_line(console, line, indent + (hang if number else 0))
        case Lines(text=text, indent=indent, style=style):
            for words in text.splitlines():
                _print_line(console, _text([(words, style)]), indent)
        case Command(text=text, indent=indent):
            _print_line(console, Text(text), indent)
        case Table():
            _print_table(console, part)


def _print_line(console: Console, line: Text, indent: int = 0) -> None:
    from rich.text import Text

    # soft_wrap: only the terminal may break it, which a person's copy does not see.
    console.print(Text(" " * indent) + line, soft_wrap=True)


def _wrapped(text: Text, width: int) -> Sequence[Text]:
    """Return the lines of a text that is broken between words only.

    A word that is too long stays whole: Text.wrap of rich breaks it, or doesn't wrap at all.
    """
    from rich.cells import cell_len

    breaks: list[int] = []
    used = 0
    for match in _WORD.finditer(text.plain):
        size = cell_len(match[0].rstrip(" "))
        if used and used + size > width:
            breaks.append(match.start())
            used = 0
        used += cell_len(match[0])
    wrapped = list(text.divide(breaks))
    for line in wrapped:
        line.rstrip()
    return wrapped


def _print_table(console: Console, part: Table) -> None:
    from rich.cells import cell_len
    from rich.table import Table as Grid
    from rich.text import Text

    width = console.width - part.indent
    rows = [[_text(_spans(cell)) for cell in row] for row in part.rows]
    for names, space in _attempts(part.columns):
        widths = [
            max((cell_len(line) for cell in cells for line in str(cell).splitlines() or [""]), default=0)
            for cells in zip(names, *rows, strict=True)
        ]
        least = [
            natural if column.justify == RIGHT else min(natural, _longest_word(cells))
            for natural, column, cells in zip(widths, part.columns, zip(names, *rows, strict=True), strict=True)
        ]
        room = width - space * (len(widths) - 1)
        if sum(least) <= room:
            break
    else:
        _print_records(console, part, rows)
        return
    while sum(widths) > room:
        # The widest column that can give way does.
        candidates = [index for index, natural in enumerate(widths) if natural > least[index]]
        widths[max(candidates, key=lambda index: widths[index])] -= 1
    grid = Grid(box=None, padding=(0, space, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for name, column, size in zip(names, part.columns, widths, strict=True):
        figure = column.justify == RIGHT
        grid.add_column(Text(name), justify="right" if figure else "left", width=size, no_wrap=figure, overflow="fold")
    for number, row in enumerate(rows):
        if number in part.gaps:
            grid.add_row()
        grid.add_row(*(_shortened(cell, size) for cell, size in zip(row, widths, strict=True)))
    if part.indent:
        from rich.padding import Padding

        console.print(Padding(grid, (0, 0, 0, part.indent)), crop=False)
    else:
        console.print(grid, crop=False)


def _attempts(columns: Sequence[Column]) -> Iterator[tuple[list[str], int]]:
    """Yield heads and the space between columns, first as they read best, then narrower."""
    names = [column.name for column in columns]
    yield names, _GAP
    yield names, _NARROW_GAP
    yield [name.replace(" ", "\n") for name in names], _NARROW_GAP


def _longest_word(cells: Iterable[object]) -> int:
    from rich.cells import cell_len

    longest = max((cell_len(word) for cell in cells for word in str(cell).split()), default=0)
    return min(longest, _LONGEST_WORD)


def _shortened(cell: Text, size: int) -> Text:
    """Return a cell; a path that doesn't fit is shortened at its start, where it says least."""
    from rich.cells import cell_len
    from rich.text import Text

    words = cell.plain
    if cell_len(words) <= size or "/" not in words or " " in words:
        return cell
    while words and cell_len(words) > size - 1:
        words = words[1:]
    return Text(f"…{words}")


def _print_records(console: Console, part: Table, rows: Sequence[Sequence[Text]]) -> None:
    """Print each row as a paragraph of names and values."""
    from rich.text import Text

    for number, row in enumerate(rows):
        if number in part.gaps:
            _print_line(console, Text())
        first, *others = zip(part.columns, row, strict=True)
        line = Text() + first[1]
        for column, cell in others:
            if cell.plain.strip():
                line = line + Text(f"; {column.name} " if column.name else " ") + cell
        wrapped = _wrapped(line, console.width - part.indent - 2)
        for position, piece in enumerate(wrapped):
            _print_line(console, piece, part.indent + (2 if position else 0))
