"""A git checkout that a server runs from is patched in place, with real SGLang: refused where somebody edited it, and always given back.

The tests follow each other on one host: each starts where the one before it ended.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from runs import HOST_OF_TESTS, Run, playbook, processes_of

pytestmark = pytest.mark.long  # make test looks at test_adopted.py, which is for images

SHARED = ("environments", "packages")
WORKER = "python/sglang/srt/speculative/eagle_worker_v2.py"
PROFILER = "python/sglang/srt/speculative/aerie_phase_profiler.py"
DRAFT = "python/sglang/srt/speculative/somebodys_draft.py"
PATCHED: dict[str, Any] = {"sglang_patches_sets": ["phase_profiler"]}
UNPATCHED: dict[str, Any] = {"sglang_patches_sets": []}
GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "init.defaultBranch=main")
INSTALL = """
- hosts: gpu_hosts
  gather_facts: false
  roles: [gpu_host, sglang_release]
  tasks:
    - ansible.builtin.copy:
        content: "{{ __sglang_release_environment | to_json }}"
        dest: "{{ tests_installed }}"
        mode: "0600"
    - ansible.builtin.include_role: {name: aerie, tasks_from: release}
"""


class Host:
    """This machine as a host with a checkout that its Python imports SGLang from, and a root of its own; what is installed is shared."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.port, self.scratch = root, free_port(), scratch
        self.checkout, self.python = scratch / "sglang", scratch / "venv/bin/python"

    def run(self, *arguments: str, **more: Any) -> Run:
        variables = {
            "aerie_root": str(self.root),
            "aerie_results": str(self.scratch / "results"),
            "sglang_benchmark_experiment": None,
            "sglang_server_instances": {"main": {"arm": "eagle3", "model": "target", "port": self.port}},
        }
        if self.checkout.exists():
            variables |= {
                "sglang_release_adopt": str(self.checkout / "python"),
                "sglang_release_adopt_environment": str(self.python),
            }
        return playbook(*arguments, variables=variables | more, scratch=self.scratch)

    def make_checkout(self) -> None:
        """Commit SGLang as its wheel has it, but its libraries, as one that builds them does; let a Python import it, editable."""
        (self.scratch / "install.yml").write_text(INSTALL)
        self.run(str(self.scratch / "install.yml"), tests_installed=str(self.scratch / "installed.json")).require_success()
        installed = json.loads((self.scratch / "installed.json").read_text())
        shutil.copytree(Path(installed["package"]["path"]) / "sglang", self.checkout / "python/sglang")
        (self.checkout / ".gitignore").write_text("__pycache__/\n*.so\n")
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "SGLang"], ["tag", f"v{installed['version']}"]):
            self.git(*arguments)
        subprocess.run([installed["environment"]["python"], "-I", "-m", "venv", "--without-pip", self.python.parents[1]], check=True)
        (site_packages,) = self.python.parents[1].glob("lib/python*/site-packages")
        (site_packages / "packages.pth").write_text(f"import site; site.addsitedir({installed['environment']['site_packages']!r})\n")
        (site_packages / "__editable__.sglang.pth").write_text(f"{self.checkout / 'python'}\n")
        metadata = site_packages / f"sglang-{installed['version']}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {installed['version']}\n")
        editable = {"url": (self.checkout / "python").as_uri(), "dir_info": {"editable": True}}
        (metadata / "direct_url.json").write_text(json.dumps(editable))

    def git(self, *arguments: str) -> str:
        return subprocess.run([*GIT, *arguments], cwd=self.checkout, check=True, capture_output=True, text=True).stdout

    @property
    def instance(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / "instances/main/instance.json").read_text())
        return value

    @property
    def release(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / "current/release.json").read_text())
        return value

    def tokens(self) -> list[int]:
        body = json.dumps({"text": "import os", "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            value: list[int] = json.load(answer)["output_ids"]
        return value


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = HOST_OF_TESTS.with_name("adopted_tree")
    made = Host(root, tmp_path_factory.mktemp("tree"))
    if processes_of(root):  # an earlier run of the tests was cut off
        made.run("playbooks/stop.yml", aerie_lease_break=True)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in SHARED:
        (HOST_OF_TESTS / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(HOST_OF_TESTS / name)
    made.make_checkout()
    made.run("deploy_eagle3.yml", "--skip-tags", "benchmark", **UNPATCHED).require_success()
    yield made
    if processes_of(root):
        made.run("playbooks/stop.yml", aerie_lease_break=True)


def unfolded(output: str) -> str:
    return re.sub(r"\s+", " ", output)


def test_an_edit_of_a_file_to_patch_and_a_process_in_the_tree_are_refused_while_the_server_runs_on(host):
    pid, release, worker = host.instance["pid"], host.release, host.checkout / WORKER
    pristine = worker.read_bytes()
    worker.with_name(f"{worker.name}.bak").write_bytes(pristine)
    worker.write_bytes(pristine + b"edited = True\n")
    refused = host.run("playbooks/patch.yml", **PATCHED)
    worker.write_bytes(pristine)
    worker.with_name(f"{worker.name}.bak").unlink()
    assert refused.status != 0
    message = unfolded(refused.output)
    assert f"against HEAD (commit {release['commit'][:12]})" in message
    assert "+edited = True" in message
    assert "eagle_worker_v2.py.bak is the pristine file" in message
    with subprocess.Popen(
        [host.python, "-c", "import time; print(flush=True); time.sleep(600)"], cwd=host.checkout / "python", stdout=subprocess.PIPE
    ) as other:
        assert other.stdout and other.stdout.readline()
        used = host.run("playbooks/patch.yml", **PATCHED)
        other.kill()
    assert used.status != 0
    assert f"is used by process {other.pid}" in unfolded(used.output)
    assert (host.instance["pid"], host.release, host.git("status", "--porcelain")) == (pid, release, "")
    assert host.tokens()


def test_a_tree_is_patched_in_place_and_its_server_answers_as_before_and_a_second_run_changes_nothing(host):
    before, tokens = host.release, host.tokens()
    done = host.run("playbooks/patch.yml", **PATCHED).require_success()
    assert "10 of 10 golden prompts answered token for token as before" in unfolded(done.output)
    assert (host.checkout / PROFILER).exists()
    assert (host.release["id"], host.release["verified"]) == (before["id"], True)
    assert (host.instance["state"], host.tokens()) == ("ready", tokens)
    second = host.run("playbooks/patch.yml", **PATCHED).require_success()
    assert second.changed == {}
    assert len(second.calls["localhost"]) <= 10
    status = host.run("playbooks/status.yml").require_success()
    assert "an adopted tree" in status.output
    assert "added by phase_profiler" in status.output


def test_a_tree_that_can_not_be_verified_goes_back_to_the_patch_sets_before_and_serves(host):
    before, tokens = host.release, host.tokens()
    differences = host.git("diff")
    draft = host.checkout / DRAFT
    draft.write_text("def unfinished(:\n")
    failed = host.run("playbooks/patch.yml", **UNPATCHED)
    draft.unlink()
    message = unfolded(failed.output)
    assert failed.status != 0
    assert "somebodys_draft.py" in message
    assert "main generates with it again and answers the golden prompts as before" in message
    assert f"{host.checkout}/python has the patch sets that it had: phase_profiler" in message
    assert host.release | {"before": None} == before | {"before": None}
    assert (host.git("diff"), host.instance["state"], host.tokens()) == (differences, "ready", tokens)


def test_a_rollback_to_pristine_leaves_the_checkout_as_git_has_it_and_serves(host):
    tokens = host.tokens()
    done = host.run("playbooks/rollback.yml", sglang_patches_rollback_to="pristine", **PATCHED).require_success()
    assert "10 of 10 golden prompts answered token for token as before" in unfolded(done.output)
    assert host.git("status", "--porcelain") == ""
    assert not (host.checkout / PROFILER).exists()
    assert host.release["patch_sets"] == []
    assert (host.instance["state"], host.tokens()) == ("ready", tokens)
    nowhere = host.run("playbooks/rollback.yml")
    assert nowhere.status != 0
    assert "one release whatever patch sets it has" in unfolded(nowhere.output)
    assert host.tokens() == tokens
