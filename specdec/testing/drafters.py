"""Drafters made to break things: from perfect to all wrong, any tree, empty rounds, unused rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..draft import Draft
from ..protocol import Context, Drafter, DrafterState, Model


@dataclass(frozen=True)
class Adversary:
    """Random drafts around a known continuation.

    Args:
        truth: what plain decoding gives, one [T] tensor a row; nodes on its path may be right.
        n_nodes: most nodes a row; every round draws its own number, from 0.
        accuracy: share of nodes that hold the true token of their index (1 perfect, 0 all wrong).
        tree: random parents and duplicated siblings; else chains.
        unused: share of rounds in which a row is unused.
        drawn: declare a random law q for every node and draw it from there.
    """

    truth: Sequence[Tensor]
    n_nodes: int = 8
    accuracy: float = 0.7
    tree: bool = True
    unused: float = 0.2
    drawn: bool = False
    seed: int = 0
    taps = ()

    def begin(self, target: Model, batch_size: int, max_length: int) -> DrafterState:
        return _AdversaryState(self, target.vocab_size, np.random.default_rng(self.seed))


class _AdversaryState:
    def __init__(self, config: Adversary, vocab_size: int, rng: np.random.Generator) -> None:
        self.config, self.vocab_size, self.rng = config, vocab_size, rng

    def propose(self, context: Context) -> Draft:
        c, rng, batch = self.config, self.rng, len(context.lengths)
        n = int(rng.integers(0, c.n_nodes + 1))
        tokens = torch.zeros(batch, n, dtype=torch.long)
        parents = torch.zeros(batch, n, dtype=torch.long)
        laws = torch.zeros(batch, n, self.vocab_size, dtype=torch.float64)
        used = torch.zeros(batch, n, dtype=torch.bool)
        for b, length in enumerate(context.lengths.tolist()):
            if rng.random() < c.unused or not context.live[b]:
                parents[b] = torch.arange(-1, n - 1)
                continue
            used[b, : int(rng.integers(0, n + 1))] = True
            depth = {-1: 0}
            for i in range(n):
                parent = int(rng.integers(-1, i)) if c.tree and i else i - 1
                depth[i] = depth[parent] + 1
                parents[b, i] = parent
                tokens[b, i], laws[b, i] = self._token(b, length + depth[parent])
        return Draft(tokens, parents if c.tree else None, laws if c.drawn else None, used)

    def _token(self, row: int, index: int) -> tuple[int, Tensor]:
        """A token for the place `index` of a row, and the law it was drawn from."""
        truth = self.config.truth[row]
        true = int(truth[index]) if index < len(truth) else -1
        if self.config.drawn:
            law = torch.from_numpy(self.rng.dirichlet(np.full(self.vocab_size, 0.5)))
            return int(self.rng.choice(self.vocab_size, p=law.numpy())), law
        if true >= 0 and self.rng.random() < self.config.accuracy:
            token = true
        else:
            token = int(self.rng.integers(0, self.vocab_size - 1))
            token += token >= true >= 0  # any token but the true one
        return token, torch.zeros(self.vocab_size, dtype=torch.float64)


@dataclass(frozen=True)
class Flaky:
    """A drafter whose drafts are lost now and then: whole rounds, or single rows."""

    drafter: Drafter
    lost: float = 0.3
    seed: int = 0

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.drafter.taps)

    def begin(self, target: Model, batch_size: int, max_length: int) -> DrafterState:
        return _FlakyState(
            self.drafter.begin(target, batch_size, max_length),
            self.lost,
            np.random.default_rng(self.seed),
        )


class _FlakyState:
    def __init__(self, state: DrafterState, lost: float, rng: np.random.Generator) -> None:
        self.state, self.lost, self.rng = state, lost, rng

    def propose(self, context: Context) -> Draft:
        draft = self.state.propose(context)
        if self.rng.random() < self.lost:
            return Draft.empty(len(draft.tokens), draft.tokens.device)
        kept = torch.from_numpy(self.rng.random(len(draft.tokens)) >= self.lost)
        return replace(draft, used=draft.mask() & kept.to(draft.tokens.device).unsqueeze(1))
