#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: host_prune
short_description: Free what nothing on a host needs any more
description:
  - Frees releases beyond the newest verified ones, and what only they needed - environments, packages, caches, manifests and kept
    originals; further caches that were set aside, logs that another has replaced, directories of jobs that ended, and what killed runs
    left half made.
  - Never a release that C(current), C(previous) or a link below C(pins) means, that is in O(protect), or that a process uses; nor what
    such a release needs; nor results of measurements; nor anything outside O(root) or behind a symbolic link.
  - A run that is killed leaves nothing that looks whole, and the next one goes on.
  - The action plugin of this module shows everything with its size before anything goes.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root). One without C(releases) in it is left alone.
    type: path
    required: true
  keep:
    description: How many of the newest verified releases stay, those that stay anyway included.
    type: int
    default: 3
  protect:
    description: Ids of releases that stay.
    type: list
    elements: str
    default: []
  look:
    description: Only look, as in check mode; so the action plugin has something to show first.
    type: bool
    default: false
  lease:
    description: The lease of this run on the host, as M(host_lease) returned it; renewed before each thing that goes.
    type: dict
attributes:
  check_mode:
    description: Says what would go, and frees nothing.
    support: full
  diff_mode:
    description: Lists what goes.
    support: full
"""

EXAMPLES = r"""
- name: Keep two releases, and one that is still being looked into
  host_prune:
    root: /opt/aerie
    keep: 2
    protect: [0.5.15.post1-3b1f4a9c02de]
"""

RETURN = r"""
freed_bytes:
  description: How much disk was, or in check mode would be, freed. A file with several names counts when its last one goes.
  returned: success
  type: int
  sample: 120586240
removed:
  description:
    - All that went, or in check mode would go, in that order.
    - C(files) is how many paths the entry stands for, and C(path) the first of them.
  returned: success
  type: list
  elements: dict
  sample: [{kind: release, path: releases/0.5.23-571f039bbac0, files: 1, bytes: 120586240, why: not one of the 3 newest}]
kept:
  description: What could be thought unneeded and stays, and why.
  returned: success
  type: list
  elements: dict
  sample: [{kind: release, path: releases/0.5.23-77ab01c4de55, why: current}]
notes:
  description: What was left alone altogether, and why.
  returned: success
  type: list
  elements: str
  sample: [/opt/aerie/environments is a symbolic link - what it leads to is left alone]
table:
  description: What the action plugin showed.
  returned: success
  type: str
  sample: "gpu-01: 115 MiB to free"
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import lease
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import prune
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "keep": {"type": "int", "default": 3},
            "protect": {"type": "list", "elements": "str", "default": []},
            "look": {"type": "bool", "default": False},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**pruned(module))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {module.params['root']}?")


def pruned(module: AnsibleModule) -> dict[str, Any]:
    """Plan, and unless only asked to look, carry that out."""
    asked = module.params
    paths = HostPaths(Path(asked["root"]))
    wanted = {"keep": asked["keep"], "protect": asked["protect"]}
    planned = prune.plan(paths, **wanted)
    if planned.items and not module.check_mode and not asked["look"]:
        lease.renew_if_given(paths.lease, asked["lease"])
        with prune.alone(paths):
            planned = prune.plan(paths, **wanted)
            prune.apply(paths, planned, lambda: lease.renew_if_given(paths.lease, asked["lease"]))
    found = prune.as_result(planned, paths)
    before = "".join(f"{item['path']} ({item['why']})\n" for item in found["removed"])
    return found | {"changed": bool(planned.items), "diff": {"before": before, "after": ""}}


if __name__ == "__main__":
    main()
