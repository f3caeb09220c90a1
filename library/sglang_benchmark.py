#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_benchmark
short_description: Run all cells of one server launch
description:
  - Measures a running instance with SGLang's own load client, on the host and over the loopback, cell after cell.
  - Each cell is warmed up, starts with an empty prefix cache, and leaves its raw files below C(runs/<run_id>/<cell>/), its outcome last.
  - The work is detached and survives a cut connection; an action plugin shows its progress.
  - A failed client, a time-out or a dead server is a recorded outcome of a cell; it fails neither the other cells nor the task.
  - A cell that the same run has completed, with the same definition, is not run again; any other attempt at it is kept in C(.superseded).
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that holds everything this project makes there.
    type: path
    required: true
  run_id:
    description: Name of the run that the cells belong to; give an earlier one to go on with it.
    type: str
    required: true
  host:
    description: The host's name in the inventory, as records tell it.
    type: str
    required: true
  instance:
    description: The instance to measure. It must be running with the launch's arm.
    type: str
    required: true
  experiment:
    description: The experiment, as M(experiment_plan) returns it.
    type: dict
    required: true
  plan:
    description: The identity of the plan, as M(experiment_plan) returns it.
    type: str
    required: true
  launch:
    description: The launch to run, one of those that M(experiment_plan) returns.
    type: dict
    required: true
  arm:
    description: The launch's arm in full, as in C(sglang_server_arms).
    type: dict
    required: true
  models:
    description: Identities of the catalog's models, as M(model_identity) returns them.
    type: dict
    default: {}
  target:
    description: The instance's model, a name of O(models).
    type: str
    required: true
  settings:
    description:
      - What the server's command follows from besides its arm, such as the instance's definition and the flags common to all.
      - Only its hash is kept; when it changes, cells of an earlier run don't count as measured.
    type: dict
    default: {}
  host_info:
    description: What M(gpu_host_info) returned; records hold its fingerprint.
    type: dict
    default: {}
  dataset:
    description:
      - The data set's V(path) and V(sha256), as M(experiment_plan) returns them; the action plugin brings the file to the host.
    type: dict
  staged_dataset:
    description: Where the action plugin has put the data set on the host.
    type: path
  api_key:
    description: The key that the server asks for.
    type: str
  client:
    description:
      - A load client to use instead of the release's own, a path on the host, C(sglang/srt/rust_extensions/_bench*.so) of an SGLang wheel
        that is built for the release's Python. Older releases ship a Python client only, which takes half a minute to start and more CPU.
    type: path
  start_failure:
    description:
      - Why the launch's server did not start. Its cells are recorded as failed for this reason, and nothing is measured.
    type: str
  lease:
    description: The lease of this run, as M(host_lease) returned it; renewed before each cell.
    type: dict
attributes:
  check_mode:
    description: Says which cells are left to measure; the instance need not run for that.
    support: full
  diff_mode:
    description: A measurement has no before and after.
    support: none
"""

EXAMPLES = r"""
- name: Measure the launch
  sglang_benchmark:
    root: "{{ aerie_root }}"
    run_id: 20260601T220000Z
    host: "{{ inventory_hostname }}"
    instance: main
    experiment: "{{ __plan.experiment }}"
    plan: "{{ __plan.identity }}"
    launch: "{{ __plan.launches[0] }}"
    arm: "{{ sglang_server_arms.baseline }}"
    target: kimi-k2.5
    dataset: "{{ __plan.dataset }}"
"""

RETURN = r"""
cells:
  description: What became of each cell. One that was completed before is marked V(earlier).
  returned: when cells ran
  type: list
  elements: dict
  sample: [{id: eagle3-c4-r1, status: completed, reason: null, earlier: false}]
cells_completed:
  description: How many of the cells are complete.
  returned: when cells ran
  type: int
  sample: 6
cells_failed:
  description: How many of the cells failed or ran out of time.
  returned: when cells ran
  type: int
  sample: 0
pending:
  description: Names of the cells that were, or in check mode would be, run.
  returned: success
  type: list
  elements: str
  sample: [eagle3-c1-r1, eagle3-c4-r1, eagle3-c16-r1]
run_directory:
  description: Where the run's cells lie on the host.
  returned: success
  type: str
  sample: /opt/aerie/runs/20260601T220000Z
job:
  description: The directory of the detached work.
  returned: when cells run
  type: str
  sample: /opt/aerie/jobs/benchmark-1748815200000000000-4242
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.measuring import bench_runner, benchmark
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "run_id": {"type": "str", "required": True},
            "host": {"type": "str", "required": True},
            "instance": {"type": "str", "required": True},
            "experiment": {"type": "dict", "required": True},
            "plan": {"type": "str", "required": True},
            "launch": {"type": "dict", "required": True},
            "arm": {"type": "dict", "required": True},
            "models": {"type": "dict", "default": {}},
            "target": {"type": "str", "required": True},
            "settings": {"type": "dict", "default": {}},
            "host_info": {"type": "dict", "default": {}},
            "dataset": {"type": "dict"},
            "staged_dataset": {"type": "path"},
            "api_key": {"type": "str", "no_log": True},
            "client": {"type": "path"},
            "start_failure": {"type": "str"},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    given: dict[str, Any] = module.params
    paths = HostPaths(Path(given["root"]))
    try:
        asked = benchmark.Request.of(given)
        if module.check_mode:
            pending = benchmark.pending(paths, asked)
            module.exit_json(changed=bool(pending), pending=pending, run_directory=str(paths.runs / asked.run_id))
        if given["start_failure"]:
            renew_if_given(paths.lease, given["lease"])
            cells = benchmark.record_not_started(paths, asked, given["start_failure"])
            failed = sum(cell["status"] != bench_runner.COMPLETED for cell in cells)
            module.exit_json(changed=failed > 0, cells=cells, cells_failed=failed, run_directory=str(paths.runs / asked.run_id))
        job = benchmark.prepare(paths, asked, before_cell=lambda: renew_if_given(paths.lease, given["lease"]))
        pending = bench_runner.pending(job.run, job.definitions)
        told = {"pending": pending, "run_directory": str(job.run)}
        if not pending:
            module.exit_json(changed=False, **told)
        renew_if_given(paths.lease, given["lease"])
        benchmark.place_dataset(paths, asked)
        directory = jobs.new_directory(paths.jobs, "benchmark")
        jobs.start(directory, lambda progress: bench_runner.run(job, progress.update))
    except AerieError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=True, job=str(directory), **told)


if __name__ == "__main__":
    main()
