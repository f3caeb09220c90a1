#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: collect_results
short_description: Make records of what benchmark cells left, and bring them to the controller
description:
  - Turns every cell of a host's runs into one C(record.json) beside its raw files, which are only read.
  - The action plugin then brings raw files and records to C(<dest>/<experiment>/<run_id>/<host>/<cell>/) in one transfer, checks
    their hashes and puts them in place atomically. What is there already, with the same content, is not fetched again.
  - The controller decides about these places. The host is its name in the inventory, and a cell that says otherwise is not taken.
    A cell that is damaged, or not what a cell should be, is one of the RV(problems), and the others are brought.
  - The same raw files give the same record, byte for byte.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that holds everything this project makes there.
    type: path
    required: true
  run_id:
    description: The run to collect; null collects every run of the host.
    type: str
  dest:
    description: The directory on the controller that results are kept in. Null brings nothing.
    type: path
  fetch_limits:
    description:
      - How much is brought at once, at most, with C(gib) (16) and C(files) (20000). A host that says more, or sends more, is refused.
        The action plugin uses it.
    type: dict
    default: {}
  archive:
    description: Where to put an archive of O(wanted) on the host. The action plugin uses it.
    type: path
  wanted:
    description: The files of O(archive), relative to the runs' directory. The action plugin uses it.
    type: list
    elements: str
    default: []
  lease:
    description: The lease of this run, as M(host_lease) returned it.
    type: dict
attributes:
  check_mode:
    description: Says which records would be made and which files brought.
    support: full
  diff_mode:
    description: A record is derived; its raw files tell more than a diff of it.
    support: none
"""

EXAMPLES = r"""
- name: Bring what the run left
  collect_results:
    root: "{{ aerie_root }}"
    run_id: 20260601T220000Z
    dest: "{{ aerie_results }}"
"""

RETURN = r"""
records:
  description: The records, in order of run and cell. Format in C(docs/reference/record.md).
  returned: success
  type: list
  elements: dict
  sample: [{schema: aerie-record/1, cell: eagle3-c4-r1, status: completed}]
written:
  description: The records that were, or in check mode would be, newly made on the host.
  returned: success
  type: list
  elements: str
  sample: [20260601T220000Z/eagle3-c4-r1]
files:
  description: All files of the cells, with size, sha256 and, where O(dest) is given, their place on the controller.
  returned: success
  type: list
  elements: dict
  sample:
    - path: 20260601T220000Z/eagle3-c4-r1/outcome.json
      place: demo/20260601T220000Z/gpu-01/eagle3-c4-r1/outcome.json
      bytes: 140
      sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
problems:
  description: Cells that were left out, and why.
  returned: success
  type: list
  elements: str
  sample: []
fetched:
  description: The files that were, or in check mode would be, brought to O(dest).
  returned: when O(dest) is given
  type: list
  elements: str
  sample: [demo/20260601T220000Z/gpu-01/eagle3-c4-r1/outcome.json]
"""

from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.measuring import collection
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "run_id": {"type": "str"},
            "dest": {"type": "path"},
            "fetch_limits": {"type": "dict", "default": {}},
            "archive": {"type": "path"},
            "wanted": {"type": "list", "elements": "str", "default": []},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    paths = HostPaths(Path(module.params["root"]))
    try:
        if module.params["archive"]:
            collection.archive(paths.runs, module.params["wanted"], Path(module.params["archive"]))
            module.exit_json(changed=False)
        if not module.check_mode:
            renew_if_given(paths.lease, module.params["lease"])
        found = collection.collect(paths.runs, module.params["run_id"], write=not module.check_mode)
    except AerieError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=bool(found.written),
        records=list(found.records),
        written=list(found.written),
        files=list(found.files),
        problems=list(found.problems),
    )


if __name__ == "__main__":
    main()
