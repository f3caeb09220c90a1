#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: experiment_report
short_description: Say what an experiment's records mean, on the terminal and as one HTML page
description:
  - Compares the arms of each run, per host and concurrency, with their spread, and finds where they cross.
  - Prints a table, and writes one self-contained HTML page with plots; the same records give the same bytes.
  - Runs on the controller, in its action plugin, once for all hosts of a play; nothing is sent to a host. Needs matplotlib there.
  - Where there is no record yet, it says so and writes nothing.
author: Aerie contributors (!UNKNOWN)
options:
  results:
    description: Directory of the results, on the controller.
    type: path
    required: true
  path:
    description: Where the page is written. Left out, C(report.html) in O(results).
    type: path
  title:
    description: The page's title.
    type: str
    default: SGLang with and without EAGLE-3
  run_ids:
    description: Runs to report. Left out, the newest of each experiment.
    type: list
    elements: str
    default: []
  experiments:
    description: Experiments to report. Left out, all.
    type: list
    elements: str
    default: []
  baseline:
    description:
      - Arm to compare with.
      - Left out, the arm called V(baseline), or else the only one without speculation.
    type: str
attributes:
  check_mode:
    description: Prints the table and says whether the page would change.
    support: full
  diff_mode:
    description: The page isn't for reading as a diff.
    support: none
  action:
    description: All work happens in the action plugin.
    support: full
"""

EXAMPLES = r"""
- name: Report the newest run of every experiment
  experiment_report:
    results: "{{ aerie_results }}"

- name: Report one run under its own name
  experiment_report:
    results: "{{ aerie_results }}"
    run_ids: [20260102T030405-demo]
    path: "{{ aerie_results }}/2026-01-02.html"
"""

RETURN = r"""
path:
  description: The page.
  returned: success
  type: str
  sample: /srv/aerie/results/report.html
run_ids:
  description: The runs that were reported; empty where there is no record.
  returned: success
  type: list
  elements: str
  sample: [20260102T030405-demo]
table:
  description: What was printed.
  returned: success
  type: str
  sample: "arm  clients  tok/s  speed-up"
run_summary:
  description: Where the report is, as the callback plugin C(run_summary) prints it after the recap.
  returned: when there is a record
  type: list
  elements: dict
  sample: [{text: report (written), path: /srv/aerie/results/report.html}]
verdicts:
  description: One sentence for each arm that was compared, with what is in doubt.
  returned: success
  type: list
  elements: dict
  contains:
    experiment:
      description: The experiment.
      type: str
    host:
      description: The host.
      type: str
    run_id:
      description: The run.
      type: str
    arm:
      description: The arm that was compared with the baseline.
      type: str
    kind:
      description: V(crosses), V(faster), V(slower), V(same), V(several), V(single) (one concurrency only) or V(unknown).
      type: str
    at:
      description: Interpolated concurrency of the crossover, or null.
      type: float
    low:
      description: The crossover lies above this concurrency, as far as is settled, or null.
      type: int
    high:
      description: The crossover lies below this concurrency, as far as is settled, or null.
      type: int
    sentence:
      description: The verdict in words.
      type: str
    doubts:
      description: What the figures don't settle.
      type: list
      elements: str
  sample:
    - experiment: demo
      host: gpu-1
      run_id: 20260102T030405-demo
      arm: eagle3
      kind: crosses
      at: 47.3
      low: 32
      high: 64
      sentence: eagle3 is faster than baseline up to about 47 clients and slower from there to 64 (1.15× at 32, 0.89× at 64).
      doubts: []
failed_cells:
  description: How many of the runs' cells gave no figure.
  returned: success
  type: int
  sample: 0
problems:
  description: Files below the results that aren't records, and why.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: The file, below O(results).
      type: str
    reason:
      description: Why it was left out.
      type: str
  sample: []
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Only reached where Ansible doesn't find the action plugin of the same name."""
    module = AnsibleModule(
        argument_spec={
            "results": {"type": "path", "required": True},
            "path": {"type": "path"},
            "title": {"type": "str", "default": "SGLang with and without EAGLE-3"},
            "run_ids": {"type": "list", "elements": "str", "default": []},
            "experiments": {"type": "list", "elements": "str", "default": []},
            "baseline": {"type": "str"},
        },
        supports_check_mode=True,
    )
    module.fail_json(
        msg="experiment_report works in its action plugin, which was not found: set action_plugins to plugins/action, as ansible.cfg does"
    )


if __name__ == "__main__":
    main()
