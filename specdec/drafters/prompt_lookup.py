"""Prompt lookup: draft what followed the same n-gram earlier in the row.

A. Saxena, "Prompt lookup decoding" (2023). No model and no training: the last n tokens, longest n
first, are looked up in the prompt and the text so far, and the tokens behind their most recent
earlier occurrence are the draft. It pays where the output copies: edits, tables, quotations.

Where we differ: an index of n-grams instead of a search, so that a round costs the same at any
length; a match that reaches the end of the text goes on reading its own draft, as LZ77 copies do,
so that a repeating text is drafted to the full length; and the draft can be as long as the match is
trusted: one token in common is mostly chance, four are mostly a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..draft import Draft
from ..protocol import Context, Model


@dataclass(frozen=True)
class PromptLookup:
    """Drafts up to `n_drafts` tokens from n-grams of `max_ngram` tokens down to one.

    `n_drafts` may be one number for each length of the match, 1..max_ngram: with (0, 2, 8) a match
    of one token drafts nothing, one of two tokens 2, one of three 8.
    """

    max_ngram: int = 3
    n_drafts: int | tuple[int, ...] = 8
    taps = ()

    def __post_init__(self) -> None:
        if self.max_ngram < 1:
            raise ValueError(f"max_ngram: expected at least 1, got {self.max_ngram}")
        if not isinstance(self.n_drafts, tuple):
            if not isinstance(self.n_drafts, int) or self.n_drafts < 1:
                raise ValueError(
                    f"n_drafts: expected at least 1, got {self.n_drafts!r}; a tuple "
                    f"for one number a length of match"
                )
        elif (
            len(self.n_drafts) != self.max_ngram or min(self.n_drafts) < 0 or not any(self.n_drafts)
        ):
            raise ValueError(
                f"n_drafts: expected one number, or {self.max_ngram} of at least 0 and not all 0, "
                f"one for each length of a match, got {self.n_drafts}"
            )

    def behind(self, length: int) -> int:
        """How many tokens are drafted behind a match of `length` tokens."""
        return self.n_drafts if isinstance(self.n_drafts, int) else self.n_drafts[length - 1]

    def begin(self, target: Model, batch_size: int, max_length: int) -> PromptLookupState:
        return PromptLookupState(self, [NgramIndex(self.max_ngram) for _ in range(batch_size)])


class PromptLookupState:
    def __init__(self, config: PromptLookup, indices: list[NgramIndex]) -> None:
        self.config, self.indices = config, indices

    def propose(self, context: Context) -> Draft:
        live, depth_left = context.live.tolist(), context.depth_left.tolist()
        drafts = []
        for b, (index, length) in enumerate(
            zip(self.indices, context.lengths.tolist(), strict=True)
        ):
            index.extend(context.tokens[b, len(index.tokens) : length].tolist())
            drafts.append(self._draft(index, depth_left[b]) if live[b] else [])
        device, longest = context.tokens.device, max(map(len, drafts))
        tokens = torch.tensor(
            [row + [0] * (longest - len(row)) for row in drafts], dtype=torch.long, device=device
        ).view(len(drafts), longest)
        n = torch.tensor([len(row) for row in drafts], device=device)
        if all(len(row) == longest for row in drafts):
            return Draft(tokens)
        return Draft(tokens, used=torch.arange(longest, device=device) < n.unsqueeze(1))

    def _draft(self, index: NgramIndex, limit: int) -> list[int]:
        match = index.match()
        if match is None:
            return []
        length, start = match
        return index.copy(start, min(self.config.behind(length), limit))


class NgramIndex:
    """Where each n-gram of a growing row was last continued: O(max_ngram) per token added."""

    def __init__(self, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self.follows: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # entered once its continuation exists, so that the suffix never finds itself
            end = len(self.tokens)
            for n, follows in enumerate(self.follows, start=1):
                if end >= n:
                    follows[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def match(self) -> tuple[int, int] | None:
        """The length of the longest suffix that was seen before, and where it last went on."""
        end = len(self.tokens)
        for n in range(min(len(self.follows), end), 0, -1):
            start = self.follows[n - 1].get(tuple(self.tokens[end - n :]))
            if start is not None:
                return n, start
        return None

    def copy(self, start: int, n: int) -> list[int]:
        """`n` tokens from `start` on; past the end they are read from the copy itself."""
        end, copied = len(self.tokens), list[int]()
        for i in range(start, start + n):
            copied.append(self.tokens[i] if i < end else copied[i - end])
        return copied
