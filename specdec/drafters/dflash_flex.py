"""DFlash's training pass with FlexAttention: a block-sparse mask instead of one of all pairs.

Of the keys that `dflash_loss.dense_view` masks out, most lie in tiles of which a query sees
nothing: all blocks but its own, and the context behind its anchor. A `BlockMask` lists the other
tiles, and the compiled kernel visits no more than these (Dong et al., arXiv:2412.05496).

    dflash_loss(..., see=flex_view)

What is seen is the same; a test compares both. On CUDA the kernel is compiled, forwards and
backwards. On a CPU PyTorch has no backward pass for FlexAttention (2.13 refuses gradients with a
NotImplementedError), and uncompiled it computes all scores: there it can check a mask or evaluate
under `torch.no_grad`, no more, and training takes the reference.

FlexAttention is imported at the first call, since that takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..cache import View
from .dflash import Sight
from .dflash_loss import Blocks


def flex_view(
    blocks: Blocks,
    n_context: int,
    sight: Sight,
    n_groups: int,
    dtype: torch.dtype,
    *,
    compiled: bool | None = None,
) -> View:
    """What the slots of `blocks` see behind `n_context` places, for `run_blocks(see=...)`.

    Called as `dflash_loss.dense_view` is; groups and dtype are the kernel's own affair. `compiled`:
    whether to compile the kernel; None: on CUDA. A CPU compiles it for dtypes up to float32.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    batch, n_blocks, size = blocks.tokens.shape
    n_queries = n_blocks * size
    n_keys, device = n_context + n_queries, blocks.anchors.device
    seen = create_block_mask(
        slot_sees(blocks.anchors, size, n_context, sight),
        batch,
        None,
        n_queries,
        n_keys,
        device=device,
    )
    attention = _attention(device.type == "cuda" if compiled is None else compiled)

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        mixed = attention(
            q.transpose(1, 2), keys, values, block_mask=seen, enable_gqa=q.shape[2] != keys.shape[1]
        )
        return mixed.transpose(1, 2).flatten(2)  # [B, N, H * d]

    return View(n_context, n_keys, blocks.places.flatten(1), None, None, attend)


def slot_sees(
    anchors: Tensor, block_size: int, n_context: int, sight: Sight
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule of `dflash_loss.block_mask` for one pair: (row, head, query, key) -> bool.

    Query i is slot i % K of block i // K; key j is the context's place j, or slot j - T.
    """

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, (key - n_context).clamp(min=0)
        root = anchors[row, block]
        is_context = key < n_context
        stands = torch.where(is_context, key, anchors[row, slot // block_size] + slot % block_size)
        allowed = torch.where(is_context, key < root, slot // block_size == block)
        return allowed & sight.sees(root + query % block_size, stands)

    return sees


@cache
def _attention(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention
