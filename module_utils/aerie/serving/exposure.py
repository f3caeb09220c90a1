"""What of a server the network reaches besides what it was told to serve. Standard library only: this runs on hosts.

A server's own port is checked before it starts (launch_checks.exposure_problems). Its processes open
more, which no flag names: torch's TCPStore, by which ranks find each other, listens on every
interface and asks for no key (torch's security policy: for internal networks only).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.processes import Process


def exposed(family: Iterable[Process], port: int) -> list[dict[str, Any]]:
    """Return the sockets of a server's processes that listen beyond this machine, its own ``port`` left out.

    Each has ``address`` and ``port``, ``pid`` and ``process``, in order of port.
    """
    found = [
        {"address": str(listener.address), "port": listener.port, "pid": process.pid, "process": process.title}
        for process, listener in processes.listeners_of(family)
        if not listener.is_loopback and listener.port != port
    ]
    return sorted(found, key=lambda entry: int(entry["port"]))
