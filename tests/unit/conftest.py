"""The cores are ansible.module_utils.aerie, as on a host; modules and the controller's package are importable by name."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def a_module_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all share one: a controller shows warnings instead of returning them, and warnings of other tests would be returned too."""
    monkeypatch.setattr(_internal, "is_controller", False)
    warnings._global_warnings.clear()
    warnings._global_deprecations.clear()
