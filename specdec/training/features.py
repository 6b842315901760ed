"""The target's hidden states of training text: computed on the fly, or read from disk.

Both are called the same way, `tokens, hidden = features(step)`, and give the same: a cache holds
what the on-the-fly call gave, bit for bit. Both equal what a drafter reads while decoding
(`Context.hidden`): the state at place t is the one that predicted token t + 1.

A cache pays when the target is large next to what is trained, or the same windows are seen in
several epochs. It takes steps * rows * tokens * taps * width numbers: 1,000 steps of 8 windows of
512 tokens are 2 GB a tap at width 256 in bfloat16.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from ..protocol import FINAL, Model
from .corpus import Text
from .distributed import ALONE, Ranks
from .shards import fingerprint, shard_file, write_shards


class Features(Protocol):
    """The target's states of the text of a step."""

    def __call__(self, step: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Tokens [B, T] int64 and hidden, tap -> [B, T, D], of the target's dtype and device."""
        ...

    def own(self, step: int) -> Tensor | None:
        """Of these tokens those that count, bool [B, T]; None: all."""
        ...


@dataclass(frozen=True)
class TargetFeatures:
    """`Features` computed on the fly: one pass of the target a step, without gradients.

    Args:
        target: frozen, or at least not what is trained.
        text: a `Corpus` or `WrittenText`.
        taps: hidden states to return: those of the drafter, and FINAL where its loss asks for p.
        batch_size, length, seed: the tokens are `text.batch(step, batch_size, length, seed)`, so
            T is length + 1.
        dtype: states are rounded to it on the way, as a cache of this dtype does; None: not at all.
        ranks: every rank computes its own rows of the global batch.

    Raises:
        ValueError: for taps that the target does not have, a window beyond its positions, or a
            batch that cannot be dealt out evenly.
    """

    target: Model
    text: Text
    taps: Sequence[int]
    batch_size: int
    length: int
    seed: int = 0
    dtype: torch.dtype | None = None
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        known = {FINAL, *range(self.target.n_layers + 1)}
        if not self.taps or not set(self.taps) <= known or len(set(self.taps)) < len(self.taps):
            raise ValueError(
                f"taps: expected some of 0..{self.target.n_layers} and FINAL (-1), each once, "
                f"got {list(self.taps)}"
            )
        most = self.target.max_position_embeddings - 1
        if not 1 <= self.length <= most:
            raise ValueError(f"length: expected 1..{most} (the target's), got {self.length}")
        if self.batch_size < 1 or self.batch_size % self.ranks.size:
            raise ValueError(
                f"batch_size: expected a multiple of the {self.ranks.size} ranks, "
                f"got {self.batch_size}"
            )

    @torch.no_grad()
    def __call__(self, step: int) -> tuple[Tensor, dict[int, Tensor]]:
        whole = self.text.batch(step, self.batch_size, self.length, self.seed)
        tokens = self.ranks.share(whole).to(self.target.device)
        hidden = self.target(tokens, taps=tuple(self.taps), logits=False).hidden
        return tokens, {
            tap: hidden[tap].to(self.stored_dtype).to(self.target.dtype) for tap in self.taps
        }

    def own(self, step: int) -> Tensor | None:
        """See `Features.own`."""
        whole = self.text.own(step, self.batch_size, self.length, self.seed)
        return None if whole is None else self.ranks.share(whole).to(self.target.device)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.dtype or self.target.dtype

    def index(self) -> dict[str, object]:
        """What the features depend on, in JSON's types."""
        return {
            "kind": "target features",
            "target": fingerprint(self.target),
            "text": zlib.crc32(self.text.train.tobytes()),
            "taps": list(self.taps),
            "batch_size": self.batch_size,
            "length": self.length,
            "seed": self.seed,
            "dtype": str(self.stored_dtype).removeprefix("torch."),
        }


class CachedFeatures:
    """`Features` of steps 0..n_steps - 1 on disk; step n_steps is step 0 again, the next epoch.

    Steps that are missing are computed here, with a progress bar; breaking off loses one shard. A
    shard holds `steps_per_shard` steps: `tokens` [S, B, T], and `tap.i` [S, B, T, D] of every tap.

    Args:
        source: what is cached; its dtype is that of the files.
        folder: where the shards are.
        n_steps: steps to have ready; more of them later go on in the same folder.
        steps_per_shard: steps held in memory at a time while they are computed.

    Raises:
        ValueError: for counts below 1, or a folder that caches another target, text, batch, seed,
            dtype, or other taps.
    """

    def __init__(
        self,
        source: TargetFeatures,
        folder: Path | str,
        n_steps: int,
        *,
        steps_per_shard: int = 8,
    ) -> None:
        for name, value in (("n_steps", n_steps), ("steps_per_shard", steps_per_shard)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.source, self.n_steps, self.steps_per_shard = source, n_steps, steps_per_shard
        whole = replace(source, ranks=ALONE)

        def make(number: int) -> dict[str, Tensor]:
            first = number * steps_per_shard
            steps = [whole(step) for step in range(first, first + steps_per_shard)]
            tensors = {"tokens": torch.stack([tokens for tokens, _ in steps])}
            for tap in source.taps:
                states = [hidden[tap].to(source.stored_dtype) for _, hidden in steps]
                tensors[f"tap.{tap}"] = torch.stack(states)
            return tensors

        self.folder = write_shards(
            folder,
            source.index() | {"steps_per_shard": steps_per_shard},
            -(-n_steps // steps_per_shard),
            make,
            description="features",
            ranks=source.ranks,
        )

    def __call__(self, step: int) -> tuple[Tensor, dict[int, Tensor]]:
        number, i = divmod(step % self.n_steps, self.steps_per_shard)
        target, ranks = self.source.target, self.source.ranks
        each = self.source.batch_size // ranks.size
        rows = slice(ranks.rank * each, (ranks.rank + 1) * each)
        with safe_open(shard_file(self.folder, number), "pt") as shard:
            tokens = shard.get_slice("tokens")[i, rows].to(target.device)
            hidden = {
                tap: shard.get_slice(f"tap.{tap}")[i, rows].to(target.device, target.dtype)
                for tap in self.source.taps
            }
        return tokens, hidden

    def own(self, step: int) -> Tensor | None:
        """See `Features.own`."""
        return self.source.own(step % self.n_steps)
