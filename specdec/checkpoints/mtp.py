"""Folders of multi-token prediction: sequential modules, or parallel heads, under our own names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..drafters.mtp import SequentialModules
from ..drafters.mtp_heads import ParallelHeads
from ..models import TransformerConfig
from ..protocol import Model
from .folder import config_of, fill, read_folder, write_folder


def save_mtp(
    network: SequentialModules | ParallelHeads,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write modules or heads; `metadata` goes into config.json under `training`.

    Raises:
        ValueError: for modules with blocks of a hybrid, which `save_qwen_mtp` writes.
    """
    if isinstance(network, SequentialModules) and network.shape is not network.config:
        raise ValueError(
            f"network: expected dense blocks, got those of a {type(network.shape).__name__}; "
            f"save_qwen_mtp writes them"
        )
    fields: dict[str, object] = {**dataclasses.asdict(network.config), "tap": network.tap}
    if isinstance(network, SequentialModules):
        fields |= {"kind": "sequential", "own_norm": network.blocks[0].norm is not None}
    else:
        fields |= {"kind": "parallel", "n_heads": network.n_heads}
    write_folder(folder, fields, network.state_dict(), dtype, metadata)


def load_modules(folder: Path | str, target: Model) -> SequentialModules:
    """Read modules that `save_mtp` wrote, in the target's dtype, without gradients.

    Raises:
        ValueError: for a folder without the two files, of another kind, or with weights that do
            fit neither their config nor the target's vocabulary and width.
    """
    fields, weights = _read(folder, "sequential", ("tap", "own_norm"))
    network = SequentialModules(
        _config(fields, folder, target), tap=fields["tap"], own_norm=fields["own_norm"]
    )
    return fill(network.to(device=target.device, dtype=target.dtype), weights, folder)


def load_heads(folder: Path | str, target: Model) -> ParallelHeads:
    """Read parallel heads that `save_mtp` wrote; raises as `load_modules` does."""
    fields, weights = _read(folder, "parallel", ("tap", "n_heads"))
    config = _config(fields, folder, target)
    network = ParallelHeads(config, fields["n_heads"], tap=fields["tap"])
    return fill(network.to(device=target.device, dtype=target.dtype), weights, folder)


def _config(fields: dict, folder: Path | str, target: Model) -> TransformerConfig:
    config = config_of(fields, folder)
    own, other = (config.vocab_size, config.hidden_size), (target.vocab_size, target.hidden_size)
    if own != other:
        raise ValueError(
            f"folder: {folder} is for {own[0]} tokens and width {own[1]}; the target has "
            f"{other[0]} tokens and width {other[1]}"
        )
    return config


def _read(folder: Path | str, kind: str, needed: tuple[str, ...]) -> tuple[dict, dict[str, Tensor]]:
    fields, weights = read_folder(folder)
    if fields.get("kind") != kind:
        raise ValueError(
            f"folder: expected config.json in {folder} of kind {kind!r}, got {fields.get('kind')!r}"
        )
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f"folder: expected {missing} in config.json of {folder}, got none")
    return fields, weights
