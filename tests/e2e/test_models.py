"""Models come from a hub at a pinned commit: foretold, resumed after a kill, checked, and in place only when they are whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hub_server import LFS_BYTES, Hub, serving
from runs import PROJECT, Run, playbook, snapshot

HOSTS = ("one", "two")
SHARED = PROJECT / ".cache/e2e/models"
"""The hub environment of the tests' hosts: kept between runs."""
TOKEN = "hf_a_token_that_nobody_may_see"
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 16}
SHARD = 6 << 20


def safetensors(seed: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [SHARD], "data_offsets": [0, SHARD]}}).encode()
    return len(header).to_bytes(8, "little") + header + hashlib.shake_256(bytes([seed])).digest(SHARD)


FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode(),
    "1.safetensors": safetensors(1),
    "2.safetensors": safetensors(2),
    "tokenizer.json": b"{}" + b" " * (LFS_BYTES // 2),
    "pytorch_model.bin": b"the same weights again",
    "README.md": b"# nothing that a server reads",
    "original/params.json": b"{}",
}
SERVED = ["1.safetensors", "2.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json"]
BYTES = sum(len(FILES[name]) for name in SERVED)


class Fleet:
    """Two hosts on this machine, each with a root of its own, that take the same model from the same hub."""

    def __init__(self, directory: Path, hub: Hub) -> None:
        self.directory, self.hub = directory, hub
        self.commit = hub.publish("lab/tiny", FILES)
        hosts: dict[str, Any] = {}
        for name in HOSTS:
            root = directory / name
            root.mkdir()
            (root / "environments").symlink_to(SHARED)
            hosts[name] = {"aerie_root": str(root), "ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        self.variables: dict[str, Any] = {
            "aerie_profile": "cpu",
            "aerie_results": str(directory / "results"),
            "sglang_release_python": sys.executable,
            "sglang_models_catalog": {"tiny": self.entry()},
            "sglang_models_hub_endpoint": hub.url,
            "sglang_models_hub_token": TOKEN,
            "sglang_server_arms": {"baseline": {"speculation": None}},
            "sglang_server_instances": {},
        }
        self.inventory = directory / "hosts.yml"
        self.inventory.write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))

    def entry(self, **more: Any) -> dict[str, Any]:
        return {"source": "hub", "repository": "lab/tiny", "revision": self.commit, **more}

    def run(self, *arguments: str, **more: Any) -> Run:
        scratch = self.directory / f"run-{threading.get_ident()}"
        scratch.mkdir(exist_ok=True)
        return playbook("-i", self.inventory, "playbooks/models.yml", *arguments, variables=self.variables | more, scratch=scratch)

    def model(self, host: str) -> Path:
        return self.directory / host / "models/tiny"

    def partial(self, host: str) -> Path:
        return self.directory / host / "models/tiny.partial"

    def fetching(self, host: str) -> list[int]:
        """The processes that fetch the host's model: the jobs and their children, which run the library."""
        jobs = [int(path.read_text().split()[0]) for path in (self.directory / host / "jobs").glob("models-*/pid")]
        found = [process for process in Path("/proc").iterdir() if process.name.isdigit()]
        return [int(process.name) for process in found if int(process.name) in jobs or _parent(process) in jobs]

    def there(self, host: str) -> int:
        return sum(path.stat().st_size for path in self.partial(host).glob("*.safetensors"))


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended since
        return 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    SHARED.mkdir(parents=True, exist_ok=True)
    with serving() as hub:
        hub.token = TOKEN
        yield Fleet(tmp_path_factory.mktemp("models"), hub)


@pytest.fixture(scope="module")
def foretold(fleet: Fleet) -> tuple[Run, list[dict[str, str]]]:
    """A check of bare hosts, and what there was on them afterwards."""
    run = fleet.run("--check", "--diff").require_success()
    return run, [snapshot(fleet.directory / host) for host in HOSTS]


@pytest.fixture(scope="module")
def killed(foretold: Any, fleet: Fleet) -> dict[str, Any]:
    """Both hosts fetch at once, and what fetches for the first is killed midway."""
    fleet.hub.pause_seconds = 0.04
    told: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: told.update(run=fleet.run()))
    thread.start()
    deadline = time.monotonic() + 120
    while fleet.there("one") < BYTES // 3 and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in fleet.fetching("one"):
        os.kill(pid, signal.SIGKILL)
    fleet.hub.pause_seconds = 0
    thread.join()
    return told | {"there": fleet.there("one"), "in place": fleet.model("one").exists(), "sent": sum(fleet.hub.sent.values())}


@pytest.fixture(scope="module")
def resumed(killed: dict[str, Any], fleet: Fleet) -> tuple[Run, int]:
    """The next run, and how many bytes of weights the hub sent for it."""
    before = {path: count for path, count in fleet.hub.sent.items() if "/storage/" in path}
    run = fleet.run().require_success()
    return run, sum(count - before.get(path, 0) for path, count in fleet.hub.sent.items() if "/storage/" in path)


def test_a_check_says_what_would_be_fetched_and_how_much_and_touches_nothing(foretold, fleet):
    run, states = foretold
    assert f"tiny: {BYTES / 1e6:.1f} MB from lab/tiny@{fleet.commit} to {fleet.model('one')}" in run.output
    assert "tiny: 1.safetensors" in run.output and "pytorch_model.bin" not in run.output
    assert [sorted(path for path in state if not path.startswith("lease")) for state in states] == [["environments"]] * 2
    assert not any("/storage/" in path for path in fleet.hub.sent)


def test_a_killed_fetch_leaves_a_partial_model_that_nothing_would_serve(killed, fleet):
    assert killed["run"].status != 0 and "ended without a result" in killed["run"].output
    assert not killed["in place"]
    assert BYTES // 3 <= killed["there"] < BYTES


def test_another_host_that_fetches_at_the_same_time_is_not_disturbed(killed, fleet):
    assert killed["run"].stats["two"]["failures"] == 0
    assert fleet.model("two").is_dir() and not fleet.partial("two").exists()


def test_the_next_run_fetches_only_what_was_not_received(resumed, killed, fleet):
    run, sent_again = resumed
    weights = 2 * len(FILES["1.safetensors"])
    assert sent_again == weights - killed["there"], f"{killed['there']} of {weights} bytes were there"
    assert list(run.changed) == ["one"]


def test_what_was_fetched_is_whole_and_only_what_a_server_reads(resumed, fleet):
    for host in HOSTS:
        there = {path.name: path.read_bytes() for path in fleet.model(host).iterdir() if not path.name.startswith(".")}
        assert there == {name: FILES[name] for name in SERVED}
        assert not fleet.partial(host).exists()


def test_progress_tells_bytes_rate_and_what_is_left(killed):
    lines = [line for line in killed["run"].output.splitlines() if " MB/s, about " in line]
    assert any(f"of {BYTES / 1e6:.1f} MB" in line and line.strip().endswith(" left") for line in lines), killed["run"].output[-2000:]


def test_a_run_over_models_that_are_there_changes_nothing_and_asks_no_hub(resumed, fleet):
    before = len(fleet.hub.requests)
    run = fleet.run().require_success()
    assert run.changed == {}
    assert fleet.hub.requests[before:] == []


def test_other_content_than_the_one_asked_for_is_never_put_in_place_and_is_not_fetched_again_once_that_is_corrected(resumed, fleet):
    place = fleet.directory / "again"
    refused = fleet.run("--limit", "one", sglang_models_catalog={"again": fleet.entry(path=str(place), identity="0" * 64)})
    said = re.sub(r"\s+", " ", refused.output)
    found = re.search(r"its identity is ([0-9a-f]{12}), and 000000000000 is asked for: name its commit", said)
    assert refused.status != 0 and found, refused.output[-3000:]
    assert not place.exists() and place.with_name("again.partial").is_dir()
    whole = re.search(rf"set identity to ({found[1]}[0-9a-f]{{52}})", said)[1]
    before = dict(fleet.hub.sent)
    fleet.run("--limit", "one", sglang_models_catalog={"again": fleet.entry(path=str(place), identity=whole)}).require_success()
    assert (place / "1.safetensors").read_bytes() == FILES["1.safetensors"]
    assert {path: size for path, size in fleet.hub.sent.items() if "/storage/" in path and size != before.get(path)} == {}


def test_the_token_goes_to_the_hub_only(resumed, killed, fleet):
    assert fleet.hub.seen_by_storage and set(fleet.hub.seen_by_storage) == {None}
    assert TOKEN not in killed["run"].output + resumed[0].output
    for path in fleet.directory.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix != ".safetensors":
            assert TOKEN.encode() not in path.read_bytes(), path


def test_a_branch_is_refused_with_the_commit_that_it_is_now(fleet):
    run = fleet.run(sglang_models_catalog={"tiny": fleet.entry(revision="main")})
    assert run.status != 0
    assert "revision is 'main': a branch or tag may move" in run.output and f"it is {fleet.commit} now" in run.output.replace("\n", " ")
