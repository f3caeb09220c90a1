"""What is asked after by name: paths, ports and their listeners, servers, models. Standard library only: this runs on hosts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host.hosts import INSTANCE_VARIABLE, ROOT_VARIABLE, Host


def refuse_relative(name: str, paths: Iterable[str]) -> None:
    """Raise for a path that is not absolute."""
    for path in paths:
        if not Path(path).is_absolute():
            raise AerieError(f"{name}: {path} is not absolute")


def read_path(host: Host, path: str) -> dict[str, Any]:
    """Return whether ``path`` exists, and size, free bytes and our rights on its nearest existing parent."""
    found, nearest = host.stat(path), Path(path)
    while nearest != nearest.parent and host.stat(str(nearest)) is None:
        nearest = nearest.parent
    return {"exists": found is not None, "kind": found.kind if found else None, "nearest": str(nearest), **host.disk(str(nearest))}


def late_path(path: str, seconds: float) -> dict[str, Any]:
    """Return what is said of a path that gave no answer, as a dead network mount does."""
    return {
        "exists": None,
        "kind": None,
        "nearest": None,
        "total_bytes": None,
        "free_bytes": None,
        "writable": None,
        "reason": f"{path} gave no answer within {seconds:g} s",
    }


def read_ports(host: Host, ports: Iterable[int]) -> dict[str, list[dict[str, Any]]]:
    """Return who listens on each TCP port; one entry without pid says that something does which we may not see."""
    found = {}
    for port in ports:
        holders = host.holders(port)
        owners = [
            {
                "pid": owner.pid,
                "argv": list(owner.argv),
                "instance": owner.variable(INSTANCE_VARIABLE),
                "root": owner.variable(ROOT_VARIABLE),
            }
            for owner in holders or ()
        ]
        hidden = holders is not None and not owners
        found[str(port)] = owners or ([{"pid": None, "argv": [], "instance": None, "root": None}] if hidden else [])
    return found


def read_servers(host: Host, root: str | None) -> dict[str, list[dict[str, Any]]]:
    """Return the servers of ``root`` that run, by the instance that their environment names."""
    servers: dict[str, list[dict[str, Any]]] = {}
    for process in host.processes():
        # Another root may have an instance of the same name.
        if (name := process.variable(INSTANCE_VARIABLE)) and (root is None or process.variable(ROOT_VARIABLE) == root):
            servers.setdefault(name, []).append({"pid": process.pid, "argv": list(process.argv)})
    return servers
