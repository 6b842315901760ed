"""Where a layer of EAGLE-3 starts from: at the scale of the target's states.

A target's states grow from block to block (in SmolLM2 their entries are about 4 behind block 2 and
22 behind block 27), while a fresh layer writes entries of about 1: the fused taps drown what it
says of the token in between. And a fresh layer below the target's head and final norm is sure of
the wrong tokens. So every tap is fused at its own size, and the final norm is turned down, which
makes the first laws nearly uniform. It helps for the first dozens of steps and no longer
(docs/smollm2.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..drafters import Eagle3
from ..models.decoder import Decoder

QUIET = 0.15
"""Of the target's final gain: scores of a few tenths, not of tens."""


@torch.no_grad()
def start_scaled(network: Eagle3, target: Decoder, tokens: Tensor) -> Eagle3:
    """Scale a freshly drawn `network` to the states of `target` on `tokens` [B, N], in place.

    Its final norm becomes the target's, turned down. The first token of every row is left out of
    the sizes: many targets keep huge states there.

    Raises:
        ValueError: for rows of fewer than 2 tokens; nothing is changed.
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens: expected [B, N] with N >= 2, got {list(tokens.shape)}")
    hidden = target(tokens, taps=network.taps, logits=False).hidden
    width = network.config.hidden_size
    for i, tap in enumerate(network.taps):
        size = hidden[tap][:, 1:].square().mean().sqrt()
        network.fc.weight[:, i * width : (i + 1) * width].div_(size)
    network.norm.weight.copy_(QUIET * target.norm.gain)
    return network
