"""The cores are ansible.module_utils.aerie, as on a host; modules and the controller's package are importable by name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import ansible.module_utils
import pytest
from ansible.module_utils import _internal
from ansible.module_utils.common import warnings

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "library"), str(ROOT / "plugins"), str(Path(__file__).parent)]
if str(ROOT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

from ansible.module_utils.aerie.host.hosts import LiveHost  # noqa: E402


@pytest.fixture
def live_host(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> LiveHost:
    """A live host with the files of a recorded container, and with the test's own directory."""
    root = tmp_path_factory.mktemp("live")
    shutil.copytree(ROOT / "tests/fixtures/hosts/container", root, dirs_exist_ok=True)
    directory = root / str(tmp_path).lstrip("/")
    directory.parent.mkdir(parents=True)
    directory.symlink_to(tmp_path)
    return LiveHost(root=root)


@pytest.fixture(autouse=True)
def a_module_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all share one: a controller shows warnings instead of returning them, and warnings of other tests would be returned too."""
    monkeypatch.setattr(_internal, "is_controller", False)
    warnings._global_warnings.clear()
    warnings._global_deprecations.clear()
