"""The table says the verdict on any terminal."""

from __future__ import annotations

from ansible.module_utils.aerie.measuring import verdict
from example_records import FLASHINFER, campaign, record

from aerie_controller import terminal
from aerie_controller.terminal_reports import experiment


def lines_of(records, width: int = 100, **paths: str) -> list[str]:
    return terminal.render(experiment.parts(verdict.groups(records), paths), width).splitlines()


def row(lines: list[str], *start: str) -> list[str]:
    (found,) = [line.split() for line in lines if line.split()[: len(start)] == list(start)]
    return found


def test_each_arm_and_level_has_its_figures_in_one_row():
    lines = lines_of(campaign(FLASHINFER, repeats=1, profile=False))
    assert row(lines, "eagle3", "8") == ["eagle3", "8", "1", "771", "*", "1.22×", "–", "–", "1", "28.0", "4.52", "2.40"]
    assert row(lines, "baseline", "64") == ["baseline", "64", "8", "812", "*", "–", "–", "–", "1", "84.0", "7.26", "–"]


def test_a_failed_cell_says_why_in_one_line_and_keeps_its_log_to_the_page():
    failed = record("eagle3", 128, None) | {"reason": "the server died\nTraceback of a hundred lines"}
    text = "\n".join(lines_of([*campaign(), failed]))
    assert "eagle3-c128-r1: failed: the server died" in text
    assert "Traceback" not in text


def test_crossover_phases_failures_and_places_are_told():
    records = [*campaign(), record("eagle3", 128, None)]
    text = "\n".join(lines_of(records, results="/srv/results", report="/srv/results/report.html"))
    assert "eagle3 is faster than baseline up to about 47 clients" in text
    assert "1 of 27 cells gave no figure:\n  eagle3-c128-r1: failed: the server ran out of memory" in text
    assert row(text.splitlines(), "eagle3", "64", "16.3")[3:9] == ["74.8", "11.7", "5.5", "3.1", "1.2", "3.7"]
    assert "steps can't be told apart" in text
    assert "results: /srv/results\nreport: /srv/results/report.html" in text


def test_no_line_is_wider_than_a_hundred_columns():
    long = "an-arm-with-a-very-long-name-indeed-" * 2
    records = [*campaign({"baseline": {1: 12345.0, 4096: 98765.0}, long: {1: 23456.0, 4096: 99876.0}}), record(long, 8192, None)]
    for each in records:
        each["environment"] = {"SGLANG_SIMULATE_ACC_LEN": "2.4"}
    lines = lines_of(records)
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("an-arm") and "4096" in line for line in lines)


def test_a_name_cannot_move_the_cursor_or_forge_a_line():
    hostile = "evil\x1b[2J\x1b[31m\nbaseline  1  999999\u202e"
    text = "\n".join(
        lines_of([record("baseline", 1, 100.0), record(hostile, 1, 150.0, reason=hostile), record(hostile, 4, None, reason=hostile)])
    )
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert not any(line.startswith("baseline  1  999999") for line in text.splitlines())


def test_nothing_measured_gives_no_table():
    assert terminal.render(experiment.parts([], {"results": "/srv"}), 100) == "results: /srv\n"
