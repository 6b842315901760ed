"""Static trees: a fixed shape, written as rank paths, that a drafter fills with tokens each round.

The path (0, 2) is the node below the likeliest child of the root that holds the third-likeliest
token of its own depth. A tree is a list of such paths, closed under taking prefixes. The running
example of `specdec.draft` in this notation, with tokens that know their depth only::

    the ── cat (0) ─┬─ sat (0,0) ── on (0,0,0)
        │           └─ is  (0,1)
        └─ dog (1) ─── sat (1,0) ── on (1,0,0)

Trees of Medusa (arXiv:2401.10774, sections 2.1.2 and 2.3.3). The search for the best of them,
`best_first`, also builds the trees that a block drafter fills each round (`drafters.block_tree`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

Path = tuple[int, ...]
"""Ranks from a child of the root down to a node; 0 is the likeliest."""

_MC_SIM_7B_63 = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21
004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001
16 070
"""
MC_SIM_7B_63: tuple[Path, ...] = tuple(tuple(map(int, path)) for path in _MC_SIM_7B_63.split())
"""The 63-node tree published with Medusa's Vicuna-7B heads, in the order its search found them."""


@dataclass(frozen=True)
class StaticTree:
    """The shape of a tree: `paths` by depth, then by rank, so that parents come before children."""

    paths: tuple[Path, ...]

    @cached_property
    def parents(self) -> Tensor:
        """[N] int64: index of each node's parent, -1 for the root."""
        index = {path: i for i, path in enumerate(self.paths)}
        return torch.tensor([index.get(path[:-1], -1) for path in self.paths])

    @cached_property
    def depths(self) -> Tensor:
        """[N] int64, not falling; a child of the root has depth 1."""
        return torch.tensor([len(path) for path in self.paths])

    @cached_property
    def ranks(self) -> Tensor:
        """[N] int64: which of its depth's candidates a node holds."""
        return torch.tensor([path[-1] for path in self.paths])

    @property
    def max_depth(self) -> int:
        return len(self.paths[-1])

    @property
    def max_rank(self) -> int:
        return max(path[-1] for path in self.paths)

    @property
    def gap(self) -> Path | None:
        """The first node whose sibling of the next lower rank is missing, or None.

        Candidates are drawn one after another, so the law of rank r is one given all lower ranks.
        Only where these are the node's earlier siblings is it the law that `Draft.probs` declares.
        """
        known = set(self.paths)
        for path in self.paths:
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                return path
        return None


def static_tree(choices: Sequence[Sequence[int]]) -> StaticTree:
    """The tree of a list of rank paths, in any order.

    Raises:
        ValueError: for no choices, an empty path, a negative rank, a path that comes twice, or one
            whose prefix is missing.
    """
    paths = sorted((tuple(choice) for choice in choices), key=lambda path: (len(path), path))
    if not paths:
        raise ValueError("choices: expected at least one rank path, got none")
    known = set(paths)
    if len(known) < len(paths):
        twice = next(path for path, after in pairwise(paths) if path == after)
        raise ValueError(f"choices: expected every path once, got {twice} again")
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"choices: expected paths of ranks >= 0, at least one, got {path}")
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"choices: {path} hangs below {path[:-1]}, which is missing")
    return StaticTree(tuple(paths))


def dense_choices(widths: Sequence[int]) -> list[Path]:
    """Every node at depth d - 1 gets `widths[d - 1]` children: the Cartesian product of the top-k.

    (1, 1, 1) is a chain; (2, 3) has 2 + 2 * 3 nodes (arXiv:2401.10774, section 2.1.2).

    Raises:
        ValueError: for no widths, or one below 1.
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"widths: expected numbers >= 1, at least one, got {list(widths)}")
    return [
        path
        for depth in range(1, len(widths) + 1)
        for path in product(*(range(width) for width in widths[:depth]))
    ]


def search_choices(accuracies: Tensor | Sequence[Sequence[float]], n_nodes: int) -> list[Path]:
    """The tree of `n_nodes` nodes that should be accepted deepest (arXiv:2401.10774, 2.3.3).

    Taking depths as independent, a node is accepted with the product of the accuracies along its
    path, and the tree's expected accepted length is the sum over its nodes. The best node within
    reach is added, `n_nodes` times; within reach are the first child of a node in the tree and its
    next sibling. No tree does better where accuracies do not rise with the rank. Ranks come in
    order, so the tree can also be drawn into.

    Args:
        accuracies: [n_heads, n_ranks], how often the candidate of this rank is the true token at
            this depth; see `specdec.drafters.static_draft.rank_accuracies`.
        n_nodes: nodes of the tree, root excluded.

    Returns:
        Paths in the order they were added, so that a prefix of the list is a smaller best tree.

    Raises:
        ValueError: for accuracies that are no such table of shares, or more nodes than it has.
    """
    table = _table(accuracies)
    n_heads, n_ranks = len(table), len(table[0])
    most = sum(n_ranks**depth for depth in range(1, n_heads + 1))
    if not 1 <= n_nodes <= most:
        raise ValueError(f"n_nodes: expected 1..{most}, got {n_nodes}")
    return [node.path for node in islice(best_first(table), n_nodes)]


class Node(NamedTuple):
    """A node that `best_first` has reached."""

    path: Path
    """Ranks from a child of the root down to it; as many as it is deep."""
    parent: int
    """Which of the nodes before it is its parent; -1 for the root."""
    value: float
    """The product of the table along its path."""


def best_first(table: Sequence[Sequence[float]]) -> Iterator[Node]:
    """Every node of a table of shares, the most valuable within reach first.

    `table[d - 1][r]` is what rank r at depth d is worth, whatever stands above it, and a node is
    worth the product along its path. Within reach are the first child of a node that has come and
    its next sibling, so parents and lower ranks come first; equals come in order of their paths.
    Where no entry is above 1 and none rises with the rank, values fall from node to node, and the
    first n are the n most valuable there are. A node costs a multiplication and O(log n) for its
    place in the heap, however many ranks the table offers: the search of DDTree (arXiv:2604.12989).
    """
    n_nodes = 0
    # -value, path, parent, the parent's value: a sibling needs no product along its path either
    reach: list[tuple[float, Path, int, float]] = []
    if table and table[0]:
        reach.append((-table[0][0], (0,), -1, 1.0))
    while reach:
        value, path, parent, above = heapq.heappop(reach)
        value, depth, rank = -value, len(path), path[-1] + 1
        yield Node(path, parent, value)
        if rank < len(table[depth - 1]):
            sibling = (*path[:-1], rank)
            heapq.heappush(reach, (-above * table[depth - 1][rank], sibling, parent, above))
        if depth < len(table) and table[depth]:
            heapq.heappush(reach, (-value * table[depth][0], (*path, 0), n_nodes, value))
        n_nodes += 1


def expected_accepted(
    choices: Sequence[Sequence[int]], accuracies: Tensor | Sequence[Sequence[float]]
) -> float:
    """Expected accepted nodes a round of a tree, depths taken as independent; tau is one more.

    `accuracies` as in `search_choices`. Raises ValueError for a tree that is none, or reaches
    beyond the table.
    """
    table, tree = _table(accuracies), static_tree(choices)
    if tree.max_depth > len(table) or tree.max_rank >= len(table[0]):
        raise ValueError(
            f"choices: depth {tree.max_depth} and rank {tree.max_rank} reach beyond accuracies of "
            f"shape {[len(table), len(table[0])]}"
        )
    return sum(_value(path, table) for path in tree.paths)


def _value(path: Path, table: list[list[float]]) -> float:
    """Probability that a node is accepted: the product of the accuracies along its path."""
    return math.prod(table[depth][rank] for depth, rank in enumerate(path))


def _table(accuracies: Tensor | Sequence[Sequence[float]]) -> list[list[float]]:
    table = torch.as_tensor(accuracies, dtype=torch.float64)
    if table.ndim != 2 or not table.numel():
        raise ValueError(f"accuracies: expected shape [n_heads, n_ranks], got {list(table.shape)}")
    if not bool(((table >= 0) & (table <= 1)).all()):
        raise ValueError(f"accuracies: expected shares in [0, 1], got {table.tolist()}")
    return table.tolist()
