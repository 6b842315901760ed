"""Drafting with the modules of DeepSeek-V3 (`mtp.py`): one run again and again, or D in sequence.

One module is run again on what it hands on, as an EAGLE layer is, though it was only trained to
look one token ahead. Of D modules, module k drafts depth k, and depth D is the last.

Module k keeps an entry for every token x_t from t = k on. It stands at place t - k, is made of the
embedding of x_t and of what module k - 1 handed on *one token before*, and predicts x_{t+1}. With
drafted tokens it is the same, "one token before" being the node's parent. So once the draft is
k - 1 deep, module k reads in one pass the new tokens of the row and the draft so far, each with
what module k - 1 handed on at its parent; what it says after the deepest nodes drafts depth k.

The entries of true tokens are committed at once. Those of drafted tokens are dropped: the next
round makes them anew from what turned out true. For the first of its tokens it needs what was
handed on at the last of this one's: one state a module is all that is kept beside the caches.

Chains, and the trees of EAGLE-2: `eagle_tree.py` grows both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..draft import Draft, depths
from ..protocol import FINAL, Context, Model
from .eagle_tree import CachedLayer, check_fits, check_shape, check_window, grow, select
from .mtp import SequentialModules

_CHUNK = 512  # tokens of a prompt that a module reads in one pass


class MTPModules:
    """Drafts with `network`: a chain, or EAGLE-2's dynamic tree.

    Args:
        network: the modules. One is run again on its own outputs; of several, module k drafts
            depth k.
        n_drafts: depth of the draft, at most the number of modules if there are several. None: as
            many, or 4 with one module.
        top_k: children a node may get and nodes expanded per level; 1 is a chain.
        n_nodes: most nodes of a tree; see `Eagle`.
        draw: under `Rejection`, draw the nodes (without replacement) and declare their law q; False
            chooses the likeliest instead, a one-hot q. Other rules always choose.

    Raises:
        ValueError: for counts that do not fit; at `begin` for a target of another width,
            vocabulary, dtype or device, a tap that is not its last state before or behind the final
            norm, or a run beyond the modules' window.
    """

    def __init__(
        self,
        network: SequentialModules,
        n_drafts: int | None = None,
        *,
        top_k: int = 1,
        n_nodes: int = 60,
        draw: bool = True,
    ) -> None:
        n_modules = network.n_modules
        if n_drafts is None:
            n_drafts = n_modules if n_modules > 1 else 4
        if n_drafts > n_modules > 1:
            raise ValueError(
                f"n_drafts: expected at most {n_modules}, one a module (only a single module is "
                f"run again), got {n_drafts}"
            )
        self.network, self.n_drafts, self.top_k = network, n_drafts, top_k
        self.n_nodes, self.draw = n_nodes, draw
        check_shape(self, network.config.vocab_size)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.taps

    def begin(self, target: Model, batch_size: int, max_length: int) -> MTPState:
        check_fits(self.network, target)
        if self.network.tap not in (FINAL, target.n_layers):
            raise ValueError(
                f"network: reads tap {self.network.tap}, but modules continue the target's last "
                f"state: {target.n_layers}, its number of blocks, or FINAL"
            )
        check_window(self.network.config, max_length)
        return MTPState(self, target, batch_size, max_length)


@dataclass(frozen=True)
class Piece:
    """New tokens of every row, read in one go."""

    tokens: Tensor
    """[B, A] int64."""
    n: Tensor
    """[B] how many of them hold."""
    before: Tensor
    """[B] tokens of the row before them."""
    even: bool
    """All of them hold in every row, and every module has had its first token."""

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


class MTPState:
    """One run; what a module hands on at the *slots* of a pass: new tokens, then drafted ones."""

    def __init__(self, config: MTPModules, target: Model, batch_size: int, max_length: int) -> None:
        self.config, self.target, self.network = config, target, config.network
        width = self.network.config.hidden_size
        self.layers = [
            CachedLayer(
                partial(self.network.step, k, target),
                self.network.config,
                target,
                batch_size,
                max_length,
            )
            for k in range(1, min(config.n_drafts, self.network.n_modules) + 1)
        ]
        nothing = torch.zeros(batch_size, 1, width, dtype=target.dtype, device=target.device)
        self.last = [nothing for _ in self.layers]  # handed on at the last token of every row

    def propose(self, context: Context) -> Draft:
        n_levels = min(self.config.n_drafts, context.max_depth)
        if not n_levels or not context.new_tokens.shape[1]:  # the last round, or no pair in any row
            return Draft.empty(len(context.lengths), context.tokens.device)
        # deeper modules are not needed any more: budgets only shrink
        piece, handed = self._read(context, min(n_levels, len(self.layers)))
        root = select(handed, piece.n.unsqueeze(1))  # [B, 1, D]
        self.piece, self.handed = piece, root if self.network.n_modules == 1 else handed
        self.nodes, self.module = Draft.empty(len(root), root.device), 1  # the draft so far
        logits = self.network.logits(1, root, self.target)
        # a prompt of one token has no pair to draft from yet
        deepest = torch.where(context.lengths > 1, context.depth_left, 0)
        extend = self._run_again if self.network.n_modules == 1 else self._run_next
        return grow(self.config, context, logits, extend, n_levels, deepest)

    def _read(self, context: Context, n_modules: int) -> tuple[Piece, Tensor]:
        """Module 1 reads the new tokens; the last of them, and what it hands on there.

        All modules read a prompt's earlier pieces.
        """
        before = context.lengths - context.n_new
        have = torch.stack([layer.cache.lengths for layer in self.layers[:n_modules]])
        k = torch.arange(1, n_modules + 1, device=have.device).unsqueeze(1)
        if bool((have != (before - k).clamp(min=0)).any()):
            raise ValueError(
                f"context.new_tokens: expected all since the last call, but module 1 has read "
                f"{have[0].tolist()} pairs and {context.n_new.tolist()} new ones do not make rows "
                f"of {context.lengths.tolist()} tokens; call propose in every round"
            )
        self.layers[0].drop()  # what it drafted when run again
        tail = (context.new_tokens.shape[1] - 1) // _CHUNK * _CHUNK
        for start in range(0, tail, _CHUNK):
            piece, handed = self._read_piece(context, start, n_modules)
            nothing = Draft.empty(len(handed), handed.device)
            for module in range(2, n_modules + 1):
                handed = self._next(module, piece, handed, nothing)
        return self._read_piece(context, tail, n_modules)

    def _read_piece(self, context: Context, start: int, n_modules: int) -> tuple[Piece, Tensor]:
        """Module 1 reads the new tokens from `start` on; see `_pass`."""
        here = slice(start, start + _CHUNK)
        tokens, states = context.new_tokens[:, here], context.hidden[self.network.tap][:, here]
        n = (context.n_new - start).clamp(0, tokens.shape[1])
        before = context.lengths - (context.n_new - start).clamp(min=0)
        even = bool(((n == tokens.shape[1]) & (before >= n_modules)).all())
        piece = Piece(tokens, n, before, even)
        return piece, self._pass(1, piece, states, tokens, None)

    def _run_again(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """One module: nodes are fed with what it handed on at their parents; see `Extend`."""
        above = self.handed[:, -1:] if parents is None else select(self.handed, parents + 1)
        handed = self.layers[0].run(above, tokens, parents)
        self.handed = torch.cat([self.handed, handed], dim=1)
        return self.network.logits(1, handed, self.target)

    def _run_next(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """The next module, on the new tokens and all of the draft so far; see `Extend`."""
        if parents is not None and self.nodes.parents is not None:
            parents = torch.cat([self.nodes.parents, parents], dim=1)
        self.nodes = Draft(torch.cat([self.nodes.tokens, tokens], dim=1), parents)
        self.module += 1
        self.handed = self._next(self.module, self.piece, self.handed, self.nodes)
        return self.network.logits(self.module, self.handed[:, -tokens.shape[1] :], self.target)

    def _next(self, k: int, piece: Piece, handed: Tensor, nodes: Draft) -> Tensor:
        """Module k, 2..D, after `handed` by module k - 1: [B, 1 + A + n, D], see `_pass`."""
        tokens, n_slots = torch.cat([piece.tokens, nodes.tokens], dim=1), piece.width
        if piece.even and nodes.parents is None:  # one chain
            return self._pass(k, piece, handed[:, : tokens.shape[1]], tokens, None)
        above = nodes.tree()
        above = torch.where(above >= 0, above + n_slots, piece.n.unsqueeze(1) - 1)
        chain = torch.arange(-1, n_slots - 1, device=above.device).expand(len(above), -1)
        above = torch.cat([chain, above], dim=1)  # [B, A + n], -1 for the token before the piece
        root = (piece.before + piece.n - 1).unsqueeze(1)
        index = torch.cat([piece.before.unsqueeze(1) + chain + 1, root + depths(nodes.tree())], 1)
        # token k is the first of module k: what stands above it there counts for nothing
        parents = torch.where(index > k, above, -1)
        return self._pass(k, piece, select(handed, above + 1), tokens, parents)

    def _pass(
        self, k: int, piece: Piece, states: Tensor, tokens: Tensor, parents: Tensor | None
    ) -> Tensor:
        """Run module k and commit the true tokens' entries.

        `states` [B, N, D] what was handed on at the parents of `tokens` [B, N], the piece's and
        then drafted ones. Returns what it hands on at the token before the piece and at all of
        them, [B, 1 + N, D].
        """
        layer = self.layers[k - 1]
        handed = torch.cat([self.last[k - 1], layer.run(states, tokens, parents)], dim=1)
        missing = (k - piece.before).clamp(min=0).minimum(piece.n)  # tokens before its first
        path = missing.unsqueeze(1) + torch.arange(piece.width, device=missing.device)
        layer.cache.commit(path.clamp(max=piece.width - 1), piece.n - missing)
        self.last[k - 1] = select(handed, piece.n.unsqueeze(1))
        return handed
