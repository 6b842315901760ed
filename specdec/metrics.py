"""What a run achieved, each quantity named and computed once.

* *tau*: emitted tokens per target pass and row. `tau` pools all rounds, `tau_rows` is the mean over
  rows of each row's own (the papers' averages differ in just this).
* *acceptance rate*: accepted / (accepted + rounds in which a tested child was refused). A round cut
  by budget or stop token is left out: its draft was not judged to the end.
* *by depth*: `conditional`, given that the parent was accepted and had a child to test, and
  `marginal`, over all rounds; in a tree, also by the rank of the accepted child among its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .accept import end_of
from .draft import earlier_siblings

if TYPE_CHECKING:
    from .generate import Round


@dataclass(frozen=True)
class DepthAcceptance:
    """Acceptance of nodes at one depth (a child of the root has depth 1)."""

    depth: int
    conditional: float
    marginal: float
    n_tested: int
    by_rank: tuple[float, ...] = ()
    """Share of the tested families whose r-th child was accepted; they sum to `conditional`."""


@dataclass(frozen=True)
class Metrics:
    """See the module's first lines. `n_target_passes` counts rounds, `n_row_passes` row-rounds."""

    n_new_tokens: int
    n_target_passes: int
    n_row_passes: int
    tau: float
    tau_rows: float
    acceptance_rate: float
    by_depth: tuple[DepthAcceptance, ...]
    n_draft_nodes: int


def measure(*runs: Sequence[Round]) -> Metrics:
    """Metrics of the rounds of one run, or of several runs pooled."""
    rounds = [r for run in runs for r in run]
    n_new = sum(len(new) for r in rounds for new in r.new_tokens)
    n_row_passes = sum(int(r.live.sum()) for r in rounds)
    own = [tau for run in runs for tau in _tau_of_rows(run)]
    accepted, refused, n_judged = 0, 0, 0
    tested_at: dict[int, int] = {}
    passed_at: dict[int, list[int]] = {}  # depth -> how often a child of each rank was accepted
    for r in rounds:
        tested, ranks = _tested(r).tolist(), _ranks(r).tolist()
        rows = zip(
            r.live.tolist(), r.cut.tolist(), r.n_accepted.tolist(), tested, ranks, strict=True
        )
        for is_live, is_cut, n, end_tested, rank in rows:
            if not is_live or is_cut:
                continue
            n_judged += 1
            accepted += n
            refused += end_tested
            for depth in range(1, n + 1 + end_tested):
                tested_at[depth] = tested_at.get(depth, 0) + 1
                passed = passed_at.setdefault(depth, [])
                if depth <= n:
                    passed += [0] * (rank[depth - 1] + 1 - len(passed))
                    passed[rank[depth - 1]] += 1
    return Metrics(
        n_new_tokens=n_new,
        n_target_passes=len(rounds),
        n_row_passes=n_row_passes,
        tau=n_new / max(1, n_row_passes),
        tau_rows=sum(own) / max(1, len(own)),
        acceptance_rate=accepted / max(1, accepted + refused),
        by_depth=tuple(
            DepthAcceptance(
                d,
                sum(passed_at[d]) / tested_at[d],
                sum(passed_at[d]) / n_judged,
                tested_at[d],
                tuple(n / tested_at[d] for n in passed_at[d]),
            )
            for d in sorted(tested_at)
        ),
        n_draft_nodes=sum(int((r.draft.mask() & r.live.unsqueeze(1)).sum()) for r in rounds),
    )


def _tested(r: Round) -> torch.Tensor:
    """[B]: 1 where the accepted path ended at a node that had a child to test, else 0."""
    end = end_of(r.path, r.n_accepted) - 1
    child = (r.draft.tree() == end.unsqueeze(1)) & r.draft.mask()
    return child.any(dim=1).long()


def _ranks(r: Round) -> torch.Tensor:
    """[B, P]: which of its siblings, counted from 0, every node of the path is."""
    if r.draft.parents is None:
        return torch.zeros_like(r.path)
    earlier = earlier_siblings(r.draft.tree()) & r.draft.mask().unsqueeze(1)
    return earlier.sum(dim=2).gather(1, r.path.clamp(min=0))


def _tau_of_rows(rounds: Sequence[Round]) -> list[float]:
    """Each row's own tau over the rounds of one run."""
    if not rounds:
        return []
    passes = torch.stack([r.live for r in rounds]).sum(dim=0).tolist()
    return [sum(len(r.new_tokens[b]) for r in rounds) / n for b, n in enumerate(passes) if n]
