"""The vocabulary of the whole library: models, caches, drafters and what they hand each other.

One idea carries everything: *a cache is a committed prefix plus a pending tree*. Every forward pass
appends its tokens to the cache as pending nodes of a tree; `Cache.commit` keeps one root-to-node
path of that tree and forgets the rest. Prefill, plain decoding, verification, a draft model that
drafts, a tree grown level by level and a rollback are all spelled with these two verbs.

Letters: B batch, T length, N nodes, V vocabulary, D width, L layers. p is the target's law, q the
drafter's. (Chen et al., arXiv:2302.01318, and the post swap the letters.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .accept import Rule
    from .draft import Draft

FINAL = -1
"""The tap after the final norm: what the head reads. Taps 0..L are the residual stream: 0 the
embeddings, i the output of block i."""


@dataclass(frozen=True)
class Output:
    """What a model returns: `logits` [B, N, V] or None, `hidden` tap -> [B, N, D]."""

    logits: Tensor | None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)


class Cache(Protocol):
    """Committed prefix plus pending tree of every row."""

    lengths: Tensor
    """[B] int64, committed tokens per row."""
    n_pending: int
    """Pending nodes of every row."""

    def commit(self, path: Tensor, n: Tensor) -> None:
        """Keep the first `n` [B] nodes of `path` [B, P] and drop everything else that is pending.

        `path` lists pending nodes from a child of the prefix downwards; entries at or beyond
        `n[b]` are padding. `n` of 0 drops all of the row's pending nodes.
        """
        ...


class Model(Protocol):
    """A target or a draft model: a causal language model over the cache protocol."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def embedding(self) -> Callable[[Tensor], Tensor]:
        """tokens [B, N] -> [B, N, D]."""
        ...

    @property
    def norm(self) -> Callable[[Tensor], Tensor]:
        """The final norm, [B, N, D] -> [B, N, D]."""
        ...

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Normed hidden states [B, N, D] -> logits [B, N, V]."""
        ...

    def new_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache for `max_length` committed tokens per row (pending ones come on top)."""
        ...

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
        """Append `tokens` [B, N] to the cache as pending nodes and return what they predict.

        `parents` [B, N]: index of each node's parent among the cache's pending nodes (those of
        this call continue the count), -1 for the committed prefix; None: a chain after the last
        pending node. `cache=None` is a plain causal pass, for training. `taps` names the hidden
        states to return. `exit_layer=E` runs the first E blocks only and reads them through the
        final norm and the head. `resume=(E, h)`, h [B, R, D]: the first R tokens are exactly the
        cache's pending nodes, whose first E blocks an earlier `exit_layer=E` has run.
        """
        ...


@dataclass(frozen=True)
class Context:
    """What a drafter may read when it proposes."""

    tokens: Tensor
    """[B, T] right-padded: prompt and everything emitted."""
    lengths: Tensor
    """[B]; the last token of a row is its root, which the target has not seen yet."""
    new_tokens: Tensor
    """[B, A] emitted since the last call; at first the prompt from its second token."""
    n_new: Tensor
    """[B] how many of `new_tokens` hold."""
    hidden: Mapping[int, Tensor]
    """tap -> [B, A, D]: the states that predicted `new_tokens`."""
    path: Tensor
    """[B, P] nodes of the draft that was verified, root excluded."""
    n_accepted: Tensor
    """[B] how many of `path` were kept, after the cuts by budget and stop tokens."""
    live: Tensor
    """[B] bool: rows still decoding."""
    depth_left: Tensor
    """[B] how deep a draft can still count in each row: its budget less the target's own token."""
    max_depth: int
    """The largest `depth_left` of the live rows, on the host."""
    cache: Cache
    """The target's cache (LayerSkip drafts in it)."""
    rule: Rule
    """How this run picks tokens; drafters pick through it too."""


class DrafterState(Protocol):
    """One run of a drafter."""

    def propose(self, context: Context) -> Draft:
        """Draft below the root of every row; empty (N = 0) or unused rows decode plainly."""
        ...


class Drafter(Protocol):
    """A source of drafts. It holds no state of a run: `begin` makes one per run."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states of the target that `Context.hidden` must hold."""
        ...

    def begin(self, target: Model, batch_size: int, max_length: int) -> DrafterState: ...
