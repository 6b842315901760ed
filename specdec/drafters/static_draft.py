"""What drafters with parallel heads share: a static tree, filled from one law a depth.

Heads that read the state at the root and do not see each other's guesses say one law for each
depth, whatever stands above a node (Medusa, parallel multi-token prediction). So a depth has one
list of candidates, and the nodes of `specdec.trees` take theirs from it by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..draft import Draft, chain_parents
from ..protocol import Context, Model
from ..trees import StaticTree, static_tree


class Heads(Protocol):
    """A network whose heads predict the tokens at depth 1, 2, ... below the root."""

    @property
    def n_depths(self) -> int:
        """How deep it can draft."""
        ...

    def check_fits(self, target: Model) -> None:
        """Raise a ValueError that names what does not fit the target."""
        ...

    def logits_by_depth(self, target: Model, tokens: Tensor) -> Iterator[Tensor]:
        """`tokens` [B, T] -> [B, T, V] for depth k = 1, 2, ...; place t predicts x_{t+1+k}."""
        ...


def tree_for(
    choices: Sequence[Sequence[int]], n_depths: int, vocab_size: int, *, draw: bool
) -> StaticTree:
    """The tree of `choices`, for heads of `n_depths` depths; with `draw`, one to be drawn into.

    Raises:
        ValueError: for a tree that is none, too deep for the heads or too wide for the vocabulary;
            with `draw`, one whose siblings leave out a rank.
    """
    tree = static_tree(choices)
    if tree.max_depth > n_depths:
        raise ValueError(
            f"choices: expected a depth of at most {n_depths}, one head a depth, "
            f"got {tree.max_depth}"
        )
    if tree.max_rank >= vocab_size:
        raise ValueError(
            f"choices: expected ranks below the vocabulary of {vocab_size}, got {tree.max_rank}"
        )
    if draw and tree.gap is not None:
        raise ValueError(
            f"choices: expected the children of a node to have ranks 0, 1, 2, ... to be drawn "
            f"into, got {tree.gap} without its sibling of rank {tree.gap[-1] - 1}"
        )
    return tree


class StaticDraft:
    """A static tree on the run's device, and how a round fills it.

    `draw`: under `Rejection`, draw the candidates of a depth (without replacement) and declare
    their law q, instead of choosing the likeliest.
    """

    def __init__(self, tree: StaticTree, device: torch.device, *, draw: bool) -> None:
        self.draw = draw
        self.parents, self.depths = tree.parents.to(device), tree.depths.to(device)
        self.is_chain = tree.parents.tolist() == chain_parents(len(tree.paths)).tolist()
        by_depth = [tree.ranks[tree.depths == d] for d in range(1, tree.max_depth + 1)]
        self.widths = [int(ranks.max()) + 1 for ranks in by_depth]  # candidates a depth
        self.ranks = [ranks.to(device) for ranks in by_depth]

    def fill(self, context: Context, logits_at: Callable[[int], Tensor]) -> Draft:
        """The draft of a round in which some row may go `context.max_depth` >= 1 deep.

        `logits_at(depth)` [B, 1, V]: what is said of the tokens below the nodes at `depth` (the
        root has 0). Rows without a new token, those of a prompt of one token in the first round,
        have no state yet that predicted their root, and draft nothing; nor do dead rows.
        """
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for depth in range(min(len(self.widths), context.max_depth)):
            picked, q = context.rule.pick(
                logits_at(depth), context.lengths, depth, self.widths[depth], draw=self.draw
            )
            # nodes of one depth share its candidates, below whatever parent
            tokens.append(picked[:, 0, self.ranks[depth]])
            if q is not None:
                laws.append(q[:, 0, self.ranks[depth]])
        drafted = torch.cat(tokens, dim=1)  # [B, N]
        n = drafted.shape[1]
        ready = context.live & (context.n_new > 0)
        used = ready.unsqueeze(1) & (self.depths[:n] <= context.depth_left.unsqueeze(1))
        parents = None if self.is_chain else self.parents[:n].expand_as(drafted)
        return Draft(drafted, parents, torch.cat(laws, dim=1) if laws else None, used)


@torch.no_grad()
def rank_accuracies(
    target: Model, heads: Heads, sequences: Iterable[Tensor], n_ranks: int = 10
) -> Tensor:
    """How often the candidate of rank i at depth k is the true token (arXiv:2401.10774, 2.3.3).

    Args:
        target, heads: as they decode; `heads` a `MedusaHeads` or `ParallelHeads`.
        sequences: calibration text, 1-D int64 tensors; text that the target wrote itself measures
            what will be accepted.
        n_ranks: candidates a depth.

    Returns:
        [depths, n_ranks] float64, on the CPU; what `specdec.trees.search_choices` takes.

    Raises:
        ValueError: for `n_ranks` outside 1..V, a sequence that is no 1-D int64 tensor, text too
            short for a head to predict anything, or heads of another target.
    """
    heads.check_fits(target)
    if not 1 <= n_ranks <= target.vocab_size:
        raise ValueError(f"n_ranks: expected 1..{target.vocab_size}, got {n_ranks}")
    hits = torch.zeros(heads.n_depths, n_ranks, dtype=torch.float64)
    n_seen = torch.zeros(heads.n_depths, 1, dtype=torch.float64)
    for tokens in sequences:
        if tokens.ndim != 1 or tokens.dtype != torch.long:
            raise ValueError(
                f"sequences: expected 1-D int64 tensors, got {tokens.dtype} of shape "
                f"{list(tokens.shape)}"
            )
        tokens = tokens.to(target.device)
        if len(tokens) < 3:
            continue
        by_depth = heads.logits_by_depth(target, tokens.unsqueeze(0))
        for k, logits in zip(range(1, len(tokens) - 1), by_depth, strict=False):
            top = logits[0, : -1 - k].topk(n_ranks).indices  # [T - 1 - k, n_ranks]
            hits[k - 1] += (top == tokens[1 + k :].unsqueeze(1)).sum(0).cpu()
            n_seen[k - 1] += len(top)
    if not bool((n_seen > 0).all()):
        raise ValueError(
            f"sequences: expected one of at least {heads.n_depths + 2} tokens, so that every head "
            f"has something to predict"
        )
    return hits / n_seen
