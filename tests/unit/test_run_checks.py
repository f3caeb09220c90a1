"""A run that can't be right ends before its first task, and says what to do. By ansible-playbook itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
PLAYBOOKS = ("deploy_eagle3.yml", *(f"playbooks/{path.name}" for path in sorted((PROJECT / "playbooks").glob("*.yml"))))


def ansible(
    *arguments: str | Path, directory: Path = PROJECT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ansible-playbook as a person does in ``directory``, with no setting from around the tests."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    command = [sys.executable, "-m", "ansible.cli.playbook", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=directory,
        env=variables | {"NO_COLOR": "1", "COLUMNS": "140"} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """Return a copy of the example, as README's first step makes it."""
    return shutil.copytree(PROJECT / "inventory/example", tmp_path / "mine")


def edit(inventory: Path, change: dict[str, Any]) -> None:
    """Add variables for all hosts of ``inventory``."""
    (inventory / "group_vars/gpu_hosts/zz-test.yml").write_text(yaml.safe_dump(change))


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_in_another_working_directory_a_run_says_what_to_do(playbook, tmp_path):
    done = ansible("-i", PROJECT / "inventory/demo", PROJECT / playbook, directory=tmp_path)
    assert done.returncode == 4, done.stdout
    assert "nothing was touched" in done.stdout
    assert f"\n    cd {PROJECT}\n    export ANSIBLE_CONFIG={PROJECT}/ansible.cfg\n" in done.stdout
    assert "TASK" not in done.stdout


def test_a_run_from_elsewhere_works_with_the_projects_configuration(tmp_path):
    config = {"ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
    done = ansible(PROJECT / "playbooks/validate.yml", directory=tmp_path, environment=config)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("playbook", [name for name in PLAYBOOKS if name != "playbooks/preflight.yml"])
def test_an_inventory_without_the_group_is_refused(playbook):
    done = ansible("-i", "gpu-01,", playbook)
    assert done.returncode == 4, done.stdout
    assert "the inventory (gpu-01,) has no host in the group gpu_hosts" in done.stdout.replace("\n", " ")


def test_an_empty_inventory_is_refused(tmp_path):
    (tmp_path / "hosts.yml").write_text("gpu_hosts: {hosts: {}}\n")
    done = ansible("-i", tmp_path / "hosts.yml", "deploy_eagle3.yml")
    assert done.returncode == 4, done.stdout
    assert "has no host in the group gpu_hosts" in done.stdout


def test_a_limit_to_hosts_of_other_groups_is_refused(inventory):
    (inventory / "other.yml").write_text("others: {hosts: {web-01: {}}}\n")
    done = ansible("-i", inventory, "--limit", "others", "playbooks/stop.yml")
    assert done.returncode == 4, done.stdout
    assert "with --limit others has no host in the group gpu_hosts" in done.stdout.replace("\n", " ")


def test_a_yaml_error_is_named_with_file_and_line(inventory):
    file = inventory / "group_vars/gpu_hosts/main.yml"
    broken = file.read_text().replace("  main:\n    arm:", "  main:\n      arm:")
    file.write_text(broken)
    line = broken[: broken.index("    model: kimi")].count("\n") + 1
    done = ansible("-i", inventory, "playbooks/validate.yml")
    assert done.returncode == 4, done.stdout
    assert "these files can't be read, and no host was touched: 1 problem\n" in done.stdout
    assert f"  - {file}:{line}:" in done.stdout
    assert "TASK" not in done.stdout


def test_a_key_that_is_there_twice_is_an_error_in_variables_and_in_the_inventory(inventory):
    (inventory / "host_vars/gpu-01.yml").write_text("aerie_root: /a\naerie_root: /b\n")
    done = ansible("-i", inventory, "playbooks/validate.yml")
    assert done.returncode == 4, done.stdout
    assert f"{inventory}/host_vars/gpu-01.yml:2:1: 'aerie_root' is there twice, the first time in line 1" in done.stdout
    (inventory / "host_vars/gpu-01.yml").unlink()
    hosts = inventory / "hosts.yml"
    hosts.write_text(hosts.read_text().replace("    gpu-02:", "    gpu-01:"))
    done = ansible("-i", inventory, "playbooks/validate.yml")
    assert done.returncode == 1, done.stdout
    assert "Found duplicate mapping key 'gpu-01'" in done.stdout
    assert f"Origin: {hosts}:" in done.stdout


def test_a_file_that_a_directory_hides_is_warned_about(inventory):
    (inventory / "group_vars/gpu_hosts.yml").write_text("aerie_root: /srv/aerie\n")
    done = ansible("-i", inventory, "playbooks/validate.yml")
    assert done.returncode == 0, done.stdout
    assert f"[WARNING]: {inventory}/group_vars/gpu_hosts.yml is not read, since the directory gpu_hosts/ hides it" in done.stdout


def test_the_problems_of_a_fleet_are_one_report(inventory):
    instances = {
        "main": {"arm": "eagle3-v2", "model": "kimi-k2.5", "port": 30000, "gpus": [0, 1]},
        "second": {"arm": "basline", "model": "kimi-k2.5", "port": 30000, "gpus": [1, 2, 3, 4, 5, 6, 7, 8]},
    }
    edit(inventory, {"sglang_server_instances": instances, "sglang_server_ready_secs": 5})
    done = ansible("-i", inventory, "playbooks/validate.yml")
    assert done.returncode != 0, done.stdout
    assert done.stdout.count("these settings can't be used, and nothing was touched: 5 problems") == 1
    for problem in ("sglang_server_ready_secs", "'basline' is not one of", "port 30000 belongs to", "its flags use 8 GPUs"):
        assert done.stdout.count(problem) == 1, done.stdout
    assert done.stdout.rstrip().endswith("\n5 problems of settings on 4 hosts; they are listed above.")
    # gpu-04 has instances of its own, so that it shares one problem with the others.
    assert "all 4 hosts:" in done.stdout
    assert "gpu-01, gpu-02 and gpu-03:" in done.stdout


def test_one_host_with_a_mistake_ends_the_run_for_all(inventory):
    (inventory / "host_vars/gpu-03.yml").write_text("aerie_root: opt\n")
    done = ansible("-i", inventory, "playbooks/start.yml")
    assert done.returncode != 0
    assert "gpu-03:\n" in done.stdout
    assert "Hold the host" not in done.stdout


def test_right_settings_are_shown_as_tables_with_the_next_command(inventory):
    done = ansible("-i", inventory, "playbooks/validate.yml")
    assert done.returncode == 0, done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["hosts", "instance", "arm", "speculation", "model", "GPUs", "port", "SGLang"] in rows
    shared = ["gpu-01,", "gpu-02,", "gpu-03", "main", "eagle3-v2", "EAGLE3", "3/1/4"]
    assert [*shared, "kimi-k2.5", "0–7", "30000", "0.5.15.post1"] in rows
    assert ["hosts", "experiment", "instance", "arms", "starts", "cells", "duration"] in rows
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    assert lines[-3:] == [
        "The settings of 4 hosts can be used.",
        "Next:",
        f"ansible-playbook -i {inventory} playbooks/preflight.yml",
    ]
