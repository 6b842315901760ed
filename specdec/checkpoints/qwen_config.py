"""config.json of Qwen3-Next, Qwen3.5 and Qwen3.6 as a `QwenMoeConfig`, and the way back.

A multimodal model keeps the fields of its text part below `text_config`. Missing optional fields
have the values that `transformers` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..models import QwenMoeConfig
from ..models.qwen_moe import FULL, LINEAR
from .published import expect, plain, rope_of

NEXT, MOE, DENSE = "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"
MODEL_TYPES = (NEXT, MOE, "qwen3_5_moe", DENSE, "qwen3_5")
"""Qwen3.6 has the types of Qwen3.5."""

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_ROUTED = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_GATED = ("intermediate_size",)
_ARCHITECTURES = {
    NEXT: "Qwen3NextForCausalLM",
    MOE: "Qwen3_5MoeForCausalLM",
    DENSE: "Qwen3_5ForCausalLM",
}


def text_fields(fields: Mapping) -> dict:
    """The fields of the text model, of either layout; tied embeddings are told outside, too."""
    text = fields.get("text_config")
    if text is None:
        return dict(fields)
    outside = ("tie_word_embeddings", "quantization_config")
    return {**text, **{name: fields[name] for name in outside if name in fields}}


def config_of(fields: Mapping, where: str = "folder: config.json") -> QwenMoeConfig:
    """The shape that `fields` tell; `where` starts the messages.

    Raises:
        ValueError: for another model type, a field that is missing or out of range, or what is not
            supported: dense blocks among those with experts, another activation, biases, scaled
            rotary positions, quantized weights, attention without its gate.
    """
    fields = text_fields(fields)
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{where} has model_type={kind!r}; expected one of {list(MODEL_TYPES)}")
    routed = kind in (MOE, "qwen3_5_moe") or (kind == NEXT and fields.get("num_experts") != 0)
    needed = [*_NEEDED, *(_ROUTED if routed else _GATED)]
    missing = [name for name in needed if fields.get(name) is None]
    if missing:
        raise ValueError(f"{where} lacks {missing}")
    expect(
        *plain(fields),
        ("attn_output_gate", fields.get("attn_output_gate", True), True),
        ("mlp_only_layers", list(fields.get("mlp_only_layers") or []), []),
        ("decoder_sparse_step", fields.get("decoder_sparse_step", 1), 1),
        ("use_sliding_window", bool(fields.get("use_sliding_window")), False),
        where=where,
    )
    theta, part = rope_of(fields, part=0.25)
    try:
        return QwenMoeConfig(
            **{name: fields[name] for name in needed},
            linear_conv_kernel_dim=fields.get("linear_conv_kernel_dim", 4),
            norm_topk_prob=kind != NEXT or fields.get("norm_topk_prob", True),
            layer_types=_kinds(fields, where),
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            partial_rotary_factor=part,
            max_position_embeddings=fields.get("max_position_embeddings", 32768),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
        )
    except TypeError as error:
        raise ValueError(f"{where} cannot be read: {error}") from error


def _kinds(fields: Mapping, where: str) -> tuple[str, ...]:
    """`layer_types`, or what an interval says in their place."""
    kinds = fields.get("layer_types")
    if kinds is not None:
        return tuple(kinds)
    every = fields.get("full_attention_interval", 4)
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"{where} has full_attention_interval={every!r}; expected at least 1")
    return tuple(
        LINEAR if (i + 1) % every else FULL for i in range(int(fields["num_hidden_layers"]))
    )


def model_type_of(config: QwenMoeConfig) -> str:
    """The published type that can say `config`; only NEXT's experts may have any sum of weights."""
    if not config.num_experts:
        return DENSE
    return MOE if config.norm_topk_prob else NEXT


def fields_of(config: QwenMoeConfig) -> dict[str, object]:
    """The fields that `config_of` and `transformers` read."""
    kind = model_type_of(config)
    own = _ROUTED if config.num_experts else _GATED
    fields: dict[str, object] = {name: getattr(config, name) for name in (*_NEEDED, *own)}
    if kind == NEXT:
        fields["norm_topk_prob"] = config.norm_topk_prob
    return fields | {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "layer_types": list(config.kinds),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.partial_rotary_factor,
        },
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
    }
