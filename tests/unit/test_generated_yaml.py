"""A variables file that is made of what a host reports is data for ever: nothing in it is evaluated, and no key is the host's.

Inputs tried: 300 generated surveys, 200 generated calibrations and 200 searches, and every text of ``hostile.TEXTS`` at every leaf of
a survey. The generated ones are the same in every run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hostile
import pytest
import yaml
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.host import capture, survey_shape
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_capture import GIVEN, INFO, SOURCE

from aerie_controller import generated_yaml, variables_file

TUNED = ("vm.swappiness", "kernel.numa_balancing")
VARIABLES = {
    "nvidia_cuda_state", "nvidia_cuda_repository_url", "nvidia_cuda_repository_suite", "nvidia_cuda_repository_components",
    "nvidia_cuda_repository_key_fingerprint", "nvidia_cuda_repository_key_url", "nvidia_cuda_driver_package", "nvidia_cuda_driver_version",
    "nvidia_cuda_toolkit_package", "nvidia_cuda_toolkit_version", "nvidia_cuda_nccl_version", "nvidia_cuda_hold", "nvidia_cuda_headers",
    "nvidia_cuda_persistence", "nvidia_cuda_manage_driver", "host_tuning_settings", "nccl_profile", "nccl_environment",
    "sglang_release_version", "sglang_patches_sets", "sglang_models_catalog",
}  # fmt: skip
"""What a captured file may set, and nothing else."""
TEXTS = st.one_of(st.sampled_from(hostile.TEXTS), st.text(max_size=30), st.text(alphabet="{}%#!'\"\\\n\t:- \x1b\x85\u2028a1", max_size=20))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


def fixed(examples: int) -> settings:
    """Return settings with which a test tries the same inputs in every run, and keeps none."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("generated")
    os.chdir(made)
    return made


PLACES = [where for where in hostile.mutations(INFO) if where]
LEAVES = [where for where in PLACES if not any(other[: len(where)] == where for other in PLACES if len(other) > len(where))]
CHANGES = st.lists(st.tuples(st.sampled_from(PLACES), st.one_of(TEXTS, VALUES)), min_size=1, max_size=12)


def captured(info: Any, sources: Any) -> str | None:
    """Return what the capture of a host would write; None where it is refused, as the action refuses it."""
    try:
        survey, _ = survey_shape.checked(info)
        with untrusted.reading("the survey"):
            return variables_file.render("gpu-01", survey, capture.sections(survey, sources, GIVEN, TUNED))
    except untrusted.Malformed:
        return None


@fixed(300)
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), st.one_of(TEXTS, VALUES)), min_size=1, max_size=12),
    st.dictionaries(st.sampled_from(list(SOURCE)), TEXTS),
)
def test_no_survey_gives_a_file_that_is_evaluated_or_has_another_key(directory, changes, source):
    info: Any = INFO
    for where, value in changes:
        try:
            info = hostile.replaced(info, where, value)
        except (KeyError, TypeError, IndexError, ValueError):  # an earlier change took the place away
            continue
    text = captured(info, [SOURCE | source])
    if text is not None:
        assert set(hostile.load(text, directory)) <= VARIABLES


def test_no_text_at_any_leaf_of_a_survey_is_evaluated_or_ends_a_comment(directory, record_property):
    count = 0
    for text in hostile.TEXTS:
        info: Any = INFO
        for where in LEAVES:
            info = hostile.replaced(info, where, text)
            count += 1
        written = captured(info, [SOURCE | dict.fromkeys(("suite", "file", "fingerprint", "signed_by"), text)])
        assert written is not None
        assert set(hostile.load(written, directory)) <= VARIABLES
    assert count > 500
    record_property("counted texts at leaves of surveys", count)


@pytest.mark.parametrize("name", ["sglang_server_calibration", "nccl_tuned"])
@fixed(200)
@given(head=st.lists(TEXTS, max_size=3), value=st.dictionaries(TEXTS, VALUES, max_size=5))
def test_no_value_and_no_head_gives_another_key_or_is_evaluated(directory, name, head, value):
    assert list(hostile.load(generated_yaml.document(head, {name: value}), directory)) == [name]


def test_what_a_host_said_comes_back_as_it_was(directory):
    said = {text.replace("\udcff", "").replace("\ud800", ""): text.replace("\udcff", "").replace("\ud800", "") for text in hostile.TEXTS}
    assert hostile.load(generated_yaml.document([], {"v": said}), directory)["v"] == said


@pytest.mark.parametrize(
    "text", ["580.105.08-1", "https://m.example.org/cuda/", "NVreg_RegistryDwords", "ForceP2P=0x11;RMForceP2PType=1", "iommu=pt", "/"]
)
def test_plain_texts_are_written_plainly(text):
    assert "!unsafe" not in generated_yaml.variable("v", [text])


@pytest.mark.parametrize("text", hostile.TEMPLATES)
def test_a_template_is_marked_and_only_then_would_ansible_not_evaluate_it(text, directory):
    written = generated_yaml.variable("v", text)
    assert written.startswith("v: !unsafe")
    assert hostile.load(f"---\n{written}\n", directory) == {"v": text}


def test_a_file_without_the_mark_would_be_evaluated(directory):
    """What the other tests rely on: Ansible evaluates a file that is given with ``-e @``, and this harness sees it."""
    with pytest.raises(AssertionError, match="was evaluated"):
        hostile.load("---\nv: '{{ trap }}'\n", directory)


@pytest.mark.parametrize("value", [hostile.nested(100), {"a": [0] * 200_000}])
def test_a_value_without_bounds_is_refused(value):
    with pytest.raises(untrusted.Malformed):
        generated_yaml.variable("v", value)


@pytest.mark.parametrize(
    "content",
    ["", "just words", "- a list", "a: [", "a: !unsafe {b: c}", "a: !!python/object/apply:os.system [id]", "a: " + "[" * 5000, "\0"],
)
def test_a_file_that_is_none_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "gpu-01.yml"
    path.write_text(content)
    with pytest.raises(untrusted.Malformed, match=r"gpu-01\.yml"):
        generated_yaml.read(path)


def lookup(path: Path) -> Any:
    from ansible.plugins.loader import lookup_loader

    lookup_loader.add_directory(str(hostile.PROJECT / "plugins/lookup"))
    return lookup_loader.get("host_variables", loader=DataLoader(), templar=Templar(loader=DataLoader())).run([str(path)], {})[0]


def test_the_products_lookup_reads_the_file_without_evaluating_it(tmp_path):
    value = {"why": "{{ 7 * 7 }}", "high": 48}
    path = tmp_path / "gpu-01.yml"
    path.write_text(generated_yaml.document(["written"], {"nccl_tuned": value}))
    assert lookup(path) == {"nccl_tuned": value}
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(path.read_text())


def writers() -> list[str]:
    """Return the controller's files that write YAML by themselves."""
    words = ("yaml.safe_dump", "yaml.dump", "to_nice_yaml", "HEAD.format")
    paths = [path for pattern in ("plugins/**/*.py", "library/*.py", "roles/**/*.yml") for path in hostile.PROJECT.glob(pattern)]
    found = [path for path in paths if any(word in path.read_text() for word in words)]
    return sorted(path.relative_to(hostile.PROJECT).as_posix() for path in found)


def test_there_is_one_writer():
    assert writers() == ["plugins/aerie_controller/generated_yaml.py"]
