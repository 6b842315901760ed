"""The library's own folders: config.json with the config's fields, model.safetensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..models import Transformer, TransformerConfig
from .sharded import INDEX, Place, places_in, read_fields

PICKLED_INDEX = "pytorch_model.bin.index.json"
M = TypeVar("M", bound=nn.Module)


def save_transformer(
    model: Transformer,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a `Transformer`; `metadata` goes into config.json under the key `training`."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["head.weight"]
    write_folder(folder, dataclasses.asdict(model.config), weights, dtype, metadata)


def load_transformer(folder: Path | str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Read a folder that `save_transformer` wrote, in evaluation mode and without gradients.

    Raises ValueError for a folder without the two files, or with weights that do not fit.
    """
    fields, weights = read_folder(folder)
    model = Transformer(config_of(fields, folder))
    model = model.to(dtype)  # before loading, so that float64 weights are not rounded on the way
    if model.config.tie_word_embeddings and "embedding.weight" in weights:
        weights["head.weight"] = weights["embedding.weight"]
    return fill(model, weights, folder)


def write_folder(
    folder: Path | str,
    fields: Mapping[str, object],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    metadata: Mapping[str, object] | None,
) -> None:
    """Write `fields` as config.json and `weights`, floats in `dtype` (None: their own)."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder: expected a folder to write to, {folder} is a file")
    try:
        text = json.dumps({**fields, "training": dict(metadata or {})}, indent=2) + "\n"
    except TypeError as error:
        raise ValueError(f"metadata: expected what JSON can hold, got {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    cast = {
        name: tensor.to(dtype if dtype and tensor.is_floating_point() else None).contiguous()
        for name, tensor in weights.items()
    }
    save_file(cast, folder / "model.safetensors")
    (folder / "config.json").write_text(text)


def read_folder(
    folder: Path | str, files: tuple[str, ...] = ("model.safetensors",)
) -> tuple[dict, dict[str, Tensor]]:
    """The fields of config.json, and the weights of the first of `files` that is there.

    A file that is no safetensors is a pickle and read with `weights_only=True`. Raises ValueError
    for a missing file, one that cannot be read, or a pickle of anything but tensors by name.
    """
    folder = Path(folder)
    found = [folder / name for name in files if (folder / name).is_file()]
    if not (folder / "config.json").is_file():
        raise ValueError(f"folder: expected config.json in {folder}, found no such file")
    if not found:
        wanted = " or ".join(files)
        raise ValueError(f"folder: expected {wanted} in {folder}, found no such file")
    return read_fields(folder), read_weights(found[0])


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; raises as `read_folder` does."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (
        *(EOFError, OSError, RuntimeError, TypeError, ValueError),
        *(SafetensorError, UnpicklingError),
    ) as error:
        raise ValueError(f"folder: {file} cannot be read: {error}") from error
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise ValueError(
            f"folder: expected tensors by name in {file}, got a {type(weights).__name__}"
        )
    return weights


def pickled_shards(folder: Path) -> dict[str, Path]:
    """Every weight by name and the pickle that holds it, as a sharded model's index lists them."""
    file = folder / PICKLED_INDEX
    try:
        files = dict(json.loads(file.read_text())["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"folder: {file} cannot be read: {error!r}") from error
    wrong = sorted({n for n in files.values() if Path(n).name != n or not (folder / n).is_file()})
    if wrong:
        raise ValueError(
            f"folder: expected the files that {file} lists, beside it; found no {wrong}"
        )
    return {name: folder / shard for name, shard in files.items()}


def weight_names(folder: Path, files: tuple[str, ...]) -> set[str]:
    """The names of all weights of a folder; of safetensors and of pickled shards none are read.

    `files` are those that may hold them besides model.safetensors and shards.
    """
    if any((folder / name).is_file() for name in ("model.safetensors", INDEX)):
        return set(places_in(folder))
    if (folder / PICKLED_INDEX).is_file():
        return set(pickled_shards(folder))
    return set(read_folder(folder, files)[1])


def read_places(places: Mapping[str, Place]) -> dict[str, Tensor]:
    """The weights at `places`, and no others of their files."""
    weights = {}
    for file in {place.file for place in places.values()}:
        with safe_open(file, "pt") as opened:
            for name in (n for n, place in places.items() if place.file == file):
                weights[name] = opened.get_tensor(name)
    return weights


def config_of(fields: Mapping[str, object], folder: Path | str) -> TransformerConfig:
    """The shape that `fields` describe, whatever else they hold."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    try:
        return TransformerConfig(**{k: v for k, v in fields.items() if k in known})  # type: ignore
    except (TypeError, ValueError) as error:
        raise ValueError(f"folder: {folder} cannot be read: {error}") from error


def fill(module: M, weights: Mapping[str, Tensor], folder: Path | str) -> M:
    """Load `weights`, all and no others; then evaluation mode, without gradients."""
    expected = module.state_dict()
    wrong = list(expected.keys() ^ weights.keys())
    wrong += [
        name
        for name in expected.keys() & weights.keys()
        if expected[name].shape != weights[name].shape
    ]
    if wrong:
        raise ValueError(f"folder: the weights of {folder} do not fit its config: {sorted(wrong)}")
    module.load_state_dict(weights)
    return module.eval().requires_grad_(False)
