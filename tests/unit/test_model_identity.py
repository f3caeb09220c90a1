"""A model is whole or refused, is known by its content alone, and only what a host lacks is sent to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.releases import model_identity
from ansible.module_utils.testing import patch_module_args

import model_identity as module

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


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"source": "host"}, "x: path is missing"),
        ({"path": "/m", "source": "hub"}, "source must be host or controller, not 'hub'"),
        ({"path": "m", "source": "host"}, "path must be absolute"),
        ({"path": "/m", "source": "host", "sorce": 1}, "unknown key sorce"),
    ],
)
def test_a_mistyped_catalog_is_refused(run, entry, message):
    result = run(models={"x": entry})
    assert result["failed"] and message in result["msg"]


def test_two_models_of_the_controller_never_share_a_directory_on_the_host():
    entries = {"x": {"path": "/a/target", "source": "controller"}, "y": {"path": "/b/target", "source": "controller"}}
    assert "/b/target and /a/target (x) would go to the same directory" in model_identity.catalog_problems(entries)[0]
    same = {"x": {"path": "/a/target", "source": "controller"}, "y": {"path": "/a/target", "source": "controller"}}
    assert model_identity.catalog_problems(same) == []


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
