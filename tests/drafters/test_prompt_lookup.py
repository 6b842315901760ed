"""Prompt lookup: the index against a plain search, and what a round costs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.draft import validate_draft
from specdec.drafters.prompt_lookup import NgramIndex, PromptLookup
from specdec.generate import generate
from tests.builders import context_of
from tests.helpers import tiny_transformer


def search(tokens: list[int], max_ngram: int, n_drafts: int) -> list[int]:
    """What followed the most recent earlier occurrence of the longest suffix that has one.

    Written into a copy of the text, so that a match near its end reads on in its own draft.
    """
    for n in range(min(max_ngram, len(tokens)), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(start + n, start + n + n_drafts):
                    text.append(text[i])
                return text[len(tokens) :]
    return []


def index_of(max_ngram: int, *pieces: list[int]) -> NgramIndex:
    index = NgramIndex(max_ngram)
    for piece in pieces:
        index.extend(piece)
    return index


def looked_up(index: NgramIndex, n_drafts: int) -> list[int]:
    match = index.match()
    return [] if match is None else index.copy(match[1], n_drafts)


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "draft"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1, 2]),
        ([1, 2, 3, 5, 2, 4, 1, 2], 2, [3, 5, 2, 4]),  # the longer n-gram, though `2 4` came later
        ([1, 2, 3, 5, 2, 4, 1, 2], 1, [4, 1, 2, 4]),  # with one token: the most recent
        ([7, 7], 3, [7, 7, 7, 7]),  # the match ends where the text does
        ([5, 1, 2, 1, 2], 3, [1, 2, 1, 2]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_lookup_by_hand(tokens, max_ngram, draft) -> None:
    """The first occurrence for the last, the shortest n-gram for the longest, the suffix itself."""
    assert looked_up(index_of(max_ngram, tokens), 4) == draft


texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 4), st.integers(0, 7))
def test_lookup_against_a_plain_search(tokens, max_ngram, n_drafts) -> None:
    """An n-gram entered before or without its continuation; a draft that reads beyond the text."""
    assert looked_up(index_of(max_ngram, tokens), n_drafts) == search(tokens, max_ngram, n_drafts)


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 4))
def test_growing_equals_starting_afresh(pieces, max_ngram) -> None:
    """N-grams across the seam of two rounds that are missed, or lookups that change the index."""
    index = NgramIndex(max_ngram)
    for i, piece in enumerate(pieces):
        index.extend(piece)
        whole = [x for part in pieces[: i + 1] for x in part]
        assert index.tokens == whole
        assert looked_up(index, 5) == looked_up(index_of(max_ngram, whole), 5)


@pytest.mark.parametrize(
    ("row", "draft"),
    [
        ([4, 1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),  # three tokens match
        ([4, 1, 2, 3, 9, 0, 2, 3], [9]),  # two
        ([4, 1, 2, 3, 9, 0, 0, 3], []),  # one
        ([4, 1, 2, 3, 9, 0, 0, 5], []),  # none
    ],
)
def test_a_draft_is_as_long_as_its_match_is_trusted(row, draft) -> None:
    """The length of another match, one counted from 0, a draft beyond the budget."""
    for depth, expected in ((6, draft), (2, draft[:2])):
        drafter = PromptLookup(max_ngram=3, n_drafts=(0, 1, 4))
        state = drafter.begin(tiny_transformer(), 1, 20)
        assert state.propose(context_of([row], depth_left=[depth])).tokens.tolist() == [expected]


def test_every_row_drafts_for_itself() -> None:
    """Rows that share an index, a budget or a length; drafts of a row that is done."""
    rows = [[1, 2, 1, 2], [5, 5, 5], [3, 4, 3], [1, 2, 3], [6, 6]]
    context = context_of(rows, depth_left=[9, 2, 0, 9, 9], live=[True, True, True, True, False])
    draft = PromptLookup(n_drafts=4).begin(tiny_transformer(), 5, 20).propose(context)
    validate_draft(draft, 5, 13)
    assert draft.probs is draft.parents is None
    assert draft.tokens.tolist()[:2] == [[1, 2, 1, 2], [5, 5, 0, 0]]
    assert draft.mask().sum(1).tolist() == [4, 2, 0, 0, 0]


def test_nothing_found_is_an_empty_draft() -> None:
    """A tensor of no shape, or of another dtype, where no row has a match."""
    state = PromptLookup().begin(tiny_transformer(), 2, 20)
    draft = state.propose(context_of([[1, 2], [3]]))
    validate_draft(draft, 2, 13)
    assert draft.tokens.shape == (2, 0)
    draft = state.propose(context_of([[1, 2, 2], [3, 3]], depth_left=[1, 1]))
    assert draft.tokens.tolist() == [[2], [3]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4), st.integers(1, 6))
def test_a_state_over_rounds_equals_a_fresh_one(rounds, n_drafts) -> None:
    """Replay: tokens of a round that are read twice, skipped, or taken from the padding."""
    drafter = PromptLookup(n_drafts=n_drafts)
    state, rows = drafter.begin(tiny_transformer(), 2, 999), [[], []]
    for new in rounds:
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        context = context_of(rows, depth_left=[3, 9])
        draft = state.propose(context)
        fresh = drafter.begin(tiny_transformer(), 2, 999).propose(context)
        assert draft.tokens.equal(fresh.tokens)
        assert draft.mask().equal(fresh.mask())
        for b, left in enumerate([3, 9]):
            expected = search(rows[b], 3, min(n_drafts, left))
            assert draft.tokens[b][draft.mask()[b]].tolist() == expected


class CountedList(list):
    """A list that counts the items handed out."""

    def __init__(self, items: list, seen: list[int]) -> None:
        super().__init__(items)
        self.seen = seen

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.seen[0] += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        self.seen[0] += len(self)
        return super().__iter__()

    def index(self, *arguments: Any) -> int:
        self.seen[0] += len(self)
        return super().index(*arguments)


class CountedDict(dict):
    """A dict that counts its look-ups and entries."""

    def __init__(self, items: dict, seen: list[int]) -> None:
        super().__init__(items)
        self.seen = seen

    def get(self, *arguments: Any) -> Any:
        self.seen[0] += 1
        return super().get(*arguments)

    def __setitem__(self, name: Any, value: Any) -> None:
        self.seen[0] += 1
        super().__setitem__(name, value)

    def __iter__(self):
        self.seen[0] += len(self)
        return super().__iter__()


def work_of_a_round(length: int) -> int:
    """Items touched by a round that adds three tokens to a row of `length`."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(50, (length,), generator=generator).tolist()
    state = PromptLookup(max_ngram=3, n_drafts=8).begin(tiny_transformer(), 1, 9999)
    state.propose(context_of([text]))
    index, seen = state.indices[0], [0]
    index.tokens = CountedList(index.tokens, seen)
    index.follows = [CountedDict(follows, seen) for follows in index.follows]
    draft = state.propose(context_of([[*text, 60, 61, text[-1]]]))
    assert draft.n_nodes == 8
    assert seen[0] > 8, "the counters are bypassed"
    return seen[0]


def test_a_round_costs_the_same_at_any_length() -> None:
    """A search of the whole row, or an index that is built anew, in every round."""
    assert work_of_a_round(100) == work_of_a_round(1000) == work_of_a_round(5000)


def test_only_new_tokens_are_read(monkeypatch) -> None:
    """Rows that are handed to the index whole in every round."""
    read: list[int] = []
    extend = NgramIndex.extend

    def noted(self: NgramIndex, tokens: list[int]) -> None:
        read.append(len(tokens))
        extend(self, tokens)

    monkeypatch.setattr(NgramIndex, "extend", noted)
    prompt = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2])
    generation = generate(tiny_transformer(), prompt, PromptLookup(), max_new_tokens=20)
    emitted = [len(r.new_tokens[0]) for r in generation.rounds]
    assert read == [8, *emitted[:-1]]
    assert generation.metrics.tau > 1, "nothing was drafted"


@pytest.mark.parametrize("argument", ["max_ngram", "n_drafts"])
def test_counts_below_one(argument) -> None:
    """A drafter that never drafts, without a word."""
    with pytest.raises(ValueError, match=f"^{argument}: expected at least 1, got 0"):
        PromptLookup(**{argument: 0})


@pytest.mark.parametrize("n_drafts", [2.5, "7", [2, 2, 7]])
def test_counts_of_another_kind(n_drafts) -> None:
    """A TypeError that names nothing."""
    with pytest.raises(ValueError, match=r"^n_drafts: expected at least 1, got"):
        PromptLookup(3, n_drafts)


@pytest.mark.parametrize("n_drafts", [(), (1, 2), (1, -1, 2), (0, 0, 0)])
def test_one_number_for_each_length(n_drafts) -> None:
    """An IndexError in the middle of decoding; a drafter that never drafts."""
    with pytest.raises(ValueError, match=r"^n_drafts: expected one number, or 3 of at least 0"):
        PromptLookup(3, n_drafts)
