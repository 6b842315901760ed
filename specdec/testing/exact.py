"""Exact laws for small vocabularies: every outcome of a run with its probability.

`exact_law` drives the real loop and drafter under a rule that *enumerates* where `Rejection` would
draw: every pick and every test becomes a branch. What comes out is the law of the emitted tokens,
to compare with `target_law`, the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..accept import Rejection, Verdict, rejection_laws, without_replacement
from ..draft import Draft
from ..generate import generate
from ..protocol import Drafter, Model

Law = dict[tuple[int, ...], float]


class Choices:
    """One way through a tree of choices: follow a script, then first branches; note the rest."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.open, self.probability = script, [], [], 1.0

    def choose(self, probabilities: list[float]) -> int:
        """Take one of the options of positive probability."""
        options = [i for i, p in enumerate(probabilities) if p > 0]
        step = len(self.taken)
        choice = self.script[step] if step < len(self.script) else options[0]
        self.open.append([i for i in options if i > choice])
        self.taken.append(choice)
        self.probability *= probabilities[choice]
        return choice


def outcomes(run: Callable[[Choices], tuple[int, ...]]) -> Law:
    """Run through all choices, depth first: outcome -> probability."""
    law: Law = {}
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        outcome = run(choices)
        law[outcome] = law.get(outcome, 0.0) + choices.probability
        script = None
        for step in reversed(range(len(choices.taken))):
            if choices.open[step]:
                script = [*choices.taken[:step], choices.open[step][0]]
                break
    return law


class Enumerated:
    """`Rejection` with every draw made a branch; one row."""

    lossless: ClassVar[bool] = True

    def __init__(self, law: Rejection, choices: Choices) -> None:
        self.law, self.choices = law, choices

    def check(self, batch_size: int) -> None:
        if batch_size != 1:
            raise ValueError(f"batch_size: enumeration takes one row, got {batch_size}")

    def for_row(self, row: int) -> Enumerated:
        return self

    def accept(self, draft: Draft, logits: Tensor, lengths: Tensor) -> Verdict:
        accept, owed = rejection_laws(draft, self.law.log_probs(logits).exp())
        parents, used = draft.tree()[0].tolist(), draft.mask()[0].tolist()
        path, node = [], -1
        for child in range(draft.n_nodes):  # parents come before children, siblings in order
            if parents[child] == node and used[child]:
                a = float(accept[0, child])
                if self.choices.choose([a, 1 - a]) == 0:
                    path.append(child)
                    node = child
        token = self.choices.choose(owed[0, node + 1].tolist())
        padded = torch.zeros_like(draft.tokens)
        padded[0, : len(path)] = torch.tensor(path, dtype=torch.long)
        return Verdict(padded, torch.tensor([len(path)]), torch.tensor([token]))

    def pick(
        self, logits: Tensor, lengths: Tensor, depth: int | Tensor, k: int = 1, *, draw: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if not draw:
            return logits.topk(k, dim=-1).indices, None
        q = self.law.log_probs(logits).exp()
        tokens = torch.zeros(1, q.shape[1], k, dtype=torch.long)
        for node in range(q.shape[1]):
            left = q[0, node].clone()
            for i in range(k):
                if float(left.sum()) > 0:
                    tokens[0, node, i] = self.choices.choose((left / left.sum()).tolist())
                    left[tokens[0, node, i]] = 0.0
        return tokens, without_replacement(q, tokens)


def exact_law(
    target: Model, drafter: Drafter, prompt: Tensor, n_tokens: int, rule: Rejection | None = None
) -> Law:
    """The law of the first `n_tokens` tokens emitted after `prompt` [T]: tokens -> probability.

    The drafter must draw through `rule.pick` (or choose). Outcomes grow as V^(drafts + tokens).
    """
    law = rule or Rejection()

    def run(choices: Choices) -> tuple[int, ...]:
        result = generate(
            target, prompt, drafter, max_new_tokens=n_tokens, rule=Enumerated(law, choices)
        )
        return tuple(result.sequences[0][len(prompt) :].tolist())

    return outcomes(run)


@torch.no_grad()
def target_law(target: Model, prompt: Tensor, n_tokens: int, rule: Rejection | None = None) -> Law:
    """The target's own joint law of the next `n_tokens` tokens, by plain passes."""
    law = rule or Rejection()
    known: Law = {(): 1.0}
    for _ in range(n_tokens):
        longer: Law = {}
        for tokens, probability in known.items():
            row = torch.cat([prompt, torch.tensor(tokens, dtype=torch.long)])
            logits = target(row.unsqueeze(0)).logits
            assert logits is not None
            for token, p in enumerate(law.log_probs(logits[0, -1]).exp().tolist()):
                if p > 0:
                    longer[*tokens, token] = probability * p
        known = longer
    return known
