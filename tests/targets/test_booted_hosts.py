"""Test hosts are hosts: systemd runs them, SSH reaches them, they reach the controller and nothing else."""

from __future__ import annotations

import urllib.parse


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
