"""A hybrid target with routed experts, trained from nothing: next byte, balance, an MTP module.

The experts are kept busy by the balancing loss of Switch Transformers (arXiv:2101.03961), with its
weight of 0.01. Unlike the dense target of `recipes.target_loss` this one has no early exits, and
all steps read windows of one length.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..drafters.mtp import SequentialModules, mtp_loss
from ..models import QwenMoe, QwenMoeConfig, TransformerConfig
from ..models.routing import load_balancing_loss, recorded
from .corpus import Corpus
from .distributed import ALONE, Ranks

BALANCE = 0.01


def new_hybrid(arguments: argparse.Namespace) -> tuple[QwenMoe, SequentialModules]:
    """A fresh hybrid of the shape asked for, and one MTP module for it, a dense block."""
    config = QwenMoeConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        moe_intermediate_size=arguments.inner,
        shared_expert_intermediate_size=arguments.shared_inner,
        rope_theta=10_000.0,
        partial_rotary_factor=0.5,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(arguments.seed)
    target = QwenMoe(config).reset_parameters(generator)
    module = SequentialModules(dense_shape(config, 1), tap=config.num_hidden_layers)
    return target, module.reset_parameters(torch.Generator().manual_seed(arguments.seed + 1))


def dense_shape(config: TransformerConfig | QwenMoeConfig, n_layers: int) -> TransformerConfig:
    """Dense blocks of a target's width, heads and vocabulary: what drafters for it are made of."""
    if isinstance(config, TransformerConfig):
        return replace(config, num_hidden_layers=n_layers)
    inner = 9 * config.hidden_size // 4  # that of the embedded dense target
    return replace(config.dense(), num_hidden_layers=n_layers, intermediate_size=inner)


def hybrid_loss(
    target: QwenMoe,
    mtp: SequentialModules,
    corpus: Corpus,
    arguments: argparse.Namespace,
    ranks: Ranks = ALONE,
) -> Callable[[int], Tensor]:
    """The loss of a step: next byte, balance of the experts, and that of the MTP module.

    The weight of the MTP loss falls to a third in the last third, as DeepSeek-V3's does.
    """
    last = target.n_layers

    def loss_of(step: int) -> Tensor:
        tokens = ranks.share(corpus.batch(step, arguments.batch, arguments.length, arguments.seed))
        with recorded(target) as routes:
            output = target(tokens[:, :-1], taps=(last,))
        assert output.logits is not None
        loss = F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss = loss + BALANCE * load_balancing_loss(routes)
        if not arguments.mtp_weight:
            return loss
        weight = arguments.mtp_weight * (1.0 if step < 2 / 3 * arguments.steps else 1 / 3)
        return loss + mtp_loss(mtp, target, output.hidden, tokens[:, :-1], weight=weight)

    return loss_of
