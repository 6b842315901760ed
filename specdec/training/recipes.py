"""What is trained how: one recipe a drafter, all for the one loop in `fit`.

A recipe reads a frozen target's hidden states and the tokens they belong to. Where those come from
(the target run on the fly, or a cache on disk) and how steps are made is not its business.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoints import (
    load_modules,
    save_dflash,
    save_eagle,
    save_medusa,
    save_mtp,
    save_transformer,
)
from ..distill import (
    Divergence,
    acceptance_mix,
    distillation_loss,
    forward_kl,
    reverse_kl,
    total_variation,
)
from ..drafters import DraftModel, Eagle, Eagle1, Eagle3, Medusa, MedusaHeads, MTPHeads, MTPModules
from ..drafters.dflash import DFlashNetwork, dflash_taps, sights_of
from ..drafters.dflash2 import DFlash2
from ..drafters.dflash_draft import DFlash
from ..drafters.dflash_loss import dflash_loss
from ..drafters.eagle import eagle1_loss, eagle3_loss, eagle3_taps
from ..drafters.layerskip import (
    block_states,
    draw_kept,
    exit_loss,
    exit_loss_weights,
    layer_dropout_rates,
)
from ..drafters.medusa import medusa_loss
from ..drafters.mtp import SequentialModules, mtp_loss, resized
from ..drafters.mtp_heads import ParallelHeads, parallel_backward
from ..drafters.reduced_head import frequent_tokens
from ..drafters.static_draft import rank_accuracies
from ..generate import generate
from ..models import QwenMoe, Transformer, TransformerConfig
from ..protocol import FINAL, Drafter
from ..trees import search_choices
from .corpus import Corpus, Text
from .distributed import ALONE, Ranks
from .hybrid import dense_shape
from .start import start_scaled

Hidden = Mapping[int, Tensor]
Target = Transformer | QwenMoe


@dataclass(frozen=True)
class Recipe:
    """How one drafter learns from the target's states."""

    network: nn.Module
    taps: tuple[int, ...]
    """The target's states that `loss` reads."""
    loss: Callable[[Hidden, Tensor, Tensor | None, torch.Generator], Tensor]
    """Of hidden, tokens [B, T], the mask [B, T] of those that count or None, and what to draw noise
    from, seeded anew in every step."""
    drafter: Drafter
    """A chain of the network, to select it by."""
    save: Callable[..., None]
    finish: Callable[[], dict[str, object]] = dict
    """What else its card says once it is trained."""


def new_target(arguments: argparse.Namespace) -> tuple[Transformer, SequentialModules]:
    """A fresh target of the shape asked for, and one MTP module for it."""
    config = TransformerConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    target = Transformer(config).reset_parameters(torch.Generator().manual_seed(arguments.seed))
    module = SequentialModules(
        dataclasses.replace(config, num_hidden_layers=1), tap=config.num_hidden_layers
    ).reset_parameters(torch.Generator().manual_seed(arguments.seed + 1))
    return target, module


def target_loss(
    target: Transformer,
    mtp: SequentialModules,
    corpus: Corpus,
    arguments: argparse.Namespace,
    ranks: Ranks = ALONE,
) -> Callable[[int], Tensor]:
    """The loss of a step: next byte at every exit under layer dropout, and that of the MTP module.

    The first 7 of 10 steps read windows half as long and twice as many: attention costs less there.
    The weight of the MTP loss falls to a third in the last third, as DeepSeek-V3's does.
    """
    n_layers = target.n_layers
    weights = exit_loss_weights(n_layers, arguments.exit_scale, linear=True)
    rates = layer_dropout_rates(n_layers, arguments.layer_dropout, linear=True)

    def loss_of(step: int) -> Tensor:
        batch, length = arguments.batch, arguments.length
        if step < 0.7 * arguments.steps:
            batch, length = 2 * batch, length // 2
        tokens = ranks.share(corpus.batch(step, batch, length, arguments.seed))
        drawn = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step)
        kept = ranks.share(draw_kept(rates, batch, drawn), dim=1)
        hidden = block_states(target, tokens[:, :-1], kept)
        loss = exit_loss(target, hidden, tokens[:, 1:], weights)
        if not arguments.mtp_weight:
            return loss
        weight = arguments.mtp_weight * (1.0 if step < 2 / 3 * arguments.steps else 1 / 3)
        return loss + mtp_loss(mtp, target, hidden, tokens[:, :-1], weight=weight)

    return loss_of


def draft(target: Target, arguments: argparse.Namespace, text: Text) -> Recipe:
    """A draft model distilled from the target: forward KL of its whole law at every place."""
    width = arguments.width
    config = dataclasses.replace(
        dense_shape(target.config, arguments.layers),
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
    )
    model = Transformer(config).reset_parameters(seeded(arguments))

    def loss(hidden: Hidden, tokens: Tensor, mask: Tensor | None, _: torch.Generator) -> Tensor:
        with torch.no_grad():
            p = target.head(hidden[FINAL])
        q = model(tokens).logits
        assert q is not None
        if mask is None:
            return distillation_loss(q, p)
        return distillation_loss(q[:, :-1], p[:, :-1], mask=mask[:, 1:])  # place t tells t + 1

    return Recipe(model, (FINAL,), loss, DraftModel(model, n_drafts=4), save_transformer)


def medusa(target: Target, arguments: argparse.Namespace, text: Text) -> Recipe:
    """Medusa-1: the heads on a frozen target."""
    heads = MedusaHeads.for_target(target, n_heads=4)

    def loss(hidden: Hidden, tokens: Tensor, mask: Tensor | None, _: torch.Generator) -> Tensor:
        return medusa_loss(heads, hidden[FINAL], tokens, mask=mask)

    chain = Medusa(heads, [[0] * depth for depth in range(1, 5)])
    return Recipe(
        heads, chain.taps, loss, chain, save_medusa, searched(target, heads, text, arguments.length)
    )


def eagle1(target: Target, arguments: argparse.Namespace, text: Text) -> Recipe:
    """EAGLE-1: features and soft labels, with the paper's noise on the features."""
    network = Eagle1(dense_shape(target.config, 1)).reset_parameters(seeded(arguments))

    def loss(hidden: Hidden, tokens: Tensor, mask: Tensor | None, drawn: torch.Generator) -> Tensor:
        return eagle1_loss(network, target, hidden, tokens, mask=mask, noise=0.1, generator=drawn)

    return Recipe(network, network.taps, loss, Eagle(network, n_drafts=4), save_eagle)


def eagle3(target: Target, arguments: argparse.Namespace, text: Text) -> Recipe:
    """EAGLE-3: three taps, training-time test over as many steps as are drafted.

    With `--vocabulary K` it drafts the K most frequent tokens of the text only.
    """
    taps = arguments.taps or eagle3_taps(target.n_layers)
    draft_ids = None
    if arguments.vocabulary:
        tokens = torch.from_numpy(text.train.astype(np.int64))
        draft_ids = frequent_tokens(tokens, target.vocab_size, arguments.vocabulary)
    network = Eagle3(dense_shape(target.config, 1), taps, draft_ids)
    network.reset_parameters(seeded(arguments)).copy_head(target)
    if arguments.start == "scaled":
        tokens = text.batch(0, 1, arguments.length, arguments.seed)
        start_scaled(network, target, tokens.to(target.device))
    weights = tuple(0.8**step for step in range(arguments.unroll))

    def loss(hidden: Hidden, tokens: Tensor, mask: Tensor | None, _: torch.Generator) -> Tensor:
        return eagle3_loss(network, target, hidden, tokens, mask=mask, step_weights=weights)

    taps = (*network.taps, FINAL)
    return Recipe(network, taps, loss, Eagle(network, n_drafts=4), save_eagle)


def heads(target: Target, arguments: argparse.Namespace, text: Text) -> Recipe:
    """Parallel heads on the target's trunk, started as copies of its last block."""
    trunk = cast(Transformer, target)  # for_target refuses another
    network = ParallelHeads.for_target(trunk, n_heads=4)

    def loss(hidden: Hidden, tokens: Tensor, mask: Tensor | None, _: torch.Generator) -> Tensor:
        return parallel_backward(network, trunk, hidden, tokens, mask=mask, head_1=False)

    drafter = MTPHeads(network)
    return Recipe(
        network,
        (network.tap,),
        loss,
        drafter,
        save_mtp,
        searched(target, network, text, arguments.length),
    )


def mtp(target: Target, arguments: argparse.Namespace, text: Text) -> Recipe:
    """MiMo's recipe: the module trained with the target, copied; the copies learn, it does not."""
    first = load_modules(arguments.module, target)
    network = resized(first, arguments.modules)
    network.blocks[0].requires_grad_(False)

    def loss(hidden: Hidden, tokens: Tensor, mask: Tensor | None, _: torch.Generator) -> Tensor:
        return mtp_loss(network, target, hidden, tokens, weight=1.0, mask=mask, first=2)

    return Recipe(
        network, (network.tap,), loss, MTPModules(network, n_drafts=arguments.modules), save_mtp
    )


DIVERGENCES: dict[str, Divergence | None] = {
    "ce": None,
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "mix": acceptance_mix,
}


def dflash(target: Target, arguments: argparse.Namespace, text: Text) -> Recipe:
    """DFlash: random blocks behind the target's states, all slots in one pass."""
    config = dense_shape(target.config, arguments.layers)
    config = dataclasses.replace(
        config,
        qk_norm=True,
        tie_word_embeddings=False,
        intermediate_size=arguments.inner or config.intermediate_size,
    )
    network = DFlashNetwork(
        config,
        arguments.taps or dflash_taps(target.n_layers, 5),
        mask_token=target.vocab_size - 1 if arguments.mask_token is None else arguments.mask_token,
        block_size=arguments.block,
        sights=sights_of(arguments.sight, arguments.layers, arguments.window),
        inject=not arguments.at_input,
        dflash2=DFlash2() if arguments.dflash2 else None,
    ).reset_parameters(seeded(arguments))
    with torch.no_grad():
        network.norm.weight.copy_(target.norm.gain)  # the scale the target's head expects

    def loss(hidden: Hidden, tokens: Tensor, mask: Tensor | None, drawn: torch.Generator) -> Tensor:
        return dflash_loss(
            network,
            target,
            hidden,
            tokens,
            drawn,
            mask=mask,
            n_blocks=arguments.blocks,
            divergence=DIVERGENCES[arguments.loss],
            decay=arguments.decay,
            dpace=arguments.dpace,
            corruption=arguments.corruption,
        )

    taps = tuple(dict.fromkeys((*network.taps, FINAL)))
    save = functools.partial(save_dflash, n_target_layers=target.n_layers)
    return Recipe(network, taps, loss, DFlash(network), save)


RECIPES = {
    "draft": draft,
    "medusa": medusa,
    "eagle1": eagle1,
    "eagle3": eagle3,
    "heads": heads,
    "mtp": mtp,
    "dflash": dflash,
}
"""The commands of `python -m specdec.training` besides `target`."""


def searched(
    target: Target, heads: MedusaHeads | ParallelHeads, text: Text, length: int, n_nodes: int = 20
) -> Callable[[], dict[str, object]]:
    """The best tree of `n_nodes` by how often each rank is right on what the target writes."""

    def finish() -> dict[str, object]:
        prompts = list(text.batch(0, 32, min(127, length), seed=1))
        written = generate(target, prompts, max_new_tokens=128).new_tokens
        table = rank_accuracies(target, heads, written)
        return {"choices": search_choices(table.tolist(), n_nodes)}

    return finish


def seeded(arguments: argparse.Namespace) -> torch.Generator:
    return torch.Generator().manual_seed(arguments.seed)
