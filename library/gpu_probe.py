#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_probe
short_description: Try a host's GPUs and the release on them, each probe bounded in time
description:
  - Runs short programs with the release's own Python that use the GPUs as a server would; a driver saying that all is well proves little.
  - Each runs in a session of its own. One that does not end in time is killed with everything it started, after it has written where it
    stands, and a check for wedged GPUs follows. No process, GPU memory, file in C(/dev/shm) or cache is left.
  - Programs see the variables of the module's process, those of C(<root>/nccl.env), and O(environment), in this order.
  - What figures mean is left to rules; only what is wrong in itself fails a probe, as wrong data, a crash or no end.
  - A probe that fails does not fail the task.
  - Nothing runs while other processes use the GPUs, unless O(allow_busy) is set.
  - The work is detached and survives a cut connection; the action plugin shows its progress and removes its files.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that holds everything this project makes there.
    type: path
    required: true
  python:
    description: An interpreter that has torch. Null takes the current release's; with none, the probes are skipped.
    type: str
  probes:
    description:
      - V(kernels) imports torch, Triton, the kernel package, FlashInfer and SGLang, and lets each GPU run a kernel of each; what it gives
        is compared with plain torch on the CPU.
      - V(all_reduce) sums between O(ranks) processes, at the sizes of decode and a large one, directly and in a CUDA graph, and checks
        every sum.
      - V(p2p) copies between each two GPUs, one way and both, and checks what arrived.
      - V(link) reads generation and width of each PCIe link while data moves over it, and counts the GPUs before and after.
      - V(wedge) lets each GPU allocate, compute and free; one that is busy with no process is wedged. It also runs after a time-out or
        a crash.
    type: list
    elements: str
    choices: [kernels, all_reduce, p2p, link, wedge]
    default: [kernels, all_reduce, p2p, link, wedge]
  gpus:
    description: Numbers of the GPUs to use, as C(nvidia-smi) counts them; null uses all.
    type: list
    elements: int
  ranks:
    description: Numbers of processes that V(all_reduce) sums between. Empty means two and one for each GPU; without GPUs two and four.
    type: list
    elements: int
    default: []
  backend:
    description: What V(all_reduce) sums with. V(auto) is V(nccl) on GPUs and V(gloo) on the CPU.
    type: str
    choices: [auto, nccl, gloo]
    default: auto
  timeout_seconds:
    description: A probe that takes longer is ended; for V(all_reduce) each number of ranks has as long. V(wedge) has 60 seconds at most.
    type: float
    default: 120
  environment:
    description: Variables for the programs, above all others.
    type: dict
    default: {}
  allow_busy:
    description: Probe although other processes use the GPUs. It disturbs them, and they the figures.
    type: bool
    default: false
  lease:
    description: The lease of this run, as M(host_lease) returned it; renewed before the probes start.
    type: dict
attributes:
  check_mode:
    description: Says what would run, refuses what can't, and runs nothing but C(nvidia-smi).
    support: full
  diff_mode:
    description: There is nothing to show, since nothing changes.
    support: none
"""

EXAMPLES = r"""
- name: Try the GPUs
  gpu_probe:
    root: "{{ aerie_root }}"
  register: __gpu_probe

- name: See whether two GPUs can sum, with a Python that has torch
  gpu_probe:
    root: "{{ aerie_root }}"
    python: /opt/venv/bin/python
    probes: [all_reduce]
    gpus: [0, 1]
    environment:
      NCCL_P2P_LEVEL: SYS
"""

RETURN = r"""
probes:
  description:
    - What became of each probe, C(status) being C(passed), C(failed), C(timeout) or C(skipped).
    - The page C(docs/reference/probes.md) describes the figures.
  returned: when the probes ran
  type: dict
  sample:
    wedge:
      status: passed
      seconds: 6.2
      reason: null
      figures:
        gpus:
          "0":
            state: healthy
            reason: null
            utilization_percent: 0
            power_w: 31.5
            memory_used_mib: 4
            processes: []
            seconds: 0.4
healthy_after:
  description: Whether every GPU worked when it was looked at last; null when none was.
  returned: when the probes ran
  type: bool
  sample: true
would_run:
  description: The probes, with what they would run on.
  returned: in check mode
  type: list
  elements: dict
  sample:
    - probe: all_reduce
      python: /opt/aerie/current/bin/python
      gpus: [0, 1, 2, 3]
      ranks: [2, 4]
      backend: nccl
      timeout_seconds: 120
would_skip:
  description: The probes that would not run, with the reason.
  returned: in check mode
  type: dict
  sample: {p2p: "one GPU: there is none that it could copy to"}
job:
  description: The directory of the detached work; the action plugin removes it.
  returned: when the probes run
  type: str
  sample: /opt/aerie/jobs/probe-1748815200000000000-4242
"""

import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import probe_runner, probes
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "python": {"type": "str"},
            "probes": {"type": "list", "elements": "str", "choices": list(probes.PROBES), "default": list(probes.PROBES)},
            "gpus": {"type": "list", "elements": "int"},
            "ranks": {"type": "list", "elements": "int", "default": []},
            "backend": {"type": "str", "choices": list(probes.BACKENDS), "default": "auto"},
            "timeout_seconds": {"type": "float", "default": 120},
            "environment": {"type": "dict", "default": {}},
            "allow_busy": {"type": "bool", "default": False},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **_probe(module))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {module.params['root']}?")


def _probe(module: AnsibleModule) -> dict[str, Any]:
    planned = probes.plan(probes.Settings.of(module.params))
    if module.check_mode:
        return {"would_run": planned.steps(), "would_skip": dict(planned.skipped)}
    paths = HostPaths(Path(module.params["root"]))
    if not planned.steps():
        return probes.run(planned, lambda _: None, {})
    renew_if_given(paths.lease, module.params["lease"])
    # A host where nothing is installed yet is not given a root for a look.
    where = paths.jobs if paths.root.is_dir() else Path(tempfile.mkdtemp(prefix="aerie-probe-job-"))
    place = jobs.new_directory(where, "probe")
    # Read now: the archive that this module came in is gone once it has answered.
    programs = probe_runner.sources()
    jobs.start(place, lambda progress: probes.run(planned, progress.update, programs))
    return {"job": str(place)}


if __name__ == "__main__":
    main()
