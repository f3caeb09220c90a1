#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: tree_users_info
short_description: See which foreign processes use a source tree that is to be patched in place
description:
  - A Python process uses the tree if its working directory, a word of its command line or an entry of its PYTHONPATH lies in it, or if
    it runs SGLang with O(python). Processes that SGLang renamed count too.
  - The servers of O(instances) are not foreign, as they are stopped before a patch. Nor is this module, or what started it.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: Aerie's root directory on the host (C(aerie_root)).
    type: path
    required: true
  path:
    description: The tree.
    type: path
    required: true
  python:
    description: The interpreter that imports from the tree.
    type: path
  instances:
    description: Names of the instances of O(root) that will be stopped.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Only reads, so it does the same.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: See who else uses the checkout
  tree_users_info:
    root: /opt/aerie
    path: /sgl-workspace/sglang/python
    python: /opt/venv/bin/python
    instances: [main]
  register: users
"""

RETURN = r"""
foreign:
  description: The processes that use the tree.
  returned: success
  type: list
  elements: dict
  sample: [{pid: 4711, title: python -m sglang.launch_server --port 30000, why: runs SGLang with /opt/venv/bin/python}]
msg:
  description: What to do about them.
  returned: when there are any
  type: str
  sample: >-
    /sgl-workspace/sglang/python must be patched in place, and is used by process 4711 (python -m sglang.launch_server), which works in
    /sgl-workspace/sglang/python. Nothing was touched. Stop that, and run again
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.patching import tree_users
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.words import listing
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "path": {"type": "path", "required": True},
            "python": {"type": "path"},
            "instances": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    tree, python = Path(module.params["path"]), module.params["python"]
    paths = HostPaths(Path(module.params["root"]))
    users = tree_users.foreign(paths, tree, Path(python) if python else None, module.params["instances"])
    facts: dict[str, Any] = {"foreign": [{"pid": user.process.pid, "title": user.title, "why": user.why} for user in users]}
    if users:
        facts["msg"] = f"{tree} must be patched in place, and is used by {listing(users)}. Nothing was touched. Stop that, and run again"
    module.exit_json(changed=False, **facts)


if __name__ == "__main__":
    main()
