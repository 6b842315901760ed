"""One prompt decoded by one method of one engine, and what is kept of it.

The time of decoding is told without the prefill and what comes before it, and that of the whole
call beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..generate import Round, generate
from ..protocol import Drafter, Model

SPECDEC, TRANSFORMERS = "specdec", "transformers"


@dataclass(frozen=True)
class Run:
    """A prompt, decoded."""

    sequence: Tensor
    """[T], prompt and new tokens."""
    n_timed: int
    """New tokens that came within `seconds`."""
    seconds: float
    """Decoding behind the prefill."""
    n_new: int
    call_seconds: float
    """The whole call, prefill and all."""
    n_passes: int
    """Target passes that emitted the new tokens."""
    rounds: Sequence[Round] = ()
    """Of our engine."""

    @property
    def tau(self) -> float:
        return self.n_new / self.n_passes


@dataclass(frozen=True)
class Method:
    """A way to decode: `run` takes a prompt [T] and a budget of new tokens."""

    engine: str
    name: str
    run: Callable[[Tensor, int], Run]


def ours(
    target: Model, drafter: Drafter | None, stop_tokens: Sequence[int]
) -> Callable[[Tensor, int], Run]:
    """Greedy decoding by this library; None drafts nothing."""

    def run(prompt: Tensor, max_new_tokens: int) -> Run:
        start = time.perf_counter()
        made = generate(
            target, prompt, drafter, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens
        )
        taken = time.perf_counter() - start
        n_new = len(made.new_tokens[0])
        return Run(
            made.sequences[0], n_new, made.seconds, n_new, taken, len(made.rounds), made.rounds
        )

    return run
