#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_profile
short_description: Profile one arm under load
description:
  - Loads a running instance with SGLang's own client at each number of clients, one run of the client each, and meanwhile turns the
    phase profiler on and off in short windows. The same seconds tell the shares of a decode cycle and what measuring them costs.
  - At one number of clients SGLang's own torch trace of some steps can be taken too; it is summed up on the host.
  - The speed in each window is the server's own, from its log; a small C(decode-log-interval) gives it a fine grain.
  - Files lie below C(profiles/<run_id>/<arm>/) on the host; the action plugin brings them to C(<dest>/profile/<run_id>/<host>/<arm>/).
  - The work is detached and survives a cut connection; the action plugin shows its progress.
  - A level that fails is a recorded outcome; it fails neither the others nor the task. The profiler is off afterwards in any case.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that holds everything this project makes there.
    type: path
    required: true
  state:
    description:
      - V(profiled) profiles the arm.
      - V(off) only takes away what an interrupted run left switched on.
    type: str
    choices: [profiled, 'off']
    default: profiled
  instance:
    description: The instance to profile. It must be running with the arm.
    type: str
    required: true
  run_id:
    description: Name of the run that the files belong to; arms of one run are reported together.
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
  concurrency:
    description: Numbers of clients at once.
    type: list
    elements: int
    default: [1, 8, 32, 64]
  seconds:
    description: How long each level is measured, from when all clients run.
    type: float
    default: 10
  window_seconds:
    description: The shortest window in which the profiler is on, or off; at a slow pace windows are longer.
    type: float
    default: 1
  seed:
    description: Draws the order of the windows and the prompts.
    type: int
    default: 1
  workload:
    description: What the clients send, V(dataset) (C(random-ids)), V(input_len) and V(output_len) in tokens.
    type: dict
    default: {}
  trace_concurrency:
    description: The number of clients at which a torch trace is taken; left out, none is.
    type: int
  trace_steps:
    description: How many of the scheduler's steps the trace holds.
    type: int
    default: 24
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
    description: What M(gpu_host_info) returned; the profile holds its fingerprint.
    type: dict
    default: {}
  api_key:
    description: The key that the server asks for.
    type: str
  client:
    description: A load client to use instead of the release's own, as with M(sglang_benchmark).
    type: path
  start_failure:
    description: Why the arm's server did not start. Its levels are recorded as failed for this reason, and nothing is measured.
    type: str
  lease:
    description: The lease of this run, as M(host_lease) returned it; renewed before each level.
    type: dict
  dest:
    description: The directory on the controller that results are kept in. Null brings nothing.
    type: path
  fetch_traces:
    description: Bring the torch traces themselves too; they can be large, and their summary comes in any case.
    type: bool
    default: false
  fetch_limits:
    description: How much is brought at once, at most, with C(gib) (16) and C(files) (20000); more is refused. The action plugin uses it.
    type: dict
    default: {}
  archive:
    description: Where to put an archive of O(wanted) on the host. The action plugin uses it.
    type: path
  wanted:
    description: The files of O(archive), relative to the directory of all profiles. The action plugin uses it.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Says what would be profiled, and refuses what can't be; the instance need not run for that.
    support: full
  diff_mode:
    description: A measurement has no before and after.
    support: none
"""

EXAMPLES = r"""
- name: See where a decode cycle goes
  sglang_profile:
    root: "{{ aerie_root }}"
    run_id: 20260601T220000Z
    host: "{{ inventory_hostname }}"
    instance: main
    arm: eagle3
    arms: "{{ sglang_server_arms }}"
    concurrency: [1, 32]
    trace_concurrency: 32
    target: kimi-k2.5
    dest: "{{ aerie_results }}"
"""

RETURN = r"""
levels:
  description: What became of each number of clients.
  returned: when levels ran
  type: list
  elements: dict
  sample: [{concurrency: 32, status: completed, reason: null}]
levels_failed:
  description: How many of the levels gave no figures.
  returned: when levels ran, or the server did not start
  type: int
  sample: 0
would_profile:
  description: The numbers of clients.
  returned: in check mode
  type: list
  elements: int
  sample: [1, 8, 32, 64]
run_directory:
  description: Where the arm's files lie on the host.
  returned: when the arm was, or would be, profiled
  type: str
  sample: /opt/aerie/profiles/20260601T220000Z/eagle3
files:
  description: The arm's files, with their place on the controller, size and sha256.
  returned: when the arm was profiled
  type: list
  elements: dict
  sample:
    - path: 20260601T220000Z/eagle3/c32/phases.jsonl
      place: profile/20260601T220000Z/gpu-01/eagle3/c32/phases.jsonl
      bytes: 53210
      sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
fetched:
  description: The files that were brought to O(dest).
  returned: when O(dest) is given and the arm was profiled
  type: list
  elements: str
  sample: [profile/20260601T220000Z/gpu-01/eagle3/c32/phases.jsonl]
removed:
  description: Switches of the profiler that were left on.
  returned: with O(state=off)
  type: list
  elements: str
  sample: ['on']
job:
  description: The directory of the detached work.
  returned: when levels run
  type: str
  sample: /opt/aerie/jobs/profile-1748815200000000000-4242
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.measuring import collection
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.profiling import profile_levels, profile_request, profile_run
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "default": "profiled", "choices": ["profiled", "off"]},
            "instance": {"type": "str", "required": True},
            "run_id": {"type": "str", "default": ""},
            "host": {"type": "str", "default": ""},
            "arm": {"type": "dict", "default": {}},
            "arms": {"type": "dict", "default": {}},
            "concurrency": {"type": "list", "elements": "int", "default": [1, 8, 32, 64]},
            "seconds": {"type": "float", "default": 10},
            "window_seconds": {"type": "float", "default": 1},
            "seed": {"type": "int", "default": 1},
            "workload": {"type": "dict", "default": {}},
            "trace_concurrency": {"type": "int"},
            "trace_steps": {"type": "int", "default": 24},
            "timeout_seconds": {"type": "float", "default": 300},
            "models": {"type": "dict", "default": {}},
            "target": {"type": "str", "default": ""},
            "host_info": {"type": "dict", "default": {}},
            "api_key": {"type": "str", "no_log": True},
            "client": {"type": "path"},
            "start_failure": {"type": "str"},
            "lease": {"type": "dict"},
            "dest": {"type": "path"},
            "fetch_traces": {"type": "bool", "default": False},
            "fetch_limits": {"type": "dict", "default": {}},
            "archive": {"type": "path"},
            "wanted": {"type": "list", "elements": "str", "default": []},
        },
        required_if=[("state", "profiled", ["run_id", "host", "arm", "target"])],
        supports_check_mode=True,
    )
    paths = HostPaths(Path(module.params["root"]))
    try:
        if module.params["archive"]:
            collection.archive(profile_request.root(paths), module.params["wanted"], Path(module.params["archive"]))
            module.exit_json(changed=False)
        module.exit_json(**(_off(module, paths) if module.params["state"] == "off" else _profile(module, paths)))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {module.params['root']}?")


def _off(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    profile = paths.instance(module.params["instance"]) / "profile"
    if module.check_mode:
        left = [name for name in (profile_run.SWITCH, profile_run.RANGES) if (profile / name).exists()]
    else:
        left = profile_run.clean_up(profile)
    return {"changed": bool(left), "removed": left}


def _profile(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    given = module.params
    asked = profile_request.Request.of(given)
    directory = profile_request.directory(paths, asked)
    if module.check_mode:
        profile_request.require_release(paths, asked)
        return {"changed": True, "would_profile": list(asked.settings.concurrency), "run_directory": str(directory)}
    renew_if_given(paths.lease, given["lease"])
    if given["start_failure"]:
        profile_request.record_not_started(paths, asked, given["start_failure"])
        told = {"levels_failed": len(asked.settings.concurrency), "run_directory": str(directory)}
        return {"changed": True, **told, "files": _manifest(module, paths, directory)}
    job = profile_request.prepare(paths, asked, before_level=lambda: renew_if_given(paths.lease, given["lease"]))
    place = jobs.new_directory(paths.jobs, "profile")

    def work(progress: jobs.Progress) -> dict[str, Any]:
        return {**profile_run.run(job, progress.update), "files": _manifest(module, paths, directory)}

    jobs.start(place, work)
    return {"changed": True, "job": str(place), "run_directory": str(directory)}


def _manifest(module: AnsibleModule, paths: HostPaths, directory: Path) -> list[dict[str, Any]]:
    return profile_levels.manifest(profile_request.root(paths), directory, module.params["fetch_traces"])


if __name__ == "__main__":
    main()
