"""What a plain step shares with verifications and between ranks, on SGLang's own classes.

Runs in a release's Python. It prints how many bytes of buffers were lent and how many kinds of KV
pool were refused, and fails where something is not as it should be.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention import verify_mask
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache import hisparse_memory_pool as hisparse
from sglang.srt.mem_cache import memory_pool, page_interleave_pool, unified_draft_pool
from sglang.srt.mem_cache import unified_memory_pool as unified
from sglang.srt.speculative import aerie_dynamic_decode
from sglang.srt.speculative.aerie_dynamic_decode import LARGE_BUFFERS, READ_DONE, DynamicDecode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

CONTEXT, HEADS, SPLITS, HEAD_SIZE = 16_384, 32, 256, 8
PLAIN, VERIFIED = 32, 4 * 32  # tokens


def new_backend() -> TritonAttnBackend:
    """Return a target's backend without its buffers, which a runner has it make."""
    made = TritonAttnBackend.__new__(TritonAttnBackend)
    sizes = {"num_head": HEADS, "max_kv_splits": SPLITS, "v_head_dim": HEAD_SIZE}
    sizes |= {"max_context_len": CONTEXT, "num_draft_tokens": 4}
    sizes |= {"lean_total_programs": 8, "lean_block_m": 16}
    window = {"swa_v_head_dim": None, "sliding_window_size": None}
    flags = {"use_sliding_window_kv_pool": False, "skip_prefill": False, "is_draft_runner": False}
    vars(made).update(sizes | window | flags, device="cpu", dllm_attention=None)
    return made


def buffers_of(backend: TritonAttnBackend) -> dict[str, torch.Tensor]:
    values = {name: getattr(backend, name) for name in LARGE_BUFFERS if hasattr(backend, name)}
    return {name: getattr(value, "buffer", value) for name, value in values.items()}


def captured(used: Any, own: Any, plan_stream: Any = None) -> None:
    """Have a worker whose verification has ``used`` capture plain decode with ``own``."""

    class Runner:
        capture_bs = (PLAIN,)

        def __init__(self, _target: Any, attention: Any) -> None:
            attention.init_cuda_graph_state(PLAIN, PLAIN)
            self.buffers = buffers_of(attention)

    made = DynamicDecode.__new__(DynamicDecode)
    made.control = SimpleNamespace(rank=0, policy=SimpleNamespace(settings=SimpleNamespace(low=8)))
    made.worker = SimpleNamespace(plan_stream=plan_stream)
    made.target = SimpleNamespace(device="cpu", gpu_id=0, init_new_workspace=False)
    made.target.spec_algorithm, made.target.attn_backend = SpeculativeAlgorithm.EAGLE3, used
    made.target._get_attention_backend = lambda: own
    aerie_dynamic_decode._plain_runner_class = lambda: Runner  # type: ignore[assignment]
    attention, runner = made.capture()
    assert attention is own and made.target.attn_backend is used
    for name, buffer in buffers_of(own).items():
        assert same_memory(buffer, runner.buffers[name]), "what is captured is what stays"


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr()


def check_buffers() -> int:
    # as on a GPU
    verify_mask.default_tree_mask_mode = lambda: verify_mask.TreeMaskMode.FULL_MASK
    used, alone, lent = new_backend(), new_backend(), new_backend()
    used.init_cuda_graph_state(VERIFIED // 4, VERIFIED)
    alone.init_cuda_graph_state(PLAIN, PLAIN)
    for buffer in buffers_of(used).values():
        buffer.fill_(3)
    captured(used, lent)
    assert len(buffers_of(lent)) == 4, "logits, their sums, indices and a mask"
    for name, buffer in buffers_of(lent).items():
        assert same_memory(buffer, buffers_of(used)[name]), name
        like = buffers_of(alone)[name]
        assert (buffer.shape, buffer.dtype) == (like.shape, like.dtype), name
        assert buffer.stride() == like.stride(), name
    for name in ("cuda_graph_lean_locks", "cuda_graph_uneven_batch", "cuda_graph_num_kv_splits"):
        assert torch.equal(getattr(lent, name), getattr(alone, name)), f"{name} has to be new"

    small, kept = new_backend(), new_backend()
    small.init_cuda_graph_state(PLAIN // 4, PLAIN // 2)
    for used_there, plan_stream in ((small, None), (used, "a stream"), (SimpleNamespace(), None)):
        captured(used_there, kept, plan_stream)
        assert not any(buffer.any() for buffer in buffers_of(kept).values()), "its own"
    other_type, kept = new_backend(), new_backend()
    other_type.init_cuda_graph_state(VERIFIED // 4, VERIFIED)
    other_type.cuda_graph_kv_indices = other_type.cuda_graph_kv_indices.to(torch.int32)
    captured(other_type, kept)
    assert kept.cuda_graph_kv_indices.dtype == torch.int64
    assert not same_memory(kept.cuda_graph_kv_indices, other_type.cuda_graph_kv_indices)

    hybrid, kept = SimpleNamespace(decode_backend=used, prefill_backend=used), new_backend()
    captured(hybrid, kept)
    assert same_memory(kept.cuda_graph_attn_logits, used.cuda_graph_attn_logits)
    places = {buffer.data_ptr() for buffer in buffers_of(kept).values()}
    assert len(places) == 4, "each buffer is lent once"
    assert len(aerie_dynamic_decode.large_buffers(hybrid)) == 4
    indices, kept = [torch.full((1 << 19,), 3.0) for _ in range(2)], new_backend()
    flashinfer = SimpleNamespace(cuda_graph_kv_indices=indices, decode_backend="fa2")
    captured(flashinfer, kept)
    assert same_memory(kept.cuda_graph_attn_lse, indices[0])
    assert not kept.cuda_graph_lean_Mp.any(), "what is small may have to be zero"
    return sum(buffer.nbytes for buffer in buffers_of(lent).values())


def check_pools() -> int:
    """Pools other than the two are refused, those too that are derived from them."""
    modules = (memory_pool, page_interleave_pool, unified, unified_draft_pool, hisparse)
    bases = (memory_pool.MHATokenToKVPool, memory_pool.MLATokenToKVPool)
    values = [value for module in modules for value in vars(module).values()]
    kinds = {kind for kind in values if isinstance(kind, type) and issubclass(kind, bases)}
    draft_kind = type("LlamaForCausalLMEagle3", (), {"model": SimpleNamespace(layers=[0])})

    def problems(target_pool: type, draft_pool: type) -> list[str]:
        target = SimpleNamespace(req_to_token_pool=None)
        target.token_to_kv_pool = target_pool.__new__(target_pool)
        draft = SimpleNamespace(token_to_kv_pool=draft_pool.__new__(draft_pool), model=draft_kind())
        worker = type("EAGLEWorkerV2", (), {})()
        worker.topk, worker.server_args = 1, SimpleNamespace()
        worker.target_worker = SimpleNamespace(model_runner=target)
        worker.draft_worker = SimpleNamespace(draft_runner=draft)
        return list(aerie_dynamic_decode.problems(worker))

    aerie_dynamic_decode.aerie_dynamic_control.resolved = lambda args: args
    for kind in bases:
        assert problems(kind, bases[0]) == []
    refused = kinds - set(bases)
    names = {kind.__name__ for kind in refused}
    parts = ("FP4", "MXFP8", "DSA", "HiSparse", "PageMajor", "PageInterleave", "Unified", "NoOp")
    for part in parts:
        assert any(part in name for name in names), f"{part} in {sorted(names)}"
    for kind in refused:
        (message,) = problems(kind, bases[0])
        assert f"the target's KV pool {kind.__name__}: use a model and arguments" in message
        (message,) = problems(bases[0], kind)
        assert f"the draft's KV pool {kind.__name__}" in message
    return len(refused)


def check_ranks() -> None:
    """Ranks have the tokens of rank 0 wherever they may have sampled others."""
    import sglang.srt.distributed as distributed

    class Group:
        def broadcast(self, tokens: torch.Tensor, source: int) -> None:
            assert source == 0
            tokens.copy_(torch.tensor([7, 8]))

    distributed.get_tp_group = Group
    for ranks, greedy, grammars, expected in (
        (2, False, None, [7, 8]),
        (2, True, None, [1, 2]),
        (2, False, ["its sampler did"], [1, 2]),
        (1, False, None, [1, 2]),
    ):
        made, ids = DynamicDecode.__new__(DynamicDecode), torch.tensor([1, 2], dtype=torch.int32)
        made.control = SimpleNamespace(ranks=ranks)
        made.agree_on(ids, SimpleNamespace(is_all_greedy=greedy, grammars=grammars))
        assert ids.tolist() == expected, (ranks, greedy, grammars)


def check_read_done_of(name: str, is_graph: bool) -> None:
    target = SimpleNamespace(attn_backend="verify's", decode_cuda_graph_runner="verify's")
    draft = SimpleNamespace(**{name: "an older one"})
    setattr(target, name, "a verification's")

    def forward(_batch: Any) -> str:
        assert getattr(target, name) is None
        if is_graph:
            setattr(target, name, "this step's")
        return "output"

    target.forward = forward
    made = DynamicDecode.__new__(DynamicDecode)
    made.target, made.attention = target, "plain"
    made.worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runner=draft))
    made.runner = SimpleNamespace(can_run_graph=lambda _batch: is_graph)
    assert made.forward(None) == ("output", is_graph)
    made.hand_over_read_done()
    assert getattr(draft, name) == ("this step's" if is_graph else None)
    assert getattr(target, name) is None


def check_read_done() -> None:
    """A step without a graph hands over no event: what a verification left is not of this step."""
    for name in READ_DONE:
        for is_graph in (False, True):
            check_read_done_of(name, is_graph)


def check_copied_prompts() -> None:
    """With a hierarchical cache, which copies K and V soon, the draft runs for prompts."""
    for is_copied in (False, True):
        made = DynamicDecode.__new__(DynamicDecode)
        made.catch_up, made.is_relay_made, made.is_copied = "exact", True, is_copied
        made.running, made.verify_sizes = 3, []
        made.control = SimpleNamespace(policy=SimpleNamespace(expects_plain=lambda size: True))
        rows = torch.tensor([1, 2])
        batch = SimpleNamespace(enable_overlap=True, req_pool_indices_cpu=rows)
        batch.forward_mode = SimpleNamespace(name="EXTEND")
        assert made.is_fill(batch, torch.zeros(1), None) is not is_copied


def main() -> None:
    lent, refused = check_buffers(), check_pools()
    check_ranks()
    check_read_done()
    check_copied_prompts()
    print(f"{lent} bytes lent, {refused} kinds of KV pool refused")


if __name__ == "__main__":
    main()
