"""Which models of `transformers` can be served; what keeps the others out, with the reason.

What a model must let us do: give it masks and positions and believe that it uses them, keep its
keys and values, and read its logits. All checks look at the class and the config; nothing is run.
"""

from __future__ import annotations

import inspect
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from .head import NORMS, final_norm
from .masks import CHUNKED, FULL, SLIDING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

OLDEST = (5, 24)
"""Version of `transformers` that `specdec.hf` is written for."""

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""`model_type`s whose layers have `input_layernorm` and `linear_attn`, as `replay` needs them."""

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
"""Fields of configs that a `Model` reports."""

MASKED = ("sdpa", "eager")
"""Attention implementations that honour any mask of four dimensions."""

UNSERVED = {
    "bloom": "ALiBi, its positions are counted from a mask of padding, wrong for a tree",
    "mpt": "ALiBi, its positions are counted from slots, wrong for a tree",
    "dory": "it runs its layers several times over, each with keys and values of its own",
    "gemma3n_text": "its hidden states are several streams, [streams, B, N, D]",
    "moshi": "it speaks, in several streams at once",
}
"""`model_type`s that nothing in a config or a signature gives away."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def version() -> str:
    return metadata.version("transformers")


def check_version() -> None:
    """ValueError for a version of `transformers` that is too old."""
    found = version()
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ValueError(
            f"transformers: expected at least {OLDEST[0]}.{OLDEST[1]}, got {found}; caches "
            f"are others there, and before 5.7 linear attention ignores its state in passes over "
            f"several tokens, which verifies drafts wrongly"
        )


def check_model(model: PreTrainedModel) -> None:
    """ValueError for a model that cannot be served, with the reason."""
    check_version()
    _check_kind(model)
    _check_weights(model)
    _check_layers(model)
    _check_parts(model)
    if not is_hybrid(model.config):
        _check_positions(model)
        check_attention(model.config)
    if model.training:
        raise ValueError(
            f"model: expected {type(model).__name__} in evaluation mode (dropout changes what it "
            f"says from pass to pass), got training mode; call model.eval()"
        )


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether a model that passed has recurrent layers."""
    return config.model_type in HYBRIDS


def has_types(config: Any) -> bool:
    """Whether a model tells its layers apart by type, and takes a mask for each."""
    return getattr(config, "layer_types", None) is not None


def layer_sizes(config: Any) -> dict[str, int | None]:
    """Layer type -> size of its window or chunk, None: unbounded; what `transformers` masks by."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    sizes = {FULL: None, SLIDING: window, CHUNKED: chunk}
    if has_types(config):
        return {kind: sizes[kind] for kind in dict.fromkeys(config.layer_types)}
    if window is not None:
        return {SLIDING: window}
    return {FULL: None} if chunk is None else {CHUNKED: chunk}


def n_positions(config: Any) -> int:
    """Positions a model can be served at.

    LongRoPE (arXiv:2402.13753) has other angles for *all* positions as soon as one of a pass is
    beyond the original length; keys of earlier passes would keep the old ones, and a row would
    change with its neighbours. Such a model is served up to there.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    original = [
        rope["original_max_position_embeddings"]
        for rope in nested
        if rope.get("rope_type") == "longrope"
    ]
    return min([config.max_position_embeddings, *original])


def check_attention(config: Any) -> None:
    """ValueError for an attention implementation that does not honour the mask of a tree."""
    if config._attn_implementation not in MASKED:
        raise ValueError(
            f"attn_implementation: expected one of {', '.join(MASKED)}, which honour the mask of a "
            f"tree, got {config._attn_implementation}; load the model with "
            f'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa")'
        )


def _check_kind(model: PreTrainedModel) -> None:
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, names = type(model).__name__, {base.__name__ for base in type(model).mro()}
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a causal language model of transformers, got {name}")
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder, {name} is an encoder and a decoder")
    if not names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        raise ValueError(f"model: expected a causal language model of transformers, got {name}")
    if config.model_type in UNSERVED:
        raise ValueError(f"model: cannot serve {name}: {UNSERVED[config.model_type]}")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"model: {name} has cross-attention (add_cross_attention), to states of an encoder "
            f"that a language model alone does not have"
        )
    if getattr(config, "is_causal", True) is False or getattr(
        config, "use_bidirectional_attention", None
    ) not in (None, False):
        raise ValueError(f"model: {name} looks ahead (its config says so), it is no causal model")


def _check_weights(model: PreTrainedModel) -> None:
    name = type(model).__name__
    way = "load it without quantization, or call model.dequantize() first"
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"model: {name} is quantized (config.quantization_config); {way}")
    for where, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            raise ValueError(
                f"model: {where} of {name} is a quantized {type(module).__name__} of torch.ao, "
                f"without float weights; {way}"
            )
    for where, weight in model.named_parameters():
        if weight.dtype not in FLOATS:
            raise ValueError(
                f"model: {where} of {name} is quantized, {weight.dtype}, without float weights; "
                f"{way}"
            )


def _check_layers(model: PreTrainedModel) -> None:
    from transformers import DynamicCache
    from transformers.cache_utils import (
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionCacheLayerMixin,
    )

    name, config = type(model).__name__, model.config
    try:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    except KeyError as error:  # a type of layer that transformers has no cache for
        raise ValueError(
            f"model: cannot take over the cache of {name}, which has {error}"
        ) from error
    recurrent = {kind for kind in kinds if issubclass(kind, LinearAttentionCacheLayerMixin)}
    if (model._is_stateful or recurrent) and not is_hybrid(config):
        raise ValueError(
            f"model: {name} has recurrent layers that cannot be rolled back here; the hybrids "
            f"that can: {', '.join(HYBRIDS)}"
        )
    other = sorted(
        x.__name__ for x in kinds - recurrent - {DynamicLayer, DynamicSlidingWindowLayer}
    )
    unknown = {*(getattr(config, "layer_types", None) or ())} - {FULL, SLIDING, CHUNKED}
    if other or (unknown and not recurrent):
        raise ValueError(
            f"model: cannot take over the cache of {name}, which has {other or sorted(unknown)}"
        )


def _check_parts(model: PreTrainedModel) -> None:
    config, name, body = model.config, type(model).__name__, model.base_model
    missing = [x for x in SHAPE if not isinstance(getattr(config, x, None), int)]
    if missing and getattr(config, "text_config", None) is not None:
        raise ValueError(
            f"model: {name} is multimodal (config.text_config); expected its language model alone, "
            f"which has a class of its own ending in ForCausalLM"
        )
    if missing:
        raise ValueError(f"model: the config of {name} does not say {missing}")
    if final_norm(model) is None:
        raise ValueError(
            f"model: expected a final norm in {type(body).__name__}, one of {', '.join(NORMS)}, "
            f"found {[*dict(body.named_children())]}"
        )


def _check_positions(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    takes = inspect.signature(type(model).forward).parameters
    missing = [x for x in ("position_ids", "attention_mask", "cache") if x not in takes]
    if missing:
        raise ValueError(
            f"model: {name} takes no {missing}: it counts positions by itself, which is wrong for "
            f"the nodes of a tree"
        )
    if getattr(config, "alibi", False):
        raise ValueError(
            f"model: {name} has ALiBi (config.alibi), which counts positions from a mask of "
            f"padding, wrong for the nodes of a tree"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(
            f"model: {name} has local attention (config.attention_layers) that counts slots by "
            f"itself, wrong for the nodes of a tree"
        )
