"""Folders of shards: safetensors files made one after the other, and an index of what they hold.

Making them can be broken off and goes on where it was; an index that tells of anything else than
what is asked for (another target, seed, ...) is refused, and nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from .distributed import ALONE, Ranks

INDEX = "index.json"


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `file`, then put it there: never half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    write(partial)
    os.replace(partial, file)


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shards(
    folder: Path | str,
    index: Mapping[str, object],
    n_shards: int,
    make: Callable[[int], dict[str, Tensor]],
    *,
    description: str,
    ranks: Ranks = ALONE,
) -> Path:
    """Make shards 0..n_shards - 1 of `folder`, those that are missing, and return the folder.

    Args:
        index: what the shards hold, in JSON's types; kept in `index.json`.
        make: number of a shard -> its tensors by name.
        ranks: processes that share the work.

    Raises:
        ValueError: for a folder whose shards hold something else.
    """
    folder = Path(folder)
    wanted = json.loads(json.dumps(index))
    if ranks.is_first:
        check_index(folder, wanted)
        replace_file(
            folder / INDEX, lambda partial: partial.write_text(json.dumps(wanted, indent=2) + "\n")
        )
    missing = [number for number in range(n_shards) if not shard_file(folder, number).exists()]
    ranks.wait()  # all have looked before one writes
    bar = tqdm(
        missing[ranks.rank :: ranks.size], desc=description, unit="shard", mininterval=1.0,
        disable=not ranks.is_first,
    )  # fmt: skip
    for number in bar:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in make(number).items()}
        replace_file(
            shard_file(folder, number),
            lambda partial, tensors=tensors: save_file(tensors, partial),
        )
    ranks.wait()
    return folder


def check_index(folder: Path, wanted: Mapping[str, object]) -> None:
    """Raise a ValueError that names where the index of `folder` differs from `wanted`."""
    file = folder / INDEX
    if not file.exists():
        if any(folder.glob("shard-*.safetensors")):
            raise ValueError(f"folder: {folder} holds shards but no {INDEX}")
        return
    found = json.loads(file.read_text())
    differing = [
        f"{name}={found.get(name)!r} instead of {wanted.get(name)!r}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    if differing:
        raise ValueError(
            f"folder: the shards of {folder} were made with {', '.join(differing)}; expected "
            f"another folder, or this one deleted"
        )


def fingerprint(target: object) -> str:
    """What tells a target from another: a hash of its weights and its config.

    Raises ValueError for one that is no `nn.Module`, whose weights cannot be read.
    """
    if not isinstance(target, nn.Module):
        raise ValueError(f"target: expected a torch module, got {type(target).__name__}")
    digest = hashlib.sha256(repr(getattr(target, "config", None)).encode())
    for name, tensor in target.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
