"""Test hosts are hosts: systemd runs them, SSH reaches them, they reach the controller and nothing else."""

from __future__ import annotations

import subprocess
import urllib.parse

from booted_hosts import BRIDGE, NETWORK, BootedHosts, machine_network


def test_systemd_runs_without_a_failed_unit(targets):
    for host in targets.hosts:
        assert targets.on(host, "systemctl is-system-running --wait") == "running"


def test_each_host_is_itself(targets):
    assert [targets.on(host, "hostname") for host in targets.hosts] == ["gpu1", "gpu2"]


def test_hosts_fetch_wheels_from_the_controller(targets, wheels):
    page = targets.python(targets.hosts[1], f"import urllib.request; print(urllib.request.urlopen({wheels!r}, timeout=10).read().decode())")
    assert "sglang-" in urllib.parse.unquote(page)
    assert "torch-" in page


def test_hosts_have_no_other_way_out(targets):
    assert "default" not in targets.on(targets.hosts[0], "ip route")


def output_of(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_machines_own_network_has_nothing_of_the_hosts(targets):
    assert BRIDGE in output_of("ip", "link")
    with machine_network():
        assert BRIDGE not in output_of("ip", "link")
        assert str(NETWORK.network_address) not in output_of("ip", "route")


def test_hosts_of_two_clones_share_no_name_but_their_own(targets, tmp_path):
    ours, theirs = targets.hosts[0], BootedHosts(tmp_path).host(1)
    assert (ours.name, ours.address) == (theirs.name, theirs.address)
    assert ours.namespace != theirs.namespace
