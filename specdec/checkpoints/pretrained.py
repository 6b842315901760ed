"""Plain Hugging Face folders of Qwen3 and Llama: config.json, model.safetensors, also in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..models import Transformer
from .folder import load_transformer, read_folder
from .published import LAYER, below, expect, join, shape_of, without_angles

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By `model_type`; the two differ in Qwen3's norms of queries and keys."""

INDEX = "model.safetensors.index.json"


def load_target(folder: Path | str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Read a target: a Hugging Face folder of Qwen3 or Llama, or one of `save_transformer`.

    It is in evaluation mode, without gradients and on the CPU; `dtype` is that of the model,
    whatever the file's.

    Raises:
        ValueError: for a missing file, another kind of model, one with biases, scaled rotary
            positions or sliding windows in use, or weights that do not fit the config.
    """
    fields, weights = _read(Path(folder))
    kind = fields.get("model_type")
    if kind is None and not fields.get("architectures"):
        return load_transformer(folder, dtype)
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"folder: config.json has model_type={kind!r}; expected one of {list(_ARCHITECTURES)}"
        )
    architectures = fields.get("architectures") or [_ARCHITECTURES[kind]]
    expect(("architectures", architectures, [_ARCHITECTURES[kind]]), *_windows(fields))
    config = shape_of(fields, qk_norm=kind == "qwen3")
    with torch.device("meta"):  # weights are put in place, none are drawn to be overwritten
        model = Transformer(config)
    names = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
        "head.weight": ("lm_head.weight",),
    }
    for i in range(config.num_hidden_layers):
        names |= below(LAYER, f"blocks.{i}.", f"model.layers.{i}.")
    shapes = model.state_dict()
    names = {ours: names[ours] for ours in shapes}
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


def _read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """As `read_folder`, also of weights in several files that an index lists."""
    if (folder / "model.safetensors").is_file() or not (folder / INDEX).is_file():
        return read_folder(folder)
    try:
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"folder: {folder / INDEX} cannot be read: {error!r}") from error
    wrong = [
        name for name in files if Path(name).name != name or Path(name).suffix != ".safetensors"
    ]
    if wrong or not files:
        raise ValueError(f"folder: expected safetensors beside {folder / INDEX}, it lists {files}")
    fields: dict = {}
    weights: dict[str, Tensor] = {}
    for name in files:
        fields, part = read_folder(folder, (name,))
        weights |= part
    return fields, weights
