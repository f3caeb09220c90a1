#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_server
short_description: Start, stop or look at one SGLang server
description:
  - Runs an instance, a server with a name and a port, with an arm (speculation, flags and environment) on the release that
    C(current) below O(root) means.
  - Every flag is checked against that release's own parser, the draft against the target and the port against what listens on it,
    before anything is touched; all problems are told at once.
  - Started means that a real generation succeeded. Stopped means that all processes are gone and GPU memory is free.
  - A start that fails leaves the instance stopped, and shows the end of its log.
  - The work goes on detached on the host; the action plugin of the same name follows it and prints its progress.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: Aerie's root directory on the host (C(aerie_root)).
    type: path
    required: true
  name:
    description: Name of the instance.
    type: str
    required: true
  state:
    description:
      - V(started) starts the instance, restarts it when anything that defines it has changed or it doesn't answer, and else
        leaves it alone.
      - V(restarted) starts it anew in any case.
      - V(stopped) stops it, and keeps it from starting at boot.
      - V(status) only looks.
    type: str
    choices: [started, restarted, stopped, status]
    default: started
  arm:
    description:
      - The arm. Written as a name, the action plugin takes it from O(arms).
      - Its keys are V(name), V(description), V(speculation), V(dynamic), V(flags), V(environment) and V(options), a list of names from the
        options of O(gpu_table).
      - With V(speculation.candidate_steps) SGLang chooses its number of draft steps from a file of this module, C(adaptive.json).
    type: dict
  arms:
    description: All arms by name, for the action plugin to choose O(arm) from.
    type: dict
    default: {}
  instance:
    description: The instance, with V(model) and V(port), and if need be V(arm), V(host), V(gpus), V(flags) and V(environment).
    type: dict
    default: {}
  models:
    description: Models by name, each with V(path), and V(identity) and V(config) where known (as M(model_identity) returns them).
    type: dict
    default: {}
  profile:
    description:
      - The profile's flags and environment. Written as a name, the action plugin reads C(profiles/<name>/server.yml).
    type: dict
    default: {}
  flags:
    description: Server flags for every arm. True gives a bare flag, false or null leaves it out, a list gives several values.
    type: dict
    default: {}
  launch_flags:
    description: Server flags for this launch, over O(flags) in whichever spelling; what an arm or instance sets itself wins.
    type: dict
    default: {}
  environment:
    description: Environment variables for every arm; null takes one away.
    type: dict
    default: {}
  gpu_table:
    description:
      - What GPUs of one kind need of SGLang, by version and model, and the options that an arm may name (docs/reference/gpu-settings.md).
        It comes beneath O(flags) and O(environment).
      - The action plugin reads C(profiles/<name>/gpu_settings.yml) of O(profile), where there is one.
    type: dict
    default: {}
  host_gpus:
    description:
      - The host's GPUs, each with V(index) and V(compute_capability), as M(gpu_host_info) returns them.
      - nvidia-smi is asked where it is left out and O(gpu_table) has rules.
    type: list
    elements: dict
  calibration:
    description:
      - Where plain decoding begins to win, for an arm with C(dynamic.threshold) V(auto), as M(sglang_calibrate) writes it.
        Its V(steps_by_batch), if it has one, says how many steps to draft at each batch size.
        One of another host, release, model or draft setting is refused.
    type: dict
    default: {}
  host_info:
    description: What M(gpu_host_info) returned, which O(calibration) is held against.
    type: dict
    default: {}
  service_manager:
    description: What owns the server. V(auto) is systemd where it runs and we are root, and supervisor elsewhere.
    type: str
    choices: [auto, systemd, supervisor]
    default: auto
  supervisor:
    description: Path of C(supervisord). Where it is left out, the one in C(environments/supervisor-*) below O(root) is used.
    type: path
  ready_seconds:
    description: How long a start may take until the first generation succeeds.
    type: int
    default: 900
  stop_seconds:
    description: How long a server may take to end by itself before it is killed.
    type: int
    default: 60
  api_key:
    description: Key that clients must send; needed for an instance that listens elsewhere than on loopback.
    type: str
  patch_sets:
    description:
      - Names of the patch sets that must be active. A start is refused when the current release was made with others, or when they aren't
        applied to it. The action plugin adds what they are.
      - Left out, the release may have any. In both cases a start is refused when a patched file isn't as it was written, or when the server
        would import SGLang from elsewhere than the release's own tree.
    type: list
    elements: raw
  driver:
    description: Version of the GPU driver, part of the name of the cache directory. Read from the host where it is left out.
    type: str
  lease:
    description: The host's lease (from M(host_lease)), renewed before anything is changed.
    type: dict
attributes:
  check_mode:
    description: Checks everything, and says whether a start, restart or stop would follow.
    support: full
  diff_mode:
    description: Shows the launch, environment and service files that change, without the API key.
    support: full
"""

EXAMPLES = r"""
- name: Serve with EAGLE-3
  sglang_server:
    root: /opt/aerie
    name: main
    arm: eagle3
    arms:
      eagle3:
        speculation: {algorithm: EAGLE3, draft_model: draft, steps: 3, topk: 1, draft_tokens: 4}
    instance: {model: target, port: 30000, gpus: [0]}
    models:
      target: {path: /srv/models/llama}
      draft: {path: /srv/models/llama-eagle3}
    profile: cuda

- name: Stop it
  sglang_server:
    root: /opt/aerie
    name: main
    state: stopped

- name: Look at it
  sglang_server:
    root: /opt/aerie
    name: main
    state: status
  register: main
"""

RETURN = r"""
definition:
  description: Hash of all that defines the server - arguments, environment, release and models.
  returned: with O(state=started) and O(state=restarted)
  type: str
  sample: 5f0c27fe7e9d7c8f2a1d5d5f6b0f3c8a4e1b6d90c3a2f7e8d9b0a1c2d3e4f506
argv:
  description: The server's command line.
  returned: with O(state=started) and O(state=restarted)
  type: list
  elements: str
  sample: [/opt/aerie/releases/0.5.23-0123456789ab/bin/python, -m, sglang.launch_server, --model-path, /srv/models/llama]
gpu_settings:
  description: The rules and options of O(gpu_table) that are in force, each with the flags and variables that it sets and nothing overrode.
  returned: with O(state=started) and O(state=restarted)
  type: list
  elements: dict
  sample:
    - id: sm120-mla-triton
      flags: {attention-backend: triton}
      environment: {}
      why: MLA models have no other backend here that SGLang itself would choose
recommendations:
  description: Patch sets that would make this server faster and are not active, each with the rule of O(gpu_table) that says so.
  returned: with O(state=started) and O(state=restarted)
  type: list
  elements: dict
  sample:
    - patch_set: triton_target_verify
      id: triton-target-verify
      why: on triton SGLang runs target verify through its kernel for prefills
      cure: add it to sglang_patches_sets and run playbooks/patch.yml
      source: "measured: docs/measurements/target-verify.md"
patch_modes:
  description: How the server runs each active patch set that has a switch; C(check) is a test, in which speeds are no results.
  returned: with O(state=started) and O(state=restarted)
  type: dict
  sample: {triton_target_verify: grouped}
pid:
  description: Process id of the server.
  returned: when it was started
  type: int
  sample: 4711
ready_seconds:
  description: How long it took until the first generation succeeded.
  returned: when it was started
  type: float
  sample: 41.7
accept_length:
  description: Average number of tokens for each verification in a few generations, the bonus token included; null without speculation.
  returned: when it was started
  type: float
  sample: 2.01
restarted:
  description: Whether another server of this instance had to be stopped first.
  returned: when it was started
  type: bool
  sample: false
stopped:
  description: Process ids that were there and are gone.
  returned: with O(state=stopped)
  type: list
  elements: int
  sample: [4711, 4725, 4726]
killed:
  description: Process ids that had to be killed since they outlived their service.
  returned: with O(state=stopped)
  type: list
  elements: int
  sample: []
gpu_memory_used_mib:
  description: Memory in use on each GPU, by whomever, before and after; null where nothing ran or there is no GPU.
  returned: with O(state=stopped)
  type: dict
  sample: {before: [74722, 0], after: [0, 0]}
status:
  description: What is known about the instance.
  returned: with O(state=status)
  type: dict
  sample:
    {name: main, installed: true, enabled: true, running: true, ready: true, pid: 4711, pids: [4711, 4725, 4726], state: ready, arm: eagle3,
    release: 0.5.23-0123456789ab, sglang_version: 0.5.23, host: 127.0.0.1, port: 30000, service_manager: systemd, uptime_seconds: 86400,
    accept_length: 2.01, patch_modes: {triton_target_verify: grouped}, recommendations: [], reason: null,
    exposed: [{address: "::", port: 23934, pid: 4725, process: "sglang::scheduler"}],
    log: ["Decode batch, #running-req: 1"]}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs, processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json, write_json
from ansible.module_utils.aerie.host import host_info
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.measuring import benchmark
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving import server, server_plan
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "default": "started", "choices": ["started", "restarted", "stopped", "status"]},
            "arm": {"type": "dict"},
            "arms": {"type": "dict", "default": {}},
            "instance": {"type": "dict", "default": {}},
            "models": {"type": "dict", "default": {}},
            "profile": {"type": "dict", "default": {}},
            "flags": {"type": "dict", "default": {}},
            "launch_flags": {"type": "dict", "default": {}},
            "environment": {"type": "dict", "default": {}},
            "gpu_table": {"type": "dict", "default": {}},
            "host_gpus": {"type": "list", "elements": "dict"},
            "calibration": {"type": "dict", "default": {}},
            "host_info": {"type": "dict", "default": {}},
            "service_manager": {"type": "str", "default": "auto", "choices": ["auto", "systemd", "supervisor"]},
            "supervisor": {"type": "path"},
            "ready_seconds": {"type": "int", "default": 900},
            "stop_seconds": {"type": "int", "default": 60},
            "api_key": {"type": "str", "no_log": True},
            "patch_sets": {"type": "list", "elements": "raw"},
            "driver": {"type": "str"},
            "lease": {"type": "dict"},
        },
        required_if=[("state", "started", ["arm"]), ("state", "restarted", ["arm"])],
        supports_check_mode=True,
    )
    asked = module.params
    host = server_plan.Host(
        paths=HostPaths(Path(asked["root"])),
        service_manager=asked["service_manager"],
        supervisor=Path(asked["supervisor"]) if asked["supervisor"] else None,
        stop_seconds=asked["stop_seconds"],
    )
    try:
        if asked["state"] == "status":
            module.exit_json(changed=False, status=server.status(host, asked["name"], asked["api_key"]))
        if asked["state"] == "stopped":
            module.exit_json(**_stop(module, host))
        module.exit_json(**_start(module, host))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {asked['root']}?")


def _stop(module: AnsibleModule, host: server_plan.Host) -> dict[str, Any]:
    name = module.params["name"]
    if module.check_mode:
        found = server.status(host, name)
        return {
            "changed": bool(found["running"] or found["pids"] or found["enabled"]),
            "stopped": found["pids"],
            "killed": [],
            "gpu_memory_used_mib": None,
        }
    renew_if_given(host.paths.lease, module.params["lease"])
    # A start that is still under way would go on where we stop.
    if (job := _job(host.paths, name)) and (process := jobs.process(job["path"])):
        processes.end([process], 5)
    return server.stop(host, name)


def _start(module: AnsibleModule, host: server_plan.Host) -> dict[str, Any]:
    asked = module.params
    if module.check_mode and server_plan.current_release(host.paths) is None:
        return {"changed": True, "msg": f"{asked['name']} would be started; its flags can only be checked once there is a release"}
    wanted = server_plan.plan(
        host,
        server_plan.Request(
            name=asked["name"],
            instance=asked["instance"],
            arm=asked["arm"],
            models=asked["models"],
            profile=asked["profile"],
            flags=asked["flags"],
            launch_flags=asked["launch_flags"],
            environment=asked["environment"],
            driver=asked["driver"],
            api_key=asked["api_key"],
            gpu_table=asked["gpu_table"],
            host_gpus=tuple(_gpus(asked["gpu_table"], asked["host_gpus"])),
            rehearsal=module.check_mode,
            patch_sets=_patch_sets(asked["patch_sets"]),
            calibration=asked["calibration"],
            host_fingerprint=benchmark.fingerprint(asked["host_info"]),
        ),
    )
    for warning in wanted.warnings:
        module.warn(warning)
    facts = {
        "definition": wanted.definition,
        "argv": [wanted.redacted(word) for word in wanted.argv],
        "gpu_settings": [dict(setting) for setting in wanted.gpu_settings],
        "recommendations": [dict(recommendation) for recommendation in wanted.recommendations],
        "patch_modes": dict(wanted.patch_modes),
    }
    if asked["state"] == "started" and (job := _job(host.paths, asked["name"])):
        if job["definition"] != wanted.definition:
            raise AerieError(f"instance {asked['name']}: another start is under way ({job['path']}): wait for it, or stop the instance")
        return {"changed": True, "job": str(job["path"]), **facts}
    if asked["state"] == "started" and server.is_running_as_planned(wanted):
        return {"changed": False, **facts}
    for warning in server.look_before_start(wanted):
        module.warn(warning)
    diff = [
        {"before_header": str(path), "before": old, "after_header": str(path), "after": new}
        for path, old, new in server.file_changes(wanted)
    ]
    if module.check_mode:
        return {"changed": True, "diff": diff, **facts}
    renew_if_given(host.paths.lease, asked["lease"])
    directory = jobs.new_directory(host.paths.jobs, f"sglang_server-{asked['name']}")
    write_json(_job_file(host.paths, asked["name"]), {"path": str(directory), "definition": wanted.definition})

    def work(progress: jobs.Progress) -> dict[str, Any]:
        def tell(message: str) -> None:
            # A large model takes longer to load than a lease lasts.
            renew_if_given(host.paths.lease, asked["lease"])
            progress.update(message)

        return server.start(wanted, asked["ready_seconds"], tell)

    jobs.start(directory, work)
    return {"changed": True, "job": str(directory), "diff": diff, **facts}


def _patch_sets(given: list[Any] | None) -> tuple[dict[str, Any], ...] | None:
    if given is not None and not all(isinstance(one, dict) for one in given):
        raise AerieError("sglang_server needs its action plugin, which reads the patch sets: is action_plugins of ansible.cfg in force?")
    return None if given is None else tuple(given)


def _gpus(table: dict[str, Any], given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the host's GPUs: those that were given, or what nvidia-smi says where there are rules about them."""
    if given or not table.get("rules"):
        return given or []
    return host_info.read_gpus(host_info.LiveHost())[0]


def _job_file(paths: HostPaths, name: str) -> Path:
    return paths.instance(name) / "job.json"


def _job(paths: HostPaths, name: str) -> dict[str, Any] | None:
    """Return the start of this instance that is still under way, if one is."""
    try:
        found = read_json(_job_file(paths, name))
    except (OSError, ValueError):
        return None
    path = Path(found["path"])
    return {**found, "path": path} if jobs.is_running(path) else None


if __name__ == "__main__":
    main()
