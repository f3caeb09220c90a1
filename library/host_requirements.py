#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: host_requirements
short_description: Compare a host's survey with what is to run there
description:
  - Fails with everything that stands in the way (GPU, ports, Python, disk, memory, models, the root directory) at once.
  - Runs on the controller over the survey of M(gpu_host_info), so the host is not asked again and nothing is touched.
author: Aerie contributors (!UNKNOWN)
options:
  info:
    description:
      - What M(gpu_host_info) returned, asked after O(root), C(current) below it and the path of each model on the host.
    type: dict
    required: true
  profile:
    description: Whether GPUs are needed.
    type: str
    choices: [cpu, cuda]
    required: true
  root:
    description: Aerie's directory on the host.
    type: path
    required: true
  python:
    description: The interpreter that environments are made with.
    type: str
    default: python3
  adopt_environment:
    description: The interpreter that is used with its packages as they are, as in C(sglang_release_adopt_environment).
    type: str
  adopt_tree:
    description: The checkout that is used in place, as in C(sglang_release_adopt), on the packages of O(adopt_environment) or O(python).
    type: str
  version:
    description: The SGLang version that is to run, as in C(sglang_release_version); with it, a Python that it has no build for is refused.
    type: str
  instances:
    description: The instances that are to run, as in C(sglang_server_instances).
    type: dict
    default: {}
  models:
    description: The catalog of models, as in C(sglang_models_catalog).
    type: dict
    default: {}
  disk_gib:
    description: Room needed at O(root) in GiB, instead of the profile's need.
    type: float
  memory_gib:
    description: Memory needed in GiB, instead of the profile's need.
    type: float
attributes:
  action:
    description: Runs on the controller.
    support: full
  check_mode:
    description: Compares the same and changes nothing, as always.
    support: full
  diff_mode:
    description: There is nothing to show, since nothing changes.
    support: none
"""

EXAMPLES = r"""
- name: Refuse a host that can't take the deployment
  host_requirements:
    info: "{{ __gpu_host_info }}"
    profile: "{{ aerie_profile }}"
    root: "{{ aerie_root }}"
    instances: "{{ sglang_server_instances }}"
"""

RETURN = r"""
notes:
  description: What is only worth a warning.
  returned: always
  type: list
  elements: str
  sample: []
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "info": {"type": "dict", "required": True},
            "profile": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "root": {"type": "path", "required": True},
            "python": {"type": "str", "default": "python3"},
            "adopt_environment": {"type": "str"},
            "adopt_tree": {"type": "str"},
            "version": {"type": "str"},
            "instances": {"type": "dict", "default": {}},
            "models": {"type": "dict", "default": {}},
            "disk_gib": {"type": "float"},
            "memory_gib": {"type": "float"},
        },
        supports_check_mode=True,
    )
    module.fail_json(msg="host_requirements runs on the controller: add plugins/action of this project to action_plugins in ansible.cfg")


if __name__ == "__main__":
    main()
