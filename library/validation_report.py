#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: validation_report
short_description: Report what M(validate_variables) says of all hosts, once
description:
  - Fails with one message that names every problem of every host, each problem once with the hosts that share it.
  - Where there is none, shows the instances of all hosts (arm, speculation, model, GPUs, port, version) and the experiment of each with its
    starts, cells and length, and the next command.
  - Runs on the controller, once for all hosts of a play, and touches nothing.
author: Aerie contributors (!UNKNOWN)
options:
  hosts:
    description: By host, what M(validate_variables) returned for it.
    type: dict
    required: true
  show:
    description: Show the tables where no problem is left.
    type: bool
    default: false
attributes:
  action:
    description: Runs on the controller.
    support: full
  check_mode:
    description: Reports the same and changes nothing, as always.
    support: full
  diff_mode:
    description: There is nothing to show, since nothing changes.
    support: none
"""

EXAMPLES = r"""
- name: Check every setting of every role
  validate_variables:
  register: checked

- name: Report all settings of all hosts
  validation_report:
    hosts: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'checked'))) }}"
    show: true
  run_once: true
"""

RETURN = r"""
table:
  description: The tables as text, without colour; empty where they are not shown.
  returned: success
  type: str
  sample: |
    hosts      instance  arm     speculation   model   GPUs   port  SGLang
    localhost  main      eagle3  EAGLE3 3/1/4  target  CPU   30000  0.5.23
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={"hosts": {"type": "dict", "required": True}, "show": {"type": "bool", "default": False}},
        supports_check_mode=True,
    )
    module.fail_json(msg="validation_report runs on the controller: add plugins/action of this project to action_plugins in ansible.cfg")


if __name__ == "__main__":
    main()
