"""A model is whole or refused, is known by its content alone, and only what a host lacks is sent to it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.releases import model_identity
from ansible.module_utils.testing import patch_module_args

import model_identity as module
from hub_server import Hub, serving
from ports import free_port

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 16, "torch_dtype": "float32"}


def safetensors(size: int) -> bytes:
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.fixture
def make(tmp_path: Path):
    """Write a model's directory and return it."""

    def write(name: str, config: Any = CONFIG, **files: bytes) -> Path:
        directory = tmp_path / name
        directory.mkdir(parents=True)
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        for file, content in (files or {"model_safetensors": safetensors(64)}).items():
            (directory / file.replace("_", ".")).write_bytes(content)
        return directory

    return write


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run the module as Ansible would; return its result."""

    def call(**arguments: Any) -> dict[str, Any]:
        with patch_module_args({"root": str(tmp_path / "host"), **arguments}), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_identity_is_the_content_wherever_it_lies(make, tmp_path):
    one, other = make("one"), make("two/other")
    (other / "README.md").write_text("not read by a server")
    os.utime(other / "config.json", (1, 1))
    assert model_identity.read(one).identity == model_identity.read(other).identity
    (other / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 17}))
    assert model_identity.read(one).identity != model_identity.read(other).identity
    (one / "config.json").rename(one / "konfig.json")
    (one / "config.json").symlink_to(one / "konfig.json")
    assert "config.json" in [file.name for file in model_identity.read(one).files]


def test_a_model_says_how_large_it_is_and_what_its_configuration_says(make):
    value = model_identity.read(make("one", CONFIG | {"text_config": {"num_hidden_layers": 3, "hidden_size": 1}})).as_dict()
    assert value["files"] == 2
    assert value["bytes"] == len(safetensors(64)) + len(json.dumps(CONFIG | {"text_config": {"num_hidden_layers": 3, "hidden_size": 1}}))
    assert value["config"] == {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 3}


def test_a_known_model_is_not_hashed_again_and_a_touched_file_is(make, tmp_path):
    directory, hashed = make("one"), []
    first = model_identity.read(directory, tmp_path / "cache", hashed.append)
    assert len(hashed) == 2
    assert model_identity.remember(first, tmp_path / "cache")
    assert model_identity.read(directory, tmp_path / "cache", hashed.append).identity == first.identity
    assert len(hashed) == 2
    stat = (directory / "model.safetensors").stat()
    content = bytearray((directory / "model.safetensors").read_bytes())
    content[-1] = 1
    (directory / "model.safetensors").write_bytes(content)
    os.utime(directory / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert model_identity.read(directory, tmp_path / "cache", hashed.append).identity != first.identity


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (None, {"model_safetensors": safetensors(8)}, "has no config.json"),
        (CONFIG, {"tokenizer_json": b"{}"}, "has no weight files"),
        (CONFIG, {"model_safetensors": safetensors(64)[:-1]}, "and must have .*cut off"),
        (CONFIG, {"model_safetensors": b"abc"}, "less than its own header"),
        (CONFIG, {"model_safetensors": (2).to_bytes(8, "little") + b"[]"}, "is no safetensors file"),
        (CONFIG, {"model_safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"}, "git lfs pull"),
        (CONFIG, {"model_bin": b""}, "is empty"),
        ([1], {"model_safetensors": safetensors(8)}, "holds no JSON object"),
        (
            CONFIG,
            {
                "a_safetensors": safetensors(8),
                "model.safetensors.index_json": b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}',
            },
            "1 of the 2 weight files .* are missing: b.safetensors",
        ),
        (CONFIG, {"a_safetensors": safetensors(8), "model.safetensors.index_json": b"{}"}, "is no index of weights"),
    ],
)
def test_a_model_that_a_server_could_not_load_is_refused_with_why(make, config, files, message):
    found = model_identity.problems(make("one", config, **files))
    assert len(found) == 1
    with pytest.raises(AerieError, match=message):
        raise AerieError(found[0])


def test_a_whole_model_has_no_problems_and_a_dummy_needs_no_weights(make):
    assert model_identity.problems(make("one")) == []
    assert model_identity.problems(make("dummy", tokenizer_json=b"{}"), weights=False) == []


def test_a_parent_directory_points_to_the_model_inside(make, tmp_path):
    make("parent/inside")
    assert "there is one in inside" in model_identity.problems(tmp_path / "parent")[0]


def test_the_problems_of_all_models_come_at_once_and_nothing_is_written(make, run, tmp_path):
    models = {
        "gone": {"path": str(tmp_path / "gone"), "source": "host"},
        "fine": {"path": str(make("fine")), "source": "host"},
        "bare": {"path": str(make("bare", None, x_json=b"{}")), "source": "host"},
    }
    result = run(models=models)
    assert result["failed"]
    assert all(part in result["msg"] for part in ("gone: ", "bare: ", "has no config.json", "has no weight files"))
    assert "fine" not in result["msg"]
    assert not (tmp_path / "host").exists()


def test_a_mistyped_catalog_is_refused(run):
    result = run(models={"x": {"source": "host"}, "y": {"path": "m", "source": "hosts"}})
    assert result["failed"]
    assert all(part in result["msg"] for part in ("x.path is missing", "y.source is 'hosts'", "y.path is 'm': it must be an absolute path"))


def test_a_host_asks_for_what_it_lacks_takes_it_in_and_then_nothing_changes(make, run, tmp_path):
    directory = make("controller/tiny", tokenizer_json=b"{}", model_safetensors=safetensors(8))
    arguments = {
        "models": {"tiny": {"path": str(directory), "source": "controller"}},
        "manifests": {"tiny": model_identity.manifest(directory)},
    }
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    foretold = run(**arguments, _ansible_check_mode=True)
    asked = run(**arguments)
    assert foretold["missing"] == asked["missing"] == {"tiny": names}
    assert asked["changed"] and not (tmp_path / "host/models/tiny").exists()
    run(**arguments, incoming={"tiny": {name: str(directory / name) for name in names}})
    assert (tmp_path / "host/models/tiny/model.safetensors").read_bytes() == safetensors(8)
    again = run(**arguments)
    assert not again["changed"] and again["missing"] == {}
    assert again["models"] == foretold["models"]
    assert again["models"]["tiny"]["identity"] == model_identity.read(tmp_path / "host/models/tiny").identity
    (tmp_path / "host/models/tiny/tokenizer.json").write_text("{ }")
    assert run(**arguments)["missing"] == {"tiny": ["tokenizer.json"]}


def test_what_did_not_arrive_whole_replaces_nothing(make, run, tmp_path):
    directory = make("controller/tiny")
    arguments = {
        "models": {"tiny": {"path": str(directory), "source": "controller"}},
        "manifests": {"tiny": model_identity.manifest(directory)},
    }
    (tmp_path / "broken").write_bytes(b"half")
    incoming = {"config.json": str(directory / "config.json"), "model.safetensors": str(tmp_path / "broken")}
    result = run(**arguments, incoming={"tiny": incoming})
    assert result["failed"] and "did not arrive as model.safetensors" in result["msg"]
    assert not (tmp_path / "host/models/tiny").exists()


def test_files_that_we_never_sent_are_named_and_kept(make, run, tmp_path):
    directory = make("controller/tiny")
    mine = make("host/models/tiny", other_safetensors=safetensors(8))
    arguments = {
        "models": {"tiny": {"path": str(directory), "source": "controller"}},
        "manifests": {"tiny": model_identity.manifest(directory)},
    }
    result = run(**arguments)
    assert result["failed"] and "holds other.safetensors, which the controller's copy has not" in result["msg"]
    assert (mine / "other.safetensors").exists()


@pytest.mark.parametrize("source", ["host", "controller"])
def test_a_model_with_another_identity_is_refused_before_anything_is_written_and_the_right_one_changes_nothing(make, run, tmp_path, source):
    directory = make("tiny")
    found = model_identity.read(directory).identity
    entry = {"path": str(directory), "source": source}
    arguments = {"manifests": {"tiny": model_identity.manifest(directory)} if source == "controller" else {}}
    for check in (True, False):
        refused = run(models={"tiny": entry | {"identity": "0" * 64}}, **arguments, _ansible_check_mode=check)
        assert refused["failed"] and "sglang_models_catalog: tiny: " in refused["msg"] and str(directory) in refused["msg"]
        assert f"its identity is {found[:12]}, and 000000000000 is asked for" in refused["msg"] and found in refused["msg"]
        assert not (tmp_path / "host").exists()
    if source == "controller":
        incoming = {path.name: str(path) for path in directory.iterdir()}
        run(models={"tiny": entry | {"identity": found}}, **arguments, incoming={"tiny": incoming})
    else:
        run(models={"tiny": entry})
    again = run(models={"tiny": entry | {"identity": found}}, **arguments)
    assert not again["changed"] and again["models"]["tiny"]["identity"] == found


def test_a_model_that_was_fetched_before_is_refused_when_it_has_another_identity(make, run):
    directory = make("host/models/tiny")
    model = model_identity.read(directory)
    origin = {"source": "hub", "repository": "lab/tiny", "revision": "0" * 40, "exclude": []}
    files = [vars(file) for file in sorted(model.files, key=lambda file: file.name)]
    (directory / ".aerie-model.json").write_text(json.dumps({"origin": origin, "identity": model.identity, "files": files}))
    entry = {key: value for key, value in origin.items() if key != "exclude"}
    silent = f"http://127.0.0.1:{free_port()}"
    arguments = {"hub_endpoint": silent, "hub_lock_text": "", "python": sys.executable}
    refused = run(models={"tiny": entry | {"identity": "0" * 64}}, **arguments)
    assert refused["failed"] and f"tiny: {directory} is another model" in refused["msg"] and "name its commit" in refused["msg"]
    taken = run(models={"tiny": entry | {"identity": model.identity}}, **arguments)
    assert not taken["changed"] and taken["fetched"] == {}


def test_a_known_identity_is_told_without_hashing_and_not_once_a_file_was_touched(make, tmp_path):
    directory, cache = make("one"), tmp_path / "cache"
    assert model_identity.known(directory, cache) is None
    model_identity.remember(model_identity.read(directory), cache)
    assert model_identity.known(directory, cache) == model_identity.read(directory).identity
    os.utime(directory / "config.json", (1, 1))
    assert model_identity.known(directory, cache) is None
    assert model_identity.known(tmp_path / "gone", cache) is None
    model_identity.remember(model_identity.read(directory), cache)
    for path in cache.iterdir():
        path.write_text("{")
    assert model_identity.known(directory, cache) is None


@pytest.fixture
def hub():
    with serving() as server:
        yield server


def of_hub(hub: Hub, config: Any, **more: Any) -> dict[str, Any]:
    name = f"lab/{len(hub.commits)}"
    commit = hub.publish(name, {"config.json": json.dumps(config).encode(), "model.safetensors": safetensors(1 << 17)})
    return {"source": "hub", "repository": name, "revision": commit, **more}


def test_a_check_tells_what_a_hub_would_be_asked_for(run, hub, tmp_path):
    entry = of_hub(hub, CONFIG)
    arguments = {"models": {"tiny": entry}, "hub_endpoint": hub.url, "hub_lock_text": "", "python": sys.executable}
    result = run(**arguments, _ansible_check_mode=True)
    size = len(safetensors(1 << 17)) + len(json.dumps(CONFIG))
    assert result["changed"] and result["fetched"]["tiny"]["bytes"] == size
    assert result["fetched"]["tiny"]["from"] == f"{entry['repository']}@{entry['revision']}"
    told = result["models"]["tiny"]
    assert (told["path"], told["identity"], told["bytes"]) == (str(tmp_path / "host/models/tiny"), None, size)
    assert told["config"]["hidden_size"] == 8
    assert not (tmp_path / "host").exists()


def test_a_draft_that_does_not_fit_is_refused_before_its_weights_are_fetched(make, run, hub, tmp_path):
    models = {"target": {"path": str(make("target")), "source": "host"}, "draft": of_hub(hub, {**DRAFT, "hidden_size": 16})}
    arguments = {"arms": {"eagle3": EAGLE3}, "instances": {"main": {"model": "target", "arm": "eagle3"}}}
    result = run(models=models, **arguments, hub_endpoint=hub.url, hub_lock_text="", python=sys.executable)
    assert result["failed"] and "the draft reads hidden states of 16, the target's have 8" in result["msg"]
    assert not (tmp_path / "host").exists()
    assert [request for request in hub.requests if "safetensors" in request] == []


def test_what_only_the_library_of_the_hub_knows_is_left_open_by_a_check(run, hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    arguments = {"models": {"tiny": of_hub(hub, CONFIG)}, "hub_lock_text": "nothing==1\n", "python": sys.executable}
    result = run(**arguments, _ansible_check_mode=True)
    assert result["changed"] and result["fetched"]["tiny"]["bytes"] is None
    assert "known when the library of the hub is installed" in str(result["warnings"])
    assert not (tmp_path / "host").exists()


def test_the_library_of_the_hub_comes_from_the_wheels_that_the_release_comes_from(run, hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    (tmp_path / "wheels").mkdir()
    lock = "nothing==1 --hash=sha256:" + "0" * 64 + "\n"
    arguments = {"models": {"tiny": of_hub(hub, CONFIG)}, "hub_lock_text": lock, "python": sys.executable}
    result = run(**arguments, wheels=str(tmp_path / "wheels"))
    assert result["again"]
    deadline = time.monotonic() + 60
    while (ended := jobs.read(Path(result["job"]))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not ended["ok"] and f"from the wheels at {tmp_path / 'wheels'}: add those that are missing" in ended["msg"]


def test_a_source_that_nothing_answers_at_is_handed_to_the_controller(run, tmp_path, monkeypatch):
    port = free_port()
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\necho hostname 127.0.0.1; echo port {port}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    entry = {"source": "rsync", "from": "ops@127.0.0.1:/srv/models/x", "port": port}
    result = run(models={"x": entry})
    assert result["unreachable"] == {"x": ["127.0.0.1", port]} and not result["changed"]
    assert not (tmp_path / "host").exists()


EAGLE3 = {"speculation": {"algorithm": "EAGLE3", "draft_model": "draft"}}
DRAFT = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"]}


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (
            {**DRAFT, "hidden_size": 16},
            "arm eagle3: draft draft for target target: the draft reads hidden states of 16, the target's have 8",
        ),
        ({**DRAFT, "vocab_size": 32}, "vocab_size is 32 in the draft, 16 in the target"),
        ({**DRAFT, "architectures": ["LlamaForCausalLMEagle"]}, "is no EAGLE-3 draft"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_anything_is_written(make, run, tmp_path, draft, message):
    models = {name: {"path": str(make(name, config)), "source": "host"} for name, config in (("target", CONFIG), ("draft", draft))}
    result = run(models=models, arms={"eagle3": EAGLE3, "baseline": None}, instances={"main": {"model": "target", "arm": "baseline"}})
    assert result["failed"] and message in result["msg"]
    assert not (tmp_path / "host").exists()


def test_a_draft_that_fits_is_taken():
    arms, instances = {"eagle3": EAGLE3}, {"main": {"model": "target", "arm": "eagle3"}}
    assert model_identity.fit_problems({"target": CONFIG, "draft": DRAFT}, arms, instances) == []


def test_an_arm_for_another_target_of_the_same_host_is_not_held_against_this_one():
    wide = {**DRAFT, "hidden_size": 16}
    instances = {"one": {"model": "target", "arm": "baseline"}, "two": {"model": "other", "arm": "eagle3"}}
    configs = {"target": CONFIG, "other": {**CONFIG, "hidden_size": 16}, "draft": wide}
    assert model_identity.fit_problems(configs, {"eagle3": EAGLE3, "baseline": None}, instances) == []


def test_the_pair_of_the_project_is_whole():
    tiny = Path(__file__).parents[2] / "models/tiny"
    assert model_identity.problems(tiny / "target") == model_identity.problems(tiny / "draft-eagle3") == []
    target, draft = model_identity.read(tiny / "target").as_dict()["config"], model_identity.read(tiny / "draft-eagle3").as_dict()["config"]
    assert draft["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (target["hidden_size"], target["vocab_size"]) == (draft["hidden_size"], draft["vocab_size"])
