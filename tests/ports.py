"""TCP ports for servers that tests start."""

from __future__ import annotations

import contextlib
import socket

BUSY_PORTS = range(30000, 30011)
"""Ports that the inventories name, taken while tests run: tests must pass beside a running demo."""

_reservations: list[socket.socket] = []


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens, reserved until this process ends.

    The socket stays bound and never listens. As long as it does, the kernel gives its port to no
    process that binds to port 0 or connects, so that tests of two clones never share one. A server
    with SO_REUSEADDR, as all of ours have, may still listen there (ip(7)); where none does, a
    connection is refused.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    _reservations.append(reservation)
    return int(reservation.getsockname()[1])


def occupy() -> list[socket.socket]:
    """Return a listener for each of ``BUSY_PORTS`` on which nobody else listens.

    Listeners of several test runs share a port (SO_REUSEPORT), so that it stays taken when one of them
    ends. A server without that option, as all of ours are, still finds it taken.
    """
    listeners = []
    for port in BUSY_PORTS:
        with contextlib.suppress(OSError):
            listeners.append(socket.create_server(("127.0.0.1", port), reuse_port=True))
    return listeners
