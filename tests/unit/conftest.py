"""The cores are ansible.module_utils.aerie, as on a host; modules and the controller's package are importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "library"), str(ROOT / "plugins")]
if str(ROOT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(ROOT / "module_utils"))
