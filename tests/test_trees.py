"""Static trees: shapes by hand, the published trees, the search against all trees."""

import json
import math
from itertools import combinations, islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specdec.draft import ancestors, depths
from specdec.trees import (
    MC_SIM_7B_63,
    best_first,
    dense_choices,
    expected_accepted,
    search_choices,
    static_tree,
)
from tests.helpers import EXAMPLE_PARENTS

GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]
ACCURACIES = [[0.6, 0.3], [0.5, 0.1]]


def check_golden(name: str) -> None:
    """The published tree's depths and mask, root included."""
    choices = json.loads((GOLDEN / name / "config.json").read_text())["choices"]
    case, tree = load_file(GOLDEN / name / "case.safetensors"), static_tree(choices)
    parents = torch.cat([torch.tensor([-1]), tree.parents + 1]).unsqueeze(0)
    assert [0, *tree.depths.tolist()] == case["position_offsets"].tolist()
    assert ancestors(parents)[0].equal(case["attention_mask"].bool())


def test_the_running_example():
    """Catches a parent looked up by rank, a depth from 0, nodes in the order they were given."""
    tree = static_tree([EXAMPLE[i] for i in (5, 1, 6, 0, 3, 4, 2)])
    assert tree.paths == tuple(EXAMPLE)
    assert tree.parents.tolist() == EXAMPLE_PARENTS
    assert tree.depths.tolist() == [1, 1, 2, 2, 2, 3, 3] == depths(tree.parents[None])[0].tolist()
    assert tree.ranks.tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert (tree.max_depth, tree.max_rank, tree.gap) == (3, 1, None)


@pytest.mark.parametrize("name", ["medusa_tree", "medusa_tree_63"])
def test_published_trees(name):
    """Catches another node order or parent than the published implementation's."""
    check_golden(name)


def test_the_published_63_nodes():
    """Catches a typing error in the constant, and a published tree that cannot be drawn into."""
    config = json.loads((GOLDEN / "medusa_tree_63" / "config.json").read_text())
    assert [list(path) for path in MC_SIM_7B_63] == config["choices"]
    tree = static_tree(MC_SIM_7B_63)
    assert (len(tree.paths), tree.max_depth, tree.max_rank, tree.gap) == (63, 4, 9, None)


def test_dense_trees():
    """Catches a width of the wrong depth, and a chain that is none."""
    assert static_tree(dense_choices((1, 1, 1))).parents.tolist() == [-1, 0, 1]
    tree = static_tree(dense_choices((2, 3)))
    assert tree.parents.tolist() == [-1, -1, 0, 0, 0, 1, 1, 1]
    assert tree.ranks.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert len(dense_choices((2, 3, 2))) == 2 + 6 + 12


def test_gaps_are_found():
    """Catches a missing sibling that is looked for below another parent."""
    assert static_tree([(0,), (2,), (1,), (0, 1), (1, 0)]).gap == (0, 1)
    assert static_tree([(0,), (2,)]).gap == (2,)


def test_the_search_by_hand():
    """0.6, 0.3, 0.6*0.5=0.3, 0.3*0.5=0.15, 0.06, 0.03. Catches a sum of accuracies for a product,
    and a table read rank by head."""
    assert search_choices(ACCURACIES, 6) == [(0,), (0, 0), (1,), (1, 0), (0, 1), (1, 1)]
    assert expected_accepted([(0,), (0, 0), (1,)], ACCURACIES) == pytest.approx(1.2)
    wide = search_choices(torch.tensor([[0.4, 0.3, 0.2], [0.1, 0.0, 0.0]]), 4)
    assert wide == [(0,), (1,), (2,), (0, 0)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda row: sorted(row)[::-1]),
        min_size=2,
        max_size=2,
    ),
    st.integers(1, 5),
)
def test_no_tree_of_that_size_beats_the_search(table, n_nodes):
    """Catches a frontier without siblings or without children, or popped in the wrong order."""
    found = expected_accepted(search_choices(table, n_nodes), table)
    every = dense_choices((3, 3))
    best = max(
        expected_accepted(choices, table)
        for choices in combinations(every, n_nodes)
        if all(len(path) == 1 or path[:1] in choices for path in choices)
    )
    assert found == pytest.approx(best, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
            min_size=0,
            max_size=3,
        ).map(lambda row: sorted(row)[::-1]),
        max_size=3,
    ),
    st.integers(0, 45),
)
def test_nodes_come_best_first(table, n_nodes):
    """Catches a value carried to the wrong node, a parent counted off by one, depths of unlike
    width, and ties in another order than the paths'."""
    widths = [len(row) for row in table]
    depth = next((d for d, width in enumerate(widths) if not width), len(widths))
    every = dense_choices(widths[:depth]) if depth else []
    values = {path: math.prod(table[d][r] for d, r in enumerate(path)) for path in every}
    nodes = list(islice(best_first(table), n_nodes))
    best = sorted(every, key=lambda path: (-values[path], path))[:n_nodes]
    assert [node.path for node in nodes] == best
    assert [node.value for node in nodes] == [values[path] for path in best]
    place = {node.path: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        assert node.parent == place.get(node.path[:-1], -1) < i
        assert (node.parent < 0) == (len(node.path) == 1)


def test_searched_trees_can_be_drawn_into():
    """Catches ranks left out where an accuracy happens to rise with the rank."""
    uneven = torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    choices = search_choices(uneven, 100)
    assert static_tree(choices).gap is None
    assert search_choices(uneven, 30) == choices[:30]


def test_parents_off_turns_the_goldens_red(monkeypatch):
    """The planted bug: every node hangs one node too early."""
    tree = static_tree(MC_SIM_7B_63)
    off = (tree.parents - 1).clamp(min=-1)
    monkeypatch.setattr(type(tree), "parents", off)
    with pytest.raises(AssertionError):
        check_golden("medusa_tree_63")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: static_tree([]), "choices: expected at least one rank path"),
        (lambda: static_tree([[0], []]), r"choices: expected paths .* got \(\)"),
        (lambda: static_tree([[0], [0, -1]]), r"choices: .* ranks >= 0.* got \(0, -1\)"),
        (lambda: static_tree([[0], [1], [0]]), r"choices: .* once, got \(0,\) again"),
        (lambda: static_tree([[0], [0, 1, 0]]), r"\(0, 1, 0\) hangs below \(0, 1\), .* missing"),
        (lambda: dense_choices(()), r"widths: .* got \[\]"),
        (lambda: dense_choices((2, 0)), r"widths: .* got \[2, 0\]"),
        (lambda: search_choices([0.5, 0.2], 1), r"accuracies: .*\[n_heads, n_ranks\], got \[2\]"),
        (lambda: search_choices([[0.5, 1.2]], 1), r"accuracies: expected shares"),
        (lambda: search_choices([[0.5, float("nan")]], 1), r"accuracies: expected shares"),
        (lambda: search_choices(ACCURACIES, 0), r"n_nodes: expected 1\.\.6, got 0"),
        (lambda: search_choices(ACCURACIES, 7), r"n_nodes: expected 1\.\.6, got 7"),
        (lambda: expected_accepted([(2,)], ACCURACIES), r"rank 2 reach beyond .* \[2, 2\]"),
        (lambda: expected_accepted(dense_choices((1, 1, 1)), ACCURACIES), "depth 3 .* beyond"),
    ],
)
def test_wrong_input_is_named(call, message):
    """Catches trees with orphans, and searches that run out of nodes."""
    with pytest.raises(ValueError, match=message):
        call()
