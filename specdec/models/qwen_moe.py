"""Qwen3-Next, Qwen3.5 and Qwen3.6: Gated DeltaNet in three blocks of four, routed experts in all.

Every fourth block attends, with a sigmoid gate on what the heads say, norms of queries and keys and
rotary positions in a part of each head; the others are recurrent (`delta_net.py`). Their MLP is a
few experts of many, and one that all tokens pass (`experts.py`); without experts it is dense. All
norms but the one of a recurrent head count their weights from one. Field names are those of the
Hugging Face configs; weights are read by `checkpoints.load_target`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..cache import KVStore, TreeCache
from .decoder import Decoder, Lane
from .delta_net import DeltaShape, DeltaStore, GatedDeltaNet
from .experts import MoeMLP
from .layers import (
    Attention,
    Block,
    CentredRMSNorm,
    GatedMLP,
    RotaryStore,
    for_groups,
    rotary_angles,
)
from .transformer import TransformerConfig, draw_weights

LINEAR, FULL = "linear_attention", "full_attention"


class Told(Protocol):
    """A config of `transformers`."""

    def to_dict(self) -> dict: ...


@dataclass(frozen=True)
class QwenMoeConfig:
    """Shape of a `QwenMoe`; a ValueError names the field that does not fit.

    `layer_types` None: every fourth block attends. `num_experts` 0: MLPs of `intermediate_size`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    num_experts: int = 0
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 1
    shared_expert_intermediate_size: int = 1
    intermediate_size: int = 1
    norm_topk_prob: bool = True
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000_000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        counts = (
            "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim linear_num_key_heads linear_num_value_heads linear_key_head_dim "
            "linear_value_head_dim max_position_embeddings num_experts_per_tok "
            "moe_intermediate_size shared_expert_intermediate_size intermediate_size"
        )
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.linear_conv_kernel_dim < 2:
            raise ValueError(
                f"linear_conv_kernel_dim: expected at least 2, got {self.linear_conv_kernel_dim}"
            )
        for name, whole in (
            ("num_key_value_heads", "num_attention_heads"),
            ("linear_num_key_heads", "linear_num_value_heads"),
        ):
            if getattr(self, whole) % getattr(self, name):
                raise ValueError(
                    f"{name}: expected a divisor of {whole} ({getattr(self, whole)}), got "
                    f"{getattr(self, name)}"
                )
        if self.num_experts < 0 or 0 < self.num_experts < self.num_experts_per_tok:
            raise ValueError(
                f"num_experts: expected 0, or at least num_experts_per_tok "
                f"({self.num_experts_per_tok}), got {self.num_experts}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"partial_rotary_factor: expected an even number of dimensions of head_dim "
                f"{self.head_dim}, got {self.partial_rotary_factor} of them"
            )
        kinds = self.kinds
        if len(kinds) != self.num_hidden_layers or not {*kinds} <= {LINEAR, FULL}:
            raise ValueError(
                f"layer_types: expected {self.num_hidden_layers} of {LINEAR!r} and {FULL!r}, "
                f"got {list(kinds)}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """`layer_types`, also where they are None."""
        if self.layer_types is not None:
            return tuple(self.layer_types)
        return tuple(FULL if i % 4 == 3 else LINEAR for i in range(self.num_hidden_layers))

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def n_groups(self) -> int:
        """Query heads per key head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def delta(self) -> DeltaShape:
        return DeltaShape(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    def dense(self) -> TransformerConfig:
        """Vocabulary, width and heads in blocks that all attend over whole-head angles, dense.

        What drafters for a hybrid are made of, and all that drafting needs to know of its blocks.
        """
        return TransformerConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=self.tie_word_embeddings,
            qk_norm=True,
        )

    @staticmethod
    def from_hf(config: Mapping | Told) -> QwenMoeConfig:
        """The shape of a Qwen3-Next, Qwen3.5 or Qwen3.6, with experts or without.

        `config`: the fields of a config.json, of a text model or a multimodal one, or a config of
        `transformers`. Raises ValueError for another model, or what is not supported of these.
        """
        from ..checkpoints.qwen_config import config_of  # which needs this module

        return config_of(config if isinstance(config, Mapping) else config.to_dict(), "config:")

    @staticmethod
    def qwen35_35b_a3b() -> QwenMoeConfig:
        """Qwen3.5-35B-A3B and Qwen3.6-35B-A3B: 40 blocks, 8 of 256 experts and a shared one."""
        return QwenMoeConfig(
            vocab_size=248320,
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            max_position_embeddings=262144,
        )


def hybrid_block(config: QwenMoeConfig, kind: str, experts: str = "grouped") -> Block:
    """A block of this shape, recurrent or attending."""
    c, width, eps = config, config.hidden_size, config.rms_norm_eps
    if kind == LINEAR:
        mixer: nn.Module = GatedDeltaNet(width, c.delta, eps)
    else:
        mixer = Attention(
            width,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            qk_norm=True,
            eps=eps,
            gated=True,
            centred=True,
        )
    if c.num_experts:
        mlp: nn.Module = MoeMLP(
            width,
            c.moe_intermediate_size,
            c.num_experts,
            c.num_experts_per_tok,
            shared_inner=c.shared_expert_intermediate_size,
            norm_topk_prob=c.norm_topk_prob,
            experts=experts,
        )
    else:
        mlp = GatedMLP(width, c.intermediate_size)
    return Block(mixer, mlp, CentredRMSNorm(width, eps), CentredRMSNorm(width, eps))


class QwenMoe(Decoder[QwenMoeConfig]):
    """A `Model`: see `specdec.protocol` for the call. `experts`: see `MoeMLP`."""

    def __init__(self, config: QwenMoeConfig, *, experts: str = "grouped") -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(hybrid_block(c, kind, experts) for kind in c.kinds)
        self.norm = CentredRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        seen = {LINEAR: 0, FULL: 0}
        self._places: list[int] = []  # of each block among those of its kind
        for kind in c.kinds:
            self._places.append(seen[kind])
            seen[kind] += 1
        self._n_linear, self._n_full = seen[LINEAR], seen[FULL]

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> QwenMoe:
        """Draw fresh weights, see `draw_weights`; decays as Mamba draws them, exp(A_log) <= 16."""
        draw_weights(self, self.n_layers, generator)
        for module in self.modules():
            if isinstance(module, CentredRMSNorm):
                module.weight.zero_()
            if isinstance(module, GatedDeltaNet):
                # depthwise: as many inputs as taps
                module.convolution.normal_(0.0, module.shape.kernel**-0.5, generator=generator)
                module.A_log.uniform_(0.01, 16, generator=generator).log_()
                # softplus of the bias, a step, is spread over 0.001 .. 0.1 by orders of magnitude
                step = module.dt_bias.uniform_(math.log(1e-3), math.log(0.1), generator=generator)
                module.dt_bias.copy_(step.exp().expm1().log())
        return self

    @property
    def experts(self) -> str | None:
        """How the experts are computed; None: there are none."""
        ways = [block.mlp.experts for block in self.blocks if isinstance(block.mlp, MoeMLP)]
        return ways[0] if ways else None

    def set_experts(self, experts: str) -> None:
        """How all blocks compute their experts, "loop" or "grouped"; see `MoeMLP`."""
        for block in self.blocks:
            if isinstance(mlp := block.mlp, MoeMLP):
                mlp.experts = experts

    def rotary(self, n: int) -> tuple[Tensor, Tensor]:
        """Angles of positions 0..n-1, [1, n, 1, rotary_dim] twice."""
        positions = torch.arange(n, device=self.device)
        angles = rotary_angles(
            positions, self.config.rotary_dim, self.config.rope_theta, self.dtype
        )
        cos, sin = angles[None].unbind(2)
        return cos, sin

    def lanes(self, n: int, cache: TreeCache | None, first: int) -> Sequence[Lane]:
        if cache is None:
            return [(self.rotary(n), None, 0, None)] * self.n_layers
        keys_values, angles, states = cache.stores
        assert isinstance(angles, RotaryStore) and isinstance(states, DeltaStore)
        view = cache.view(first)
        rotary, descent = angles.at(view), states.at(view)
        view = for_groups(view, self.config.n_groups)
        return [
            (rotary, states, i, descent) if kind == LINEAR else (rotary, keys_values, i, view)
            for i, kind in zip(self._places, self.config.kinds, strict=True)
        ]

    def new_cache(self, batch_size: int, max_length: int) -> TreeCache:
        if batch_size < 1 or max_length < 0:
            raise ValueError(
                f"batch_size, max_length: expected at least 1 and 0, got {batch_size}, {max_length}"
            )
        c, n_slots = self.config, max_length + 8  # a little room before the first growth
        stores = [
            KVStore(
                self._n_full,
                batch_size,
                c.num_key_value_heads,
                c.head_dim,
                n_slots,
                self.dtype,
                self.device,
            ),
            RotaryStore(c.rotary_dim, c.rope_theta, n_slots, self.dtype, self.device),
            DeltaStore(self._n_linear, batch_size, c.delta, self.dtype, self.device),
        ]
        return TreeCache(batch_size, stores, self.n_layers, self.dtype, self.device)
