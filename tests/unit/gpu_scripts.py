"""Scripts of tests/gpu/dynamic as modules, for tests of what they say."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parents[1] / "gpu/dynamic"


@pytest.fixture(scope="module", autouse=True)
def beside() -> Iterator[None]:
    """The scripts import each other by name, as they do when they are run."""
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


def named(name: str, directory: Path = HERE) -> ModuleType:
    path = directory / f"{name}.py"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
