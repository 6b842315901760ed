"""The cache: a committed prefix plus a pending tree, for ragged batches.

`TreeCache` keeps the books (lengths, parents of the pending nodes) and hands every layer a `View`:
where its new entries go, at which positions they stand and what they see. What a layer keeps is a
*store*; `KVStore` holds the keys and values of all attention layers of one shape in one buffer, so
that a commit is one gather and one scatter for the whole model. Recurrent layers keep theirs beside
it (`models.delta_net.DeltaStore`): a store has `reserve`, `commit` and nothing else that the cache
relies on.

In slot order a row reads: committed tokens 0..length-1, then its pending nodes in the order they
came. Positions go by depth, never by slot: node i stands at length + depth(i).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .draft import ancestors


@dataclass(frozen=True)
class View:
    """What pending nodes `first`.. of the tree see, for the layers of one forward pass."""

    first: int
    """Index of the first of them among the pending nodes."""
    n_slots: int
    """Slots in play: the longest row's committed tokens plus all pending nodes."""
    positions: Tensor
    """[B or 1, N] int64."""
    mask: Tensor | None
    """[B or 1, 1, N, n_slots], 0 where a query sees a slot, else -inf; None: it sees all."""
    slots: Tensor | None
    """[B, N] where the entries go; None: the same contiguous slots in every row, the last N."""
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None = None
    """Another attention than `models.layers.grouped_attention`, called as it is."""
    parents: Tensor | None = None
    """[B, P] of all pending nodes; None: a chain."""
    ancestors: Tensor | None = None
    """[B, N, P] bool: pending nodes that a new one descends from, or is; None: a chain."""


@dataclass(frozen=True)
class Moves:
    """Entries that a commit moves: slot `source` -> `target` of `rows`, each [M]."""

    rows: Tensor
    source: Tensor
    target: Tensor


@dataclass(frozen=True)
class Kept:
    """What a commit keeps: the first `n` [B] nodes of `path` [B, P], the pending ones in order.

    `longest` is the largest of `n`, on the host. `moves` are the entries that do not lie in place,
    None where all do.
    """

    path: Tensor
    n: Tensor
    longest: int
    moves: Moves | None


class Store(Protocol):
    """What the layers of one kind keep per row."""

    def reserve(self, n_slots: int) -> None:
        """Make room for `n_slots` slots a row."""
        ...

    def commit(self, kept: Kept) -> None:
        """Keep a path and forget all other pending nodes."""
        ...


class KVStore:
    """Keys and values of all attention layers of one shape: [layers, 2, B, H_kv, slots, d].

    A cache is for inference: what it holds carries no gradient.
    """

    def __init__(
        self,
        n_layers: int,
        batch_size: int,
        n_heads: int,
        head_dim: int,
        n_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        # zeros, not empty: a masked slot has weight 0, and 0 * NaN is NaN
        self._use(
            torch.zeros(
                n_layers, 2, batch_size, n_heads, n_slots, head_dim, dtype=dtype, device=device
            )
        )

    def _use(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.keys = [buffer[i, 0] for i in range(len(buffer))]
        self.values = [buffer[i, 1] for i in range(len(buffer))]

    def reserve(self, n_slots: int) -> None:
        have = self.buffer.shape[4]
        if n_slots > have:
            room = max(n_slots, have + have // 4) - have
            self._use(
                torch.cat(
                    [
                        self.buffer,
                        torch.zeros_like(self.buffer[:, :, :, :, :1]).expand(
                            -1, -1, -1, -1, room, -1
                        ),
                    ],
                    dim=4,
                )
            )

    def write(self, layer: int, view: View, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `keys` and `values` [B, N, H_kv, d]; return all, each [B, H_kv, slots, d]."""
        if torch.is_grad_enabled():
            keys, values = keys.detach(), values.detach()
        all_keys, all_values = self.keys[layer], self.values[layer]
        if view.slots is None:
            n = keys.shape[1]
            all_keys.narrow(2, view.n_slots - n, n).copy_(keys.transpose(1, 2))
            all_values.narrow(2, view.n_slots - n, n).copy_(values.transpose(1, 2))
        else:
            rows = torch.arange(len(keys), device=keys.device).unsqueeze(1)
            all_keys[rows, :, view.slots] = keys
            all_values[rows, :, view.slots] = values
        return all_keys[:, :, : view.n_slots], all_values[:, :, : view.n_slots]

    def commit(self, kept: Kept) -> None:
        if kept.moves is not None:
            moves = kept.moves
            moved = self.buffer[:, :, moves.rows, :, moves.source]
            self.buffer[:, :, moves.rows, :, moves.target] = moved


class TreeCache:
    """Committed prefix plus pending tree of `batch_size` rows; see the module's first lines."""

    def __init__(
        self,
        batch_size: int,
        stores: Sequence[Store],
        n_layers: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.stores = tuple(stores)
        self.dtype = dtype
        self.n_layers = n_layers
        self._lengths = [0] * batch_size  # the same numbers on the host
        self.n_pending = 0
        self.depth_done = n_layers  # blocks that the pending nodes have been through
        self._parents: Tensor | None = None  # [B, P]; None: a chain
        self._ancestors: Tensor | None = None  # [B, P, P]; None: a chain

    def append(self, n_new: int, parents: Tensor | None) -> None:
        """Add `n_new` pending nodes; `parents` [B, n_new] as in `Model.__call__`."""
        n_old, rows = self.n_pending, len(self.lengths)
        if parents is not None and parents.shape != (rows, n_new):
            raise ValueError(f"parents: expected [{rows}, {n_new}], got {list(parents.shape)}")
        if parents is None and self._parents is not None:
            last = torch.arange(n_old - 1, n_old + n_new - 1, device=self.lengths.device)
            parents = last.expand(rows, -1)
        if parents is not None:
            old = self._parents
            if old is None:
                old = torch.arange(-1, n_old - 1, device=self.lengths.device).expand(rows, -1)
            parents = torch.cat([old, parents], dim=1)
            self._ancestors = ancestors(parents)  # raises before anything has changed
            self._parents = parents
        self.n_pending = n_old + n_new
        for store in self.stores:
            store.reserve(max(self._lengths) + self.n_pending)

    def view(self, first: int) -> View:
        """What the pending nodes from `first` on see."""
        n, n_slots = self.n_pending - first, max(self._lengths) + self.n_pending
        device = self.lengths.device
        if min(self._lengths) == max(self._lengths):
            slots = None
            if self._ancestors is None:
                positions = torch.arange(n_slots - n, n_slots, device=device).unsqueeze(0)
                mask = None if n == 1 else self._chain_mask(n, n_slots)
                return View(first, n_slots, positions, mask, slots)
        else:
            slots = self.lengths.unsqueeze(1) + torch.arange(first, self.n_pending, device=device)
        table = self._ancestors
        if table is None:
            table = torch.ones(self.n_pending, self.n_pending, dtype=torch.bool, device=device)
            table = table.tril().expand(len(self.lengths), -1, -1)
        table = table[:, first:]
        positions = self.lengths.unsqueeze(1) + table.sum(-1) - 1
        mask = self._tree_mask(table, n_slots)
        if self._ancestors is None:
            return View(first, n_slots, positions, mask, slots)
        return View(first, n_slots, positions, mask, slots, None, self._parents, table)

    def _chain_mask(self, n: int, n_slots: int) -> Tensor:
        mask = torch.zeros(n, n_slots, dtype=self.dtype, device=self.lengths.device)
        mask[:, n_slots - n :] = torch.full_like(mask[:, :n], -torch.inf).triu(1)
        return mask[None, None]

    def _tree_mask(self, table: Tensor, n_slots: int) -> Tensor:
        """Mask of an ancestor table [B, N, P]: committed slots, then the node's own ancestors."""
        node = torch.arange(n_slots, device=table.device) - self.lengths.unsqueeze(1)  # [B, slots]
        seen = node.clamp(0, self.n_pending - 1).unsqueeze(1).expand(-1, table.shape[1], -1)
        visible = table.gather(2, seen) & (node < self.n_pending).unsqueeze(1)
        visible = visible | (node < 0).unsqueeze(1)  # [B, N, slots]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=table.device)
        return mask.masked_fill_(~visible, -torch.inf).unsqueeze(1)

    def commit(self, path: Tensor, n: Tensor) -> None:
        """Keep the first `n` [B] nodes of `path` [B, P] in every row; see `Cache.commit`.

        That `path` is one, child below parent, is taken on trust: checking it would wait for the
        device. Drafts are checked by the loop, before they are appended.
        """
        rows = len(self._lengths)
        if path.ndim != 2 or len(path) != rows or n.shape != (rows,) or n.is_floating_point():
            raise ValueError(
                f"path, n: expected [{rows}, P] and whole numbers [{rows}], got "
                f"{list(path.shape)} and {n.dtype} of {list(n.shape)}"
            )
        counts = n.tolist()
        longest = max(counts)
        if min(counts) < 0 or longest > min(path.shape[1], self.n_pending):
            raise ValueError(
                f"n: expected 0..{min(path.shape[1], self.n_pending)} (nodes on the "
                f"path that are pending), got {counts}"
            )
        if longest and self.depth_done < self.n_layers:
            raise ValueError(
                f"commit: the pending nodes have been through {self.depth_done} of "
                f"{self.n_layers} blocks; resume them first, or drop them (n = 0)"
            )
        moves, path = None, path[:, :longest]
        if longest and self._parents is not None:
            step = torch.arange(longest, device=path.device)
            rows, steps = ((step < n.unsqueeze(1)) & (path != step)).nonzero(as_tuple=True)
            if len(rows):
                start = self.lengths[rows]
                moves = Moves(rows, start + path[rows, steps], start + steps)
        kept = Kept(path, n, longest, moves)
        for store in self.stores:
            store.commit(kept)
        if longest:
            self.lengths = self.lengths + n
            self._lengths = [have + new for have, new in zip(self._lengths, counts, strict=True)]
        self.n_pending, self.depth_done = 0, self.n_layers
        self._parents = self._ancestors = None


def everything(n: int, batch_size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The path and count that commit a whole pending chain of `n` nodes in every row."""
    return (
        torch.arange(n, device=device).expand(batch_size, n),
        torch.full((batch_size,), n, device=device),
    )
