"""Drafting with an EAGLE layer: a chain, or the dynamic tree of EAGLE-2 (arXiv:2406.16858).

A round drops the tree of the last one, appends the pairs (h_t, x_{t+1}) of what was emitted,
commits them and grows a tree of pending nodes below, level by level: a node's input is the output
at its parent and its own token.

The value of a node is the product of the drafter's confidences along its path, kept as a sum of
logs: the chance that the target accepts all of it, if the drafter knows itself. A level expands its
most valuable nodes (expansion); of all candidates the most valuable are verified (re-ranking). A
child is never worth more than its parent, so what is kept is a tree.

Where we differ: ragged batches, and trees that are drawn. The confidence in a node's i-th child is
the i-th largest probability after the node. For chosen children that is the child's own, as
published. For drawn ones it is known before the draw, so that the same values settle which nodes
are expanded and how many children each gets, and no drawn node is ever pruned: what `Rejection`
asks of a drawn tree.

`grow` and `CachedLayer` serve every drafter that grows its draft one depth after another: here an
EAGLE layer, in `mtp_draft.py` the modules of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ..cache import KVStore, TreeCache, everything
from ..draft import Draft
from ..models import TransformerConfig
from ..models.layers import RotaryStore, for_groups
from ..protocol import Context, Model
from .eagle import Network

_CHUNK = 512  # pairs of a prompt that the layer reads in one pass


@dataclass(frozen=True)
class Level:
    """The candidates of one depth: children of M expanded nodes, siblings in order."""

    tokens: Tensor
    """[B, n] int64."""
    above: Tensor
    """[B, n] int64: which of the M expanded nodes is the parent."""
    parents: Tensor
    """[B, n] int64: the parent among the candidates of all levels, -1 for the root."""
    value: Tensor
    """[B, n] log of the confidences along the path, float32 or better."""
    probs: Tensor | None
    """[B, n, V] the law of each given its earlier siblings; None where they were chosen."""


def ranked(value: Tensor, n: int) -> Tensor:
    """Indices [B, min(n, N)] of the largest of `value` [B, N], largest first, the first of equals.

    The order of equals matters: parents come before children and never have the smaller value.
    """
    return value.sort(dim=1, descending=True, stable=True).indices[:, :n]


def select(values: Tensor, index: Tensor) -> Tensor:
    """`values` [B, N, ...] at `index` [B, M] -> [B, M, ...]."""
    index = index.reshape(*index.shape, *[1] * (values.ndim - 2))
    return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


def children(
    logits: Tensor, tokens: Tensor, probs: Tensor | None, value: Tensor, at: Tensor, limit: int
) -> Level:
    """The level below M expanded nodes, which are worth `value` [B, M].

    `logits` [B, M, V] the drafter's after each of them, `tokens` [B, M, k] its children as the rule
    picked them, `probs` [B, M, k, V] their laws if they were drawn, `at` [B, M] the expanded nodes'
    places among all candidates. Of drawn children only `limit` are kept in a row: those worth most
    by rank, which are the first ones of every parent.
    """
    batch, n_above, k = tokens.shape
    exact = torch.promote_types(logits.dtype, torch.float32)
    confidence = logits.to(exact).log_softmax(dim=-1).topk(k, dim=-1).values
    value = (value.unsqueeze(-1) + confidence).flatten(1)  # [B, M * k]
    above = torch.arange(n_above, device=tokens.device).repeat_interleave(k).expand(batch, -1)
    tokens = tokens.flatten(1)
    if probs is not None:
        kept = ranked(value, limit).sort(dim=1).values
        value, above, tokens = (select(x, kept) for x in (value, above, tokens))
        probs = select(probs.flatten(1, 2), kept)  # [B, n, V]
    return Level(tokens, above, at.gather(1, above), value, probs)


def join(levels: Sequence[Level], n_nodes: int, deepest: Tensor) -> Draft:
    """The draft of all levels; of chosen candidates the `n_nodes` most valuable (re-ranking).

    `deepest` [B]: nodes below that depth are unused and cost no other node its place.
    """
    tokens = torch.cat([level.tokens for level in levels], dim=1)  # [B, C]
    parents = torch.cat([level.parents for level in levels], dim=1)
    value = torch.cat([level.value for level in levels], dim=1)
    depth = torch.cat([torch.full_like(x.parents, d) for d, x in enumerate(levels, 1)], dim=1)
    used = depth <= deepest.unsqueeze(1)
    laws = [level.probs for level in levels if level.probs is not None]
    if laws:
        return Draft(tokens, parents, torch.cat(laws, dim=1), used)
    if n_nodes >= tokens.shape[1]:
        return Draft(tokens, parents, None, used)
    kept = ranked(value.masked_fill(~used, -torch.inf), n_nodes).sort(dim=1).values
    place = torch.full_like(tokens, -1)
    place.scatter_(1, kept, torch.arange(n_nodes, device=kept.device).expand_as(kept))
    parents = select(parents, kept)
    parents = torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
    return Draft(select(tokens, kept), parents, None, select(used, kept))


class Shape(Protocol):
    """The shape of what is grown; see `Eagle`."""

    @property
    def n_drafts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def n_nodes(self) -> int: ...
    @property
    def draw(self) -> bool: ...


Extend: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""Adds nodes with `tokens` [B, M] to those added so far; returns the logits after each, [B, M, V].

`parents` [B, M] counts among all nodes added in this round, -1 is the root; None: a chain."""


def check_shape(shape: Shape, n_tokens: int) -> None:
    """Raise a ValueError for counts that do not fit each other or a vocabulary of `n_tokens`."""
    if shape.n_drafts < 1:
        raise ValueError(f"n_drafts: expected at least 1, got {shape.n_drafts}")
    if not 1 <= shape.top_k <= n_tokens:
        raise ValueError(f"top_k: expected 1..{n_tokens} (tokens), got {shape.top_k}")
    if shape.n_nodes < shape.n_drafts:
        raise ValueError(
            f"n_nodes: expected at least n_drafts={shape.n_drafts}, got {shape.n_nodes}"
        )


def grow(
    shape: Shape, context: Context, logits: Tensor, extend: Extend, n_levels: int, deepest: Tensor
) -> Draft:
    """Draft `n_levels` below the root, after which the drafter says `logits` [B, 1, V].

    `deepest` [B]: nodes below that depth are unused.
    """
    walk = _grow_chain if shape.top_k == 1 else _grow_tree
    return walk(shape, context, logits, extend, n_levels, deepest)


def _grow_chain(
    shape: Shape, context: Context, logits: Tensor, extend: Extend, n_levels: int, deepest: Tensor
) -> Draft:
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for depth in range(n_levels):
        if depth:
            logits = extend(tokens[-1], None)
        token, q = context.rule.pick(
            logits, context.lengths, depth, draw=shape.draw
        )  # [B, 1, 1], [B, 1, 1, V]
        tokens.append(token.squeeze(2))
        if q is not None:
            laws.append(q.squeeze(2))
    drafted = torch.cat(tokens, dim=1)  # [B, N]
    depths = torch.arange(1, n_levels + 1, device=drafted.device)
    used = depths <= deepest.unsqueeze(1)
    return Draft(drafted, None, torch.cat(laws, dim=1) if laws else None, used)


def _grow_tree(
    shape: Shape, context: Context, logits: Tensor, extend: Extend, n_levels: int, deepest: Tensor
) -> Draft:
    """Level by level below the `top_k` most valuable nodes of the last."""
    levels = list[Level]()
    value = torch.zeros(len(deepest), 1, device=deepest.device)
    at = torch.full_like(deepest, -1).unsqueeze(1)  # the expanded nodes among all candidates
    n_candidates, last = 0, -1  # `last`: the first node of the last level among the expanded ones
    for depth in range(n_levels):
        tokens, q = context.rule.pick(
            logits, context.lengths, depth, shape.top_k, draw=shape.draw
        )  # [B, M, k], [B, M, k, V]
        level = children(logits, tokens, q, value, at, shape.n_nodes // shape.n_drafts)
        levels.append(level)
        if depth + 1 == n_levels:
            break
        expanded = ranked(level.value, shape.top_k)  # [B, M]
        value, at = select(level.value, expanded), expanded + n_candidates
        n_candidates += level.tokens.shape[1]
        parents = last + select(level.above, expanded)
        last += logits.shape[1]
        logits = extend(select(level.tokens, expanded), parents)
    return join(levels, shape.n_nodes, deepest)


class CachedLayer:
    """A decoder layer with a cache of its own.

    Args:
        forward: features and embeddings [B, N, D], angles, store and view -> features [B, N, D].
        config: the layer's shape.
        target: whose embedding, dtype and device it uses.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        config: TransformerConfig,
        target: Model,
        batch_size: int,
        max_length: int,
    ) -> None:
        c, dtype, device, n_slots = config, target.dtype, target.device, max_length + 8
        self.forward, self.n_groups, self.embedding = forward, c.n_groups, target.embedding
        self.store = KVStore(1, batch_size, c.n_kv_heads, c.head_size, n_slots, dtype, device)
        self.angles = RotaryStore(c.head_size, c.rope_theta, n_slots, dtype, device)
        self.cache = TreeCache(batch_size, [self.store, self.angles], 1, dtype, device)

    def run(self, features: Tensor, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Append pending nodes with features [B, N, D] and tokens [B, N]; returns [B, N, D]."""
        first = self.cache.n_pending
        self.cache.append(tokens.shape[1], parents)
        view = for_groups(self.cache.view(first), self.n_groups)
        embeddings = self.embedding(tokens)
        return self.forward(features, embeddings, self.angles.at(view), self.store, view)

    def drop(self) -> None:
        """Forget what is pending."""
        lengths = self.cache.lengths
        self.cache.commit(lengths.new_zeros(len(lengths), 0), torch.zeros_like(lengths))


class Eagle:
    """Drafts with an EAGLE layer: a chain, or EAGLE-2's dynamic tree.

    Args:
        network: an `Eagle1` (EAGLE-1 and -2) or `Eagle3`.
        n_drafts: depth of the draft.
        top_k: children a node may get and nodes expanded per level; 1 is a chain.
        n_nodes: most nodes of a tree. Chosen nodes are re-ranked to this number over all levels;
            drawn ones get n_nodes / n_drafts a level, settled before the draw.
        draw: under `Rejection`, draw the nodes (without replacement) and declare their law q; False
            chooses the likeliest instead, a one-hot q. Other rules always choose.

    Raises:
        ValueError: for counts that do not fit; at `begin` for a target of another width,
            vocabulary, dtype or device, without the taps, or for a run beyond the layer's window.
    """

    def __init__(
        self,
        network: Network,
        n_drafts: int = 4,
        *,
        top_k: int = 1,
        n_nodes: int = 60,
        draw: bool = True,
    ) -> None:
        self.network, self.n_drafts, self.top_k = network, n_drafts, top_k
        self.n_nodes, self.draw = n_nodes, draw
        check_shape(self, network.n_tokens)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.taps

    def begin(self, target: Model, batch_size: int, max_length: int) -> EagleState:
        check_fits(self.network, target)
        check_window(self.network.config, max_length)
        return EagleState(self, target, batch_size, max_length)


class EagleState:
    def __init__(self, config: Eagle, target: Model, batch_size: int, max_length: int) -> None:
        self.config, self.target, self.network = config, target, config.network
        self.layer = CachedLayer(self.network, self.network.config, target, batch_size, max_length)
        self.cache = self.layer.cache

    def propose(self, context: Context) -> Draft:
        n_levels = min(self.config.n_drafts, context.max_depth)
        if not n_levels or not context.new_tokens.shape[1]:  # the last round, or no pair in any row
            return Draft.empty(len(context.lengths), context.tokens.device)
        self.features = self._append(context)  # [B, 1, D], and those of the nodes grown below
        # a prompt of one token has no pair to draft from yet
        deepest = torch.where(self.cache.lengths > 0, context.depth_left, 0)
        logits = self.network.logits(self.features, self.target)
        return grow(self.config, context, logits, self._extend, n_levels, deepest)

    def _append(self, context: Context) -> Tensor:
        """Drop the grown tree and commit the new pairs; returns the last one's output [B, 1, D]."""
        n_new, have = context.n_new, self.cache.lengths
        if bool((have + n_new != context.lengths - 1).any()):
            raise ValueError(
                f"context.new_tokens: expected all since the last call, but {have.tolist()} pairs "
                f"and {n_new.tolist()} new ones do not make rows of {context.lengths.tolist()} "
                f"tokens; call propose in every round"
            )
        self.layer.drop()
        features, outputs = self.network.fuse(context.hidden), []
        for start in range(0, features.shape[1], _CHUNK):
            piece = slice(start, start + _CHUNK)
            outputs.append(self._run(features[:, piece], context.new_tokens[:, piece], None))
            path, whole = everything(outputs[-1].shape[1], len(n_new), n_new.device)
            self.cache.commit(path, torch.minimum((n_new - start).clamp(min=0), whole))
        return select(torch.cat(outputs, dim=1), (n_new - 1).clamp(min=0).unsqueeze(1))

    def _extend(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Nodes fed with the features that predicted them; see `Extend`."""
        above = self.features[:, -1:] if parents is None else select(self.features, parents + 1)
        features = self._run(above, tokens, parents)
        self.features = torch.cat([self.features, features], dim=1)
        return self.network.logits(features, self.target)

    def _run(self, features: Tensor, tokens: Tensor, parents: Tensor | None) -> Tensor:
        return self.layer.run(features, tokens, parents)


class Fitted(Protocol):
    """A network that is made for a target."""

    @property
    def config(self) -> TransformerConfig: ...
    @property
    def taps(self) -> Sequence[int]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


def check_fits(network: Fitted, target: Model) -> None:
    """Raise a ValueError that names what of `network` does not fit `target`."""
    c = network.config
    if (c.vocab_size, c.hidden_size) != (target.vocab_size, target.hidden_size):
        raise ValueError(
            f"network: made for a vocabulary of {c.vocab_size} and width {c.hidden_size}, but the "
            f"target has {target.vocab_size} and {target.hidden_size}"
        )
    wrong = [tap for tap in network.taps if tap > target.n_layers]
    if wrong:
        raise ValueError(
            f"network: reads the taps {list(network.taps)}, but the target has 0..{target.n_layers}"
        )
    weight = next(network.parameters())
    if (weight.dtype, weight.device) != (target.dtype, target.device):
        raise ValueError(
            f"network: {weight.dtype} on {weight.device}, but the target is {target.dtype} on "
            f"{target.device}; convert one with .to()"
        )


def check_window(config: TransformerConfig, max_length: int) -> None:
    """Raise a ValueError for a run of more tokens than the network has positions."""
    if max_length > config.max_position_embeddings:
        raise ValueError(
            f"network: its max_position_embeddings={config.max_position_embeddings} is below the "
            f"run's {max_length} tokens"
        )
