"""Follows the installation that nvidia_packages starts on the host, which survives a cut connection."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller.detached import DetachedAction


class ActionModule(DetachedAction):
    pass
