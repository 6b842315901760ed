"""Where a layer of EAGLE-3 starts from: the target's own last block instead of chance.

A random layer below the target's head is sure of the wrong tokens, and a short training spends its
first third on unlearning that. The last block reads and writes the states that the head
expects. Three places have no counterpart in it, and start so that they do not disturb:
attention to the embedding half of the input is zero, the fused taps are the highest of them and a
little of all, and the final norm is turned down, which makes the first laws nearly uniform.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..drafters import Eagle3
from ..models import Transformer
from ..models.layers import Block

QUIET = 0.15
"""Of the target's final gain: scores of a few tenths, not of tens."""

FUSED = 0.3
"""Of the random weights that fuse the taps, beside the highest tap itself."""


@torch.no_grad()
def start_from_block(network: Eagle3, target: Transformer) -> Eagle3:
    """Copy the last block of `target` into a freshly drawn `network`, and its head's rows.

    Raises:
        ValueError: if the target has no attention block of the network's shape; nothing is changed.
    """
    pairs = _pairs(network, target)
    width = network.config.hidden_size
    for mine, theirs in pairs:
        if mine.shape == theirs.shape:
            mine.copy_(theirs)
        else:  # [embedding, feature] -> the feature's half
            mine.zero_()[:, width:].copy_(theirs)
    network.fc.weight.mul_(FUSED)[:, -width:].add_(torch.eye(width).to(network.fc.weight))
    network.norm.weight.copy_(QUIET * target.norm.gain)
    return network.copy_head(target)


def _pairs(network: Eagle3, target: Transformer) -> list[tuple[Tensor, Tensor]]:
    block = target.blocks[-1] if isinstance(target, Transformer) else None
    if not isinstance(block, Block):
        raise ValueError(f"target: expected a dense Transformer, got a {type(target).__name__}")
    parts: list[tuple[nn.Module, nn.Module]] = [
        (network.norm_feature, block.norm_attention),
        (network.attention, block.attention),
        (network.norm_mlp, block.norm_mlp),
        (network.mlp, block.mlp),
    ]
    pairs = []
    for mine, theirs in parts:
        own, other = dict(mine.named_parameters()), dict(theirs.named_parameters())
        for name in own.keys() | other.keys():
            if name not in own or name not in other or len(own[name]) != len(other[name]):
                raise ValueError(f"target: its last block has another shape than the layer: {name}")
            pairs.append((own[name], other[name]))
    return pairs
