"""Drafting with DFlash (`dflash.py`): one pass a round, then a chain or a tree of what it says.

The block says one law for each position below the root, and all at once: whatever token stands
above a node, the law at its depth is the same (DFlash 2's selector alone makes it depend on the
token before). A chain takes one token a position; EAGLE-2's tree grows level by level; `DDTree` is
the best tree that independent laws allow.

Where we differ from the published code: a block always has all its slots, also near the end of the
budget. What a slot says depends on how many there are, and a row's draft shall not depend on how
much budget its neighbours have left. Nodes beyond a row's own budget are unused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import KVStore, TreeCache, everything
from ..draft import Draft
from ..models.layers import RotaryStore, for_groups
from ..protocol import Context, Model
from .block_tree import Budget, block_tree, candidates
from .dflash import DFlashNetwork, block_view
from .eagle_tree import check_fits, check_shape, check_window, grow

_CHUNK = 512  # context slots that are read in one go


class DFlash:
    """Drafts with `network`: a chain, or EAGLE-2's dynamic tree.

    Args:
        network: the layers.
        n_drafts: depth of the draft, 1..block_size - 1. None: the whole block. A shorter draft is
            cheaper to verify, not to make.
        block_size: slots of a block, root included; None: as many as the network is trained for. 1
            decodes plainly.
        top_k: children a node may get and nodes expanded per level; 1 is a chain.
        n_nodes: most nodes of a tree; see `Eagle`.
        draw: under `Rejection`, draw every position from its own law q and declare it; False
            chooses the likeliest instead, a one-hot q. Both are lossless. Other rules always
            choose.

    Raises:
        ValueError: for counts that do not fit; at `begin` for a target of another width,
            vocabulary, dtype or device, without the taps, or for a run beyond the network's window.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        n_drafts: int | None = None,
        *,
        block_size: int | None = None,
        top_k: int = 1,
        n_nodes: int = 60,
        draw: bool = True,
    ) -> None:
        size = block_size_of(network, block_size)
        if n_drafts is not None and size == 1:
            raise ValueError(f"n_drafts: expected None for a block of 1, got {n_drafts}")
        if n_drafts is not None and not 1 <= n_drafts < size:
            raise ValueError(
                f"n_drafts: expected 1..{size - 1}, the slots of a block without the root, "
                f"got {n_drafts}"
            )
        self.network, self.block_size = network, size
        self.n_drafts = size - 1 if n_drafts is None else n_drafts
        self.top_k, self.n_nodes, self.draw = top_k, n_nodes, draw
        if self.n_drafts:
            check_shape(self, network.config.vocab_size)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.taps if self.n_drafts else ()

    def begin(self, target: Model, batch_size: int, max_length: int) -> DFlashState:
        check_fits(self.network, target)
        check_window(self.network.config, max_length)
        return DFlashState(self, target, batch_size, max_length)


def block_size_of(network: DFlashNetwork, block_size: int | None) -> int:
    """The block size asked for, or the network's.

    Raises:
        ValueError: for less than the root, or more than the convolutions of DFlash 2 take for one
            block.
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size: expected at least 1 (the root), got {block_size}")
    if network.dflash2 is not None and block_size is not None and block_size > network.block_size:
        raise ValueError(
            f"block_size: expected at most {network.block_size}, the slots that DFlash 2 convolves "
            f"over, got {block_size}"
        )
    return network.block_size if block_size is None else block_size


class DDTree:
    """Drafts with `network` and the most valuable tree in what its block says; see `block_tree`.

    Args:
        network: the layers; without DFlash 2's selector, whose laws depend on the token above.
        n_nodes: most nodes of a row's tree, root excluded.
        block_size: slots of a block, root included; None: as many as the network is trained for.
        n_ranks: likeliest tokens of a position that may be nodes.
        budget: what passes cost on this machine; each round then has the shape and size that pay
            best, a chain or no draft among them. None: a tree of `n_nodes`.
        confidence_temperature: at which the drafter's laws are taken as what a node is worth; below
            1 for one that is right more often than it is sure.

    The nodes are chosen, a one-hot q under `Rejection`.

    Raises:
        ValueError: for counts that do not fit, or a network with a selector; at `begin` as for
            `DFlash`.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        n_nodes: int = 32,
        *,
        block_size: int | None = None,
        n_ranks: int = 8,
        budget: Budget | None = None,
        confidence_temperature: float = 1.0,
    ) -> None:
        if not 0 < confidence_temperature < float("inf"):
            raise ValueError(
                f"confidence_temperature: expected a number above 0, got {confidence_temperature}"
            )
        for name, value in (("n_nodes", n_nodes), ("n_ranks", n_ranks)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if network.selector is not None:
            raise ValueError(
                "network: expected laws that do not depend on the token above, but it has DFlash "
                "2's selector; DFlash(network, top_k=...) grows a tree with it"
            )
        self.network, self.block_size = network, block_size_of(network, block_size)
        self.n_nodes, self.n_ranks, self.budget = n_nodes, n_ranks, budget
        self.confidence_temperature = confidence_temperature

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.taps

    def begin(self, target: Model, batch_size: int, max_length: int) -> DDTreeState:
        check_fits(self.network, target)
        check_window(self.network.config, max_length)
        return DDTreeState(self, target, batch_size, max_length)


class DDTreeState:
    def __init__(self, config: DDTree, target: Model, batch_size: int, max_length: int) -> None:
        self.config = config
        self.laws = BlockLaws(config.network, config.block_size, target, batch_size, max_length)

    def propose(self, context: Context) -> Draft:
        n_levels = min(self.config.block_size - 1, context.max_depth)
        if not n_levels:  # the last round, or a block of the root alone
            return Draft.empty(len(context.lengths), context.tokens.device)
        _, logits = self.laws.read(context, n_levels)
        c = self.config
        tokens, probs = candidates(context, logits, c.n_ranks, c.confidence_temperature)
        return block_tree(tokens, probs, c.n_nodes, context.depth_left, c.budget)


class DFlashState:
    def __init__(self, config: DFlash, target: Model, batch_size: int, max_length: int) -> None:
        self.config, self.target = config, target
        self.laws = BlockLaws(config.network, config.block_size, target, batch_size, max_length)

    def propose(self, context: Context) -> Draft:
        n_levels = min(self.config.n_drafts, context.max_depth)
        if not n_levels:  # the last round, or a block of the root alone
            return Draft.empty(len(context.lengths), context.tokens.device)
        states, logits = self.laws.read(context, n_levels)
        if self.config.network.selector is not None:
            return self._grow_selected(context, states, logits, n_levels)
        return (self._chain if self.config.top_k == 1 else self._grow)(context, logits, n_levels)

    def _chain(self, context: Context, logits: Tensor, n_levels: int) -> Draft:
        """All positions in one pick."""
        depths = torch.arange(n_levels, device=logits.device)
        tokens, q = context.rule.pick(logits, context.lengths, depths, draw=self.config.draw)
        used = depths < context.depth_left.unsqueeze(1)
        return Draft(tokens.squeeze(2), None, None if q is None else q.squeeze(2), used)

    def _grow(self, context: Context, logits: Tensor, n_levels: int) -> Draft:
        depth = 0

        def extend(tokens: Tensor, parents: Tensor | None) -> Tensor:
            nonlocal depth
            depth += 1
            return logits[:, depth : depth + 1].expand(-1, tokens.shape[1], -1)

        return grow(self.config, context, logits[:, :1], extend, n_levels, context.depth_left)

    def _grow_selected(
        self, context: Context, states: Tensor, logits: Tensor, n_levels: int
    ) -> Draft:
        """With the selector a law depends on the token above, so every depth is a step."""
        select, depth = self.config.network.selector, 0
        assert select is not None

        def extend(tokens: Tensor, parents: Tensor | None) -> Tensor:
            nonlocal depth
            depth += 1
            return select(states[:, depth], logits[:, depth], tokens)

        first = select(states[:, 0], logits[:, 0], roots_of(context))
        return grow(self.config, context, first, extend, n_levels, context.depth_left)


def roots_of(context: Context) -> Tensor:
    """The root of every row, [B, 1]."""
    return context.tokens.gather(1, context.lengths.unsqueeze(1) - 1)


class BlockLaws:
    """One run of the network: the context in its cache, and what a block says behind it."""

    def __init__(
        self,
        network: DFlashNetwork,
        block_size: int,
        target: Model,
        batch_size: int,
        max_length: int,
    ) -> None:
        self.network, self.target, self.block_size = network, target, block_size
        c, dtype, device = network.config, target.dtype, target.device
        n_slots = max_length + block_size
        self.store = KVStore(
            c.num_hidden_layers, batch_size, c.n_kv_heads, c.head_size, n_slots, dtype, device
        )
        self.angles = RotaryStore(c.head_size, c.rope_theta, n_slots, dtype, device)
        self.cache = TreeCache(
            batch_size, [self.store, self.angles], c.num_hidden_layers, dtype, device
        )

    def read(self, context: Context, n_levels: int) -> tuple[Tensor, Tensor]:
        """Take in the new context, run the block behind it.

        Returns states [B, n_levels, D] and logits [B, n_levels, V] of the slots below the root.

        Raises:
            ValueError: if a round was left out.
        """
        self._append(context)
        block = self.network.block_tokens(roots_of(context).squeeze(1), self.block_size)
        self.cache.append(self.block_size, None)
        view, lengths = self.cache.view(0), self.cache.lengths
        views = {
            sight: for_groups(
                block_view(view, sight, lengths, self.block_size, self.target.dtype),
                self.network.config.n_groups,
            )
            for sight in set(self.network.sights)
        }
        states = self.network(
            self.target.embedding(block), self.angles.at(view), self.store, views
        )[:, 1 : 1 + n_levels]
        none = torch.zeros_like(lengths)
        self.cache.commit(none.new_zeros(len(none), 0), none)  # the block is never kept
        return states, self.network.logits(states, self.target)

    def _append(self, context: Context) -> None:
        """Commit keys and values of the target's states that are new."""
        n_new, have = context.n_new, self.cache.lengths
        if bool((have + n_new != context.lengths - 1).any()):
            raise ValueError(
                f"context.new_tokens: expected all since the last call, but {have.tolist()} states "
                f"and {n_new.tolist()} new ones do not make rows of {context.lengths.tolist()} "
                f"tokens; call propose in every round"
            )
        for start in range(0, context.new_tokens.shape[1], _CHUNK):
            here = slice(start, start + _CHUNK)
            features = self.network.fuse(
                {tap: context.hidden[tap][:, here] for tap in self.network.taps}
            )
            self.cache.append(features.shape[1], None)
            view = self.cache.view(0)
            seen = for_groups(view, self.network.config.n_groups)
            self.network.read(features, self.angles.at(view), self.store, seen)
            path, whole = everything(features.shape[1], len(n_new), n_new.device)
            self.cache.commit(path, torch.minimum((n_new - start).clamp(min=0), whole))
