"""Drafts: what is read off the parents, against plain loops, and the errors of `validate_draft`."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft import (
    Draft,
    ancestors,
    chain_parents,
    depths,
    earlier_siblings,
    gather_path,
    path_to,
    reachable,
    validate_draft,
)
from tests.helpers import EXAMPLE_PARENTS, path_of, random_parents

EXAMPLE = torch.tensor([EXAMPLE_PARENTS])


@st.composite
def trees(draw) -> tuple[Tensor, random.Random]:
    """Parents [B, N] with a tree of its own in every row, and a generator for what goes with it."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    batch_size, n = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    if draw(st.booleans()):  # deep trees: long chains with a few side branches
        rows = [[i - 1 if rng.random() < 0.8 else rng.randint(-1, i - 1) for i in range(n)]
                for _ in range(batch_size)]  # fmt: skip
        return torch.tensor(rows), rng
    return random_parents(rng, batch_size, n), rng


many = settings(max_examples=60, deadline=None)


def test_ancestors_of_the_example():
    """Catches a table that is transposed, or lacks the node itself."""
    assert ancestors(EXAMPLE)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],  # cat
        [0, 1, 0, 0, 0, 0, 0],  # dog
        [1, 0, 1, 0, 0, 0, 0],  # cat sat
        [1, 0, 0, 1, 0, 0, 0],  # cat is
        [0, 1, 0, 0, 1, 0, 0],  # dog ran
        [1, 0, 1, 0, 0, 1, 0],  # cat sat on
        [0, 1, 0, 0, 1, 0, 1],  # dog ran to
    ]


@given(trees())
@many
def test_ancestors_are_those_of_a_walk_up(tree):
    """Catches pointer doubling that stops one hop early, or takes row 0's tree for every row."""
    parents, _ = tree
    table = ancestors(parents)
    for b, row in enumerate(parents.tolist()):
        for i in range(len(row)):
            assert table[b, i].nonzero().flatten().tolist() == path_of(row, i)


def test_depths_of_the_example():
    """Catches a depth that counts from 0."""
    assert depths(EXAMPLE).tolist() == [[1, 1, 2, 2, 2, 3, 3]]


@given(trees())
@many
def test_depths_are_path_lengths(tree):
    """Catches a doubling that adds the hop's length instead of the depth gathered there."""
    parents, _ = tree
    assert depths(parents).tolist() == [
        [len(path_of(row, i)) for i in range(len(row))] for row in parents.tolist()
    ]


def test_reachable_of_the_example():
    """`dog` fails, so `ran` and `to` are out of reach. Catches a test of the parent alone."""
    passing = torch.tensor([[True, False, True, False, True, True, True]])
    assert reachable(EXAMPLE, passing).tolist() == [[True, False, True, False, False, True, False]]


@given(trees())
@many
def test_reachable_means_the_whole_path_passes(tree):
    """Catches an ancestor that is skipped, as when `passing` is read before it was updated."""
    parents, rng = tree
    passing = torch.tensor([[rng.random() < 0.8 for _ in row] for row in parents.tolist()])
    assert reachable(parents, passing).tolist() == [
        [all(passing[b, j] for j in path_of(row, i)) for i in range(len(row))]
        for b, row in enumerate(parents.tolist())
    ]


def test_earlier_siblings_of_the_example():
    """dog comes after cat, is after sat. Catches siblings that count themselves, or later ones."""
    assert earlier_siblings(EXAMPLE)[0].nonzero().tolist() == [[1, 0], [3, 2]]


@given(trees())
@many
def test_earlier_siblings_share_the_parent_and_come_before(tree):
    """Catches siblings taken from another row of the batch."""
    parents, _ = tree
    for b, row in enumerate(parents.tolist()):
        expected = [[i, j] for i in range(len(row)) for j in range(i) if row[i] == row[j]]
        assert earlier_siblings(parents)[b].nonzero().tolist() == expected


def test_path_to_in_the_example():
    """Catches a path that starts at the wrong end, and an end of -1 read as the last node."""
    parents = EXAMPLE.expand(4, -1)
    path, n = path_to(parents, torch.tensor([6, 5, 1, -1]))
    assert n.tolist() == [3, 3, 1, 0]
    assert path.tolist() == [
        [1, 4, 6, 0, 0, 0, 0],
        [0, 2, 5, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]


@given(trees())
@many
def test_path_to_walks_down_to_the_node(tree):
    """Catches an end node looked up in the wrong row, and padding that is not zero."""
    parents, rng = tree
    batch_size, n_nodes = parents.shape
    ends = [rng.randint(-1, n_nodes - 1) for _ in range(batch_size)]
    path, n = path_to(parents, torch.tensor(ends))
    for b, end in enumerate(ends):
        expected = path_of(parents[b].tolist(), end)
        assert n[b] == len(expected)
        assert path[b].tolist() == expected + [0] * (n_nodes - len(expected))


def test_gather_path_lists_marked_nodes_in_order():
    """Catches padding of N instead of 0, which would index behind the last node."""
    marked = torch.tensor([[0, 1, 0, 0, 1, 0, 1], [0] * 7, [1] * 7], dtype=torch.bool)
    path, n = gather_path(marked)
    assert path.tolist() == [[1, 4, 6, 0, 0, 0, 0], [0] * 7, [0, 1, 2, 3, 4, 5, 6]]
    assert n.tolist() == [3, 0, 7]


def test_a_draft_without_nodes_goes_through_everything():
    """Catches a division or a maximum over N = 0."""
    parents = torch.zeros(2, 0, dtype=torch.long)
    marked = torch.zeros(2, 0, dtype=torch.bool)
    assert ancestors(parents).shape == earlier_siblings(parents).shape == (2, 0, 0)
    assert depths(parents).shape == reachable(parents, marked).shape == (2, 0)
    path, n = path_to(parents, torch.tensor([-1, -1]))
    assert path.shape == (2, 0)
    assert n.tolist() == [0, 0]
    draft = Draft.empty(2)
    assert (draft.n_nodes, draft.tree().shape, draft.mask().shape) == (0, (2, 0), (2, 0))
    validate_draft(draft, 2, 9)


def test_a_chain_is_the_tree_with_parents_i_minus_1():
    """Catches a chain whose first node hangs below itself."""
    draft = Draft(torch.tensor([[5, 6, 7], [7, 6, 5]]))
    assert chain_parents(3).tolist() == [-1, 0, 1]
    assert draft.tree().tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert draft.mask().all()


VOCAB = 9


def tree_draft() -> Draft:
    """The example tree in row 0, in row 1 one with its last node unused; q is uniform."""
    return Draft(
        tokens=torch.arange(14).view(2, 7) % VOCAB,
        parents=torch.tensor([EXAMPLE_PARENTS, [-1, 0, 1, 1, 0, -1, 5]]),
        probs=torch.full((2, 7, VOCAB), 1 / VOCAB),
        used=torch.tensor([[True] * 7, [True] * 6 + [False]]),
    )


def chain_draft() -> Draft:
    return replace(tree_draft(), parents=None)


def put(tensor: Tensor, index: tuple, value: object) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def test_valid_drafts_pass():
    """Catches a check that refuses what drafters rightly return, such as a chain cut short."""
    for draft in (tree_draft(), chain_draft()):
        validate_draft(draft, 2, VOCAB)
        validate_draft(replace(draft, probs=None, used=None), 2, VOCAB)
    unused = torch.zeros(2, 7, dtype=torch.bool)
    nothing = torch.full((2, 7, VOCAB), torch.nan)  # the q of an unused node is never read
    validate_draft(replace(tree_draft(), used=unused, probs=nothing), 2, VOCAB)


SHAPE, LAW = r"of shape \[2, 7\]", r"expected a distribution"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"tokens": d.tokens.int()}, r"draft\.tokens: .*int64.*\[2, N\].*torch\.int32"),
        (lambda d: {"tokens": d.tokens[0]}, r"draft\.tokens: .*\[2, N\].*of shape \[7\]"),
        (lambda d: {"tokens": d.tokens[:1]}, r"draft\.tokens: .*\[2, N\].*of shape \[1, 7\]"),
        (lambda d: {"tokens": put(d.tokens, (1, 3), 9)}, r"draft\.tokens: .*\[0, 9\), got 0\.\.9"),
        (lambda d: {"tokens": put(d.tokens, (0, 2), -1)}, r"draft\.tokens: .*got -1\.\.8"),
        (lambda d: {"used": d.used.long()}, rf"draft\.used: .*bool {SHAPE}.*int64"),
        (lambda d: {"used": d.used[:, 1:]}, rf"draft\.used: .*bool {SHAPE}.*\[2, 6\]"),
        (lambda d: {"probs": d.probs.long()}, r"draft\.probs: .*floats.*torch\.int64"),
        (lambda d: {"probs": d.probs[..., 1:]}, r"draft\.probs: .*\[2, 7, 9\].*\[2, 7, 8\]"),
        (
            lambda d: {"probs": put(d.probs, (1, 4), torch.nan)},
            rf"draft\.probs: node 4 of row 1 has minimum nan and sum nan; {LAW}",
        ),
        (
            lambda d: {"probs": put(put(d.probs, (0, 5, 1), -0.25), (0, 5, 0), 0.25 + 2 / VOCAB)},
            rf"draft\.probs: node 5 of row 0 has minimum -0\.25 and sum 1; {LAW}",
        ),
        (
            lambda d: {"probs": put(d.probs, (1, 0), 0.25)},
            rf"draft\.probs: node 0 of row 1 has minimum 0\.25 and sum 2\.25; {LAW}",
        ),
        (
            lambda d: {"probs": put(put(d.probs, (0, 3), 1 / 8), (0, 3, 3), 0.0)},
            r"draft\.probs: node 3 of row 0 holds token 3, .* probability 0",
        ),
    ],
)
@pytest.mark.parametrize("make", [tree_draft, chain_draft])
def test_errors_name_the_argument_and_the_value(make, change, message):
    """Catches a check that is gone, and a message that leaves the reader to search."""
    draft = make()
    with pytest.raises(ValueError, match=message):
        validate_draft(replace(draft, **change(draft)), 2, VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"parents": d.parents.int()}, rf"draft\.parents: .*int64 {SHAPE}.*int32"),
        (lambda d: {"parents": d.parents[:, 1:]}, rf"draft\.parents: .*{SHAPE}.*\[2, 6\]"),
        (lambda d: {"parents": d.parents[0]}, rf"draft\.parents: .*{SHAPE}.*of shape \[7\]"),
        (
            lambda d: {"parents": put(d.parents, (1, 2), 2)},
            r"draft\.parents: node 2 of row 1 has parent 2; .*at most 1",
        ),
        (
            lambda d: {"parents": put(d.parents, (0, 4), 6)},
            r"draft\.parents: node 4 of row 0 has parent 6; .*at most 3",
        ),
        (
            lambda d: {"parents": put(d.parents, (1, 0), -2)},
            r"draft\.parents: node 0 of row 1 has parent -2; expected -1",
        ),
        (
            lambda d: {"used": put(d.used, (1, 1), False)},
            r"draft\.used: node 2 of row 1 is used below the unused node 1",
        ),
    ],
)
def test_errors_of_trees_name_node_and_row(change, message):
    """Catches a child before its parent, which would read an ancestor table not yet filled."""
    draft = tree_draft()
    with pytest.raises(ValueError, match=message):
        validate_draft(replace(draft, **change(draft)), 2, VOCAB)


def test_a_chain_with_a_gap_is_an_error():
    """Catches the chain's check lost beside the tree's: a used node below an unused one."""
    draft = chain_draft()
    assert draft.used is not None
    with pytest.raises(ValueError, match=r"draft\.used: a used node hangs below an unused one"):
        validate_draft(replace(draft, used=put(draft.used, (0, 2), False)), 2, VOCAB)
