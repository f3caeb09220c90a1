#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_report
short_description: Say what is wrong with hosts, by rules that are data
description:
  - Holds each host's survey against the rules of C(preflight/rules.yml), prints what was found, the worst first, and writes a JSON file for
    each host and one HTML page.
  - What can't be judged, because its evidence is missing, is told as such and is no finding.
  - Runs on the controller, in its action plugin, once for all hosts of a play; nothing is sent to a host.
  - Findings don't fail the task. RV(failing) names the hosts that a run should fail for.
author: Aerie contributors (!UNKNOWN)
options:
  hosts:
    description:
      - "For each host C(info), what M(gpu_host_info) returned; C(want), what the inventory wants there; and C(probes), what M(gpu_probe)
        returned, where it ran."
      - A host whose survey failed, or that was unreachable, is reported as such.
    type: dict
    required: true
  output:
    description: Directory on the controller for C(<host>.json) and C(preflight.html); with O(compare), C(comparison.*).
    type: path
    required: true
  fail_on:
    description: Name in RV(failing) hosts with findings of this severity and worse, and those that could not be asked; V(never) names none.
    type: str
    choices: [error, warning, never]
    default: error
  ignore:
    description: Rules whose findings are set apart, as ids or as mappings with C(id) and C(reason).
    type: list
    elements: raw
    default: []
  compare:
    description:
      - Two hosts, the good one first; tells what sets the other apart.
      - Each is a host of O(hosts), a JSON file of an earlier preflight, or a directory that holds a recording.
    type: list
    elements: str
    default: []
  rules:
    description: Another file of rules. Left out, C(preflight/rules.yml) of the project.
    type: path
attributes:
  action:
    description: All work happens in the action plugin.
    support: full
  check_mode:
    description: Judges and prints the same, and writes no file.
    support: full
  diff_mode:
    description: The files aren't for reading as a diff.
    support: none
"""

EXAMPLES = r"""
- name: Say what is wrong
  preflight_report:
    hosts:
      gpu-1:
        info: "{{ __gpu_host_info }}"
        want: {profile: cuda, root: /opt/aerie}
    output: "{{ aerie_results }}/preflight"
    ignore:
      - id: swappiness
        reason: other services of this host need it
"""

RETURN = r"""
changed:
  description: Whether other rules fire than in the files before. The files' measurements are new each time.
  returned: always
  type: bool
  sample: false
hosts:
  description: For each host its findings by severity, the rules that could not be judged, and why it could not be asked.
  returned: success
  type: dict
  sample:
    gpu-1:
      unreachable: null
      counts: {error: 1, warning: 0, note: 2}
      findings: {error: [bar1-small], warning: [], note: [swappiness, p2p-forced]}
      unjudged: [link-replays]
failing:
  description: The hosts that O(fail_on) is about, each with the reason in one line.
  returned: success
  type: dict
  sample: {gpu-1: "1 error: bar1-small"}
run_summary:
  description: What the run came to, as the callback plugin C(run_summary) prints it after the recap.
  returned: success
  type: list
  elements: dict
  sample: [{text: "1 of 4 hosts has errors: gpu-1 (bar1-small)", style: error}, {text: page, path: /srv/preflight.html}]
table:
  description: What was printed.
  returned: success
  type: str
  sample: "host  errors  warnings  notes"
path:
  description: The page.
  returned: success
  type: str
  sample: /srv/aerie/results/preflight/preflight.html
comparison:
  description: What sets the bad host apart from the good one; null where none was asked for.
  returned: success
  type: dict
  sample: {good: gpu-1, bad: gpu-2, only_bad: [], only_good: [], differences: [], empty: true}
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Only reached where Ansible doesn't find the action plugin of the same name."""
    module = AnsibleModule(
        argument_spec={
            "hosts": {"type": "dict", "required": True},
            "output": {"type": "path", "required": True},
            "fail_on": {"type": "str", "choices": ["error", "warning", "never"], "default": "error"},
            "ignore": {"type": "list", "elements": "raw", "default": []},
            "compare": {"type": "list", "elements": "str", "default": []},
            "rules": {"type": "path"},
        },
        supports_check_mode=True,
    )
    module.fail_json(
        msg="preflight_report works in its action plugin, which was not found: set action_plugins to plugins/action, as ansible.cfg does"
    )


if __name__ == "__main__":
    main()
