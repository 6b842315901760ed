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
from .decoder import Decoder, Lane
from .layers import Attention, Block, GatedMLP, RMSNorm, RotaryStore, for_groups, rotary_angles


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
    width, eps = config.hidden_size, config.rms_norm_eps
    mlp = GatedMLP(width, config.intermediate_size)
    return Block(attention_of(config), mlp, RMSNorm(width, eps), RMSNorm(width, eps))


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
        std = 1.0 / math.sqrt(parameter.shape[-1])
        if name.endswith(("out.weight", "down.weight", "routed.down_proj")):
            std /= math.sqrt(2 * n_layers)
        parameter.normal_(0.0, std, generator=generator)


class Transformer(Decoder[TransformerConfig]):
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

    def rotary(self, n: int) -> tuple[Tensor, Tensor]:
        """Angles of positions 0..n-1, [1, n, 1, head_dim] twice: what a block takes in training."""
        return angles_of(self.config, n, self.embedding.weight)

    def lanes(self, n: int, cache: TreeCache | None, first: int) -> Sequence[Lane]:
        if cache is None:
            return [(self.rotary(n), None, 0, None)] * self.n_layers
        store, angles = cache.stores
        assert isinstance(store, KVStore) and isinstance(angles, RotaryStore)
        view = for_groups(cache.view(first), self.config.n_groups)
        rotary = angles.at(view)
        return [(rotary, store, i, view) for i in range(self.n_layers)]

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
