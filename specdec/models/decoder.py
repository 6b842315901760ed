"""What every decoder of the library shares: blocks one after another over one cache.

A model says what its blocks are and what each of them is handed in a pass, its *lane*: rotary
angles, the store that its layer keeps its entries in, its index there, and the view of what the new
nodes see. The rest is the same for all: taps, leaving early, resuming, checks of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..cache import TreeCache
from ..protocol import FINAL, Cache, Output
from .layers import CentredRMSNorm, RMSNorm

Lane: TypeAlias = tuple[tuple[Tensor, Tensor], Any, int, Any]
"""Rotary angles, store, index in it, view: the arguments of a block behind its input."""


class Shape(Protocol):
    """The fields of a config that all decoders have."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


C = TypeVar("C", bound=Shape)


def check_tokens(tokens: Tensor) -> None:
    """ValueError unless `tokens` are int64 of [B, N] with N >= 1."""
    if tokens.ndim != 2 or tokens.dtype != torch.long or not tokens.shape[1]:
        raise ValueError(
            f"tokens: expected int64 of shape [B, N] with N >= 1, got "
            f"{tokens.dtype} of shape {list(tokens.shape)}"
        )


def check_taps(taps: Sequence[int], n_layers: int) -> None:
    """ValueError for a tap that a pass over `n_layers` blocks does not have."""
    wrong = [tap for tap in taps if tap != FINAL and not 0 <= tap <= n_layers]
    if wrong:
        raise ValueError(f"taps: expected 0..{n_layers} or FINAL (-1), got {wrong}")


def check_positions(tokens: Tensor, n_positions: int) -> None:
    """ValueError if a pass without a cache over `tokens` [B, N] is longer than the model is."""
    if tokens.shape[1] > n_positions:
        raise ValueError(
            f"tokens: {tokens.shape[1]} positions, but max_position_embeddings is {n_positions}"
        )


class Decoder(nn.Module, Generic[C]):
    """A `Model`: see `specdec.protocol` for the call. Models fill in what stands below."""

    config: C
    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: RMSNorm | CentredRMSNorm
    head: nn.Linear

    def lanes(self, n: int, cache: TreeCache | None, first: int) -> Sequence[Lane]:
        """What each block is handed for a pass over `n` nodes, pending from `first` on.

        Without a cache they are the tokens of a plain causal pass.
        """
        raise NotImplementedError

    def new_cache(self, batch_size: int, max_length: int) -> TreeCache:
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def n_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int:
        return self.config.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(
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
        self._check_call(tokens, cache, parents, taps, exit_layer, resume)
        new = tokens if resume is None else tokens[:, resume[1].shape[1] :]
        x = self.embedding(new)  # [B, N, D]; a token out of range raises before the cache changes
        first = 0
        if cache is not None:
            assert isinstance(cache, TreeCache)
            first = cache.n_pending
            if new.shape[1]:
                cache.append(
                    new.shape[1],
                    None if parents is None else parents[:, tokens.shape[1] - new.shape[1] :],
                )
            cache.depth_done = exit_layer or self.n_layers
        lanes = self.lanes(new.shape[1], cache, first)
        hidden = {0: x} if 0 in taps else {}
        for i, block in enumerate(self.blocks[:exit_layer]):
            if resume is not None and i == resume[0]:  # from here on the resumed nodes, too
                x = torch.cat([resume[1], x], dim=1)
                lanes = self.lanes(x.shape[1], cache, 0)
            if x.shape[1]:
                x = block(x, *lanes[i])
            if i + 1 in taps:
                hidden[i + 1] = x
        final = self.norm(x) if logits or FINAL in taps else None
        if FINAL in taps and final is not None:
            hidden[FINAL] = final
        return Output(self.head(final) if logits else None, hidden)

    def _check_call(
        self,
        tokens: Tensor,
        cache: Cache | None,
        parents: Tensor | None,
        taps: Sequence[int],
        exit_layer: int | None,
        resume: tuple[int, Tensor] | None,
    ) -> None:
        check_tokens(tokens)
        depth = exit_layer if exit_layer is not None else self.n_layers
        check_taps(taps, depth)
        skipped = [] if resume is None else [tap for tap in taps if 0 <= tap <= resume[0]]
        if resume is not None and skipped:
            raise ValueError(
                f"taps: a pass resumed at block {resume[0]} has no states before it, got {skipped}"
            )
        if exit_layer is not None and not 1 <= exit_layer < self.n_layers:
            raise ValueError(f"exit_layer: expected 1..{self.n_layers - 1}, got {exit_layer}")
        if resume is not None and depth <= resume[0]:
            raise ValueError(
                f"exit_layer: expected one above block {resume[0]}, where the pass resumes, "
                f"got {exit_layer}"
            )
        if cache is None:
            if parents is not None or resume is not None:
                raise ValueError("parents, resume: a pass without a cache is a plain causal one")
            check_positions(tokens, self.max_position_embeddings)
            return
        if not isinstance(cache, TreeCache):
            raise ValueError(f"cache: expected one of new_cache, got {type(cache).__name__}")
        if len(cache.lengths) != len(tokens) or cache.n_layers != self.n_layers:
            raise ValueError(
                f"cache: expected {len(tokens)} rows and {self.n_layers} layers, got "
                f"{len(cache.lengths)} rows and {cache.n_layers} layers"
            )
        done, depth = (0, cache.n_layers) if resume is None else (resume[1].shape[1], resume[0])
        if resume is not None and (done != cache.n_pending or depth != cache.depth_done):
            raise ValueError(
                f"resume: expected the {cache.n_pending} pending nodes at block "
                f"{cache.depth_done}, got {done} at block {depth}"
            )
        if resume is None and cache.n_pending and cache.depth_done != (exit_layer or self.n_layers):
            raise ValueError(
                f"cache: its pending nodes stop at block {cache.depth_done}; resume "
                "them, or drop them with a commit of n = 0"
            )
