"""From one release to another and back, with real SGLang: what runs goes on answering the same, or everything is as it was.

The tests follow each other on one host: each starts where the one before it ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from runs import HOST_OF_TESTS, Run, playbook, processes_of

SHARED = ("environments", "packages")
PROMPT = "def read_lines(path):\n    with open(path) as stream:\n        return"
OTHER_LOGITS = """

_right = LogitsProcessor._get_logits
LogitsProcessor._get_logits = lambda self, *values, **named: _right(self, *values, **named).roll(1, dims=-1)
"""


class Host:
    """This machine as a host with a root of its own; what is installed there is the other tests'."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.port, self.scratch = root, free_port(), scratch

    def run(self, *arguments: str, **more: Any) -> Run:
        variables = {
            "aerie_root": str(self.root),
            "aerie_results": str(self.scratch / "results"),
            "sglang_server_instances": {"main": {"arm": "eagle3", "model": "target", "port": self.port}},
        }
        return playbook(*arguments, variables=variables | more, scratch=self.scratch)

    def release(self, link: str = "current") -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / link / "release.json").read_text())
        return value

    def sources(self, link: str = "current") -> Path:
        (found,) = (self.root / link).resolve().glob("lib/python*/site-packages/sglang")
        return found

    @property
    def instance(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / "instances/main/instance.json").read_text())
        return value

    def tokens(self) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
        body = json.dumps({"text": PROMPT, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            value: list[int] = json.load(answer)["output_ids"]
        return value


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = HOST_OF_TESTS.with_name("switch")
    made = Host(root, tmp_path_factory.mktemp("runs"))
    if processes_of(root):  # an earlier run of the tests was cut off
        made.run("playbooks/stop.yml", aerie_lease_break=True)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in SHARED:
        (HOST_OF_TESTS / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(HOST_OF_TESTS / name)
    made.run("deploy_eagle3.yml", "--skip-tags", "benchmark").require_success()
    yield made
    if processes_of(root):
        made.run("playbooks/stop.yml", aerie_lease_break=True)


def spoil(path: Path, text: str, at_start: bool = False) -> bytes:
    """Damage a file that no patch set touches, in place; return what it was."""
    before = path.read_bytes()
    path.write_bytes(text.encode() + before if at_start else before + text.encode())
    return before


def unfolded(output: str) -> str:
    return re.sub(r"\s+", " ", output)


def test_a_patched_server_answers_the_same_whether_its_profiler_is_on_or_off(host):
    switch = host.root / "instances/main/profile/on"
    before = host.tokens()
    switch.touch()
    profiled = host.tokens()
    switch.unlink()
    assert profiled == before == host.tokens()
    assert list(switch.parent.glob("phases-*.jsonl")), "the profiler wrote nothing, so it was not on"


def test_a_second_patch_changes_nothing_and_a_check_of_another_foresees_the_switch(host):
    second = host.run("playbooks/patch.yml").require_success()
    assert second.changed == {}
    pid, current = host.instance["pid"], host.release()["id"]
    check = host.run("playbooks/patch.yml", "--check", "--diff", sglang_patches_sets=[]).require_success()
    assert "sglang_patches : Verify it and make it current" in check.changed["localhost"]
    assert "main would start again with release" in check.output
    assert (host.instance["pid"], host.release()["id"]) == (pid, current)


def test_a_rollback_to_pristine_serves_the_published_sources_and_answers_token_for_token(host):
    patched, tokens = host.release(), host.tokens()
    done = host.run("playbooks/rollback.yml", sglang_patches_rollback_to="pristine").require_success()
    assert "10 of 10 golden prompts answered token for token as before" in unfolded(done.output)
    assert (host.release()["patch_sets"], host.release("previous")["id"]) == ([], patched["id"])
    assert host.release()["sglang_version"] == patched["sglang_version"]
    assert not list(host.sources().rglob("aerie_*"))
    assert host.instance["release"] == host.release()["id"]
    assert host.tokens() == tokens


@pytest.mark.long
def test_a_rollback_works_when_the_current_release_is_broken(host):
    broken, wanted = host.release()["id"], host.release("previous")["id"]
    server = host.sources() / "launch_server.py"
    whole = spoil(server, "raise SystemExit('damaged')\n", at_start=True)
    os.kill(host.instance["pid"], signal.SIGKILL)
    done = host.run("playbooks/rollback.yml").require_success()
    server.write_bytes(whole)
    assert (host.release()["id"], host.release("previous")["id"]) == (wanted, broken)
    assert (host.instance["release"], host.instance["state"]) == (wanted, "ready")
    assert "10 of 10 golden prompts answered token for token as before" in unfolded(done.output)
    assert list((host.root / "caches/.aside").glob(f"{broken}-*"))
    assert "caches set aside: caches/.aside/" in unfolded(done.output)


@pytest.mark.parametrize(
    ("file", "damage", "at_start", "words"),
    [
        pytest.param("srt/layers/logits_processor.py", OTHER_LOGITS, False, "(not allowed)", marks=pytest.mark.long),
        ("launch_server.py", "raise SystemExit('damaged')\n", True, "the server died while it started"),
    ],
    ids=["answers otherwise", "does not start"],
)
def test_a_release_that_fails_to_serve_as_before_gives_way_to_the_one_before(host, file, damage, at_start, words):
    good, bad, tokens = host.release()["id"], host.release("previous")["id"], host.tokens()
    sets = [one["name"] for one in host.release("previous")["patch_sets"]]
    path = host.sources("previous") / file
    whole = spoil(path, damage, at_start)
    done = host.run("playbooks/patch.yml", sglang_patches_sets=sets)
    path.write_bytes(whole)
    message = unfolded(done.output)
    assert done.status != 0
    assert f"The switch to release {bad} failed" in message
    assert words in message
    assert f"Everything is back: current is {good}; main generates with it again and answers the golden prompts as before" in message
    assert f"The release that failed lies in {host.root}/releases/{bad}" in message
    assert (host.release()["id"], host.release("previous")["id"]) == (good, bad)
    assert (host.instance["release"], host.instance["state"]) == (good, "ready")
    assert host.tokens() == tokens


def test_without_a_previous_release_a_rollback_ends_before_anything_is_stopped(host):
    previous = host.root / "previous"
    target = previous.readlink()
    previous.unlink()
    pid = host.instance["pid"]
    refused = host.run("playbooks/rollback.yml")
    previous.symlink_to(target)
    assert refused.status != 0
    assert "has no previous release to go back to" in unfolded(refused.output)
    assert host.instance["pid"] == pid
    assert host.tokens()
