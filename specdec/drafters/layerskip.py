"""LayerSkip: the target's own first blocks draft, its remaining blocks verify.

Elhoushi et al. (arXiv:2404.16710). The first E of L blocks, read through the target's final norm
and head, draft one token after another *in the target's cache*. The verification takes their
hidden states up at block E, so that no block ever sees a token twice: a round of K drafts costs
(K + 1) L passes of a token through a block, as many as K + 1 steps of plain decoding, and K E more
where the first blocks are run again (`reuse=False`).

Early exits must be trained into the target: layer dropout that grows with depth, and a loss at
every block through the one head (sections 4.1.1 and 4.1.2), with the schedules of the paper or the
linear ones of the post. `exit_acceptance` and `best_exit` say where to exit and how far to draft.

Where we differ: trees besides chains; a sequence that drops a block is not computed there; the
last block's loss is on whatever the curriculum says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distill import total_variation
from ..draft import Draft
from ..models import Transformer
from ..protocol import Context, Model
from ..speedup import best_n_drafts, expected_speedup


class LayerSkip:
    """Drafts `n_drafts` levels with the first `exit_layer` blocks of the target.

    Args:
        exit_layer: E, in 1..L-1. Any `Model` that takes `exit_layer` and `resume` will do.
        n_drafts: depth of the draft.
        branching: children per node, one number for all levels or one per level; 1 is a chain.
        reuse: verify from the states of the first E blocks. False drops them and runs every block
            again, to the same tokens: a reference.

    Raises:
        ValueError: for counts below 1; at `begin`, for an exit the target does not have, or more
            children than its vocabulary holds.
    """

    taps = ()

    def __init__(
        self,
        exit_layer: int,
        n_drafts: int = 4,
        *,
        branching: int | Sequence[int] = 1,
        reuse: bool = True,
    ) -> None:
        for name, value in (("exit_layer", exit_layer), ("n_drafts", n_drafts)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        widths = [branching] * n_drafts if isinstance(branching, int) else list(branching)
        if len(widths) != n_drafts or min(widths) < 1:
            raise ValueError(
                f"branching: expected numbers of at least 1, one or {n_drafts}, got {branching}"
            )
        self.exit_layer, self.widths, self.reuse = exit_layer, widths, reuse

    def begin(self, target: Model, batch_size: int, max_length: int) -> LayerSkipState:
        _check_exit(self.exit_layer, target.n_layers)
        if max(self.widths) > target.vocab_size:
            raise ValueError(
                f"branching: expected at most the target's vocabulary of {target.vocab_size}, "
                f"got {max(self.widths)}"
            )
        return LayerSkipState(self, target)


class LayerSkipState:
    """Nothing but the target: what a round leaves behind is in the target's cache."""

    def __init__(self, config: LayerSkip, target: Model) -> None:
        self.config, self.target = config, target

    def propose(self, context: Context) -> Draft:
        exit_layer, widths = self.config.exit_layer, self.config.widths[: context.max_depth]
        device = context.tokens.device
        if not widths:
            return Draft.empty(len(context.lengths), device)
        level = context.tokens.gather(1, (context.lengths - 1).unsqueeze(1))  # the root
        is_tree = max(widths) > 1
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        laws: list[Tensor] = []
        states: list[Tensor] = []
        first, n_above = -1, 1  # the level that is fed next: its first node, its number of nodes
        for depth, width in enumerate(widths):
            output = self.target(
                level,
                context.cache,
                parents=parents[-1] + 1 if is_tree and depth else None,  # the root is node 0
                taps=(exit_layer,),
                exit_layer=exit_layer,
            )
            assert output.logits is not None
            states.append(output.hidden[exit_layer])
            picked, q = context.rule.pick(output.logits, context.lengths, depth, width)
            level = picked.flatten(1, 2)  # [B, M, k] -> [B, M * k]
            tokens.append(level)
            if q is not None:
                laws.append(q.flatten(1, 2))
            above = torch.arange(first, first + n_above, device=device)
            parents.append(above.repeat_interleave(width).expand_as(level))
            first, n_above = first + n_above, n_above * width
        depth_of = torch.cat([torch.full_like(t, d) for d, t in enumerate(tokens, 1)], dim=1)
        return Draft(
            torch.cat(tokens, dim=1),
            torch.cat(parents, dim=1) if is_tree else None,
            torch.cat(laws, dim=1) if laws else None,
            # a row's tree is as deep as its own budget, 0 in dead rows, whoever shares its batch
            used=depth_of <= context.depth_left.unsqueeze(1),
            # of root and nodes all but the last level were fed
            resume=(exit_layer, torch.cat(states, dim=1)) if self.config.reuse else None,
        )


def layer_dropout_rates(
    n_layers: int, p_max: float, *, linear: bool = False, progress: float = 1.0
) -> list[float]:
    """Probability that each of `n_layers` blocks is dropped, growing with depth from 0 to `p_max`.

        p_l = S D(l) p_max,   D(l) = exp(l ln 2 / (L - 1)) - 1,   S = exp(progress ln 2) - 1

    `linear` takes D(l) = l / (L - 1), as the post does. `progress` in [0, 1] is t / (T - 1), the
    time curriculum for training from scratch; 1, the default, is the constant S = 1 of
    fine-tuning. Section 4.1.1, arXiv:2404.16710.
    Raises ValueError for fewer than 2 layers, or a `p_max` or `progress` outside [0, 1].
    """
    _check_layers(n_layers)
    for name, value in (("p_max", p_max), ("progress", progress)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}: expected a number in [0, 1], got {value}")
    depths = [layer / (n_layers - 1) for layer in range(n_layers)]
    shares = depths if linear else [2.0**depth - 1.0 for depth in depths]
    return [(2.0**progress - 1.0) * share * p_max for share in shares]


def exit_loss_weights(
    n_layers: int,
    e_scale: float = 1.0,
    *,
    linear: bool = False,
    on: Sequence[bool] | None = None,
) -> list[float]:
    """Weight of the loss after each block; they sum to 1.

        e(l)     = e_scale (0 + 1 + ... + l)                       for l < L - 1
        e(L - 1) = L - 1 + e_scale (0 + 1 + ... + (L - 2))         normalised over the layers `on`

    so the first block, l = 0, has none, and `e_scale` 0 leaves nothing but the last. `linear` takes
    e(l) = e_scale (l + 1) and e(L - 1) = L instead, which at `e_scale` 1 is the post's. `on` comes
    from a curriculum; None: all. Section 4.1.2, arXiv:2404.16710.
    Raises ValueError for fewer than 2 layers, a negative `e_scale`, or an `on` that is not one
    bool a layer or leaves no weight.
    """
    _check_layers(n_layers)
    if not 0.0 <= e_scale < math.inf:
        raise ValueError(f"e_scale: expected a finite number of at least 0, got {e_scale}")
    if on is not None and len(on) != n_layers:
        raise ValueError(f"on: expected one bool per layer ({n_layers}), got {len(on)}")
    last = n_layers - 1
    if linear:
        weights = [e_scale * (layer + 1) for layer in range(last)] + [float(n_layers)]
    else:
        sums = [layer * (layer + 1) / 2 for layer in range(n_layers)]
        weights = [e_scale * total for total in sums[:last]] + [last + e_scale * sums[last - 1]]
    weights = [w if on is None or on[layer] else 0.0 for layer, w in enumerate(weights)]
    total = sum(weights)
    if not total:
        raise ValueError("on: expected a layer whose weight is not 0, got none")
    return [weight / total for weight in weights]


def rotational_curriculum(step: int, n_layers: int, every: int) -> list[bool]:
    """Which layers' losses are on at `step`: every `every`-th and the last, one further each step.

    Each layer has its turn once in `every` (R) steps, so a step pays for at most ceil(L / R) + 1
    heads instead of L. Section 4.1.2, arXiv:2404.16710.
    """
    if every < 1:
        raise ValueError(f"every: expected at least 1, got {every}")
    return [(layer - step) % every == 0 or layer == n_layers - 1 for layer in range(n_layers)]


def gradual_curriculum(step: int, n_layers: int, n_steps: int) -> list[bool]:
    """Which layers' losses are on at `step`: from the last down, one more every T / (2 L) steps.

    All are on by half of the `n_steps` T. The last one counts from step 0. Section 4.1.2,
    arXiv:2404.16710.
    """
    if n_steps < 1:
        raise ValueError(f"n_steps: expected at least 1, got {n_steps}")
    return [2 * n_layers * step >= (n_layers - 1 - layer) * n_steps for layer in range(n_layers)]


def draw_kept(rates: Sequence[float], batch_size: int, generator: torch.Generator) -> Tensor:
    """Which block keeps which sequence: [L, B] bool, False with the block's probability in `rates`.

    Every block and sequence draws on its own, L B numbers whatever the rates. Section 4.1.1,
    arXiv:2404.16710. Raises ValueError for a rate outside [0, 1].
    """
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ValueError(f"rates: expected numbers in [0, 1], got {list(rates)}")
    drawn = torch.rand(len(rates), batch_size, generator=generator, device=generator.device)
    return drawn >= torch.tensor(rates, device=drawn.device).unsqueeze(1)


def block_states(
    target: Transformer, tokens: Tensor, kept: Tensor | None = None
) -> dict[int, Tensor]:
    """The residual stream of `tokens` [B, S] after every block: tap 1..L -> [B, S, D].

    `kept` [L, B] bool from `draw_kept`: a block leaves a sequence it does not keep as it is and
    does not compute it; nothing is rescaled. None: all are kept, as in `target(tokens, taps=...)`.
    Section 4.1.1, arXiv:2404.16710.
    Raises ValueError for tokens or a `kept` that do not fit.
    """
    n_layers = target.n_layers
    if tokens.ndim != 2 or tokens.dtype != torch.long or not tokens.numel():
        raise ValueError(
            f"tokens: expected int64 of shape [B, S], got {tokens.dtype} of {list(tokens.shape)}"
        )
    if tokens.shape[1] > target.max_position_embeddings:
        raise ValueError(
            f"tokens: {tokens.shape[1]} positions, but max_position_embeddings is "
            f"{target.max_position_embeddings}"
        )
    if kept is not None and (kept.shape != (n_layers, len(tokens)) or kept.dtype != torch.bool):
        raise ValueError(
            f"kept: expected bool of shape {[n_layers, len(tokens)]}, got {kept.dtype} of "
            f"{list(kept.shape)}"
        )
    rotary = target.rotary(tokens.shape[1])
    x = target.embedding(tokens)  # [B, S, D]
    hidden = {}
    for i, block in enumerate(target.blocks):
        if kept is None or bool(kept[i].all()):
            x = block(x, rotary)
        elif bool(kept[i].any()):
            rows = kept[i].nonzero().squeeze(1).to(x.device)
            x = x.index_copy(0, rows, block(x[rows], rotary))
        hidden[i + 1] = x
    return hidden


def exit_loss(
    target: Model,
    hidden: Mapping[int, Tensor],
    labels: Tensor,
    weights: Sequence[float],
    mask: Tensor | None = None,
) -> Tensor:
    """Sum of `weights[l]` times the mean cross-entropy of block l + 1 through the target's head.

    `hidden` tap -> [B, S, D] of the blocks with a weight (of any `Model`, from its taps: those
    before the final norm); `labels` [B, S] int64, the tokens that follow; `mask` [B, S] bool, True
    where a position counts, None: all. A block of weight 0 pays for no head. In float32 or better.
    Eq. of section 4.1.2, arXiv:2404.16710.
    Raises ValueError for weights that are not one finite number >= 0 a layer or all 0, a state
    that is missing, shapes that differ, or a mask that is False everywhere.
    """
    valid = all(0.0 <= weight < math.inf for weight in weights) and any(weights)
    if len(weights) != target.n_layers or not valid:
        raise ValueError(
            f"weights: expected one finite number of at least 0 per layer ({target.n_layers}), not "
            f"all 0, got {list(weights)}"
        )
    if mask is not None and (mask.shape != labels.shape or not bool(mask.any())):
        raise ValueError(
            f"mask: expected {list(labels.shape)} with a position that counts, got "
            f"{list(mask.shape)} with {int(mask.sum())}"
        )
    losses = []
    for layer, weight in enumerate(weights, start=1):
        if not weight:
            continue
        if layer not in hidden or hidden[layer].shape[:-1] != labels.shape:
            have = list(hidden[layer].shape) if layer in hidden else "none"
            raise ValueError(
                f"hidden[{layer}]: expected states of shape {[*labels.shape, target.hidden_size]}, "
                f"got {have}"
            )
        states = hidden[layer] if mask is None else hidden[layer][mask]
        logits = target.head(target.norm(states)).flatten(0, -2)  # [M, V]
        exact = torch.promote_types(logits.dtype, torch.float32)
        wanted = labels.flatten() if mask is None else labels[mask]
        losses.append(weight * F.cross_entropy(logits.to(exact), wanted))
    return torch.stack(losses).sum()


def early_exit_loss(
    target: Transformer,
    tokens: Tensor,
    weights: Sequence[float],
    rates: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Next-token loss of every exit under layer dropout: what LayerSkip trains a target with.

    `tokens` [B, S] int64, S >= 2; `mask` [B, S] bool, True at positions whose prediction counts
    (the last has none); `weights` [L] from `exit_loss_weights`, `rates` [L] from
    `layer_dropout_rates`. Without rates and with the last weight alone it is the plain loss.
    Returns a scalar. For a training that can be resumed, seed the generator by the step; one with
    further losses, or with its batch on several machines, calls `draw_kept`, `block_states` and
    `exit_loss` itself. Raises ValueError as they do, for rates that are not one a layer, and for
    rates above 0 without a generator.
    """
    if rates is not None and len(rates) != target.n_layers:
        raise ValueError(f"rates: expected one a layer ({target.n_layers}), got {len(rates)}")
    kept = None
    if rates is not None and any(rates):
        if generator is None:
            raise ValueError("generator: layer dropout draws from one, got None")
        kept = draw_kept(rates, len(tokens), generator)
    hidden = block_states(target, tokens[..., :-1], kept)
    labels, mask = tokens[..., 1:], None if mask is None else mask[..., :-1]
    return exit_loss(target, hidden, labels, weights, mask)


@torch.no_grad()
def exit_acceptance(
    target: Model, tokens: Tensor, *, temperature: float = 0.0, mask: Tensor | None = None
) -> dict[int, float]:
    """How often each exit's draft would be accepted: exit layer 1..L-1 -> share, from one pass.

    At temperature 0 the share of positions where the exit's argmax is the target's, above it the
    mean of sum_x min(p(x), q(x)) = 1 - TV(p, q), q the exit's law (section 3, arXiv:2211.17192).
    `tokens` [B, S] int64 should be text that the target wrote at this temperature, since drafts are
    read along it; `mask` [B, S] bool, True where a position counts, None: all. This is the
    acceptance of a chain's node given that its parent was accepted, as `specdec.speedup` takes it.
    Raises ValueError for a negative temperature, a target without early exits, or an empty mask.
    """
    _check_layers(target.n_layers)
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a finite number >= 0, got {temperature}")
    if mask is not None and not bool(mask.any()):
        raise ValueError("mask: expected a position that counts, got none")
    exits = range(1, target.n_layers)
    output = target(tokens, taps=tuple(exits))
    assert output.logits is not None
    shares = {}
    for layer in exits:
        p, q = output.logits, target.head(target.norm(output.hidden[layer]))  # logits [B, S, V]
        if temperature:
            refused = total_variation(q / temperature, p / temperature)  # [B, S]
        else:
            refused = (q.argmax(-1) != p.argmax(-1)).double()
        mean = float((refused if mask is None else refused[mask]).mean())
        shares[layer] = min(max(1.0 - mean, 0.0), 1.0)
    return shares


class ExitChoice(NamedTuple):
    """Where to exit and how far to draft; `n_drafts` 0 says that plain decoding is faster."""

    exit_layer: int
    n_drafts: int
    speedup: float


def resumed_verify_cost(exit_layer: int, n_layers: int, full_cost: float) -> float:
    """Cost of a verification that resumes at block E, in steps of the target: E/L + (L-E)/L T.

    `full_cost` is T, that of a pass of all blocks over the same n = K + 1 tokens: measured, about 1
    where reading the weights is what takes time, n where computing is. The first E blocks have only
    the last draft left to see, at E/L; embedding and head are not counted.
    """
    _check_exit(exit_layer, n_layers)
    return (exit_layer + (n_layers - exit_layer) * full_cost) / n_layers


def best_exit(
    acceptance: Mapping[int, float],
    n_layers: int,
    *,
    draft_cost: Mapping[int, float] | None = None,
    verify: Callable[[int, int], float] | None = None,
    max_drafts: int = 16,
) -> ExitChoice:
    """The exit layer and draft length of the largest expected speed-up; of equals the earliest.

    Args:
        acceptance: exit layer E -> its acceptance in [0, 1], see `exit_acceptance`.
        n_layers: L of the target.
        draft_cost: E -> measured time of one draft pass in steps of the target (its head takes
            part); None: E / L.
        verify: (E, n) -> measured time of a verification of n = K + 1 tokens resumed at block E, in
            steps of the target; None: 1 (`resumed_verify_cost` of a pass that costs a step).
        max_drafts: longest draft considered.

    Theorem 3.8, arXiv:2211.17192. Raises ValueError for no exits or exits outside 1..L-1, a
    missing cost, or numbers that `specdec.speedup` refuses.
    """
    if not acceptance:
        raise ValueError("acceptance: expected at least one exit layer, got none")
    choices = []
    for layer, share in sorted(acceptance.items()):
        _check_exit(layer, n_layers)
        if draft_cost is not None and layer not in draft_cost:
            raise ValueError(f"draft_cost: expected one for exit layer {layer}, got none")
        cost = layer / n_layers if draft_cost is None else draft_cost[layer]

        def verify_cost(n: int, layer: int = layer) -> float:
            return 1.0 if verify is None else verify(layer, n)

        n_drafts = best_n_drafts(share, cost, max_drafts=max_drafts, verify=verify_cost)
        paid = verify_cost(n_drafts + 1) if n_drafts else 1.0
        speedup = expected_speedup(share, n_drafts, cost, verify_cost=paid)
        choices.append(ExitChoice(layer, n_drafts, speedup))
    return max(choices, key=lambda choice: choice.speedup)


def _check_layers(n_layers: int) -> None:
    if n_layers < 2:
        raise ValueError(f"n_layers: expected at least 2 blocks to exit between, got {n_layers}")


def _check_exit(exit_layer: int, n_layers: int) -> None:
    _check_layers(n_layers)
    if not 1 <= exit_layer < n_layers:
        raise ValueError(
            f"exit_layer: expected 1..{n_layers - 1} of the target's {n_layers} blocks, "
            f"got {exit_layer}"
        )
