"""Hybrids of `transformers`: recurrent layers rolled back by freeze and replay. Chains only.

Rolling back keys and values is a crop. A linear-attention layer (Gated DeltaNet of Qwen3-Next and
Qwen3.5) has nothing to crop: its state is one matrix a head that has taken in every token, and its
kernels hand back the last one only. So a block is verified with these states frozen, and a commit
moves them on (the way of the text *Strix Halo*; the native `models.QwenMoe` needs neither):

* freeze: while the block runs, what its layers hand over to the cache is noted, not copied
  (`frozen_linear_states`). All states stay at the committed prefix.
* commit of all pending tokens (a prompt, an empty draft, a draft that was right to the end): what
  was noted is handed over now.
* commit of some: `replay` runs the norm and the linear attention of each such layer, nothing else,
  over the accepted tokens. Their inputs are `hidden_states` of the verification, which later tokens
  cannot have changed.
* commit of none: nothing to do.

Each row has a cache of its own and is run alone, since recurrent caches of `transformers` have one
length a batch: a batch of B costs what B single rows do. Appending to pending tokens runs the
pending ones once more. The native models do neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..protocol import Output

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from .model import HFModel

FROZEN = ("update_conv_state", "update_recurrent_state", "record_past")
"""Attributes of a linear-attention cache layer that are replaced while a block is verified."""


@dataclass
class Handed:
    """What a linear-attention layer handed over to its cache layer, and what has to be kept."""

    conv: Tensor | None = None
    """[1, C, N] inputs of the short convolution."""
    conv_kernel_size: int | None = None
    recurrent: Tensor | None = None
    """[1, H, d_k, d_v], the state behind the block."""


@contextmanager
def frozen_linear_states(cache: DynamicCache) -> Iterator[dict[int, Handed]]:
    """Inside, no pass moves the linear-attention states of `cache`; afterwards all is as before.

    Yields what each of these layers hands over, by layer. Several passes inside overwrite it.
    """
    layers = {i: layer for i, layer in enumerate(cache.layers) if cache.is_linear[i]}
    own = {i: {n: vars(x)[n] for n in FROZEN if n in vars(x)} for i, x in layers.items()}
    try:
        yield {i: _freeze(layer) for i, layer in layers.items()}
    finally:
        for i, layer in layers.items():
            for name in FROZEN:
                vars(layer).pop(name, None)
            vars(layer).update(own[i])


def _freeze(layer: Any) -> Handed:
    handed = Handed()

    def update_conv_state(
        new: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        handed.conv, handed.conv_kernel_size = new, conv_kernel_size
        if not layer.has_previous_state[state_idx]:
            return new
        # the convolution reads its left context from what this returns
        return torch.cat([layer.conv_states[state_idx], new], dim=-1)

    def update_recurrent_state(new: Tensor, state_idx: int = 0) -> Tensor:
        handed.recurrent = new
        return new

    layer.update_conv_state = update_conv_state
    layer.update_recurrent_state = update_recurrent_state
    # a block of one token would write the state of the convolution in place, past the function
    # above; of a layer that records the past it takes the road of longer blocks
    layer.record_past = True
    return handed


def replay(
    model: PreTrainedModel, cache: DynamicCache, inputs: Mapping[int, Tensor], n: int
) -> None:
    """Move the linear-attention states of `cache` over `n` tokens; nothing else changes.

    `inputs`: what went into the layers with linear attention, [1, at least n, D] each, by layer.
    """
    for i, states in inputs.items():
        layer: Any = model.base_model.layers[i]  # type: ignore[index]
        layer.linear_attn(hidden_states=layer.input_layernorm(states[:, :n]), cache=cache)


def crop(cache: DynamicCache, length: int) -> None:
    """Cut keys and values behind the first `length` tokens; linear attention stays as it is."""
    layer: Any
    for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True):
        if not is_linear and layer.is_initialized:
            # tokens to remove, as a negative number; at 0 a sliding window still trims itself
            layer.crop(min(length - layer.get_seq_length(), 0))


def empty_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache of `transformers` for one row of a model."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer, is_sliding in zip(cache.layers, cache.is_sliding, strict=True):
        if is_sliding:
            layer.activate_past_recording()  # type: ignore[attr-defined]
    return cache


def linear_layers(model: PreTrainedModel) -> list[int]:
    """Indices of a model's layers with linear attention."""
    return [i for i, is_linear in enumerate(empty_cache(model).is_linear) if is_linear]


class _Row:
    """One row: its cache of `transformers`, and what its pending tokens left behind."""

    def __init__(self, model: HFModel) -> None:
        self.model, self.past, self.length = model, empty_cache(model.model), 0
        self.drop()

    def drop(self) -> None:
        """Back to the committed prefix."""
        crop(self.past, self.length)
        self.pending = torch.empty(1, 0, dtype=torch.long, device=self.model.device)
        self.inputs: Mapping[int, Tensor] = {}
        self.handed: Mapping[int, Handed] = {}

    def append(self, tokens: Tensor, taps: Sequence[int], logits: bool) -> Output:
        """Run `tokens` [1, N], pending from now on."""
        linear, done = self.model.linear, self.pending.shape[1]
        self.pending = torch.cat([self.pending, tokens], dim=1)
        if done:  # the states stand before the pending tokens: run all of those again
            crop(self.past, self.length)
        with frozen_linear_states(self.past) as self.handed:
            out = self.model.run(self.pending, self.past, self.length, {*taps, *linear}, logits)
        self.inputs = {i: out.hidden[i] for i in linear}
        return Output(
            None if out.logits is None else out.logits[:, done:],
            {tap: out.hidden[tap][:, done:] for tap in taps},
        )

    def commit(self, n: int) -> None:
        if n == self.pending.shape[1]:
            for i, handed in self.handed.items():
                layer: Any = self.past.layers[i]
                layer.update_conv_state(handed.conv, conv_kernel_size=handed.conv_kernel_size)
                layer.update_recurrent_state(handed.recurrent)
        elif n:
            replay(self.model.model, self.past, self.inputs, n)
        self.length += n
        self.drop()


class RowsCache:
    """A `Cache` of a hybrid: committed prefix plus pending chain of `batch_size` rows.

    An exception in a pass drops all pending tokens.
    """

    def __init__(self, model: HFModel, batch_size: int) -> None:
        self.model = model
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=model.device)
        self.n_pending = 0
        self.rows = [_Row(model) for _ in range(batch_size)]

    @torch.no_grad()
    def append(
        self, tokens: Tensor, parents: Tensor | None, taps: Sequence[int], logits: bool
    ) -> Output:
        """Run `tokens` [B, N] behind the pending ones, and keep them pending.

        Raises:
            ValueError: for parents that are no chain.
        """
        self._check_chain(tokens, parents)
        outputs: list[Output] = []
        try:
            for row, own in zip(self.rows, tokens.split(1), strict=True):
                outputs.append(row.append(own, taps, logits))
        except BaseException:
            for row in self.rows:
                row.drop()
            self.n_pending = 0
            raise
        self.n_pending += tokens.shape[1]
        hidden = {tap: torch.cat([each.hidden[tap] for each in outputs]) for tap in taps}
        rows = [each.logits for each in outputs if each.logits is not None]
        return Output(torch.cat(rows) if rows else None, hidden)

    def _check_chain(self, tokens: Tensor, parents: Tensor | None) -> None:
        if parents is None:
            return
        if parents.shape != tokens.shape:
            raise ValueError(f"parents: expected {list(tokens.shape)}, got {list(parents.shape)}")
        chain = torch.arange(tokens.shape[1], device=parents.device) + self.n_pending - 1
        if not torch.equal(parents, chain.expand_as(parents)):
            raise ValueError(
                f"parents: expected a chain, {chain.tolist()} in every row, got a tree; hybrids of "
                f"transformers take chains only, specdec.models.QwenMoe takes trees"
            )

    @torch.no_grad()
    def commit(self, path: Tensor, n: Tensor) -> None:
        """Keep the first `n` [B] nodes of `path` [B, P]; see `Cache.commit`."""
        rows = len(self.rows)
        if path.ndim != 2 or len(path) != rows or n.shape != (rows,) or n.is_floating_point():
            raise ValueError(
                f"path, n: expected [{rows}, P] and whole numbers [{rows}], got "
                f"{list(path.shape)} and {n.dtype} of {list(n.shape)}"
            )
        counts, most = n.tolist(), min(path.shape[1], self.n_pending)
        if min(counts) < 0 or max(counts) > most:
            raise ValueError(
                f"n: expected 0..{most} (nodes on the path that are pending), got {counts}"
            )
        for nodes, count in zip(path.tolist(), counts, strict=True):
            if nodes[:count] != list(range(count)):
                raise ValueError(f"path: expected the nodes of a chain, 0, 1, .., got {nodes}")
        for row, count in zip(self.rows, counts, strict=True):
            row.commit(count)
        self.lengths = self.lengths + n
        self.n_pending = 0
