"""Decode steps without speculation inside EAGLEWorkerV2, that leave the draft as good as if it had speculated all the time.

Hooks in the worker and in the overlap scheduler's relay call the module's functions, which do nothing until :func:`start` made a
:class:`DynamicDecode`, as it does when the server argument is given.

A plain step is the target's DECODE: decode attention, CUDA graphs of its own, one token for each row. A draft of one layer needs no more
than its K and V to go on later, and those of a position are a function of the token after it and of the target's hidden states there. So
a plain step leaves both in a backlog (``aerie_dynamic_draft``), and from time to time the K and V of all that waits are written at once.
When the draft runs again, :meth:`DynamicDecode.resume` gives it each row's last position, which is what it drafts from.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative import aerie_dynamic_control
from sglang.srt.speculative.aerie_dynamic_control import ALLOCATED, COMMITTED, holder
from sglang.srt.speculative.aerie_dynamic_draft import FLUSH_AT, Backlog, Prompts, Step, Writer
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

CATCH_UP = "AERIE_DYNAMIC_CATCHUP"
CATCH_UPS = ("exact", "extend", "none")
"""What is done for the draft: all of it; only the position it drafts from, when it returns; nothing. The last two are for comparison."""
CAPTURE = "AERIE_DYNAMIC_CAPTURE"
DRAFT = "LlamaForCausalLMEagle3"
POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Not what is derived from them: other layouts, quantized, virtual or sparse."""
UNKNOWN = -(1 << 40)
"""A length that the host does not know: with one of these, a sum of lengths is negative."""
GIVES_UP = 0.25
"""The share of what the prefix cache holds for nobody that it may give up at once, so that steps need not ask it one by one."""
SPARE = 2
"""Slots of a request that a step after a step leaves for those after prefills."""
BACKEND_NAMES = ("prefill_attention_backend_str", "decode_attention_backend_str")
CHANGED = ("input_ids", "out_cache_loc", "seq_lens", "seq_lens_cpu", "seq_lens_sum", "spec_info", "forward_mode", "sampling_info")
"""What a plain step changes in its batch."""
LARGE_BUFFERS = (
    "cuda_graph_attn_logits",
    "cuda_graph_attn_lse",
    "cuda_graph_kv_indices",
    "cuda_graph_custom_mask",
    "_verify_mask",  # triton's mask from 0.5.17
)
"""Of attention backends: each replay writes them before it reads them."""
LENT_FROM = 1 << 20
"""Bytes from which a buffer is lent. Smaller ones would save nothing, and may have to be zero."""
READ_DONE = ("shared_read_done_event", "war_fastpath_read_done_event")  # from 0.5.18, and up to 0.5.17

live: DynamicDecode | None = None


# For hooks


def start(worker: Any) -> None:
    """The worker's graphs were captured: get ready, if the server argument asks for it."""
    global live
    control = aerie_dynamic_control.start(worker)
    if control is None:
        return
    found = list(problems(worker))
    if found:
        raise ValueError("\n".join(found))
    live = DynamicDecode(worker, control)


def prompts_prepared(batch: Any) -> None:
    if live is not None:
        live.reserve(batch)


def prefill(batch: Any) -> None:
    if live is not None:
        live.prefill(batch)


def fill(batch: Any, hidden: Any, next_ids: Any, embeddings: Any) -> Any:
    """Return what a prefill gives the draft, filled without running it, or None where it has to run."""
    return None if live is None else live.fill(batch, hidden, next_ids, embeddings)


def decode_fits(batch: Any, selected: Any) -> bool:
    """Say at once that there is memory for a decode step, where there is plenty. Else SGLang counts what each request needs."""
    return live is not None and selected is None and live.decode_fits(batch)


def is_prepared(batch: Any) -> bool:
    """Decide whether the step to be prepared is plain, and say whether its requests own the slots that it needs."""
    return live is not None and live.prepare(batch)


def isolated(scheduler: Any, batch: Any, is_overlapped: bool) -> Any:
    """Return what gives a plain step's batch back as it was, or None where another step wants all of it kept."""
    if live is None or not is_overlapped or not live.takes(batch):
        return None
    if (found := profiler()) is not None:
        found.skip()
    return PlainIsolation(scheduler, batch)


def step(batch: Any, on_publish: Callable[[Any], None] | None, grammar_barrier: Callable[[], None] | None = None) -> Any:
    """Return the result of a plain step, or None where this one speculates."""
    return None if live is None else live.step(batch, on_publish, grammar_barrier)


def before_draft(batch: Any) -> None:
    if live is not None:
        live.before_draft(batch)


def lengths_are_known(future_map: Any, batch: Any) -> bool:
    return live is not None and live.resolve_lengths(future_map, batch)


def takes_tokens_alone(future_map: Any, batch: Any) -> bool:
    """Give a plain step the tokens of the step before, and not what the draft goes on from."""
    draft_input = batch.spec_info
    if live is None or not live.is_next_plain or draft_input is None or not batch.forward_mode.is_decode():
        return False
    rows, module = draft_input.future_indices, sys.modules[type(future_map).__module__]
    draft_input.bonus_tokens = future_map.output_tokens_buf[rows]
    if module._DEBUG_ASSERT:
        module._assert_nonneg_and_invalidate(draft_input.bonus_tokens, future_map.output_tokens_buf, rows)
    return True


def relays_tokens_alone(future_map: Any, rows: Any, payload: Any) -> bool:
    """Relay a plain step's tokens: what the draft goes on from stays as it was, and need not be written again."""
    if live is None or not len(rows):
        return False
    if getattr(payload, "topk_p", payload) is not None:
        live.is_relay_made = True  # with the first of these the relay makes its buffers
        return False
    future_map.output_tokens_buf[rows] = payload.bonus_tokens.to(future_map.output_tokens_buf.dtype)
    return True


# What it is for


def problems(worker: Any) -> Iterator[str]:
    """Yield why the loaded models can't be served this way, with the cure. Arguments alone were refused before anything was loaded."""
    flag = aerie_dynamic_control.FLAG
    without = f"leave out {flag}"
    if type(worker).__name__ != "EAGLEWorkerV2":
        yield f"{flag} is for EAGLEWorkerV2 (is {type(worker).__name__}): use --speculative-algorithm EAGLE3, or {without}"
        return
    if worker.topk != 1:
        yield f"{flag} is for chains of drafted tokens: set --speculative-eagle-topk 1 (is {worker.topk}), or {without}"
    if getattr(aerie_dynamic_control.resolved(worker.server_args), "speculative_use_rejection_sampling", False):
        yield f"{flag} was not tried with rejection sampling: leave out --speculative-use-rejection-sampling, or {without}"
    draft = worker.draft_worker.draft_runner
    names = [one.__name__ for one in type(draft.model).__mro__]
    if DRAFT not in names:
        yield (
            f"{flag}: K and V of the draft {names[0]} can't be written without running it, as far as is known: "
            f"use an EAGLE-3 draft ({DRAFT}), or {without}"
        )
    else:
        layers = len(draft.model.model.layers)
        if layers != 1:
            yield f"{flag} is for drafts of one layer, whose K and V need no attention (has {layers}): use such a draft, or {without}"
        if getattr(draft.model.model, "is_mrope_enabled", False):
            yield f"{flag} was not tried with a draft that has mRoPE: use a text model, or {without}"
    target = worker.target_worker.model_runner
    for which, pool in (("target", target.token_to_kv_pool), ("draft", draft.token_to_kv_pool)):
        if type(pool).__name__ not in POOLS:
            yield (
                f"{flag} was not tried with the {which}'s KV pool {type(pool).__name__}: "
                f"use a model and arguments (such as --kv-cache-dtype) that give "
                f"{' or '.join(POOLS)}, or {without}"
            )
    if any(one.__name__ == "HybridReqToTokenPool" for one in type(target.req_to_token_pool).__mro__):
        yield f"{flag} was not tried with a target that keeps states besides its KV cache: use another target, or {without}"
    if catch_up() not in CATCH_UPS:
        yield f"{CATCH_UP} must be one of {', '.join(CATCH_UPS)} (is {catch_up()}): correct it, or leave it out"


def catch_up() -> str:
    return os.environ.get(CATCH_UP) or CATCH_UPS[0]


def candidate_steps(worker: Any) -> list[int]:
    """Return the depths that SGLang's adaptive speculation has graphs and buffers for; empty where it is off."""
    controller = getattr(worker, "adaptive_controller", None)
    return [] if controller is None else sorted(controller.candidate_steps)


# Differences between versions, looked up


@functools.cache
def _result_fields() -> frozenset[str]:
    from sglang.srt.managers.utils import GenerationBatchResult

    return frozenset(field.name for field in dataclasses.fields(GenerationBatchResult))


def new_result(**values: Any) -> Any:
    """Return a result with those of ``values`` that it has in this version: up to 0.5.18 there is no accept_index."""
    from sglang.srt.managers.utils import GenerationBatchResult

    return GenerationBatchResult(**{name: value for name, value in values.items() if name in _result_fields()})


@functools.cache
def _forward_batch_options() -> dict[str, Any]:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    options = {"capture_hidden_mode": CaptureHiddenMode.FULL, "return_hidden_states_before_norm": False}
    return {name: value for name, value in options.items() if name in inspect.signature(ForwardBatch.init_new).parameters}


def new_forward_batch(batch: Any, runner: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    options = _forward_batch_options()
    if options:
        return ForwardBatch.init_new(batch, runner, **options)
    before, batch.capture_hidden_mode = batch.capture_hidden_mode, CaptureHiddenMode.FULL  # up to 0.5.15 it is a field of the batch
    try:
        return ForwardBatch.init_new(batch, runner)
    finally:
        batch.capture_hidden_mode = before


def decode_graphs_are_on(runner: Any) -> bool:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    return str(runner.device) != "cpu" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def profiler() -> Any:
    """Return the phase profiler, where its patch set is there too. A plain step is no cycle of its."""
    return sys.modules.get("sglang.srt.speculative.aerie_phase_profiler")


class PlainIsolation:
    """What SGLang's ``_forward_isolation`` does, for a step that changes few of a batch's hundred fields.

    It goes through all of them twice, while a GPU may have nothing to do: to give them back, and so that their memory outlives the forward.
    """

    def __init__(self, scheduler: Any, batch: Any) -> None:
        self.scheduler, self.batch = scheduler, batch

    def __enter__(self) -> None:
        batch = self.batch
        self.before = [getattr(batch, name) for name in CHANGED]
        if batch.sampling_info is not None:
            batch.sampling_info = batch.sampling_info.copy_for_forward()
        scheduler = self.scheduler
        kept = scheduler.batch_record_buf
        scheduler.batch_record_ct = place = (scheduler.batch_record_ct + 1) % len(kept)
        kept[place] = [batch, [*vars(batch).values()]]

    def __exit__(self, *_: Any) -> None:
        for name, value in zip(CHANGED, self.before, strict=True):
            setattr(self.batch, name, value)


class Lent(TorchFunctionMode):
    """Inside, ``torch.zeros`` gives the front of a buffer that exists, where one fits.

    Each is lent once, as it is: what is in it is not zero.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self.buffers, self.bytes = buffers, 0

    def __torch_function__(self, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        kwargs = named or {}
        if function is torch.zeros and "device" in kwargs:
            like = function(*args, **{**kwargs, "device": "meta"})
            device = torch.device(kwargs["device"])
            for index, buffer in enumerate(self.buffers):
                is_same_device = buffer.device.type == device.type and device.index in (None, buffer.device.index)
                is_alike = is_same_device and buffer.dtype == like.dtype
                if is_alike and LENT_FROM <= like.nbytes <= buffer.nbytes:
                    del self.buffers[index]
                    self.bytes += like.nbytes
                    return buffer.view(-1)[: like.numel()].view(like.shape)
        return function(*args, **kwargs)


def large_buffers(attention: Any) -> list[torch.Tensor]:
    """Return the large buffers of an attention backend, and of the two that a hybrid one has."""
    parts = [getattr(attention, name, None) for name in ("decode_backend", "prefill_backend")]
    buffers: dict[int, torch.Tensor] = {}
    for part in [attention, *parts]:
        for name in LARGE_BUFFERS:
            value = getattr(part, name, None)
            value = getattr(value, "buffer", value)  # a mask's
            # FlashInfer has a list, of one for each of its wrappers.
            for buffer in value if isinstance(value, list) else [value]:
                if isinstance(buffer, torch.Tensor) and buffer.is_contiguous():
                    buffers[buffer.data_ptr()] = buffer
    return list(buffers.values())


# The worker's part


class DynamicDecode:
    """What a worker needs to decode plainly in between. Rows are those of the request pool; row 0 and slot 0 are padding."""

    def __init__(self, worker: Any, control: aerie_dynamic_control.Control) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        self.decode_mode, self.new_draft_input = ForwardMode.DECODE, EagleDraftInput
        self.worker = worker
        self.control = control
        self.target = worker.target_worker.model_runner
        self.table = self.target.req_to_token_pool.req_to_token
        self.catch_up = catch_up()
        rows, device = self.table.shape[0], self.table.device
        # A hierarchical cache copies K and V once a result was read: nothing may wait then.
        args = aerie_dynamic_control.resolved(worker.server_args)
        self.is_copied = bool(getattr(args, "enable_hierarchical_cache", False))
        self.backlog = Backlog(
            Writer(worker.draft_worker.draft_runner),
            rows,
            device,
            writes=self.catch_up == "exact",
            keeps=self.catch_up != "none",
            flush_at=1 if self.is_copied else FLUSH_AT,
        )
        self.ones = torch.ones(rows, dtype=torch.int32, device=device)
        self.places = torch.arange(rows, dtype=torch.int32, device=device).unsqueeze(1)
        # On the host: which rows were decoded plainly since they were drafted for, and how long they are, where that is known. A step's
        # own code is cold each time, so that a first call into NumPy takes tens of microseconds: sets, and torch, which runs anyway.
        self.stale: set[int] = set()
        self.filled: list[torch.Tensor] = []
        self.lengths = torch.full((rows,), UNKNOWN, dtype=torch.int64)
        self.is_any_known = False
        self.known = self.pulled = self.resumes = self.resumed_rows = self.fills = self.spared = self.reserved = 0
        depths = candidate_steps(worker)
        control.has_depths(depths)
        # A step may follow one of another depth, so that what is taken for granted is the deepest one's.
        self.width = max([worker.speculative_num_draft_tokens, *(steps + 1 for steps in depths)])
        deepest = max([worker.speculative_num_steps, *depths])
        self.most_ahead = 4 * (self.width + deepest)  # slots; no less than what SGLang allocates ahead for a request
        self.first_slots = torch.arange(2 * self.width, device=device)
        self.next_positions: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.is_next_plain: bool | None = None  # of the step that was prepared and not made yet
        self.was_plain = self.was_prefill = False
        self.running = 0
        self.is_relay_made = False
        verify = self.target.decode_cuda_graph_runner
        self.verify_sizes = list(getattr(verify, "capture_bs", ()) or ())
        self.attention: Any = None
        self.runner: Any = None
        if decode_graphs_are_on(self.target):
            self.attention, self.runner = self.capture()

    # Graphs

    def capture(self) -> tuple[Any, Any]:
        """Return an attention backend and a runner with decode graphs, beside those of the verification, whose buffers graphs hold."""
        from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from sglang.srt.utils.common import get_available_gpu_memory

        target = self.target
        began, memory = time.perf_counter(), get_available_gpu_memory(target.device, target.gpu_id)
        workspace, algorithm, used = target.init_new_workspace, target.spec_algorithm, target.attn_backend
        sizes = module.get_batch_sizes_to_capture
        least = 1 if os.environ.get(CAPTURE) == "all" else self.control.policy.settings.low + 1

        def sizes_above(*args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
            captured, compiled = sizes(*args, **kwargs)
            kept = [size for size in captured if size >= least] or captured[-1:]
            return kept, [size for size in compiled if size in kept]

        # With a plan stream a verification may be prepared while another step is computed.
        lent = Lent([] if self.worker.plan_stream else large_buffers(used))

        def borrow(*args: Any, **kwargs: Any) -> None:
            with lent:
                make_buffers(*args, **kwargs)

        try:
            # Both backends run on one stream, one after the other: they may share scratch memory, as the target's and the draft's do.
            attention = target._get_attention_backend()
            make_buffers, attention.init_cuda_graph_state = attention.init_cuda_graph_state, borrow
            for name in BACKEND_NAMES:  # set beside it where the target's own is made, for models to ask for
                if hasattr(used, name):
                    setattr(attention, name, getattr(used, name))
            # The runner takes its mode and its width from the algorithm.
            target.spec_algorithm, target.attn_backend = SpeculativeAlgorithm.NONE, attention
            module.get_batch_sizes_to_capture = sizes_above
            runner = _plain_runner_class()(target, attention)
        finally:
            module.get_batch_sizes_to_capture = sizes
            target.init_new_workspace, target.spec_algorithm, target.attn_backend = workspace, algorithm, used
        if self.control.rank == 0:
            left = get_available_gpu_memory(target.device, target.gpu_id)
            logger.info(
                "Dynamic speculation: captured plain decode for batches of %s in %.1f s, "
                "with %.2f GB, and %.2f GB that verifications have (%.2f GB left)",
                runner.capture_bs,
                time.perf_counter() - began,
                memory - left,
                lent.bytes / (1 << 30),
                left,
            )
        return attention, runner

    # Steps

    def reserve(self, batch: Any) -> None:
        """Give prompts the slots of their first plain steps, before they are computed.

        After a prefill the host is late, and each request that lacks slots would have the next step allocate for all of them, while the
        GPU has nothing to do. Where this is left out, that happens.
        """
        allocator, lengths, count = batch.token_to_kv_pool_allocator, batch.seq_lens_cpu, len(self.first_slots)
        is_ours = batch.enable_overlap and batch.forward_mode.name == "EXTEND" and batch.chunked_req is None and lengths is not None
        if not is_ours or allocator.page_size != 1:
            return
        size = len(batch.reqs)
        running = self.running + size
        if not self.control.policy.expects_plain(self.padded(running)) or not self.has_room(batch, running):
            return
        owners = [holder(req, ALLOCATED) for req in batch.reqs]
        if [one.kv_allocated_len for one in owners] != lengths.tolist():
            return  # they own more than what is computed, such as a session's
        slots = allocator.alloc(size * count)
        if slots is None:
            return
        places = batch.seq_lens.unsqueeze(1) + self.first_slots
        self.table[batch.req_pool_indices.unsqueeze(1), places] = slots.view(size, count).to(self.table.dtype)
        for one in owners:
            one.kv_allocated_len += count
        self.reserved += size

    def prefill(self, batch: Any) -> None:
        """Rows are given to requests anew, or go on being filled: their lengths are known."""
        self.was_prefill = True
        if batch.req_pool_indices_cpu is None:
            return
        self.lengths[batch.req_pool_indices_cpu] = UNKNOWN if batch.seq_lens_cpu is None else batch.seq_lens_cpu.to(torch.int64)
        self.is_any_known = True

    def owe_nothing(self, batch: Any, rows: list[int]) -> None:
        self.backlog.slots.index_fill_(0, batch.req_pool_indices, 0)
        self.stale.difference_update(rows)

    def fill(self, batch: Any, hidden: Any, next_ids: torch.Tensor, embeddings: Any) -> Any:
        """Take prompts into the backlog, where the next step is a plain one: the draft need not run for them.

        The token after each position is known, the sampled one too. What the draft would go on from is not computed: like after a plain
        step, the draft runs over the last position should it return.
        """
        if not self.is_fill(batch, hidden, embeddings):
            self.backlog.flush()
            self.note_filled()
            if self.stale and batch.req_pool_indices_cpu is not None:
                rows_before = batch.req_pool_indices_cpu.tolist()
                if not self.stale.isdisjoint(rows_before):
                    self.owe_nothing(batch, rows_before)  # of the requests that had these rows before
            return None
        rows = batch.req_pool_indices_cpu
        tails = next_ids if batch.chunked_req is None else _tail_tokens(batch, next_ids)
        self.backlog.add(Prompts(batch.input_ids, tails, batch.out_cache_loc, rows, batch.prefix_lens, batch.extend_lens), hidden)
        self.filled.append(rows)
        self.fills += 1
        return self.new_draft_input(bonus_tokens=next_ids)

    def note_filled(self) -> None:
        """What a fill leaves for later, when the host has time: nothing waits for it."""
        for rows in self.filled:
            self.stale.update(rows.tolist())
        self.filled.clear()

    def is_fill(self, batch: Any, hidden: Any, embeddings: Any) -> bool:
        is_ours = self.catch_up == "exact" and self.is_relay_made and batch.enable_overlap and batch.forward_mode.name == "EXTEND"
        return (
            is_ours
            and not self.is_copied
            and embeddings is None
            and hidden is not None
            and batch.req_pool_indices_cpu is not None
            and self.control.policy.expects_plain(self.padded(self.running + len(batch.req_pool_indices_cpu)))
        )

    def decode_fits(self, batch: Any) -> bool:
        return self.has_room(batch, len(batch.reqs))

    def has_room(self, batch: Any, size: int) -> bool:
        """Say whether all that ``size`` requests may need ahead is free.

        Where the prefix cache has plenty that nobody uses, it gives up what a few steps take at once.
        A hierarchical one does not: there it takes a while.
        """
        allocator, cache = batch.token_to_kv_pool_allocator, batch.tree_cache
        slots = size * (self.most_ahead + allocator.page_size)
        if slots <= allocator.available_size():
            return True
        unused = 0 if self.is_copied or cache is None else cache.evictable_size()
        if not isinstance(unused, int) or 2 * slots > GIVES_UP * unused:
            return False
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(cache, 2 * slots)
        return bool(slots <= allocator.available_size())

    def prepare(self, batch: Any) -> bool:
        """Decide what the next step is, and say whether it is a plain one for which nothing has to be allocated.

        SGLang tops up what each request owns before each step, to what two verifications may take. A plain step takes one slot, so that
        most find theirs allocated. What the host counts as committed lacks the step that is being computed. Between two steps, where the
        host is ahead, some more have to be there than after a prefill, where it is late.
        """
        size = len(batch.reqs)
        if not size:
            return False
        self.is_next_plain = self.control.decide(self.padded(size))
        if not self.is_next_plain or batch.sampling_info.penalizer_orchestrator.is_required:
            return False
        needed = 1 + (1 if self.was_plain else self.width) + (0 if self.was_prefill else SPARE)
        first = batch.reqs[0]
        allocated, committed = (
            batch.reqs if holder(first, name) is first else [req.kv for req in batch.reqs] for name in (ALLOCATED, COMMITTED)
        )
        for owned, counted in zip(allocated, committed, strict=True):
            if owned.kv_allocated_len < counted.kv_committed_len + needed:
                return False
        for req in batch.reqs:
            req.decode_batch_idx += 1
        self.spared += 1
        return True

    def takes(self, batch: Any) -> bool:
        """Say whether the batch is one that was decided to be decoded plainly."""
        draft_input = batch.spec_info
        return bool(self.is_next_plain) and batch.forward_mode.is_decode() and draft_input is not None and not draft_input.is_verify_input()

    def step(self, batch: Any, on_publish: Callable[[Any], None] | None, grammar_barrier: Callable[[], None] | None) -> Any:
        draft_input = batch.spec_info
        if batch.forward_mode.is_idle() or draft_input is None or draft_input.is_verify_input():
            return None
        decided, self.is_next_plain = self.is_next_plain, None
        self.running, self.was_prefill = len(batch.reqs), False
        self.was_plain = self.control.decide(self.padded(self.running)) if decided is None else decided
        if not self.was_plain:
            if self.is_any_known:
                self.lengths.fill_(UNKNOWN)  # how much is accepted is known later
                self.is_any_known = False
            return None
        if (found := profiler()) is not None:
            found.interrupted()
        return self.decode(batch, on_publish, grammar_barrier)

    def padded(self, size: int) -> int:
        """Return the batch size that a verification of ``size`` requests is computed with."""
        place = bisect.bisect_left(self.verify_sizes, size)
        return self.verify_sizes[place] if place < len(self.verify_sizes) else size

    def decode(self, batch: Any, on_publish: Callable[[Any], None] | None, grammar_barrier: Callable[[], None] | None) -> Any:
        """Run the target's decode. The scheduler takes back what is changed in ``batch`` here (its _forward_isolation)."""
        target, draft_input = self.target, batch.spec_info
        rows, row_indices, before, before_cpu = batch.req_pool_indices_cpu, batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu
        size, before_sum = len(rows), batch.seq_lens_sum
        if before_cpu is None:
            known = self.lengths[rows]
            if int(known.sum()) >= 0:
                before_cpu = known
        batch.input_ids = draft_input.bonus_tokens.to(torch.int64)
        if self.next_positions is None or self.next_positions[0] is not before:
            self.next_positions = self.positions_after(row_indices, before)
        _, batch.seq_lens, batch.out_cache_loc = self.next_positions
        after, self.next_positions = batch.seq_lens, None
        batch.seq_lens_cpu = batch.seq_lens_sum = None
        if before_cpu is not None:
            batch.seq_lens_cpu = before_cpu + 1
            batch.seq_lens_sum = (int(before_cpu.sum()) if before_sum is None else before_sum) + size
        batch.spec_info = None  # to attention backends, a decode with one is the draft's
        batch.forward_mode = self.decode_mode
        forward_batch = new_forward_batch(batch, target)
        output, is_graph = self.forward(forward_batch)
        logits = output.logits_output
        hidden = logits.hidden_states
        if not batch.return_hidden_states:
            logits.hidden_states = None
        elif is_graph:
            logits.hidden_states = logits.hidden_states.clone()  # the next replay writes there

        if on_publish is not None:
            on_publish(after)  # lengths don't wait for the tokens
        if grammar_barrier is not None and batch.has_grammar:
            grammar_barrier()  # the mask is made of the grammars as the step before left them
        ids = target.sample(logits, forward_batch)
        self.agree_on(ids, batch.sampling_info)
        is_relayed = batch.enable_overlap and _relays_alone()
        if not is_relayed:
            ids = ids.to(torch.int32)  # beside what verifications gave
        if batch.return_logprob and logits.next_token_logprobs is not None:
            logits.next_token_logprobs = logits.next_token_logprobs.view(size, 1)
        self.backlog.add(Step(ids, after, batch.out_cache_loc, rows), hidden)
        self.backlog.flush_if_due()  # the step is launched, the host has time

        self.note_filled()
        self.stale.update(rows.tolist())
        self.lengths[rows] = torch.where(known == UNKNOWN, UNKNOWN, known + 1) if before_cpu is None else batch.seq_lens_cpu.to(torch.int64)
        self.is_any_known = True
        self.hand_over_read_done()
        carried = {}
        if not is_relayed:
            carried = {name: getattr(draft_input, name) for name in ("topk_p", "topk_index", "hidden_states")}
        return new_result(
            logits_output=logits,
            next_token_ids=ids,
            can_run_cuda_graph=output.can_run_graph,
            speculative_num_draft_tokens=1,
            accept_lens=self.ones[:size] if batch.has_grammar else None,  # grammars are advanced by it; all else knows that it is 1
            accept_index=self.places[:size],
            new_seq_lens=after,
            next_draft_input=self.new_draft_input(bonus_tokens=ids, **carried),
            expert_distribution_metrics=output.expert_distribution_metrics,
            routed_experts_output=output.routed_experts_output,
            indexer_topk_output=output.indexer_topk_output,
            extra_keep_alive_refs=[forward_batch, draft_input],
        )

    def agree_on(self, ids: torch.Tensor, sampling_info: Any) -> None:
        """Give all ranks the tokens that rank 0 sampled, as SGLang does with a verification's.

        With grammars SGLang's sampler did so.
        """
        is_sampled = not sampling_info.is_all_greedy and not sampling_info.grammars
        if self.control.ranks > 1 and is_sampled:
            from sglang.srt.distributed import get_tp_group

            get_tp_group().broadcast(ids, 0)

    def forward(self, forward_batch: Any) -> tuple[Any, bool]:
        """Return the target's output, and whether a graph was replayed."""
        target, runner = self.target, self.runner
        for name in READ_DONE:
            if hasattr(target, name):
                setattr(target, name, None)  # a verification's; without a graph this step has none
        is_graph = runner is not None and bool(runner.can_run_graph(forward_batch))
        used = target.attn_backend, target.decode_cuda_graph_runner
        # Without a graph of its own the batch must not come near those of the verification, which would take it for theirs.
        target.attn_backend, target.decode_cuda_graph_runner = (self.attention, runner) if is_graph else (used[0], None)
        try:
            return target.forward(forward_batch), is_graph
        finally:
            target.attn_backend, target.decode_cuda_graph_runner = used

    def hand_over_read_done(self) -> None:
        """The scheduler's barrier asks the draft's runner, the last one to read shared buffers when speculating, when it may write them."""
        draft = self.worker.draft_worker.draft_runner
        for name in READ_DONE:
            if hasattr(self.target, name):
                setattr(draft, name, getattr(self.target, name))
                setattr(self.target, name, None)

    # Lengths

    def positions_after(self, rows: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return lengths, those after the next token, and its slots, which were allocated ahead."""
        return lengths, lengths + 1, self.table[rows, lengths].to(torch.int64)

    def resolve_lengths(self, future_map: Any, batch: Any) -> bool:
        """Set a batch's lengths from what the host knows: a plain step adds one token, so that no step has to be waited for."""
        rows = getattr(batch.spec_info, "future_indices", None)
        if rows is None or not (self.is_next_plain or (self.was_plain and future_map.needs_cpu_seq_lens)):
            return False
        lengths = self.lengths.index_select(0, batch.req_pool_indices_cpu)
        total = int(lengths.sum())
        if total <= 0:
            self.pulled += 1
            return False
        self.known += 1
        if hasattr(future_map, "_publish_fresh"):
            future_map._publish_fresh = False
        batch.seq_lens_cpu = lengths
        batch.seq_lens_sum = total
        # Neither the host nor the stream waits for the step before.
        batch.seq_lens = lengths.clone() if rows.device.type == "cpu" else lengths.pin_memory().to(rows.device, non_blocking=True)
        if self.is_next_plain:  # on the scheduler's stream, while the step before is computed
            self.next_positions = self.positions_after(batch.req_pool_indices, batch.seq_lens)
        if sys.modules[type(future_map).__module__]._DEBUG_ASSERT:
            if future_map.publish_ready is not None:
                future_map.publish_ready.wait()
            if not torch.equal(published := future_map.new_seq_lens_buf[rows].cpu(), lengths):
                raise AssertionError(f"lengths are {published.tolist()}, and not {lengths.tolist()}")
        return True

    # Back to speculation

    def before_draft(self, batch: Any) -> None:
        if batch.forward_mode.is_idle() or batch.req_pool_indices_cpu is None:
            return
        self.backlog.flush()
        self.note_filled()
        if not self.stale:
            return
        rows = batch.req_pool_indices_cpu.tolist()
        stale = self.stale.intersection(rows)
        if not stale:
            return
        if self.catch_up != "none":
            if (found := profiler()) is not None:
                found.mark("draft_extend")
            self.resume(batch)
            if found is not None:
                found.mark("kv")
            self.resumes += 1
            self.resumed_rows += len(stale)
        self.owe_nothing(batch, rows)

    def resume(self, batch: Any) -> None:
        """Run the draft over the last position of the stale rows: it writes what is owed, and gives what to draft from.

        It runs over all rows, of its usual width, as its graphs want it: of the others, and of the columns behind the first, what is
        computed is not used, and what is written goes to the padding slot.
        """
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        worker, draft = self.worker, self.worker.draft_worker
        draft_input, rows, lengths = batch.spec_info, batch.req_pool_indices, batch.seq_lens
        size, width, device = len(lengths), worker.speculative_num_draft_tokens, lengths.device
        saved = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        owed = self.backlog.slots.index_select(0, rows)
        slots = torch.zeros((size, width), dtype=torch.int64, device=device)
        slots[:, 0] = owed
        ids = torch.zeros((size, width), dtype=torch.int32, device=device)
        ids[:, 0] = draft_input.bonus_tokens
        aux = self.backlog.aux
        hidden = torch.zeros((size, width, aux.shape[1]), dtype=aux.dtype, device=device)
        hidden[:, 0] = aux.index_select(0, rows)
        batch.seq_lens = lengths - 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu - 1
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        batch.out_cache_loc = slots.view(-1)
        result = new_result(
            logits_output=SimpleNamespace(hidden_states=hidden.view(size * width, -1)),
            next_token_ids=ids.view(-1),
            accept_lens=self.ones[:size],
            new_seq_lens=lengths,
            next_draft_input=EagleDraftInput(bonus_tokens=draft_input.bonus_tokens),
        )
        if draft.plan_stream:
            draft.plan_stream.wait_stream(torch.get_device_module(draft.device).current_stream())
        draft._draft_extend_for_decode(batch, result)
        for name, value in saved.items():
            setattr(batch, name, value)
        is_stale = (owed != 0).unsqueeze(1)
        for name in ("topk_p", "topk_index", "hidden_states"):
            now, new = getattr(draft_input, name), getattr(result.next_draft_input, name)
            setattr(draft_input, name, torch.where(is_stale, new.to(now.dtype), now))

    # For people

    def state(self) -> dict[str, Any]:
        return {
            "catch_up": self.catch_up,
            "graph_batch_sizes": None if self.runner is None else list(self.runner.capture_bs),
            "fills": self.fills,
            "flushes": self.backlog.flushes,
            "host_known_lengths": {"known": self.known, "pulled": self.pulled},
            "num_steps_now": self.worker.speculative_num_steps,
            "resumes": self.resumes,
            "resumed_rows": self.resumed_rows,
            "reserved_prompts": self.reserved,
            "spared_allocations": self.spared,
            "stale_rows": len(self.stale),
        }


@functools.cache
def _relays_alone() -> bool:
    """Say whether the relay has the hook that takes a step without a draft's results: from 0.5.15."""
    from sglang.srt.managers import overlap_utils

    return hasattr(overlap_utils, "RelayPayload")


def _tail_tokens(batch: Any, next_ids: torch.Tensor) -> torch.Tensor:
    """Return the token after each prompt, or after the part of it that was computed."""
    from sglang.srt.speculative import eagle_worker_v2

    return eagle_worker_v2._eagle_prefill_tail_tokens(batch, next_ids)


@functools.cache
def _plain_runner_class() -> type:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

    class PlainDecodeCudaGraphRunner(DecodeCudaGraphRunner):
        """Captures the target's decode, with all hidden states."""

        def __init__(self, runner: Any, attention: Any) -> None:
            super().__init__(runner, attn_backend=attention)

        def capture(self) -> None:
            self.capture_hidden_mode = CaptureHiddenMode.FULL
            super().capture()

        def recapture_if_needed(self, forward_batch: Any) -> None:
            """Up to 0.5.16 a batch that wants less hidden states would have all graphs captured again."""

    return PlainDecodeCudaGraphRunner
