"""The library's own folders: config.json with the config's fields, model.safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..models import Transformer, TransformerConfig


def save_transformer(
    model: Transformer,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a `Transformer`; `metadata` goes into config.json under the key `training`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(dtype or tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "head.weight" and model.config.tie_word_embeddings)
    }
    config = dataclasses.asdict(model.config) | {"training": dict(metadata or {})}
    text = json.dumps(config, indent=2) + "\n"  # before any file is written
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(text)


def load_transformer(folder: Path | str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Read a folder that `save_transformer` wrote, in evaluation mode and without gradients.

    Raises ValueError for a folder without the two files, or with weights that do not fit.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"folder: expected {name} in {folder}, found no such file")
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    try:
        fields = dict(json.loads((folder / "config.json").read_text()))
        config = TransformerConfig(**{k: v for k, v in fields.items() if k in known})
        weights = load_file(folder / "model.safetensors")
    except (TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"folder: {folder} cannot be read: {error}") from error
    model = Transformer(config)
    model = model.to(dtype)  # before loading, so that float64 weights are not rounded on the way
    if model.config.tie_word_embeddings and "embedding.weight" in weights:
        weights["head.weight"] = weights["embedding.weight"]
    expected = model.state_dict()
    wrong = list(expected.keys() ^ weights.keys())
    wrong += [
        name
        for name in expected.keys() & weights.keys()
        if expected[name].shape != weights[name].shape
    ]
    if wrong:
        raise ValueError(f"folder: the weights of {folder} do not fit its config: {sorted(wrong)}")
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)
