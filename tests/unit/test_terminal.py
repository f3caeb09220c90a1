"""What Aerie prints fits the terminal, keeps commands whole, and lets no host's words draw."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from ansible.module_utils.aerie.words import clean, clean_lines

from aerie_controller import detached, terminal

ESC, BELL = "\x1b", "\x07"
HOSTILE = {
    "colour": (f"{ESC}[1;33m'x'{ESC}[0m", "'x'"),
    "clear screen": (f"a{ESC}[2J{ESC}[Hb", "ab"),
    "title": (f"a{ESC}]0;owned{BELL}b", "ab"),
    "link": (f"{ESC}]8;;http://x{ESC}\\text{ESC}]8;;{ESC}\\", "text"),
    "clipboard": (f"a{ESC}]52;c;cm0gLXJmIC8K{BELL}b", "ab"),
    "device control": (f"a{ESC}P1;2|payload{ESC}\\b", "ab"),
    "character set": (f"a{ESC}(0b{ESC}(B", "ab"),
    "8-bit introducers": ("a\x9b31mb\x9d0;t\x9cc", "abc"),
    "a sequence inside another": (f"a{ESC}{ESC}[0m[31mb", "ab"),
    "a string without an end": (f"a{ESC}]0;words", "a0;words"),
    "carriage return": ("passed\rfailed", "passed failed"),
    "backspace": ("ok\x08\x08no", "ok  no"),
    "newline": ("one\nERROR  forged", "one ERROR  forged"),
    "NUL": ("a\0b", "a b"),
    "right to left": ("a\u202egpj.exe\u2066b", "agpj.exeb"),
    "zero width": ("a\u200bb\u2060c\ufeffd\u00ade", "abcde"),
    "invisible letters": ("a\u3164b\u115fc\u2800d\ufe0fe", "abcde"),
    "line separators": ("a\u2028b\u2029c\x85d", "a b c d"),
    "a byte that is not UTF-8": (b"caf\xe9".decode("utf-8", "surrogateescape"), "caf\\xe9"),
    "half a character": ("a\ud83db", "a\\ud83db"),
    "no character": ("a\U0010ffffb\ue000", "a\ufffdb\ufffd"),
}
DRAWS = set(map(chr, (*range(32), 127, *range(0x80, 0xA0)))) | set("\u202e\u2066\u200b\u2060\ufeff\u2028\u2029")


@pytest.mark.parametrize(("text", "cleaned"), HOSTILE.values(), ids=HOSTILE)
def test_a_host_s_words_are_cleaned_with_all_that_a_sequence_carries(text, cleaned):
    assert clean(text) == cleaned


def test_words_of_any_language_and_the_signs_that_reports_use_stay():
    for text in ("Größe 3 × 4 – 7 µs … “x”", "漢字", "naïve café", "é"):
        assert clean(text) == text


def test_a_log_keeps_its_lines_and_nothing_else():
    text = f"one\r\n\ttwo {ESC}[31mred{ESC}[0m\n10 %\r20 %\nend{ESC}]0;t{BELL}"
    assert clean_lines(text) == "one\n\ttwo red\n10 % 20 %\nend"
    assert clean(text).count("\n") == 0


def test_what_is_cleaned_is_clean():
    pieces = [text for text, _ in HOSTILE.values()]
    for first, second in itertools.product(pieces, repeat=2):
        cleaned = clean(first + second)
        assert not set(cleaned) & DRAWS
        assert clean(cleaned) == cleaned


@pytest.mark.parametrize("unit", [ESC, f"{ESC}]", "\x90", f"{ESC}[1", f"{ESC}{ESC}[m["])
def test_a_long_hostile_text_takes_no_time(unit):
    started = time.monotonic()
    clean(unit * (2_000_000 // len(unit)))
    assert time.monotonic() - started < 20


def everything(text: str) -> list[terminal.Part]:
    """Parts of all kinds, each with ``text`` in every place for a text."""
    columns = [text, *terminal.figures(text), "what"]
    return [
        terminal.heading(text),
        terminal.paragraph(text, style="error"),
        terminal.paragraph([(text, "strong"), (text, None)], indent=2),
        terminal.lines(text, indent=2),
        terminal.command(text),
        terminal.table(columns, [(text, "1", text), ([(text, "warning")], text, text)]),
        *terminal.places({text: text}),
        *terminal.from_data([{"text": text, "style": "error"}, {"command": text}, {"text": "x", "style": text}]),
    ]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("text", [text for text, _ in HOSTILE.values()], ids=HOSTILE)
def test_no_part_lets_a_host_s_words_draw(text, width, colour):
    output = terminal.render(everything(text), width, colour)
    plain = terminal.render(everything(clean_lines(text)), width, colour)
    assert output.replace("\n", "").replace(" ", "") == plain.replace("\n", "").replace(" ", "")
    allowed = {"\n", ESC} if colour else {"\n"}
    assert not (set(output) & DRAWS) - allowed


def test_no_markup_emoji_or_link_of_rich_is_read_from_a_text():
    text = "[red]x[/red] :smile: [link=http://x]y[/link] 123 'quoted' http://example.org"
    output = terminal.render([terminal.paragraph(text), terminal.table(["a"], [(text,)])], 140, True)
    assert output.count(text) == 2


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("colour", [False, True])
def test_a_command_longer_than_the_terminal_stays_one_line(width, colour):
    words = "rm -r -- " + " ".join(f"/data/aerie/caches/some-long-name-{number}" for number in range(20))
    output = terminal.render([terminal.paragraph("fix: remove them"), terminal.command(words)], width, colour)
    assert f"\n    {words}\n" in output


@pytest.mark.parametrize("width", [60, 80, 140])
def test_words_are_never_broken_and_lines_fit(width):
    path = "/srv/" + "x" * 200
    sentence = "every line of this text ends between two words of it and " * 6
    output = terminal.render([terminal.paragraph(f"{sentence}{path} and more", indent=4)], width)
    lines = output.splitlines()
    assert " ".join(output.split()) == f"{sentence}{path} and more"
    assert all(len(line) <= width for line in lines if path not in line)
    assert max(len(line) for line in lines if path not in line) > width - 15
    assert [line[:6].count(" ") for line in lines[:2]] == [4, 6]


def columns_of(width: int, **options: object) -> list[str]:
    columns = ["host", *terminal.figures("errors", "not judged"), "what it is"]
    rows = [
        ("gpu-01", "1 234", "–", "8 × NVIDIA RTX PRO 6000 Blackwell Server Edition, driver 580.105.08, Ubuntu 24.04.3 LTS"),
        ("gpu-02", "5", "–", "/a/path/without/any/space/" * 8 + "its-end"),
    ]
    return terminal.render([terminal.table(columns, rows, **options)], width).splitlines()  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_table_fits_keeps_its_figures_and_breaks_no_word(width):
    lines = columns_of(width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "1 234" in text and "580.105.08," in text and "Blackwell" in text
    assert lines[-1].endswith("its-end") and "…" in lines[-1], "a path is shortened at its start"


def test_a_table_that_is_too_wide_for_the_terminal_becomes_paragraphs_with_every_figure():
    columns = ["arm", *terminal.figures(*(f"figure {number}" for number in range(12)))]
    row = ("baseline", *(f"{number}23.456" for number in range(12)))
    lines = terminal.render([terminal.table(columns, [row, row], gaps={1})], 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert all(f"{number}23.456" in "\n".join(lines) for number in range(12))
    assert "" in lines


def test_characters_of_two_columns_are_measured_as_two():
    lines = terminal.render([terminal.table(["a", *terminal.figures("b")], [("漢字", "1"), ("abcd", "2")])], 80).splitlines()
    assert lines[1:] == ["漢字  1", "abcd  2"]


def test_colour_is_only_there_where_it_is_asked_for_and_says_how_severe_something_is():
    parts = [terminal.paragraph([terminal.severity(level), ("  id", None)]) for level in ("error", "warning", "note")]
    assert terminal.render(parts, 80) == "ERROR  id\nWARNING  id\nnote  id\n"
    error, warning, note = terminal.render(parts, 80, colour=True).splitlines()
    assert "31m" in error and "33m" in warning and "36m" in note


@pytest.mark.parametrize(
    ("columns", "terminal_columns", "width"),
    [(None, None, 100), ("120", None, 120), ("7", None, 60), ("x", None, 100), ("120", 80, 80), (None, 300, 140)],
)
def test_the_width_is_the_terminal_s_within_what_reads_well(monkeypatch, columns, terminal_columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(terminal, "_columns_of_terminal", lambda: None)
    monkeypatch.setattr(terminal, "_COLUMNS_AT_START", terminal_columns)
    assert terminal.terminal_width() == width


def test_a_summary_s_plain_data_is_read_whatever_it_holds():
    entries = [
        None,
        3,
        "text",
        {"text": ""},
        {"style": "error"},
        {"text": 5, "style": "none such"},
        {"command": "x"},
        {"text": "page", "path": "/y" * 80},
    ]
    assert terminal.render(terminal.from_data(entries), 80) == f"5\n    x\npage: {'/y' * 80}\n"
    assert terminal.from_data("text") == terminal.from_data(None) == []


@pytest.mark.parametrize(("text", "cleaned"), HOSTILE.values(), ids=HOSTILE)
def test_progress_of_a_host_s_work_is_one_clean_line(capfdbinary, text, cleaned):
    action = object.__new__(detached.DetachedAction)
    progress = {"number": 1, "started": 0, "time": 65, "message": text}
    answer = json.dumps({"progress": progress, "result": {"ok": True}, "running": True})
    action._low_level_execute_command = lambda *_, **__: {"stdout": answer}
    action._python = lambda _: "python3"
    assert action._follow("/job", {"inventory_hostname": f"gpu-1{ESC}[31m"}) == {}
    output = capfdbinary.readouterr().out.decode()
    assert output == f"  gpu-1  01:05  {cleaned}\n"
