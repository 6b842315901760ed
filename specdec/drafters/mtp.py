"""Multi-token prediction with sequential modules, as DeepSeek-V3 trains them into the target.

DeepSeek-AI (arXiv:2412.19437, section 2.2). Module k reads the states h^{k-1} of the depth above it
(the target's own for k = 1) and the embedding of the token k places ahead, and predicts the token
behind that one through the target's head::

    h'^k_i = M_k [RMSNorm(h^{k-1}_i) ; RMSNorm(Emb(x_{i+k}))]     h^k = Block_k(h'^k)
    q_{i+k+1} = head(norm(h^k_i))

so that every draft depends on the tokens before it. Trained together with the target, the modules
add lambda / D times the sum of their losses (`mtp_loss`); dropped, they leave the target as it is.

Published weights differ in two things, which a `SequentialModules` declares: whether the states it
reads and hands on are those before the final norm (`tap` L, as in the paper) or behind it (FINAL),
and whether that norm is the target's or the module's own (`own_norm`). The blocks are dense, or the
attending ones of Qwen's hybrids, with their norms; `checkpoints.load_qwen_mtp` reads those.

MiMo (arXiv:2505.07608) trains one module with the target, copies it (`resized`) and
fine-tunes the copies with the rest frozen (`mtp_loss(..., first=2)`). `mtp_draft.py` drafts.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVStore, View
from ..models import QwenMoeConfig, TransformerConfig
from ..models.layers import Block, CentredRMSNorm, RMSNorm, rotary_angles
from ..models.qwen_moe import FULL, hybrid_block
from ..models.transformer import block_of, draw_weights
from ..protocol import FINAL, Model

Shape: TypeAlias = TransformerConfig | QwenMoeConfig
"""Of a module's block."""


def attention_shape(shape: Shape) -> TransformerConfig:
    """The vocabulary, width and heads of `shape`: all that drafting needs to know of a block."""
    return shape if isinstance(shape, TransformerConfig) else shape.dense()


def attending_block(shape: Shape) -> Block:
    """A decoder block of this shape that attends."""
    return block_of(shape) if isinstance(shape, TransformerConfig) else hybrid_block(shape, FULL)


class MTPModule(nn.Module):
    """One module: two norms, M_k (2 D -> D), a decoder block, perhaps a final norm of its own."""

    def __init__(self, shape: Shape, *, own_norm: bool) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        norm = RMSNorm if isinstance(shape, TransformerConfig) else CentredRMSNorm
        self.norm_hidden, self.norm_embedding = norm(width, eps), norm(width, eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.block = attending_block(shape)
        self.norm = norm(width, eps) if own_norm else None

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        rotary: tuple[Tensor, Tensor],
        store: KVStore | None = None,
        layer: int = 0,
        view: View | None = None,
    ) -> Tensor:
        """h^{k-1}_i and Emb(x_{i+k}), each [B, N, D] -> the residual stream h^k_i [B, N, D]."""
        both = torch.cat([self.norm_hidden(hidden), self.norm_embedding(embeddings)], dim=-1)
        return self.block(self.projection(both), rotary, store, layer, view)


class SequentialModules(nn.Module):
    """D modules; `shape.num_hidden_layers` is D, width and vocabulary are the target's.

    Args:
        shape: of the modules' blocks; those of a `QwenMoeConfig` all attend.
        tap: the target's states that module 1 reads: its number of blocks L, or FINAL. Modules hand
            on what corresponds: the residual stream, or what their final norm makes of it.
        own_norm: whether every module has a final norm of its own; otherwise it is the target's.

    Raises:
        ValueError: for a tap that is neither FINAL nor at least 1, or blocks that do not attend.
    """

    def __init__(self, shape: Shape, *, tap: int, own_norm: bool = False) -> None:
        super().__init__()
        if tap != FINAL and tap < 1:
            raise ValueError(f"tap: expected the target's number of blocks or FINAL, got {tap}")
        if isinstance(shape, QwenMoeConfig) and {*shape.kinds} != {FULL}:
            raise ValueError(
                f"shape: expected layer_types of {FULL!r} alone, got {list(shape.kinds)}; see "
                f"of_depth"
            )
        self.shape, self.config, self.tap = shape, attention_shape(shape), tap
        self.blocks = nn.ModuleList(
            MTPModule(shape, own_norm=own_norm) for _ in range(shape.num_hidden_layers)
        )

    @property
    def n_modules(self) -> int:
        return len(self.blocks)

    def reset_parameters(self, generator: torch.Generator | None = None) -> SequentialModules:
        """Draw fresh weights as in a target of one block."""
        draw_weights(self, 1, generator)
        for module in self.modules():
            if isinstance(module, CentredRMSNorm):
                nn.init.zeros_(module.weight)
        return self

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Angles of positions [B or 1, N] as the blocks turn them, in the dtype of `like`.

        Cosines and signed sines, [B or 1, N, 1, d], d the dimensions of a head that are turned.
        """
        shape = self.shape
        n_turned = shape.rotary_dim if isinstance(shape, QwenMoeConfig) else shape.head_size
        cos, sin = rotary_angles(positions, n_turned, shape.rope_theta, like.dtype).unbind(2)
        return cos, sin

    def step(
        self,
        k: int,
        target: Model,
        hidden: Tensor,
        embeddings: Tensor,
        rotary: tuple[Tensor, Tensor],
        store: KVStore | None = None,
        view: View | None = None,
    ) -> Tensor:
        """Module k (1..D): h^{k-1}_i and Emb(x_{i+k}) -> what it hands on to module k + 1.

        All [B, N, D]: the residual stream h^k_i, or behind the final norm if `tap` is FINAL.
        """
        if view is not None and isinstance(self.shape, QwenMoeConfig):
            rotary = self.angles(view.positions, hidden)  # a cache's table turns whole heads
        stream = self.blocks[k - 1](hidden, embeddings, rotary, store, 0, view)
        return self._norm(k, target)(stream) if self.tap == FINAL else stream

    def logits(self, k: int, handed: Tensor, target: Model) -> Tensor:
        """What module k predicts, [B, N, V], from what it hands on [B, N, D]."""
        return target.head(handed if self.tap == FINAL else self._norm(k, target)(handed))

    def _norm(self, k: int, target: Model) -> Callable[[Tensor], Tensor]:
        own = cast(MTPModule, self.blocks[k - 1]).norm
        return target.norm if own is None else own

    def forward(
        self, hidden: Tensor, tokens: Tensor, target: Model, *, first: int = 1
    ) -> list[Tensor]:
        """Training: states [B, T, D] of `tokens` [B, T] -> logits of the modules `first`..D.

        Those of module k are [B, T - k, V]; place i predicts token i + k + 1. Modules before
        `first` only hand on: nothing of theirs, and no state that they read, gets a gradient.
        """
        embeddings, logits = target.embedding(tokens), []
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        cos, sin = self.angles(positions, hidden)
        for k in range(1, self.n_modules + 1):
            n = tokens.shape[1] - k
            with torch.set_grad_enabled(torch.is_grad_enabled() and k >= first):
                hidden = self.step(
                    k, target, hidden[:, :n], embeddings[:, k:], (cos[:, :n], sin[:, :n])
                )
            if k >= first:
                logits.append(self.logits(k, hidden, target))
        return logits


def of_depth(shape: Shape, n_modules: int) -> Shape:
    """`shape` for `n_modules` blocks that attend: what `SequentialModules` takes."""
    if isinstance(shape, TransformerConfig):
        return dataclasses.replace(shape, num_hidden_layers=n_modules)
    kinds = (FULL,) * n_modules
    return dataclasses.replace(shape, num_hidden_layers=n_modules, layer_types=kinds)


def resized(network: SequentialModules, n_modules: int) -> SequentialModules:
    """`n_modules` modules with the weights of `network`'s; those beyond are copies of its last.

    The start of MiMo's recipe (arXiv:2505.07608): one module, copied, whose copies are fine-tuned
    at their depths. Nothing is shared with `network`; whatever was frozen there, copies train.

    Raises:
        ValueError: for fewer than one module.
    """
    if n_modules < 1:
        raise ValueError(f"n_modules: expected at least 1, got {n_modules}")
    last, first = network.blocks[-1], network.blocks[:n_modules]
    copies = [copy.deepcopy(last).requires_grad_(True) for _ in range(n_modules - len(first))]
    new = SequentialModules(of_depth(network.shape, n_modules), tap=network.tap)
    new.blocks = nn.ModuleList([*copy.deepcopy(first), *copies])
    return new.train(network.training)


def mtp_loss(
    network: SequentialModules,
    target: Model,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    *,
    weight: float = 0.3,
    mask: Tensor | None = None,
    first: int = 1,
) -> Tensor:
    """weight / D times the sum over the modules of their mean cross-entropy, Eq. 24-25.

    Added to the target's next-token loss when both are trained; gradients reach the target through
    its states, embedding and head unless it is frozen. DeepSeek-V3 takes a weight of 0.3, and 0.1
    in the last third of its training.

    Args:
        network: the modules.
        target: lends its embedding, final norm and head.
        hidden: the target's states, `network.tap` -> [B, T, D].
        tokens: [B, T] int64, right-padded, T >= D + 2.
        weight: lambda, positive.
        mask: [B, T] bool, True where a *token* counts as one to predict; None: all.
        first: modules before this one are taken as they are: they neither count nor get a gradient,
            D is the number of the others. 2 fine-tunes the copies of `resized` as MiMo does.

    Returns:
        A scalar.

    Raises:
        ValueError: for shapes that differ, a missing tap, too few tokens, a weight that is not
            positive, no module to train, or a mask that leaves one nothing to predict.
    """
    n_modules, width = network.n_modules, network.config.hidden_size
    if tokens.ndim != 2 or tokens.dtype != torch.long or tokens.shape[1] < n_modules + 2:
        raise ValueError(
            f"tokens: expected int64 of shape [B, T] with T >= {n_modules + 2} for {n_modules} "
            f"module(s), got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    states = hidden.get(network.tap)
    if states is None or states.shape != (*tokens.shape, width):
        got = f"the taps {sorted(hidden)}" if states is None else list(states.shape)
        raise ValueError(
            f"hidden: expected tap {network.tap} of shape {[*tokens.shape, width]}, got {got}"
        )
    if not 0 < weight < math.inf:
        raise ValueError(f"weight: expected a positive number, got {weight}")
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {list(tokens.shape)}, got {mask.dtype} of shape "
            f"{list(mask.shape)}"
        )
    if not 1 <= first <= n_modules:
        raise ValueError(f"first: expected 1..{n_modules} (modules), got {first}")
    losses = []
    for k, logits in enumerate(network(states, tokens, target, first=first), start=first):
        labels, logits = tokens[:, k + 1 :], logits[:, :-1]
        if mask is not None:
            counts = mask[:, k + 1 :]
            if not bool(counts.any()):
                raise ValueError(f"mask: expected a token that module {k} predicts, got none")
            labels, logits = labels[counts], logits[counts]
        exact = torch.promote_types(logits.dtype, torch.float32)
        losses.append(F.cross_entropy(logits.flatten(0, -2).to(exact), labels.flatten()))
    return weight * torch.stack(losses).mean()
