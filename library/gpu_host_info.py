#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_host_info
short_description: Survey a host in one read-only call
description:
  - Says what a host is (hardware, system, Python, GPUs, service manager, container) and what runs there, and changes nothing.
  - Every command that it runs is bounded in time; what can't be read is null, and never an error.
author: Aerie contributors (!UNKNOWN)
options:
  aerie_root:
    description: Aerie's directory on the host; with it the current release is reported.
    type: path
  ports:
    description: TCP ports to ask after, to learn who listens there.
    type: list
    elements: int
    default: []
  paths:
    description: Absolute paths to ask after, whether they exist or not.
    type: list
    elements: path
    default: []
  pythons:
    description: Interpreters to ask after, besides V(python3), V(python3.11), V(python3.12) and V(python3.13).
    type: list
    elements: str
    default: []
  root:
    description:
      - Where the host's file tree is.
      - Another directory than V(/) is read as a recording, with what commands answered in its C(recording.json).
    type: path
    default: /
attributes:
  check_mode:
    description: Reads the same and changes nothing, as always.
    support: full
  diff_mode:
    description: There is nothing to show, since nothing changes.
    support: none
"""

EXAMPLES = r"""
- name: Survey the host
  gpu_host_info:
    aerie_root: "{{ aerie_root }}"
    ports: [30000]
    paths: [/opt/aerie, /srv/models]
  register: __gpu_host_info

- name: Read a host's recording
  gpu_host_info:
    root: "{{ playbook_dir }}/recordings/rtx-pro-6000"
"""

RETURN = r"""
hostname:
  description: The kernel's name for the host.
  returned: success
  type: str
  sample: gpu-01
machine_id_hash:
  description: A hash of the machine id, null where there is none.
  returned: success
  type: str
  sample: 3f1c0d8e9a7b6c54
user:
  description: Name and id of the user that the survey ran as.
  returned: success
  type: dict
  sample: {name: root, uid: 0}
os:
  description: The distribution, as os-release says.
  returned: success
  type: dict
  sample: {id: ubuntu, version_id: "24.04", name: Ubuntu 24.04.3 LTS}
kernel:
  description: The kernel's release.
  returned: success
  type: str
  sample: 6.14.0-37-generic
architecture:
  description: The machine's architecture.
  returned: success
  type: str
  sample: x86_64
cpu:
  description: Model and counts; C(available) is how many CPUs the survey's process may use.
  returned: success
  type: dict
  sample: {model: AMD EPYC 9575F 64-Core Processor, sockets: 2, cores: 128, logical: 256, available: 256}
memory:
  description: Bytes in total, available (within the control group's limit) and that limit, null where there is none.
  returned: success
  type: dict
  sample: {total_bytes: 1622000000000, available_bytes: 1590000000000, cgroup_limit_bytes: null}
gpus:
  description: The GPUs that the driver reports, in its order.
  returned: success
  type: list
  elements: dict
  sample:
    - index: 0
      name: NVIDIA RTX PRO 6000 Blackwell Server Edition
      uuid: GPU-11111111-2222-3333-4444-555555555555
      driver: 580.105.08
      memory_total_mib: 97887
      memory_used_mib: 4
      compute_capability: "12.0"
      pci_bus_id: 00000000:01:00.0
gpu_reason:
  description: Why RV(gpus) is empty, else null.
  returned: success
  type: str
  sample: "nvidia-smi: not found"
cuda_driver_version:
  description: The newest CUDA version that the driver supports.
  returned: success
  type: str
  sample: "13.0"
service_manager:
  description: Whether systemd manages the host, and the name of process 1.
  returned: success
  type: dict
  sample: {systemd: true, pid1: systemd}
container:
  description: The kind of container that the host is, null for none, and the evidence.
  returned: success
  type: dict
  sample: {kind: null, evidence: null}
pythons:
  description: Interpreters found, by name, and whether their modules for virtual environments are there.
  returned: success
  type: dict
  sample: {python3: {version: 3.12.3, executable: /usr/bin/python3, venv: true, ensurepip: false}}
paths:
  description: For each path whether it exists, and the room and our rights at its nearest existing parent.
  returned: success
  type: dict
  sample: {/opt/aerie: {exists: false, kind: null, nearest: /opt, total_bytes: 2000000000000, free_bytes: 1500000000000, writable: true}}
ports:
  description: For each port its listeners; a pid of null says that something listens which the user may not see.
  returned: success
  type: dict
  sample: {"30000": [{pid: 4711, argv: [python, -m, sglang.launch_server], instance: main, root: /opt/aerie}]}
servers:
  description: Processes of Aerie's servers, by instance.
  returned: success
  type: dict
  sample: {main: [{pid: 4711, argv: [python, -m, sglang.launch_server]}]}
release:
  description: The id of the current release, null where there is none.
  returned: success
  type: str
  sample: 0.5.15.post1-0123456789ab
fingerprint:
  description: A hash of machine, hardware, system and drivers, the same from run to run; figures of unequal ones don't compare.
  returned: success
  type: str
  sample: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import host_info
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "aerie_root": {"type": "path"},
            "ports": {"type": "list", "elements": "int", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
            "pythons": {"type": "list", "elements": "str", "default": []},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    aerie_root = module.params["aerie_root"]
    question = host_info.Question(
        aerie_root=Path(aerie_root) if aerie_root else None,
        ports=tuple(module.params["ports"]),
        paths=tuple(module.params["paths"]),
        pythons=(*module.params["pythons"], *host_info.PYTHONS),
    )
    try:
        info = host_info.survey(host_info.open_host(Path(module.params["root"])), question)
    except AerieError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **info)


if __name__ == "__main__":
    main()
