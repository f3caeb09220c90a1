"""Stand-in for the CPU build of sgl_kernel, in plain PyTorch.

It has what SGLang's CPU engine calls for a plain transformer and for speculative decoding (EAGLE, EAGLE3, STANDALONE,
NGRAM), and nothing else. The Triton kernels in ``sglang.kernels.ops`` define what each function does; speed is no goal.
Parameter names are the callers'.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

__aerie_stand_in__ = True
__version__ = "0.0.0+standin"

FULL_MASK = 0
"""``TreeMaskMode``: the mask covers the whole sequence; any other mode covers the drafted tokens only."""


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write each request's new cache slots into its row of the token table."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        if end > start:
            req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
            taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read each request's cache slots from start to end out of the token table."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        if end > start:
            out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
            taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out_cache_loc: Tensor, pool_len: int, topk: int, num_steps: int
) -> None:
    """Read the slots of the tokens that will be drafted: those right behind each sequence."""
    columns = seq_lens.to(torch.int64)[:, None] + torch.arange(topk * num_steps, dtype=torch.int64)[None, :]
    rows = req_to_token[req_pool_indices.to(torch.int64)]
    out_cache_loc[: columns.numel()] = torch.gather(rows, 1, columns).reshape(-1).to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Return one row per request and candidate: the prefix, then that candidate's own draft slots."""
    rows = req_to_token[req_pool_indices.to(torch.int64)].repeat_interleave(topk, 0)
    for number, length in enumerate(seq_lens.tolist()):
        block = req_to_token[int(req_pool_indices[number]), length : length + topk * num_steps].view(topk, num_steps)
        rows[number * topk : (number + 1) * topk, length : length + num_steps] = block
    return rows


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Pick each request's last accepted token."""
    count = accept_lens.numel()
    index = torch.arange(count, dtype=torch.int64) * accept_stride + accept_lens.to(torch.int64) - 1
    bonus_tokens[:count] = accept_tokens.reshape(-1)[index].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Gather the cache slots of the accepted tokens, closely packed."""
    source = accept_index.reshape(-1)
    source = source[source > -1].to(torch.int64)
    accept_out_cache_loc.view(-1)[: source.numel()] = out_cache_loc[source].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor, extend_start_loc: Tensor, extend_seq_lens: Tensor, topk_index: Tensor, select_index: Tensor | None = None
) -> None:
    """Shift each request's tokens by one to the left and put its newest token at the end, or where ``select_index`` says."""
    newest = topk_index.reshape(-1)
    for number, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length <= 0:
            continue
        if length > 1:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        position = start + length - 1 if select_index is None else int(select_index[number])
        input_ids[position] = newest[number].to(input_ids.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move cache entries in every layer's buffer, given by address; sources are read before any target is written."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    if not sources:
        return
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        values = [ctypes.string_at(address + source * stride, stride) for source in sources]
        for target, value in zip(targets, values, strict=True):
            ctypes.memmove(address + target * stride, value, stride)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    n: int,
    mode: int,
) -> None:
    """Build the tree of drafted tokens: who sees whom, positions, first children and next siblings."""
    lengths = seq_lens.tolist()
    selected = selected_index.tolist()
    parents = parent_list.tolist() if parent_list.numel() else [[] for _ in lengths]
    full = int(mode) == FULL_MASK
    mask, position = tree_mask.view(-1), positions.view(-1)
    before = 0
    for b, length in enumerate(lengths):
        width = length + n if full else n
        base = n * n * b + (before * n if full else 0)
        lead = length if full else 0
        parent = [_parent(selected[b], parents[b], topk, n, i) for i in range(n - 1)]  # of the drafted tokens, numbered from 1
        retrieve_index[b] = torch.arange(b * n, b * n + n, dtype=retrieve_index.dtype)
        child, sibling = _links(parent, n)
        retrieve_next_token[b] = torch.tensor(child, dtype=retrieve_next_token.dtype)
        retrieve_next_sibling[b] = torch.tensor(sibling, dtype=retrieve_next_sibling.dtype)
        position[b * n] = length
        for token in range(n):
            row = base + width * token + lead
            mask[row : row + n] = 0
            mask[row] = 1
            if token:
                current: int | None = token
                level = 0
                while current and level < depth:
                    level += 1
                    mask[row + current] = 1
                    current = parent[current - 1]
                position[b * n + token] = length + level
        before += length


def _parent(selected: list[int], parents: list[int], topk: int, n: int, i: int) -> int | None:
    """Return the token that ``selected[i]`` continues: 0 for the root, None for one that was not selected."""
    table = selected[i] // topk
    if table == 0:
        return 0
    return next((p + 1 for p in range(n - 1) if selected[p] == parents[table]), None)


def _links(parent: list[int | None], n: int) -> tuple[list[int], list[int]]:
    """Return each token's first child and next sibling, -1 for none."""
    child, sibling = [-1] * n, [-1] * n
    for token in range(n - 1, 0, -1):
        above = parent[token - 1]
        if above is None:
            continue
        if child[above] != -1:
            sibling[token] = child[above]
        child[above] = token
    return child, sibling


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree along the tokens that the target itself would have taken; note the accepted ones and the bonus token."""
    steps = accept_index.shape[1]
    drafted, index = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.reshape(-1).tolist()
    for b in range(candidates.shape[0]):
        last, current, accepted = index[b][0], 0, 0
        accept_index[b, 0] = last
        for _ in range(1, steps):
            current = child[b][current]
            while current != -1 and drafted[b][current] != wanted[last]:
                current = sibling[b][current]
            if current == -1:
                break
            predicts[last] = wanted[last]
            accepted += 1
            last = index[b][current]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = wanted[last]


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attention of one request: query [tokens, heads, d], key and value [context, kv heads, d]."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None].to(query.dtype),
        value.transpose(0, 1)[None].to(query.dtype),
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


def _refuse_what_is_not_plain(logit_cap: float, is_cross: bool, sliding_window: int, sinks: Tensor | None) -> None:
    if logit_cap or is_cross or sliding_window > 0 or sinks is not None:
        raise NotImplementedError("the cpu profile's sgl_kernel has plain causal self-attention only")


def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Attention behind ``--attention-backend intel_amx``: one new token for each request."""
    _refuse_what_is_not_plain(logit_cap, is_cross, sliding_window, sinks)
    if key is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for number, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].to(torch.int64)
        output[number : number + 1] = _attention(query[number : number + 1], k_cache[slots], v_cache[slots], sm_scale)


def extend_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_extend_len: int,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool = True,
) -> None:
    """Attention behind ``--attention-backend intel_amx``: several new tokens for each request, in a row or in a tree."""
    _refuse_what_is_not_plain(logit_cap, is_cross, sliding_window, sinks)
    used = 0
    for row, length, new, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True
    ):
        slots = req_to_token[row, :length].to(torch.int64)
        mask = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - new :] = tree_mask.view(-1)[used : used + new * new].view(new, new).bool()
            used += new * new
        elif is_causal:
            mask = mask.tril(length - new)
        output[start : start + new] = _attention(query[start : start + new], k_cache[slots], v_cache[slots], sm_scale, mask)


torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
