"""Tokenizers: bytes, and byte-level byte-pair encoding (BPE).

BPE (arXiv:1508.07909) starts from bytes and joins pairs of tokens in the order in which they were
learned, never across the borders that a pre-tokenizer draws; on bytes as GPT-2 has it, so that no
text is unknown. A token is written in an alphabet of 256 visible characters, one a byte.

Special tokens (`<|im_end|>`) stand for themselves and are no text. `encode` reads them wherever
they are spelled out, as `transformers` does; in `chat` only the template can write them: what a
user types never ends a turn, where `apply_chat_template` needs `sanitize_control_tokens` for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .chat import ChatTemplate, Messages, check_messages

PRIVATE_USE = range(0xE000, 0xF900)
"""Characters without a meaning, U+E000 to U+F8FF."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Tensor:
        """Text -> int64 ids [T]."""
        ...

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """Ids -> text; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """Text to bytes and back: ids 0..255. Byte 0 occurs in no text: it ends documents."""

    vocab_size = 256
    end_of_document = 0

    def encode(self, text: str) -> Tensor:
        """Text -> int64 ids [T]."""
        return torch.tensor(list(text.encode()), dtype=torch.long)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """Ids -> text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(_numbers(ids)).decode(errors="replace")


class BPETokenizer:
    """Byte-level BPE with the package `tokenizers`, special tokens and a chat template.

    Bytes that have no token are left out of what is encoded, as `transformers` does: SmolLM2 has
    none for a few control characters (4, 6, 19, 20, 22, 29) and for planes 4 to 11 of Unicode,
    which are empty.

    Args:
        tokens: by id, written in the byte alphabet, special ones as they are.
        merges: pairs of tokens, those learned first in front.
        split_digits: each digit is a piece of its own before GPT-2's pieces are cut (SmolLM).
        specials: the tokens that stand for themselves.
        stop_tokens: ids that end a reply, for `generate(stop_tokens=...)`.
        template: what `chat` writes.

    Raises:
        ValueError: for tokens that are there twice, merges, special or stop tokens that are no
            tokens, or if the package `tokenizers` is missing.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[tuple[str, ...]],
        *,
        split_digits: bool = False,
        specials: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        alphabet = byte_alphabet()
        _check(tokens, vocabulary, merges, specials, stop_tokens)
        try:
            import tokenizers
            from tokenizers import models, pre_tokenizers
        except ImportError as error:
            raise ValueError(
                "BPETokenizer: needs a package that is missing: pip install tokenizers"
            ) from error
        self._pairs = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges)))  # type: ignore
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
        self._pairs.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytewise])  # type: ignore
        self.specials = {token: vocabulary[token] for token in specials}
        self.stop_tokens = tuple(stop_tokens)
        self.template = template
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._bytes = [
            token.encode()
            if token in self.specials or not set(token) <= alphabet.keys()
            else bytes(alphabet[c] for c in token)
            for token in tokens
        ]

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str, *, special: bool = True) -> Tensor:
        """Text -> int64 ids [T]. With `special=False` special tokens in it are text like any."""
        return torch.tensor(self._ids(text) if special else self._plain(text), dtype=torch.long)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """Ids -> text, special tokens spelled out; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: for an id that is no token.
        """
        numbers = _numbers(ids)
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            wrong = next(i for i in numbers if not 0 <= i < self.vocab_size)
            raise ValueError(f"ids: expected 0..{self.vocab_size - 1}, got {wrong}")
        return b"".join(self._bytes[i] for i in numbers).decode(errors="replace")

    def chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> Tensor:
        """Messages -> int64 ids [T] of the chat template's text, where a reply may follow.

        Special tokens in the messages are encoded as text.

        Raises:
            ValueError: for messages that do not fit, or without a template.
        """
        if self.template is None:
            raise ValueError("chat: expected a tokenizer with a chat template, this one has none")
        check_messages(messages)
        written = "".join(text for message in messages for text in message.values())
        written += self.template.source
        free = (chr(c) for c in PRIVATE_USE if chr(c) not in written)
        veil = {ord(c): next(free) for c in sorted({token[0] for token in self.specials})}
        unveil = {ord(hidden): chr(c) for c, hidden in veil.items()}

        def hide(text: str) -> str:
            """`text` without special tokens: another character stands for the first of each."""
            while self._special.search(text):
                text = self._special.sub(lambda m: m[0][0].translate(veil) + m[0][1:], text)
            return text

        hidden = [{key: hide(text) for key, text in message.items()} for message in messages]
        text = self.template.render(hidden, add_generation_prompt=add_generation_prompt)
        return torch.tensor(self._ids(text, unveil), dtype=torch.long)

    def _ids(self, text: str, unveil: Mapping[int, str] | None = None) -> list[int]:
        """Special tokens as they are found; between them text, some characters exchanged."""
        ids: list[int] = []
        at = 0
        for match in self._special.finditer(text):
            ids += self._plain(text[at : match.start()].translate(unveil or {}))
            ids.append(self.specials[match[0]])
            at = match.end()
        return ids + self._plain(text[at:].translate(unveil or {}))

    def _plain(self, text: str) -> list[int]:
        text.encode()  # half a surrogate pair: a ValueError, not the package's TypeError
        return self._pairs.encode(text, add_special_tokens=False).ids


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary.

    Visible characters of Latin-1 stand for their own byte; for the other 68 bytes, in order,
    U+0100 and those behind it do.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


def _check(
    tokens: Sequence[str],
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, ...]],
    specials: Sequence[str],
    stop_tokens: Sequence[int],
) -> None:
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ValueError(f"tokens: expected each once, got {twice!r} twice")
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(f"merges: expected pairs of tokens that make a token, got {pair}")
    unknown = [token for token in specials if not token or token not in vocabulary]
    if unknown:
        raise ValueError(f"specials: expected some of the tokens, got {unknown[:8]}")
    if not all(0 <= i < len(tokens) for i in stop_tokens):
        raise ValueError(f"stop_tokens: expected 0..{len(tokens) - 1}, got {list(stop_tokens)}")


def _numbers(ids: Tensor | Iterable[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)
