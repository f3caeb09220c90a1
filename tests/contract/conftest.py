from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import ansible.module_utils
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "plugins"), str(ROOT / "tools"), str(Path(__file__).parent)]
if str(ROOT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

SLICE = {
    *("0.5.9", "0.5.10.post1", "0.5.12.post1", "0.5.15.post1", "0.5.18", "0.5.20", "0.5.23"),  # SGLang
    *("0.6.12", "0.6.18", "0.7.2"),  # FlashInfer
}
"""The releases of ``--wheels=slice``: a few of each shape that the sources have had. All of them are a download of 800 MB."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--wheels") == "all":
        return
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    left_out = [item for item in ours if any(version not in SLICE for version in versions_of(item))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def versions_of(item: pytest.Item) -> Iterator[str]:
    """Yield the releases that a contract test needs, by its parameters."""
    for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
        if name in ("version", "flashinfer"):
            yield str(value)
        elif name == "source" and "wheel" in value:
            yield value["wheel"].split()[1]
