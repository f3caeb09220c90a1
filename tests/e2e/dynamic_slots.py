"""Prepares prompts and plain steps with SGLang's own allocator, and a prefix cache that holds what ended. Runs in a release's Python.

It prints how many steps found their slots, after a prompt and in all; it fails where a slot has two owners, is lost, or belongs to a
prompt that should have none ahead.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.speculative import aerie_dynamic_decode
from sglang.srt.speculative.aerie_dynamic_decode import DynamicDecode

ROWS, LONGEST, SLOTS, WIDTH = 9, 400, 3000, 4
EXTEND = SimpleNamespace(name="EXTEND")


class Cache:
    """Keeps the slots of requests that ended until they are asked for."""

    def __init__(self, allocator: Any) -> None:
        self.allocator, self.held, self.gave = allocator, [], 0

    def evictable_size(self) -> int:
        return len(self.held)

    def evict(self, slots: int) -> None:
        least = max(0, slots - self.allocator.available_size())
        gone, self.held = self.held[:least], self.held[least:]
        self.gave += bool(gone)
        if gone:
            self.allocator.free(torch.tensor(gone))


def decode(table: torch.Tensor) -> DynamicDecode:
    """Return what prepares steps, without a worker: it always decodes plainly."""
    made = DynamicDecode.__new__(DynamicDecode)
    made.table, made.width, made.most_ahead, made.is_copied = table, WIDTH, 28, False
    made.first_slots = torch.arange(2 * WIDTH)
    made.running, made.verify_sizes, made.reserved, made.spared = 0, [], 0, 0
    made.was_plain, made.was_prefill, made.is_next_plain = True, False, None
    policy = SimpleNamespace(expects_plain=lambda size: True)
    made.control = SimpleNamespace(policy=policy, decide=lambda size: True)  # type: ignore[assignment]
    return made


class Host:
    """As much of a scheduler as allocates."""

    def __init__(self, slots: int) -> None:
        self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, False)
        self.cache = Cache(self.allocator)
        self.table = torch.zeros((ROWS, LONGEST), dtype=torch.int32)
        self.decode = decode(self.table)
        self.running: list[Any] = []
        self.free_rows = list(range(1, ROWS))

    def batch(self, requests: list[Any], **more: Any) -> Any:
        return SimpleNamespace(
            reqs=requests,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
            **more,
        )

    def allocate(self, request: Any, end: int) -> None:
        kv = request.kv
        if end > kv.kv_allocated_len:
            common.evict_from_tree_cache(self.cache, end - kv.kv_allocated_len)
            slots = self.allocator.alloc(end - kv.kv_allocated_len)
            self.table[request.row, kv.kv_allocated_len : end] = slots.to(torch.int32)
            kv.kv_allocated_len = end

    def prompt(self, length: int, chunked: bool = False) -> Any:
        kv = SimpleNamespace(kv_allocated_len=0, kv_committed_len=0)
        request = SimpleNamespace(row=self.free_rows.pop(), kv=kv, decode_batch_idx=0)
        self.allocate(request, length)
        kv.kv_committed_len = length
        lengths, rows = torch.tensor([length]), torch.tensor([request.row])
        about = {"enable_overlap": True, "forward_mode": EXTEND, "chunked_req": request if chunked else None}
        self.decode.reserve(self.batch([request], seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=rows, **about))
        self.decode.was_prefill = True
        self.running.append(request)
        return request

    def step(self) -> bool:
        """Prepare a step, as SGLang does where the hook does not; then each request owns one position more."""
        batch = self.batch(self.running)
        self.decode.decode_fits(batch)
        is_prepared = self.decode.prepare(batch)
        if not is_prepared:
            for request in self.running:
                self.allocate(request, max(request.kv.kv_allocated_len, request.kv.kv_committed_len + 4 * WIDTH))
        self.decode.running, self.decode.was_prefill = len(self.running), False
        for request in self.running:
            request.kv.kv_committed_len += 1
            assert request.kv.kv_committed_len < request.kv.kv_allocated_len, "one more, of the step that is being computed"
        return is_prepared

    def end(self, request: Any) -> None:
        self.running.remove(request)
        self.free_rows.append(request.row)
        self.cache.held += self.table[request.row, : request.kv.kv_allocated_len].tolist()

    def check(self) -> None:
        owned = [slot for one in self.running for slot in self.table[one.row, : one.kv.kv_allocated_len].tolist()] + self.cache.held
        assert len(set(owned)) == len(owned) and 0 not in owned, "a slot has two owners"
        assert len(owned) + self.allocator.available_size() == SLOTS, "slots are lost"


def main() -> None:
    common.evict_from_tree_cache = lambda cache, slots: cache.evict(slots)
    prompts = prepared = after_prompts = found_after = steps = gave = 0
    for seed in range(20):
        chance, host = random.Random(seed), Host(SLOTS)
        for _ in range(300):
            is_after_prompt = len(host.running) < ROWS - 1 and (not host.running or chance.random() < 0.2)
            if is_after_prompt:
                host.prompt(chance.randrange(1, 200))
                prompts += 1
            is_prepared = host.step()
            after_prompts += is_after_prompt
            found_after += is_after_prompt and is_prepared
            prepared += is_prepared
            steps += 1
            host.check()
            for request in [one for one in host.running if chance.random() < 0.02 or one.kv.kv_allocated_len > LONGEST - 40]:
                host.end(request)
        gave += host.cache.gave
        assert host.decode.spared > 0
    assert found_after > 0.8 * after_prompts, f"{found_after} of {after_prompts} steps after a prompt found their slots"
    assert 0 < gave < 0.2 * steps, f"the prefix cache gave something up in {gave} of {steps} steps"

    small = Host(60)
    assert small.prompt(50).kv.kv_allocated_len == 50, "memory is short"
    assert not small.decode.has_room(small.batch(small.running), 1)
    small.cache.held = list(range(100, 300))
    assert not small.decode.has_room(small.batch(small.running), 1)
    assert not small.cache.gave, "more than a quarter of what is cached would go"
    whole = Host(SLOTS)
    assert whole.prompt(20, chunked=True).kv.kv_allocated_len == 20, "the next chunk goes on where this one ends"
    owner = whole.prompt(20)
    assert owner.kv.kv_allocated_len == 20 + 2 * WIDTH
    lengths = torch.tensor([10])
    about = {"enable_overlap": True, "forward_mode": EXTEND, "chunked_req": None, "req_pool_indices": torch.tensor([owner.row])}
    whole.decode.reserve(whole.batch([owner], seq_lens=lengths, seq_lens_cpu=lengths, **about))
    assert owner.kv.kv_allocated_len == 20 + 2 * WIDTH, "it owns more than what is computed"
    assert aerie_dynamic_decode.live is None
    print(f"{prompts} prompts, {found_after} of {after_prompts} steps after one and {prepared} of {steps} in all found their slots")


if __name__ == "__main__":
    main()
