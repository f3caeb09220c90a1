"""What triton_target_verify takes for granted of SGLang's triton backend, in every release that the set is for."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator

import pytest
from ansible.module_utils.aerie.patching import anchors
from ansible.module_utils.aerie.specifiers import Version
from wheel_sources import Sources

import adopt_version
from aerie_controller import patch_sets

pytestmark = pytest.mark.contract

(SET,) = patch_sets.load(["triton_target_verify"])
VERSIONS = [version for version in adopt_version.known_versions(patch_sets.PATCHES) if Version.parse(version) in SET.versions]
BACKEND = "sglang/srt/layers/attention/triton_backend.py"
MODES = "sglang/srt/model_executor/forward_batch_info.py"
CLASS, METHOD = "TritonAttnBackend", "forward_extend"
KERNEL_CALLS = ("self.extend_attention_fwd", "self._forward_extend_kernel")
DECODE_BUFFERS = ("cuda_graph_attn_logits", "cuda_graph_attn_lse", "cuda_graph_swa_attn_logits")
METADATA = ("max_extend_len", "custom_mask", "mask_indptr", "swa_out_cache_loc")
"""Fields of the backend's metadata that the overlay reads."""


def names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def assigned(node: ast.FunctionDef) -> set[str]:
    """Return the names that a function's parameters and assignments bind."""
    parameters = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return parameters | {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


@pytest.mark.parametrize("version", VERSIONS)
class TestSglang:
    @pytest.fixture
    def sources(self, version: str) -> Iterator[Sources]:
        with Sources("sglang", version) as sources:
            yield sources

    @pytest.fixture
    def method(self, sources: Sources) -> ast.FunctionDef:
        node = sources.find(BACKEND, CLASS, METHOD)
        assert isinstance(node, ast.FunctionDef)
        return node

    @pytest.fixture
    def call(self, method: ast.FunctionDef) -> ast.Call:
        """Return the call of the kernel for prefills, which the hook comes before."""
        kernel_calls = [node for node in ast.walk(method) if isinstance(node, ast.Call) and anchors.dotted(node.func) in KERNEL_CALLS]
        assert len(kernel_calls) == 1
        return kernel_calls[0]

    def test_what_the_hook_hands_over_is_there(self, method: ast.FunctionDef, version: str) -> None:
        hooks = [hook for hook in SET.hooks_for(Version.parse(version)) if "attend" in hook.insert or "compare" in hook.insert]
        lines = [line for hook in hooks for line in hook.insert.splitlines()]
        inserted = names(ast.parse("def hook():\n" + textwrap.indent("\n".join(lines), "    ")))
        assert inserted - assigned(method) - set(dir(builtins)) == {"aerie_triton_target_verify"}

    def test_the_hook_hands_over_what_the_kernel_is_given(self, call: ast.Call) -> None:
        words = [ast.unparse(argument) for argument in call.args]
        for word in ("kv_indptr", "kv_indices", "causal", "k_descale", "v_descale", "layer.scaling"):
            assert word in words
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert named["logit_cap"] == "logits_soft_cap"
        assert named["sliding_window_size"] == "sliding_window_size"
        assert named["window_kv_offsets"] == "window_kv_offsets"
        assert named["sinks"] == "sinks"
        assert named.get("score_mod") in (None, "score_mod")

    def test_keys_are_in_the_cache_before_the_kernel_reads_them(self, method: ast.FunctionDef, call: ast.Call) -> None:
        writes = [node for node in ast.walk(method) if isinstance(node, ast.Call) and "set_kv_buffer" in ast.unparse(node.func)]
        assert writes
        assert max(node.lineno for node in writes) < call.lineno

    def test_deterministic_inference_and_context_parallelism_return_before(
        self, sources: Sources, method: ast.FunctionDef, call: ast.Call
    ) -> None:
        for own in ("self._forward_extend_unified", "self._forward_extend_dcp"):
            returns = [node for node in ast.walk(method) if isinstance(node, ast.Call) and anchors.dotted(node.func) == own]
            assert bool(returns) == (f"def {own.removeprefix('self.')}" in sources.text(BACKEND))
            assert all(node.lineno < call.lineno for node in returns)

    def test_the_metadata_has_what_is_read_of_it(self, sources: Sources) -> None:
        fields = sources.unparsed(BACKEND, "ForwardMetadata")
        for name in METADATA:
            assert f"{name}:" in fields, name

    def test_the_drafts_extend_has_as_many_tokens_for_each_request_and_lists_its_prefix_alone(self, sources: Sources) -> None:
        mode = sources.unparsed(MODES, "ForwardMode")
        assert "def is_target_verify" in mode
        assert "def is_draft_extend_v2" in mode
        text = sources.unparsed(BACKEND, CLASS)
        assert len(re.findall(r"kv_lens = torch\.clamp\(seq_lens - extend_seq_lens, min=0\)", text)) == 1, "with graphs"
        eager = r"_fill_kv_indptr_and_indices\((\w+\.kv_loc_plan, )?bs, forward_batch\.extend_prefix_lens,"
        assert re.search(eager, text), "and without"

    def test_a_mask_has_a_row_of_prefix_and_drafted_tokens_for_each_drafted_token(self, sources: Sources) -> None:
        text = sources.unparsed(BACKEND, CLASS)
        lengths = re.findall(r"seq_mask_len = ([\w.]+) \* \((?:forward_batch\.)?seq_lens \+ ([\w.]+)\)", text)
        assert len(lengths) == 2, "one for graphs, and one without"
        assert all(drafted == others for drafted, others in lengths)
        assert re.search(r"max_extend_len = (self\.num_draft_tokens|num_draft_tokens|num_tokens_per_req)\b", text)

    def test_the_number_of_splits_sizes_decode_buffers_and_counts_alone(self, sources: Sources) -> None:
        buffers = sources.find(BACKEND, CLASS, "init_cuda_graph_state")
        assert isinstance(buffers, ast.FunctionDef)
        assert [argument.arg for argument in buffers.args.args[:4]] == ["self", "max_bs", "max_num_tokens", "kv_indices_buf"]
        sized = {
            ast.unparse(node.targets[0])
            for node in ast.walk(buffers)
            if isinstance(node, ast.Assign) and "self.max_kv_splits" in ast.unparse(node.value)
        }
        assert sized <= {f"self.{name}" for name in (*DECODE_BUFFERS, "cuda_graph_num_kv_splits", "cuda_graph_window_num_kv_splits")}
        assert {f"self.{name}" for name in DECODE_BUFFERS[:2]} <= sized
        assert not any(isinstance(node, ast.Return) for node in ast.walk(buffers)), "the number is put back at the end"

    def test_only_a_decodes_metadata_has_decode_buffers(self, sources: Sources) -> None:
        backend = sources.find(BACKEND, CLASS)
        readers = {
            node.name
            for node in backend.body
            if isinstance(node, ast.FunctionDef)
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and part.attr in DECODE_BUFFERS and isinstance(part.ctx, ast.Load)
        }
        prepares = {"init_forward_metadata_out_graph", "_init_forward_metadata_out_graph"}  # the second from 0.5.22
        assert len(readers) == 2
        assert "_build_cuda_graph_forward_metadata" in readers
        assert readers & prepares
        for name in readers:
            for node in ast.walk(sources.find(BACKEND, CLASS, name)):
                if isinstance(node, ast.If) and any(f"self.{buffer}" in ast.unparse(node.body[0]) for buffer in DECODE_BUFFERS):
                    assert "in_capture" in ast.unparse(node.test) or "forward_mode.is_decode_or_idle()" in ast.unparse(node.test)

    def test_the_drafts_steps_decode_and_are_given_their_indices(self, sources: Sources) -> None:
        steps = sources.unparsed(BACKEND, "TritonMultiStepDraftBackend", "init_cuda_graph_state")
        assert re.search(r"\.init_cuda_graph_state\(max_bs, max_num_tokens, kv_indices_buf=", steps)
