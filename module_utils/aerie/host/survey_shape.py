"""What a survey of a host looks like to the controller: data of that host, which may be anything.

:func:`checked` returns a survey of the documented shape, whatever came. A part of another type is as
unknown as one that could not be read, and is reported. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.untrusted import FLAG, LIST, MAPPING, NUMBER, TEXT, WHOLE, Kind, ListOf, MapOf, Maybe

LIMITS = untrusted.Limits(size=untrusted.SURVEY.size, unicode=False)
MOST_GPUS = 256

_TEXT_OR_NUMBER = Kind("text or a number", lambda value: TEXT.test(value) or NUMBER.test(value))
_INDEX = Kind("a number of a GPU", lambda value: WHOLE.test(value) and 0 <= value < 1 << 16)
_text, _whole, _flag, _number = Maybe(TEXT), Maybe(WHOLE), Maybe(FLAG), Maybe(NUMBER)
_link = Maybe({f"{name}?": _whole for name in ("generation", "generation_max", "width", "width_max")})


def _keys(shape: Any, *names: str) -> dict[str, Any]:
    return {f"{name}?": shape for name in names}


GPU = {
    "index?": Maybe(_INDEX),
    **_keys(_text, "name", "uuid", "driver", "compute_capability", "pci_bus_id", "sku", "architecture", "vbios"),
    **_keys(_text, "compute_mode", "performance_state", "recovery_action"),
    **_keys(_number, "memory_total_mib", "memory_used_mib", "bar1_total_mib", "temperature_c", "utilization_percent", "numa_node"),
    **_keys(_flag, "persistence", "mig"),
    **_keys(Maybe(MapOf(_number)), "power", "clocks", "pcie"),
    "ecc?": Maybe({**_keys(_flag, "enabled", "pending"), "uncorrectable?": _number}),
    "remapped_rows?": Maybe(_keys(_flag, "pending", "failed")),
    "throttle?": Maybe(ListOf(TEXT)),
    "processes?": Maybe(ListOf({"pid?": _whole, "name?": _text, "memory_mib?": _number})),
}
BRIDGE = {
    **_keys(_text, "address", "name", "parent", "kind"),
    "to_gpus?": Maybe(ListOf(_INDEX)),
    "acs?": Maybe(MapOf(_flag)),
    "link?": _link,
}
SURVEY: untrusted.Shape = {
    **_keys(_text, "hostname", "machine_id_hash", "kernel", "architecture", "gpu_reason", "cuda_driver_version"),
    **_keys(_text, "kernel_command_line", "transparent_hugepages", "release", "fingerprint"),
    "uptime_seconds?": _number,
    "user?": Maybe({"name?": _text, "uid?": _whole}),
    "os?": Maybe(MapOf(_text)),
    "cpu?": Maybe(
        {
            **_keys(_text, "model", "frequency_driver"),
            **_keys(_whole, "sockets", "cores", "logical", "available", "max_cstate"),
            "numa_nodes?": Maybe(ListOf({"node?": _whole, "cpus?": _text})),
            "governors?": Maybe(MapOf(WHOLE)),
        }
    ),
    "memory?": Maybe(MapOf(_whole)),
    "gpus?": Maybe(ListOf(GPU)),
    "driver?": Maybe(
        {
            **_keys(_text, "version", "cuda_version", "user_space_version", "module", "loaded_version"),
            **_keys(_text, "registry_dwords", "kernel_log", "kernel_log_reason"),
            "loaded?": _flag,
            "installed_age_s?": _number,
            **_keys(Maybe(MapOf(TEXT)), "parameters", "uvm_parameters", "modprobe_files"),
            "xids?": Maybe(ListOf({"seconds?": _number, "xid?": _whole, "pci?": _text, "message?": _text})),
        }
    ),
    "topology?": Maybe({**_keys(Maybe(MapOf(TEXT)), "links", "p2p_read"), "reason?": _text}),
    "pci?": Maybe(
        {
            **_keys(_text, "source", "reason"),
            "bridges?": Maybe(ListOf(BRIDGE)),
            "gpu_links?": Maybe(
                ListOf(
                    {
                        **_keys(_text, "address", "name", "parent"),
                        **_keys(_whole, "gpu", "numa_node"),
                        "responds?": _flag,
                        "link?": _link,
                    }
                )
            ),
        }
    ),
    "iommu?": Maybe({"groups?": _whole, **_keys(_flag, "enabled", "passthrough")}),
    "kernel_parameters?": Maybe(MapOf(ListOf(TEXT))),
    "sysctl?": Maybe(MapOf(TEXT)),
    "limits?": Maybe(MapOf(Maybe(_TEXT_OR_NUMBER))),
    "libraries?": Maybe(MapOf(Maybe(ListOf({**_keys(_text, "name", "path", "source"), "major?": _whole})))),
    "tools?": Maybe(
        {
            **_keys(Maybe({**_keys(_text, "path", "version")}), "nvcc", "ptxas", "triton_ptxas"),
            "nvcc_candidates?": Maybe(ListOf(TEXT)),
        }
    ),
    "packages?": Maybe(
        {
            "release?": Maybe(MapOf(_text)),
            "system?": Maybe(MapOf(TEXT)),
            "held?": Maybe(ListOf(TEXT)),
            "broken?": Maybe(ListOf(Maybe(untrusted.ANYTHING))),
        }
    ),
    "nccl?": Maybe(
        {
            "system_version?": _text,
            "configs?": Maybe(ListOf({"path": TEXT, "settings": MapOf(_TEXT_OR_NUMBER)})),
            "environment?": Maybe(MapOf(_TEXT_OR_NUMBER)),
            "graph_files?": Maybe(ListOf({**_keys(_text, "variable", "from", "path"), "exists?": _flag, "gpus?": _whole})),
        }
    ),
    "caches?": Maybe(ListOf({**_keys(_text, "path", "kind"), "age_s?": _number, "release_keyed?": _flag})),
    "models?": Maybe(MapOf({"problems?": Maybe(ListOf(TEXT)), "bytes?": _whole, "identity?": _text})),
    "service_manager?": Maybe({"systemd?": _flag, "pid1?": _text}),
    "container?": Maybe(MapOf(_text)),
    "pythons?": Maybe(MapOf(Maybe({**_keys(_text, "version", "executable"), **_keys(_flag, "venv", "ensurepip")}))),
    "paths?": Maybe(
        MapOf(
            {
                **_keys(_flag, "exists", "writable"),
                **_keys(_text, "kind", "nearest"),
                **_keys(_whole, "total_bytes", "free_bytes"),
            }
        )
    ),
    "ports?": Maybe(MapOf(ListOf({"pid?": _whole, "argv?": Maybe(LIST), "instance?": _text, "root?": _text}))),
    "servers?": Maybe(MapOf(ListOf({"pid?": _whole, "argv?": Maybe(LIST)}))),
    "survey?": Maybe({"seconds?": _number, "commands?": Maybe(MapOf(MAPPING))}),
}
"""Every key may be missing: a survey of an earlier Aerie has fewer."""


def checked(survey: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a survey of the documented shape and what was not as documented; raise Malformed for what is no survey."""
    if not isinstance(survey, Mapping):
        raise untrusted.Malformed("it is no survey")
    untrusted.check(survey, LIMITS)
    found, problems = untrusted.conform(untrusted.made_unicode(survey), SURVEY)
    if len(found.get("gpus") or ()) > MOST_GPUS:
        raise untrusted.Malformed(f"it has {len(found['gpus']):,} GPUs")
    return found, problems
