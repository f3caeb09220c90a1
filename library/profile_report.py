#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: profile_report
short_description: Say where a decode cycle goes, on the terminal, as a page and as JSON
description:
  - Reads the files of one profile run that M(sglang_profile) has brought to C(<results>/profile/<run_id>/), of all hosts and arms.
  - Prints a table, writes C(profile.json) beside the files, and one self-contained HTML page; the same files give the same bytes.
  - Runs on the controller, in its action plugin, once for all hosts of a play. Needs matplotlib there.
author: Aerie contributors (!UNKNOWN)
options:
  results:
    description: Directory of the results, on the controller.
    type: path
    required: true
  run_id:
    description: The run to report.
    type: str
    required: true
  path:
    description: Where the page is written. Left out, C(profile.html) in O(results).
    type: path
attributes:
  check_mode:
    description: Prints what there is, and writes nothing.
    support: full
  diff_mode:
    description: The page isn't for reading as a diff.
    support: none
  action:
    description: All work happens in the action plugin.
    support: full
"""

EXAMPLES = r"""
- name: Show the profile
  profile_report:
    results: "{{ aerie_results }}"
    run_id: 20260601T220000Z
"""

RETURN = r"""
path:
  description: The page.
  returned: success
  type: str
  sample: /srv/aerie/results/profile.html
json:
  description: The figures, as C(docs/reference/profile.md) describes them.
  returned: success
  type: str
  sample: /srv/aerie/results/profile/20260601T220000Z/profile.json
table:
  description: What was printed.
  returned: success
  type: str
  sample: "arm  clients  tok/s  cycle ms"
levels_failed:
  description: How many levels gave no figures.
  returned: success
  type: int
  sample: 0
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Only reached where Ansible doesn't find the action plugin of the same name."""
    module = AnsibleModule(
        argument_spec={
            "results": {"type": "path", "required": True},
            "run_id": {"type": "str", "required": True},
            "path": {"type": "path"},
        },
        supports_check_mode=True,
    )
    module.fail_json(
        msg="profile_report works in its action plugin, which was not found: set action_plugins to plugins/action, as ansible.cfg does"
    )


if __name__ == "__main__":
    main()
