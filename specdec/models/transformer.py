"""A dense decoder: Llama, SmolLM2 (RMSNorm, RoPE, GQA, SwiGLU, tied embeddings), Qwen3 (q/k norm).

Field names are those of the Hugging Face configs. The projections of q, k and v, and of gate and
up, are one product each; `checkpoints` joins them when it reads published weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cache import KVStore, TreeCache
from ..protocol import FINAL, Cache, Output
from .layers import Attention, Block, RMSNorm, RotaryStore, for_groups, rotary_angles


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a `Transformer`; a ValueError names the field that does not fit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("num_key_value_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1 or None, got {value}")
        for name in ("rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.num_attention_heads % self.n_kv_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads "
                f"({self.num_attention_heads}), got {self.num_key_value_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_attention_heads "
                f"({self.num_attention_heads}) without head_dim, "
                f"got {self.hidden_size}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim: rotary positions need an even one, got {self.head_size}")

    @property
    def n_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def n_groups(self) -> int:
        """Query heads per key head."""
        return self.num_attention_heads // self.n_kv_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


def attention_of(config: TransformerConfig, width_in: int | None = None) -> Attention:
    """Attention of this shape that writes the config's width; `width_in` None: it reads it, too."""
    return Attention(
        width_in or config.hidden_size,
        config.num_attention_heads,
        config.n_kv_heads,
        config.head_size,
        qk_norm=config.qk_norm,
        eps=config.rms_norm_eps,
        width_out=config.hidden_size,
    )


def block_of(config: TransformerConfig) -> Block:
    """A decoder block of this shape."""
    return Block(
        config.hidden_size, config.intermediate_size, attention_of(config), config.rms_norm_eps
    )


def angles_of(config: TransformerConfig, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Angles of positions 0..n-1, [1, n, 1, head_dim] twice, in the dtype and place of `like`."""
    positions = torch.arange(n, device=like.device)
    angles = rotary_angles(positions, config.head_size, config.rope_theta, like.dtype)
    cos, sin = angles[None].unbind(2)
    return cos, sin


@torch.no_grad()
def draw_weights(module: nn.Module, n_layers: int, generator: torch.Generator | None) -> None:
    """Fresh weights: normal of 1/sqrt(fan in), residual outputs shrunk by sqrt(2 n_layers).

    Gains become 1, biases 0.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = 1.0 / math.sqrt(parameter.shape[1])
        if name.endswith(("out.weight", "down.weight")):
            std /= math.sqrt(2 * n_layers)
        parameter.normal_(0.0, std, generator=generator)


class Transformer(nn.Module):
    """A `Model`: see `specdec.protocol` for the call."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(block_of(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def reset_parameters(self, generator: torch.Generator | None = None) -> Transformer:
        """Draw fresh weights, see `draw_weights`."""
        draw_weights(self, self.n_layers, generator)
        return self

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

    def rotary(self, n: int) -> tuple[Tensor, Tensor]:
        """Angles of positions 0..n-1, [1, n, 1, head_dim] twice: what a block takes in training."""
        return angles_of(self.config, n, self.embedding.weight)

    def new_cache(self, batch_size: int, max_length: int) -> TreeCache:
        if batch_size < 1 or max_length < 0:
            raise ValueError(
                f"batch_size, max_length: expected at least 1 and 0, got {batch_size}, {max_length}"
            )
        c = self.config
        n_slots = max_length + 8  # a little room for pending nodes before the first growth
        keys_values = KVStore(
            c.num_hidden_layers,
            batch_size,
            c.n_kv_heads,
            c.head_size,
            n_slots,
            self.dtype,
            self.device,
        )
        angles = RotaryStore(c.head_size, c.rope_theta, n_slots, self.dtype, self.device)
        return TreeCache(batch_size, [keys_values, angles], self.n_layers, self.dtype, self.device)

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
        store, view, angles = None, None, None
        if cache is None:
            rotary = self.rotary(tokens.shape[1])
        else:
            assert isinstance(cache, TreeCache)
            store, angles = cache.stores
            assert isinstance(store, KVStore) and isinstance(angles, RotaryStore)
            first = cache.n_pending
            if new.shape[1]:
                cache.append(
                    new.shape[1],
                    None if parents is None else parents[:, tokens.shape[1] - new.shape[1] :],
                )
            cache.depth_done = exit_layer or self.n_layers
            view = for_groups(cache.view(first), self.config.n_groups)
            rotary = angles.at(view)
        hidden = {0: x} if 0 in taps else {}
        for i, block in enumerate(self.blocks[:exit_layer]):
            if resume is not None and i == resume[0]:  # from here on the resumed nodes, too
                assert isinstance(cache, TreeCache) and isinstance(angles, RotaryStore)
                view = for_groups(cache.view(0), self.config.n_groups)
                x, rotary = torch.cat([resume[1], x], dim=1), angles.at(view)
            if x.shape[1]:
                x = block(x, rotary, store, i, view)
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
        if tokens.ndim != 2 or tokens.dtype != torch.long or not tokens.shape[1]:
            raise ValueError(
                f"tokens: expected int64 of shape [B, N] with N >= 1, got "
                f"{tokens.dtype} of shape {list(tokens.shape)}"
            )
        depth = exit_layer if exit_layer is not None else self.n_layers
        wrong = [tap for tap in taps if tap != FINAL and not 0 <= tap <= depth]
        if wrong:
            raise ValueError(f"taps: expected 0..{depth} or FINAL (-1), got {wrong}")
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
            if tokens.shape[1] > self.max_position_embeddings:
                raise ValueError(
                    f"tokens: {tokens.shape[1]} positions, but "
                    f"max_position_embeddings is {self.max_position_embeddings}"
                )
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
