"""Replay: a drafter begun afresh on the row so far must propose the same draft.

Losslessness is blind to a drafter that reads the wrong thing and merely drafts worse: a cache not
rewound, features shifted by one, a row that sees its neighbour. Replay is not. It also checks that
the hidden states the loop hands out equal those of a pass without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..accept import Rule
from ..draft import Draft, depths
from ..generate import _Run
from ..protocol import Context, Drafter, DrafterState, Model
from .divergence import LosslessError


@dataclass
class Recorder:
    """A drafter that notes every context and draft of the one it wraps."""

    drafter: Drafter
    seen: list[tuple[Context, Draft]] = field(default_factory=list)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.drafter.taps)

    def begin(self, target: Model, batch_size: int, max_length: int) -> DrafterState:
        return _Recording(self.drafter.begin(target, batch_size, max_length), self.seen)


class _Recording:
    def __init__(self, state: DrafterState, seen: list[tuple[Context, Draft]]) -> None:
        self.state, self.seen = state, seen

    def propose(self, context: Context) -> Draft:
        frozen = replace(context, tokens=context.tokens.clone())  # the loop writes on in its buffer
        draft = self.state.propose(context)
        self.seen.append((frozen, draft))
        return draft


def replay(
    target: Model,
    drafter: Drafter,
    seen: Sequence[tuple[Context, Draft]],
    rule: Rule,
    tolerance: float = 1e-9,
) -> int:
    """Check recorded rounds; returns how many rows of rounds were compared.

    Raises LosslessError at the first draft that a fresh state would not propose, or hidden state
    that a pass without a cache does not give. Nodes deeper than can count are not compared.
    """
    n_compared = 0
    for number, (context, draft) in enumerate(seen):
        for b in context.live.nonzero().flatten().tolist():
            tokens = context.tokens[b, : int(context.lengths[b])]
            where = f"round {number}, row {b} of {len(tokens)} tokens"
            _check_hidden(target, context, b, tokens, where, tolerance)
            depth_left = int(context.depth_left[b])
            fresh = fresh_draft(target, drafter, tokens, depth_left, rule.for_row(b))
            _check_same(nodes(draft, b, depth_left), nodes(fresh, 0, depth_left), where, tolerance)
            n_compared += 1
    return n_compared


@torch.no_grad()
def fresh_draft(
    target: Model, drafter: Drafter, tokens: Tensor, depth_left: int, rule: Rule
) -> Draft:
    """What a drafter begun afresh proposes for one row `tokens` [T], its root last."""
    run = _Run(target, [tokens], drafter, [depth_left + 1], rule, frozenset(), 512)
    run._prefill()
    assert run.state is not None
    return run.state.propose(run._context())


Node = tuple[tuple[int, ...], Tensor | None]


def nodes(draft: Draft, row: int, max_depth: int) -> list[Node]:
    """The used nodes of a row up to `max_depth`: the tokens on the path to each, and its law."""
    if not draft.n_nodes:
        return []
    parents, tokens = draft.tree()[row].tolist(), draft.tokens[row].tolist()
    used, depth = draft.mask()[row].tolist(), depths(draft.tree()[row : row + 1])[0].tolist()
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return [
        (paths[i], None if draft.probs is None else draft.probs[row, i])
        for i in range(draft.n_nodes)
        if used[i] and depth[i] <= max_depth
    ]


def _check_same(got: list[Node], fresh: list[Node], where: str, tolerance: float) -> None:
    if [path for path, _ in got] != [path for path, _ in fresh]:
        raise LosslessError(
            f"replay: {where}: the drafter proposed {[p for p, _ in got]}, begun "
            f"afresh on the same tokens it proposes {[p for p, _ in fresh]}; its "
            f"state is stale or it reads another row or position"
        )
    for (path, q), (_, fresh_q) in zip(got, fresh, strict=True):
        if (q is None) != (fresh_q is None):
            raise LosslessError(f"replay: {where}: node {path} declares a law q in one run only")
        if q is not None and fresh_q is not None:
            error = float((q - fresh_q).abs().max())
            if error > tolerance:
                raise LosslessError(
                    f"replay: {where}: the q of node {path} differs from that of a "
                    f"fresh state by {error:.3g}"
                )


@torch.no_grad()
def _check_hidden(
    target: Model, context: Context, row: int, tokens: Tensor, where: str, tolerance: float
) -> None:
    n = int(context.n_new[row])
    if not context.hidden or not n:
        return
    expected = target(tokens.unsqueeze(0), taps=tuple(context.hidden), logits=False).hidden
    first = len(tokens) - 1 - n  # the state that predicted token i stands at i - 1
    if context.new_tokens[row, :n].tolist() != tokens[first + 1 :].tolist():
        raise LosslessError(f"context: {where}: new_tokens are not the row's last {n} tokens")
    for tap, states in context.hidden.items():
        error = float((states[row, :n] - expected[tap][0, first : first + n]).abs().max())
        if not error <= tolerance * (1 + float(expected[tap].abs().max())):
            raise LosslessError(
                f"context: {where}: hidden[{tap}] differs from a pass without a "
                f"cache by {error:.3g}"
            )
