"""For all tests: tests/runs.py is importable; tests get the marker of their directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "targets")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", choices=("slice", "all"), default="slice", help="how many of the points in tests/faults to try")
    parser.addoption("--wheels", choices=("slice", "all"), default="slice", help="how many releases tests/contract downloads and tries")
    parser.addoption("--long", action="store_true", help="whole runs that a test run leaves out otherwise, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(TESTS).parts[0]
        if directory in {"contract", "faults", "targets", "e2e"}:
            item.add_marker(directory)
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
