"""The gated delta rule: by hand, then node by node == in chunks == over a tree, in float64."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import specdec.models.gated_delta as module
from specdec.models.gated_delta import (
    CHUNK,
    Pending,
    advance,
    advance_,
    chunk_delta,
    extend,
    snapshots,
    step_delta,
    tree_delta,
    unit,
)
from tests.helpers import EXAMPLE_PARENTS, path_of, random_parents

EXACT = 1e-12
MILD, STRONG = 0.3, 40.0


@dataclass(frozen=True)
class Case:
    """Arguments of the rule for N nodes; two key heads, four value heads, d_k = 5, d_v = 3."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def piece(self, first: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, g, beta = (x[:, first:stop] for x in (self.q, self.k, self.v, self.g, self.beta))
        return q, k, v, g, beta

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta, self.state


def case(n: int, batch: int = 2, decay: float = MILD, seed: int = 0) -> Case:
    """Log-decays down to -`decay` in two heads, down to -0.1 in the others."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    g = -torch.rand(batch, n, 4, generator=generator, dtype=torch.float64)
    return Case(
        unit(normal(batch, n, 2, 5)) * 5**-0.5,
        unit(normal(batch, n, 2, 5)),
        normal(batch, n, 4, 3),
        g * torch.tensor([0.1, decay, 0.1, decay], dtype=torch.float64),
        normal(batch, n, 4).sigmoid(),
        normal(batch, 4, 5, 3),
    )


def assert_near(got: Tensor, want: Tensor, tolerance: float = EXACT) -> None:
    """Also where both hold inf or nan: neither may."""
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_two_tokens_by_hand():
    """Catches decay after the correction instead of before it, beta on the wrong term, S^T and S
    mixed up, a state that is read before it is written: numbers a reader can follow.
    """
    half = math.log(0.5)
    # one head, d_k = 2, d_v = 1; S says 8 of the first key and 2 of the second
    state = torch.tensor([[[[8.0], [2.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, 0.0]], [[0.6, 0.8]]]], dtype=torch.float64)
    q = torch.tensor([[[[0.0, 1.0]], [[1.0, 0.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[6.0]], [[5.0]]]], dtype=torch.float64)
    g = torch.full((1, 2, 1), half, dtype=torch.float64)
    beta = torch.tensor([[[0.5], [1.0]]], dtype=torch.float64)
    # fade: [4, 1]; it says 4 of k, u = 0.5 (6 - 4) = 1; S = [5, 1]; q reads 1
    # fade: [2.5, 0.5]; it says 1.5 + 0.4 = 1.9, u = 3.1; S = [4.36, 2.98]; q reads 4.36
    o, u, states = snapshots(q, k, v, g, beta, state, None)
    assert_near(u.flatten(), u.new_tensor([1.0, 3.1]))
    assert_near(o.flatten(), o.new_tensor([1.0, 4.36]))
    assert_near(states[0, :, 0, :, 0], o.new_tensor([[8.0, 2.0], [5.0, 1.0], [4.36, 2.98]]))
    for rule in (step_delta, chunk_delta, tree_delta):
        for got, want in zip(rule(q, k, v, g, beta, state, None), (o, u), strict=True):
            assert_near(got, want)
    # the second token as the first one's sibling: fade: [4, 1]; it says 3.2, u = 1.8
    siblings = torch.tensor([[-1, -1]])
    for rule in (step_delta, tree_delta):
        o, u = rule(q, k, v, g, beta, state, siblings)
        assert_near(u.flatten(), u.new_tensor([1.0, 1.8]))
        assert_near(o.flatten(), o.new_tensor([1.0, 4 + 0.6 * 1.8]))


@pytest.mark.parametrize("decay", [MILD, STRONG])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_chunks_and_trees_are_the_steps(n, decay):
    """Catches a state that is not handed from chunk to chunk or handed on too early, and a decay of
    exp(40) on the way to a masked entry.
    """
    assert CHUNK == 64
    x = case(n, decay=decay)
    o, u, states = snapshots(*x.all, None)
    chain = torch.arange(-1, n - 1).expand(2, -1)
    for got in (
        step_delta(*x.all, chain),
        chunk_delta(*x.all, None),
        tree_delta(*x.all, None),
        tree_delta(*x.all, chain),
    ):
        assert_near(got[0], o)
        assert_near(got[1], u)
    assert_near(advance(x.state, x.k, u, x.g), states[:, -1])


def test_value_heads_share_the_key_head_of_their_group():
    """Catches value head h with key head h mod H_k: four value heads one by one, with two keys."""
    x = case(6)
    together = tree_delta(*x.all, None)
    for head in range(4):
        key, own = slice(head // 2, head // 2 + 1), slice(head, head + 1)
        alone = tree_delta(
            x.q[:, :, key],
            x.k[:, :, key],
            x.v[:, :, own],
            x.g[:, :, own],
            x.beta[:, :, own],
            x.state[:, own],
            None,
        )
        for got, want in zip(together, alone, strict=True):
            assert_near(got[:, :, own], want)


@st.composite
def trees(draw) -> tuple[Tensor, list[int], Case]:
    """Parents [B, N], the pieces in which they come, and the nodes."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    batch, decay = draw(st.integers(1, 3)), draw(st.sampled_from([MILD, 5.0, STRONG]))
    parents = random_parents(rng, batch, sum(sizes))
    return parents, sizes, case(sum(sizes), batch, decay, seed=rng.randrange(99))


def grow(parents: Tensor | None, sizes: list[int], x: Case) -> tuple[Tensor, Tensor, Pending]:
    """The nodes of `x` appended piece by piece: o and u of all, and what is pending."""
    pending, outputs, first = None, [], 0
    for size in sizes:
        piece, stop = x.piece(first, first + size), first + size
        upto = None if parents is None else parents[:, :stop]
        o, u = tree_delta(*piece, x.state, upto, before=pending)
        table = None if upto is None else module.table_of(upto, first, size, "cpu")
        pending = extend(pending, piece[1], u, piece[3], table)
        outputs.append(o)
        first = stop
    assert pending is not None
    return torch.cat(outputs, dim=1), pending.u, pending


@given(trees())
@settings(max_examples=60, deadline=None)
def test_a_tree_in_pieces_is_the_steps_and_commits_to_their_states(drawn):
    """Catches decays summed in the order of slots, an ancestor that is missed or too many, pieces
    that do not see those before; then a path's entries in the wrong order, or beyond `n`.
    """
    parents, sizes, x = drawn
    o, u, states = snapshots(*x.all, parents)
    got = grow(parents, sizes, x)
    assert_near(got[0], o)
    assert_near(got[1], u)
    pending, (batch, n) = got[2], parents.shape
    assert_near(pending.g, x.g)
    rng = random.Random(n)
    ends = [rng.randint(-1, n - 1) for _ in range(batch)]
    paths = [path_of(row, end) for row, end in zip(parents.tolist(), ends, strict=True)]
    width = max(1, *map(len, paths)) + 2
    padded = torch.tensor(
        [path + [rng.randrange(n) for _ in range(width - len(path))] for path in paths]
    )
    rows = torch.arange(batch).unsqueeze(1)
    on_path = (each[rows, padded] for each in (pending.k, pending.u, pending.g))
    left = advance(x.state, *on_path, torch.tensor([len(path) for path in paths]))
    assert_near(left, states[rows.squeeze(1), torch.tensor(ends) + 1])
    for b, end in enumerate(ends):
        if end < 0:
            assert torch.equal(left[b], x.state[b])
    inside = x.state.clone()
    on_path = (each[rows, padded] for each in (pending.k, pending.u, pending.g))
    advance_(inside, *on_path, torch.tensor([len(path) for path in paths]))
    assert_near(inside, left)


def test_a_chain_in_pieces_needs_no_table():
    """Catches a second piece whose decay starts anew, or reads a node of its own as pending."""
    x = case(9, decay=5.0)
    o, u, _ = snapshots(*x.all, None)
    got = grow(None, [4, 1, 4], x)
    assert_near(got[0], o)
    assert_near(got[1], u)
    assert_near(got[2].G, x.g.cumsum(1))


def test_the_table_may_be_shared_and_stands_for_the_parents():
    """Catches `ancestors` of one row that is not spread over the batch."""
    x, parents = case(7), torch.tensor([EXAMPLE_PARENTS])
    table = module.table_of(parents, 0, 7, "cpu")
    for got, want in zip(
        tree_delta(*x.all, None, ancestors=table),
        step_delta(*x.all, parents.expand(2, -1)),
        strict=True,
    ):
        assert_near(got, want)


def test_nothing_committed_moves_no_bit():
    """Catches a row that is done and still fades: exp(g) S, or S + 0 k of a nan."""
    x = case(3)
    _, u = tree_delta(*x.all, None)
    left = advance(x.state, x.k, u, x.g, torch.tensor([0, 3]))
    assert torch.equal(left[0], x.state[0])
    assert not torch.equal(left[1], x.state[1])
    advance_(left, x.k, u, x.g, torch.tensor([0, 0]))
    assert torch.equal(left[0], x.state[0])


def check_decay_to_nothing() -> None:
    """Two chains of 20 nodes side by side, each of which fades by exp(-40)."""
    x = case(40)
    x = replace(x, g=torch.full_like(x.g, -STRONG))
    parents = torch.tensor([[-1, *range(19), -1, *range(20, 39)]] * 2)
    for exact in (torch.float32, torch.float64):
        arguments = [each.to(exact) for each in x.all]
        o, u = tree_delta(*arguments, parents)
        want = step_delta(*arguments, parents)
        assert_near(o, want[0], 1e-5 if exact == torch.float32 else EXACT)
        assert_near(u, want[1], 1e-5 if exact == torch.float32 else EXACT)


def test_a_decay_to_nothing_stays_finite():
    """Catches inf * 0 = nan: exp(G_i - G_j) overflows for a node of the other chain."""
    check_decay_to_nothing()


def test_gradients_are_those_of_the_steps():
    """Catches a detach, or a masked exp whose gradient is nan, in what training runs."""
    gradients = []
    for rule in (step_delta, chunk_delta):
        inputs = [each.clone().requires_grad_() for each in case(70, decay=STRONG).all]
        o, u = rule(*inputs, None)
        weights = torch.arange(o.numel(), dtype=torch.float64).sin()
        ((o.flatten() * weights).sum() + u.square().sum()).backward()
        gradients.append([each.grad for each in inputs])
    for got, want in zip(*gradients, strict=True):
        assert_near(got, want, 1e-10)
    inputs = [each.clone().requires_grad_() for each in case(4, batch=1).all]
    tree = torch.tensor([[-1, 0, 0, -1]])
    assert torch.autograd.gradcheck(lambda *x: tree_delta(*x, tree), inputs)


def test_unit_is_of_length_one():
    """Catches an eps outside the root, and a mean where a sum belongs."""
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert_near(unit(x, eps=0.0), torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert_near(unit(torch.zeros(2), eps=1e-6), torch.zeros(2))


# Negative controls: what each of them breaks must not pass the comparison above


def decay_by_slot(g: Tensor, ancestors: Tensor | None, before: Pending | None) -> Tensor:
    return g.cumsum(1) if before is None else before.G[:, -1:] + g.cumsum(1)


def masked_after_exp(self: Tensor, mask: Tensor, value: float) -> Tensor:
    return self.exp().mul(~mask).log()  # inf * 0 where a node is not above


def test_decay_in_the_order_of_slots_turns_red(monkeypatch):
    """Planted: the cumulative decay of a chain under a tree mask."""
    x, parents = case(7), torch.tensor([EXAMPLE_PARENTS] * 2)
    want = step_delta(*x.all, parents)[0]
    assert_near(grow(parents, [4, 3], x)[0], want)
    monkeypatch.setattr(module, "path_sums", decay_by_slot)
    with pytest.raises(AssertionError):
        assert_near(grow(parents, [4, 3], x)[0], want)


def test_a_mask_after_exp_turns_red(monkeypatch):
    """Planted: exp first, zeros afterwards; a sibling that faded more makes inf * 0."""
    check_decay_to_nothing()
    monkeypatch.setattr(Tensor, "masked_fill", masked_after_exp)
    with pytest.raises(AssertionError):
        check_decay_to_nothing()


def test_entries_beyond_n_turn_red(monkeypatch):
    """Planted: a commit of the whole padded path."""
    x = case(5)
    _, u, states = snapshots(*x.all, None)
    n = torch.tensor([2, 5])
    right = advance(x.state, x.k, u, x.g, n)
    assert_near(right, torch.stack([states[0, 2], states[1, 5]]))
    with pytest.raises(AssertionError):
        assert_near(advance(x.state, x.k, u, x.g), right)
