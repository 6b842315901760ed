"""Corpora of bytes: the source of Python's own standard library, or any folder of text."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

SEPARATOR = 0
"""The byte between two files; it occurs in no text and ends a document."""

# tables written by programs, and tests: neither is what people type
LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
    "lib2to3",
}


class Text(Protocol):
    """What is trained on: a `Corpus`, or `WrittenText` or `Conversations` in its place."""

    @property
    def train(self) -> np.ndarray:
        """All of it, to tell it from another."""
        ...

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Tensor:
        """Windows [batch_size, length + 1] int64; the same for the same step and seed."""
        ...

    def own(self, step: int, batch_size: int, length: int, seed: int) -> Tensor | None:
        """Of the same batch the tokens that count, bool [batch_size, length + 1]; None: all."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Two byte strings, uint8: what to train on and whole files held out from it."""

    train: np.ndarray
    held_out: np.ndarray

    @staticmethod
    def from_folder(
        folder: Path | str,
        suffixes: tuple[str, ...] = (".py", ".txt", ".md"),
        held_out_share: int = 20,
    ) -> Corpus:
        """Read all files below `folder` with one of `suffixes`, one in `held_out_share` held out.

        Which files are held out depends on their relative path alone, so that it stays the same
        from run to run and from machine to machine.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"folder: expected a folder of text, found none at {folder}")
        kept: dict[bool, list[bytes]] = {False: [], True: []}
        for file in sorted(folder.rglob("*")):
            relative = file.relative_to(folder)
            if file.suffix not in suffixes or LEFT_OUT & set(relative.parts) or not file.is_file():
                continue
            text = file.read_bytes().replace(b"\0", b"")
            # a module and the files of a package go together
            name = relative.parts[0].removesuffix(file.suffix)
            kept[zlib.crc32(name.encode()) % held_out_share == 0].append(text)
        for held_out, texts in kept.items():
            if not texts:
                kind = "hold out" if held_out else "train on"
                raise ValueError(
                    f"folder: found no file to {kind} in {folder} with a suffix of "
                    f"{suffixes}; expected a folder of text of some dozen files"
                )
        joined = [
            np.frombuffer(b"\0".join([b"", *kept[held_out], b""]), dtype=np.uint8)
            for held_out in (False, True)
        ]
        return Corpus(*joined)

    @staticmethod
    def standard_library() -> Corpus:
        """The source of the standard library of the Python that runs."""
        return Corpus.from_folder(sysconfig.get_paths()["stdlib"], (".py",))

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Tensor:
        """Windows [batch_size, length + 1] int64; the same for the same step and seed."""
        return windows(self.train, np.random.default_rng([seed, step]), batch_size, length + 1)

    def own(self, step: int, batch_size: int, length: int, seed: int) -> None:
        """All tokens count."""

    def held_out_batch(self, batch_size: int, length: int, seed: int = 0) -> Tensor:
        """Windows [batch_size, length + 1] int64 of the held-out files."""
        return windows(self.held_out, np.random.default_rng(seed), batch_size, length + 1)


def windows(text: np.ndarray, rng: np.random.Generator, n: int, length: int) -> Tensor:
    if len(text) < length:
        raise ValueError(f"length: a window of {length} bytes does not fit a text of {len(text)}")
    starts = rng.integers(0, len(text) - length + 1, n)
    return torch.from_numpy(np.stack([text[s : s + length] for s in starts]).astype(np.int64))
