"""Exact laws: the real loop and drafters under a rule that enumerates instead of drawing."""

from dataclasses import dataclass

import pytest
import torch

from specdec import Draft, DraftModel, PromptLookup, Rejection
from specdec.testing import exact_law, outcomes, target_law
from specdec.testing.strategies import small_target

TARGET, DRAFT = small_target(3, vocab_size=3), small_target(4, vocab_size=3, n_layers=1)
PROMPT = torch.tensor([1, 2])


def error(drafter, n_tokens=2, rule=None, target=TARGET) -> float:
    law, own = (
        f(target, *args, n_tokens, rule)
        for f, args in ((exact_law, (drafter, PROMPT)), (target_law, (PROMPT,)))
    )
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(law.get(key, 0.0) - own.get(key, 0.0)) for key in law.keys() | own.keys())


@dataclass
class Siblings:
    """Draws `k` siblings independently of each other, duplicates and all, from one law."""

    k: int
    taps = ()

    def begin(self, target, batch_size, max_length):
        return self

    def propose(self, context):
        logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64).expand(1, self.k, 3)
        tokens, q = context.rule.pick(logits, context.lengths, 0)  # k nodes with one child each
        return Draft(tokens.flatten(1), torch.full((1, self.k), -1), q.flatten(1, 2))


@pytest.mark.parametrize(
    "drafter",
    [
        DraftModel(DRAFT, 1),
        DraftModel(DRAFT, 2),
        DraftModel(DRAFT, 1, branching=3),
        DraftModel(DRAFT, 2, branching=(2, 1)),
        DraftModel(DRAFT, 2, branching=(2, 2), draw=False),
        DraftModel(DRAFT, 2, draw=False),
        Siblings(2),
        Siblings(3),
        PromptLookup(2, 3),
    ],
    ids=[
        "chain 1",
        "chain 2",
        "without replacement 3",
        "tree",
        "chosen tree",
        "chosen chain",
        "iid 2",
        "iid 3",
        "prompt lookup",
    ],
)
def test_rejection_follows_the_targets_law_exactly(drafter):
    """A residual taken from p, a sibling tested against the wrong law, a q that was not drawn."""
    depth = len(drafter.widths) if isinstance(drafter, DraftModel) else 1
    # one token more than the draft is deep: a budget of n tokens leaves room for n - 1 drafts
    assert error(drafter, depth + 1) < 1e-9


def test_truncated_laws_are_exact_too():
    """p and q cut differently by temperature, top-k or nucleus."""
    for rule in (Rejection(0.7, top_k=2), Rejection(1.5, top_p=0.8), Rejection(min_p=0.4)):
        assert error(DraftModel(DRAFT, 1, branching=2), rule=rule) < 1e-9


def test_outcomes_visits_every_branch_once():
    """A branch forgotten or counted twice."""
    law = outcomes(lambda choices: (choices.choose([0.5, 0.0, 0.5]), choices.choose([0.25, 0.75])))
    assert law == {(0, 0): 0.125, (0, 1): 0.375, (2, 0): 0.125, (2, 1): 0.375}
