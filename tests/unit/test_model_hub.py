"""What a hub holds at a commit is asked for by plain requests, and what stands in the way is told with the cure."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.releases import model_hub
from ansible.module_utils.aerie.releases.model_fetch import Remote
from ansible.module_utils.aerie.releases.model_hub import Hub

from hub_server import LFS_BYTES, serving
from ports import free_port

FILES = {
    "config.json": b'{"hidden_size": 8}',
    "model.safetensors": b"\1" * LFS_BYTES,
    "pytorch_model.bin": b"\2" * LFS_BYTES,
    "pytorch_model.bin.index.json": b"{}",
    "README.md": b"#",
    ".gitattributes": b"*.safetensors filter=lfs",
    "original/consolidated.pth": b"",
}


@pytest.fixture
def hub():
    with serving() as server:
        server.commit = server.publish("lab/tiny", FILES)
        yield server


def entry(hub, **more):
    return {"source": "hub", "repository": "lab/tiny", "revision": hub.commit, **more}


def wanted(hub, token=None, **more):
    asked = entry(hub, **more)
    source = Hub(hub.url, asked["repository"], asked["revision"], tuple(asked.get("exclude") or ()), token)
    return source.wanted("tiny", asked, Path("/opt/aerie/models/tiny"))


def test_what_a_commit_holds_is_known_by_size_and_digest_of_what_a_server_reads(hub):
    found = wanted(hub)
    blob = hashlib.sha1(b"blob 18\0" + FILES["config.json"]).hexdigest()
    assert found.files == (
        Remote("config.json", 18, f"blob:{blob}"),
        Remote("model.safetensors", LFS_BYTES, "sha256:" + hashlib.sha256(FILES["model.safetensors"]).hexdigest()),
    )
    assert found.config == {"hidden_size": 8} and found.problems() == []
    assert not any("/storage/" in path for path in hub.sent)


def test_other_weights_are_taken_where_there_are_no_safetensors(hub):
    names = [file.name for file in wanted(hub, exclude=["*.safetensors"]).files]
    assert names == ["config.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]


def test_a_repository_that_is_no_model_is_told_before_anything_is_fetched(hub):
    assert "has no config.json" in wanted(hub, exclude=["config.json"]).problems()[0]
    assert "has no weight files" in wanted(hub, exclude=["*.safetensors", "*.bin"]).problems()[0]
    assert wanted(hub, exclude=["*.safetensors", "*.bin"], weights=False).problems() == []


def test_a_hub_that_refuses_is_told_with_the_cure(hub):
    with pytest.raises(AerieError, match=r"answers 404 .*: check repository and revision"):
        wanted(hub, repository="lab/none")
    hub.token = "t"
    with pytest.raises(AerieError, match=r"answers 401 .*private or gated.* set sglang_models_hub_token"):
        wanted(hub)
    assert wanted(hub, token="t").files
    silent = Hub(f"http://127.0.0.1:{free_port()}", "lab/tiny", hub.commit)
    with pytest.raises(AerieError, match=r"does not answer from this host .*: let it through, set sglang_models_hub_endpoint to a mirror"):
        silent.wanted("tiny", entry(hub), Path("/x"))


def test_a_branch_is_known_by_its_commit(hub):
    assert model_hub.resolve(hub.url, "lab/tiny", "main") == hub.commit
    assert model_hub.resolve(hub.url, "lab/tiny", "no-such-branch") is None
    assert model_hub.resolve(f"http://127.0.0.1:{free_port()}", "lab/tiny", "main") is None


def test_settings_without_a_hub_resolve_nothing(hub, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert model_hub.resolver({})("lab/tiny", "main") is None
    assert model_hub.resolver({"sglang_models_hub_endpoint": hub.url})("lab/tiny", "main") == hub.commit


def test_the_endpoint_is_the_hosts_or_that_of_a_python_that_has_the_library(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert model_hub.default_endpoint([tmp_path / "none"]) is None
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho https://hub.example.org\n")
    python.chmod(0o755)
    assert model_hub.default_endpoint([tmp_path / "none", python]) == "https://hub.example.org"
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example.org/")
    assert model_hub.default_endpoint([python]) == "https://mirror.example.org"


def test_the_mirror_is_no_part_of_which_model_it_is(hub):
    assert Hub.origin(entry(hub, path="/data/x")) == Hub.origin(entry(hub))
    assert Hub.origin(entry(hub, exclude=["b", "a"])) == Hub.origin(entry(hub, exclude=["a", "b"])) != Hub.origin(entry(hub))


def test_the_library_sees_no_token_of_the_host_and_none_on_its_command_line(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the host's")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    environ = Hub("http://hub", "lab/tiny", "0" * 40)._environ("/scratch")
    assert "HF_TOKEN" not in environ and "HF_HUB_OFFLINE" not in environ
    assert environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] == "1" and environ["HF_HOME"] == "/scratch"
    assert Hub("http://hub", "lab/tiny", "0" * 40, token="ours")._environ("/scratch")["HF_TOKEN"] == "ours"
    assert json.dumps("HF_TOKEN") in model_hub.PROGRAM
