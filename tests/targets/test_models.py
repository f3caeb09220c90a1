"""A model comes from another host by rsync over SSH: with that host's own key, resumed after a kill, or by way of the controller."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from booted_hosts import BootedHosts, Host, machine_network
from runs import PROJECT, Run, playbook

DEBS = PROJECT / ".cache/debs"
ROOT = "/opt/aerie-models"
SOURCE = "/srv/models/tiny"
KEY = "/etc/aerie-test-models-key"
SHARDS, SHARD = 3, 6 << 20
BYTES_PER_SECOND = 3 << 20
MAKE_MODEL = f"""
import hashlib, json, os, sys
place = sys.argv[1]
os.makedirs(place, exist_ok=True)
def put(name, data):
    with open(os.path.join(place, name), "wb") as stream:
        stream.write(data)
for number in range({SHARDS}):
    header = json.dumps({{"w": {{"dtype": "U8", "shape": [{SHARD}], "data_offsets": [0, {SHARD}]}}}}).encode()
    put(f"{{number}}.safetensors", len(header).to_bytes(8, "little") + header + hashlib.shake_256(bytes([number])).digest({SHARD}))
put("config.json", json.dumps({{"architectures": ["LlamaForCausalLM"], "hidden_size": 8}}).encode())
put("model.safetensors.index.json", json.dumps({{"weight_map": {{str(n): f"{{n}}.safetensors" for n in range({SHARDS})}}}}).encode())
put("notes.md", b"nothing that a server reads")
"""
KILL = f"""
import os, pathlib, signal, time
partial = pathlib.Path("{ROOT}/models/tiny.partial")
deadline = time.monotonic() + 60
def there():
    return sum(path.stat().st_size for path in partial.glob("*.safetensors"))
while there() < {SHARD * 3 // 2} and time.monotonic() < deadline:
    time.sleep(0.02)
jobs = [int(path.read_text().split()[0]) for path in pathlib.Path("{ROOT}/jobs").glob("models-*/pid")]
for process in [path for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]:
    try:
        words = (process / "cmdline").read_bytes()
    except OSError:
        continue
    if int(process.name) in jobs or words.startswith(b"rsync\\0"):
        os.kill(int(process.name), signal.SIGKILL)
time.sleep(0.5)
print(there())
"""


@dataclass(frozen=True)
class Pair:
    """A host that takes models, and one that has them, which is no GPU host."""

    fleet: BootedHosts
    target: Host
    source: Host
    inventory: Path
    host_key: str
    scratch: Path

    def on(self, host: Host, command: str) -> str:
        done = self.fleet.ssh(host, command)
        assert done.returncode == 0, f"{host.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def python(self, host: Host, program: str, *arguments: str) -> str:
        argv = ["ssh", "-F", str(self.fleet.ssh_config), host.address, "python3", "-", *arguments]
        return subprocess.run(argv, input=program, capture_output=True, text=True, check=True, timeout=120).stdout.strip()

    def install(self, host: Host) -> None:
        """Install rsync from the controller's copy of Debian's packages."""
        for deb in sorted(DEBS.glob("*.deb")):
            with deb.open("rb") as stream:
                argv = ["ssh", "-F", str(self.fleet.ssh_config), host.address, f"cat > /tmp/{deb.name}"]
                subprocess.run(argv, stdin=stream, check=True, timeout=60)
        self.on(host, "dpkg -i /tmp/libpopt0_*.deb /tmp/rsync_*.deb >/dev/null && rm /tmp/*.deb")

    def entry(self, **more: Any) -> dict[str, Any]:
        return {"source": "rsync", "from": f"{self.source.name}:{SOURCE}", "identity_file": KEY, "host_key": self.host_key} | more

    def run(self, *arguments: str, catalog: dict[str, Any] | None = None, **more: Any) -> Run:
        variables = {
            "aerie_profile": "cpu",
            "aerie_root": ROOT,
            "sglang_release_python": "/usr/bin/python3",
            "sglang_models_catalog": catalog or {"tiny": self.entry()},
            "sglang_server_arms": {"baseline": {"speculation": None}},
            "sglang_server_instances": {},
        }
        every = ("-i", self.inventory, "--limit", self.target.name, "playbooks/models.yml")
        return playbook(*every, *arguments, variables=variables | more, scratch=self.scratch, seconds=180)

    def sums(self, host: Host, directory: str) -> list[str]:
        return self.on(host, f"cd {directory} && sha256sum *.json *.safetensors").splitlines()


@pytest.fixture(scope="module")
def pair(pool, inventory_of, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if len(list(DEBS.glob("*.deb"))) < 2:
        DEBS.mkdir(parents=True, exist_ok=True)
        with machine_network():
            download = ["apt-get", "download", "-qq", "rsync", "libpopt0"]
            subprocess.run(download, cwd=DEBS, check=True, capture_output=True, timeout=120)
    target, source = pool.take(2)
    fleet = pool.fleet
    inventory = inventory_of([target, source], {})
    key = " ".join(fleet.ssh(source, "cat /etc/ssh/ssh_host_ed25519_key.pub").stdout.split()[:2])
    made = Pair(fleet, target, source, inventory, key, tmp_path_factory.mktemp("runs"))
    made.python(source, MAKE_MODEL, SOURCE)
    made.on(target, f"rm -f {KEY} {KEY}.pub; ssh-keygen -q -t ed25519 -N '' -f {KEY}")
    public = made.on(target, f"cat {KEY}.pub")
    login = "/home/ops/.ssh/authorized_keys"
    made.on(source, f"cp -p {login} {login}.before && echo '{public}' >> {login}")
    yield made
    made.on(source, f"mv {login}.before {login}; rm -rf {SOURCE}; dpkg --purge rsync libpopt0 >/dev/null 2>&1; true")
    made.on(target, f"rm -rf {ROOT} {KEY} {KEY}.pub; dpkg --purge rsync libpopt0 >/dev/null 2>&1; true")


@pytest.fixture(scope="module")
def without_rsync(pair: Pair) -> str:
    """What a run says while the target has no rsync."""
    said = pair.run("--check").output
    pair.install(pair.target)
    pair.install(pair.source)
    return said


@pytest.fixture(scope="module")
def killed(without_rsync: str, pair: Pair) -> dict[str, Any]:
    """A run whose rsync and job are killed midway."""
    told: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: told.update(run=pair.run(sglang_models_bandwidth_mib=BYTES_PER_SECOND / 2**20)))
    thread.start()
    there = int(pair.python(pair.target, KILL))
    thread.join()
    return told | {"there": there, "listing": pair.on(pair.target, f"ls -A {ROOT}/models")}


@pytest.fixture(scope="module")
def resumed(killed: dict[str, Any], pair: Pair) -> Run:
    return pair.run("-v").require_success()


def test_a_host_without_rsync_is_told_what_to_install(without_rsync):
    cure = "this host has no rsync, which source rsync needs: install it (Debian and Ubuntu: apt-get install rsync)"
    assert cure in re.sub(r"\s+", " ", without_rsync)


def test_a_killed_fetch_leaves_a_partial_model_beside_its_place(killed):
    assert killed["run"].status != 0
    assert "tiny.partial" in killed["listing"].split() and "tiny" not in killed["listing"].split()
    assert SHARD < killed["there"] < SHARDS * SHARD
    assert re.search(r"tiny: [\d.]+ MB of 18\.9 MB, [\d.]+ MB/s, about \d+ s left", killed["run"].output), killed["run"].output[-3000:]


def test_the_next_run_receives_only_what_was_missing(resumed, killed):
    received = int(re.search(r'"?received_bytes"?: (\d+)', resumed.output)[1])
    missing = SHARDS * SHARD - killed["there"]
    assert missing <= received < missing + (256 << 10), f"{killed['there']} bytes were there"


def test_what_arrived_is_what_the_source_has(resumed, pair):
    assert pair.sums(pair.target, f"{ROOT}/models/tiny") == pair.sums(pair.source, SOURCE)
    assert "notes.md" not in pair.on(pair.target, f"ls {ROOT}/models/tiny")


def test_a_second_run_changes_nothing_and_needs_no_source_also_when_it_asks_for_the_content_that_came(resumed, pair):
    identity = re.search(r'"?identity"?: "?([0-9a-f]{64})', resumed.output)[1]
    with cut_off(pair):
        assert pair.run(catalog={"tiny": pair.entry(identity=identity)}).require_success().changed == {}


def test_a_source_that_is_another_host_or_has_no_such_directory_and_a_model_of_other_content_are_refused(resumed, pair):
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
    elsewhere = {"from": f"{pair.source.name}:/srv/models/none"}
    run = pair.run(catalog={"tiny": pair.entry(identity="0" * 64), "one": pair.entry(host_key=other), "two": pair.entry(**elsewhere)})
    assert run.status != 0
    said = re.sub(r"\s+", " ", run.output)
    assert "3 problems" in said
    assert f"tiny: {ROOT}/models/tiny is another model than the one asked for" in said and "000000000000 is asked for" in said
    assert "another one answers: give the model host_key" in said
    assert "/srv/models/none: there is no such directory on that host" in said


def test_a_source_out_of_reach_is_fetched_by_way_of_the_controller_with_a_forwarded_agent(resumed, pair, agent):
    # A connection that an earlier run kept open forwards no agent.
    common = f"-F '{pair.fleet.ssh_config}' -o ForwardAgent=yes -o ControlPath={agent}/%C"
    catalog = {"tiny": pair.entry(), "again": pair.entry(identity_file=None)}
    with cut_off(pair):
        run = pair.run(catalog=catalog, ansible_ssh_common_args=common).require_success()
    assert "going by way of the controller" in run.output
    assert pair.sums(pair.target, f"{ROOT}/models/again") == pair.sums(pair.source, SOURCE)


@contextlib.contextmanager
def cut_off(pair: Pair) -> Iterator[None]:
    """Let the target reach the source no more; the controller still does."""
    route = ["ip", "-n", pair.target.namespace, "route"]
    subprocess.run([*route, "add", "unreachable", pair.source.address], check=True)
    try:
        yield
    finally:
        subprocess.run([*route, "del", "unreachable", pair.source.address], check=True)


@pytest.fixture
def agent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An agent on the controller that holds the key of the test hosts; yields a directory for sockets, whose names must be short."""
    directory = Path(tempfile.mkdtemp(prefix="aerie-"))
    socket = directory / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while not socket.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    subprocess.run(["ssh-add", "-q", str(pair.fleet.key)], check=True, env=os.environ)
    yield directory
    process.terminate()
    process.wait()
    shutil.rmtree(directory)
