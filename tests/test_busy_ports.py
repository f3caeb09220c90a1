"""The suite runs on a busy machine: the ports that the inventories name are taken."""

from __future__ import annotations

import errno
import socket

import pytest

from ports import BUSY_PORTS


@pytest.mark.parametrize("port", BUSY_PORTS)
def test_a_port_of_the_inventories_is_taken_while_tests_run(port):
    with pytest.raises(OSError) as raised:
        socket.create_server(("127.0.0.1", port)).close()
    assert raised.value.errno == errno.EADDRINUSE
