"""What a drafter is selected by: tau on held-out text."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..accept import Rule
from ..generate import generate
from ..metrics import measure
from ..protocol import Drafter, Model
from .corpus import Corpus


def held_out_prompts(
    text: Corpus, n_prompts: int = 12, *, shortest: int = 16, longest: int = 128, seed: int = 0
) -> list[Tensor]:
    """A ragged batch of prompts, windows of the held-out files of `shortest`..`longest` tokens.

    Raises ValueError for counts that do not fit.
    """
    if n_prompts < 1 or not 1 <= shortest <= longest:
        raise ValueError(
            f"n_prompts, shortest, longest: expected at least 1 prompt of 1 <= shortest <= longest "
            f"tokens, got {n_prompts}, {shortest}, {longest}"
        )
    lengths = np.linspace(shortest, longest, n_prompts).round().astype(int).tolist()
    rows = text.held_out_batch(n_prompts, longest - 1, seed)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def held_out_tau(
    target: Model,
    drafter: Drafter,
    prompts: list[Tensor],
    *,
    max_new_tokens: int = 64,
    rule: Rule | None = None,
) -> float:
    """Tokens per target pass and row, pooled over one ragged batch of `prompts`.

    Greedy unless `rule` says otherwise: `fit(..., evaluate=lambda: held_out_tau(target,
    Eagle(network), prompts), maximize=True)`. Lies in 1..depth of the draft + 1.
    """
    run = generate(target, prompts, drafter, max_new_tokens=max_new_tokens, rule=rule)
    return measure(run.rounds).tau
