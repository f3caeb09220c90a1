"""What Aerie's action plugins share on the controller.

Importing this makes the project's cores importable as ``ansible.module_utils.aerie`` on the controller too: Ansible only
does so for modules that it sends to hosts.
"""

from __future__ import annotations

from pathlib import Path

import ansible.module_utils

PROJECT = Path(__file__).parents[2]
"""The project's root directory."""

if str(PROJECT / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(PROJECT / "module_utils"))
