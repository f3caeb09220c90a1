"""What another host has is asked for over SSH; here `ssh` runs the command on this machine, so that find, xargs and sha256sum are real."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import model_rsync, model_sources
from ansible.module_utils.aerie.releases.model_rsync import Rsync

from ports import free_port

SSH = """#!/bin/sh
echo "$@" >> "$FAKE/ssh.log"
for last; do :; done
if [ "$1" = -G ]; then cat "$FAKE/ssh-g"; exit 0; fi
if [ -f "$FAKE/refuses" ]; then cat "$FAKE/refuses" >&2; exit 255; fi
PATH="$FAKE/far:$FAR_PATH" exec sh -c "$last"
"""
RSYNC = """#!/bin/sh
exit 0
"""
CONTENT = {
    "config.json": b'{"hidden_size": 8}',
    "a b.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "notes.md": b"",
    ".hidden.json": b"",
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs: `ssh`, `rsync` here, and `far/rsync` on the other host."""
    fake = tmp_path / "fake"
    for path, text in (("ssh", SSH), ("rsync", RSYNC), ("far/rsync", RSYNC)):
        (fake / path).parent.mkdir(parents=True, exist_ok=True)
        (fake / path).write_text(text)
        (fake / path).chmod(0o755)
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.setenv("FAR_PATH", os.environ["PATH"])
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "far's models" / "x"
    directory.mkdir(parents=True)
    for name, data in CONTENT.items():
        (directory / name).write_bytes(data)
    (directory / "config.json").rename(directory / "blob")
    (directory / "config.json").symlink_to("blob")
    return directory


def source(model: Path, address: dict[str, Any] | None = None, **more: Any) -> Rsync:
    return Rsync.of({"source": "rsync", "from": f"gpu-01:{model}", **more}, address, None)


def wanted(model: Path, **more: Any) -> Any:
    entry = {"source": "rsync", "from": f"gpu-01:{model}", **more}
    return source(model, **more).wanted("x", entry, Path("/opt/aerie/models/x"))


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def test_what_the_source_has_is_known_by_name_size_and_time(host, model):
    found = wanted(model)
    assert [(file.name, file.size, file.digest) for file in found.files] == [
        ("a b.safetensors", 7, None),
        ("config.json", 18, None),
        ("tokenizer.json", 2, None),
    ]
    assert found.files[0].modified_ns == (model / "a b.safetensors").stat().st_mtime_ns
    assert found.config == {"hidden_size": 8} and found.origin["from"] == f"gpu-01:{model}"


def test_hashes_are_computed_where_the_files_are_or_taken_from_a_file_of_them(host, model):
    (model / "SHA256SUMS").write_text(f"{'0' * 64}  a b.safetensors\n{'1' * 64} *./other.bin\n")
    found = wanted(model)
    assert found.files[0].digest == f"sha256:{'0' * 64}"
    told = source(model).digests(found.files, lambda: None)
    assert told == {
        "a b.safetensors": f"sha256:{'0' * 64}",
        "config.json": sha256(CONTENT["config.json"]),
        "tokenizer.json": sha256(CONTENT["tokenizer.json"]),
    }


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Host key verification failed.", "this host does not know that host's key, or another one answers: give the model host_key"),
        ("ops@gpu-01: Permission denied (publickey).", "that host refuses this host's key: give the model identity_file"),
        ("ssh: connect to host gpu-01 port 22: Connection timed out", "ssh ended with 255:\n    ssh: connect to host gpu-01"),
    ],
)
def test_a_source_that_does_not_let_us_in_is_told_with_the_cure(host, model, said, message):
    (host / "refuses").write_text(said + "\n")
    with pytest.raises(AerieError) as caught:
        wanted(model)
    assert message in str(caught.value)


def test_a_directory_that_is_not_there_and_a_missing_rsync_are_told_by_host(host, model, tmp_path, monkeypatch):
    with pytest.raises(AerieError, match="there is no such directory on that host"):
        wanted(tmp_path / "none")
    (host / "far/rsync").unlink()
    message = r"gpu-01, where the model is, has no rsync: install it .*apt-get install rsync"
    with pytest.raises(AerieError, match=message):
        wanted(model)
    (host / "rsync").unlink()
    monkeypatch.setenv("PATH", str(host))
    with pytest.raises(AerieError, match=r"this host has no rsync, which source rsync needs: install it"):
        wanted(model)


def test_a_configuration_that_is_no_json_is_told(host, model):
    (model / "blob").write_text("{")
    with pytest.raises(AerieError, match=r"config\.json can't be read as JSON"):
        wanted(model)


def test_a_host_of_the_inventory_is_reached_as_the_inventory_says(host, model):
    far = source(model, {"host": "198.51.100.7", "user": "ops", "port": 2222})
    assert (far.address.login, far.address.port) == ("ops@198.51.100.7", 2222)
    named = Rsync.of({"from": "me@gpu-01:/m", "port": 22}, {"host": "198.51.100.7", "user": "ops", "port": 2222}, None)
    assert (named.address.login, named.address.port) == ("me@198.51.100.7", 22)


def test_a_key_that_is_pinned_is_the_only_one_that_is_taken(host, model):
    key = model / "key"
    wanted(model, host_key="ssh-ed25519 AAAA", identity_file=str(key), port=2222)
    words = (host / "ssh.log").read_text()
    for option in (
        "StrictHostKeyChecking=yes",
        "HostKeyAlias=aerie-model-source",
        "HostKeyAlgorithms=ssh-ed25519",
        f"-i {key}",
        "-p 2222",
    ):
        assert option in words
    assert "BatchMode=yes" in words


def test_by_way_of_the_controller_only_the_place_to_connect_to_changes(host, model):
    far = source(model, {"host": "198.51.100.7", "tunnel": 40123, "port": 2222})
    assert far.unreachable() is None
    far.wanted("x", {"from": "gpu-01:/m"}, Path("/x"))
    words = (host / "ssh.log").read_text()
    assert "HostName=127.0.0.1 -p 40123" in words and "HostKeyAlias=[198.51.100.7]:2222" in words and " 198.51.100.7 " in words


def test_a_source_is_unreachable_where_nothing_answers_unless_ssh_has_a_way_of_its_own(host, model):
    port = free_port()
    (host / "ssh-g").write_text(f"hostname 127.0.0.1\nport {port}\n")
    assert source(model).unreachable() == ("127.0.0.1", port)
    (host / "ssh-g").write_text(f"hostname 127.0.0.1\nport {port}\nproxyjump bastion\n")
    assert source(model).unreachable() is None


def test_what_rsync_says_decides_whether_it_is_tried_again(host, tmp_path):
    (host / "rsync").write_text("#!/bin/sh\necho 'rsync error: timeout in data send/receive'; exit 30\n")
    file = model_rsync.Remote("a.safetensors", 7)
    with pytest.raises(model_rsync.SourceError, match="timeout in data") as caught:
        source(Path("/m")).pull(tmp_path, [file], lambda: None)
    assert caught.value.again
    (host / "rsync").write_text("#!/bin/sh\necho 'ops@gpu-01: Permission denied (publickey).'; exit 255\n")
    with pytest.raises(model_rsync.SourceError, match="give the model identity_file") as caught:
        source(Path("/m")).pull(tmp_path, [file], lambda: None)
    assert not caught.value.again


def test_rsync_is_bounded_and_told_the_files_by_name(host, tmp_path):
    (host / "rsync").write_text('#!/bin/sh\necho "$@" > "$FAKE/rsync.log"; cat >> "$FAKE/names"; echo "Total bytes received: 1,234"\n')
    far = Rsync.of({"from": "gpu-01:/m"}, None, 2.5)
    assert far.pull(tmp_path, [model_rsync.Remote("a b.safetensors", 7)], lambda: None) == 1234
    words = (host / "rsync.log").read_text()
    assert all(word in words for word in ("--bwlimit=2560", "--inplace", "--partial", "--timeout=60", "--files-from=-", "gpu-01:/m/"))
    assert (host / "names").read_bytes() == b"a b.safetensors\0"


def test_a_source_is_asked_again_only_when_it_is_told_to(host, model, tmp_path, monkeypatch):
    (host / "ssh-g").write_text("hostname gpu-01\nproxyjump bastion\n")
    (model / "a b.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    given = model_sources.Given(HostPaths(tmp_path / "host"))
    catalog = {"x": {"source": "rsync", "from": f"gpu-01:{model}"}}
    (host / "rsync").write_text('#!/bin/sh\nfor last; do :; done\ncd "$MODEL" && xargs -0 cp -p -t "$last"\n')
    monkeypatch.setenv("MODEL", str(model))
    first = model_sources.survey(catalog, given)
    assert first.problems == () and list(first.plans) == ["x"]
    model_sources.fetch_all(first, given, Progress(None), lambda: None)
    asked = (host / "ssh.log").read_text()
    assert list(model_sources.survey(catalog, given).there) == ["x"] and (host / "ssh.log").read_text() == asked
    again = replace(given, refresh=True)
    assert list(model_sources.survey(catalog, again).there) == ["x"] and (host / "ssh.log").read_text() != asked
    (model / "tokenizer.json").write_bytes(b"[]")
    changed = model_sources.survey(catalog, again)
    assert [file.name for file in changed.plans["x"].files] == ["tokenizer.json"]
    model_sources.fetch_all(changed, again, Progress(None), lambda: None)
    assert (tmp_path / "host/models/x/tokenizer.json").read_bytes() == b"[]"
