"""`Rejection`: its laws against a plain reference, the sum over all drafts, and its own draws.

Negative controls plant the known bugs, resampling from p instead of the residual, a declared q that
is not the q drawn from, drawn nodes pruned by their probability, and expect the tests to notice.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import specdec.accept
from specdec.accept import Rejection, accept_or_residual, rejection_laws, without_replacement
from specdec.draft import Draft
from tests.builders import FALSE_ALARM, chi_square, law, random_laws

EXACT = 1e-12


def same(actual: Tensor, expected: Tensor, atol: float = EXACT) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("r", "q", "token", "accept", "left"),
    [
        ((5, 3, 2), (2, 3, 5), 0, 1.0, (1, 0, 0)),  # r > q: always
        ((5, 3, 2), (2, 3, 5), 2, 0.4, (1, 0, 0)),  # 0.2 / 0.5
        ((4, 4, 2), (1, 3, 6), 2, 1 / 3, (3, 1, 0)),  # owed 0.3 and 0.1
        ((5, 3, 2), None, 1, 0.3, (5, 0, 2)),  # chosen
        ((5, 3, 2), (5, 3, 2), 1, 1.0, (5, 3, 2)),  # nothing left: keep r
        ((0, 1, 0), None, 1, 1.0, (0, 1, 0)),  # the same for a chosen token
        ((1, 0, 1), (1, 1, 2), 1, 0.0, (1, 0, 0)),
        ((1, 0, 1), None, 1, 0.0, (1, 0, 1)),
    ],
)
def test_one_test_by_hand(r, q, token, accept, left) -> None:
    """q/r in place of r/q, q - r in place of r - q, a residual that is not normalised or is 0/0."""
    r, q = law(*r), None if q is None else law(*q)
    chance, owed = accept_or_residual(r, q, torch.tensor(token))
    assert chance == pytest.approx(accept, abs=EXACT)
    assert same(owed, law(*left))


def test_one_test_broadcasts_and_keeps_the_dtype_of_r() -> None:
    """A float32 q that drags a float64 p down, or rows that share a residual."""
    r, q, tokens = random_laws(0, 2, 3, 5), random_laws(1, 2, 3, 5), torch.ones(2, 3).long()
    accept, left = accept_or_residual(r, q, tokens)
    single = [accept_or_residual(r[b, i], q[b, i], tokens[b, i]) for b in (0, 1) for i in range(3)]
    assert same(accept.flatten(), torch.stack([a for a, _ in single]))
    assert same(left.flatten(0, 1), torch.stack([owed for _, owed in single]))
    accept, left = accept_or_residual(r, q.float(), tokens)
    assert accept.dtype == left.dtype == torch.float64


def plain_laws(
    tokens: list[int], parents: list[int], q: list[list[float]] | None, used: list[bool], p: list
) -> tuple[list[float], list[list[float]]]:
    """`rejection_laws` of one row, as the papers tell it: child after child below every node."""
    accept, owed = [0.0] * len(tokens), []
    for parent in range(-1, len(tokens)):
        r = p[parent + 1]
        for i, x in enumerate(tokens):
            if parents[i] == parent and used[i]:
                drawn_from = [float(v == x) for v in range(len(r))] if q is None else q[i]
                accept[i] = min(1.0, r[x] / drawn_from[x])
                left = [max(a - b, 0.0) for a, b in zip(r, drawn_from, strict=True)]
                if sum(left) > 0:
                    r = [v / sum(left) for v in left]
        owed.append(r)
    return accept, owed


def random_case(seed: int, n_rows: int, n: int, kind: str, is_chain: bool) -> tuple[Draft, Tensor]:
    """A draft with laws of every kind, unused nodes, and the target's law [B, 1 + N, 4]."""
    generator = torch.Generator().manual_seed(seed)

    def some(chance: float) -> Tensor:
        return torch.rand(n_rows, n, generator=generator) < chance

    parents = (torch.rand(n_rows, n, generator=generator) * (torch.arange(n) + 1)).long() - 1
    parents = torch.arange(-1, n - 1).expand(n_rows, n) if is_chain else parents
    used = some(0.85)
    for i in range(n):  # none below an unused one
        above = used.gather(1, parents[:, i : i + 1].clamp(min=0)).squeeze(1)
        used[:, i] &= above | (parents[:, i] < 0)
    p = random_laws(seed + 1, n_rows, 1 + n, 4, zeros=True)
    q = random_laws(seed + 2, n_rows, n, 4, zeros=True)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(n_rows, n)
    if kind == "mixed":  # some nodes were chosen after all
        one_hot = torch.nn.functional.one_hot(tokens, 4).double()
        q = torch.where(some(0.4).unsqueeze(-1), one_hot, q)
    probs = None if kind == "chosen" else q
    return Draft(tokens, None if is_chain else parents, probs, used), p


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(["drawn", "chosen", "mixed"]),
    st.booleans(),
)
def test_laws_against_the_plain_reference(seed, n_rows, n, kind, is_chain) -> None:
    """Siblings tested out of order or against p; unused nodes that count; cousins that meddle."""
    draft, p = random_case(seed, n_rows, n, kind, is_chain)
    accept, owed = rejection_laws(draft, p)
    assert accept.shape == (n_rows, n)
    assert owed.shape == p.shape
    for b in range(n_rows):
        chances, left = plain_laws(
            draft.tokens[b].tolist(),
            draft.tree()[b].tolist(),
            None if draft.probs is None else draft.probs[b].tolist(),
            draft.mask()[b].tolist(),
            p[b].tolist(),
        )
        assert same(accept[b], torch.tensor(chances, dtype=torch.float64), 1e-10)
        assert same(owed[b], torch.tensor(left, dtype=torch.float64), 1e-10)


def test_what_unused_nodes_hold_does_not_matter() -> None:
    """0/0 or NaN of a masked node that leaks into its row: nothing vouches for its q."""
    for is_chain in (False, True):
        draft, p = random_case(3, 3, 6, "drawn", is_chain)
        unused = ~draft.mask()
        assert unused.any()
        spoilt = draft.probs.masked_fill(unused.unsqueeze(-1), torch.nan)
        expected = rejection_laws(draft, p)
        for probs in (spoilt, draft.probs.masked_fill(unused.unsqueeze(-1), 0.0)):
            accept, owed = rejection_laws(Draft(draft.tokens, draft.parents, probs, draft.used), p)
            assert owed.equal(expected[1])
            assert accept.nan_to_num(0.0).equal(expected[0])


def test_laws_of_a_chain_are_those_of_its_tree() -> None:
    """The chain's short cut: another answer than the same draft with its parents named."""
    for kind in ("drawn", "chosen", "mixed"):
        draft, p = random_case(7, 4, 5, kind, True)
        as_tree = Draft(draft.tokens, draft.tree(), draft.probs, draft.used)
        for one, other in zip(rejection_laws(draft, p), rejection_laws(as_tree, p), strict=True):
            assert same(one, other)


Drafts = list[tuple[float, list[int], list[list[float]]]]
"""All drafts of one level: the probability, the children's tokens, the law of each."""


def independent(q: list[float], k: int) -> Drafts:
    """k children drawn from q one by one."""
    drafts: Drafts = [(1.0, [], [])]
    for _ in range(k):
        drafts = [
            (weight * chance, [*tokens, x], [*laws, q])
            for weight, tokens, laws in drafts
            for x, chance in enumerate(q)
            if chance > 0
        ]
    return drafts


def distinct(q: list[float], k: int) -> Drafts:
    """k children drawn without replacement; once q has run out the rest is chosen, lowest first."""
    drafts: Drafts = [(1.0, [], [])]
    for _ in range(k):
        longer: Drafts = []
        for weight, tokens, laws in drafts:
            left = [0.0 if x in tokens else chance for x, chance in enumerate(q)]
            if sum(left) == 0:
                first = min(set(range(len(q))) - set(tokens))
                left = [float(x == first) for x in range(len(q))]
            left = [chance / sum(left) for chance in left]
            longer += [
                (weight * chance, [*tokens, x], [*laws, left])
                for x, chance in enumerate(left)
                if chance > 0
            ]
        drafts = longer
    return drafts


def likeliest(q: list[float], k: int) -> Drafts:
    """The k likeliest, chosen: one draft, with one-hot laws."""
    tokens = sorted(range(len(q)), key=lambda x: -q[x])[:k]
    return [(1.0, tokens, [[float(v == x) for v in range(len(q))] for x in tokens])]


def drawn_then_likeliest(q: list[float], k: int) -> Drafts:
    """One child drawn, then the likeliest of the others chosen."""
    drafts: Drafts = []
    for x, chance in enumerate(q):
        if chance > 0:
            rest = sorted(set(range(len(q))) - {x}, key=lambda v: -q[v])[: k - 1]
            laws = [[float(v == y) for v in range(len(q))] for y in rest]
            drafts.append((chance, [x, *rest], [q, *laws]))
    return drafts


def emitted_law(drafts: Drafts, p: Tensor, used: Callable[[list, list], list] | None = None):
    """Law of the first emitted token, summed over all drafts and all their outcomes."""
    weight = torch.tensor([weight for weight, _, _ in drafts], dtype=torch.float64)
    tokens = torch.tensor([tokens for _, tokens, _ in drafts])
    probs = torch.tensor([laws for _, _, laws in drafts], dtype=torch.float64)
    kept = None if used is None else torch.tensor([used(t, laws) for _, t, laws in drafts])
    draft = Draft(tokens, torch.full_like(tokens, -1), probs, kept)
    accept, owed = rejection_laws(draft, p.expand(len(drafts), 1 + tokens.shape[1], -1))
    total, reached = torch.zeros_like(p), weight
    for i in range(tokens.shape[1]):
        total = total.scatter_add(0, tokens[:, i], reached * accept[:, i])
        reached = reached * (1 - accept[:, i])
    return total + (reached.unsqueeze(1) * owed[:, 0]).sum(0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.sampled_from([independent, distinct, likeliest, drawn_then_likeliest]),
    st.booleans(),
    st.booleans(),
)
def test_every_way_to_draft_a_level_emits_p(seed, k, way, zeros, equal_laws) -> None:
    """Anything that costs losslessness in the shared function, exactly: no draw, no tolerance.

    All drafts of k children over 4 tokens, times all outcomes.
    """
    p, q = random_laws(seed, 4, zeros=zeros), random_laws(seed + 1, 4, zeros=zeros)
    q = p if equal_laws else q
    assert same(emitted_law(way(q.tolist(), k), p), p)


P, Q = law(0.6, 0.25, 0.1, 0.05), law(0.1, 0.2, 0.3, 0.4)


@pytest.mark.parametrize("way", [independent, distinct])
def test_sum_notices_nodes_pruned_by_their_probability(way) -> None:
    """Negative control: whether a drawn node stays may not depend on its own token."""
    bias = emitted_law(way(Q.tolist(), 2), P, lambda tokens, laws: [Q[x] > 0.15 for x in tokens])
    assert (bias - P).abs().max() > 0.02


def test_sum_notices_another_q() -> None:
    """Negative control: children drawn from one law and declared with another."""
    declared = [[0.25] * 4] * 2
    lied = [(weight, tokens, declared) for weight, tokens, _ in independent(Q.tolist(), 2)]
    assert (emitted_law(lied, P) - P).abs().max() > 0.02


def test_sum_notices_resampling_from_p(monkeypatch) -> None:
    """Negative control: a refused token is replaced from p instead of the residual."""
    monkeypatch.setattr(specdec.accept, "accept_or_residual", resampling_from_p)
    assert (emitted_law(independent(Q.tolist(), 2), P) - P).abs().max() > 0.02


def resampling_from_p(r: Tensor, q: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return accept_or_residual(r, q, tokens)[0], r


def test_laws_without_replacement_by_hand() -> None:
    """Earlier siblings that stay in the law, or a law of 0/0 once q has run out."""
    q = law(5, 3, 2)
    expected = torch.stack([law(5, 3, 2), law(0, 3, 2), law(0, 0, 1)])
    assert same(without_replacement(q, torch.tensor([0, 1, 2])), expected)
    expected = torch.stack([law(5, 3, 2), law(5, 3, 0), law(0, 1, 0)])
    assert same(without_replacement(q, torch.tensor([2, 0, 1])), expected)
    ran_out = without_replacement(law(1, 1, 0, 0), torch.tensor([1, 0, 3, 2]))
    expected = torch.stack([law(1, 1, 0, 0), law(1, 0, 0, 0), law(0, 0, 0, 1), law(0, 0, 1, 0)])
    assert same(ran_out, expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_laws_without_replacement_of_every_draft(seed, k, zeros) -> None:
    """A batch dimension mixed up, or siblings taken out of the wrong row's law."""
    q = random_laws(seed, 4, zeros=zeros)
    drafts = distinct(q.tolist(), k)
    tokens = torch.tensor([tokens for _, tokens, _ in drafts])
    laws = without_replacement(q.expand(len(drafts), 4), tokens)
    assert same(laws, torch.tensor([laws for _, _, laws in drafts], dtype=torch.float64))


def test_picks_are_drawn_without_replacement() -> None:
    """Picks in another order than drawn, from another law, or shared between nodes of a level.

    n = 100,000 rows, two nodes: chi-square of the 12 ordered pairs of each node's picks and of the
    16 pairs of the two nodes' first picks; three tests at level 1e-8.
    """
    n, q = 100_000, [law(0.4, 0.3, 0.2, 0.1), law(0.1, 0.2, 0.3, 0.4)]
    rule = Rejection(seed=3)
    logits = torch.stack(q).log().expand(n, 2, 4)
    tokens, laws = rule.pick(logits, torch.full((n,), 5), 1, 2)
    assert laws.shape == (n, 2, 2, 4)
    assert same(laws, without_replacement(logits.exp(), tokens))
    for node, own in enumerate(q):
        pairs = own.unsqueeze(1) * own / (1 - own).unsqueeze(1) * (1 - torch.eye(4))
        draws = tokens[:, node, 0] * 4 + tokens[:, node, 1]
        assert chi_square(draws, pairs.flatten()) > FALSE_ALARM
    both = (q[0].unsqueeze(1) * q[1]).flatten()
    assert chi_square(tokens[:, 0, 0] * 4 + tokens[:, 1, 0], both) > FALSE_ALARM


def test_picks_go_through_temperature_and_truncation() -> None:
    """A q that is not truncated as p is: drafts that p can never accept, or a law that is not q."""
    logits = law(0.4, 0.3, 0.2, 0.1).log().expand(500, 1, 4)
    rule = Rejection(temperature=0.5, top_k=2, seed=1)
    tokens, laws = rule.pick(logits, torch.arange(1, 501), 0, 3)
    assert set(tokens[:, 0, :2].flatten().tolist()) == {0, 1}
    first = law(16, 9, 0, 0)
    assert same(laws[:, 0, 0], first.expand(500, 4))
    assert laws[:, 0, 2].gather(1, tokens[:, 0, 2:]).eq(1).all(), "drawn from an exhausted law"


ROOT_P, ROOT_Q = law(0.35, 0.3, 0.2, 0.1, 0.05), law(0.1, 0.15, 0.2, 0.25, 0.3)
P_AFTER = torch.stack([ROOT_P.roll(x) for x in range(5)])
Q_AFTER = torch.stack([ROOT_Q.roll(2 * x) for x in range(5)])
OTHER_Q = law(0.3, 0.25, 0.2, 0.15, 0.1)
N = 60_000


def p_values(width: int, along_one_run: bool, root_q: Tensor = ROOT_Q) -> list[float]:
    """Chi-square of the first emitted token, and of the second after each accepted first one.

    One round each of N rows: `width` children of the root are drawn from `root_q`, declared as
    drawn from `ROOT_Q`, then a child of each.
    """
    seed, lengths = ([7] * N, torch.arange(1, N + 1)) if along_one_run else (7, torch.full((N,), 9))
    rule = Rejection(seed=seed)
    first, _ = rule.pick(root_q.log().expand(N, 1, 5), lengths, 0, width)
    declared = without_replacement(ROOT_Q.expand(N, 1, 5), first)
    first = first.flatten(1)  # [N, width]
    second, after = rule.pick(Q_AFTER[first].log(), lengths, 1, 1)
    tokens = torch.cat([first, second.flatten(1)], dim=1)
    parents = None
    if width > 1:
        parents = torch.tensor([-1] * width + list(range(width))).expand(N, -1)
    draft = Draft(tokens, parents, torch.cat([declared[:, 0], after[:, :, 0]], dim=1))
    p = torch.cat([ROOT_P.expand(N, 1, 5), P_AFTER[tokens]], dim=1)
    verdict = rule.accept(draft, p.log(), lengths)

    kept = torch.cat([tokens.gather(1, verdict.path), torch.zeros(N, 1).long()], dim=1)
    emitted = kept.scatter(1, verdict.n_accepted.unsqueeze(1), verdict.next_token.unsqueeze(1))
    accepted = verdict.n_accepted > 0
    values = [chi_square(emitted[:, 0], ROOT_P)]
    for x in range(5):
        values.append(chi_square(emitted[accepted & (emitted[:, 0] == x), 1], P_AFTER[x]))
    return values


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("along_one_run", [False, True])
def test_rounds_emit_p(width, along_one_run) -> None:
    """Noise that is shared by a test and a draw; the residual of another node; a sibling skipped.

    n = 60,000 rounds (of as many rows, and of one row at as many lengths), six chi-square tests at
    level 1e-8 in each of six cases: odds of a false alarm below 4e-7.
    """
    assert min(p_values(width, along_one_run)) > FALSE_ALARM


@pytest.mark.parametrize("width", [1, 2])
def test_rounds_notice_resampling_from_p(width, monkeypatch) -> None:
    """Negative control at the same n: the residual law is not used."""
    monkeypatch.setattr(specdec.accept, "accept_or_residual", resampling_from_p)
    assert p_values(width, False)[0] < FALSE_ALARM


@pytest.mark.parametrize("width", [1, 2])
def test_rounds_notice_another_q(width) -> None:
    """Negative control at the same n: the q declared is not the q drawn from."""
    assert p_values(width, False, root_q=OTHER_Q)[0] < FALSE_ALARM
