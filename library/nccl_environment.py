#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: nccl_environment
short_description: Write NCCL's environment to the file that servers read
description:
  - Merges a profile, what a search found and the user's own variables, refuses what is known to break NCCL with reason and cure, and writes
    the rest to C(<root>/nccl.env), one C(KEY=VALUE) a line.
  - A server's start reads the file as a layer beneath C(sglang_server_environment); a change restarts an instance like any other.
  - NCCL's own files, C(/etc/nccl.conf) and C(~/.nccl.conf), are looked at too and never changed.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that holds everything this project makes there.
    type: path
    required: true
  state:
    description: V(absent) removes the file.
    type: str
    choices: [present, absent]
    default: present
  table:
    description: The profiles and rules, the content of C(nccl/profiles.yml). Needed with O(state=present).
    type: dict
    default: {}
  profile:
    description: A profile's name, or V(auto) for the one that fits the topology. Left out, none is applied.
    type: str
  environment:
    description: Variables over the profile's and the search's; null takes one away.
    type: dict
    default: {}
  tuned:
    description: What C(playbooks/tune_nccl.yml) found, its variable C(nccl_tuned).
    type: dict
    default: {}
  tuned_for:
    description: Which of the two sets of O(tuned) is taken.
    type: str
    choices: [latency, throughput]
    default: latency
  topology:
    description: What lies between the GPUs, as M(gpu_host_info) returns it.
    type: dict
    default: {}
  gpus:
    description: How many GPUs the host has.
    type: int
    default: 0
  configurations:
    description: NCCL's own files, to be looked at.
    type: list
    elements: str
    default: [/etc/nccl.conf, ~/.nccl.conf]
  lease:
    description: The lease of this run, as M(host_lease) returned it.
    type: dict
attributes:
  check_mode:
    description: Checks and compares the same, and writes nothing.
    support: full
  diff_mode:
    description: Shows the file before and after.
    support: full
"""

EXAMPLES = r"""
- name: Set NCCL for the host's topology
  nccl_environment:
    root: /opt/aerie
    table: "{{ lookup('ansible.builtin.file', 'nccl/profiles.yml') | from_yaml }}"
    profile: auto
    topology: "{{ __gpu_host_info.topology }}"
    gpus: "{{ __gpu_host_info.gpus | length }}"
"""

RETURN = r"""
path:
  description: The file.
  returned: success
  type: str
  sample: /opt/aerie/nccl.env
environment:
  description: What the file holds, or would hold.
  returned: success
  type: dict
  sample: {NCCL_P2P_LEVEL: SYS, NCCL_IB_DISABLE: "1"}
profile:
  description: The profile that was applied, null where none was.
  returned: with state present
  type: str
  sample: pcie_sockets
why:
  description: Why it was this profile.
  returned: with state present
  type: str
  sample: "pcie_sockets: the farthest pair of GPUs (0-1) has SYS between it; pairs: 1 of SYS"
origins:
  description: Where each variable came from.
  returned: with state present
  type: dict
  sample: {NCCL_P2P_LEVEL: "profile pcie_sockets"}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
            "table": {"type": "dict", "default": {}},
            "profile": {"type": "str"},
            "environment": {"type": "dict", "default": {}},
            "tuned": {"type": "dict", "default": {}},
            "tuned_for": {"type": "str", "default": "latency", "choices": ["latency", "throughput"]},
            "topology": {"type": "dict", "default": {}},
            "gpus": {"type": "int", "default": 0},
            "configurations": {"type": "list", "elements": "str", "default": ["/etc/nccl.conf", "~/.nccl.conf"]},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    paths = HostPaths(Path(module.params["root"]))
    try:
        module.exit_json(**(_present(module, paths) if module.params["state"] == "present" else _absent(module, paths)))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {module.params['root']}?")


def _present(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    given = module.params
    table = nccl.Table.of(given["table"])
    choice = nccl.choose(table, given["profile"], given["topology"], given["gpus"])
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if choice.profile:
        layers.append((f"profile {choice.profile.name}", choice.profile.environment))
    layers += [
        (f"nccl_tuned.{given['tuned_for']}", nccl.tuned_environment(given["tuned"], given["tuned_for"], given["gpus"])),
        ("nccl_environment", given["environment"]),
    ]
    environment, origins = nccl.merge(layers)
    files = {name: settings for name in given["configurations"] if (settings := nccl.configuration(Path(name)))}
    found = nccl.examine(table, environment, files, given["gpus"], origins)
    raise_all(found.errors, "NCCL can't work with this environment (nothing was touched)")
    for warning in found.warnings:
        module.warn(warning)
    told = {
        "profile": choice.profile.name if choice.profile else None,
        "why": choice.why,
        "origins": {name: origins[name] for name in environment},
        "environment": environment,
    }
    # Without a variable there is nothing to read, and a host that never had the file keeps being without.
    return _write(module, paths, nccl.text(environment) if environment else None) | told


def _absent(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    return _write(module, paths, None) | {"environment": {}}


def _write(module: AnsibleModule, paths: HostPaths, wanted: str | None) -> dict[str, Any]:
    file = nccl.path(paths.root)
    before = file.read_text() if file.exists() else None
    changed = before != wanted
    if changed and not module.check_mode:
        renew_if_given(paths.lease, module.params["lease"])
        if wanted is None:
            file.unlink()
        else:
            write_atomic(file, wanted)
    diff = {"before_header": str(file), "before": before or "", "after_header": str(file), "after": wanted or ""}
    return {"changed": changed, "path": str(file), **({"diff": diff} if changed else {})}


if __name__ == "__main__":
    main()
