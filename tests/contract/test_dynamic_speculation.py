"""What dynamic_speculation's overlay takes for granted of SGLang, in every release that the set is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import anchors, patch_plan
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.specifiers import Version
from wheel_sources import Sources

import adopt_version
from aerie_controller import patch_sets

pytestmark = pytest.mark.contract

NAME = "dynamic_speculation"
SRT = "sglang/srt/"
WORKER = SRT + "speculative/eagle_worker_v2.py"
RELAY = SRT + "managers/overlap_utils.py"
RESULT = SRT + "managers/utils.py"
RUNNER = SRT + "model_executor/runner/decode_cuda_graph_runner.py"
FORWARD_BATCH = SRT + "model_executor/forward_batch_info.py"
SAMPLING = SRT + "sampling/sampling_batch_info.py"
(SET,) = patch_sets.load([NAME])
VERSIONS = [version for version in adopt_version.known_versions(patch_sets.PATCHES) if Version.parse(version) in SET.versions]


@pytest.fixture(scope="module", params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> Iterator[Sources]:
    with Sources("sglang", request.param) as one:
        yield one


def fields(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}


def calls(node: ast.AST) -> list[str]:
    return [anchors.dotted(one.func) or "" for one in ast.walk(node) if isinstance(one, ast.Call)]


def test_there_is_a_release_with_each_form_of_what_is_looked_up():
    assert {"0.5.14", "0.5.15.post1", "0.5.17", "0.5.23"} <= set(VERSIONS)


def test_a_result_has_what_a_plain_step_gives(sources):
    needed = {"logits_output", "next_token_ids", "can_run_cuda_graph", "speculative_num_draft_tokens", "accept_lens", "new_seq_lens"}
    assert needed | {"next_draft_input", "extra_keep_alive_refs"} <= fields(sources.find(RESULT, "GenerationBatchResult"))


def test_the_number_of_tokens_of_a_step_is_read_from_its_result(sources):
    path = SRT + "managers/scheduler_components/batch_result_processor.py"
    reads = ast.unparse(sources.find(path, "SchedulerBatchResultProcessor", "_resolve_spec_v2_tokens"))
    if "_get_speculative_output_stride(result)" in reads:
        reads = ast.unparse(sources.find(path, "_get_speculative_output_stride"))
    assert "result.speculative_num_draft_tokens" in reads
    assert "server_args" not in reads


def test_what_a_step_changes_in_its_batch_is_taken_back_with_and_without_overlap(sources):
    run = sources.find(SRT + "managers/scheduler.py", "Scheduler", "run_batch")
    isolated = [one for one in ast.walk(run) if isinstance(one, ast.Call) and anchors.dotted(one.func) == "self._forward_isolation"]
    values = {word.value.value for one in isolated for word in one.keywords if word.arg == "overlap"}
    assert values == {True, False}


def test_the_runner_captures_in_the_mode_that_it_is_told_and_gives_each_rows_hidden_states(sources):
    assert sources.parameters(RUNNER, "DecodeCudaGraphRunner", "capture") == ["self"]
    init = sources.find(RUNNER, "DecodeCudaGraphRunner", "__init__")
    assert isinstance(init, ast.FunctionDef)
    assert [one.arg for one in init.args.args] == ["self", "model_runner"]
    assert "attn_backend" in [one.arg for one in init.args.kwonlyargs]
    assert "self.capture" in calls(init)
    assert "get_batch_sizes_to_capture" in calls(init), "its sizes are limited by what this name is"
    assert "capture_hidden_mode" in ast.unparse(init)
    assert "hidden_states=output.hidden_states[:self.raw_num_token]" in ast.unparse(sources.find(RUNNER, "DecodeCudaGraphRunner"))


def test_a_batch_says_which_hidden_states_it_wants_in_one_of_two_ways(sources):
    node = sources.find(FORWARD_BATCH, "ForwardBatch", "init_new")
    assert isinstance(node, ast.FunctionDef)
    names = [one.arg for one in [*node.args.args, *node.args.kwonlyargs]]
    assert ("capture_hidden_mode" in names) is (sources.version >= Version.parse("0.5.16"))
    required = {one.arg for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None}
    assert required <= {"capture_hidden_mode", "return_hidden_states_before_norm"}
    if "capture_hidden_mode" not in names:
        assert "batch.capture_hidden_mode = None" in ast.unparse(node)


def test_the_draft_goes_on_from_a_batch_and_a_result(sources):
    assert sources.parameters(WORKER, "EagleDraftWorker", "_draft_extend_for_decode")[:3] == ["self", "batch", "batch_result"]
    body = ast.unparse(sources.find(WORKER, "EagleDraftWorker", "_draft_extend_for_decode"))
    for name in ("accept_lens", "next_token_ids", "logits_output.hidden_states", "next_draft_input"):
        assert f"batch_result.{name}" in body
    assert "self.plan_stream" in body


def test_the_draft_is_asked_where_it_is_set_up_to_run(sources):
    body = sources.find(WORKER, "EAGLEWorkerV2", "forward_batch_generation")
    withs = [one for one in ast.walk(body) if isinstance(one, ast.With) and "self.draft_worker.draft" in calls(one)]
    assert withs
    assert all("draft_tp_context" in ast.unparse(one.items[0]) for one in withs)


def test_the_relay_knows_when_lengths_were_published(sources):
    body = ast.unparse(sources.find(RELAY, "FutureMap"))
    for name in ("publish_ready", "new_seq_lens_buf", "needs_cpu_seq_lens", "output_tokens_buf"):
        assert f"self.{name}" in body
    assert "_DEBUG_ASSERT" in sources.text(RELAY)
    assert ("class RelayPayload" in sources.text(RELAY)) is (sources.version >= Version.parse("0.5.15"))


def test_the_schedulers_barrier_asks_the_drafts_runner(sources):
    name, event = (
        ("war_fastpath_runner", "war_fastpath_read_done_event")
        if sources.version < Version.parse("0.5.18")
        else ("last_shared_read_runner", "shared_read_done_event")
    )
    assert "draft_runner" in ast.unparse(sources.find(WORKER, "EAGLEWorkerV2", name))
    scheduler = SRT + "managers/scheduler.py"
    barrier = sources.unparsed(scheduler, "Scheduler", "_apply_war_barrier")
    assert event in barrier
    assert "wait_stream(self.forward_stream)" in barrier, "where there is no event"
    runner = sources.unparsed(SRT + "model_executor/model_runner.py", "ModelRunner")
    assert f"self.{event}: " in runner


OVERLAY = adopt_version.PROJECT / "patches" / NAME / "overlay" / SRT / "speculative"


def constant(module: str, name: str) -> ast.expr:
    """Return the value of a constant of the overlay."""
    for node in ast.parse((OVERLAY / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                return node.value
    raise AssertionError(name)


BUFFERS = {
    "triton_backend.py": ("TritonAttnBackend", {"attn_logits", "attn_lse", "kv_indices"}),
    "flashinfer_backend.py": ("FlashInferAttnBackend", {"kv_indices", "custom_mask"}),
    "flashinfer_mla_backend.py": ("FlashInferMLAAttnBackend", {"kv_indices"}),
}


def test_an_attention_backend_makes_its_large_buffers_of_zeros_before_anything_is_captured(sources):
    names = set(ast.literal_eval(constant("aerie_dynamic_decode", "LARGE_BUFFERS")))
    has_masks = sources.version >= Version.parse("0.5.17")
    for file, (kind, expected) in BUFFERS.items():
        made = sources.find(SRT + "layers/attention/" + file, kind, "init_cuda_graph_state")
        assert isinstance(made, ast.FunctionDef)
        assert [one.arg for one in made.args.args][:3] == ["self", "max_bs", "max_num_tokens"]
        source = ast.unparse(made)
        of_zeros = set(re.findall(r"cuda_graph_(\w+) = torch\.zeros\(.*device=", source))
        assert expected <= of_zeros, file
        assert {f"cuda_graph_{name}" for name in expected} <= names
        if file.startswith("triton"):
            assert ("custom_mask" in of_zeros) is not has_masks
            assert ("self._verify_mask = maybe_create_verify_mask(" in source) is has_masks
    if has_masks:
        masks = SRT + "layers/attention/verify_mask.py"
        assert "buffer=torch.zeros(" in ast.unparse(sources.find(masks, "maybe_create_verify_mask"))
        assert "buffer" in fields(sources.find(masks, "VerifyMask"))
    init = calls(sources.find(RUNNER, "DecodeCudaGraphRunner", "__init__"))
    assert init.index("self.attn_backend.init_cuda_graph_state") < init.index("self.capture")
    assert "self.plan_stream, " in sources.unparsed(WORKER, "EAGLEWorkerV2", "__init__")


def test_tritons_replays_write_the_indices_that_they_read(sources):
    backend = SRT + "layers/attention/triton_backend.py"
    replayed = sources.unparsed(backend, "TritonAttnBackend", "_apply_cuda_graph_metadata")
    for function in ("_update_decode_kv_buffers", "_update_target_verify_buffers"):
        assert f"self.{function}(" in replayed
        written = sources.unparsed(backend, "TritonAttnBackend", function)
        assert "self.cuda_graph_kv_indices" in written


def test_ranks_have_to_be_given_the_tokens_that_are_sampled_without_a_grammar(sources):
    sampler = SRT + "layers/sampler.py"
    synced = sources.unparsed(sampler, "Sampler", "_sync_token_ids_across_tp")
    assert "if SYNC_TOKEN_IDS_ACROSS_TP or sampling_info.grammars:" in synced
    assert "torch.distributed.all_reduce" in synced
    assert "tp_group.broadcast(predict, src=0)" in sources.text(SRT + "speculative/eagle_utils.py")
    assert {"is_all_greedy", "grammars"} <= fields(sources.find(SAMPLING, "SamplingBatchInfo"))
    for function, value in (("broadcast", "input_"), ("broadcast_object", "obj")):
        taken = sources.parameters(
            SRT + "distributed/parallel_state.py",
            "GroupCoordinator",
            function,
        )
        assert taken == ["self", value, "src"]


def test_a_seed_is_looked_at_with_deterministic_inference_alone(sources):
    """So that nothing is left of it where that is refused."""
    made = sources.unparsed(SAMPLING, "SamplingBatchInfo", "from_schedule_batch")
    assert "non_blocking=True) if enable_deterministic else None" in made
    assert re.search(r"enable_deterministic = .*\.enable_deterministic_inference\n", made)


SINCE = {
    "dcp_size": "0.5.15",
    "enable_unified_memory": "0.5.15",
    "enable_flexkv": "0.5.16",
    "enable_unified_cache_external_linker": "0.5.20",
}
"""Arguments that not all releases have."""


def test_what_is_refused_is_an_argument_with_the_default_that_is_let_through(sources):
    refused = constant("aerie_dynamic_control", "REFUSED")
    assert isinstance(refused, ast.Tuple)
    expected = {}
    for row in refused.elts:
        assert isinstance(row, ast.Tuple)
        name, default = (ast.literal_eval(one) for one in row.elts[:2])
        if sources.version >= Version.parse(SINCE.get(name, "0.5.14")):
            expected[name] = default
    of_groups = re.compile(SRT + r"(server_args|arg_groups/fields/\w+)\.py")
    defaults = {}
    for file in filter(of_groups.fullmatch, sources.release.archive.namelist()):
        for node in ast.walk(ast.parse(sources.text(file))):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in expected:
                assert node.value is not None
                defaults[ast.unparse(node.target)] = ast.literal_eval(node.value)
    assert defaults == expected


def test_there_are_the_two_kinds_of_kv_pools_that_are_let_through(sources):
    for name in ast.literal_eval(constant("aerie_dynamic_decode", "POOLS")):
        sources.find(SRT + "mem_cache/memory_pool.py", name)


def test_a_draft_makes_k_and_v_of_its_embedding_and_the_targets_hidden_states_alone(sources):
    path = SRT + "models/llama_eagle3.py"
    layer = ast.unparse(sources.find(path, "LlamaDecoderLayer", "forward"))
    for line in ("self.hidden_norm(hidden_states)", "self.input_layernorm(embeds)", "torch.cat([embeds, hidden_states], dim=-1)"):
        assert line in layer
    model = ast.unparse(sources.find(path, "LlamaModel", "forward"))
    assert "hidden_states = self.fc(hidden_states)" in model
    assert "hidden_states.shape[-1] != embeds.shape[-1]" in model
    assert ("self.input_norm(hidden_states)" in model) is ("input_norm" in sources.text(path))
    attention = ast.unparse(sources.find(SRT + "models/llama.py", "LlamaAttention", "forward_prepare_native"))
    assert "qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)" in attention
    assert "self.rotary_emb(positions, q, k)" in attention


def test_slots_are_below_the_pools_size_and_a_page(sources):
    written = ast.unparse(sources.find(SRT + "mem_cache/memory_pool.py", "MHATokenToKVPool", "set_kv_buffer"))
    assert "maybe_detect_oob(loc, 0, self.size + self.page_size, 'set_kv_buffer (MHA)')" in written


def test_a_prefill_fills_the_draft_from_hidden_states_and_the_token_after_each_position(sources):
    names = ["self", "batch", "target_hidden_states", "next_token_ids", "mm_input_embeds"]
    assert sources.parameters(WORKER, "EagleDraftWorker", "_draft_extend_for_prefill")[:5] == names
    body = ast.unparse(sources.find(WORKER, "EagleDraftWorker", "_draft_extend_for_prefill"))
    assert "tail_tokens = _eagle_prefill_tail_tokens(batch, next_token_ids)" in body
    assert "torch.cat((input_ids[1:], tail_tokens[i].reshape(1)))" in body
    assert "hidden_states=target_hidden_states" in body


def test_a_plain_steps_token_is_counted_as_a_verifications_tokens_are(sources):
    path = SRT + "managers/scheduler_components/batch_result_processor.py"
    body = ast.unparse(sources.find(path, "SchedulerBatchResultProcessor", "_resolve_spec_v2_tokens"))
    claims = sources.version < Version.parse("0.5.15")
    assert "kv_committed_len += num_accept_tokens" in body
    assert ("kv_committed_len += num_accept_tokens - 1" in body) is claims
    assert ("kv_committed_len -= 1" in body) is claims
    assert ("req.kv.kv_committed_len" in body) is (sources.version >= Version.parse("0.5.19"))
    assert ("self.advance_grammar_fsm(result, batch)" in body) is ("def advance_grammar_fsm" in sources.text(path))
    if "advance_grammar_fsm" in body:
        assert "result.grammar_retained_tokens[i]" in body
    else:
        assert "self._accept_grammar_tokens(req, accept_tokens)" in body
    copies = ast.unparse(sources.find(RESULT, "GenerationBatchResult", "copy_to_cpu"))
    assert "if self.accept_lens is not None" in copies, "a plain step has none"


def allocation(sources: Sources) -> str:
    """Return the file that says how much is allocated ahead: one of its own from 0.5.16."""
    names = [f"{SRT}mem_cache/{name}" for name in ("allocation_sizing.py", "common.py")]
    return next(name for name in names if sources.release.read(name))


def test_what_is_allocated_ahead_is_no_more_than_what_a_plain_step_takes_for_granted(sources):
    path = allocation(sources)
    assert "return 2 * get_alloc_len_per_decode(" in ast.unparse(sources.find(path, "get_alloc_reserve_per_decode"))
    if sources.version < Version.parse("0.5.15"):
        return  # there each step is prepared by SGLang
    body = ast.unparse(sources.find(SRT + "speculative/eagle_utils.py", "eagle_prepare_for_decode"))
    for line in (
        "batch.maybe_evict_swa()",
        "penalizer_orchestrator.is_required",
        "r.decode_batch_idx += 1",
        "get_alloc_reserve_per_decode()",
    ):
        assert line in body
    assert "kv_committed_len" not in body.replace("r.kv_committed_len + double_alloc", ""), "nothing is counted there"


def declared(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields and methods, and of what its methods set or read of themselves."""
    names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    names |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"}


RUNNERS = [
    ("model_executor/model_runner.py", "ModelRunner"),
    ("model_executor/model_runner_kv_cache_mixin.py", "ModelRunnerKVCacheMixin"),  # up to 0.5.15
]
OWN = {
    "batch": [("managers/schedule_batch.py", "ScheduleBatch")],
    "req": [("managers/schedule_batch.py", "Req")],
    "draft_input": [("speculative/eagle_info.py", "EagleDraftInput"), ("speculative/spec_info.py", "SpecInput")],
    "future_map": [("managers/overlap_utils.py", "FutureMap")],
    "worker": [("speculative/eagle_worker_v2.py", "EAGLEWorkerV2")],
    "draft": [("speculative/eagle_worker_v2.py", "EagleDraftWorker"), *RUNNERS],
    "target": RUNNERS,
}
"""Whose attributes the overlay's variables are, by their names."""
LOOKED_UP = {("req", "kv"), ("future_map", "_publish_fresh"), ("batch", "capture_hidden_mode"), ("worker", "state")}
"""Those that are not everywhere, and are asked for first; the state is our own worker's."""


def test_what_is_read_of_sglangs_objects_is_there(sources):
    read = {
        (one.value.id, one.attr)
        for path in OVERLAY.glob("aerie_dynamic_*.py")
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id in OWN
    }
    assert len(read) > 40
    there = {
        name: set.union(*(declared(sources.find(SRT + path, kind)) for path, kind in classes if sources.release.read(SRT + path)))
        for name, classes in OWN.items()
    }
    assert {(name, attribute) for name, attribute in read - LOOKED_UP if attribute not in there[name]} == set()


def test_a_plain_steps_batch_is_given_back_and_kept_as_sglang_gives_back_and_keeps_it(sources):
    """PlainIsolation is SGLang's isolation, of the fields that a plain step changes alone."""
    if sources.version < Version.parse("0.5.15"):
        return
    scheduler = SRT + "managers/scheduler.py"
    isolation = ast.unparse(sources.find(scheduler, "Scheduler", "_forward_isolation"))
    kept, given_back = isolation.split("yield")
    for line in ("sched_sampling_info.copy_for_forward()", "if overlap:", "self.record_batch_in_overlap(batch)"):
        assert line in kept
    assert "setattr(batch, name, value)" in given_back
    assert "batch.sampling_info = sched_sampling_info" in given_back, "all that a forward without speculation changes"
    record = ast.unparse(sources.find(scheduler, "Scheduler", "record_batch_in_overlap"))
    assert "self.batch_record_ct = (self.batch_record_ct + 1) % 2" in record
    assert "self.batch_record_buf[self.batch_record_ct] = [batch, attr_snapshot]" in record
    assert "self.batch_record_buf = [None] * 2" in ast.unparse(sources.find(scheduler, "Scheduler"))

    changed = ast.literal_eval(constant("aerie_dynamic_decode", "CHANGED"))
    tree = ast.parse((OVERLAY / "aerie_dynamic_decode.py").read_text())
    (owner,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "DynamicDecode")
    (decode,) = (one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "decode")
    targets = {
        one.attr
        for one in ast.walk(decode)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "batch"
    }
    assert targets | {"sampling_info"} == set(changed)
    assert set(changed) <= declared(sources.find(SRT + "managers/schedule_batch.py", "ScheduleBatch"))


def test_a_requests_counts_are_where_they_are_looked_for(sources):
    """They moved beside the request one after the other; `holder` asks which is there."""
    schedule = ast.parse(sources.text(SRT + "managers/schedule_batch.py"))
    beside = {one.name: declared(one) for one in schedule.body if isinstance(one, ast.ClassDef)}.get("ReqKvInfo", set())
    request = declared(sources.find(SRT + "managers/schedule_batch.py", "Req"))
    for name, since in (("kv_allocated_len", "0.5.16"), ("kv_committed_len", "0.5.19")):
        assert (name in beside) is (sources.version >= Version.parse(since))
        assert name in beside or name in request
    assert ("kv" in request) is bool(beside)


def test_a_prepared_prompt_owns_its_positions_and_gives_back_what_it_owns_beyond(sources):
    prepared = sources.find(SRT + "managers/schedule_batch.py", "ScheduleBatch", "prepare_for_extend")
    assert not any(isinstance(one, ast.Return) for one in ast.walk(prepared)), "what is hooked in at its end is always reached"
    body = ast.unparse(prepared)
    assert "alloc_for_extend(self)" in body
    for name in ("chunked_req", "enable_overlap", "seq_lens_cpu", "token_to_kv_pool_allocator"):
        assert f"    {name}: " in ast.unparse(sources.find(SRT + "managers/schedule_batch.py", "ScheduleBatch"))
    allocation = next(
        SRT + "mem_cache/" + name for name in ("allocation.py", "common.py") if sources.release.read(SRT + "mem_cache/" + name)
    )
    owned = body + ast.unparse(sources.find(allocation, "alloc_for_extend"))
    assert "kv_allocated_len = seq_len" in owned
    assert "kv_committed_len = seq_len" in owned
    released = ast.unparse(sources.find(SRT + "mem_cache/common.py", "release_kv_cache"))
    assert "overalloc" in released


def test_a_prefix_cache_says_what_it_can_give_up_and_gives_it_up_when_asked(sources):
    base = sources.find(SRT + "mem_cache/base_prefix_cache.py", "BasePrefixCache", "evictable_size")
    assert "return 0" in ast.unparse(base), "one that holds nothing"
    assert "return self.evictable_size_" in ast.unparse(sources.find(SRT + "mem_cache/radix_cache.py", "RadixCache", "evictable_size"))
    assert sources.parameters(SRT + "mem_cache/common.py", "evict_from_tree_cache") == ["tree_cache", "num_tokens"]
    checked = ast.unparse(sources.find(SRT + "managers/schedule_batch.py", "ScheduleBatch", "check_decode_mem"))
    assert "self.tree_cache" in checked
    assert "num_tokens" in checked


def test_the_prefix_cache_never_takes_a_requests_last_position(sources):
    """Its draft K and V are made of the token after it, too: with EAGLE keys are pairs of tokens, one fewer than tokens."""
    builder = SRT + "mem_cache/kv_cache_builder.py"
    where = builder if sources.release.read(builder) is not None else SRT + "managers/scheduler.py"
    assert "is_eagle=spec_algorithm.is_eagle()" in sources.text(where).replace("self.spec_algorithm", "spec_algorithm")
    for path in (SRT + "mem_cache/radix_cache.py", SRT + "mem_cache/unified_radix_cache.py"):
        if sources.release.read(path) is None:
            continue
        made = [
            one for one in ast.walk(ast.parse(sources.text(path))) if isinstance(one, ast.Call) and anchors.dotted(one.func) == "RadixKey"
        ]
        stored = [one for one in made if one.args and ast.unparse(one.args[0]) == "token_ids"]
        assert all(any(word.arg == "is_bigram" for word in one.keywords) for one in stored)
    length = ast.unparse(sources.find(SRT + "mem_cache/radix_cache.py", "RadixKey", "__len__"))
    assert "self.is_bigram" in length
    assert "- 1" in length


def test_a_plain_step_is_decided_before_anything_is_drafted(sources):
    hooks = [hook for hook in SET.hooks_for(sources.version) if hook.file == WORKER]
    derived, problems = anchors.derive(sources.text(WORKER).encode(), hooks, WORKER)
    assert problems == []
    assert derived is not None
    worker = next(one for one in ast.parse(derived.data).body if isinstance(one, ast.ClassDef) and one.name == "EAGLEWorkerV2")
    step = next(one for one in worker.body if isinstance(one, ast.FunctionDef) and one.name == "forward_batch_generation")
    (split,) = [one for one in step.body if isinstance(one, ast.If)]
    assert ast.unparse(split.body[0]) == "aerie_dynamic_decode.prefill(batch)"
    arguments = "batch, on_publish" + (", grammar_barrier" if sources.version >= Version.parse("0.5.17") else "")
    assert ast.unparse(split.orelse[0]) == f"aerie_result = aerie_dynamic_decode.step({arguments})"
    assert ast.unparse(split.orelse[1]) == "if aerie_result is not None:\n    return aerie_result"


def test_the_depth_is_looked_up_by_batch_size_at_each_step_that_speculates_and_slots_are_for_the_deepest(sources):
    controller = SRT + "speculative/adaptive_runtime_state.py"
    parameters = SRT + "speculative/adaptive_spec_params.py"
    assert "return self.params.candidate_steps" in sources.unparsed(controller, "AdaptiveController", "candidate_steps")
    activate = sources.unparsed(controller, "AdaptiveController", "activate_step_by_batch")
    assert "target = self.params.get_steps_for_batch(batch_size)" in activate
    assert "self._activate(target)" in activate
    worker = sources.unparsed(WORKER, "EAGLEWorkerV2", "forward_batch_generation")
    assert worker.index("self.activate_step_by_batch(") < worker.index("self.draft_worker.draft(")
    begin = sources.unparsed(WORKER, "EAGLEWorkerV2", "init_cuda_graphs")
    assert "self.adaptive_controller.init_states(" in begin
    assert sources.parameters(parameters, "resolve_candidate_steps_from_config") == ["cfg_path"]
    length = sources.unparsed(allocation(sources), "get_alloc_len_per_decode")
    assert "max_speculative_num_draft_tokens" in length, "slots of the deepest, whichever the depth is"


@pytest.mark.parametrize("version", ["0.5.9", "0.5.13.post1"])
def test_releases_from_before_are_refused_with_the_reason_written_down(version, tmp_path):
    site = tmp_path / "site-packages"
    (site / "sglang").mkdir(parents=True)
    tree = SourceTree.open(site, "sglang", version)
    with pytest.raises(AerieError, match=rf"{NAME} is for >=0.5.14, not for {version}"):
        patch_plan.plan(tree, PatchStore.beside(tree, tmp_path / "store"), [SET])
    assert "Not for SGLang before 0.5.14" in SET.why
