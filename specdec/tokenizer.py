"""A tokenizer of bytes: ids 0..255 are the bytes of UTF-8 text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class ByteTokenizer:
    """Text to bytes and back. Byte 0 occurs in no text: it ends documents."""

    vocab_size = 256
    end_of_document = 0

    def encode(self, text: str) -> Tensor:
        """Text -> int64 ids [T]."""
        return torch.tensor(list(text.encode()), dtype=torch.long)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """Ids -> text; bytes that are no UTF-8 become U+FFFD."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        return bytes(numbers).decode(errors="replace")
