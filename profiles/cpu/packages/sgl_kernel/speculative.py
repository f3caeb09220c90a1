"""Stand-in for sgl_kernel.speculative."""

from __future__ import annotations

import torch
from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    bs: int,
    n: int,
) -> None:
    """Derive positions, first children and next siblings from which token sees which (used by n-gram speculation)."""
    mask = tree_mask.reshape(bs, n, n).bool().tril(-1)
    index = torch.arange(n)
    positions.view(bs, n).copy_(mask.sum(-1) + verified_seq_len.view(bs, 1))
    retrieve_index.view(bs, n).copy_(torch.arange(bs * n).view(bs, n))
    parent = torch.where(mask, index, -1).amax(-1)
    first = torch.where(mask, index[:, None], n).amin(1)
    retrieve_next_token.view(bs, n).copy_(torch.where(first < n, first, -1))
    same = (parent[:, :, None] == parent[:, None, :]) & (index[:, None] > index[None, :])
    sibling = torch.where(same, index[:, None], n).amin(1)
    retrieve_next_sibling.view(bs, n).copy_(torch.where((parent >= 0) & (sibling < n), sibling, -1))
