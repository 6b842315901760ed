"""Conversations: questions answered by the target itself, joined to rows of one length.

The text of a chat model as a drafter meets it: a prompt in the target's chat template, the target's
own answer up to its stop token. Answers differ in length, so conversations follow one another in a
row as the turns of one long chat would, and what does not fit a row goes on in the next; `own`
marks the answers. The target's states, and its law p, are those of the row as it stands.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..accept import Coupled, Greedy
from ..generate import generate
from ..protocol import Drafter, Model
from .distributed import ALONE, Ranks
from .shards import fingerprint, shard_file, write_shards


@dataclass(frozen=True)
class Conversations:
    """A `Text`: `rows` [N, T] int32 of prompts and answers, `answers` [N, T] bool marks the latter.

    Every conversation's tokens stand in the rows in order; the last, unfinished row is left out.
    """

    rows: np.ndarray
    answers: np.ndarray

    @staticmethod
    def join(conversations: Sequence[tuple[Tensor, int]], length: int) -> Conversations:
        """Join (tokens [n], how many of them are the prompt) to rows of `length`.

        Raises ValueError for conversations too short to fill one row.
        """
        tokens = np.concatenate([each.numpy() for each, _ in conversations]).astype(np.int32)
        marks = [np.arange(len(each)) >= n_prompt for each, n_prompt in conversations]
        n_rows = len(tokens) // length
        if not n_rows:
            raise ValueError(
                f"length: rows of {length} tokens need more than the {len(tokens)} there are"
            )
        own = np.concatenate(marks)[: n_rows * length].reshape(n_rows, length)
        return Conversations(tokens[: n_rows * length].reshape(n_rows, length), own)

    @property
    def train(self) -> np.ndarray:
        """All rows, one after the other."""
        return self.rows.reshape(-1)

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Tensor:
        """Rows [batch_size, length + 1] int64; every row once before one comes again.

        The same for the same step and seed. Raises ValueError where rows are shorter.
        """
        rows = self.rows[self._drawn(step, batch_size, length, seed), : length + 1]
        return torch.from_numpy(rows.astype(np.int64))

    def own(self, step: int, batch_size: int, length: int, seed: int) -> Tensor:
        """Of the same batch bool [batch_size, length + 1]: the tokens that the target wrote."""
        return torch.from_numpy(
            self.answers[self._drawn(step, batch_size, length, seed), : length + 1]
        )

    def _drawn(self, step: int, batch_size: int, length: int, seed: int) -> np.ndarray:
        n_rows, n_tokens = self.rows.shape
        if length + 1 > n_tokens:
            raise ValueError(
                f"length: a window of {length + 1} tokens does not fit rows of {n_tokens}"
            )
        places = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs = {epoch: np.random.default_rng([seed, epoch]) for epoch in set(places // n_rows)}
        orders = {epoch: rng.permutation(n_rows) for epoch, rng in epochs.items()}
        return np.array([orders[place // n_rows][place % n_rows] for place in places])


def write_conversations(
    folder: Path | str,
    target: Model,
    prompts: Sequence[Tensor],
    n_batches: int | None = None,
    *,
    stop_tokens: Iterable[int],
    max_new_tokens: int = 256,
    batch_size: int = 64,
    rule: Coupled | Greedy | None = None,
    drafter: Drafter | None = None,
    ranks: Ranks = ALONE,
) -> list[tuple[Tensor, int]]:
    """Let `target` answer `prompts`: (prompt and answer [n] int64, length of the prompt) of each.

    Prompt i is answered from `rule.for_row(i)`, whatever the batch. A batch of prompts of
    similar length is a shard of `folder`: broken off, the work goes on there.

    Args:
        prompts: int64 tensors [T], in the target's chat template.
        n_batches: most of them to write, a fair sample; None: all. More can be added later.
        stop_tokens: end an answer; the stop token belongs to it.
        rule: `Coupled()`, temperature 1, by default. Its seed is one number. With a vocabulary of
            50,000 drawing takes longer than a pass of a small target; `Greedy()` does not.
        drafter: makes it faster; the text is the same.

    Raises:
        ValueError: for counts below 1, a prompt that leaves no room for `max_new_tokens`, a seed
            that is not one number of at least 0, or a folder of something else.
    """
    rule = Coupled() if rule is None else rule
    for name, value in (
        ("prompts", len(prompts)), ("max_new_tokens", max_new_tokens), ("batch_size", batch_size),
        ("n_batches", 1 if n_batches is None else n_batches),
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    seed = 0 if isinstance(rule, Greedy) else rule.seed
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"rule: expected a seed that is one number of at least 0, got {seed}")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > target.max_position_embeddings:
        raise ValueError(
            f"max_new_tokens: {max_new_tokens} behind a prompt of {longest} tokens exceed the "
            f"target's max_position_embeddings={target.max_position_embeddings}"
        )
    stops = sorted(stop_tokens)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    # batches of all lengths in turn, so that breaking off leaves a fair sample
    np.random.default_rng(seed).shuffle(batches)
    n_shards = len(batches) if n_batches is None else min(n_batches, len(batches))

    def make(number: int) -> dict[str, Tensor]:
        rows = batches[number]
        run = generate(
            target,
            [prompts[i].to(target.device) for i in rows],
            drafter,
            max_new_tokens=max_new_tokens,
            rule=rule if isinstance(rule, Greedy) else replace(rule, seed=[seed + i for i in rows]),
            stop_tokens=stops,
        )
        return {
            "tokens": torch.cat(run.sequences).to(torch.int32),
            "lengths": torch.tensor([len(row) for row in run.sequences]),
            "prompts": torch.tensor(run.prompt_lengths),
        }

    index = {
        "kind": "conversations",
        "target": fingerprint(target),
        "prompts": zlib.crc32(torch.cat(list(prompts)).numpy().tobytes()),
        "n_prompts": len(prompts),
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "stop_tokens": stops,
        "rule": repr(rule),
    }
    folder = write_shards(folder, index, n_shards, make, description="writing", ranks=ranks)
    conversations: list[tuple[Tensor, int]] = []
    for number in range(n_shards):
        shard = load_file(shard_file(folder, number))
        parts = shard["tokens"].long().split(shard["lengths"].tolist())
        conversations += zip(parts, shard["prompts"].tolist(), strict=True)
    return conversations
