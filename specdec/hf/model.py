"""`HFModel`: a causal language model of `transformers` as a `Model`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..models.decoder import check_positions, check_taps, check_tokens
from ..protocol import FINAL, Cache, Output
from .attention import AttentionCache
from .checks import check_model, is_hybrid, n_positions
from .head import final_norm, head_of
from .hybrid import RowsCache, linear_layers
from .masks import Masks

if TYPE_CHECKING:
    import transformers
    from transformers import PreTrainedModel


class HFModel(nn.Module):
    """A causal language model of `transformers` as a `Model`: chains and trees, ragged batches.

    Logits are the model's own. Taps: `hidden_states[i]` is tap i for i < L, and FINAL for i = L;
    tap L is what goes into the final norm. Tap 0 goes into the first block: with some models that
    is more than `embedding` says (learned positions, scales). A pass with a cache carries no
    gradient, one without does. Hybrids (`checks.HYBRIDS`) take chains only, and run the rows of a
    batch one by one.

    Raises:
        ValueError: for a model that cannot be served, with the reason; see `hf.checks`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        check_model(model)
        self.model = model
        self.config = model.config
        self.linear = linear_layers(model)
        """Indices of the layers with linear attention."""

    def new_cache(self, batch_size: int, max_length: int) -> AttentionCache | RowsCache:
        if batch_size < 1 or not 0 <= max_length <= self.max_position_embeddings:
            raise ValueError(
                f"batch_size, max_length: expected at least 1, and 0..max_position_embeddings="
                f"{self.max_position_embeddings}, got {batch_size}, {max_length}"
            )
        if is_hybrid(self.config):
            return RowsCache(self, batch_size)
        return AttentionCache(self, batch_size, max_length)

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
        """Positions to serve: the config's, or those up to where LongRoPE turns all angles over."""
        return n_positions(self.config)

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
        norm = final_norm(self.model)
        assert norm is not None  # checked
        return norm

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return head_of(self.model)

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
        assert isinstance(cache, AttentionCache | RowsCache)
        return cache.append(tokens, parents, taps, logits)

    def run(
        self,
        tokens: Tensor,
        past: transformers.Cache | None,
        positions: Tensor | int,
        taps: Collection[int],
        logits: bool,
        masks: Masks = None,
    ) -> Output:
        """A pass of the model itself over `tokens` [B, N] behind `past`, a cache of `transformers`.

        `positions`: [B, N], or that of the first token of a chain. Masks: see `masks_of`; None: a
        causal pass, the model makes its own.
        """
        if isinstance(positions, int):
            chain = torch.arange(positions, positions + tokens.shape[1], device=tokens.device)
            positions = chain.unsqueeze(0)
        # a node beyond the last position is never kept: what it says is of no interest
        positions = positions.clamp(max=self.max_position_embeddings - 1)
        body = self.model if logits else self.model.base_model
        before_norm: list[Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
        try:
            out = body(
                input_ids=tokens,
                attention_mask=masks,
                position_ids=None if past is None else positions,
                cache=past,
                use_cache=past is not None,
                output_hidden_states=bool(taps),
            )
        finally:
            hook.remove()
        states = dict(enumerate(out.hidden_states or ()))
        states |= {self.n_layers: before_norm[-1], FINAL: out.hidden_states[-1]} if taps else {}
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
        if not isinstance(cache, AttentionCache | RowsCache) or cache.model is not self:
            raise ValueError(
                f"cache: expected one of this model's new_cache, got {type(cache).__name__}"
            )
        if len(cache.lengths) != len(tokens):
            raise ValueError(f"tokens: expected {len(cache.lengths)} rows, got {len(tokens)}")
