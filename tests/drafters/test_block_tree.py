"""DDTree: the best nodes by brute force, what a size is worth, and that no law suffers."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import Coupled, Draft, Greedy, Rejection, Typical, generate
from specdec.accept import rejection_laws
from specdec.benchmark import Costs
from specdec.draft import depths, validate_draft
from specdec.drafters import block_tree as module
from specdec.drafters.block_tree import (
    Budget,
    VerifyCosts,
    best_n_nodes,
    best_nodes,
    block_tree,
    candidates,
)
from specdec.testing import check_lossless, exact_law, target_law
from specdec.testing.replay import Recorder
from specdec.testing.strategies import small_target
from specdec.trees import Node, best_first, dense_choices
from tests.builders import CAT, DOG, IS, SAT, Scripted, context_of, random_laws
from tests.helpers import path_of

TOKENS = torch.tensor([[[CAT, DOG], [SAT, IS]]])
PROBS = torch.tensor([[[0.6, 0.2], [0.5, 0.4]]])
FLAT = VerifyCosts((1, 100), (1.0, 1.0))
STEEP = VerifyCosts((1, 2), (1.0, 2.0))
"""A second a token: no token that might be refused is worth it."""


@dataclass(frozen=True)
class BlockDrafter:
    """What a block says depends on the root only: `logits` [V, K, V] by root."""

    logits: Tensor
    n_nodes: int
    budget: Budget | None = None
    taps = ()

    def begin(self, target, batch_size, max_length):
        return self

    def propose(self, context) -> Draft:
        n_levels = min(self.logits.shape[1], context.max_depth)
        if not n_levels:
            return Draft.empty(len(context.lengths))
        roots = context.tokens.gather(1, context.lengths[:, None] - 1).squeeze(1)
        tokens, probs = candidates(context, self.logits[roots, :n_levels], self.n_nodes)
        return block_tree(tokens, probs, self.n_nodes, context.depth_left, self.budget)


@torch.no_grad()
def block_of(target, n_depths: int, scale: float = 1.0) -> Tensor:
    """Logits [V, K, V]: what the target says after a token and its own greedy continuation."""
    rows = torch.arange(target.vocab_size)[:, None]
    for _ in range(n_depths):
        rows = torch.cat([rows, target(rows).logits[:, -1:].argmax(-1)], dim=1)
    return scale * target(rows[:, :-1]).logits


TARGET, TARGET3 = small_target(1), small_target(3, vocab_size=3)
BLOCK, BLOCK3 = block_of(TARGET, 4), block_of(TARGET3, 2)
# chains of sure rows, trees of unsure ones, nothing where even the first token is a guess
MIXED = Budget(
    VerifyCosts((1, 2, 9), (1.0, 1.4, 3.0)), VerifyCosts((1, 2, 9), (1.4, 1.5, 2.2)), 0.2
)


def brute_force(table: list[list[float]], n_nodes: int) -> list[tuple[float, tuple[int, ...]]]:
    """The most valuable of all paths through a table, first of equals by path."""
    every = dense_choices([len(table[0])] * len(table)) if table else []
    worth = [(math.prod(table[d][r] for d, r in enumerate(path)), path) for path in every]
    return sorted(((v, path) for v, path in worth if v > 0), key=lambda x: (-x[0], x[1]))[:n_nodes]


def check_draft(probs: Tensor, n_nodes: int, deepest: list[int]) -> Draft:
    """Every row's used nodes are brute force's, in its order; the rest is padding."""
    batch, n_depths, n_ranks = probs.shape
    tokens = torch.arange(n_depths * n_ranks).reshape(1, n_depths, n_ranks).expand(batch, -1, -1)
    draft = block_tree(tokens, probs, n_nodes, torch.tensor(deepest))
    validate_draft(draft, batch, n_depths * n_ranks)
    parents, depth = draft.tree().tolist(), depths(draft.tree())
    for b in range(batch):
        best = brute_force(probs[b, : deepest[b]].double().tolist(), n_nodes)
        n = int(draft.mask()[b].sum())
        assert draft.mask()[b].tolist() == [i < n for i in range(draft.n_nodes)]
        assert depth[b, :n].tolist() == [len(path) for _, path in best]
        paths = [
            tuple(
                int(draft.tokens[b, i]) - d * n_ranks
                for d, i in enumerate(path_of(parents[b], node))
            )
            for node in range(n)
        ]
        assert paths == [path for _, path in best]
    return draft


def tables(n_depths: int, n_ranks: int) -> st.SearchStrategy[list[list[float]]]:
    """Shares that do not rise with the rank; round ones too, for ties, certainties and zeros."""
    share = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    row = st.lists(share, min_size=n_ranks, max_size=n_ranks)
    return st.lists(row.map(lambda x: sorted(x)[::-1]), min_size=n_depths, max_size=n_depths)


def test_the_example():
    """Catches a token of another depth or rank, and a parent that is not the one of the path."""
    draft = block_tree(TOKENS, PROBS, 5, torch.tensor([2]))
    assert draft.tokens.tolist() == [[CAT, SAT, IS, DOG, SAT]]
    assert draft.parents is not None
    assert draft.parents.tolist() == [[-1, 0, 0, -1, 3]]
    assert draft.mask().all()
    assert draft.probs is None
    values = [node.value for node in best_nodes(PROBS[0].tolist(), 5)]
    assert values == pytest.approx([0.6, 0.3, 0.24, 0.2, 0.1])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_rows_hold_their_best_nodes(data):
    """Catches nodes beyond `deepest` or that cost others their place, rows that read each other's
    table, ties that put a child before its parent, used padding."""
    n_depths, n_ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    probs = [data.draw(tables(n_depths, n_ranks)) for _ in range(3)]
    deepest = [data.draw(st.integers(0, n_depths + 2)) for _ in range(3)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    check_draft(torch.tensor(probs, dtype=dtype), data.draw(st.integers(1, 45)), deepest)


def test_chains_are_the_fast_path():
    """Catches a chain written as a tree, and a tree taken for a chain because one row is."""
    sure = torch.tensor([[[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]])
    unsure = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]])
    tokens = torch.arange(6).reshape(1, 3, 2)
    chain = block_tree(tokens, sure, 3, torch.tensor([3]))
    assert chain.parents is None
    assert chain.tokens.tolist() == [[0, 2, 4]]
    both = block_tree(tokens.expand(2, -1, -1), torch.cat([sure, unsure]), 3, torch.tensor([3, 1]))
    assert both.tree().tolist() == [[-1, 0, 1], [-1, -1, 1]]
    assert both.mask().tolist() == [[True] * 3, [True, True, False]]
    first = tokens[..., :1].expand(2, -1, -1)  # one candidate a position: a chain whatever it costs
    short = block_tree(first, sure[..., :1].expand(2, -1, -1), 3, torch.tensor([1, 3]))
    assert short.parents is None
    assert short.mask().tolist() == [[True, False, False], [True] * 3]
    none = block_tree(first, sure[..., :1].expand(2, -1, -1), 3, torch.tensor([0, 0]))
    assert (none.n_nodes, none.parents) == (0, None)
    validate_draft(none, 2, 6)


@pytest.mark.parametrize(
    "rule",
    [Greedy(), Typical(), Rejection(seed=1), Coupled(0.7, top_k=6, seed=1)],
    ids=["greedy", "typical", "rejection", "coupled"],
)
def test_candidates_are_the_rules_pick_at_their_depth(rule):
    """Catches noise of another depth, ranks by noise but values by token, drawn candidates."""
    context = context_of([[1, 2], [3, 4, 5]], rule=rule)
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))
    tokens, probs = candidates(context, logits, 5)
    for d in range(3):
        picked, q = rule.pick(logits[:, d : d + 1], context.lengths, d, 5, draw=False)
        assert q is None
        assert tokens[:, d].equal(picked[:, 0])
    law = logits.softmax(-1)
    assert probs.allclose(law.topk(5).values, atol=1e-6)
    if not isinstance(rule, Coupled):
        assert law.gather(-1, tokens).allclose(probs, atol=1e-6)
    same, sharper = candidates(context, logits, 5, temperature=0.5)
    assert same.equal(tokens)
    assert sharper.allclose((2 * logits).softmax(-1).topk(5).values, atol=1e-6)
    assert candidates(context, logits.bfloat16(), 20)[1].dtype == torch.float32
    assert candidates(context, logits.double(), 20)[1].shape == (2, 3, 9)


def reach_of(draft: Draft, laws: Tensor) -> list[float]:
    """Probability of every node of a one-row draft to be accepted under `Rejection`.

    `laws` [K, V]: the target's law at every depth, whatever stands above.
    """
    depth = torch.cat([torch.zeros(1, dtype=torch.long), depths(draft.tree())[0]])
    p = torch.cat([laws, laws[-1:]])[depth][None]
    accept = rejection_laws(draft, p)[0][0].tolist()
    reach: list[float] = []
    untaken: dict[int, float] = {}
    for node, parent in enumerate(draft.tree()[0].tolist()):
        left = untaken.get(parent, 1.0)
        reach.append((reach[parent] if parent >= 0 else 1.0) * left * accept[node])
        untaken[parent] = left * (1 - accept[node])
    return reach


def test_values_are_the_chances_of_a_drafter_that_knows():
    """Where the target's laws are the block's, a node's value is the chance that it is accepted
    under `Rejection`. Catches a chosen node tested as a drawn one, values of siblings mixed up."""
    laws = random_laws(0, 1, 3, 6)
    tokens, probs = candidates(context_of([[0]]), laws.log(), 6)
    draft = block_tree(tokens, probs, 40, torch.tensor([3]))
    values = [node.value for node in best_nodes(probs[0].tolist(), 40)]
    assert reach_of(draft, laws[0]) == pytest.approx(values, abs=1e-12)


def test_the_size_by_hand():
    """Catches a pass that forgets its root, and a draft that is taken for free.

    Values 0.6, 0.3: 1, 1.6 and 1.9 tokens, in passes of 1, 1.5 and 2 seconds.
    """
    costs = VerifyCosts((1, 3), (1.0, 2.0))
    assert best_n_nodes([0.6, 0.3], costs.at, 0.0) == (1, pytest.approx(1.6 / 1.5))
    assert best_n_nodes([0.6, 0.3], costs.at, 4.0) == (2, pytest.approx(1.9 / 6))
    assert best_n_nodes([0.4, 0.3], costs.at, 0.0) == (0, 1.0)
    assert best_n_nodes([], costs.at, 1.0) == (0, 0.5)
    jump = VerifyCosts((1, 2, 3), (1.0, 2.0, 2.0))  # not convex: the second node is free
    assert best_n_nodes([0.6, 0.6], jump.at, 0.0) == (2, pytest.approx(1.1))


def test_steep_passes_draft_nothing_and_flat_ones_all():
    """Catches a size counted off by one, and a curve read with the other's sign."""
    assert Budget(STEEP, STEEP, 0.0).best_nodes(PROBS[0].tolist(), 6) == []
    whole = Budget(FLAT, FLAT, 0.5).best_nodes(PROBS[0].tolist(), 6)
    assert whole == best_nodes(PROBS[0].tolist(), 6)
    draft = block_tree(TOKENS, PROBS, 6, torch.tensor([2]), Budget(STEEP, STEEP, 0.0))
    assert draft.n_nodes == 0


def test_the_chain_is_drafted_where_the_tree_does_not_pay():
    """Catches a tree that is compared without its surcharge, and a chain of the tree's nodes.

    Chain: 1.9 tokens a second. Tree: 2.52 (6 nodes) in 1 + surcharge, equal at 0.326.
    """
    table = PROBS[0].tolist()
    chain = [Node((0,), -1, table[0][0]), Node((0, 0), 0, table[0][0] * table[1][0])]
    for surcharge, pays in ((0.25, True), (0.35, False)):
        budget = Budget(FLAT, FLAT.plus(surcharge), 0.0)
        assert budget.best_nodes(table, 6) == (best_nodes(table, 6) if pays else chain)
    draft = block_tree(TOKENS, PROBS, 6, torch.tensor([2]), Budget(FLAT, FLAT.plus(0.35), 0.0))
    assert draft.parents is None
    assert draft.tokens.tolist() == [[CAT, SAT]]


@settings(max_examples=60, deadline=None)
@given(
    tables(3, 3),
    st.lists(st.floats(0.1, 9), min_size=4, max_size=4),
    st.floats(0, 2),
    st.floats(0, 3),
    st.integers(1, 12),
)
def test_no_other_size_or_shape_pays_more(table, seconds, surcharge, draft_seconds, n_nodes):
    """Catches a search that stops at the first fall, or forgets a shape."""
    chain_costs = VerifyCosts((1, 2, 5, 13), tuple(seconds))
    tree_costs = chain_costs.plus(surcharge)
    got = Budget(chain_costs, tree_costs, draft_seconds).best_nodes(table, n_nodes)

    def rate(nodes, costs):
        return (1 + sum(v for v, _ in nodes)) / (draft_seconds + costs.at(len(nodes) + 1))

    tree = brute_force(table, n_nodes)
    chain = brute_force([row[:1] for row in table], n_nodes)
    rates = [rate(tree[:n], tree_costs) for n in range(len(tree) + 1)]
    rates += [rate(chain[:n], chain_costs) for n in range(len(chain) + 1)]
    shape = [(node.value, node.path) for node in got]
    own = [rate(shape, tree_costs)]
    if all(set(path) == {0} for _, path in shape):
        own.append(rate(shape, chain_costs))
    assert max(own) == pytest.approx(max(rates), rel=1e-12)


def test_costs_are_those_of_the_benchmark():
    """Catches a slope of the wrong interval, and sizes taken in the order they were measured."""
    table = {1: 1.0, 9: 3.0, 3: 2.0, 2: 1.1}
    costs, known = VerifyCosts.of(table), Costs(1.0, 0.0, {}, 0.0, table)
    for n in range(1, 14):
        assert costs.at(n) == pytest.approx(known.verify_at(n), rel=1e-12)
        assert costs.plus(0.5).at(n) == pytest.approx(costs.at(n) + 0.5)


@pytest.mark.parametrize("budget", [None, MIXED], ids=["tree", "budget"])
def test_lossless(budget):
    """Catches nodes that count without being used, candidates of another row or depth."""
    drafter = BlockDrafter(BLOCK, 12, budget)
    report = check_lossless(
        TARGET,
        drafter,
        max_new_tokens=8,
        rules=[Greedy(), Coupled(0.6, top_k=8, seed=1), Coupled(1.3, top_p=0.9, seed=2)],
        n_samples=64,
    )
    assert report.n_replayed > 40
    assert not report.near_ties
    assert report.tau["Greedy"] > 1.3


@pytest.mark.parametrize("budget", [None, MIXED], ids=["tree", "budget"])
def test_rejection_follows_the_targets_law_exactly(budget):
    """Catches siblings out of order, duplicated candidates, a law declared for chosen nodes."""
    drafter, prompt = BlockDrafter(BLOCK3, 5, budget), torch.tensor([1, 2])
    once = Scripted(
        lambda context: (
            drafter.propose(context) if int(context.lengths[0]) == len(prompt) else Draft.empty(1)
        )
    )
    law, own = exact_law(TARGET3, once, prompt, 3), target_law(TARGET3, prompt, 3)
    assert max(abs(law.get(key, 0.0) - own.get(key, 0.0)) for key in law.keys() | own.keys()) < 1e-9


@pytest.mark.parametrize("rule", [Coupled(seed=3), Rejection(seed=3)], ids=["coupled", "rejection"])
@pytest.mark.parametrize("budgets", [[11, 6, 9], [1, 2, 6]])
def test_rows_of_a_batch_equal_their_solo_runs(rule, budgets):
    """Catches a size or shape that the batch shares: under `Rejection` a row's tokens would change
    with its neighbours. Rows that want a chain, a tree and nothing meet here."""
    prompts = [torch.tensor([1]), torch.tensor([7, 2, 5]), torch.tensor([3, 9])]
    recorder = Recorder(BlockDrafter(BLOCK, 8, MIXED))
    together = generate(TARGET, prompts, recorder, max_new_tokens=budgets, rule=rule)
    widths = [draft.mask().sum(1) for _, draft in recorder.seen]
    assert any(width.min() < width.max() for width in widths)
    assert budgets[0] == 1 or any(
        draft.parents is not None and (draft.tree()[b] == torch.arange(-1, draft.n_nodes - 1)).all()
        for (_, draft), width in zip(recorder.seen, widths, strict=True)
        for b in (width > 1).nonzero().flatten().tolist()
    )
    for b, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        alone = generate(
            TARGET, prompt, recorder.drafter, max_new_tokens=budget, rule=rule.for_row(b)
        )
        assert together.new_tokens[b].equal(alone.new_tokens[0])


def planted(bug: str):
    def wrong(table):
        if bug == "depth":
            table = [*table[1:], table[0]]
        for i, node in enumerate(best_first(table)):
            if bug == "parent" and node.parent >= 0:
                yield node._replace(parent=i - 1)
            elif bug == "sibling" and node.path[-1]:
                yield node._replace(path=(*node.path[:-1], node.path[-1] - 1))
            else:
                yield node

    return wrong


@pytest.mark.parametrize("bug", ["parent", "depth", "sibling"])
def test_planted_bugs_are_seen(monkeypatch, bug):
    """Parents off by one, values of the next depth, the token of the sibling before."""
    probs = random_laws(2, 2, 3, 4).sort(dim=-1, descending=True).values
    check_draft(probs, 12, [3, 2])
    monkeypatch.setattr(module, "best_first", planted(bug))
    with pytest.raises(AssertionError):
        check_draft(probs, 12, [3, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_tree(TOKENS, PROBS, 0, torch.tensor([2])), "n_nodes: .* got 0"),
        (
            lambda: block_tree(TOKENS, PROBS[0], 1, torch.tensor([2])),
            r"probs.*\[1, 2, 2\], \[2, 2\]",
        ),
        (lambda: block_tree(TOKENS, PROBS, 1, torch.tensor(2)), r"deepest: .* and \[\]"),
        (lambda: VerifyCosts((1,), (1.0,)), r"sizes: expected two or more"),
        (lambda: VerifyCosts((2, 1), (1.0, 2.0)), r"sizes: .* rising .* got \(2, 1\)"),
        (lambda: VerifyCosts((0, 1), (1.0, 2.0)), r"sizes: .* got \(0, 1\)"),
        (lambda: VerifyCosts((1, 2), (1.0,)), r"seconds: expected 2 positive"),
        (lambda: VerifyCosts((1, 2), (1.0, 0.0)), r"seconds: .* got \(1.0, 0.0\)"),
        (lambda: Budget(FLAT, FLAT, -0.1), r"draft_seconds: .* got -0.1"),
        (lambda: Budget(FLAT, FLAT, math.nan), r"draft_seconds: .* got nan"),
    ],
)
def test_wrong_input_is_named(call, message):
    """Catches sizes that would be divided by zero, and tables of another batch."""
    with pytest.raises(ValueError, match=message):
        call()
