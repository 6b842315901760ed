"""Medusa heads as FasterDecoding publishes them: `{k}.0.linear` the block, `{k}.1` the head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ..drafters.medusa import MedusaHeads
from ..protocol import Model
from .folder import fill, read_folder, write_folder

_NAMES = {"block.weight": "0.linear.weight", "block.bias": "0.linear.bias", "head": "1"}
FILES = ("model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt")


def load_medusa(folder: Path | str, target: Model) -> MedusaHeads:
    """Read a folder of Medusa heads for `target`, in its dtype, without gradients.

    Raises:
        ValueError: for a folder that holds no heads, heads of more than one residual block, or
            weights that fit neither each other nor the target.
    """
    fields, weights = read_folder(folder, FILES)
    weights = {name.removeprefix("medusa_head."): tensor for name, tensor in weights.items()}
    if "0.0.linear.weight" not in weights:
        raise ValueError(f"folder: {folder} holds no Medusa heads; its weights: {sorted(weights)}")
    if fields.get("medusa_num_layers", 1) != 1:
        raise ValueError(
            f"folder: config.json has medusa_num_layers={fields['medusa_num_layers']}; expected 1"
        )
    n_heads = len({name.split(".")[0] for name in weights})
    heads = MedusaHeads(
        target.hidden_size, target.vocab_size, n_heads, bias="0.1.bias" in weights
    ).to(device=target.device, dtype=target.dtype)
    ours = {theirs: name for name, theirs in _published(heads).items()}
    return fill(heads, {ours.get(name, name): tensor for name, tensor in weights.items()}, folder)


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
