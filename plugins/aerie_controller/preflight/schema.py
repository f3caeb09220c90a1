"""Which paths rules may name: the shape of a host's info, as gpu_host_info returns it, and of what is wanted there.

A mapping has the keys that are written, ``{"*": …}`` any keys, ``[…]`` is a list, ``None`` a value, ``...`` whatever
a probe says. The reference of the info is
docs/reference/host-info.md; a test compares this shape with what the recorded hosts give.
"""

from __future__ import annotations

from typing import Any

Shape = Any

PROCESS: Shape = {"pid": None, "argv": [None]}
LINK: Shape = {"generation": None, "generation_max": None, "width": None, "width_max": None}
PROBE: Shape = {"status": None, "seconds": None, "reason": None, "figures": {"*": ...}}

INFO: Shape = {
    "hostname": None,
    "machine_id_hash": None,
    "user": {"name": None, "uid": None},
    "os": {"id": None, "version_id": None, "name": None},
    "kernel": None,
    "architecture": None,
    "cpu": {
        "model": None,
        "sockets": None,
        "cores": None,
        "logical": None,
        "available": None,
        "numa_nodes": [{"node": None, "cpus": None}],
        "governors": {"*": None},
        "frequency_driver": None,
        "max_cstate": None,
    },
    "uptime_seconds": None,
    "transparent_hugepages": None,
    "memory": {"total_bytes": None, "available_bytes": None, "cgroup_limit_bytes": None},
    "gpus": [
        {
            "index": None,
            "name": None,
            "uuid": None,
            "driver": None,
            "memory_total_mib": None,
            "memory_used_mib": None,
            "compute_capability": None,
            "pci_bus_id": None,
            "sku": None,
            "architecture": None,
            "vbios": None,
            "bar1_total_mib": None,
            "persistence": None,
            "mig": None,
            "compute_mode": None,
            "performance_state": None,
            "temperature_c": None,
            "utilization_percent": None,
            "numa_node": None,
            "recovery_action": None,
            "power": {"draw_w": None, "limit_w": None, "default_w": None, "min_w": None, "max_w": None},
            "clocks": {"sm_mhz": None, "sm_max_mhz": None, "memory_mhz": None, "memory_max_mhz": None},
            "throttle": [None],
            "pcie": {
                "generation": None,
                "generation_max": None,
                "generation_max_gpu": None,
                "generation_max_slot": None,
                "width": None,
                "width_max": None,
                "replays": None,
            },
            "ecc": {"enabled": None, "pending": None, "uncorrectable": None},
            "remapped_rows": {"pending": None, "failed": None},
            "processes": [{"pid": None, "name": None, "memory_mib": None}],
        }
    ],
    "gpu_reason": None,
    "cuda_driver_version": None,
    "driver": {
        "version": None,
        "cuda_version": None,
        "module": None,
        "loaded_version": None,
        "loaded": None,
        "parameters": {"*": None},
        "registry_dwords": None,
        "uvm_parameters": {"*": None},
        "modprobe_files": {"*": None},
        "xids": [{"seconds": None, "xid": None, "pci": None, "message": None}],
        "user_space_version": None,
        "installed_age_s": None,
        "kernel_log": None,
        "kernel_log_reason": None,
    },
    "topology": {"links": {"*": None}, "p2p_read": {"*": None}, "reason": None},
    "pci": {
        "source": None,
        "reason": None,
        "bridges": [
            {
                "address": None,
                "name": None,
                "parent": None,
                "kind": None,
                "to_gpus": [None],
                "acs": {"*": None},
                "link": LINK,
            }
        ],
        "gpu_links": [{"address": None, "gpu": None, "name": None, "parent": None, "numa_node": None, "responds": None, "link": LINK}],
    },
    "iommu": {"groups": None, "enabled": None, "passthrough": None},
    "kernel_command_line": None,
    "kernel_parameters": {"*": [None]},
    "sysctl": {"*": None},
    "limits": {"memlock": None, "nofile": None},
    "libraries": {"cuda": [{"name": None, "path": None, "major": None, "source": None}]},
    "tools": {
        "nvcc": {"path": None, "version": None},
        "ptxas": {"path": None, "version": None},
        "nvcc_candidates": [None],
        "triton_ptxas": {"path": None, "version": None},
    },
    "packages": {"release": {"*": None}, "system": {"*": None}, "held": [None], "broken": [None]},
    "nccl": {
        "system_version": None,
        "configs": [{"path": None, "settings": {"*": None}}],
        "environment": {"*": None},
        "graph_files": [{"variable": None, "from": None, "path": None, "exists": None, "gpus": None}],
    },
    "caches": [{"path": None, "kind": None, "age_s": None, "release_keyed": None}],
    "models": {"*": {"problems": [None], "bytes": None, "identity": None}},
    "service_manager": {"systemd": None, "pid1": None},
    "container": {"kind": None, "evidence": None},
    "pythons": {"*": {"version": None, "executable": None, "venv": None, "ensurepip": None}},
    "paths": {"*": {"exists": None, "kind": None, "nearest": None, "total_bytes": None, "free_bytes": None, "writable": None}},
    "ports": {"*": [PROCESS | {"instance": None, "root": None}]},
    "servers": {"*": [PROCESS]},
    "release": None,
    "fingerprint": None,
    "survey": {"seconds": None, "commands": {"*": {"rc": None, "seconds": None, "reason": None}}},
    # What gpu_probe found, where active probes ran.
    "probes": {"kernels": PROBE, "all_reduce": PROBE, "p2p": PROBE, "link": PROBE, "wedge": PROBE},
    "healthy_after": None,
}
"""What ``info`` is in an expression."""

WANT: Shape = {
    "profile": None,
    "root": None,
    "version": None,
    "driver_version": None,
    "instances": {
        "*": {"arm": None, "model": None, "port": None, "host": None, "gpus": [None], "flags": {"*": None}, "environment": {"*": None}}
    },
    "arms": {"*": {"*": None}},
    "models": {"*": {"path": None, "source": None, "weights": None}},
    "flags": {"*": None},
    "environment": {"*": None},
    "nccl": {"*": None},
    "disk_gib": None,
}
"""What ``want`` is in an expression: what the inventory asks of the host."""

SCOPE: dict[str, Shape] = {"info": INFO, "want": WANT}
