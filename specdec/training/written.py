"""Training text written by the target itself, as the papers train their drafters.

A drafter is asked to guess what the target will say, so it learns most from what the target does
say: prompts from a corpus, continued by the target at some temperature (Medusa, arXiv:2401.10774,
section 2.3.3, calls it self-distillation; EAGLE-3, arXiv:2503.01840, does it, too).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..accept import Coupled, Rejection
from ..generate import generate
from ..protocol import Drafter, Model
from .corpus import Corpus, windows
from .distributed import ALONE, Ranks
from .shards import fingerprint, shard_file, write_shards


@dataclass(frozen=True)
class WrittenText:
    """A `Corpus` of rows: `n_given` tokens of a text, then the target's own continuation.

    `rows` [N, T] whole numbers; `held_out` is the corpus's: what a drafter is judged on stays.
    Windows are the starts of rows, so that the target has seen all that it wrote them from, and
    every window has equally many tokens of its own (`own` marks them).
    """

    rows: np.ndarray
    held_out: np.ndarray
    n_given: int

    @property
    def train(self) -> np.ndarray:
        """All rows, one after the other."""
        return self.rows.reshape(-1)

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Tensor:
        """Starts of rows [batch_size, length + 1] int64; the same for the same step and seed."""
        if length + 1 > self.rows.shape[1]:
            raise ValueError(
                f"length: a window of {length + 1} tokens does not fit rows of {self.rows.shape[1]}"
            )
        drawn = np.random.default_rng([seed, step]).integers(0, len(self.rows), batch_size)
        return torch.from_numpy(self.rows[drawn, : length + 1].astype(np.int64))

    def own(self, step: int, batch_size: int, length: int, seed: int) -> Tensor | None:
        """The `mask` of the losses: bool [batch_size, length + 1], all but the given tokens."""
        if not self.n_given:
            return None
        return (torch.arange(length + 1) >= self.n_given).expand(batch_size, -1)

    def held_out_batch(self, batch_size: int, length: int, seed: int = 0) -> Tensor:
        """Windows [batch_size, length + 1] int64 of the held-out files."""
        return windows(self.held_out, np.random.default_rng(seed), batch_size, length + 1)


def write_text(
    folder: Path | str,
    target: Model,
    corpus: Corpus,
    n_batches: int,
    *,
    batch_size: int = 32,
    n_given: int = 64,
    n_new: int = 192,
    rule: Coupled | Rejection | None = None,
    drafter: Drafter | None = None,
    ranks: Ranks = ALONE,
) -> WrittenText:
    """Let `target` continue prompts of `corpus`: n_batches * batch_size rows of n_given + n_new.

    Prompts are windows of the training side, drawn from the rule's seed. Row i draws from seed + i
    and is what plain decoding of its prompt gives under `rule.for_row(i)`, whatever the
    batch. A batch is a shard of `folder`: broken off, the work goes on there, and more batches
    can be added later.

    Args:
        rule: how tokens are drawn; `Coupled()`, temperature 1, by default. Its seed is one number.
        drafter: makes it faster. Under `Coupled` the text is the same with and without; under
            `Rejection` it is another draw from the same law.
        ranks: processes that share the work.

    Raises:
        ValueError: for counts below 1, rows beyond the target's positions, a seed that is not one
            number of at least 0, or a folder of text written otherwise.
    """
    rule = Coupled() if rule is None else rule
    for name, value in (
        ("n_batches", n_batches), ("batch_size", batch_size), ("n_given", n_given),
        ("n_new", n_new),
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    seed = rule.seed
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"rule: expected a seed that is one number of at least 0, got {seed}")
    if n_given + n_new > target.max_position_embeddings:
        raise ValueError(
            f"n_given, n_new: {n_given} + {n_new} tokens exceed the target's "
            f"max_position_embeddings={target.max_position_embeddings}"
        )
    dtype = torch.uint8 if target.vocab_size <= 256 else torch.int32

    def make(number: int) -> dict[str, Tensor]:
        prompts = corpus.batch(number, batch_size, n_given - 1, seed).to(target.device)
        first = seed + number * batch_size
        run = generate(
            target,
            list(prompts),
            drafter,
            max_new_tokens=n_new,
            rule=replace(rule, seed=list(range(first, first + batch_size))),
        )
        return {"tokens": torch.stack(run.sequences).to(dtype)}

    index = {
        "kind": "written text",
        "target": fingerprint(target),
        "text": zlib.crc32(corpus.train.tobytes()),
        "batch_size": batch_size,
        "n_given": n_given,
        "n_new": n_new,
        "rule": repr(rule),
    }
    folder = write_shards(folder, index, n_batches, make, description="writing", ranks=ranks)
    shards = [load_file(shard_file(folder, number))["tokens"] for number in range(n_batches)]
    return WrittenText(torch.cat(shards).numpy(), corpus.held_out, n_given)
