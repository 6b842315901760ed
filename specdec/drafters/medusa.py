"""Medusa: a few extra heads on the target's last hidden state draft several tokens at once.

Cai et al. (arXiv:2401.10774). The state h_t that predicted the root x_{t+1} also feeds head k =
1, 2, ..., which guesses x_{t+1+k}: a node at depth k. The heads do not see each other's guesses,
so their candidates are combined into a tree of fixed shape, verified in one pass::

    logits_k = W_k (h + SiLU(V_k h + b_k))      at first V_k, b_k = 0 and W_k = the target's

Medusa-1 trains the heads on a frozen target (`medusa_loss`), Medusa-2 both (`medusa2_loss`). The
paper's typical acceptance is the rule `specdec.Typical`; under every other rule nothing is lost.

Where we differ: candidates go through the run's rule, so that under `Coupled` they see its noise,
and under `Rejection` they can be drawn from the heads' laws as well as chosen (`draw`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..accept import take
from ..distill import distillation_loss
from ..draft import Draft
from ..protocol import FINAL, Context, Model
from ..trees import MC_SIM_7B_63
from .static_draft import StaticDraft, tree_for


class MedusaHead(nn.Module):
    """One head: a residual block that starts as the identity, then a head of its own."""

    def __init__(self, hidden_size: int, vocab_size: int, bias: bool) -> None:
        super().__init__()
        self.block = nn.Linear(hidden_size, hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=bias)
        nn.init.zeros_(self.block.weight)
        nn.init.zeros_(self.block.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.head.weight.dtype)
        return self.head(hidden + F.silu(self.block(hidden)))  # section 2.1.1, arXiv:2401.10774


class MedusaHeads(nn.Module):
    """`n_heads` heads on the state after the final norm; head k predicts k tokens past the root.

    Called with `hidden` [..., D] it returns logits [..., n_heads, V]. The heads compute in their
    own dtype, whatever the target's. Raises ValueError for sizes below 1.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, n_heads: int = 4, *, bias: bool = False
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "n_heads": n_heads}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.hidden_size, self.vocab_size, self.n_heads = hidden_size, vocab_size, n_heads
        self.heads = nn.ModuleList(
            MedusaHead(hidden_size, vocab_size, bias) for _ in range(n_heads)
        )

    @staticmethod
    @torch.no_grad()
    def for_target(target: Model, n_heads: int = 4) -> MedusaHeads:
        """Heads that all say what the target's own head says, to be trained from there.

        They hold copies: trainable though the target be frozen, in its dtype and on its device.

        Raises:
            ValueError: for `n_heads` below 1, or a target whose head is no `nn.Linear`.
        """
        own = target.head
        if not isinstance(own, nn.Linear):
            raise ValueError(
                f"target: expected a head that is an nn.Linear to copy, got {type(own).__name__}"
            )
        heads = MedusaHeads(
            own.in_features, own.out_features, n_heads, bias=own.bias is not None
        ).to(own.weight)
        for head in heads.heads:
            head.get_submodule("head").load_state_dict(own.state_dict())
        return heads

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack([head(hidden) for head in self.heads], dim=-2)

    @property
    def n_depths(self) -> int:
        """How deep they can draft: one head a depth."""
        return self.n_heads

    def check_fits(self, target: Model) -> None:
        """Raise a ValueError if the target has another width or vocabulary."""
        for name in ("hidden_size", "vocab_size"):
            own, wanted = getattr(self, name), getattr(target, name)
            if own != wanted:
                raise ValueError(f"heads: expected the target's {name} of {wanted}, got {own}")

    def logits_by_depth(self, target: Model, tokens: Tensor) -> Iterator[Tensor]:
        """`tokens` [B, T] -> [B, T, V] of head k = 1, 2, ...; place t predicts x_{t+1+k}."""
        hidden = target(tokens, taps=(FINAL,), logits=False).hidden[FINAL]
        return (head(hidden) for head in self.heads)


def medusa_loss(
    heads: MedusaHeads,
    hidden: Tensor,
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    decay: float = 0.8,
    target_logits: Tensor | None = None,
    hard_weight: float = 1.0,
) -> Tensor:
    """Medusa-1: sum over k of decay^k times the loss of head k, a scalar (Eq. 1).

    Head k at position t is held against x_{t+1+k}: the mean over positions of hard_weight * cross
    entropy + (1 - hard_weight) * KL(p || q), p the target's own law of that token, from t + k.

    Args:
        heads: the heads to train.
        hidden: [B, T, D], the target's states after its final norm (tap FINAL).
        tokens: [B, T] int64, what the target read.
        mask: [B, T] bool, True where a *token* counts as one to predict: False for padding, and
            for prompts if only answers are to be learned. None: all.
        decay: positive.
        target_logits: [B, T, V] of the frozen target at the same positions; needed if
            `hard_weight` < 1, not read otherwise. No gradient reaches it.
        hard_weight: in [0, 1].

    Raises:
        ValueError: for shapes that differ, T below n_heads + 2, a `decay` or `hard_weight` out of
            range, `target_logits` missing, or a mask that leaves a head nothing to predict.
    """
    _check_batch(heads, hidden, tokens, mask)
    if not decay > 0:
        raise ValueError(f"decay: expected a positive number, got {decay}")
    if not 0 <= hard_weight <= 1:
        raise ValueError(f"hard_weight: expected a share in [0, 1], got {hard_weight}")
    wanted = (*tokens.shape, heads.vocab_size)
    if hard_weight < 1 and (target_logits is None or target_logits.shape != wanted):
        got = None if target_logits is None else list(target_logits.shape)
        raise ValueError(f"target_logits: expected shape {list(wanted)}, got {got}")
    counts = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    losses = []
    for k, head in enumerate(heads.heads, start=1):
        valid = counts[:, 1 + k :]
        if not bool(valid.any()):
            raise ValueError(f"mask: expected a token that head {k} predicts, got none")
        logits, labels = head(hidden[:, : -1 - k][valid]), tokens[:, 1 + k :][valid]  # [M, V], [M]
        if hard_weight == 1 or target_logits is None:
            losses.append(_cross_entropy(logits, labels))
        else:
            p = target_logits[:, k:-1][valid]
            losses.append(distillation_loss(logits, p, labels=labels, hard_weight=hard_weight))
    return torch.stack([decay**k * loss for k, loss in enumerate(losses, start=1)]).sum()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def medusa2_loss(
    target: Model,
    heads: MedusaHeads,
    tokens: Tensor,
    lambda_0: float,
    *,
    mask: Tensor | None = None,
    original_logits: Tensor | None = None,
    decay: float = 0.8,
) -> Tensor:
    """Medusa-2: the target's own loss + lambda_0 * `medusa_loss`, trained together (Eq. 2).

    Args:
        target: in training; the heads' gradients reach it through its states.
        heads, mask, decay: as in `medusa_loss`.
        tokens: [B, T] int64.
        lambda_0: weight of the heads; see `medusa2_weight`.
        original_logits: [B, T, V] of the target before this training. If given, the target's own
            loss is KL(original || target) instead of the cross entropy of `tokens`, so that its
            output stays what it was (self-distillation, section 2.3.2).

    Raises:
        ValueError: for a negative `lambda_0`, or what `medusa_loss` refuses.
    """
    if not 0 <= lambda_0 < math.inf:
        raise ValueError(f"lambda_0: expected a number >= 0, got {lambda_0}")
    output = target(tokens, taps=(FINAL,))
    assert output.logits is not None
    weighted = lambda_0 * medusa_loss(heads, output.hidden[FINAL], tokens, mask=mask, decay=decay)
    valid = torch.ones_like(tokens[:, 1:], dtype=torch.bool) if mask is None else mask[:, 1:]
    logits = output.logits[:, :-1][valid]  # [M, V]
    if original_logits is None:
        return _cross_entropy(logits, tokens[:, 1:][valid]) + weighted
    if original_logits.shape != output.logits.shape:
        raise ValueError(
            f"original_logits: expected shape {list(output.logits.shape)}, "
            f"got {list(original_logits.shape)}"
        )
    return distillation_loss(logits, original_logits[:, :-1][valid]) + weighted


def medusa2_weight(step: int, n_warmup: int, peak: float = 0.2) -> float:
    """lambda_0 at `step`: a quarter of a sine up to `peak`, reached after `n_warmup` steps.

    At first the heads are far off, and their large gradients would bend the target (section
    2.2.2). The other remedy there, training the heads alone for a while, is `medusa_loss`.

    Raises:
        ValueError: for a negative step, or a negative `n_warmup` or `peak`.
    """
    for name, value in (("step", step), ("n_warmup", n_warmup), ("peak", peak)):
        if value < 0:
            raise ValueError(f"{name}: expected at least 0, got {value}")
    if step + 1 >= n_warmup:
        return peak
    return peak * math.sin(math.pi / 2 * (step + 1) / n_warmup)


def medusa2_parameter_groups(
    target: nn.Module, heads: nn.Module, lr: float, head_lr_multiplier: float = 4.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer: the target at `lr`, the heads at `head_lr_multiplier` times that.

    Section 2.2.2: the heads start from nothing and may move faster.

    Raises:
        ValueError: for rates that are not positive, or where one of the two has nothing to train.
    """
    if not (lr > 0 and head_lr_multiplier > 0):
        raise ValueError(
            f"lr, head_lr_multiplier: expected positive numbers, got {lr}, {head_lr_multiplier}"
        )
    parts = {"target": target, "heads": heads}
    trained = {
        name: [p for p in module.parameters() if p.requires_grad] for name, module in parts.items()
    }
    for name, parameters in trained.items():
        if not parameters:
            raise ValueError(f"{name}: expected parameters that require gradients, got none")
    return [
        {"params": trained["target"], "lr": lr},
        {"params": trained["heads"], "lr": lr * head_lr_multiplier},
    ]


class Medusa:
    """Drafts a static tree of the heads' candidates.

    Args:
        heads: the trained heads.
        choices: the tree's rank paths; see `specdec.trees`. Its depth is at most `heads.n_heads`.
            By default the published tree of 63 nodes, which wants four heads.
        draw: under `Rejection`, draw the candidates of a depth (without replacement) and declare
            their law q; False chooses the likeliest instead, a one-hot q. Other rules choose.

    Raises:
        ValueError: for a tree that is none, too deep for the heads or too wide for the vocabulary;
            with `draw`, one whose siblings leave out a rank; at `begin`, for a target of another
            width or vocabulary.
    """

    taps = (FINAL,)

    def __init__(
        self,
        heads: MedusaHeads,
        choices: Sequence[Sequence[int]] = MC_SIM_7B_63,
        *,
        draw: bool = False,
    ) -> None:
        tree = tree_for(choices, heads.n_depths, heads.vocab_size, draw=draw)
        self.heads, self.tree, self.draw = heads, tree, draw

    def begin(self, target: Model, batch_size: int, max_length: int) -> MedusaState:
        self.heads.check_fits(target)
        return MedusaState(self, target.device)


class MedusaState:
    """One run: the tree on the target's device. Nothing is carried from round to round."""

    def __init__(self, config: Medusa, device: torch.device) -> None:
        self.heads = config.heads.heads
        self.static = StaticDraft(config.tree, device, draw=config.draw)

    def propose(self, context: Context) -> Draft:
        states = context.hidden[FINAL]
        if not context.max_depth or not states.shape[1]:
            return Draft.empty(len(context.lengths), context.tokens.device)
        root_state = take(states, (context.n_new - 1).clamp(min=0)).unsqueeze(1)  # [B, 1, D]
        return self.static.fill(context, lambda depth: self.heads[depth](root_state))


def _check_batch(heads: MedusaHeads, hidden: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
    if tokens.ndim != 2 or tokens.dtype != torch.long or tokens.shape[1] < heads.n_heads + 2:
        raise ValueError(
            f"tokens: expected int64 of shape [B, T] with T >= {heads.n_heads + 2} for "
            f"{heads.n_heads} heads, got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if hidden.shape != (*tokens.shape, heads.hidden_size):
        raise ValueError(
            f"hidden: expected shape {[*tokens.shape, heads.hidden_size]}, got {list(hidden.shape)}"
        )
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {list(tokens.shape)}, got {mask.dtype} of shape "
            f"{list(mask.shape)}"
        )
