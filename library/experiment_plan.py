#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: experiment_plan
short_description: Check an experiment and plan its launches
description:
  - Reads an experiment, checks all of it and its data set, and returns the launches that follow, in order.
  - Runs on the controller and touches no host, so a fault in an experiment is told before anything starts.
author: Aerie contributors (!UNKNOWN)
options:
  experiment:
    description:
      - The name of a file of C(experiments/) without its ending, or a path to one; a relative path starts at the project's directory.
      - Or the experiment itself, as a dictionary; its format is in C(docs/reference/experiment.md).
    type: raw
    required: true
  arms:
    description: The host's arms by name, as in C(sglang_server_arms).
    type: dict
    required: true
  instances:
    description: The host's instances by name, as in C(sglang_server_instances).
    type: dict
    default: {}
  instance:
    description: The instance to measure; null takes the experiment's own, else the only one that there is.
    type: str
attributes:
  action:
    description: Runs on the controller.
    support: full
  check_mode:
    description: Plans the same, as planning changes nothing.
    support: full
  diff_mode:
    description: There is nothing to show, since nothing changes.
    support: none
"""

EXAMPLES = r"""
- name: Plan the demo experiment
  experiment_plan:
    experiment: demo
    arms: "{{ sglang_server_arms }}"
    instances: "{{ sglang_server_instances }}"
  register: __plan
"""

RETURN = r"""
experiment:
  description: The experiment with every default filled in.
  returned: success
  type: dict
  sample: {name: demo, arms: [baseline, eagle3], repeats: 2, order: abba}
identity:
  description: A hash of all that is measured, the arms' settings and the data set's content included.
  returned: success
  type: str
  sample: 0f343b0931126a20f133d67c2b018a3b5c2a1f0c7a6f3f9d2b0f8a4f5d3f7a11
instance:
  description: The instance to measure.
  returned: success
  type: str
  sample: demo
launches:
  description: The launches in order, each with its cells.
  returned: success
  type: list
  elements: dict
  sample:
    - launch: 1
      arm: baseline
      repeat: 1
      cells_before: 0
      cells_total: 15
      cells: [{id: baseline-c1-r1, arm: baseline, concurrency: 1, repeat: 1, kind: measure, seed: 113, requests: 24}]
dataset:
  description: The data set's file on the controller and its hash; null where the experiment needs no file.
  returned: success
  type: dict
  sample: {path: experiments/prompts/standard-library.json, sha256: 9f86d081884c7d65, entries: 64, usable: 64}
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "experiment": {"type": "raw", "required": True},
            "arms": {"type": "dict", "required": True},
            "instances": {"type": "dict", "default": {}},
            "instance": {"type": "str"},
        },
        supports_check_mode=True,
    )
    module.fail_json(msg="experiment_plan runs on the controller: add plugins/action of this project to action_plugins in ansible.cfg")


if __name__ == "__main__":
    main()
