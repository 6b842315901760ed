"""The draft model: its cache over the rounds, what it feeds, what it declares."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.accept import Coupled, Greedy, Rejection, without_replacement
from specdec.draft import Draft, depths
from specdec.drafters import DraftModel
from specdec.generate import generate
from specdec.protocol import Context
from tests.builders import Scripted, Watched, context_of, oracle
from tests.helpers import path_of, tiny_transformer

TARGET = tiny_transformer(tie_word_embeddings=False)
SMALL = tiny_transformer(1, tie_word_embeddings=False, num_hidden_layers=1)
PROMPTS = [torch.tensor([3]), torch.tensor([5, 1, 4]), torch.tensor([2, 7, 1, 8, 2, 8, 1])]
RULES = [Greedy(), Coupled(seed=3), Rejection(seed=3)]
SHAPES = [{"n_drafts": 3}, {"n_drafts": 2, "branching": 2}, {"n_drafts": 3, "branching": [3, 1, 2]}]


def close_to_target(noise: float = 0.15) -> Any:
    """A draft model that agrees often but not always: the target with disturbed weights."""
    model = tiny_transformer(tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_target_as_its_own_draft_model_is_always_accepted(rule, shape) -> None:
    """A draft that starts from the wrong token or a stale cache, noise that is not the target's.

    Budgets of whole rounds, so that none is cut. Under Rejection p and q differ by rounding only.
    """
    n = shape["n_drafts"] + 1
    generation = generate(
        TARGET, PROMPTS, DraftModel(TARGET, **shape), max_new_tokens=4 * n, rule=rule
    )
    assert len(generation.rounds) == 4
    for r in generation.rounds:
        assert r.n_accepted.tolist() == [n - 1] * 3
    assert generation.metrics.acceptance_rate == 1.0


def same_draft(one: Draft, other: Draft, rows: Tensor) -> None:
    """Equal drafts in `rows` [B] bool: tokens and parents exactly, laws to rounding."""
    assert one.tokens[rows].equal(other.tokens[rows])
    assert one.tree()[rows].equal(other.tree()[rows])
    assert (one.probs is None) == (other.probs is None)
    if one.probs is not None:
        torch.testing.assert_close(one.probs[rows], other.probs[rows], rtol=0, atol=1e-10)


@dataclass
class Replaying:
    """Holds every draft of `inner` against that of a fresh state, and may hand on another.

    `swap(n, draft, context)` gives what is verified in round n in place of the draft.
    """

    inner: DraftModel
    swap: Callable[[int, Draft, Context], Draft]
    taps: tuple[int, ...] = ()
    n_rounds: int = field(default=0, init=False)

    def begin(self, target: Any, batch_size: int, max_length: int) -> Scripted:
        state = self.inner.begin(target, batch_size, max_length)

        def script(context: Context) -> Draft:
            draft = state.propose(context)
            fresh = self.inner.begin(target, batch_size, max_length).propose(context)
            same_draft(draft, fresh, context.live)
            self.n_rounds += 1
            return self.swap(self.n_rounds, draft, context)

        return Scripted(script)


def nothing(n: int, draft: Draft, context: Context) -> Draft:
    """Every second draft is discarded, every fifth is masked."""
    if n % 5 == 0:
        return replace(draft, used=torch.zeros_like(draft.tokens, dtype=torch.bool))
    return Draft.empty(len(draft.tokens)) if n % 2 else draft


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("swap", ["none", "discarded", "another"])
def test_every_draft_is_that_of_a_fresh_state(rule, shape, swap) -> None:
    """Replay: a cache that keeps refused tokens, loses accepted ones or shifts their positions.

    Losslessness is blind to it. Ragged rows with budgets of their own, partial acceptance, rows
    that end, and rounds in which a wrapper verified nothing or another drafter's nodes.
    """
    plain = generate(TARGET, PROMPTS, max_new_tokens=19, rule=rule).sequences
    other = oracle(plain, n_right=lambda length: length % 3)
    swaps = {
        "none": lambda n, draft, context: draft,
        "discarded": nothing,
        "another": lambda n, draft, context: draft if n % 2 else other(context),
    }
    drafter = Replaying(DraftModel(close_to_target(), **shape), swaps[swap])
    generation = generate(TARGET, PROMPTS, drafter, max_new_tokens=[15, 5, 11], rule=rule)
    assert drafter.n_rounds == len(generation.rounds) > 3
    accepted = {int(n) for r in generation.rounds for n in r.n_accepted}
    assert len(accepted) > 1, "always or never accepted: nothing was tried"
    if not isinstance(rule, Rejection):
        for new, sequence, prompt in zip(generation.sequences, plain, PROMPTS, strict=True):
            assert new.equal(sequence[: len(new)]), prompt


@pytest.mark.parametrize("shape", SHAPES)
def test_only_what_is_missing_is_fed(shape) -> None:
    """The whole prefix fed again in every round, or accepted nodes that are thrown away.

    A round feeds what the row gained beyond the accepted nodes that were fed, then all levels of
    the draft but the last.
    """
    model = Watched(close_to_target())
    prompt, rule = PROMPTS[2], Coupled(seed=1)
    generation = generate(TARGET, prompt, DraftModel(model, **shape), max_new_tokens=30, rule=rule)
    calls = iter(n for n, _ in model.calls)
    missing = len(prompt)
    for r in generation.rounds:
        if not r.draft.n_nodes:  # no budget left for a draft
            continue
        levels = depths(r.draft.tree())[0].bincount()[1:].tolist()
        assert next(calls) == missing
        assert [next(calls) for _ in levels[1:]] == levels[:-1]
        missing = len(r.new_tokens[0]) - min(int(r.n_accepted), len(levels) - 1)
    assert next(calls, None) is None
    assert len({int(r.n_accepted) for r in generation.rounds}) > 1


def test_long_prompts_are_fed_in_pieces() -> None:
    """A boundary of 512 tokens at which a token is lost or fed twice, in some rows only.

    Rows of 1,100, 3, 521 and 520 tokens; all but the last pieces go without logits.
    """
    model = tiny_transformer(1, tie_word_embeddings=False, max_position_embeddings=2000)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(13, (n,), generator=generator).tolist() for n in (1100, 3, 521, 520)]
    watched = Watched(model)
    state = DraftModel(watched, 3).begin(model, 4, 1200)
    draft = state.propose(context_of(rows))
    assert watched.calls == [
        (512, False),
        (512, False),
        (68, False),
        (8, True),
        (1, True),
        (1, True),
    ]
    for row, drafted in zip(rows, draft.tokens.tolist(), strict=True):
        text = list(row)
        for _ in range(3):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        assert drafted == text[len(row) :]

    rows = [
        [*row, *drafted[:2], 1] for row, drafted in zip(rows, draft.tokens.tolist(), strict=True)
    ]
    again = state.propose(context_of(rows))
    assert watched.calls[6:] == [(1, True)] * 3, "the two nodes that came true are kept"
    fresh = DraftModel(model, 3).begin(model, 4, 1200).propose(context_of(rows))
    same_draft(again, fresh, torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("shape", SHAPES)
def test_declared_laws_are_those_the_nodes_were_drawn_from(shape) -> None:
    """q of another node, of untempered logits, or that forgets the earlier siblings.

    Recomputed for every node by a pass over its own path.
    """
    rule = Rejection(temperature=0.8, top_k=6, seed=2)
    rows = [[3], [5, 1, 4], [2, 7, 1, 8]]
    draft = DraftModel(SMALL, **shape).begin(TARGET, 3, 40).propose(context_of(rows, rule=rule))
    assert draft.probs is not None
    assert draft.probs.shape == (*draft.tokens.shape, 13)
    for b, row in enumerate(rows):
        parents, tokens = draft.tree()[b].tolist(), draft.tokens[b].tolist()
        for i, parent in enumerate(parents):
            text = row + [tokens[j] for j in path_of(parents, parent)]
            logits = SMALL(torch.tensor([text])).logits[0, -1] / 0.8
            q = logits.masked_fill(logits < logits.topk(6).values[-1], -torch.inf).softmax(-1)
            earlier = [tokens[j] for j in range(i) if parents[j] == parent]
            expected = without_replacement(q, torch.tensor([*earlier, tokens[i]]))[-1]
            torch.testing.assert_close(draft.probs[b, i], expected, rtol=0, atol=1e-10)
            assert tokens[i] not in earlier


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, Coupled)])
@pytest.mark.parametrize("shape", SHAPES)
def test_chosen_nodes_are_the_likeliest(rule, shape) -> None:
    """`draw=False` that draws all the same, or that declares a law it did not draw from."""
    rows = [[3], [5, 1, 4], [2, 7, 1, 8]]
    drafter = DraftModel(SMALL, draw=False, **shape)
    draft = drafter.begin(TARGET, 3, 40).propose(context_of(rows, rule=rule))
    assert draft.probs is None
    for b, row in enumerate(rows):
        parents, tokens = draft.tree()[b].tolist(), draft.tokens[b].tolist()
        for parent in set(parents):
            text = row + [tokens[j] for j in path_of(parents, parent)]
            children = [tokens[i] for i in range(len(tokens)) if parents[i] == parent]
            best = SMALL(torch.tensor([text])).logits[0, -1].topk(len(children)).indices
            assert children == best.tolist()


def test_shape_of_a_tree() -> None:
    """Levels of the wrong width, or children that name a parent of another level.

    Three children of the root, one of each, two of each of those.
    """
    drafter = DraftModel(SMALL, 3, branching=[3, 1, 2])
    draft = drafter.begin(TARGET, 1, 40).propose(context_of([[1, 2]]))
    assert draft.parents.tolist() == [[-1, -1, -1, 0, 1, 2, 3, 3, 4, 4, 5, 5]]
    chain = DraftModel(SMALL, 3).begin(TARGET, 1, 40).propose(context_of([[1, 2]]))
    assert chain.parents is None
    assert chain.tokens.shape == (1, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_deeper_than_the_budget(shape) -> None:
    """Levels drafted, at a model call each, that cannot count, or one too few."""
    for left in range(5):
        model = Watched(SMALL)
        state = DraftModel(model, **shape).begin(TARGET, 2, 40)
        draft = state.propose(context_of([[1, 2], [3]], depth_left=[left, min(left, 1)]))
        depth = min(left, shape["n_drafts"])
        assert int(depths(draft.tree()).max()) == depth if depth else not draft.n_nodes
        assert len(model.calls) == depth


def test_a_finished_row_keeps_its_place() -> None:
    """A row that no longer grows: an index out of range, or a commit of what it never had."""
    generation = generate(
        TARGET, PROMPTS, DraftModel(SMALL, 3), max_new_tokens=[1, 20, 3], rule=Coupled(seed=2)
    )
    plain = generate(TARGET, PROMPTS, max_new_tokens=[1, 20, 3], rule=Coupled(seed=2))
    for one, other in zip(generation.sequences, plain.sequences, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_drafts": 0}, "n_drafts: expected at least 1, got 0"),
        ({"n_drafts": 2, "branching": 0}, "branching: expected numbers in 1..13, one or 2, got 0"),
        ({"n_drafts": 2, "branching": 14}, "branching: expected numbers in 1..13"),
        ({"n_drafts": 2, "branching": [1, 2, 3]}, "branching: expected numbers in 1..13, one or 2"),
        ({"n_drafts": 2, "branching": []}, "branching: expected numbers in 1..13, one or 2"),
    ],
)
def test_shapes_that_do_not_fit(arguments, message) -> None:
    """A tree of no nodes or more children than tokens, found out inside `topk`."""
    with pytest.raises(ValueError, match=re.escape(message)):
        DraftModel(SMALL, **arguments)


def test_models_that_do_not_fit_the_target() -> None:
    """Ids of another vocabulary, or positions that the draft model has never seen."""
    other = tiny_transformer(vocab_size=12)
    with pytest.raises(ValueError, match=r"^model: a vocabulary of 12 .* target's of 13$"):
        generate(TARGET, PROMPTS, DraftModel(other), max_new_tokens=4)
    short = tiny_transformer(max_position_embeddings=16)
    assert len(generate(TARGET, PROMPTS[2], DraftModel(short), max_new_tokens=9).sequences[0]) == 16
    with pytest.raises(ValueError, match=r"^model: its max_position_embeddings=16 .* 17 tokens$"):
        generate(TARGET, PROMPTS[2], DraftModel(short), max_new_tokens=10)
