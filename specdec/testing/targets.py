"""Small random targets to prove a drafter on."""

from __future__ import annotations

import torch

from ..models import Transformer, TransformerConfig


def small_target(
    seed: int, vocab_size: int = 11, n_layers: int = 2, n_kv_heads: int = 2, sharpness: float = 2.0
) -> Transformer:
    """A random float64 target; `sharpness` scales its logits, so that drafts can be right."""
    config = TransformerConfig(
        vocab_size,
        16,
        32,
        n_layers,
        4,
        n_kv_heads,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    model = Transformer(config).double().reset_parameters(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.head.weight *= sharpness
    return model.eval().requires_grad_(False)
