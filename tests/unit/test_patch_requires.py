"""A patch set that needs something of another package is refused where the installed one has it not, and says what it found."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import patch_requires
from ansible.module_utils.aerie.patching.patch_set import PatchSet

PATCHES = Path(__file__).parents[2] / "patches"
NEED = {
    "package": "flashinfer",
    "file": "flashinfer/jit/comm.py",
    "function": "gen_trtllm_comm_module",
    "argument": "supported_major_versions",
    "contains": 12,
    "why": "it would crash",
    "cure": "take 0.6.17",
}
OTHER_ENDS = {"package": "p", "file": "p/x.py", "contains": 120, "why": "w", "cure": "c"}


def patch_set(*needs: Any) -> PatchSet:
    definition = {"name": "a_set", "summary": "s", "why": "w", "versions": ">=0.5", "requires": list(needs)}
    return PatchSet.of({"name": "a_set", "definition": definition, "overlay": {"sglang/x.py": ""}})


def install(place: Path, source: str, version: str = "0.6.12", file: str = NEED["file"]) -> Path:
    path = place / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (place / f"{path.relative_to(place).parts[0]}_python-{version}.dist-info").mkdir()
    return place


def flashinfer(supported: str) -> str:
    return f"def gen_other():\n    f(supported_major_versions=[12])\n\n\ndef gen_trtllm_comm_module():\n    flags = c.get({supported})\n"


def test_a_package_that_has_it_is_let_pass(tmp_path):
    place = install(tmp_path, flashinfer("supported_major_versions=[9, 10, 12]"), "0.6.17")
    patch_requires.check([patch_set(NEED)], [tmp_path / "nothing", place])


def test_one_that_has_it_not_is_refused_with_what_it_has_the_reason_and_the_cure(tmp_path):
    place = install(tmp_path, flashinfer("supported_major_versions=[9, 10]"))
    with pytest.raises(AerieError) as caught:
        patch_requires.check([patch_set(NEED)], [place])
    assert (
        f"a_set: flashinfer 0.6.12 in {place} has 9 and 10 as supported_major_versions of gen_trtllm_comm_module "
        "(flashinfer/jit/comm.py), not 12: it would crash: take 0.6.17"
    ) in str(caught.value)


def test_the_first_place_of_the_search_path_counts_as_it_does_for_python(tmp_path):
    old = install(tmp_path / "old", flashinfer("supported_major_versions=[9]"))
    new = install(tmp_path / "new", flashinfer("supported_major_versions=[12]"))
    patch_requires.check([patch_set(NEED)], [new, old])
    with pytest.raises(AerieError, match="has 9 as"):
        patch_requires.check([patch_set(NEED)], [old, new])


def test_a_package_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(AerieError, match=r"needs flashinfer, to see what it supports, but flashinfer/jit/comm.py is not in"):
        patch_requires.check([patch_set(NEED)], [tmp_path])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (flashinfer(""), "it is there 0 times"),
        (flashinfer("supported_major_versions=[9]") * 2, r"it is there 2 times \(lines 6 and 12\)"),
        (flashinfer("supported_major_versions=MAJORS"), "can't be told"),
        (flashinfer("supported_major_versions=12"), "is 12, and no list"),
        ("def gen_trtllm_com_module():\n    pass\n", "did you mean 'gen_trtllm_com_module'"),
        ("def f(:\n", "can't be told"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, source, message):
    with pytest.raises(AerieError, match=message):
        patch_requires.check([patch_set(NEED)], [install(tmp_path, source)])


@pytest.mark.parametrize(
    ("need", "source"),
    [
        ({"value": "SUPPORTED"}, "SUPPORTED = (90, 120)\n"),
        ({"value": "Kernel.supported"}, "supported = []\n\n\nclass Kernel:\n    supported: list[int] = [120]\n"),
        ({"function": "fused", "decorator": "supports"}, "@other([1])\n@m.supports([90, 120])\ndef fused():\n    pass\n"),
    ],
)
def test_it_is_found_where_packages_say_it(tmp_path, need, source):
    place = install(tmp_path, source, file="p/x.py")
    patch_requires.check([patch_set(OTHER_ENDS | need)], [place])
    with pytest.raises(AerieError, match="not 121"):
        patch_requires.check([patch_set(OTHER_ENDS | need | {"contains": 121})], [place])


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ("flashinfer", "requires 1: must be a mapping"),
        (NEED | {"contain": 12}, "requires 1: unknown key 'contain'; did you mean 'contains'"),
        ({key: value for key, value in NEED.items() if key != "cure"}, "requires 1: cure is missing"),
        (NEED | {"value": "X"}, "needs one of value, argument and decorator, which says where the list is, not value and argument"),
        (OTHER_ENDS, "needs one of value, argument and decorator, which says where the list is, not none"),
        (OTHER_ENDS | {"argument": "x"}, "argument needs function"),
        (OTHER_ENDS | {"value": "x", "function": "f"}, "value stands alone"),
        (NEED | {"file": "/etc/passwd"}, "requires 1: file '/etc/passwd' must be a plain relative path"),
        (NEED | {"contains": True}, "contains must be a number or text, not True"),
    ],
)
def test_a_wrong_requirement_is_refused(need, message):
    with pytest.raises(AerieError) as caught:
        patch_set(need)
    assert message in str(caught.value)


def test_what_is_required_is_part_of_what_identifies_a_set():
    assert patch_set(NEED).sha256 != patch_set(NEED | {"contains": 9}).sha256


# The set that uses it


@pytest.fixture
def overlay(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The overlay of flashinfer_fusion_sm120, with SGLang's own test of the GPU in our hands."""

    def load(sm120: bool, variable: str | None) -> types.ModuleType:
        common = types.ModuleType("sglang.srt.utils.common")
        common.is_sm120_supported = lambda: sm120  # type: ignore[attr-defined]
        for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "sglang.srt.utils.common", common)
        monkeypatch.delenv("AERIE_FLASHINFER_FUSION_SM120", raising=False)
        if variable is not None:
            monkeypatch.setenv("AERIE_FLASHINFER_FUSION_SM120", variable)
        path = PATCHES / "flashinfer_fusion_sm120/overlay/sglang/srt/layers/aerie_flashinfer_fusion_sm120.py"
        spec = importlib.util.spec_from_file_location("aerie_flashinfer_fusion_sm120", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(("sm120", "variable"), [(True, None), (True, ""), (True, "0"), (False, "1"), (False, None)])
def test_the_fusion_stays_as_it_was_unless_it_is_asked_for_on_its_gpus(overlay, sm120, variable):
    module = overlay(sm120, variable)
    assert [module.opened(True), module.opened(False)] == [True, False]
    assert not any(module.takes(backend, nodes) for backend in ("auto", "trtllm", "mnnvl") for nodes in (True, False))


def test_the_fusion_opens_for_the_kernels_of_one_node(overlay):
    module = overlay(True, "1")
    assert module.opened(False) is True
    assert [module.takes(backend, False) for backend in ("auto", "trtllm", "mnnvl", "cutedsl")] == [True, True, False, False]
    assert not module.takes("auto", True)
