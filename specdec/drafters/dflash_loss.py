"""Training DFlash (`dflash.py`) on a frozen target: many blocks of a sequence in one pass.

Anchors are drawn at random from the places that count; each starts a block, as the root does in
decoding. All blocks of a sequence go through the network together, under a block-sparse mask: a
slot sees the context strictly before its own anchor, and of the blocks its own alone, as its
layer's sight has it. What the network computes for a slot is what it computes in decoding.

Losses are those of `specdec.distill`, or cross-entropy with the true token; their weights fall
along the block, since a slot counts only if all before it were right: w_k = exp(-(k - 1) / decay)
with k = 1 for the slot behind the anchor (arXiv:2602.06036, Eq. 4), or by how likely the drafter
itself makes it to get there (D-PACE, arXiv:2605.18810, Eq. 7-9).

Where we differ from the published code: losses are means over what counts, in all rows together;
with D-PACE means over the blocks, where its authors divide the sum by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import KVStore, View
from ..distill import Divergence
from ..models.layers import for_groups, rotary_angles
from ..protocol import FINAL, Model
from .dflash import DFlashNetwork, Sight, additive


@dataclass(frozen=True)
class Blocks:
    """Training blocks of a batch: M anchors a row, K slots a block."""

    anchors: Tensor
    """[B, M] int64, places of the roots, increasing."""
    tokens: Tensor
    """[B, M, K] int64, what the slots hold: the root, then masks, or true tokens among them."""
    labels: Tensor
    """[B, M, K] int64, the true tokens."""
    counts: Tensor
    """[B, M, K] bool, slots that are learned from: masked, and of tokens that count."""

    @property
    def places(self) -> Tensor:
        """[B, M, K] int64, where the slots stand; a slot predicts the token of its own place."""
        slot = torch.arange(self.tokens.shape[2], device=self.anchors.device)
        return self.anchors.unsqueeze(-1) + slot


def draw_blocks(
    tokens: Tensor,
    block_size: int,
    n_blocks: int,
    mask_token: int,
    generator: torch.Generator,
    *,
    mask: Tensor | None = None,
    corruption: str = "full",
) -> Blocks:
    """Draw `n_blocks` anchors a row, without replacement, and what their blocks hold.

    Args:
        tokens: [B, T] int64, right-padded.
        block_size: K, slots of a block.
        n_blocks: most blocks of a row.
        mask_token: what masked slots hold.
        generator: what anchors and corruption are drawn from, on the CPU.
        mask: [B, T] bool, tokens that count: anchors are drawn from them, and of the slots those
            that hold one are learned from. None: all. Anchors whose block would reach beyond the
            row's last place are never drawn.
        corruption: `"full"`: all slots but the root are masked, as in decoding. `"uniform"`: of
            every block a share drawn from U(0, 1), at least one slot; the others hold the truth.
            Slots of tokens that do not count, such as padding, are masked anyway.

    Raises:
        ValueError: for an unknown corruption, counts that are too small, or rows without any
            anchor.
    """
    if corruption not in ("full", "uniform"):
        raise ValueError(f"corruption: expected 'full' or 'uniform', got {corruption!r}")
    if block_size < 2:
        raise ValueError(f"block_size: expected at least 2 to learn anything, got {block_size}")
    if n_blocks < 1:
        raise ValueError(f"n_blocks: expected at least 1, got {n_blocks}")
    batch, length = tokens.shape
    counts = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    fits = max(0, length - block_size + 1)
    score = torch.rand(batch, fits, generator=generator).to(tokens.device)
    score = score.masked_fill(~counts[:, :fits], -1.0)
    n_blocks = min(n_blocks, int((score >= 0).sum(dim=1).max()) if fits else 0)
    if not n_blocks:
        raise ValueError(
            f"mask: expected a token that counts with {block_size - 1} places behind it, "
            f"got {length} places and {int(counts.sum())} tokens that count"
        )
    best, anchors = score.topk(n_blocks, dim=1)
    anchors, order = anchors.sort(dim=1)
    drawn = best.gather(1, order) >= 0  # a row with fewer anchors: the others learn nothing
    place = anchors.unsqueeze(-1) + torch.arange(block_size, device=tokens.device)  # [B, M, K]
    labels = tokens.gather(1, place.flatten(1)).view_as(place)
    learnable = counts.gather(1, place.flatten(1)).view_as(place)
    masked = torch.ones_like(place, dtype=torch.bool)
    if corruption == "uniform":
        share = torch.rand(batch, n_blocks, 1, generator=generator).to(tokens.device)
        draws = torch.rand(batch, n_blocks, block_size - 1, generator=generator).to(tokens.device)
        draws = draws.masked_fill(~learnable[..., 1:], 2.0)
        least = draws.amin(dim=-1, keepdim=True)
        masked[..., 1:] = (draws < share) | (draws == least) | ~learnable[..., 1:]
    masked[..., 0] = False
    learned = masked & learnable & drawn.unsqueeze(-1)
    return Blocks(anchors, torch.where(masked, mask_token, labels), labels, learned)


def block_mask(anchors: Tensor, block_size: int, n_context: int, sight: Sight) -> Tensor:
    """What every slot of the blocks at `anchors` [B, M] sees: [B, M * K, T + M * K] bool.

    Keys are the context 0..T-1, then the slots of all blocks.
    """
    n_blocks = anchors.shape[1]
    context = torch.arange(n_context, device=anchors.device)
    place = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    query = place.flatten(1).unsqueeze(-1)  # [B, M * K, 1]
    root = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)
    before = sight.sees(query, context) & (context < root)  # [B, M * K, T]
    own = torch.arange(n_blocks, device=anchors.device).repeat_interleave(block_size)
    same = own.unsqueeze(1) == own.unsqueeze(0)
    inside = sight.sees(query, place.flatten(1).unsqueeze(1)) & same  # [B, M * K, M * K]
    return torch.cat([before, inside], dim=-1)


def dense_view(
    blocks: Blocks, n_context: int, sight: Sight, n_groups: int, dtype: torch.dtype
) -> View:
    """What slots see as an additive mask [B, 1, n_groups * M * K, T + M * K]: the reference."""
    seen = block_mask(blocks.anchors, blocks.tokens.shape[2], n_context, sight)
    mask, places = additive(seen, dtype).unsqueeze(1), blocks.places.flatten(1)
    return for_groups(View(n_context, seen.shape[-1], places, mask, None), n_groups)


See: TypeAlias = Callable[[Blocks, int, Sight, int, torch.dtype], View]
"""Makes the view of the blocks behind `n_context` places: `dense_view`, or `flex_view`."""


class _Joined:
    """Keys and values of the context, then of the slots behind them, with their gradients."""

    def __init__(self) -> None:
        self.context: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, view: View, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if layer not in self.context:  # the context comes first
            self.context[layer] = keys, values
            return keys, values
        before_keys, before_values = self.context[layer]
        return torch.cat([before_keys, keys], dim=2), torch.cat([before_values, values], dim=2)


def run_blocks(
    network: DFlashNetwork,
    target: Model,
    hidden: Mapping[int, Tensor],
    blocks: Blocks,
    see: See = dense_view,
) -> Tensor:
    """All blocks of a batch in one pass: what the head reads at their slots, [B, M, K, D].

    `hidden`: tap -> [B, T, D], at least those of the network. `see`: how attention is told what a
    slot sees; `dflash_flex.flex_view` does so without a mask of all pairs.
    """
    config, store = network.config, cast(KVStore, _Joined())  # attention asks for `write` alone
    features = network.fuse({tap: hidden[tap].detach() for tap in network.taps})
    n_context, dtype = features.shape[1], features.dtype
    context = torch.arange(n_context, device=features.device).unsqueeze(0)
    mask = None
    if not network.inject:  # the context itself attends, causally
        seen = Sight(causal=True).sees(context.unsqueeze(-1), context)  # [1, T, T]
        mask = additive(seen, dtype).unsqueeze(1)
    view = for_groups(View(0, n_context, context, mask, None), config.n_groups)
    cos, sin = rotary_angles(context, config.head_size, config.rope_theta, dtype).unbind(2)
    network.read(features, (cos, sin), store, view)

    views = {
        sight: see(blocks, n_context, sight, config.n_groups, dtype)
        for sight in set(network.sights)
    }
    places = blocks.places.flatten(1)  # [B, M * K]
    cos, sin = rotary_angles(places, config.head_size, config.rope_theta, dtype).unbind(2)
    embeddings = target.embedding(blocks.tokens.flatten(1)).detach()
    states = network(embeddings, (cos, sin), store, views)
    return states.view(*blocks.tokens.shape, -1)


def decay_weights(block_size: int, decay: float) -> Tensor:
    """w_k = exp(-(k - 1) / decay) of the slots k = 1..K-1, [K - 1]; Eq. 4, arXiv:2602.06036."""
    return torch.exp(-torch.arange(block_size - 1) / decay)


def dpace_weights(confidence: Tensor, counts: Tensor, alpha: float = 0.5) -> Tensor:
    """w_j = sum over m >= j of the product over i <= m of c_i, c = (1 - alpha) q + alpha.

    `confidence` [..., K - 1] is q, what the drafter gives the true token; `counts` of the same
    shape, slots that do not are passed over. The expected accepted length, as far as slot j has a
    part in it. Eq. 7 and 8, arXiv:2605.18810. No gradient.
    """
    smooth = (1 - alpha) * confidence.detach() + alpha
    reach = smooth.masked_fill(~counts, 1.0).cumprod(dim=-1).masked_fill(~counts, 0.0)
    return reach.flip(-1).cumsum(dim=-1).flip(-1).masked_fill(~counts, 0.0)


def dflash_loss(
    network: DFlashNetwork,
    target: Model,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    generator: torch.Generator,
    *,
    n_blocks: int = 32,
    mask: Tensor | None = None,
    divergence: Divergence | None = None,
    decay: float = 7.0,
    dpace: float | None = None,
    corruption: str = "full",
    selector_weight: float = 1.0,
    see: See = dense_view,
) -> Tensor:
    """Loss of random blocks, weighted along the block.

    Args:
        network: the layers to train.
        target: its embedding and head are used and stay as they are; freeze it.
        hidden: tap -> [B, T, D] for the network's taps, and FINAL, if there is a divergence.
        tokens: [B, T] int64, right-padded; best what the target itself wrote.
        generator: what anchors and corruption are drawn from.
        n_blocks, mask, corruption: see `draw_blocks`.
        divergence: of q from the target's law p of the same token, as in `specdec.distill`; None:
            cross-entropy with the true token.
        decay: lambda of `decay_weights`; the paper takes 7 for blocks of 16, 5 for 10, 4 for 8.
        dpace: alpha of `dpace_weights`, which replace the decay; None: they do not.
        selector_weight: weight of DFlash 2's selector, trained by cross-entropy among the
            candidates behind the true token before; slots whose true token is none add nothing.
        see: see `run_blocks`.

    Returns:
        A scalar: a weighted mean over the slots that count; with `dpace` the weighted sum over the
        number of blocks, as its weights' sum means something there (the expected length).

    Raises:
        ValueError: for shapes that differ, a missing tap, a decay that is not positive, an alpha
            outside (0, 1], or no slot that counts.
    """
    _check(network, hidden, tokens, mask, divergence, decay, dpace)
    blocks = draw_blocks(
        tokens,
        network.block_size,
        n_blocks,
        network.mask_token,
        generator,
        mask=mask,
        corruption=corruption,
    )
    counts = blocks.counts[..., 1:]  # [B, M, K - 1]
    if not bool(counts.any()):
        raise ValueError("mask: no slot of the drawn blocks holds a token that counts")
    states = run_blocks(network, target, hidden, blocks, see)[:, :, 1:][counts]  # [n, D]
    labels = blocks.labels[..., 1:][counts]  # [n]
    q = network.logits(states.unsqueeze(0), target).squeeze(0)
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    if divergence is None:
        values = F.cross_entropy(q, labels, reduction="none")
    else:
        before = blocks.places[..., :-1][counts]  # the place that predicts the slot
        row = counts.nonzero()[:, 0]
        with torch.no_grad():
            p = target.head(hidden[FINAL][row, before].unsqueeze(0)).squeeze(0).to(q.dtype)
        values = divergence(q, p)
    if dpace is None:
        weights = decay_weights(network.block_size, decay).to(q).expand(counts.shape)[counts]
        total = weights.sum()
    else:
        confidence = torch.zeros(counts.shape, dtype=q.dtype, device=q.device)
        with torch.no_grad():
            confidence[counts] = (-F.cross_entropy(q, labels, reduction="none")).exp()
        weights = dpace_weights(confidence, counts, dpace)[counts]
        total = counts.any(dim=-1).sum()
    loss = (weights * values).sum() / total
    if network.selector is None or not selector_weight:
        return loss
    before = blocks.labels[..., :-1][counts]
    ids = network.selector.candidates(q.detach())  # [n, k]
    scores = network.selector.scores(states, q.detach(), ids, before)
    hit = ids == labels.unsqueeze(-1)
    known = hit.any(dim=-1)
    if not bool(known.any()):
        return loss
    chosen = F.cross_entropy(scores[known], hit[known].int().argmax(dim=-1), reduction="none")
    return loss + selector_weight * (weights[known] * chosen).sum() / total


def _check(
    network: DFlashNetwork,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    mask: Tensor | None,
    divergence: Divergence | None,
    decay: float,
    dpace: float | None,
) -> None:
    if tokens.ndim != 2 or tokens.dtype != torch.long:
        raise ValueError(
            f"tokens: expected int64 of shape [B, T], got {tokens.dtype} of {list(tokens.shape)}"
        )
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {list(tokens.shape)}, got {mask.dtype} of "
            f"{list(mask.shape)}"
        )
    needed = {*network.taps, *([FINAL] if divergence is not None else [])}
    for tap in sorted(needed):
        if tap not in hidden:
            raise ValueError(f"hidden: expected tap {tap}, got {sorted(hidden)}")
        shape = (*tokens.shape, network.config.hidden_size)
        if hidden[tap].shape != shape:
            raise ValueError(
                f"hidden: expected {list(shape)} at tap {tap}, got {list(hidden[tap].shape)}"
            )
    if not decay > 0:
        raise ValueError(f"decay: expected a positive number, got {decay}")
    if dpace is not None and not 0 < dpace <= 1:
        raise ValueError(f"dpace: expected an alpha in (0, 1], got {dpace}")
