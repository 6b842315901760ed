"""What a pending tree sees, as the masks that `transformers` takes ready-made.

`transformers` (5.24) passes a mask of four dimensions on as it is. A model whose config has
`layer_types` takes one a type, in a dict, as its own `generate` hands them over; any other takes
one for all layers.

Its own masks for windows count slots. In a tree slots are no positions, so here a window counts
positions: a query at position i sees those of its ancestors, itself included, that stand at
i - w + 1 or later for a window of w, at (i // c) * c or later for chunks of c.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ..cache import View
from ..draft import depths

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

Masks: TypeAlias = Tensor | dict[str, Tensor] | None


def slot_positions(view: View, lengths: Tensor) -> Tensor:
    """Positions [B or 1, n_slots] of all slots: committed ones and chains in place, trees by depth.

    Slots behind a shorter row's own hold nothing, and nobody asks where they stand.
    """
    slots = torch.arange(view.n_slots, device=lengths.device).unsqueeze(0)
    if view.parents is None:
        return slots
    start = lengths.unsqueeze(1)  # [B, 1]
    by_node = start - 1 + depths(view.parents)  # [B, P]
    node = (slots - start).clamp(0, by_node.shape[1] - 1)
    return torch.where(slots < start, slots, by_node.gather(1, node))


def near(view: View, lengths: Tensor, kind: str, size: int) -> Tensor:
    """[B or 1, N, n_slots] bool: whether a slot stands in a query's window or chunk of `size`."""
    query, slot = view.positions.unsqueeze(-1), slot_positions(view, lengths).unsqueeze(1)
    return query - slot < size if kind == SLIDING else query // size == slot // size


def masks_of(
    view: View,
    lengths: Tensor,
    sizes: Mapping[str, int | None],
    *,
    by_type: bool,
    additive: torch.dtype | None,
) -> Masks:
    """The attention masks [B, 1, N, n_slots] of a pass.

    Args:
        view: what the new nodes see.
        lengths: [B] committed tokens.
        sizes: layer type -> size of its window or chunk, None: unbounded.
        by_type: hand them over in a dict, by layer type; else `sizes` has one type.
        additive: the dtype of masks that are 0 where a query sees a slot, else -inf (`eager`
            attention adds them); None: bool, True where it sees (`sdpa`).
    """
    shape = (len(lengths), 1, view.positions.shape[1], view.n_slots)
    if view.mask is None:
        visible = torch.ones(shape, dtype=torch.bool, device=lengths.device)
    else:
        visible = (view.mask == 0).expand(shape)
    masks: dict[str, Tensor] = {}
    for kind, size in sizes.items():
        mask = visible if size is None else visible & near(view, lengths, kind, size).unsqueeze(1)
        if additive is not None:
            zero = torch.zeros(shape, dtype=additive, device=lengths.device)
            mask = zero.masked_fill_(~mask, -torch.inf)
        masks[kind] = mask
    return masks if by_type else next(iter(masks.values()))
