"""Causal language models of `transformers` as a `Model`: `HFModel(model)`. Chains only.

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

Each row has a cache of its own and is run alone, since caches of `transformers` have one length a
batch: a batch of B costs what B single rows do. Appending to pending tokens runs the pending ones
of a hybrid once more. The native models do neither; this file is for the models they do not know.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .models.decoder import check_positions, check_taps, check_tokens
from .protocol import FINAL, Cache, Output

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

OLDEST = (5, 24)
"""Version of `transformers` that this file is written for."""

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""`model_type`s whose layers have `input_layernorm` and `linear_attn`, as `replay` needs them."""

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
"""Fields of configs that a `Model` reports."""

SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of configs that put something between the head and the logits."""

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


class _Row:
    """One row: its cache of `transformers`, and what its pending tokens left behind."""

    def __init__(self, model: HFModel) -> None:
        self.model, self.past, self.length = model, model.empty_cache(), 0
        self.drop()

    def drop(self) -> None:
        """Back to the committed prefix."""
        crop(self.past, self.length)
        self.pending = torch.empty(1, 0, dtype=torch.long, device=self.model.device)
        self.inputs: Mapping[int, Tensor] = {}
        self.handed: Mapping[int, Handed] = {}

    def append(self, tokens: Tensor, taps: Sequence[int], logits: bool) -> Output:
        """Run `tokens` [1, N], pending from now on."""
        first = self.pending.shape[1]
        self.pending = torch.cat([self.pending, tokens], dim=1)
        linear = self.model.linear
        if linear and first:  # their states stand before the pending tokens: run all of those again
            crop(self.past, self.length)
            tokens, done = self.pending, first
        else:
            done = 0
        start = self.length + self.pending.shape[1] - tokens.shape[1]
        with frozen_linear_states(self.past) as self.handed:
            out = self.model.run(tokens, self.past, start, {*taps, *linear}, logits)
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


class HFCache:
    """A `Cache` for `HFModel`: committed prefix plus pending chain of `batch_size` rows.

    An exception in a pass drops all pending tokens.
    """

    def __init__(self, model: HFModel, batch_size: int) -> None:
        self.model = model
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=model.device)
        self.n_pending = 0
        self.rows = [_Row(model) for _ in range(batch_size)]

    @torch.no_grad()
    def append(self, tokens: Tensor, taps: Sequence[int], logits: bool) -> Output:
        """Run `tokens` [B, N] behind the pending ones, and keep them pending."""
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


class HFModel(nn.Module):
    """A causal language model of `transformers` as a `Model`; see the module's first lines.

    Logits are the model's own. Taps: `hidden_states[i]` is tap i for i < L, and FINAL for i = L;
    tap L is what goes into the final norm. A pass with a cache carries no gradient, one without
    runs all rows at once and does.

    Raises:
        ValueError: for a model that cannot be served, with the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        _check_model(model)
        self.model = model
        self.config = model.config
        self.linear = [i for i, is_linear in enumerate(self.empty_cache().is_linear) if is_linear]
        """Indices of the layers with linear attention."""

    def empty_cache(self) -> DynamicCache:
        """A cache of `transformers` for one row."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.config)
        for layer, is_sliding in zip(cache.layers, cache.is_sliding, strict=True):
            if is_sliding:
                layer.activate_past_recording()  # type: ignore[attr-defined]
        return cache

    def new_cache(self, batch_size: int, max_length: int) -> HFCache:
        if batch_size < 1 or not 0 <= max_length <= self.max_position_embeddings:
            raise ValueError(
                f"batch_size, max_length: expected at least 1, and 0..max_position_embeddings="
                f"{self.max_position_embeddings}, got {batch_size}, {max_length}"
            )
        return HFCache(self, batch_size)

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
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def norm(self) -> nn.Module:
        return _final_norm(self.model)

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()  # type: ignore[return-value]

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
        if cache is None:
            return self.run(tokens, None, 0, taps, logits)
        assert isinstance(cache, HFCache)
        return cache.append(tokens, taps, logits)

    def run(
        self,
        tokens: Tensor,
        past: DynamicCache | None,
        start: int,
        taps: Collection[int],
        logits: bool,
    ) -> Output:
        """A pass of the model itself over `tokens` [B, N] at positions `start`.. behind `past`."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        # a node beyond the last position is never kept: what it says is of no interest
        positions = positions.clamp(max=self.max_position_embeddings - 1)
        body = self.model if logits else self.model.base_model
        before_norm: list[Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
        try:
            out = body(
                input_ids=tokens,
                position_ids=None if past is None else positions,
                cache=past,
                use_cache=past is not None,
                output_hidden_states=bool(taps),
            )
        finally:
            hook.remove()
        states = dict(enumerate(out.hidden_states or ()))
        states |= {self.n_layers: before_norm[0], FINAL: out.hidden_states[-1]} if taps else {}
        return Output(out.logits if logits else None, {tap: states[tap] for tap in taps})

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
        if exit_layer is not None or resume is not None:
            raise ValueError(
                "exit_layer, resume: expected None, models of transformers run as a whole; the "
                "models of specdec.models can leave early"
            )
        check_taps(taps, self.n_layers)
        if cache is None:
            if parents is not None:
                raise ValueError("parents: a pass without a cache is a plain causal one")
            check_positions(tokens, self.max_position_embeddings)
            return
        if not isinstance(cache, HFCache) or cache.model is not self:
            raise ValueError(
                f"cache: expected one of this model's new_cache, got {type(cache).__name__}"
            )
        if len(cache.rows) != len(tokens):
            raise ValueError(f"tokens: expected {len(cache.rows)} rows, got {len(tokens)}")
        if parents is None:
            return
        if parents.shape != tokens.shape:
            raise ValueError(f"parents: expected {list(tokens.shape)}, got {list(parents.shape)}")
        chain = torch.arange(tokens.shape[1], device=parents.device) + cache.n_pending - 1
        if not torch.equal(parents, chain.expand_as(parents)):
            raise ValueError(
                f"parents: expected a chain, {chain.tolist()} in every row, got a tree; models of "
                f"transformers take chains only, specdec.models.QwenMoe (and Transformer) trees"
            )


def _final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm before the head, under the names that decoders give it."""
    parts = dict(model.base_model.named_children())
    found = [parts[name] for name in ("norm", "final_layernorm", "ln_f") if name in parts]
    if not found:
        raise ValueError(
            f"model: expected a final norm in {type(model.base_model).__name__}, found {[*parts]}"
        )
    return found[0]


def _version() -> str:
    return metadata.version("transformers")


def _check_model(model: PreTrainedModel) -> None:
    """ValueError for a model that cannot be served."""
    version = _version()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ValueError(
            f"transformers: expected at least {OLDEST[0]}.{OLDEST[1]}, got {version}; caches "
            f"are others there, and before 5.7 linear attention ignores its state in passes over "
            f"several tokens, which verifies drafts wrongly"
        )
    from transformers import DynamicCache, PreTrainedModel
    from transformers.cache_utils import (
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionLayer,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, names = type(model).__name__, {base.__name__ for base in type(model).mro()}
    known = names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    if not known or not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a causal language model of transformers, got {name}")
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder, {name} is an encoder and a decoder")
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    served = {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}
    other = sorted(kind.__name__ for kind in kinds - served)
    if other:
        raise ValueError(f"model: cannot roll back the caches of {name}: {other}")
    if (model._is_stateful or LinearAttentionLayer in kinds) and config.model_type not in HYBRIDS:
        raise ValueError(
            f"model: {name} has recurrent layers that cannot be rolled back here; the hybrids "
            f"that can: {', '.join(HYBRIDS)}"
        )
    missing = [x for x in SHAPE if not isinstance(getattr(config, x, None), int)]
    if missing:
        raise ValueError(f"model: the config of {name} does not say {missing}")
    scaled = [x for x in SCALES if getattr(config, x, None) not in (None, 1.0)]
    if scaled:
        raise ValueError(f"model: the logits of {name} are more than its head's: {scaled}")
    _final_norm(model)
