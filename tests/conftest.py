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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(TESTS).parts[0]
        if directory in {"contract", "faults", "targets", "e2e"}:
            item.add_marker(directory)
