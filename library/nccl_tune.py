#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: nccl_tune
short_description: Search for faster NCCL settings, and decide
description:
  - With O(state=searched) measures sets of NCCL's variables on the host, with a micro-benchmark of all-reduces between ranks at the message
    sizes that the model's decode steps and prefills have, and answers separately for latency and throughput.
  - Sets that are known to be bad are refused; each launch is bounded in time, and one that hangs is killed and disqualified.
  - The work is detached and survives a cut connection; the action plugin shows its progress. Launches that a run has measured are not
    measured again when it is gone on with.
  - With O(state=planned) and O(state=decided) the action plugin works on the controller alone, for the end-to-end comparison and the
    decision that follows from it.
author: Aerie contributors (!UNKNOWN)
options:
  state:
    description:
      - V(searched) runs the search on the host and brings its files to O(dest).
      - V(planned) returns the experiments that the winners are confirmed by.
      - V(decided) prints what came of it all, and writes O(path).
      - V(packed) writes an archive of O(wanted); the action plugin uses it.
    type: str
    choices: [searched, planned, decided, packed]
    default: searched
  root:
    description: The directory on the host that holds everything this project makes there.
    type: path
  run_id:
    description: Name of the run; give an earlier one to go on with it.
    type: str
    default: ''
  host:
    description: The host's name in the inventory.
    type: str
    default: ''
  table:
    description: Profiles and rules, the content of C(nccl/profiles.yml).
    type: dict
    default: {}
  space:
    description: What is tried, the content of C(nccl/space.yml).
    type: dict
    default: {}
  profile:
    description: The profile that the default set begins with, V(auto) for the one that fits the topology. Left out, none.
    type: str
  environment:
    description: Variables that are the user's own; they are part of every set and never varied.
    type: dict
    default: {}
  ranks:
    description: How many ranks talk to each other; 0 takes the GPUs, or 2 without GPUs.
    type: int
    default: 0
  gpus:
    description: The GPUs of the ranks, as nvidia-smi counts. Left out, all.
    type: list
    elements: int
  backend:
    description: V(auto) takes V(nccl) where there are GPUs, V(gloo) elsewhere.
    type: str
    choices: [auto, nccl, gloo]
    default: auto
  python:
    description: A Python with torch. Left out, the current release's.
    type: path
  most:
    description: How many sets are tried besides the default one.
    type: int
    default: 30
  finalists:
    description: How many sets of each objective meet the default set in the final rounds.
    type: int
    default: 2
  final_rounds:
    description: Rounds of the final, from which alone the verdict comes.
    type: int
    default: 8
  minimum_effect:
    description: A gain below this is no difference, whatever its interval.
    type: float
    default: 0.02
  repeats:
    description: Samples of each size in a launch.
    type: int
    default: 15
  seconds:
    description: The longest that a launch may take; one that takes longer is killed and its set disqualified.
    type: float
    default: 60
  seed:
    description: Draws the combinations, the order of launches and that of sizes.
    type: int
    default: 1
  target:
    description: The model whose messages are measured, V(path) and V(config), as M(model_identity) returns it. Without one, general sizes.
    type: dict
    default: {}
  draft_tokens:
    description: Tokens that one step holds of each client; 1 without speculation.
    type: int
    default: 1
  concurrency:
    description: Numbers of clients whose decode steps are measured.
    type: list
    elements: int
    default: [1, 4, 16, 64]
  prefill_tokens:
    description: Tokens of the prefills that are measured.
    type: list
    elements: int
    default: [1024, 4096]
  objectives:
    description: What is answered, V(latency), V(throughput) or both.
    type: list
    elements: str
    default: [latency, throughput]
  host_info:
    description: What M(gpu_host_info) returned.
    type: dict
    default: {}
  lease:
    description: The lease of this run, as M(host_lease) returned it; renewed before each launch.
    type: dict
  dest:
    description: The directory on the controller that results are kept in; files come to C(<dest>/nccl/<run_id>/<host>/).
    type: path
  fetch_limits:
    description: How much is brought at once, at most, with C(gib) (16) and C(files) (20000); more is refused. The action plugin uses it.
    type: dict
    default: {}
  archive:
    description: Where to put an archive of O(wanted) on the host. The action plugin uses it.
    type: path
  wanted:
    description: The files of O(archive), relative to the directory of all searches. The action plugin uses it.
    type: list
    elements: str
    default: []
  result:
    description: What O(state=searched) returned as RV(result).
    type: dict
    default: {}
  arm:
    description: The instance's own arm in full, with O(state=planned).
    type: dict
    default: {}
  in_force:
    description: The host's C(nccl.env) as it is, with O(state=planned); arms of the comparison take away what they don't set.
    type: dict
    default: {}
  arm_options:
    description: Options of arms that are compared end to end.
    type: list
    elements: str
    default: []
  workloads:
    description: An experiment's workload by objective, with O(state=planned).
    type: dict
    default: {}
  confirm_repeats:
    description: Launches of each arm in the comparison.
    type: int
    default: 4
  confirm_timeout_seconds:
    description: A cell of the comparison that takes longer is ended.
    type: int
    default: 1800
  records:
    description: Records of the comparison, with O(state=decided). Left out, nothing was confirmed, as asked.
    type: list
    elements: dict
  path:
    description: The variables file that O(state=decided) writes on the controller.
    type: path
attributes:
  check_mode:
    description: Says what would be tried, and refuses what can't be; measures and writes nothing.
    support: full
  diff_mode:
    description: A measurement has no before and after.
    support: none
"""

EXAMPLES = r"""
- name: Search
  nccl_tune:
    root: /opt/aerie
    run_id: 20260601T220000Z
    host: "{{ inventory_hostname }}"
    table: "{{ lookup('ansible.builtin.file', 'nccl/profiles.yml') | from_yaml }}"
    space: "{{ lookup('ansible.builtin.file', 'nccl/space.yml') | from_yaml }}"
    profile: auto
    host_info: "{{ __gpu_host_info }}"
    dest: "{{ aerie_results }}"
"""

RETURN = r"""
result:
  description: What the search found; format in C(docs/reference/nccl.md).
  returned: with state searched
  type: dict
  sample: {schema: aerie-nccl-search/1, objectives: {latency: {verdict: no_difference}}}
run_directory:
  description: Where the search's files lie on the host.
  returned: with state searched
  type: str
  sample: /opt/aerie/nccl/20260601T220000Z
in_force:
  description: The host's nccl.env as it is.
  returned: with state searched
  type: dict
  sample: {NCCL_P2P_LEVEL: SYS}
would_try:
  description: The sets that would be tried.
  returned: with state searched in check mode
  type: list
  elements: str
  sample: [default, PROTO=LL128]
refused:
  description: Sets that are not tried, and why.
  returned: with state searched in check mode
  type: list
  elements: dict
  sample: [{candidate: PROTO=LL, why: "known to be bad"}]
messages:
  description: The sizes, and where they come from.
  returned: with state searched in check mode
  type: list
  elements: dict
  sample: [{bytes: 57344, objective: latency, why: "decode: 1 × 4 tokens × 7168 × 2 B"}]
expected_launches:
  description: About how many launches it takes.
  returned: with state searched in check mode
  type: int
  sample: 116
files:
  description: The run's files, with their place on the controller, size and sha256.
  returned: when the search ran
  type: list
  elements: dict
  sample:
    - path: 20260601T220000Z/search/result.json
      place: nccl/20260601T220000Z/gpu-01/search/result.json
      bytes: 5321
      sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
fetched:
  description: The files that were brought to O(dest).
  returned: when O(dest) is given and the search ran
  type: list
  elements: str
  sample: [nccl/20260601T220000Z/gpu-01/search/result.json]
experiments:
  description: The experiments that confirm, each with its arms; none where there is nothing to confirm.
  returned: with state planned
  type: list
  elements: dict
  sample: [{objective: latency, experiment: {name: nccl-latency}, arms: {nccl-default: {}, nccl-latency: {}}}]
tuned:
  description: The value of C(nccl_tuned), as written.
  returned: with state decided
  type: dict
  sample: {schema: aerie-nccl-tuned/1, latency: {verdict: no_difference, environment: {}}}
table:
  description: What was printed.
  returned: with state decided
  type: str
  sample: "latency: no difference beyond noise"
path:
  description: The variables file.
  returned: with state decided
  type: str
  sample: /srv/aerie/results/nccl/gpu-01.yml
job:
  description: The directory of the detached work.
  returned: when the search runs
  type: str
  sample: /opt/aerie/jobs/nccl_tune-1748815200000000000-4242
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.measuring import collection
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.tuning import tune_run
from ansible.module_utils.basic import AnsibleModule

ARGUMENTS: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "default": "searched", "choices": ["searched", "planned", "decided", "packed"]},
    "root": {"type": "path"},
    "run_id": {"type": "str", "default": ""},
    "host": {"type": "str", "default": ""},
    "table": {"type": "dict", "default": {}},
    "space": {"type": "dict", "default": {}},
    "profile": {"type": "str"},
    "environment": {"type": "dict", "default": {}},
    "ranks": {"type": "int", "default": 0},
    "gpus": {"type": "list", "elements": "int"},
    "backend": {"type": "str", "default": "auto", "choices": ["auto", "nccl", "gloo"]},
    "python": {"type": "path"},
    "most": {"type": "int", "default": 30},
    "finalists": {"type": "int", "default": 2},
    "final_rounds": {"type": "int", "default": 8},
    "minimum_effect": {"type": "float", "default": 0.02},
    "repeats": {"type": "int", "default": 15},
    "seconds": {"type": "float", "default": 60},
    "seed": {"type": "int", "default": 1},
    "target": {"type": "dict", "default": {}},
    "draft_tokens": {"type": "int", "default": 1, "no_log": False},
    "concurrency": {"type": "list", "elements": "int", "default": [1, 4, 16, 64]},
    "prefill_tokens": {"type": "list", "elements": "int", "default": [1024, 4096], "no_log": False},
    "objectives": {"type": "list", "elements": "str", "default": ["latency", "throughput"]},
    "host_info": {"type": "dict", "default": {}},
    "lease": {"type": "dict"},
    "dest": {"type": "path"},
    "fetch_limits": {"type": "dict", "default": {}},
    "archive": {"type": "path"},
    "wanted": {"type": "list", "elements": "str", "default": []},
    "result": {"type": "dict", "default": {}},
    "arm": {"type": "dict", "default": {}},
    "in_force": {"type": "dict", "default": {}},
    "arm_options": {"type": "list", "elements": "str", "default": []},
    "workloads": {"type": "dict", "default": {}},
    "confirm_repeats": {"type": "int", "default": 4},
    "confirm_timeout_seconds": {"type": "int", "default": 1800},
    "records": {"type": "list", "elements": "dict"},
    "path": {"type": "path"},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENTS,
        required_if=[("state", "searched", ["root", "run_id", "host"]), ("state", "packed", ["root", "archive"])],
        supports_check_mode=True,
    )
    given = module.params
    if given["state"] in ("planned", "decided"):
        module.fail_json(
            msg="nccl_tune works in its action plugin, which was not found: set action_plugins to plugins/action, as ansible.cfg does"
        )
    paths = HostPaths(Path(given["root"]))
    try:
        if given["state"] == "packed":
            collection.archive(tune_run.root(paths), given["wanted"], Path(given["archive"]))
            module.exit_json(changed=False)
        module.exit_json(**_search(module, paths))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {given['root']}?")


def _search(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    given = module.params
    asked = tune_run.Request.of(given)
    job = tune_run.prepare(paths, asked, before_launch=lambda: renew_if_given(paths.lease, given["lease"]))
    told = {"changed": True, "run_directory": str(tune_run.root(paths) / asked.run_id), "in_force": nccl.read(paths.root)}
    if module.check_mode:
        return {**told, **tune_run.predict(job)}
    if not job.bench.python.exists():
        raise AerieError(
            f"{job.bench.python} does not exist: make a release first (install playbook), or name a Python in nccl_tune_python"
        )
    renew_if_given(paths.lease, given["lease"])
    place = jobs.new_directory(paths.jobs, "nccl_tune")

    def work(progress: jobs.Progress) -> dict[str, Any]:
        result = tune_run.run(job, progress.update)
        # Going on with a run that is complete measures nothing.
        return {"changed": result["measured_now"] > 0, "result": result, "files": tune_run.manifest(paths, asked.run_id)}

    jobs.start(place, work)
    return {**told, "job": str(place)}


if __name__ == "__main__":
    main()
