"""For all tests: tests/runs.py is importable; tests get the marker of their directory, and a place among parallel ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "targets"), str(TESTS / "e2e")]
TOGETHER = {
    "the demo's host": ("e2e/test_adopted.py", "e2e/test_demo.py", "e2e/test_profile.py", "e2e/test_refused_input.py"),
    "booted hosts": ("targets/",),
    "hosts of their own on this machine": ("e2e/",),
}
"""Tests that share a host, so that one worker runs them one after the other; in this order, the longest first."""
not_run: dict[str, list[str]] = {}
counted: dict[str, int] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", choices=("slice", "all"), default="slice", help="how many of the points in tests/faults to try")
    parser.addoption("--wheels", choices=("slice", "all"), default="slice", help="how many releases tests/contract downloads and tries")
    parser.addoption("--long", action="store_true", help="whole runs that a test run leaves out otherwise, too")


def pytest_configure(config: pytest.Config) -> None:
    import isolated_machine
    import ports

    config.pluginmanager.register(isolated_machine)
    if not hasattr(config, "workerinput"):  # of parallel workers, one may end long before the others
        for listener in ports.occupy():
            config.add_cleanup(listener.close)


def shared(file: str) -> str | None:
    """Return what host the tests of a file, relative to this directory, share with others."""
    return next((host for host, files in TOGETHER.items() if file.startswith(files)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole, and so do those that share a host. (Its own marks for that don't work with this pytest.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return shared(file.removeprefix("tests/")) or file

    return Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(TESTS).parts[0]
        if directory in {"contract", "faults", "targets", "e2e"}:
            item.add_marker(directory)
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        places = {host: place for place, host in enumerate(TOGETHER)}
        items.sort(key=lambda item: places.get(shared(str(item.path.relative_to(TESTS))) or "", len(places)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        not_run.setdefault(report.longrepr[2].removeprefix("Skipped: "), []).append(report.nodeid)
    if report.when == "teardown":
        for name, number in report.user_properties:
            if name.startswith("counted "):
                counted[name.removeprefix("counted ")] = counted.get(name.removeprefix("counted "), 0) + int(str(number))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was counted, and what could not run, is said last: of all workers, by the one that has the terminal."""
    if counted:
        terminalreporter.write_line("faults: " + ", ".join(f"{number} {name}" for name, number in counted.items()))
    for reason, tests in not_run.items():
        terminalreporter.write_line(f"NOT RUN: {len(tests)} tests, such as {tests[0]}: {reason}")
