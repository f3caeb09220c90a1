"""What flashinfer_prefill_plan takes for granted of SGLang and of FlashInfer, in every release that the set is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from ansible.module_utils.aerie.patching import anchors
from ansible.module_utils.aerie.specifiers import Version
from wheel_sources import Sources

import adopt_version
from aerie_controller import patch_sets

pytestmark = pytest.mark.contract

(SET,) = patch_sets.load(["flashinfer_prefill_plan"])
VERSIONS = [version for version in adopt_version.known_versions(patch_sets.PATCHES) if Version.parse(version) in SET.versions]
FLASHINFER = ("0.6.12", "0.6.14", "0.6.15.post1", "0.6.17", "0.6.18", "0.7.1", "0.7.2")
"""Those that the releases pin."""
BACKEND = "sglang/srt/layers/attention/flashinfer_backend.py"
PREFILL = "flashinfer/prefill.py"
UPDATER = "FlashInferIndicesUpdaterPrefill"
RAGGED, PAGED = "BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Call) and anchors.dotted(one.func) == name]


@pytest.mark.parametrize("version", VERSIONS)
class TestSglang:
    @pytest.fixture
    def sources(self, version: str) -> Iterator[Sources]:
        with Sources("sglang", version) as one:
            yield one

    def test_its_flashinfer_is_one_of_those_looked_at(self, sources):
        pinned = re.findall(r"^Requires-Dist: flashinfer[_-]python(?:\[\w+\])?==([\w.]+)", sources.metadata(), re.MULTILINE)
        assert pinned and set(pinned) <= set(FLASHINFER)

    def test_what_the_hooks_read_are_parameters(self, sources):
        noted = set(sources.parameters(BACKEND, UPDATER, "update_single_wrapper"))
        assert {"spec_info", "use_ragged", "seq_lens", "seq_lens_cpu", "prefix_lens", "extend_prefix_lens_cpu"} <= noted
        assert ("custom_kv_indices" in noted) == ("custom_kv_indices" in sources.text(BACKEND)), "such caches have other lengths"
        assert {"wrapper_ragged", "wrapper_paged"} <= set(sources.parameters(BACKEND, UPDATER, "call_begin_forward"))

    def test_what_is_noted_is_planned_next(self, sources):
        last = sources.find(BACKEND, UPDATER, "update_single_wrapper").body[-1]
        assert anchors.dotted(last.value.func) == "self.call_begin_forward"
        for other in ("update_sliding_window", "update_cross_attention"):
            assert calls(sources.find(BACKEND, UPDATER, other), "self.call_begin_forward"), "this plans without a note"

    def test_lengths_on_the_gpu_are_sums_of_those_on_the_host(self, sources):
        noted = sources.unparsed(BACKEND, UPDATER, "update_single_wrapper")
        assert "if use_ragged:\n        assert prefix_lens is not None\n        paged_kernel_lens = prefix_lens\n" in noted
        assert "else:\n        paged_kernel_lens = seq_lens\n" in noted
        planned = sources.unparsed(BACKEND, UPDATER, "call_begin_forward")
        assert "kv_indptr[1:bs + 1] = torch.cumsum(paged_kernel_lens, dim=0)" in planned
        assert "qo_indptr[1:bs + 1] = torch.cumsum(seq_lens - prefix_lens, dim=0)" in planned

    def test_plans_are_asked_for_in_this_order(self, sources):
        node = sources.find(BACKEND, UPDATER, "call_begin_forward")
        (ragged,), (paged,) = (calls(node, f"{name}.begin_forward") for name in ("wrapper_ragged", "wrapper_paged"))
        assert [ast.unparse(one) for one in ragged.args[:2]] == ["qo_indptr", "qo_indptr"]
        assert [ast.unparse(one) for one in paged.args[:4]] == ["qo_indptr", "kv_indptr", "kv_indices", "self.kv_last_page_len[:bs]"]

    def test_a_prefill_says_its_prefixes_and_that_it_is_no_speculation(self, sources):
        node = sources.find(BACKEND, "FlashInferAttnBackend", "init_forward_metadata")
        asked = calls(node, "self.indices_updater_prefill.update")
        told = [{word.arg: ast.unparse(word.value) for word in one.keywords} for one in asked]
        (prefill,) = (one for one in told if one["spec_info"] == "None")
        assert prefill["extend_prefix_lens_cpu"] == "forward_batch.extend_prefix_lens_cpu"


@pytest.mark.parametrize("flashinfer", FLASHINFER)
class TestFlashInfer:
    @pytest.fixture
    def sources(self, flashinfer: str) -> Iterator[Sources]:
        with Sources("flashinfer_python", flashinfer) as one:
            yield one

    @pytest.mark.parametrize(
        ("wrapper", "lengths"),
        [(RAGGED, ["qo_indptr", "kv_indptr"]), (PAGED, ["qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"])],
    )
    def test_a_plan_takes_lengths_from_the_host_and_has_them_on_the_gpu_too(self, sources, wrapper, lengths):
        text = re.sub(r"\s+", " ", sources.unparsed(PREFILL, wrapper, "plan"))
        for name in lengths:
            assert f"{name}.to('cpu')" in text, "of a tensor on the host this is the tensor"
            assert f"self._{name}_buf = {name}.to(self.device, non_blocking=non_blocking)" in text
        assert [name for name in sources.parameters(PREFILL, wrapper, "plan") if name in lengths] == lengths
        assert "begin_forward = plan" in sources.unparsed(PREFILL, wrapper)

    @pytest.mark.parametrize("wrapper", [RAGGED, PAGED])
    def test_a_wrapper_says_what_decides_whether_its_plan_is_taken_over(self, sources, wrapper):
        text = sources.unparsed(PREFILL, wrapper)
        assert "self._backend = backend" in text
        assert "self.device = " in text
        assert "def is_cuda_graph_enabled(self) -> bool:" in text
        assert "self._pin_memory_int_workspace_buffer" in text, "what the event keeps from being overwritten"
