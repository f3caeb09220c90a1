#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: host_lease
short_description: Hold a host while a run changes it
description:
  - Takes or gives back the lease of a host, a small file below O(root) that names a run, its user and controller, and when it ends.
  - A live lease of another run is refused; one that expired, or whose run has died on this controller, is taken over with a warning.
  - Every module of this project that changes a host renews the lease that it is given while it works, and stops when it was taken
    away.
  - A lease file that can't be read names nobody; it is taken over with a warning. A directory in its place is refused, and moved
    aside with O(breaking).
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root).
    type: path
    required: true
  state:
    description: V(present) takes or renews the lease, V(absent) gives it back.
    type: str
    choices: [present, absent]
    default: present
  seconds:
    description: How long the lease lasts without being renewed, in seconds.
    type: int
    default: 900
  breaking:
    description: Take the lease even from a live run.
    type: bool
    default: false
  owner:
    description: Who asks; the action plugin of this module fills it in.
    type: dict
  dead_runs:
    description: Runs that the controller knows to have ended; the action plugin of this module fills it in.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Says whether the lease could be taken, and takes none.
    support: full
  diff_mode:
    description: A lease is no configuration; there is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Hold the host while it is changed
  host_lease:
    root: /opt/aerie
  register: lease

- name: Give it back
  host_lease:
    root: /opt/aerie
    state: absent
"""

RETURN = r"""
lease:
  description: The owner that was written; pass it to the modules that change the host.
  returned: success
  type: dict
  sample: {run: "4711.123456.9f86d081884c7d65", user: ops, controller: deploy01}
message:
  description: Whose lease was taken over, and why.
  returned: when another run's lease was taken over
  type: str
  sample: "took over the lease of ops on deploy01 (run 4711.123456.9f86d081884c7d65): it expired"
holder:
  description: Who holds the host.
  returned: failure
  type: dict
  sample: {run: "4711.123456.9f86d081884c7d65", user: ops, controller: deploy01}
"""

from pathlib import Path

from ansible.module_utils.aerie import lease
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "seconds": {"type": "int", "default": lease.DEFAULT_SECONDS},
            "breaking": {"type": "bool", "default": False},
            "owner": {"type": "dict"},
            "dead_runs": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    path = HostPaths(Path(module.params["root"])).lease
    owner = module.params["owner"]
    asked = {"breaking": module.params["breaking"], "dead_runs": tuple(module.params["dead_runs"])}
    message = None
    try:
        if module.params["state"] == "absent":
            if not module.check_mode and path.parent.is_dir():
                lease.release(path, lease.Owner.of(owner))
        elif module.check_mode:
            message = lease.check(path, lease.Owner.of(owner), **asked)
        else:
            message = lease.acquire(path, lease.Owner.of(owner), module.params["seconds"], **asked)
    except AerieError as error:
        module.fail_json(msg=str(error), holder=lease.holder(path))
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename}: {error.strerror}: can't keep a lease there; choose another aerie_root, or become a user who may write"
        )
    # A lease is coordination, not configuration: holding it is no change of the host.
    module.exit_json(changed=False, lease=owner, **({"message": message} if message else {}))


if __name__ == "__main__":
    main()
