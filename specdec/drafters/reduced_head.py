"""A head over the tokens that occur: a drafter need not be able to name the others.

The head is most of what a small drafter reads: V rows of width D for each of its few layers. With
the rows of the K most frequent tokens alone it reads K / V of that; a token outside is never
drafted, so it is a sure rejection (EAGLE-3, arXiv:2503.01840, and FR-Spec, arXiv:2502.14856).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..protocol import Model


def frequent_tokens(tokens: Tensor, vocab_size: int, n: int) -> Tensor:
    """The `n` most frequent ids in `tokens` (any shape, int64), increasing: `draft_ids` [n]."""
    if not 1 <= n <= vocab_size:
        raise ValueError(f"n: expected 1..{vocab_size} (the vocabulary), got {n}")
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:n].sort().values


def check_draft_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise a ValueError unless `ids` [Vd] are int64, increasing and in the vocabulary."""
    if ids.ndim != 1 or ids.dtype != torch.long or not len(ids):
        raise ValueError(
            f"draft_ids: expected int64 of shape [Vd], got {ids.dtype} of {list(ids.shape)}"
        )
    low, high = int(ids[0]), int(ids[-1])
    if bool((ids[1:] <= ids[:-1]).any()) or low < 0 or high >= vocab_size:
        raise ValueError(
            f"draft_ids: expected increasing ids in [0, {vocab_size}), got {low}..{high}"
        )


@torch.no_grad()
def head_rows(target: Model, ids: Tensor | None = None) -> Tensor:
    """The rows [n, D] of the target's (linear) head that belong to `ids` [n]; None: all."""
    eye = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    rows = target.head(eye.unsqueeze(0)).squeeze(0).T  # [V, D]
    return rows if ids is None else rows[ids]


def head_over(target: Model, ids: Tensor) -> nn.Linear:
    """A head [D -> n] over the tokens `ids`, a copy of the target's rows, without gradients."""
    rows = head_rows(target, ids)
    head = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
    head.weight = nn.Parameter(rows.contiguous(), requires_grad=False)
    return head


def spread(logits: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits of the draft tokens [..., Vd] -> of all tokens [..., V], -inf for the others."""
    if draft_ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return full.index_copy(-1, draft_ids, logits)
