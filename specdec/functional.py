"""A `Model` from the plain form of the post: (tokens, kv_cache) -> (logits, kv_cache).

The cache of that form is a list with a tuple of tensors per layer, tokens in dimension 2, and it
knows nothing of trees or ragged rows: every row keeps its own, and runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .protocol import Cache, Output

KVCache = Sequence[tuple[Tensor, ...]]
PlainModel = Callable[[Tensor, KVCache | None], tuple[Tensor, KVCache]]


class RowCaches:
    """One plain cache a row; pending tokens are a chain behind the committed ones."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.rows: list[KVCache | None] = [None] * batch_size
        self.n_pending = 0

    def commit(self, path: Tensor, n: Tensor) -> None:
        if len(path) != len(self.rows) or n.shape != (len(self.rows),):
            raise ValueError(
                f"path, n: expected [{len(self.rows)}, P] and [{len(self.rows)}], got "
                f"{list(path.shape)} and {list(n.shape)}"
            )
        counts = n.tolist()
        if max(counts) > min(self.n_pending, path.shape[1]) or min(counts) < 0:
            raise ValueError(f"n: expected 0..{min(self.n_pending, path.shape[1])}, got {counts}")
        self.lengths = self.lengths + n
        for b, keep in enumerate(self.lengths.tolist()):
            cache = self.rows[b]
            if not keep:
                self.rows[b] = None
            elif cache is not None:
                self.rows[b] = [tuple(t[:, :, :keep] for t in layer) for layer in cache]
        self.n_pending = 0


class FunctionalModel:
    """See `from_functional`."""

    def __init__(
        self,
        fn: PlainModel,
        vocab_size: int,
        max_position_embeddings: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.fn, self.vocab_size = fn, vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.dtype, self.device = dtype, device
        self.hidden_size = self.n_layers = 0

    def new_cache(self, batch_size: int, max_length: int) -> RowCaches:
        return RowCaches(batch_size, self.device)

    def __call__(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        parents: Tensor | None = None,
        taps: Sequence[int] = (),
        exit_layer: int | None = None,
        resume: tuple[int, Tensor] | None = None,
        logits: bool = True,
    ) -> Output:
        if parents is not None:
            raise ValueError(
                "parents: a model made by from_functional takes chains only "
                "(parents=None); for trees use specdec.models.Transformer"
            )
        if taps or exit_layer is not None or resume is not None:
            raise ValueError(
                "taps, exit_layer, resume: a model made by from_functional returns "
                "logits only; use a drafter that reads no hidden states"
            )
        if cache is None:
            cache = self.new_cache(len(tokens), tokens.shape[1])
        assert isinstance(cache, RowCaches)
        results = [self.fn(tokens[b : b + 1], cache.rows[b]) for b in range(len(tokens))]
        rows = [row for row, _ in results]
        wanted = (1, tokens.shape[1], self.vocab_size)
        if rows[0].shape != wanted:
            raise ValueError(
                f"fn: expected logits of shape {list(wanted)}, got {list(rows[0].shape)}"
            )
        have = [int(n) + cache.n_pending + tokens.shape[1] for n in cache.lengths]
        for n, (_, kept) in zip(have, results, strict=True):
            if kept is None or any(t.ndim < 3 or t.shape[2] != n for layer in kept for t in layer):
                raise ValueError(
                    f"fn: expected a kv_cache of {n} tokens in dimension 2 of every tensor"
                )
        cache.rows = [kept for _, kept in results]
        cache.n_pending += tokens.shape[1]
        return Output(torch.cat(rows) if logits else None)

    def _no_parts(self, _: Tensor) -> Tensor:
        raise ValueError("embedding, norm, head: a model made by from_functional has no parts")

    embedding = norm = head = _no_parts


def from_functional(
    fn: PlainModel,
    *,
    vocab_size: int,
    max_position_embeddings: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> FunctionalModel:
    """Make a `Model` of a function (tokens, kv_cache) -> (logits, kv_cache), for chains.

    `tokens` [1, N] int64; `kv_cache` None at first, then what the function returned: a list with a
    tuple of tensors a layer, tokens in dimension 2. `logits` [1, N, V]. Batches run row by row.

    Raises:
        ValueError: for a `vocab_size` or `max_position_embeddings` below 1; at a call that asks
            for a tree or for hidden states.
    """
    for name, value in (
        ("vocab_size", vocab_size),
        ("max_position_embeddings", max_position_embeddings),
    ):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    return FunctionalModel(fn, vocab_size, max_position_embeddings, dtype, torch.device(device))
