#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_calibrate
short_description: Find from how many requests on plain decoding is faster
description:
  - With O(state=calibrated) loads a running instance whose arm has C(dynamic) with SGLang's own client, at doubling numbers of clients and
    then at finer steps around the crossover. Meanwhile the server is forced to decode plainly and to speculate, in pairs of short windows,
    so that nothing is restarted. At last the thresholds that follow meet those that were in force before, in the same way.
  - Where the arm's V(speculation) has V(candidate_steps), the modes are its numbers of draft steps and plain decoding. Each is measured
    against the next one that speculates less.
  - The speed in each window is the server's own, from its log; a small C(decode-log-interval) gives it a fine grain.
  - Files lie below C(calibrations/<run_id>/) on the host; the action plugin brings them to C(<dest>/calibration/<run_id>/<host>/).
  - The work is detached and survives a cut connection; the action plugin shows its progress, and how long it may take yet.
  - With O(state=decided) the action plugin works on the controller alone. It prints what came of it, writes O(path), which the next start
    of an arm with C(threshold) V(auto) uses, and a page.
  - Nothing is forced afterwards in any case.
author: Aerie contributors (!UNKNOWN)
options:
  state:
    description:
      - V(calibrated) measures on the host and brings the files to O(dest).
      - V(released) only takes away what an interrupted run left forced.
      - V(decided) makes variables, table and page of what was measured.
    type: str
    choices: [calibrated, released, decided]
    default: calibrated
  root:
    description: The directory on the host that holds everything this project makes there.
    type: path
  instance:
    description: The instance to calibrate. It must be running with the arm.
    type: str
    default: ''
  run_id:
    description: Name of the run that the files belong to.
    type: str
    default: ''
  host:
    description: The host's name in the inventory.
    type: str
    default: ''
  arm:
    description: The arm. Written as a name, the action plugin takes it from O(arms).
    type: dict
    default: {}
  arms:
    description: All arms by name, for the action plugin to choose O(arm) from.
    type: dict
    default: {}
  before:
    description: The thresholds in force so far, V(high) and V(low); empty where the arm always speculated.
    type: dict
    default: {}
  concurrency:
    description: Numbers of clients at once. Empty doubles them, from 1 to what the server runs at once.
    type: list
    elements: int
    default: []
  finer_levels:
    description: How many more numbers are measured around the crossover at most, with V(candidate_steps) around each crossover.
    type: int
    default: 4
  seconds:
    description: How long each level is measured, from when all clients run.
    type: float
    default: 16
  window_seconds:
    description: The shortest window in one mode; at a slow pace windows are longer.
    type: float
    default: 1
  seed:
    description: Draws the order of the windows, the prompts and the bootstrap.
    type: int
    default: 1
  workload:
    description: What the clients send, V(dataset) (C(random-ids)), V(input_len) and V(output_len) in tokens.
    type: dict
    default: {}
  confirm:
    description: Measure the thresholds before against those after.
    type: bool
    default: true
  timeout_seconds:
    description: A level that takes longer is ended and recorded as timed out.
    type: float
    default: 300
  models:
    description: Identities of the catalog's models, as M(model_identity) returns them.
    type: dict
    default: {}
  target:
    description: The instance's model, a name of O(models).
    type: str
    default: ''
  host_info:
    description: What M(gpu_host_info) returned; the calibration is valid for this host only.
    type: dict
    default: {}
  api_key:
    description: The key that the server asks for.
    type: str
  client:
    description: A load client to use instead of the release's own, as with M(sglang_benchmark).
    type: path
  lease:
    description: The lease of this run, as M(host_lease) returned it; renewed before each level.
    type: dict
  dest:
    description: The directory on the controller that results are kept in.
    type: path
  path:
    description: The variables file on the controller, with O(state=decided).
    type: path
  page:
    description: The page on the controller, with O(state=decided).
    type: path
  records:
    description:
      - With O(state=decided), take the speeds from records of two servers instead, of a benchmark's run that was brought to O(dest).
      - V(experiment) and V(run_id) name it, V(plain) and V(speculative) its arms, V(most) is the most requests that a server runs at once.
    type: dict
    default: {}
  fetch_limits:
    description: How much is brought at once, at most, with C(gib) (16) and C(files) (20000); more is refused. The action plugin uses it.
    type: dict
    default: {}
  archive:
    description: Where to put an archive of O(wanted) on the host. The action plugin uses it.
    type: path
  wanted:
    description: The files of O(archive), relative to the directory of all calibrations. The action plugin uses it.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Says what would be measured, and refuses what can't be; the instance need not run for that. Writes nothing.
    support: full
  diff_mode:
    description: A measurement has no before and after; the variables file that V(decided) writes has.
    support: partial
"""

EXAMPLES = r"""
- name: Measure
  sglang_calibrate:
    root: "{{ aerie_root }}"
    run_id: 20260601T220000Z
    host: "{{ inventory_hostname }}"
    instance: main
    arm: dynamic
    arms: "{{ sglang_server_arms }}"
    target: kimi-k2.5
    host_info: "{{ __gpu_host_info }}"
    dest: "{{ aerie_results }}"

- name: Decide
  sglang_calibrate:
    state: decided
    run_id: 20260601T220000Z
    host: "{{ inventory_hostname }}"
    dest: "{{ aerie_results }}"
    path: "{{ aerie_results }}/calibration/{{ inventory_hostname }}.yml"
"""

RETURN = r"""
levels:
  description: What became of each number of clients, those before and after among them.
  returned: when levels ran
  type: list
  elements: dict
  sample: [{concurrency: 32, status: completed, reason: null, modes: [speculative, plain]}]
levels_failed:
  description: How many of the levels gave no figures.
  returned: when levels ran
  type: int
  sample: 0
run_directory:
  description: Where the files lie on the host.
  returned: with state calibrated
  type: str
  sample: /opt/aerie/calibrations/20260601T220000Z
files:
  description: The files, with their place on the controller, size and sha256.
  returned: when levels ran
  type: list
  elements: dict
  sample:
    - path: 20260601T220000Z/c32/windows.json
      place: calibration/20260601T220000Z/gpu-01/c32/windows.json
      bytes: 1210
      sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
fetched:
  description: The files that were brought to O(dest).
  returned: when levels ran and O(dest) is given
  type: list
  elements: str
  sample: [calibration/20260601T220000Z/gpu-01/c32/windows.json]
calibration:
  description: The content of the variables file.
  returned: with state decided
  type: dict
  sample: {schema: aerie-calibration/1, verdict: crosses, high: 48, low: 40, dwell_steps: 24, min_dwell_seconds: 0.2}
path:
  description: The variables file.
  returned: with state decided
  type: str
  sample: /srv/aerie/results/calibration/gpu-01.yml
page:
  description: The page.
  returned: with state decided
  type: str
  sample: /srv/aerie/results/calibration/gpu-01.html
table:
  description: What was printed.
  returned: with state decided
  type: str
  sample: "requests  plain tok/s  speculative tok/s"
job:
  description: The directory of the detached work.
  returned: when levels run
  type: str
  sample: /opt/aerie/jobs/calibrate-1748815200000000000-4242
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files, jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.measuring import (
    bench_runner,
    benchmark,
    calibration_files,
    calibration_request,
    calibration_run,
    collection,
    dynamic_control,
)
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "default": "calibrated", "choices": ["calibrated", "released", "decided"]},
            "root": {"type": "path"},
            "instance": {"type": "str", "default": ""},
            "run_id": {"type": "str", "default": ""},
            "host": {"type": "str", "default": ""},
            "arm": {"type": "dict", "default": {}},
            "arms": {"type": "dict", "default": {}},
            "before": {"type": "dict", "default": {}},
            "concurrency": {"type": "list", "elements": "int", "default": []},
            "finer_levels": {"type": "int", "default": 4},
            "seconds": {"type": "float", "default": 16},
            "window_seconds": {"type": "float", "default": 1},
            "seed": {"type": "int", "default": 1},
            "workload": {"type": "dict", "default": {}},
            "confirm": {"type": "bool", "default": True},
            "timeout_seconds": {"type": "float", "default": 300},
            "models": {"type": "dict", "default": {}},
            "target": {"type": "str", "default": ""},
            "host_info": {"type": "dict", "default": {}},
            "api_key": {"type": "str", "no_log": True},
            "client": {"type": "path"},
            "lease": {"type": "dict"},
            "dest": {"type": "path"},
            "path": {"type": "path"},
            "page": {"type": "path"},
            "records": {"type": "dict", "default": {}},
            "fetch_limits": {"type": "dict", "default": {}},
            "archive": {"type": "path"},
            "wanted": {"type": "list", "elements": "str", "default": []},
        },
        required_if=[("state", "calibrated", ["root", "instance"]), ("state", "released", ["root", "instance"])],
        supports_check_mode=True,
    )
    if module.params["state"] == "decided":
        module.fail_json(msg="sglang_calibrate decides in its action plugin, which was not found: set action_plugins as ansible.cfg does")
    paths = HostPaths(Path(module.params["root"]))
    try:
        if module.params["archive"]:
            collection.archive(calibration_request.root(paths), module.params["wanted"], Path(module.params["archive"]))
            module.exit_json(changed=False)
        module.exit_json(**(_released(module, paths) if module.params["state"] == "released" else _calibrate(module, paths)))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {module.params['root']}?")


def _released(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    """Let the policy decide again; a server that doesn't run, or has none, has nothing forced."""
    try:
        instance = files.read_json(paths.instance(module.params["instance"]) / "instance.json")
        address = str(instance["host"]).strip("[]")
        home = paths.instance(module.params["instance"])
        server = bench_runner.Server(
            benchmark.ANY_ADDRESS.get(address, address),
            int(instance["port"]),
            home / "server.log",
            home / "profile",
            module.params["api_key"],
        )
        state = dynamic_control.state(server)
        forced = dynamic_control.is_forced(state)
        if forced and not module.check_mode:
            dynamic_control.change(server, dynamic_control.released(state))
    except (OSError, ValueError, KeyError, bench_runner.CellError):
        return {"changed": False}
    return {"changed": forced}


def _calibrate(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    given = module.params
    asked = calibration_request.Request.of(given)
    directory = calibration_request.directory(paths, asked)
    if module.check_mode:
        calibration_request.require_release(paths, asked)
        return {"changed": True, "msg": calibration_run.would(asked.settings, asked.arm), "run_directory": str(directory)}
    renew_if_given(paths.lease, given["lease"])
    job = calibration_request.prepare(paths, asked, before_level=lambda: renew_if_given(paths.lease, given["lease"]))
    place = jobs.new_directory(paths.jobs, "calibrate")

    def work(progress: jobs.Progress) -> dict[str, Any]:
        told = calibration_run.run(job, progress.update)
        return {**told, "files": calibration_files.manifest(calibration_request.root(paths), directory)}

    jobs.start(place, work)
    return {"changed": True, "job": str(place), "run_directory": str(directory)}


if __name__ == "__main__":
    main()
