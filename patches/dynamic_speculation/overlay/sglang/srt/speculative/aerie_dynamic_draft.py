"""K and V of the draft for positions that it was not run for, written for many of them at once.

A draft of one layer needs no more than its K and V to go on later, and those of position p are a function of token p+1 and of the target's
hidden states at p alone. Plain steps and prefills before them leave both in a :class:`Backlog`, at the cost of one copy. What waits there
is written together, so that the draft's weights are read once for some hundred positions and not in each step; nothing has to be written
before the draft runs again.

What waits may outlive its request. Its slot may belong to another one by then, and to a position that waits as well: of those that have
the same slot the last one counts, and whoever lets the draft itself write to slots flushes first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

FLUSH_AT = 1024
"""Positions that are enough to be written: with more, the draft's weights and some forty launches are a small part of it already."""
CAPACITY = 2048
"""Positions whose hidden states are kept at most."""


class Writer:
    """Writes K and V of a one-layer EAGLE-3 draft: its embedding, fc, norms and projections; no attention, no MLP, no head."""

    def __init__(self, runner: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        self.model = runner.model.model
        self.pool = runner.token_to_kv_pool
        self.layer = self.model.layers[0]
        self.attention = self.layer.self_attn
        self.new_location = KVWriteLoc
        self.width = self.model.fc.in_features
        self.dtype = self.model.fc.weight.dtype
        projection = self.attention.qkv_proj
        rows = self.attention.q_size + 2 * self.attention.kv_size
        self.is_sliceable = (
            type(projection.quant_method).__name__ == "UnquantizedLinearMethod"
            and projection.weight.shape[0] == rows
            and not getattr(projection, "use_intel_amx_backend", False)
        )

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        """Return what the draft makes of the target's hidden states, as its own forward does."""
        model = self.model
        if aux.shape[-1] == model.config.hidden_size:
            return aux
        if getattr(model, "input_norm", None) is not None:
            aux = model.input_norm(aux)
        if model.fc_norm is not None:
            parts = aux.chunk(model.num_aux_hidden_states, -1)
            aux = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], -1)
        return model.fc(aux)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v; where the fused weights can be cut, q is not computed."""
        attention = self.attention
        q_size, kv_size = attention.q_size, attention.kv_size
        if self.is_sliceable:
            projection = attention.qkv_proj
            bias = None if projection.bias is None else projection.bias[q_size:]
            return torch.nn.functional.linear(x, projection.weight[q_size:], bias).split([kv_size, kv_size], -1)
        return attention.qkv_proj(x)[0].split([q_size, kv_size, kv_size], -1)[1:]

    def write(self, ids: torch.Tensor, aux: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V of ``positions`` to ``slots``: ``aux`` is of those positions, ``ids`` are the tokens after them."""
        layer, attention = self.layer, self.attention
        hidden = layer.hidden_norm(self.features(aux))
        k, v = self.project(torch.cat([layer.input_layernorm(self.model.embed_tokens(ids)), hidden], -1))
        unused = k.new_empty((len(ids), attention.kv_size))  # the rotation wants a q
        _, k = attention.rotary_emb(positions, unused, k)
        heads, size = attention.num_kv_heads, attention.head_dim
        radix = attention.attn
        scales = () if radix.k_scale is None else (radix.k_scale, radix.v_scale)
        self.pool.set_kv_buffer(radix, self.new_location(slots, None), k.view(-1, heads, size), v.view(-1, heads, size), *scales)


@dataclasses.dataclass(frozen=True)
class Step:
    """One position for each row: what a plain step computed, and the token that it gave."""

    ids: torch.Tensor
    after: torch.Tensor
    """Each row's length with this position."""
    slots: torch.Tensor
    rows: torch.Tensor
    """On the host."""

    def places(self) -> np.ndarray:
        """Return where each row's last position is among these."""
        return np.arange(len(self.rows))

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens after the positions, and the lengths with them."""
        _keep_until_read(self.after)
        return self.ids, self.after


@dataclasses.dataclass(frozen=True)
class Prompts:
    """All positions of a prefill: its tokens, and the one after each prompt, or after the part of it that was computed."""

    ids: torch.Tensor
    tails: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    """On the host."""
    starts: list[int]
    lengths: list[int]

    def places(self) -> np.ndarray:
        return np.cumsum(self.lengths) - 1

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [np.arange(start + 1, start + length + 1) for start, length in zip(self.starts, self.lengths, strict=True)]
        packed = upload(np.concatenate([*parts, self.places()]), self.ids.device)
        after, last = packed.split([len(self.ids), len(self.rows)])
        ids = self.ids.to(torch.int64).roll(-1)
        ids.index_copy_(0, last, self.tails.to(torch.int64))
        _keep_until_read(self.ids, self.tails)
        return ids, after


def _keep_until_read(*tensors: torch.Tensor) -> None:
    """Some are of the scheduler's stream, which must not be given their memory again before this one has read it."""
    if tensors[0].device.type == "cuda":
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Backlog:
    """Positions whose K and V the draft lacks, in the order in which they were computed, and what each row's last one was made of.

    Rows are those of the request pool. ``aux`` and ``slots`` are by row, once flushed: hidden states of the last position and the slot of
    its K and V, which the draft goes on from. Row 0 and slot 0 are padding; slot 0 says that nothing is owed.
    """

    def __init__(
        self, writer: Writer, rows: int, device: torch.device, *, writes: bool = True, keeps: bool = True, flush_at: int = FLUSH_AT
    ) -> None:
        self.writer = writer
        self.writes, self.keeps, self.flush_at = writes, keeps, flush_at
        self.aux = torch.zeros((rows, writer.width), dtype=writer.dtype, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        pool = writer.pool
        self.history = self.aux.new_empty((max(CAPACITY, flush_at + rows), writer.width))
        self.newest = torch.zeros(pool.size + pool.page_size, dtype=torch.int64, device=device)
        """By slot, the number of the last position that was written there; positions are counted from 1 on."""
        self.waiting: list[Step | Prompts] = []
        self.used = self.written = self.flushes = 0

    def add(self, computed: Step | Prompts, hidden: torch.Tensor) -> None:
        """Take positions and the target's hidden states there, which may be a graph's memory: they are copied, or used at once."""
        if not self.keeps:
            return
        count = len(computed.ids)
        if self.used + count > len(self.history):
            self.flush()
        if count > len(self.history):
            self._write([computed], hidden[:count])
            return
        self.history[self.used : self.used + count].copy_(hidden[:count])
        self.used += count
        self.waiting.append(computed)

    def flush_if_due(self) -> None:
        """Write all that waits where it is enough. For when the host has time."""
        if self.used >= self.flush_at:
            self.flush()

    def flush(self) -> None:
        """Write all that waits."""
        waiting, used = self.waiting, self.used
        self.waiting, self.used = [], 0
        if waiting:
            self._write(waiting, self.history[:used])

    @torch.no_grad()
    def _write(self, computed: list[Step | Prompts], hidden: torch.Tensor) -> None:
        slots = torch.cat([one.slots for one in computed]).to(torch.int64)
        _keep_until_read(*(one.slots for one in computed))
        if self.writes:
            ids, after = (torch.cat(parts).to(torch.int64) for parts in zip(*(one.on_device() for one in computed), strict=True))
            self.writer.write(ids, hidden, after - 1, self._last_of_each(slots))
        rows = torch.cat([one.rows for one in computed]).numpy()
        begins = np.cumsum([0, *(len(one.ids) for one in computed[:-1])])
        places = np.concatenate([begin + one.places() for begin, one in zip(begins, computed, strict=True)])
        rows, last = np.unique(rows[::-1], return_index=True)  # each row's last position
        device = self.slots.device
        packed = upload(np.concatenate([rows, places[::-1][last]]), device)
        rows_there, places_there = packed.split(len(rows))
        self.aux.index_copy_(0, rows_there, hidden.index_select(0, places_there).to(self.aux.dtype))
        self.slots.index_copy_(0, rows_there, slots.index_select(0, places_there))
        self.flushes += 1

    def _last_of_each(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots, those of positions that a later one has taken the slot of replaced by the padding slot."""
        begin, self.written = self.written + 1, self.written + len(slots)
        number = torch.arange(begin, self.written + 1, device=slots.device)
        self.newest.scatter_reduce_(0, slots, number, "amax")
        return torch.where(self.newest.index_select(0, slots) == number, slots, 0)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return values of the host on the device; nobody waits."""
    there = torch.from_numpy(values.astype(np.int64))
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)
