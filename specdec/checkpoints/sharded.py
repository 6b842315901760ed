"""Folders of safetensors, in one file or in shards: what is in them, and copying it into a model.

A file is mapped into memory, and every page of it that was read counts as held until the file is
closed. So a copy goes piece by piece, straight into the parameters, and opens the file anew every
`PIECE` bytes: a model needs its own memory and little more. What is wrong with a folder is found
from names and shapes alone, before any of that memory is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
PIECE = 2**25
"""Bytes that are read from a file before it is opened anew."""

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Place:
    """Where a published weight lies: its file, shape and kind of number ("F32", "BF16", ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Weight:
    """A published weight, told in our own.

    Each of `parts` is a view [U, r_i, ...] of a parameter; the published rows are the r_0 of the
    first part, the r_1 of the second and so on, U times over. Most weights are one part with r = 1.
    """

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As published: [U (r_0 + r_1 + ...), ...]."""
        first = self.parts[0]
        return (len(first) * sum(part.shape[1] for part in self.parts), *first.shape[2:])

    def published(self) -> Tensor:
        """The weight as it is published, a copy."""
        return torch.cat(self.parts, dim=1).flatten(0, 1)

    def fill(self, first: int, piece: Tensor) -> None:
        """Copy published rows, those of the repetitions from `first` on, into our parameters."""
        n_rows = [part.shape[1] for part in self.parts]
        rows = piece.unflatten(0, (-1, sum(n_rows)))
        for part, new in zip(self.parts, rows.split(n_rows, dim=1), strict=True):
            part[first : first + len(rows)].copy_(new)


class Piece(NamedTuple):
    """Published `rows` of a weight, those of its repetitions from `first` on."""

    name: str
    first: int
    rows: slice
    n_bytes: int


def whole(parameter: Tensor) -> Weight:
    """A weight that is published as it is."""
    return Weight((parameter.unsqueeze(1),))


def read_fields(folder: Path) -> dict:
    """The fields of config.json; ValueError if it is missing or cannot be read."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"folder: expected config.json in {folder}, found no such file")
    try:
        fields = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"folder: {folder} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(
            f"folder: expected a JSON object in {folder / 'config.json'}, "
            f"got a {type(fields).__name__}"
        )
    return fields


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index lists; ValueError for one that is absent."""
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file() and (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"folder: {folder / INDEX} cannot be read: {error!r}") from error
        wrong = [n for n in names if Path(n).name != n or Path(n).suffix != ".safetensors"]
        if wrong or not names:
            raise ValueError(
                f"folder: expected safetensors beside {folder / INDEX}, it lists {names}"
            )
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"folder: expected {name} in {folder}, found no such file")
    return [folder / name for name in names]


def places_in(folder: Path) -> dict[str, Place]:
    """Every weight of a folder by its published name; only headers are read."""
    places = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as opened:
                for name in list(opened.keys()):
                    here = opened.get_slice(name)
                    places[name] = Place(file, tuple(here.get_shape()), here.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"folder: {file} cannot be read: {error}") from error
    return places


def check_weights(
    places: Mapping[str, Place], weights: Mapping[str, Weight], folder: Path | str
) -> None:
    """ValueError that names what is missing, unexpected, or of another shape or kind."""
    common = places.keys() & weights.keys()
    wrong = {
        "missing": weights.keys() - places.keys(),
        "unexpected": places.keys() - weights.keys(),
        "of another shape": {n for n in common if places[n].shape != weights[n].shape},
        "of another kind of number": {n for n in common if places[n].dtype not in _SIZES},
    }
    if any(wrong.values()):
        told = [f"{what}: {_some(sorted(names))}" for what, names in wrong.items() if names]
        raise ValueError(
            f"folder: the weights of {folder} do not fit its config; " + "; ".join(told)
        )


def _some(names: list[str]) -> str:
    return f"{names[:8]}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@torch.no_grad()
def fill_weights(places: Mapping[str, Place], weights: Mapping[str, Weight]) -> None:
    """Copy every weight from its place; dtypes are converted on the way."""
    for file in sorted({places[name].file for name in weights}):
        pieces = list(_pieces({n: places[n] for n in weights if places[n].file == file}, weights))
        while pieces:
            n_read = 0
            with safe_open(file, "pt") as opened:
                while pieces and (n_read + pieces[0].n_bytes <= PIECE or not n_read):
                    piece = pieces.pop(0)
                    n_read += piece.n_bytes
                    weights[piece.name].fill(piece.first, opened.get_slice(piece.name)[piece.rows])


def _pieces(places: Mapping[str, Place], weights: Mapping[str, Weight]) -> Iterator[Piece]:
    """The weights in pieces of at most `PIECE` bytes, or one repetition."""
    for name, place in places.items():
        n = len(weights[name].parts[0])
        height = place.shape[0] // n
        size = math.prod(place.shape) // n * _SIZES[place.dtype]
        step = max(1, PIECE // size)
        for first in range(0, n, step):
            last = min(n, first + step)
            yield Piece(name, first, slice(first * height, last * height), (last - first) * size)
