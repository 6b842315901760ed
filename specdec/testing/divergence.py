"""Where two decodings part, and whether that is a bug or a near-tie.

In float64 a difference is a bug. In lower precision a verification pass rounds differently from a
single step, and two scores closer than the rounding may swap: a near-tie. It is called one only if
a float64 recomputation of the target supports it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ..accept import Coupled, Greedy
from ..draft import Draft
from ..protocol import Model


class LosslessError(AssertionError):
    """A drafter changed what the target would have said; the message shows where."""


@dataclass(frozen=True)
class Divergence:
    """The first difference of a row.

    `gap` is the target's top-2 gap there, in units of what its rule maximises (logits for greedy,
    log-probability + noise for coupled sampling), in the target's own precision; `exact_gap` that
    between the two tokens in float64, positive where it sides with plain decoding; `rounding` the
    largest difference between the two computations. `exact_gap` and `rounding` are None where the
    target cannot be recomputed.
    """

    row: int
    position: int
    expected: int | None
    got: int | None
    gap: float
    exact_gap: float | None
    rounding: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference: the float64 gap is within 4 roundings."""
        return (
            self.exact_gap is not None
            and self.rounding is not None
            and abs(self.exact_gap) <= 4 * self.rounding
            and self.rounding > 1e-12
        )

    def __str__(self) -> str:
        if self.exact_gap is None:
            referee = "no float64 recomputation (the target is no nn.Module, or a row ended early)"
        else:
            side = "plain decoding" if self.exact_gap > 0 else "the drafted run"
            referee = (
                f"float64 sides with {side} by {abs(self.exact_gap):.3g} (rounding "
                f"{self.rounding:.3g}: {'a near-tie' if self.near_tie else 'not a near-tie'})"
            )
        return (
            f"row {self.row}, position {self.position}: plain decoding gives {self.expected}, "
            f"the drafted run {self.got}; the target's top-2 gap there is {self.gap:.3g}; "
            f"{referee}"
        )


@torch.no_grad()
def plain_sequence(
    target: Model,
    prompt: Tensor,
    max_new_tokens: int,
    rule: Greedy | Coupled | None = None,
    stop_tokens: tuple[int, ...] = (),
) -> Tensor:
    """Plain decoding of one prompt [T] without a cache and without the loop: the reference."""
    rule = (rule or Greedy()).for_row(0)
    tokens = prompt.to(target.device)
    for _ in range(max_new_tokens):
        logits = target(tokens.unsqueeze(0)).logits
        assert logits is not None
        length = torch.tensor([len(tokens)], device=tokens.device)
        empty = Draft.empty(1, tokens.device)
        new = rule.accept(empty, logits[:, -1:], length).next_token
        tokens = torch.cat([tokens, new])
        if int(new) in stop_tokens:
            break
    return tokens


def compare(
    target: Model, expected: Tensor, got: Tensor, rule: Greedy | Coupled, row: int = 0
) -> Divergence | None:
    """The first difference between two sequences [T] of one row, or None.

    `rule` is that of the row alone (`rule.for_row(b)`).
    """
    n = min(len(expected), len(got))
    differs = (expected[:n] != got[:n]).nonzero()
    if not len(differs) and len(expected) == len(got):
        return None
    at = int(differs[0]) if len(differs) else n
    scores = _scores(target, expected[:at], rule)
    top = scores.topk(2).values
    wanted = int(expected[at]) if at < len(expected) else None
    given = int(got[at]) if at < len(got) else None
    exact_gap = rounding = None
    if wanted is not None and given is not None and isinstance(target, nn.Module):
        exact = cast(Model, copy.deepcopy(target).double())
        referee = _scores(exact, expected[:at], rule)
        exact_gap = float(referee[wanted] - referee[given])
        finite = referee.isfinite() & scores.isfinite()
        rounding = float((referee - scores.double())[finite].abs().max())
    return Divergence(row, at, wanted, given, float(top[0] - top[1]), exact_gap, rounding)


@torch.no_grad()
def _scores(model: Model, tokens: Tensor, rule: Greedy | Coupled) -> Tensor:
    logits = model(tokens.unsqueeze(0)).logits
    assert logits is not None
    return rule.scores(logits[:, -1], torch.tensor([len(tokens)], device=tokens.device))[0]
