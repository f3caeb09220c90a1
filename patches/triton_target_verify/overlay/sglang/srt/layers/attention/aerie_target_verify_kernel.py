"""Attention of a target verification: split over the keys, and grouped by KV head as a decode is.

Made by Aerie (patch set triton_target_verify). A request's drafted tokens and the query heads of a KV head
are the rows of one tile, so that each key is read once for all of them. Keys are split among programs as
in SGLang's decode kernel; a second kernel merges what they computed. All is launched by sizes that the
host knows, and nothing is read back, so that a CUDA graph captures it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MOST_DRAFTED = 64
"""Drafted tokens of a request: which of them a row sees is a bit each of one integer."""
MOST_SPLITS = 64
LATENT = {576: (512, 64), 288: (256, 32)}
"""Sizes of an absorbed MLA key: its latent part, which is the value too, and its rotary part."""


class Tile(NamedTuple):
    """What one program computes at a time, and with what."""

    rows: int
    keys: int
    warps: int
    stages: int


# By measurement on an H200 (sm90), and for SM120, which was never run, by what fits there without
# spilling: docs/measurements/target-verify.md. A block of SM120 has 101,376 bytes of shared memory.
# Keys are by the most rows of a tile.
MLA = "mla"
TILES = {
    MLA: {16: Tile(16, 32, 8, 2), 32: Tile(32, 32, 8, 1)},
    64: {16: Tile(16, 64, 2, 2), 32: Tile(32, 64, 4, 2), 64: Tile(64, 64, 4, 2)},
    128: {16: Tile(16, 64, 2, 2), 32: Tile(32, 64, 4, 2), 64: Tile(64, 64, 8, 2)},
    256: {16: Tile(16, 32, 4, 2), 32: Tile(32, 32, 4, 2)},
}
"""By head size, rounded up to a power of two."""
SM90_TILES = TILES | {
    MLA: {16: Tile(16, 64, 8, 2), 32: Tile(32, 64, 8, 2), 64: Tile(64, 64, 8, 2)},
    128: {16: Tile(16, 64, 2, 3), 32: Tile(32, 128, 4, 2), 64: Tile(64, 64, 8, 2)},
}
SM90_SPLIT_MLA_TILES = {64: Tile(64, 32, 8, 2)}
"""Those that are faster where keys are split."""
PROGRAMS_PER_SM = 4
"""How many programs a multiprocessor should have. A tile of MLA fills it, so that there it is one."""


class Gpu(NamedTuple):
    """What a choice depends on: compute capability, and number of multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


def choose(gpu: Gpu, requests: int, kv_heads: int, rows: int, head_size: int, item_size: int) -> tuple[Tile, int] | None:
    """Return the tile, and among how many programs the keys of a request are split.

    ``rows`` are drafted tokens times query heads of a KV head; ``item_size`` is the bytes of one
    number of a query. None where no tile fits: float32 keys of MLA are too large for a GPU with
    less shared memory than an H200.
    """
    is_mla = head_size in LATENT
    is_sm90 = gpu.capability == (9, 0)
    if item_size > 2 and is_mla and not is_sm90:
        return None
    of_gpu = SM90_TILES if is_sm90 else TILES
    tiles = of_gpu[MLA if is_mla else min(max(triton.next_power_of_2(head_size), 64), 256)]
    size = next((size for size in tiles if rows <= size), max(tiles))
    if requests * kv_heads * triton.cdiv(rows, size) * MOST_SPLITS < gpu.multiprocessors:
        size = max(size // 2, 16)  # else some multiprocessors would have nothing to do
    programs = requests * kv_heads * triton.cdiv(rows, size)
    splits = gpu.multiprocessors * (1 if is_mla else PROGRAMS_PER_SM) // programs
    splits = min(1 << (max(splits, 1).bit_length() - 1), MOST_SPLITS)
    tile = tiles[size]
    if is_mla and is_sm90 and splits > 1:
        tile = SM90_SPLIT_MLA_TILES.get(size, tile)
    if item_size > 2:  # float32 takes twice the room
        tile = Tile(16 if is_mla else min(tile.rows, 32), max(tile.keys // 4, 16), tile.warps, 1)
    return tile, splits


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _keys_of_a_split(keys, splits, BLOCK_N: tl.constexpr):
    """Return the keys of a split: whole tiles, so that the last splits of a short request are empty."""
    return tl.cdiv(tl.cdiv(keys, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _attend(
    Q,
    Out,
    Partial,
    Partial_Lse,
    K_Buffer,
    V_Buffer,
    kv_indptr,
    kv_indices,
    drafted_slots,
    Mask,
    mask_indptr,
    window_offsets,
    Sinks,
    qk_scale,
    v_scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    DRAFTED: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DPE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    Lq: tl.constexpr,
    Lv: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    USE_MASK: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SHARES_KV: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1) // ROW_BLOCKS
    split = tl.program_id(2)
    splits = tl.num_programs(2)

    rows = tl.program_id(1) % ROW_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < DRAFTED * GROUP
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    in_d = d < Lq
    in_dv = dv < Lv

    start = tl.load(kv_indptr + request)
    prefix = tl.load(kv_indptr + request + 1) - start
    keys = prefix + DRAFTED
    length = _keys_of_a_split(keys, splits, BLOCK_N)
    begin = split * length
    end = tl.minimum(begin + length, keys)

    # Which drafted tokens each row sees, a bit each: a loop over keys then loads no mask.
    if USE_MASK:
        offset = prefix
        if WINDOW > 0:
            offset += tl.load(window_offsets + request)
        mask_row = tl.load(mask_indptr + request) + token * (offset + DRAFTED) + offset
        other = tl.arange(0, BLOCK_L)
        allowed = tl.load(Mask + mask_row[:, None] + other[None, :], mask=is_row[:, None] & (other < DRAFTED)[None, :], other=0)
        bits = tl.sum((allowed != 0).to(tl.int64) << other.to(tl.int64)[None, :], 1)
    else:
        bits = (tl.full([BLOCK_M], 2, tl.int64) << token.to(tl.int64)) - 1
    if DRAFTED < 32:
        bits = bits.to(tl.int32)

    q_row = (request * DRAFTED + token) * stride_qt + head * stride_qh
    q = tl.load(Q + q_row[:, None] + d[None, :], mask=is_row[:, None] & in_d[None, :], other=0.0)
    if BLOCK_DPE > 0:
        dpe = BLOCK_D + tl.arange(0, BLOCK_DPE)
        qpe = tl.load(Q + q_row[:, None] + dpe[None, :], mask=is_row[:, None], other=0.0)
    base_k = K_Buffer + kv_head * stride_kh
    base_v = V_Buffer + kv_head * stride_vh

    top = tl.zeros([BLOCK_M], tl.float32) - float("inf")
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first in tl.range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_key = n < end
        drafted = n - prefix
        # The drafted tokens are in the cache already, but not in kv_indices.
        slot = tl.load(kv_indices + start + n, mask=n < tl.minimum(end, prefix), other=0).to(tl.int64)
        slot += tl.load(drafted_slots + request * DRAFTED + drafted, mask=is_key & (drafted >= 0), other=0).to(tl.int64)
        is_seen = is_row[:, None] & is_key[None, :]
        bit = tl.maximum(drafted, 0).to(bits.dtype)
        is_seen &= (drafted < 0)[None, :] | (((bits[:, None] >> bit[None, :]) & 1) != 0)
        if WINDOW > 0:
            is_seen &= (prefix + token)[:, None] <= n[None, :] + WINDOW

        k = tl.load(base_k + slot[None, :] * stride_kt + d[:, None], mask=is_key[None, :] & in_d[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, k)
        if BLOCK_DPE > 0:
            kpe = tl.load(base_k + slot[None, :] * stride_kt + dpe[:, None], mask=is_key[None, :], other=0.0).to(q.dtype)
            scores = tl.dot(qpe, kpe, acc=scores)
        scores *= qk_scale
        if LOGIT_CAP > 0:
            scores = LOGIT_CAP * _tanh(scores / LOGIT_CAP)
        scores = tl.where(is_seen, scores, float("-inf"))
        if SHARES_KV:
            v = tl.trans(k)
        else:
            v = tl.load(base_v + slot[:, None] * stride_vt + dv[None, :], mask=is_key[:, None] & in_dv[None, :], other=0.0).to(q.dtype)

        # A row that sees no key of this tile has no finite score.
        new_top = tl.maximum(tl.maximum(tl.max(scores, 1), top), -1e20)
        fade = tl.exp(top - new_top)
        p = tl.exp(scores - new_top[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc=acc * fade[:, None])
        top = new_top

    if IS_SPLIT:
        # (request, drafted token, query head, split)
        heads = tl.num_programs(1) // ROW_BLOCKS * GROUP
        place = ((request * DRAFTED + token).to(tl.int64) * heads + head) * splits + split
        has_key = total > 0
        lse = tl.where(has_key, top + tl.log(tl.where(has_key, total, 1.0)), float("-inf"))
        tl.store(Partial_Lse + place, lse, mask=is_row & (begin < keys))
        mean = acc / tl.where(has_key, total, 1.0)[:, None]
        tl.store(Partial + place[:, None] * Lv + dv[None, :], mean, mask=(is_row & has_key)[:, None] & in_dv[None, :])
    else:
        if HAS_SINK:
            total += tl.exp(tl.load(Sinks + head, mask=is_row, other=float("-inf")).to(tl.float32) - top)
        o_row = (request * DRAFTED + token) * stride_ot + head * stride_oh
        mean = acc * (v_scale / total)[:, None]
        tl.store(Out + o_row[:, None] + dv[None, :], mean.to(Out.dtype.element_ty), mask=is_row[:, None] & in_dv[None, :])


@triton.jit
def _merge(
    Partial,
    Partial_Lse,
    Out,
    Sinks,
    kv_indptr,
    v_scale,
    heads,
    splits,
    stride_ot,
    stride_oh,
    DRAFTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    Lv: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    dv = tl.arange(0, BLOCK_DV)
    request = token // DRAFTED
    keys = tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request) + DRAFTED
    used = tl.cdiv(keys, _keys_of_a_split(keys, splits, BLOCK_N))
    place = (token.to(tl.int64) * heads + head) * splits
    every = tl.arange(0, BLOCK_S)
    lse = tl.load(Partial_Lse + place + every, mask=every < used, other=float("-inf"))
    top = tl.max(lse, 0)
    total = tl.sum(tl.exp(lse - top), 0)
    if HAS_SINK:
        total += tl.exp(tl.load(Sinks + head).to(tl.float32) - top)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, used, CHUNK):
        some = first + tl.arange(0, CHUNK)
        weight = tl.exp(tl.load(Partial_Lse + place + some, mask=some < used, other=float("-inf")) - top)
        values = tl.load(
            Partial + (place + some)[:, None] * Lv + dv[None, :],
            mask=(weight > 0)[:, None] & (dv < Lv)[None, :],  # a split of which a token sees no key wrote none
            other=0.0,
        )
        acc += tl.sum(weight[:, None] * values, 0)
    mean = acc * (v_scale / total)
    tl.store(Out + token * stride_ot + head * stride_oh + dv, mean.to(Out.dtype.element_ty), mask=dv < Lv)


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    drafted_slots: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    drafted: int,
    qk_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    window: int = -1,
    window_offsets: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    tile: Tile,
    splits: int,
) -> None:
    """Write to ``out`` the attention of ``drafted`` tokens of each request over its prefix and each other.

    ``q`` is (requests * drafted, heads, head size), ``out`` the same with the size of a value. The buffers are
    (slots, KV heads, size); ``kv_indices`` has the slots of the prefixes, of request r those from
    ``kv_indptr[r]`` to ``kv_indptr[r + 1]``; ``drafted_slots`` has those of the drafted tokens. ``mask``
    holds for request r, from ``mask_indptr[r]`` on, rows of prefix and drafted tokens, as SGLang's extend
    kernel reads it; without one, a drafted token sees those before it and itself. A prefix of a layer with a
    sliding ``window`` is what the window leaves, and ``window_offsets`` how much it cuts off.
    """
    requests, heads, head_size = q.shape[0] // drafted, q.shape[1], q.shape[2]
    kv_heads, value_size = k_buffer.shape[1], v_buffer.shape[2]
    group = heads // kv_heads
    row_blocks = triton.cdiv(group * drafted, tile.rows)
    latent, rotary = LATENT.get(head_size, (triton.next_power_of_2(head_size), 0))
    partial, partial_lse = out, out
    if splits > 1:
        partial = torch.empty((*q.shape[:2], splits, value_size), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((*q.shape[:2], splits), dtype=torch.float32, device=q.device)
    _attend[(requests, kv_heads * row_blocks, splits)](
        q,
        out,
        partial,
        partial_lse,
        k_buffer,
        v_buffer,
        kv_indptr,
        kv_indices,
        drafted_slots,
        mask,
        mask_indptr,
        window_offsets,
        sinks,
        qk_scale,
        v_scale,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k_buffer.stride(0),
        k_buffer.stride(1),
        v_buffer.stride(0),
        v_buffer.stride(1),
        DRAFTED=drafted,
        GROUP=group,
        ROW_BLOCKS=row_blocks,
        IS_SPLIT=splits > 1,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_L=triton.next_power_of_2(drafted),
        BLOCK_D=latent,
        BLOCK_DPE=rotary,
        BLOCK_DV=triton.next_power_of_2(value_size),
        Lq=head_size,
        Lv=value_size,
        WINDOW=window,
        LOGIT_CAP=logit_cap,
        USE_MASK=mask is not None,
        HAS_SINK=sinks is not None,
        SHARES_KV=rotary > 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _merge[(q.shape[0], heads)](
            partial,
            partial_lse,
            out,
            sinks,
            kv_indptr,
            v_scale,
            heads,
            splits,
            out.stride(0),
            out.stride(1),
            DRAFTED=drafted,
            BLOCK_N=tile.keys,
            BLOCK_S=triton.next_power_of_2(splits),
            CHUNK=min(8, triton.next_power_of_2(splits)),
            BLOCK_DV=triton.next_power_of_2(value_size),
            Lv=value_size,
            HAS_SINK=sinks is not None,
            num_warps=4,
        )
