"""Small random targets to prove a drafter on: a dense one, and one whose state must roll back."""

from __future__ import annotations

import torch

from ..models import QwenMoe, QwenMoeConfig, Transformer, TransformerConfig
from ..models.delta_net import GatedDeltaNet
from ..models.layers import CentredRMSNorm
from ..models.qwen_moe import FULL, LINEAR


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


def small_hybrid(
    seed: int,
    vocab_size: int = 11,
    n_layers: int = 4,
    n_experts: int = 4,
    sharpness: float = 2.0,
    layer_types: tuple[str, ...] | None = None,
) -> QwenMoe:
    """A random float64 target of Gated DeltaNet, gated attention and 2 of `n_experts` (0: dense).

    Every fourth block attends, from the second on; else as `layer_types` say. Of the four value
    heads one hardly fades, one fades within a token (g about -10, now and then -30). Gains and
    convolutions are drawn, too, so that a part that is left out shows.
    """
    kinds = layer_types or tuple(FULL if i % 4 == 1 else LINEAR for i in range(n_layers))
    config = QwenMoeConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
        num_experts=n_experts,
        num_experts_per_tok=2 if n_experts else 1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        intermediate_size=32,
        layer_types=kinds,
        rope_theta=100.0,
        partial_rotary_factor=0.5,
        max_position_embeddings=256,
    )
    generator = torch.Generator().manual_seed(seed)
    model = QwenMoe(config).double().reset_parameters(generator)
    with torch.no_grad():
        model.head.weight *= sharpness
        for module in model.modules():
            if isinstance(module, CentredRMSNorm):
                module.weight.uniform_(-0.3, 0.3, generator=generator)
            if isinstance(module, GatedDeltaNet):
                module.convolution.normal_(0.0, 0.7, generator=generator)
                module.norm.weight.uniform_(0.7, 1.3, generator=generator)
                module.A_log.copy_(torch.tensor([0.1, 0.6, 3.0, 15.0]).log())
                module.dt_bias.uniform_(-1.0, 0.0, generator=generator)
    return model.eval().requires_grad_(False)
