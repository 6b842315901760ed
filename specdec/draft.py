"""Drafts: trees of proposed tokens below a root, and what can be read off their parents.

The running example of the docs and tests, root `the`, seven nodes::

    the ── cat(0) ─┬─ sat(2) ── on(5)
        │          └─ is(3)
        └─ dog(1) ─── ran(4) ── to(6)        parents = [-1, -1, 0, 0, 1, 2, 4]

A chain is the tree whose node i has parent i - 1, written `parents=None`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """A tree below the root of every row.

    `tokens` [B, N] int64; `parents` [B, N] int64, the index of each node's parent, -1 for the root,
    parents before children; None for a chain. `probs` [B, N, V]: the law q each node was drawn
    from given its earlier siblings; None: the nodes were chosen, not drawn (a one-hot q). `used`
    [B, N] bool: nodes that count; None: all. Unused nodes are masked, never sliced away.
    `resume`: see `Model`; it counts root and nodes.
    """

    tokens: Tensor
    parents: Tensor | None = None
    probs: Tensor | None = None
    used: Tensor | None = None
    resume: tuple[int, Tensor] | None = None

    @property
    def n_nodes(self) -> int:
        return self.tokens.shape[1]

    def tree(self) -> Tensor:
        """The parents [B, N], also of a chain."""
        if self.parents is not None:
            return self.parents
        return chain_parents(self.n_nodes, self.tokens.device).expand_as(self.tokens)

    def mask(self) -> Tensor:
        """`used` [B, N], also where it is None."""
        return torch.ones_like(self.tokens, dtype=torch.bool) if self.used is None else self.used

    @staticmethod
    def empty(batch_size: int, device: torch.device | str = "cpu") -> Draft:
        return Draft(torch.zeros(batch_size, 0, dtype=torch.long, device=device))


def chain_parents(n: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(-1, n - 1, device=device)


def ancestors(parents: Tensor) -> Tensor:
    """Ancestor table [B, N, N] of `parents` [B, N]: True at [b, i, j] where j is i or above it.

    By pointer doubling: log2(N) gathers instead of one step a node.
    """
    n = parents.shape[1]
    table = torch.eye(n, dtype=torch.bool, device=parents.device).expand(len(parents), n, n)
    for hop in _doubled(parents):
        up = hop.clamp(min=0).unsqueeze(-1).expand(-1, -1, n)
        table = table | (table.gather(1, up) & (hop >= 0).unsqueeze(-1))
    return table


def depths(parents: Tensor) -> Tensor:
    """Depth [B, N] of every node; a child of the root (parent -1) has depth 1."""
    depth = torch.ones_like(parents)
    for hop in _doubled(parents):
        depth = depth + torch.where(hop >= 0, depth.gather(1, hop.clamp(min=0)), 0)
    return depth


def reachable(parents: Tensor, passing: Tensor) -> Tensor:
    """Nodes [B, N] that pass and whose whole path from the root passes."""
    for hop in _doubled(parents):
        passing = passing & ((hop < 0) | passing.gather(1, hop.clamp(min=0)))
    return passing


def _doubled(parents: Tensor):
    """Yield the ancestors 1, 2, 4, 8, ... steps up, -1 where there is none."""
    hop, steps = parents, 1
    while steps <= parents.shape[1] - 1:
        yield hop
        hop = torch.where(hop >= 0, hop.gather(1, hop.clamp(min=0)), -1)
        steps *= 2


def earlier_siblings(parents: Tensor) -> Tensor:
    """[B, N, N] bool: True at [b, i, j] where j is a sibling of i that comes before it."""
    same = parents.unsqueeze(2) == parents.unsqueeze(1)
    return same.tril(-1)


def path_to(parents: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
    """Path from the root down to `node` [B] (-1: the root itself).

    Returns `path` [B, N], the nodes in order and zeros behind them, and its length `n` [B].
    """
    n_nodes = parents.shape[1]
    table = torch.cat(
        [
            torch.zeros_like(parents[:, None], dtype=torch.bool).expand(-1, 1, n_nodes),
            ancestors(parents),
        ],
        dim=1,
    )
    on_path = table.gather(1, (node + 1)[:, None, None].expand(-1, 1, n_nodes)).squeeze(1)
    return gather_path(on_path)


def gather_path(on_path: Tensor) -> tuple[Tensor, Tensor]:
    """The marked nodes of `on_path` [B, N] in order, then zeros: `path` [B, N] and `n` [B]."""
    n_nodes = on_path.shape[1]
    index = torch.arange(n_nodes, device=on_path.device)
    path = torch.where(on_path, index, n_nodes).sort(dim=1).values
    n = on_path.sum(dim=1)
    return torch.where(path < n_nodes, path, 0), n


def validate_draft(draft: Draft, batch_size: int, vocab_size: int) -> None:
    """Raise a ValueError that names what is wrong with a draft, before anything has changed."""
    tokens, n = draft.tokens, draft.n_nodes if draft.tokens.ndim == 2 else -1
    if tokens.ndim != 2 or len(tokens) != batch_size or tokens.dtype != torch.long:
        raise ValueError(
            f"draft.tokens: expected int64 of shape [{batch_size}, N], "
            f"got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    if n == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"draft.tokens: expected ids in [0, {vocab_size}), got {low}..{high}")
    if draft.used is not None and (
        draft.used.shape != tokens.shape or draft.used.dtype != torch.bool
    ):
        raise ValueError(
            f"draft.used: expected bool of shape {list(tokens.shape)}, "
            f"got {draft.used.dtype} of shape {list(draft.used.shape)}"
        )
    if draft.parents is not None:
        _validate_parents(draft)
    elif draft.used is not None and not bool((draft.used[:, 1:] <= draft.used[:, :-1]).all()):
        raise ValueError("draft.used: a used node hangs below an unused one")
    if draft.probs is not None:
        _validate_probs(draft, vocab_size)


def _validate_parents(draft: Draft) -> None:
    parents, tokens = draft.parents, draft.tokens
    assert parents is not None
    if parents.shape != tokens.shape or parents.dtype != torch.long:
        raise ValueError(
            f"draft.parents: expected int64 of shape {list(tokens.shape)}, "
            f"got {parents.dtype} of shape {list(parents.shape)}"
        )
    index = torch.arange(draft.n_nodes, device=parents.device)
    wrong = (parents < -1) | (parents >= index)
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"draft.parents: node {i} of row {b} has parent {int(parents[b, i])}; "
            f"expected -1 (the root) or an earlier node, at most {i - 1}"
        )
    if draft.used is not None:
        above = draft.used.gather(1, parents.clamp(min=0)) | (parents < 0)
        if (draft.used & ~above).any():
            b, i = (draft.used & ~above).nonzero()[0].tolist()
            raise ValueError(
                f"draft.used: node {i} of row {b} is used below the unused node "
                f"{int(parents[b, i])}"
            )


def _validate_probs(draft: Draft, vocab_size: int) -> None:
    probs, tokens = draft.probs, draft.tokens
    assert probs is not None
    if probs.shape != (*tokens.shape, vocab_size) or not probs.is_floating_point():
        raise ValueError(
            f"draft.probs: expected floats of shape {[*tokens.shape, vocab_size]}, "
            f"got {probs.dtype} of shape {list(probs.shape)}"
        )
    total = probs.sum(-1)
    used = draft.mask()
    low = probs.amin(-1)  # NaN propagates
    wrong = used & ~((low >= 0) & ((total - 1).abs() <= 1e-3))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"draft.probs: node {i} of row {b} has minimum {float(low[b, i]):.4g} and "
            f"sum {float(total[b, i]):.6g}; expected a distribution (>= 0, sum 1)"
        )
    drawn = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if (used & (drawn <= 0)).any():
        b, i = (used & (drawn <= 0)).nonzero()[0].tolist()
        raise ValueError(
            f"draft.probs: node {i} of row {b} holds token {int(tokens[b, i])}, which "
            "its own q gives probability 0; expected the q the token was drawn from"
        )
