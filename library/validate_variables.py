#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: validate_variables
short_description: Check every setting of every role at once
description:
  - Checks a host's variables against the argument specifications of all roles, then what types can't tell, such as names
    that must exist, ports that must differ, or a version that must have a lock.
  - Refuses a variable that has a role's prefix and that no role knows, with near matches and the place where it was set.
  - Runs on the controller, returns all problems and fails for none of them, and touches nothing. M(validation_report) fails for
    those of all hosts at once.
author: Aerie contributors (!UNKNOWN)
options:
  project:
    description:
      - The project whose C(roles), C(experiments), C(patches) and C(versions.yml) are read.
      - The default is the one that this module is part of.
    type: path
attributes:
  action:
    description: Runs on the controller.
    support: full
  check_mode:
    description: Checks the same and changes nothing, as always.
    support: full
  diff_mode:
    description: There is nothing to show, since nothing changes.
    support: none
"""

EXAMPLES = r"""
- name: Check every setting of every role
  validate_variables:
  register: checked
"""

RETURN = r"""
checked:
  description: How many settings were checked.
  returned: success
  type: int
  sample: 29
problems:
  description: What is wrong with the settings, a sentence each; empty where they can be used.
  returned: success
  type: list
  elements: str
  sample: ["sglang_server_instances.main.arm: 'eagel3' is not one of sglang_server_arms (baseline and eagle3); did you mean 'eagle3'?"]
overview:
  description: What the settings amount to, its instances and its experiment; null where there is a problem.
  returned: success
  type: dict
  sample:
    instances:
      - {instance: main, arm: eagle3, speculation: EAGLE3 3/1/4, model: target, gpus: CPU, port: "30000", version: 0.5.23}
    experiment: {name: demo, instance: main, arms: [baseline, eagle3], starts: 6, cells: 21, seconds: 300, limit_seconds: 11700}
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(argument_spec={"project": {"type": "path"}}, supports_check_mode=True)
    module.fail_json(msg="validate_variables runs on the controller: add plugins/action of this project to action_plugins in ansible.cfg")


if __name__ == "__main__":
    main()
