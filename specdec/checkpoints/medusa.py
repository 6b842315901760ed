"""Medusa heads as FasterDecoding publishes them: `{k}.0.linear` the block, `{k}.1` the head.

Two layouts: the heads alone (medusa_lm_head.pt or .safetensors), and, since Medusa 1.0, the whole
model with heads `medusa_head.{k}`, in one file or in shards; of those nothing else is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..drafters.medusa import MedusaHeads
from ..protocol import Model
from .folder import (
    PICKLED_INDEX,
    fill,
    pickled_shards,
    read_folder,
    read_places,
    read_weights,
    write_folder,
)
from .published import expect
from .sharded import INDEX, places_in, read_fields

_NAMES = {"block.weight": "0.linear.weight", "block.bias": "0.linear.bias", "head": "1"}
_PREFIX = "medusa_head."
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
"""What holds heads besides model.safetensors and shards."""


def load_medusa(folder: Path | str, target: Model) -> MedusaHeads:
    """Read a folder of Medusa heads for `target`, in its dtype, without gradients.

    Raises:
        ValueError: for a folder that holds no heads, heads of more than one residual block, or
            weights that fit neither each other nor the target.
    """
    folder = Path(folder)
    fields, weights = read_fields(folder), _read(folder)
    if "0.0.linear.weight" not in weights:
        raise ValueError(f"folder: {folder} holds no Medusa heads; its weights: {sorted(weights)}")
    if fields.get("medusa_num_layers", 1) != 1:
        raise ValueError(
            f"folder: config.json has medusa_num_layers={fields['medusa_num_layers']}; expected 1"
        )
    shape = tuple(weights.get("0.1.weight", weights["0.0.linear.weight"]).shape)
    expect(
        ("vocabulary and width", shape, (target.vocab_size, target.hidden_size)),
        where=f"folder: {folder}",
    )
    n_heads = len({name.split(".")[0] for name in weights})
    heads = MedusaHeads(
        target.hidden_size, target.vocab_size, n_heads, bias="0.1.bias" in weights
    ).to(device=target.device, dtype=target.dtype)
    ours = {theirs: name for name, theirs in _published(heads).items()}
    return fill(heads, {ours.get(name, name): tensor for name, tensor in weights.items()}, folder)


def is_medusa(names: Iterable[str]) -> bool:
    """Whether weights of these names hold Medusa heads."""
    return not {"0.0.linear.weight", f"{_PREFIX}0.0.linear.weight"}.isdisjoint(names)


def _read(folder: Path) -> dict[str, Tensor]:
    """The heads' weights, named from `{k}` on."""
    if any((folder / name).is_file() for name in ("model.safetensors", INDEX)):
        places = places_in(folder)
        whole = {n: p for n, p in places.items() if n.startswith(_PREFIX)}
        weights = read_places(whole or places)
    elif (folder / PICKLED_INDEX).is_file():
        weights = {}
        for file in {f for n, f in pickled_shards(folder).items() if n.startswith(_PREFIX)}:
            weights |= read_weights(file)
    else:
        weights = read_folder(folder, FILES)[1]
    if any(name.startswith(_PREFIX) for name in weights):
        weights = {n: w for n, w in weights.items() if n.startswith(_PREFIX)}
    return {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}


def save_medusa(
    heads: MedusaHeads,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write heads in the published layout; `metadata` goes into config.json under `training`."""
    published = _published(heads)
    weights = {published[name]: tensor for name, tensor in heads.state_dict().items()}
    fields = {"medusa_num_heads": heads.n_heads, "medusa_num_layers": 1}
    write_folder(folder, fields, weights, dtype, metadata)


def _published(heads: MedusaHeads) -> dict[str, str]:
    """Our name of every weight -> the published one."""
    names = {}
    for name in heads.state_dict():
        _, k, part = name.split(".", 2)  # heads.K.block.weight
        theirs = _NAMES.get(part) or part.replace("head", _NAMES["head"])
        names[name] = f"{k}.{theirs}"
    return names
