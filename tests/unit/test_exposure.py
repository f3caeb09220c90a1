"""What a server's processes open to the network is seen by their sockets, not by what was asked for."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.serving import exposure

TABLE = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


ROW = "   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"
LOOPBACK, EVERYWHERE = "0100007F", "00000000"


def test_sockets_beyond_this_machine_are_found_with_their_process_and_others_are_not(monkeypatch, tmp_path):
    """The server's own port, loopback, a stranger's socket and a connection are none."""
    sockets = {1: (LOOPBACK, 30000, "0A"), 2: (EVERYWHERE, 23934, "0A"), 3: (EVERYWHERE, 30000, "0A"), 4: (EVERYWHERE, 22, "0A")}
    sockets[5] = (EVERYWHERE, 40000, "01")
    (tmp_path / "net").mkdir()
    rows = [ROW.format(address=address, port=port, state=state, inode=inode) for inode, (address, port, state) in sockets.items()]
    (tmp_path / "net/tcp").write_text(TABLE + "".join(rows))
    for pid, inodes in ((4711, (1, 3)), (4712, (2, 5)), (4713, (2,)), (1, (4,))):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        for inode in inodes:
            (tmp_path / str(pid) / "fd" / str(inode)).symlink_to(f"socket:[{inode}]")
    monkeypatch.setattr(processes, "machine", processes.Machine(tmp_path))
    family = [
        processes.Process(pid, 1, (f"sglang::{name}",), ()) for pid, name in ((4711, "server"), (4712, "scheduler"), (4713, "detokenizer"))
    ]
    assert exposure.exposed(family, 30000) == [{"address": "0.0.0.0", "port": 23934, "pid": 4712, "process": "sglang::scheduler"}]
    assert exposure.exposed([], 30000) == []


@pytest.mark.parametrize(
    ("table", "text", "address", "is_loopback"),
    [
        ("tcp", "0100007F", "127.0.0.1", True),
        ("tcp", "00000000", "0.0.0.0", False),
        ("tcp", "0B6433C6", "198.51.100.11", False),
        ("tcp6", "00000000000000000000000001000000", "::1", True),
        ("tcp6", "00000000000000000000000000000000", "::", False),
        ("tcp6", "0000000000000000FFFF00000100007F", "::ffff:7f00:1", True),
    ],
)
def test_addresses_are_read_as_the_kernel_writes_them(tmp_path: Path, table, text, address, is_loopback):
    (tmp_path / "net").mkdir()
    rows = [ROW.format(address=text, port=0x7531, state=state, inode=4711) for state in ("0A", "01")]
    (tmp_path / "net" / table).write_text(TABLE + "".join(rows))
    (listener,) = processes.Machine(tmp_path).listeners()
    assert (listener.address, listener.port, listener.socket) == (ipaddress.ip_address(address), 0x7531, "socket:[4711]")
    assert listener.is_loopback is is_loopback
