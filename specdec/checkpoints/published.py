"""What published decoders share: the fields of their config.json, and weights that we join.

Qwen3 and Llama, and drafters made of their layers, keep q, k and v, and gate and up, as weights of
their own; here each group is one product. A name of ours stands for one or several of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from ..models import TransformerConfig

Names: TypeAlias = Mapping[str, tuple[str, ...]]
"""Our name of a weight -> the published ones, joined row by row."""

LAYER: Names = {
    "norm_attention.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "norm_mlp.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
}
"""One decoder layer."""


def below(names: Names, ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """`names` with a prefix on either side."""
    return {f"{ours}{k}": tuple(f"{theirs}{name}" for name in v) for k, v in names.items()}


def decoder_names(ours: Iterable[str], n_layers: int) -> dict[str, tuple[str, ...]]:
    """The published names of a whole decoder's weights, for those of `ours`."""
    names = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
        "head.weight": ("lm_head.weight",),
    }
    for i in range(n_layers):
        names |= below(LAYER, f"blocks.{i}.", f"model.layers.{i}.")
    return {name: names[name] for name in ours}


def join(
    weights: Mapping[str, Tensor], names: Names, shapes: Mapping[str, Tensor], folder: Path | str
) -> dict[str, Tensor]:
    """Published weights under our names.

    Raises:
        ValueError: naming those that are missing, that nobody asked for, or that do not have the
            `shapes` of ours.
    """
    wrong = {name for published in names.values() for name in published} ^ weights.keys()
    state = {}
    for ours, published in names.items():
        if wrong.intersection(published):
            continue
        parts = [weights[name] for name in published]
        if len({part.shape[1:] for part in parts}) == 1:
            state[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
        if ours not in state or state[ours].shape != shapes[ours].shape:
            wrong.update(published)
    if wrong:
        raise ValueError(f"folder: the weights of {folder} do not fit its config: {sorted(wrong)}")
    return state


def split(
    state: Mapping[str, Tensor], names: Names, config: TransformerConfig
) -> dict[str, Tensor]:
    """Our weights under their published names, the inverse of `join`."""
    heads = (config.num_attention_heads, config.n_kv_heads, config.n_kv_heads)
    weights: dict[str, Tensor] = {}
    for ours, published in names.items():
        sizes = [len(state[ours]) // len(published)] * len(published)
        if ours.endswith("attention.qkv.weight"):
            sizes = [n * config.head_size for n in heads]
        weights |= zip(published, state[ours].split(sizes), strict=True)
    return weights


def expect(*fields: tuple[str, object, object], where: str = "folder: config.json") -> None:
    """Raise a ValueError for the first (name, value, the only supported value) that differs."""
    for name, got, supported in fields:
        if got != supported:
            raise ValueError(f"{where} has {name}={got!r}; expected {supported!r}")


def plain(fields: Mapping) -> list[tuple[str, object, object]]:
    """What must hold of any model here, for `expect`: SiLU, no biases, no scaled rotary positions,
    no quantized weights."""
    return [
        ("hidden_act", fields.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(fields.get("attention_bias") or fields.get("qkv_bias")), False),
        ("mlp_bias", bool(fields.get("mlp_bias")), False),
        ("rope_scaling", _kind(fields.get("rope_scaling") or {}), "default"),
        ("rope_parameters", _kind(fields.get("rope_parameters") or {}), "default"),
        ("quantization_config", fields.get("quantization_config"), None),
    ]


def rope_of(fields: Mapping, part: float) -> tuple[float, float]:
    """Base of the rotary positions, and the part of a head they turn (`part` if none is told)."""
    rope = fields.get("rope_parameters") or {}
    theta = fields.get("rope_theta") or rope.get("rope_theta") or 10000.0
    told = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    return theta, told or part


def shape_of(fields: Mapping, *, qk_norm: bool) -> TransformerConfig:
    """The shape that config.json tells.

    Raises:
        ValueError: for a field that is missing or out of range, or tells of a layer that is not
            supported: another activation, biases, scaled or partial rotary positions, quantized
            weights.
    """
    needed = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f"folder: expected {missing} in config.json, got none")
    theta, part = rope_of(fields, part=1.0)
    expect(*plain(fields), ("partial_rotary_factor", part, 1.0))
    try:
        return TransformerConfig(
            *(fields[name] for name in needed),
            num_key_value_heads=fields.get("num_key_value_heads"),
            head_dim=fields.get("head_dim"),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            max_position_embeddings=fields.get("max_position_embeddings", 2048),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            qk_norm=qk_norm,
        )
    except TypeError as error:
        raise ValueError(f"folder: config.json cannot be read: {error}") from error


def _kind(rope: Mapping) -> object:
    """The type of rotary positions; settings by layer type count as a type of their own."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return sorted(rope)
    return rope.get("rope_type", rope.get("type", "default"))


def fields_of(config: TransformerConfig) -> dict[str, object]:
    """The fields that `shape_of` reads; layers alone have no embeddings to tie."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def without_angles(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Older folders hold the rotary frequencies, which follow from the config."""
    return {n: w for n, w in weights.items() if not n.endswith("rotary_emb.inv_freq")}
