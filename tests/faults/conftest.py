"""How much of the suite runs (``--faults``), and where it works."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ansible.module_utils
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests/contract"), str(ROOT / "tools"), str(ROOT / "plugins")]
if str(ROOT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

import stepping  # noqa: E402
from package import Site  # noqa: E402

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session", autouse=True)
def ptrace_works() -> None:
    reason = stepping.forbidden()
    if reason:
        pytest.fail(f"{reason}: allow it (docker run --cap-add SYS_PTRACE; sysctl kernel.yama.ptrace_scope=1)")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where syncing is free; a killed process leaves there what it would leave on a disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="aerie-faults-") as directory:
        yield Path(directory)


@pytest.fixture
def site(memory: Path) -> Site:
    return Site(memory)


@pytest.fixture(params=["exchanged", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to replace files: by exchanging a directory, and where that can't be had."""
    if request.param == "one by one":
        without_exchange(monkeypatch)
    return str(request.param)


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Iterator[dict[str, int]]:
    """What a test counts is summed up in the last lines."""
    here: dict[str, int] = {}
    yield here
    for name, number in here.items():
        record_property(f"counted {name}", number)


@pytest.fixture
def everything(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--faults") == "all")


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    from ansible.module_utils.aerie.patching import twin

    def refuse(one: Path, other: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(one))

    monkeypatch.setattr(twin, "exchange", refuse)
