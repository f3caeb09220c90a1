"""ansible-playbook itself ends a run with wrong settings at once, with all of them told, before anything is touched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
TOUCH = {"ansible.builtin.file": {"path": "{{ touched }}", "state": "touch"}}
PLAYBOOK = [{"hosts": "all", "gather_facts": False, "roles": ["aerie"], "tasks": [TOUCH]}]
RELEASE = {"ansible.builtin.include_role": {"name": "aerie", "tasks_from": "release"}}
NOTHING_TO_SERVE = {
    "aerie_profile": "cpu",
    "sglang_server_arms": {},
    "sglang_server_instances": {},
    "sglang_patches_sets": [],
    "sglang_benchmark_experiment": None,
}


@pytest.fixture
def play(tmp_path: Path):
    """Run role aerie on this machine with the given variables; the play would touch a file after it."""

    def run(variables: dict, *options: str, playbook: list[dict] = PLAYBOOK) -> tuple[subprocess.CompletedProcess[str], Path]:
        touched = tmp_path / "touched"
        host = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "touched": str(touched),
            **NOTHING_TO_SERVE,
            **variables,
        }
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": host}}}))
        (tmp_path / "play.yml").write_text(yaml.safe_dump(playbook))
        config = {"library": "library", "module_utils": "module_utils", "action_plugins": "plugins/action", "roles_path": "roles"}
        lines = [f"{name} = {PROJECT / path}" for name, path in config.items()]
        (tmp_path / "ansible.cfg").write_text("\n".join(["[defaults]", *lines, "nocolor = true", ""]))
        command = [sys.executable, "-m", "ansible.cli.playbook", "-i", "hosts.yml", "play.yml", *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        environment |= {"ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "ANSIBLE_LOCAL_TEMP": str(tmp_path / "temp")}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120), touched

    return run


def test_all_mistakes_are_told_in_one_failure_and_nothing_is_touched(play, tmp_path):
    root = tmp_path / "root"
    done, touched = play(
        {
            "aerie_root": str(root),
            "aerie_profile": "gpu",
            "aerie_lease_seconds": "soon",
            "aerie_rot": "/x",
            "gpu_host_disk_required_gib": "much",
            "gpu_host_memory_required_gib": "{{ 3 + missing }}",
        }
    )
    assert done.returncode != 0
    assert "5 problems" in done.stdout + done.stderr
    for message in (
        "aerie_profile must be one of: cuda, cpu, got: gpu",
        "argument 'aerie_lease_seconds' is of type str",
        f"aerie_rot ({tmp_path}/hosts.yml:",
        "role aerie has no such setting; did you mean 'aerie_root'",
        "argument 'gpu_host_disk_required_gib' is of type str",
        "gpu_host_memory_required_gib",
        "'missing' is undefined",
    ):
        assert message in done.stdout + done.stderr
    assert not touched.exists()
    assert not root.exists()


def test_right_settings_pass_and_the_host_is_held(play, tmp_path):
    done, touched = play({"aerie_root": str(tmp_path / "root")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert touched.exists()
    assert (tmp_path / "root/lease.json").exists()
    assert "profile cpu" in done.stdout


@pytest.mark.parametrize("options", [["-e", "__aerie_read_only=true"], ["--check"]])
def test_a_run_that_changes_nothing_takes_no_lease(play, tmp_path, options):
    done, _ = play({"aerie_root": str(tmp_path / "root")}, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "root").exists()


def outcomes(output: str, task: str) -> list[str]:
    """Return the words before ``: [here]`` of each time that ``task`` of role aerie ran."""
    return re.findall(rf"TASK \[aerie : {re.escape(task)}\] \*+\n(\w+): \[here\]", output)


def test_later_plays_of_a_run_neither_validate_nor_lease_again(play, tmp_path):
    playbook = [*PLAYBOOK, *PLAYBOOK, {**PLAYBOOK[0], "post_tasks": [RELEASE]}]
    done, _ = play({"aerie_root": str(tmp_path / "root")}, playbook=playbook)
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done.stdout, "Check every setting of every role") == ["ok"]
    assert outcomes(done.stdout, "Hold the host for this run") == ["ok"]
    assert outcomes(done.stdout, "Check all settings") == ["skipping", "skipping"]
    assert outcomes(done.stdout, "Give the host back") == ["ok"]
    assert not (tmp_path / "root/lease.json").exists()


def test_a_play_after_the_host_was_given_back_holds_it_anew(play, tmp_path):
    done, _ = play({"aerie_root": str(tmp_path / "root")}, playbook=[{**PLAYBOOK[0], "post_tasks": [RELEASE]}, *PLAYBOOK])
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done.stdout, "Hold the host for this run") == ["ok", "ok"]
    assert (tmp_path / "root/lease.json").exists()
