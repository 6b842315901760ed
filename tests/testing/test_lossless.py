"""check_lossless passes what is lossless, and shows what is not."""

import re

import pytest
import torch

from specdec import Draft, DraftModel, Greedy, PromptLookup, generate
from specdec.testing import Divergence, LosslessError, check_lossless, compare, plain_sequence
from specdec.testing.strategies import small_target

TARGET, DRAFT = small_target(1), small_target(2, n_layers=1)


@pytest.mark.parametrize(
    "drafter",
    [
        PromptLookup(3, 5),
        DraftModel(DRAFT, 3),
        DraftModel(DRAFT, 3, branching=(3, 2, 1)),
    ],
    ids=["prompt lookup", "draft model", "draft tree"],
)
def test_the_librarys_drafters_are_lossless(drafter):
    """Anything a drafter of ours gets wrong: state, tree, law."""
    report = check_lossless(TARGET, drafter, max_new_tokens=10, n_samples=64)
    assert report.n_runs == 80
    assert report.n_replayed > 100
    assert not report.near_ties


def test_the_error_shows_where_the_tokens_part():
    """A message that names no place: row, position, tokens, gap and referee must be there."""
    expected = plain_sequence(TARGET, torch.tensor([1, 2, 3]), 5)
    got = expected.clone()
    got[4] = (got[4] + 1) % 11
    difference = compare(TARGET, expected, got, Greedy(), row=2)
    assert difference is not None
    assert not difference.near_tie
    assert re.search(
        rf"row 2, position 4: plain decoding gives {int(expected[4])}, the drafted "
        rf"run {int(got[4])}.*top-2 gap.*float64 sides with plain decoding",
        str(difference),
    )


def test_a_row_that_ends_early_is_a_difference():
    """Sequences compared only as far as the shorter one goes."""
    expected = plain_sequence(TARGET, torch.tensor([1, 2, 3]), 5)
    difference = compare(TARGET, expected, expected[:-1], Greedy())
    assert difference is not None
    assert (difference.position, difference.got) == (7, None)


def test_a_near_tie_needs_the_referees_support():
    """Low precision called an excuse for a bug, or a real near-tie called a bug."""

    def divergence(exact_gap, rounding):
        return Divergence(0, 3, 1, 2, 1e-4, exact_gap, rounding)

    assert divergence(2e-4, 1e-4).near_tie
    assert divergence(-2e-4, 1e-4).near_tie
    assert not divergence(1e-2, 1e-4).near_tie
    assert not divergence(None, None).near_tie
    assert not divergence(0.0, 0.0).near_tie  # float64 has no near-ties


def test_half_precision_differences_are_near_ties_or_none():
    """A bfloat16 target is checked, not refused, and its report says what it found."""
    target = small_target(1).bfloat16()
    report = check_lossless(
        target,
        PromptLookup(2, 4),
        max_new_tokens=6,
        n_samples=0,
        with_replay=False,
        rules=[Greedy()],
    )
    assert all(d.near_tie for d in report.near_ties)


class Stateful:
    """Drafts the number of rounds it has seen: harmless to the output, wrong in a replay."""

    taps = ()

    def begin(self, target, batch_size, max_length):
        return StatefulRun()


class StatefulRun:
    def __init__(self):
        self.n = 0

    def propose(self, context):
        self.n = (self.n + 1) % 11
        return Draft(torch.full((len(context.lengths), 1), self.n))


def test_replay_sees_a_drafter_that_depends_on_its_past():
    """Losslessness alone is blind to stale state."""
    with pytest.raises(LosslessError, match="replay: round 1"):
        check_lossless(TARGET, Stateful(), max_new_tokens=6, n_samples=0)
    check_lossless(TARGET, Stateful(), max_new_tokens=6, n_samples=0, with_replay=False)


def test_plain_sequence_is_the_loop_without_a_drafter():
    """The reference and the library's plain decoding drift apart."""
    prompt = torch.tensor([3, 1, 4])
    plain = generate(TARGET, prompt, max_new_tokens=8).sequences[0]
    assert plain.tolist() == plain_sequence(TARGET, prompt, 8).tolist()
