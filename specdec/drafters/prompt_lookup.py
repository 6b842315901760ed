"""Prompt lookup: draft what followed the same n-gram earlier in the row.

A. Saxena, "Prompt lookup decoding" (2023). No model and no training: the last n tokens, longest n
first, are looked up in the prompt and the text so far, and the tokens behind their most recent
earlier occurrence are the draft. It pays where the output copies: edits, tables, quotations.

Where we differ: an index of n-grams instead of a search, so that a round costs the same at any
length; and a match that reaches the end of the text goes on reading its own draft, as LZ77 copies
do, so that a repeating text is drafted to the full length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..draft import Draft
from ..protocol import Context, Model


@dataclass(frozen=True)
class PromptLookup:
    """Drafts up to `n_drafts` tokens from n-grams of `max_ngram` tokens down to one."""

    max_ngram: int = 3
    n_drafts: int = 8
    taps = ()

    def __post_init__(self) -> None:
        for name, value in (("max_ngram", self.max_ngram), ("n_drafts", self.n_drafts)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

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
            drafts.append(index.lookup(min(self.config.n_drafts, depth_left[b])) if live[b] else [])
        device, longest = context.tokens.device, max(map(len, drafts))
        tokens = torch.tensor(
            [row + [0] * (longest - len(row)) for row in drafts], dtype=torch.long, device=device
        ).view(len(drafts), longest)
        n = torch.tensor([len(row) for row in drafts], device=device)
        if all(len(row) == longest for row in drafts):
            return Draft(tokens)
        return Draft(tokens, used=torch.arange(longest, device=device) < n.unsqueeze(1))


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

    def lookup(self, n_drafts: int) -> list[int]:
        """The tokens behind the most recent earlier occurrence of the longest known suffix."""
        end = len(self.tokens)
        for n in range(min(len(self.follows), end), 0, -1):
            start = self.follows[n - 1].get(tuple(self.tokens[end - n :]))
            if start is not None:
                draft: list[int] = []
                for i in range(start, start + n_drafts):
                    draft.append(self.tokens[i] if i < end else draft[i - end])
                return draft
        return []
