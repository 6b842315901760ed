"""The header of a GGUF file: its metadata, and where its tensors lie. Versions 2 and 3.

The layout (ggml's docs/gguf.md; little endian): the magic, a version, the counts of tensors and of
metadata; every metadatum as key, kind and value; every tensor as name, sizes (the fastest first),
kind and offset; then the data, from the next multiple of `general.alignment` on.

The package `gguf` has a reader, too. It makes an array of every string, some seconds for a
vocabulary, and believes any length that a damaged file tells; here all are checked against the
file's end.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Kind of a metadatum -> how `struct` calls it."""
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape as torch has it, ggml's number of its kind, its first byte."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What a file says about itself. Metadata are numbers, texts, or lists of either."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_header(file: Path | str) -> Header:
    """Read the header of `file`.

    Raises:
        ValueError: for a file that is not there, is no GGUF, has another version, ends early, or
            holds what cannot be.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"file: expected a GGUF file, found no file {file}")
    if not file.stat().st_size:
        raise ValueError(f"file: {file} cannot be read: it is empty")
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _header(file, _Bytes(data))
    except ValueError as error:
        raise ValueError(f"file: {file} cannot be read: {error}") from error


def _header(file: Path, data: _Bytes) -> Header:
    magic, version = data.take(4), data.number("I")
    if magic != b"GGUF":
        raise ValueError(f"expected the magic b'GGUF', got {magic!r}")
    if version not in (2, 3):
        raise ValueError(f"expected version 2 or 3, little endian, got {version}")
    n_tensors, n_metadata = data.number("Q"), data.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_metadata):
        key = data.text()
        if key in metadata:
            raise ValueError(f"{key} is there twice")
        metadata[key] = data.value(data.number("I"))
    tensors: dict[str, Stored] = {}
    for _ in range(n_tensors):
        name = data.text()
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        sizes = [data.number("Q") for _ in range(data.number("I"))]
        tensors[name] = Stored(tuple(reversed(sizes)), data.number("I"), data.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment: expected at least 1, got {alignment!r}")
    first = -(-data.at // alignment) * alignment
    placed = {n: Stored(t.shape, t.kind, first + t.offset) for n, t in tensors.items()}
    return Header(file, metadata, placed)


class _Bytes:
    """Reads one value after another; ValueError where the bytes end before a value does."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise ValueError(
                f"expected {n} bytes from byte {self.at} on, the file has {len(self.data)}"
            )
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"expected a kind of metadata from 0 to 12, got {kind}")
        return self.number(_NUMBERS[kind])

    def array(self, kind: int, n: int) -> list:
        if kind == _TEXT:
            return [self.text() for _ in range(n)]
        if kind not in _NUMBERS:
            raise ValueError(f"expected an array of numbers or texts, got kind {kind}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(n * dtype.itemsize), dtype).tolist()
