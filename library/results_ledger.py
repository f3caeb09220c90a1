#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: results_ledger
short_description: Keep the ledger of all records in step with the results directory
description:
  - Puts every C(record.json) below a results directory into one SQLite file, for questions in SQL.
  - The ledger is a pure function of these files. A missing or damaged one, or one of an older schema, is made again with the same content.
  - A file that isn't one of Aerie's records is reported in RV(problems); the others are kept.
  - Runs where the results lie, which is the controller.
author: Aerie contributors (!UNKNOWN)
options:
  results:
    description: Directory of the results.
    type: path
    required: true
  ledger:
    description: The ledger's file. Left out, C(ledger.sqlite) in O(results).
    type: path
  state:
    description:
      - V(present) makes records that are missing from their cells' raw files, and brings the ledger in step, in one transaction.
      - V(rebuilt) makes every record anew from its raw files, and a new ledger unless the present one is whole and in step.
    type: str
    choices: [present, rebuilt]
    default: present
attributes:
  check_mode:
    description: Says what would change, and refuses what the change would refuse.
    support: full
  diff_mode:
    description: Lists the records that come, change and go.
    support: full
"""

EXAMPLES = r"""
- name: Bring the ledger in step with the records
  results_ledger:
    results: "{{ aerie_results }}"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
ledger:
  description: The ledger's file.
  returned: success
  type: str
  sample: /srv/aerie/results/ledger.sqlite
records:
  description: How many records the ledger holds, or in check mode would hold.
  returned: success
  type: int
  sample: 28
runs:
  description: How many runs these belong to.
  returned: success
  type: int
  sample: 2
added:
  description: How many records came.
  returned: success
  type: int
  sample: 14
updated:
  description: How many records changed.
  returned: success
  type: int
  sample: 0
removed:
  description: How many records went because their file did.
  returned: success
  type: int
  sample: 0
made:
  description: Records that were made from a cell's raw files, since they were missing or, with O(state=rebuilt), said something else.
  returned: success
  type: list
  elements: str
  sample: [demo/20260102T030405Z/gpu-01/eagle3-c1-r1/record.json]
remade:
  description: Why the file was made anew; null where it wasn't.
  returned: success
  type: str
  sample: there is none yet
problems:
  description: Files that aren't records, and why.
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

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import collection, ledger
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "results": {"type": "path", "required": True},
            "ledger": {"type": "path"},
            "state": {"type": "str", "choices": ["present", "rebuilt"], "default": "present"},
        },
        supports_check_mode=True,
    )
    results = Path(module.params["results"])
    rebuilding = module.params["state"] == "rebuilt"
    file = Path(module.params["ledger"] or results / ledger.LEDGER_NAME)
    try:
        remade = collection.remake(results, everything=rebuilding, write=not module.check_mode)
        wanted = ledger.scan(results)
        change = ledger.plan(file, wanted)
        if change.any and not module.check_mode:
            if rebuilding:
                ledger.rebuild(file, wanted)
            else:
                ledger.apply(file, wanted, change)
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"the ledger {file} can't be written: {error.strerror}: {error.filename}")
    for cell in remade.problems:
        module.warn(f"no record can be made: {cell}")
    for problem in wanted.problems:
        module.warn(f"left out of the ledger: {problem}")
    module.exit_json(
        changed=change.any or bool(remade.changed),
        made=list(remade.changed),
        ledger=str(file),
        records=len(wanted.records),
        runs=len(ledger.runs(wanted)),
        added=len(change.added),
        updated=len(change.updated),
        removed=len(change.removed),
        remade=change.remake,
        problems=[asdict(problem) for problem in wanted.problems],
        diff={
            "before_header": str(file),
            "after_header": str(file),
            "before": "".join(f"{path}\n" for path in sorted((*change.removed, *change.updated))),
            "after": "".join(f"{path}\n" for path in sorted((*change.added, *(f"{path} (changed)" for path in change.updated)))),
        },
    )


if __name__ == "__main__":
    main()
