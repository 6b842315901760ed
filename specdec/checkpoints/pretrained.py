"""Hugging Face folders of Llama and Qwen: config.json and safetensors, also in shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..models import QwenMoe, Transformer
from .folder import load_transformer, read_folder
from .published import decoder_names, expect, join, shape_of, without_angles
from .qwen import load_qwen
from .qwen_config import MODEL_TYPES
from .sharded import read_fields, weight_files

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By `model_type`; the two differ in Qwen3's norms of queries and keys."""


def load_target(folder: Path | str, dtype: torch.dtype = torch.float32) -> Transformer | QwenMoe:
    """Read a target: a Hugging Face folder, or one of `save_transformer` or `save_qwen_moe`.

    Qwen3 and Llama, dense, come as a `Transformer`; Qwen3-Next, Qwen3.5 and Qwen3.6, with experts
    or without, as a `QwenMoe`. Of a multimodal model the text part is read, and no `mtp.*`.

    It is in evaluation mode, without gradients and on the CPU; `dtype` is that of the model,
    whatever the file's.

    Raises:
        ValueError: for a missing file, another kind of model, one with biases, scaled rotary
            positions or sliding windows in use, or weights that do not fit the config.
    """
    folder = Path(folder)
    fields = read_fields(folder)
    kind = fields.get("model_type")
    if kind in MODEL_TYPES:
        return load_qwen(folder, fields, dtype)
    if kind is None and not fields.get("architectures"):
        return load_transformer(folder, dtype)
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"folder: config.json has model_type={kind!r}; expected one of "
            f"{[*_ARCHITECTURES, *MODEL_TYPES]}"
        )
    architectures = fields.get("architectures") or [_ARCHITECTURES[kind]]
    expect(("architectures", architectures, [_ARCHITECTURES[kind]]), *_windows(fields))
    config = shape_of(fields, qk_norm=kind == "qwen3")
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder):
        weights |= read_folder(folder, (file.name,))[1]
    with torch.device("meta"):  # weights are put in place, none are drawn to be overwritten
        model = Transformer(config)
    shapes = model.state_dict()
    names = decoder_names(shapes, config.num_hidden_layers)
    weights = without_angles(weights)
    if config.tie_word_embeddings:
        del names["head.weight"]
        weights.pop("lm_head.weight", None)
    state = {
        name: weight.to(dtype) for name, weight in join(weights, names, shapes, folder).items()
    }
    if config.tie_word_embeddings:
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.head.weight = model.embedding.weight  # one parameter again
    return model.eval().requires_grad_(False)


def _windows(fields: Mapping) -> list[tuple[str, object, object]]:
    """What must hold of the fields for no layer to have a window."""
    kinds = set(fields.get("layer_types") or ["full_attention"])
    n_full = fields.get("max_window_layers", 28) if fields.get("sliding_window") else None
    used = bool(fields.get("use_sliding_window")) and n_full is not None
    return [
        ("layer_types", sorted(kinds), ["full_attention"]),
        (
            "use_sliding_window",
            used and not fields.get("layer_types") and n_full < fields.get("num_hidden_layers", 0),
            False,
        ),
    ]
