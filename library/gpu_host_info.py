#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_host_info
short_description: Survey a host in one read-only call
description:
  - Says what a host is (hardware, system, Python, GPUs, service manager, container) and what runs there, and changes nothing.
  - Its commands run at once and are bounded in time; what can't be read is null, and never an error.
  - What is in each value, and how a host is recorded, is described in C(docs/reference/host-info.md).
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
  models:
    description: Absolute paths of models to look through for missing files and cut off ones; weights are not read whole.
    type: list
    elements: path
    default: []
  catalog:
    description:
      - The catalog of models, as C(sglang_models_catalog). Those that are on the host are looked through too, where they are, and so are
        their paths; one that is still to be brought is left out.
      - Models that are brought below O(aerie_root) are found only with it.
    type: dict
    default: {}
  command_seconds:
    description: What each command is given; the whole survey takes little longer, since they run at once.
    type: float
    default: 4
  record:
    description: Whether to return what was read as a recording too, without personal details.
    type: bool
    default: false
  record_to:
    description:
      - A directory on the controller; the recording is written to C(recording.json) in a directory of it that is named after the host.
      - Nothing is written in check mode.
    type: path
  root:
    description:
      - Where the host's file tree is.
      - Another directory than V(/) is read as a recording, with what commands answered in its C(recording.json).
    type: path
    default: /
attributes:
  check_mode:
    description: Reads the same and changes nothing on the host, as always; no recording is written.
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

- name: Record a host, to have it looked at elsewhere
  gpu_host_info:
    aerie_root: "{{ aerie_root }}"
    record_to: "{{ playbook_dir }}/recordings"

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
uptime_seconds:
  description: The seconds since the host booted.
  returned: success
  type: float
  sample: 86400.25
cpu:
  description: Model, counts, NUMA nodes and frequency; C(available) is how many CPUs the survey's process may use.
  returned: success
  type: dict
  sample:
    model: AMD EPYC 9575F 64-Core Processor
    sockets: 2
    cores: 128
    logical: 256
    available: 256
    numa_nodes: [{node: 0, cpus: "0-63,128-191"}, {node: 1, cpus: "64-127,192-255"}]
    governors: {performance: 256}
    frequency_driver: amd-pstate-epp
    max_cstate: 1
memory:
  description: Bytes in total, available (within the control group's limit) and that limit, null where there is none.
  returned: success
  type: dict
  sample: {total_bytes: 1622000000000, available_bytes: 1590000000000, cgroup_limit_bytes: null}
gpus:
  description: The GPUs that the driver reports, in its order; a value that the driver does not know is null.
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
      sku: server
      architecture: Blackwell
      vbios: 98.02.55.00.01
      bar1_total_mib: 131072
      persistence: true
      mig: false
      compute_mode: Default
      performance_state: P8
      temperature_c: 31
      utilization_percent: 0
      numa_node: 0
      recovery_action: null
      power: {draw_w: 33.1, limit_w: 600.0, default_w: 600.0, min_w: 300.0, max_w: 600.0}
      clocks: {sm_mhz: 180, sm_max_mhz: 2430, memory_mhz: 405, memory_max_mhz: 12481}
      throttle: []
      pcie: {generation: 1, generation_max: 5, generation_max_gpu: 5, generation_max_slot: 5, width: 16, width_max: 16, replays: 0}
      ecc: {enabled: true, pending: false, uncorrectable: 0}
      remapped_rows: {pending: false, failed: false}
      processes: []
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
driver:
  description: The driver, installed and loaded, its parameters as loaded, and the errors (Xid) of the kernel's log.
  returned: success
  type: dict
  sample:
    version: 580.105.08
    cuda_version: "13.0"
    user_space_version: 580.105.08
    module: open
    loaded_version: 580.105.08
    loaded: true
    parameters: {RegistryDwords: "", EnableResizableBar: "0"}
    registry_dwords: ""
    uvm_parameters: {uvm_disable_hmm: "Y"}
    modprobe_files: {/etc/modprobe.d/nvidia.conf: options nvidia_uvm uvm_disable_hmm=1}
    installed_age_s: 864000
    xids: [{seconds: 8123.4, xid: 79, pci: "0000:41:00.0", message: "GPU has fallen off the bus."}]
    kernel_log: dmesg
    kernel_log_reason: null
topology:
  description: How each pair of GPUs is linked and whether one may read the other's memory, as the driver says.
  returned: success
  type: dict
  sample: {links: {0-1: PIX}, p2p_read: {0-1: OK}, reason: null}
pci:
  description: PCI bridges with their access control, and the links that NVIDIA's display controllers hang on.
  returned: success
  type: dict
  sample:
    source: lspci
    reason: null
    bridges:
      - address: "0000:00:01.1"
        name: Advanced Micro Devices, Inc. [AMD] Device
        parent: null
        kind: root_port
        to_gpus: [0, 1]
        acs: {source_validation: false, request_redirect: false, completion_redirect: false, upstream_forwarding: false}
        link: {generation: 5, generation_max: 5, width: 16, width_max: 16}
    gpu_links:
      - address: "0000:01:00.0"
        gpu: 0
        name: NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition]
        parent: "0000:00:01.1"
        numa_node: 0
        responds: true
        link: {generation: 1, generation_max: 5, width: 16, width_max: 16}
iommu:
  description: Whether an IOMMU translates, and passes through.
  returned: success
  type: dict
  sample: {groups: 0, enabled: false, passthrough: null}
kernel_command_line:
  description: The kernel's command line.
  returned: success
  type: str
  sample: BOOT_IMAGE=/boot/vmlinuz root=/dev/md0 iommu=off
kernel_parameters:
  description: Its parameters with all their values; a bare word has an empty one.
  returned: success
  type: dict
  sample: {iommu: ["off"], quiet: [""]}
sysctl:
  description: Kernel settings that matter here, where the kernel has them.
  returned: success
  type: dict
  sample: {vm.swappiness: "0", kernel.numa_balancing: "0"}
limits:
  description: Soft limits of the survey's process.
  returned: success
  type: dict
  sample: {memlock: unlimited, nofile: 1048576}
transparent_hugepages:
  description: The choice in force of transparent huge pages.
  returned: success
  type: str
  sample: madvise
libraries:
  description: CUDA's libraries that the loader would find.
  returned: success
  type: dict
  sample: {cuda: [{name: libcudart, path: /usr/local/cuda-13.0/lib64/libcudart.so.13, major: 13, source: ldconfig}]}
tools:
  description: CUDA's compilers, those that would be taken first, and what else there is.
  returned: success
  type: dict
  sample:
    nvcc: {path: /usr/local/cuda/bin/nvcc, version: "13.0"}
    ptxas: {path: /usr/local/cuda/bin/ptxas, version: "13.0"}
    triton_ptxas: {path: /opt/aerie/triton/backends/nvidia/bin/ptxas, version: "12.9"}
    nvcc_candidates: [/usr/local/cuda/bin/nvcc]
packages:
  description: Packages of the current release, null without one, and those of the system that belong to the GPUs.
  returned: success
  type: dict
  sample:
    release: {torch: 2.9.1+cu130, torch_cuda: "13.0", sglang: 0.5.15, nccl: 2.28.3}
    system: {nvidia-open: 580.105.08-1, cuda-toolkit-13-0: 13.0.2-1}
    held: [nvidia-open]
    broken: []
nccl:
  description: The system's NCCL, every file that sets it, and the graph and topology files that these name.
  returned: success
  type: dict
  sample:
    system_version: 2.28.3
    configs: [{path: /etc/nccl.conf, settings: {NCCL_IB_DISABLE: "1"}}]
    environment: {NCCL_P2P_LEVEL: SYS}
    graph_files: [{variable: NCCL_GRAPH_FILE, from: environment, path: /etc/nccl-graph.xml, exists: true, gpus: 8}]
caches:
  description: Caches of compiled kernels and of what was found out about the GPUs, and the seconds since they changed.
  returned: success
  type: list
  elements: dict
  sample: [{path: /home/ops/.triton/cache, kind: triton, age_s: 864000, release_keyed: false}]
models:
  description:
    - For each path of O(models) and O(catalog) what keeps a server from loading it, its size, and its identity.
    - The identity is the one that M(model_identity) found, as long as no file was touched since; null where it is not known.
      Nothing is hashed here.
  returned: success
  type: dict
  sample:
    /srv/models/Kimi-K2.5:
      problems: []
      bytes: 595000000000
      identity: 3f0c5e2b9d77ab01c4de551f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b
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
survey:
  description: How long the survey took, and what became of each command; no part of the fingerprint.
  returned: success
  type: dict
  sample: {seconds: 0.7, commands: {nvidia-smi -q -x: {rc: 0, seconds: 0.4, reason: null}}}
recording:
  description: What was read, without personal details.
  returned: when O(record)
  type: dict
  sample: {format: 1, files: {/etc/os-release: "ID=ubuntu"}, commands: {uname -m: {rc: 0, stdout: x86_64}}}
recording_path:
  description: Where the recording was written on the controller.
  returned: when O(record_to), not in check mode
  type: str
  sample: /srv/recordings/gpu-01/recording.json
fingerprint:
  description: A hash of machine, hardware, system and drivers, the same from run to run; figures of unequal ones don't compare.
  returned: success
  type: str
  sample: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.host import anonymize, host_info
from ansible.module_utils.aerie.releases import model_catalog
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "aerie_root": {"type": "path"},
            "ports": {"type": "list", "elements": "int", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
            "pythons": {"type": "list", "elements": "str", "default": []},
            "models": {"type": "list", "elements": "path", "default": []},
            "catalog": {"type": "dict", "default": {}},
            "command_seconds": {"type": "float", "default": host_info.SURVEY_COMMAND_SECONDS},
            "record": {"type": "bool", "default": False},
            "record_to": {"type": "path"},
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
        models=tuple(module.params["models"]),
        catalog=module.params["catalog"],
        command_seconds=module.params["command_seconds"],
    )
    recording: dict[str, Any] | None = {} if module.params["record"] or module.params["record_to"] else None
    try:
        raise_all(model_catalog.problems(question.catalog), "catalog")
        info = host_info.survey(host_info.open_host(Path(module.params["root"])), question, recording)
    except AerieError as error:
        module.fail_json(msg=str(error))
    if recording is not None:
        info["recording"] = anonymize.anonymize(recording)
    module.exit_json(changed=False, **info)


if __name__ == "__main__":
    main()
