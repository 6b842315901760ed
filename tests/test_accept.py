"""The rules: the law they share, the walk they share, and their verdicts on trees drawn by hand.

`Rejection`, whose verdicts are draws, has a file of its own.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.accept import (
    Coupled,
    Greedy,
    Rejection,
    Typical,
    Verdict,
    at_parents,
    end_of,
    follow,
    log_law,
    take,
)
from specdec.draft import Draft, ancestors, depths
from tests.builders import (
    CAT,
    DOG,
    EXAMPLE_TOKENS,
    FALSE_ALARM,
    IS,
    ON,
    RAN,
    SAT,
    TO,
    chi_square,
    law,
)
from tests.helpers import EXAMPLE_PARENTS, path_of

GOLDEN = Path(__file__).parent / "golden"
A, B = 8, 9  # two tokens that are nowhere in the example tree

PLAIN_RULES = [Greedy(), Coupled(seed=5)]
RULES = [*PLAIN_RULES, Rejection(seed=5), Typical(seed=5)]


def truncated(*weights: float, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0):
    return log_law(law(*weights).log(), 1.0, top_k, top_p, min_p).exp()


@pytest.mark.parametrize(
    ("weights", "cuts", "expected"),
    [
        ((4, 3, 2, 1), {}, (4, 3, 2, 1)),
        ((4, 3, 2, 1), {"top_k": 2}, (4, 3, 0, 0)),
        ((3, 3, 2, 3), {"top_k": 2}, (3, 3, 0, 3)),  # tied with the second: kept
        ((4, 3, 2, 1), {"top_k": 9}, (4, 3, 2, 1)),
        ((4, 3, 2, 1), {"top_p": 0.5}, (4, 3, 0, 0)),  # 0.4 falls short, 0.7 reaches
        ((1, 2, 3, 4), {"top_p": 0.3}, (0, 0, 0, 4)),  # the likeliest alone, over the edge
        ((1, 1, 1, 1), {"top_p": 0.3}, (1, 1, 0, 0)),  # ties: the lowest ids first
        ((4, 3, 2, 1), {"min_p": 0.45}, (4, 3, 2, 0)),
        ((4, 4, 2, 1), {"min_p": 1.0}, (4, 4, 0, 0)),
        ((4, 3, 2, 1), {"top_k": 2, "top_p": 0.5}, (4, 0, 0, 0)),  # top-k first: 4/7 reaches
        ((5, 2, 2, 1), {"top_p": 0.6, "min_p": 0.5}, (5, 0, 0, 0)),
    ],
)
def test_truncation_by_hand(weights, cuts, expected) -> None:
    """The nucleus without the token that reaches top_p, or cut before top-k; ties dropped."""
    assert torch.allclose(truncated(*weights, **cuts), law(*expected), atol=1e-12, rtol=0)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.floats(0.1, 5),
    st.none() | st.integers(1, 15),
    st.just(1.0) | st.floats(0.01, 0.999),
    st.just(0.0) | st.floats(0.001, 1.0),
)
def test_law_is_that_of_transformers(seed, n_tokens, temperature, top_k, top_p, min_p) -> None:
    """Truncations in another order, on untempered logits, or not renormalised.

    Cases in which a probability lies on the very edge of a cut are left out: there the order of
    summation decides.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, n_tokens, generator=generator, dtype=torch.float64)
    ids = torch.zeros(3, 1, dtype=torch.long)
    warped = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k is not None:
        warped = TopKLogitsWarper(top_k)(ids, warped)
    if top_p < 1.0:
        ordered = warped.softmax(-1).sort(-1, descending=True).values
        assume(((ordered.cumsum(-1) - top_p).abs() > 1e-9).all())
        warped = TopPLogitsWarper(top_p)(ids, warped)
    if min_p > 0.0:
        p = warped.softmax(-1)
        edge = min_p * p.amax(-1, keepdim=True)
        assume(((p / edge - 1).abs() > 1e-6).all() or min_p == 1.0)
        warped = MinPLogitsWarper(min_p)(ids, warped)
    torch.testing.assert_close(
        log_law(logits, temperature, top_k, top_p, min_p),
        warped.log_softmax(-1),
        rtol=0,
        atol=1e-10,
    )


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_laws_are_float32_or_better(given_dtype, dtype) -> None:
    """Probabilities in half precision, which do not sum to one."""
    log_p = log_law(torch.randn(2, 3, 50).to(given_dtype), 0.7, None, 0.9, 0.01)
    assert log_p.dtype == dtype
    assert torch.allclose(log_p.exp().sum(-1), torch.ones(2, 3, dtype=dtype), atol=1e-5)


def plain_deepest(
    parents: list[int], passing: list[bool], score: list[float] | None
) -> tuple[list[int], int]:
    """The path `follow` should take, and its length, by walking up from every node."""
    best, best_rank = -1, (0, -float("inf"))
    for node in range(len(parents)):
        path = path_of(parents, node)
        rank = (len(path), 0.0 if score is None else score[node])
        if all(passing[i] for i in path) and rank > best_rank:
            best, best_rank = node, rank
    path = path_of(parents, best)
    return path, len(path)


@st.composite
def judged_trees(draw):
    """Rows of one width: parents, passing, used (never below an unused node), scores."""
    n_rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    rows = []
    for _ in range(n_rows):
        parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
        passing = draw(st.lists(st.sampled_from([True, True, False]), min_size=n, max_size=n))
        marked = draw(st.lists(st.sampled_from([True, True, False]), min_size=n, max_size=n))
        used = [all(marked[j] for j in path_of(parents, i)) for i in range(n)]
        score = draw(st.lists(st.sampled_from([-2.0, -1.0, -0.5]), min_size=n, max_size=n))
        rows.append((parents, passing, used, score))
    return rows


@settings(max_examples=150, deadline=None)
@given(judged_trees(), st.booleans(), st.booleans(), st.booleans())
def test_follow_against_a_plain_walk(rows, is_chain, has_score, has_used) -> None:
    """A node reached through one that failed; unused nodes; the wrong winner among equals."""
    n = len(rows[0][0])
    if is_chain:
        rows = [
            (list(range(-1, n - 1)), passing, [all(used[: i + 1]) for i in range(n)], score)
            for _, passing, used, score in rows
        ]
    parents, passing, used, score = (torch.tensor(part) for part in zip(*rows, strict=True))
    draft = Draft(
        torch.zeros_like(parents), None if is_chain else parents, used=used if has_used else None
    )
    path, counts = follow(draft, passing, score if has_score else None)
    assert path.shape == parents.shape
    for b, (above, passes, counted, scores) in enumerate(rows):
        passes = [ok and (u or not has_used) for ok, u in zip(passes, counted, strict=True)]
        expected, length = plain_deepest(above, passes, scores if has_score else None)
        assert counts[b] == length
        assert path[b, :length].tolist() == expected


def test_lookups_along_the_tree() -> None:
    """Parents off by one (the root is row 0 of `values`), or the bonus read at the wrong node."""
    draft = Draft(torch.tensor([EXAMPLE_TOKENS]), torch.tensor([EXAMPLE_PARENTS]))
    values = torch.arange(8).unsqueeze(0) * 10
    assert at_parents(values, draft).tolist() == [[0, 0, 10, 10, 20, 30, 50]]
    assert at_parents(values, replace(draft, parents=None)).tolist() == [
        [0, 10, 20, 30, 40, 50, 60]
    ]
    wide = torch.stack([values, values + 1], dim=2)
    assert at_parents(wide, draft)[..., 1].tolist() == [[1, 1, 11, 11, 21, 31, 51]]

    path = torch.tensor([[0, 2, 5], [1, 4, 0], [0, 0, 0]])
    assert end_of(path, torch.tensor([3, 2, 0])).tolist() == [6, 5, 0]
    assert end_of(path[:, :0], torch.tensor([0, 0, 0])).tolist() == [0, 0, 0]
    assert take(values.expand(3, -1), torch.tensor([6, 5, 0])).tolist() == [60, 50, 0]


def peaked(*predictions: list[int]) -> Tensor:
    """Logits [B, M, 10] so sharp that every rule predicts just these; no noise reaches 50."""
    return 50.0 * F.one_hot(torch.tensor(predictions), 10).double()


def example(n_rows: int = 1, **changes) -> Draft:
    tokens = torch.tensor([EXAMPLE_TOKENS]).expand(n_rows, -1)
    return replace(Draft(tokens, torch.tensor([EXAMPLE_PARENTS]).expand(n_rows, -1)), **changes)


def outcome(verdict: Verdict, row: int = 0) -> tuple[list[int], int]:
    n = int(verdict.n_accepted[row])
    return verdict.path[row, :n].tolist(), int(verdict.next_token[row])


# after            the  cat  dog  sat is ran  on to      accepted   next
EXAMPLE_CASES = [
    ([CAT, SAT, RAN, ON, A, TO, B, A], [0, 2, 5], B),
    ([DOG, SAT, RAN, ON, A, TO, A, B], [1, 4, 6], B),
    ([CAT, IS, RAN, ON, B, TO, A, A], [0, 3], B),
    ([CAT, DOG, RAN, ON, A, TO, A, A], [0], DOG),  # deeper agreement lies off the path
    ([A, SAT, RAN, ON, A, TO, B, B], [], A),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("after", "path", "next_token"), EXAMPLE_CASES)
def test_verdicts_on_the_example_tree(rule, after, path, next_token) -> None:
    """A node accepted below a refused one; the next token read at the wrong node."""
    verdict = rule.accept(example(), peaked(after), torch.tensor([3]))
    assert outcome(verdict) == (path, next_token)


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_of_a_batch(rule) -> None:
    """Rows that share a tree, a path or a length."""
    cases = EXAMPLE_CASES
    logits = peaked(*(after for after, _, _ in cases))
    verdict = rule.accept(example(len(cases)), logits, torch.arange(1, 1 + len(cases)))
    for b, (_, path, next_token) in enumerate(cases):
        assert outcome(verdict, b) == (path, next_token)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("as_tree", [False, True])
@pytest.mark.parametrize(
    ("after", "n", "next_token"),
    [([CAT, SAT, ON, B], 3, B), ([CAT, SAT, B, A], 2, B), ([B, SAT, ON, A], 0, B)],
)
def test_verdicts_on_a_chain(rule, as_tree, after, n, next_token) -> None:
    """The bonus token dropped; a chain judged differently without its parents than with them."""
    parents = torch.tensor([[-1, 0, 1]]) if as_tree else None
    draft = Draft(torch.tensor([[CAT, SAT, ON]]), parents)
    verdict = rule.accept(draft, peaked(after), torch.tensor([3]))
    assert outcome(verdict) == (list(range(n)), next_token)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("as_tree", [False, True])
def test_unused_nodes_are_not_accepted(rule, as_tree) -> None:
    """A node that is masked but holds the right token: it must end the path of its row only."""
    parents = torch.tensor([[-1, 0, 1]]).expand(4, -1) if as_tree else None
    used = torch.tensor([[True] * n + [False] * (3 - n) for n in (3, 2, 1, 0)])
    draft = Draft(torch.tensor([[CAT, SAT, ON]]).expand(4, -1), parents, used=used)
    verdict = rule.accept(draft, peaked(*[[CAT, SAT, ON, B]] * 4), torch.tensor([3, 4, 5, 6]))
    assert verdict.n_accepted.tolist() == [3, 2, 1, 0]
    assert verdict.next_token.tolist() == [B, ON, SAT, CAT]


@pytest.mark.parametrize("rule", RULES)
def test_empty_draft(rule) -> None:
    """Plain decoding: no node to look at, one token to emit."""
    verdict = rule.accept(Draft.empty(2), peaked([A], [B]), torch.tensor([3, 4]))
    assert verdict.path.shape == (2, 0)
    assert verdict.n_accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [A, B]


@pytest.mark.parametrize("rule", RULES)
def test_empty_tree(rule) -> None:
    """A tree drafter that found nothing names its parents, too: [B, 0]."""
    nothing = torch.zeros(2, 0, dtype=torch.long)
    verdict = rule.accept(Draft(nothing, nothing), peaked([A], [B]), torch.tensor([3, 4]))
    assert verdict.n_accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [A, B]


@pytest.mark.parametrize("rule", PLAIN_RULES)
def test_second_copy_of_a_sibling_may_go_deeper(rule) -> None:
    """A walk that takes the first child that agrees instead of the deepest path.

    the-cat(0), the-cat(1)-sat(2): both copies agree, only the second has a child.
    """
    draft = Draft(torch.tensor([[CAT, CAT, SAT]]), torch.tensor([[-1, -1, 1]]))
    verdict = rule.accept(draft, peaked([CAT, SAT, SAT, B]), torch.tensor([3]))
    assert outcome(verdict) == ([1, 2], B)


def test_rejection_takes_the_first_copy_of_a_sibling() -> None:
    """A copy that was never tested: what passes for sure leaves nothing to its later siblings."""
    draft = Draft(torch.tensor([[CAT, CAT, SAT]]), torch.tensor([[-1, -1, 1]]))
    verdict = Rejection().accept(draft, peaked([CAT, SAT, SAT, B]), torch.tensor([3]))
    assert outcome(verdict) == ([0], SAT)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """A draft that agrees with another of the likeliest tokens than plain decoding takes."""
    logits = torch.zeros(1, 3, 10)
    logits[0, 0, [3, 5]] = 1.0
    logits[0, 2, [4, 6]] = 1.0
    tokens, parents = torch.tensor([[5, 3]]), torch.tensor([[-1, -1]])
    assert outcome(Greedy().accept(Draft(tokens, parents), logits, torch.tensor([1]))) == ([1], 4)
    assert outcome(Greedy().accept(Draft(tokens), logits, torch.tensor([1]))) == ([], 3)
    assert Greedy().pick(logits, torch.tensor([1]), 0)[0].tolist() == [[[3], [0], [4]]]


def random_draft(seed: int, n_rows: int, n: int, n_tokens: int, is_chain: bool) -> Draft:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(n_tokens, (n_rows, n), generator=generator)
    parents = (torch.rand(n_rows, n, generator=generator) * (torch.arange(n) + 1)).long() - 1
    reached = torch.rand(n_rows, n, generator=generator) < 0.85
    table = ancestors(parents) if not is_chain else torch.ones(n_rows, n, n).tril().bool()
    used = (reached.unsqueeze(1) | ~table).all(-1)
    return Draft(tokens, None if is_chain else parents, used=used)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.booleans())
def test_coupled_picks_what_plain_decoding_would(seed, n, is_chain) -> None:
    """Noise keyed by the round or the node instead of the token's index and its row's seed.

    Plain decoding is the rule on an empty draft, one position at a time.
    """
    n_rows, n_tokens = 2, 3
    draft = random_draft(seed, n_rows, n, n_tokens, is_chain)
    logits = torch.randn(
        n_rows, 1 + n, n_tokens, generator=torch.Generator().manual_seed(seed + 1)
    ).double()
    lengths = torch.tensor([4, 9])
    rule = Coupled(temperature=0.8, top_p=0.9, seed=seed)
    verdict = rule.accept(draft, logits, lengths)
    parents, depth = draft.tree().tolist(), depths(draft.tree()).tolist()
    for b in range(n_rows):
        alone = rule.for_row(b)

        def plain(node: int, b: int = b, alone: Coupled = alone) -> int:
            index = int(lengths[b]) + (depth[b][node] if node >= 0 else 0)
            after = logits[b, node + 1][None, None]
            return int(alone.accept(Draft.empty(1), after, torch.tensor([index])).next_token)

        passing = [
            bool(draft.mask()[b, i]) and int(draft.tokens[b, i]) == plain(parents[b][i])
            for i in range(n)
        ]
        path, _ = plain_deepest(parents[b], passing, None)
        assert outcome(verdict, b) == (path, plain(path[-1] if path else -1))


@pytest.mark.parametrize("make", [Coupled, Rejection, Typical])
@pytest.mark.parametrize("seed", [7, [7, 3, 7]])
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_row_alone_decides_as_in_its_batch(make, seed, is_chain) -> None:
    """Noise that depends on the row's number or on the other rows, beyond seed + b."""
    rule = make(seed=seed)
    draft = random_draft(1, 3, 12, 4, is_chain)
    logits = torch.randn(3, 13, 4, generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([5, 2, 5])
    verdict = rule.accept(draft, logits, lengths)
    tokens, q = rule.pick(logits, lengths, 1, 2)
    for b in range(3):
        row, alone = slice(b, b + 1), rule.for_row(b)
        one = Draft(
            draft.tokens[row],
            None if draft.parents is None else draft.parents[row],
            used=draft.mask()[row],
        )
        assert outcome(alone.accept(one, logits[row], lengths[row])) == outcome(verdict, b)
        tokens_alone, q_alone = alone.pick(logits[row], lengths[row], 1, 2)
        assert tokens_alone.equal(tokens[row])
        assert q is None or q_alone.equal(q[row])


@pytest.mark.parametrize("make", [Coupled, Rejection, Typical])
def test_row_b_draws_from_seed_plus_b(make) -> None:
    """Rows that share their noise, so that equal prompts give equal texts."""
    logits = torch.randn(20, generator=torch.Generator().manual_seed(2)).expand(40, 1, -1)
    lengths = torch.full((40,), 6)
    drawn = make(seed=5).accept(Draft.empty(40), logits, lengths).next_token
    listed = make(seed=list(range(5, 45))).accept(Draft.empty(40), logits, lengths).next_token
    assert drawn.equal(listed)
    assert len(drawn.unique()) > 1
    assert make(seed=5).for_row(3) == make(seed=8)
    assert make(seed=[2, 4]).for_row(1) == make(seed=4)


@pytest.mark.parametrize("rule", PLAIN_RULES)
def test_scores_are_what_the_next_token_maximises(rule) -> None:
    """Scores that belong to another token's noise: a near-tie report about the wrong position."""
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    lengths = torch.arange(1, 51)
    verdict = rule.accept(Draft.empty(50), logits.unsqueeze(1), lengths)
    assert rule.scores(logits, lengths).argmax(-1).equal(verdict.next_token)


def test_coupled_drafters_pick_with_the_target_s_noise() -> None:
    """A pick at depth d that is perturbed for another index: a perfect drafter refused."""
    rule = Coupled(temperature=1.3, top_k=4, seed=11)
    logits = torch.randn(40, 6, 9, generator=torch.Generator().manual_seed(0)).double()
    lengths = torch.arange(1, 41)
    picked = [rule.pick(logits[:, d : d + 1], lengths, d)[0].flatten() for d in range(5)]
    verdict = rule.accept(Draft(torch.stack(picked, dim=1)), logits, lengths)
    assert verdict.n_accepted.tolist() == [5] * 40
    assert rule.pick(logits[:, 5:], lengths, 5)[0].flatten().equal(verdict.next_token)


@pytest.mark.parametrize("rule", [Greedy(), Coupled(seed=1), Typical()])
def test_picks_are_chosen_best_first(rule) -> None:
    """Children that repeat a token, or a law declared for tokens that were not drawn."""
    logits = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)).double()
    tokens, q = rule.pick(logits, torch.arange(1, 6), 2, 8)
    assert q is None
    assert tokens.sort(-1).values.equal(torch.arange(8).expand(5, 3, 8))
    assert tokens[..., 0].equal(rule.pick(logits, torch.arange(1, 6), 2)[0][..., 0])
    if not isinstance(rule, Coupled):
        assert tokens.equal(logits.argsort(-1, descending=True))


def test_coupled_draws_from_p() -> None:
    """Noise of the wrong scale. n = 100,000 tokens of one row, level 1e-8."""
    p, n = law(0.5, 0.3, 0.15, 0.05), 100_000
    rule = Coupled(seed=[3] * n)
    logits = p.log().expand(n, 1, -1)
    verdict = rule.accept(Draft.empty(n), logits, torch.arange(1, n + 1))
    assert chi_square(verdict.next_token, p) > FALSE_ALARM


@pytest.mark.parametrize(
    ("epsilon", "delta", "typical"),
    [  # p = [0.5, 0.3, 0.2]: exp(-H) = 0.357
        (0.25, 0.3, {0, 1, 2}),  # delta exp(-H) = 0.107
        (0.25, 0.5, {0, 1, 2}),  # 0.179
        (0.25, 0.6, {0, 1}),  # 0.214
        (0.25, 0.9, {0, 1}),  # epsilon, below 0.321
        (0.45, 0.9, {0}),  # 0.321
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_typical_threshold_by_hand(epsilon, delta, typical, temperature) -> None:
    """max in place of min, exp(H) in place of exp(-H), or the law before the temperature."""
    p, n = law(0.5, 0.3, 0.2), 20_000
    rule, logits = Typical(epsilon, delta, temperature, seed=1), temperature * p.log()
    draft = Draft(torch.arange(3).unsqueeze(1))
    verdict = rule.accept(draft, logits.expand(3, 2, -1), torch.tensor([1, 1, 1]))
    assert {x for x in range(3) if verdict.n_accepted[x]} == typical

    passing = torch.tensor([x in typical for x in range(3)])
    verdict = rule.accept(Draft.empty(n), logits.expand(n, 1, -1), torch.arange(1, n + 1))
    cut = torch.where(passing, p, 0.0)
    assert set(verdict.next_token.tolist()) == typical
    if len(typical) > 1:  # n = 20,000, level 1e-8
        assert chi_square(verdict.next_token, cut / cut.sum()) > FALSE_ALARM


def test_typical_takes_the_longest_path_then_the_likeliest() -> None:
    """The first of several equally long paths, or a likelier but shorter one."""
    rule, lengths = Typical(temperature=1.0), torch.tensor([1])
    p = law(0.3, 0.45, 0.25)
    draft = Draft(torch.tensor([[0, 1]]), torch.tensor([[-1, -1]]))
    verdict = rule.accept(draft, p.log().expand(1, 3, -1), lengths)
    assert outcome(verdict)[0] == [1]
    # 0 then 2 (0.3 * 0.25) is longer than 1; of the three of depth two, 1 then 0 is likeliest
    longer = Draft(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, -1, 0]]))
    assert outcome(rule.accept(longer, p.log().expand(1, 4, -1), lengths))[0] == [0, 2]
    both = Draft(torch.tensor([[0, 1, 2, 2, 0]]), torch.tensor([[-1, -1, 0, 1, 1]]))
    assert outcome(rule.accept(both, p.log().expand(1, 6, -1), lengths))[0] == [1, 4]
    # the whole path counts: 1 then 2 (0.45 * 0.25) is likelier than 0 then 0 (0.3 * 0.3)
    pair = Draft(torch.tensor([[0, 1, 0, 2]]), torch.tensor([[-1, -1, 0, 1]]))
    assert outcome(rule.accept(pair, p.log().expand(1, 5, -1), lengths))[0] == [1, 3]


@pytest.mark.parametrize("name", ["medusa_tree", "medusa_tree_63"])
def test_medusa_s_own_verdicts(name) -> None:
    """Another threshold, likelihood or tie-break than Medusa's `evaluate_posterior`."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    case = load_file(GOLDEN / name / "case.safetensors")
    choices = sorted(map(tuple, config["choices"]), key=lambda choice: (len(choice), choice))
    parents = torch.tensor(
        [[choices.index(choice[:-1]) if len(choice) > 1 else -1 for choice in choices]]
    )
    draft = Draft(case["tree_tokens"][1:].unsqueeze(0), parents)
    assert ancestors(parents)[0].equal(case["attention_mask"][1:, 1:].bool()), "other node order"

    settings = config["typical"]
    typical = Typical(
        epsilon=settings["posterior_threshold"],
        delta=settings["posterior_alpha"],
        temperature=settings["temperature"],
    )
    verdicts = [
        rule.accept(draft, case[logits].unsqueeze(0), torch.tensor([9]))
        for rule, logits in (
            (Greedy(), "verify_logits"),
            (Greedy(), "verify_logits_agreeing"),
            (typical, "verify_logits_agreeing"),
        )
    ]
    assert [int(verdict.n_accepted) for verdict in verdicts] == case["accepted"].tolist()
    expected = (case["accepted_path_agreeing"][1:] - 1).tolist()
    assert outcome(verdicts[1])[0] == expected
    assert outcome(verdicts[2])[0] == expected
    after = case["verify_logits_agreeing"][case["accepted_path_agreeing"][-1]]
    assert outcome(verdicts[1])[1] == int(after.argmax())


@pytest.mark.parametrize("rule", [Coupled, Rejection])
@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("temperature", [0, 0.0, -1.0, float("inf"), float("nan")]),
        ("top_k", [0, -1]),
        ("top_p", [0.0, -0.1, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.5, float("nan")]),
    ],
)
def test_sampling_arguments_that_do_not_fit(rule, argument, values) -> None:
    """A law of NaNs, of nothing, or of everything, found out many layers later."""
    for value in values:
        with pytest.raises(ValueError, match=rf"^{argument}: .*got {value}"):
            rule(**{argument: value})


@pytest.mark.parametrize("argument", ["epsilon", "delta", "temperature"])
@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
def test_typical_arguments_that_do_not_fit(argument, value) -> None:
    """A threshold that every token passes, or none."""
    with pytest.raises(ValueError, match=rf"^{argument}: .*got {value}"):
        Typical(**{argument: value})


@pytest.mark.parametrize("rule", [Coupled, Rejection, Typical])
def test_seeds_must_fit_the_batch(rule) -> None:
    """A list of seeds that is one short, or broadcast."""
    rule(seed=[1, 2]).check(2)
    rule(seed=1).check(2)
    for seeds in ([], [1], [1, 2, 3]):
        with pytest.raises(ValueError, match=rf"^seed: .*\(2\), got {len(seeds)}"):
            rule(seed=seeds).check(2)


def test_only_typical_is_lossy() -> None:
    """A lossy rule that a table lists among the lossless ones."""
    assert [rule.lossless for rule in RULES] == [True, True, True, False]
