"""The loop: where rows end, what drafters are told, what is refused, and who shares a batch."""

import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.accept import Coupled, Greedy, Rejection, Rule, Verdict
from specdec.draft import Draft
from specdec.drafters import DraftModel, PromptLookup
from specdec.generate import decode, generate
from specdec.protocol import FINAL, Context, Drafter, Output
from tests.builders import Scripted, Watched, oracle
from tests.helpers import tiny_transformer

TARGET = tiny_transformer(tie_word_embeddings=False)
DRAFT_MODEL = tiny_transformer(1, tie_word_embeddings=False, num_hidden_layers=1)
VOCAB = TARGET.vocab_size
PROMPTS = [torch.tensor([3]), torch.tensor([5, 1, 4]), torch.tensor([2, 7, 1, 8, 2, 8, 1])]
RULE = Coupled(seed=14)


def new_tokens(prompt: Tensor, n: int, rule: Rule = RULE, row: int = 0) -> list[int]:
    """The first `n` tokens of plain decoding."""
    generation = generate(TARGET, prompt, max_new_tokens=n, rule=rule.for_row(row))
    return generation.new_tokens[0].tolist()


PLAIN = [new_tokens(prompt, 24, row=b) for b, prompt in enumerate(PROMPTS)]
TRUTH = [torch.cat([p, torch.tensor(new)]) for p, new in zip(PROMPTS, PLAIN, strict=True)]


def drafter_of(kind: str, rows: list[Tensor] = TRUTH) -> Drafter | None:
    if kind == "none":
        return None
    if kind == "chain with slips":
        return Scripted(oracle(rows, n_right=lambda length: length % 4))
    return Scripted(oracle(rows, tree=kind == "tree"))


DRAFTERS = ["none", "chain", "tree", "chain with slips"]


def distinct(n: int) -> Tensor:
    """A prompt whose first `n` new tokens all differ."""
    prompts = list(torch.tensor(list(itertools.product(range(VOCAB), repeat=2))))
    rule = replace(RULE, seed=[RULE.seed] * len(prompts))
    found = generate(TARGET, prompts, max_new_tokens=n, rule=rule).new_tokens
    return next(p for p, new in zip(prompts, found, strict=True) if len(set(new.tolist())) == n)


@pytest.fixture(scope="module")
def varied() -> Tensor:
    return distinct(7)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("at", range(7))
def test_a_stop_token_ends_the_row_wherever_it_falls(varied, kind, at) -> None:
    """Tokens emitted behind a stop token in an accepted path (0..3) or behind the bonus (4).

    With four drafts a round, 5 and 6 lie in the second; the budget ends with 6.
    """
    plain = new_tokens(varied, 7)
    drafter = drafter_of(kind, [torch.cat([varied, torch.tensor(plain)])])
    target = Watched(TARGET)
    generation = generate(
        target, varied, drafter, max_new_tokens=7, rule=RULE, stop_tokens=[plain[at]]
    )
    assert generation.new_tokens[0].tolist() == plain[: at + 1]
    assert target.caches[0].lengths.tolist() == [len(varied) + at]
    last = generation.rounds[-1]
    assert last.new_tokens[0][-1] == plain[at]
    if kind in ("chain", "tree"):
        assert bool(last.cut) == (at not in (4, 6)), "only a stop token on the path cuts it"
        assert int(last.n_accepted) == [1, 2, 3, 4, 4, 1, 1][at]


def test_several_stop_tokens_and_stops_in_the_prompt(varied) -> None:
    """The last stop token in place of the first; a prompt that ends before it begins."""
    plain = new_tokens(varied, 7)
    stops = [plain[5], plain[2], int(varied[0])]
    first = min(plain.index(stop) for stop in stops if stop in plain)
    for kind in ("none", "chain"):
        drafter = drafter_of(kind, [torch.cat([varied, torch.tensor(plain)])])
        generation = generate(
            TARGET, varied, drafter, max_new_tokens=7, rule=RULE, stop_tokens=stops
        )
        assert generation.new_tokens[0].tolist() == plain[: first + 1]


def test_a_row_that_stops_leaves_the_others_alone() -> None:
    """A stop token that ends the batch, or a finished row that goes on emitting."""
    stop = PLAIN[1][2]
    drafter = drafter_of("chain with slips")
    generation = generate(
        TARGET, PROMPTS, drafter, max_new_tokens=20, rule=RULE, stop_tokens=[stop]
    )
    for new, plain in zip(generation.new_tokens, PLAIN, strict=True):
        end = plain.index(stop) + 1 if stop in plain[:20] else 20
        assert new.tolist() == plain[:end]
    for r in generation.rounds:
        emits = [len(new) > 0 for new in r.new_tokens]
        assert r.live.tolist() == emits


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("budget", range(1, 8))
def test_budgets(kind, budget) -> None:
    """A budget that a draft overshoots, or a last token that is never drawn."""
    generation = generate(TARGET, PROMPTS, drafter_of(kind), max_new_tokens=budget, rule=RULE)
    assert [new.tolist() for new in generation.new_tokens] == [new[:budget] for new in PLAIN]
    assert generation.prompt_lengths == [1, 3, 7]
    for prompt, sequence in zip(PROMPTS, generation.sequences, strict=True):
        assert sequence[: len(prompt)].equal(prompt)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_budget_per_row(kind) -> None:
    """Budgets that are swapped between rows, or the largest for all."""
    budgets = [6, 1, 11]
    generation = generate(TARGET, PROMPTS, drafter_of(kind), max_new_tokens=budgets, rule=RULE)
    expected = [new[:budget] for new, budget in zip(PLAIN, budgets, strict=True)]
    assert [new.tolist() for new in generation.new_tokens] == expected
    for i, r in enumerate(generation.rounds):
        emitted = [sum(len(s.new_tokens[b]) for s in generation.rounds[:i]) for b in range(3)]
        assert r.live.tolist() == [e < n for e, n in zip(emitted, budgets, strict=True)]


DRAWN_CHAIN, DRAWN_TREE = DraftModel(DRAFT_MODEL, 3), DraftModel(DRAFT_MODEL, 2, branching=2)


@pytest.mark.parametrize("rule", [Greedy(), Coupled(seed=3), Rejection(seed=3)])
@pytest.mark.parametrize(
    "drafter", [PromptLookup(), DRAWN_CHAIN, DRAWN_TREE], ids=["lookup", "chain", "tree"]
)
@pytest.mark.parametrize("budgets", [[11, 6, 9], [1, 2, 6], [2, 6, 1]])
def test_rows_of_a_batch_equal_their_solo_runs(rule, drafter, budgets) -> None:
    """Padding that is attended to, positions by slot, noise that depends on the other rows.

    A row at the end of its budget must not be tested on the deeper draft of its neighbour.
    """
    generation = generate(TARGET, PROMPTS, drafter, max_new_tokens=budgets, rule=rule)
    for b, (prompt, budget) in enumerate(zip(PROMPTS, budgets, strict=True)):
        alone = generate(TARGET, prompt, drafter, max_new_tokens=budget, rule=rule.for_row(b))
        assert generation.new_tokens[b].tolist() == alone.new_tokens[0].tolist()


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_nodes_beyond_the_budget_are_unused(kind) -> None:
    """Nodes that cannot be kept but count as drafted or refused, in one row or in all."""
    generation = generate(TARGET, PROMPTS, drafter_of(kind), max_new_tokens=[7, 5, 2], rule=RULE)
    first, second = generation.rounds
    width = 2 if kind == "tree" else 1
    assert first.draft.mask().sum(1).tolist() == [4 * width, 4 * width, width]
    assert second.draft.mask()[0].sum() == width
    assert [len(new) for new in second.new_tokens] == [2, 0, 0]
    assert generation.metrics.acceptance_rate == 1.0
    assert not any(r.cut.any() for r in generation.rounds), "the budget is known beforehand"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_cache_holds_all_but_the_root(kind) -> None:
    """A commit of the bonus, of too few nodes, or of a row that is done."""
    target = Watched(TARGET)
    lengths = [len(prompt) for prompt in PROMPTS]
    for r in decode(target, PROMPTS, drafter_of(kind), max_new_tokens=[9, 4, 12], rule=RULE):
        lengths = [n + len(new) for n, new in zip(lengths, r.new_tokens, strict=True)]
        assert target.caches[0].lengths.tolist() == [n - 1 for n in lengths]
    assert len(target.caches) == 1


def test_what_a_drafter_leaves_in_the_target_s_cache_is_dropped() -> None:
    """Drafts of a drafter that works in the target's cache, verified as if they were its draft."""

    def script(context: Context) -> Draft:
        TARGET(context.tokens[:, -1:].repeat(1, 3), context.cache)
        return oracle(TRUTH, n_right=lambda length: 2)(context)

    generation = generate(TARGET, PROMPTS, Scripted(script), max_new_tokens=8, rule=RULE)
    assert [new.tolist() for new in generation.new_tokens] == [new[:8] for new in PLAIN]


def test_rows_without_a_draft_decode_plainly() -> None:
    """An empty draft or a wholly unused row, now and then, in a batch where others are drafted."""

    n_rounds = itertools.count()

    def script(context: Context) -> Draft:
        if next(n_rounds) % 3 == 1:
            return Draft.empty(3)
        draft = oracle(TRUTH)(context)
        unused = context.lengths % 2 == 0
        return replace(draft, used=draft.mask() & ~unused.unsqueeze(1))

    generation = generate(TARGET, PROMPTS, Scripted(script), max_new_tokens=15, rule=RULE)
    assert [new.tolist() for new in generation.new_tokens] == [new[:15] for new in PLAIN]
    assert {r.draft.n_nodes for r in generation.rounds} == {0, 4}


def test_streaming_equals_generate() -> None:
    """Rounds that are lost, repeated or put together in another order."""
    arguments = {"max_new_tokens": [9, 4, 12], "rule": RULE, "stop_tokens": [PLAIN[2][7]]}
    generation = generate(TARGET, PROMPTS, drafter_of("tree"), **arguments)
    streamed = [[] for _ in PROMPTS]
    n_rounds = 0
    for r in decode(TARGET, PROMPTS, drafter_of("tree"), **arguments):
        n_rounds += 1
        for new, row in zip(r.new_tokens, streamed, strict=True):
            row += new.tolist()
    assert streamed == [new.tolist() for new in generation.new_tokens]
    assert n_rounds == len(generation.rounds)
    single = generate(TARGET, PROMPTS[0], max_new_tokens=5, rule=RULE)
    assert single.sequences[0].equal(TRUTH[0][:6])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 6, 100])
def test_prefill_chunks_change_nothing(chunk) -> None:
    """A chunk boundary that drops or repeats a token, or commits the padding of a short row."""
    seen: list[Context] = []

    def script(context: Context) -> Draft:
        seen.append(context)
        return Draft.empty(3)

    target = Watched(TARGET)
    generation = generate(
        target,
        PROMPTS,
        Scripted(script, taps=(1, FINAL)),
        max_new_tokens=3,
        rule=RULE,
        prefill_chunk=chunk,
    )
    assert [new.tolist() for new in generation.new_tokens] == [new[:3] for new in PLAIN]
    assert max(n for n, _ in target.calls) == min(chunk, 6)
    assert [wanted for _, wanted in target.calls].count(False) == -(-6 // chunk), "logits unwanted"
    for b, prompt in enumerate(PROMPTS):
        whole = TARGET(TRUTH[b].unsqueeze(0), taps=(1, FINAL)).hidden
        for tap, states in seen[0].hidden.items():
            n = len(prompt) - 1
            torch.testing.assert_close(states[b, :n], whole[tap][0, :n], rtol=0, atol=1e-10)


def test_grad_mode_is_the_caller_s() -> None:
    """`no_grad` that outlives a round in the caller's loop, or is undone by the last one."""
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            run = decode(TARGET, PROMPTS, DRAWN_CHAIN, max_new_tokens=6, rule=RULE)
            assert torch.is_grad_enabled() == enabled
            for _ in run:
                assert torch.is_grad_enabled() == enabled
            assert torch.is_grad_enabled() == enabled


def test_results_can_be_trained_on() -> None:
    """Inference tensors: distillation from a run's tokens and features raises in autograd."""
    features: list[Tensor] = []

    def script(context: Context) -> Draft:
        features.append(context.hidden[2])
        return oracle(TRUTH)(context)

    drafter = Scripted(script, taps=(2,))
    generation = generate(TARGET, PROMPTS, drafter, max_new_tokens=6, rule=RULE)
    weight = torch.ones(TARGET.hidden_size, dtype=torch.float64, requires_grad=True)
    table = torch.randn(VOCAB, 1, dtype=torch.float64, requires_grad=True)
    loss = sum((states @ weight).square().sum() for states in features)
    loss = loss + sum(torch.nn.functional.embedding(s, table).sum() for s in generation.sequences)
    loss.backward()
    assert weight.grad.isfinite().all()
    assert table.grad.isfinite().all()


class Clock:
    """A clock that stands still unless told otherwise."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float, call: Callable) -> Callable:
        def timed(*args, **options):
            self.now += seconds
            return call(*args, **options)

        return timed


def test_seconds_go_to_their_part_and_sum_to_the_round(monkeypatch) -> None:
    """A part timed twice or not at all; the prefill told by every round, or as part of the first.

    The target takes 1 s a call, the drafter 10 s, the rule 100 s and the cache 1,000 s.
    """
    clock = Clock()
    monkeypatch.setattr(sys.modules[decode.__module__], "time", clock)
    target = Watched(TARGET, after=lambda n, output: setattr(clock, "now", clock.now + 1))

    def new_cache(*sizes):
        cache = TARGET.new_cache(*sizes)
        cache.commit = clock.passes(1000, cache.commit)
        return cache

    target.new_cache = new_cache  # type: ignore[method-assign]

    class SlowRule(Greedy):
        accept = clock.passes(100, Greedy.accept)

    def script(context: Context) -> Draft:
        if context.n_new.tolist() == [1, 1, 1]:  # in all rounds but the first
            TARGET(context.tokens[:, :1], context.cache)
        return Draft.empty(3)

    drafter = Scripted(clock.passes(10, script))
    begun = clock.now
    for i, r in enumerate(
        decode(target, PROMPTS, drafter, max_new_tokens=3, rule=SlowRule(), prefill_chunk=3)
    ):
        seconds = r.seconds
        assert (seconds.draft, seconds.verify, seconds.accept) == (10, 1, 100)
        assert seconds.commit == 1000
        assert seconds.other == (1000 if i else 0), "the drafter left something pending"
        assert seconds.total == 1111 + seconds.other
        assert seconds.prefill == (2002 if i == 0 else 0), "two chunks"
        assert clock.now - begun == seconds.total + seconds.prefill
        begun = clock.now
    generation = generate(TARGET, PROMPTS[0], drafter_of("none"), max_new_tokens=3)
    assert generation.seconds == sum(r.seconds.total for r in generation.rounds)


def check_context(
    context: Context,
    truth: list[Tensor],
    whole: list[dict[int, Tensor]],
    prompt_lengths: list[int],
    budgets: list[int],
    before: list[int],
    ends: list[int],
) -> None:
    """Everything a drafter is told, against the whole text and a pass over it without a cache.

    `before` are the lengths at the last call, 1 at first; `ends` where the rows will end.
    """
    lengths = context.lengths.tolist()
    assert (context.cache.lengths == context.lengths - 1).all()
    assert context.tokens.shape[1] == max(lengths)
    for b, (text, n) in enumerate(zip(truth, lengths, strict=True)):
        n_new = n - before[b]
        assert context.tokens[b, :n].equal(text[:n])
        assert context.n_new[b] == n_new
        assert context.new_tokens[b, :n_new].equal(text[before[b] : n])
        for tap, states in context.hidden.items():
            assert states.shape[:2] == context.new_tokens.shape
            expected = whole[b][tap][0, before[b] - 1 : n - 1]
            torch.testing.assert_close(states[b, :n_new], expected, rtol=0, atol=1e-10)
        is_live = n < ends[b]
        assert context.live[b] == is_live
        left = budgets[b] - (n - prompt_lengths[b])
        assert context.depth_left[b] == (left - 1 if is_live else 0)
    assert context.max_depth == int(context.depth_left.max())


@pytest.mark.parametrize("kind", DRAFTERS[1:])
@pytest.mark.parametrize("stops", [False, True])
def test_the_context_tells_drafters_the_truth(kind, stops) -> None:
    """Features shifted by one or read by slot, a bonus without its pair, budgets off by one.

    The first context is the prompt from its second token; row 0, of one token, has no pairs.
    """
    taps, budgets, prompt_lengths = (0, 2, FINAL), [9, 5, 14], [1, 3, 7]
    stop_tokens = [PLAIN[2][6]] if stops else []
    ends = []
    for b, plain in enumerate(PLAIN):
        stop = next((i + 1 for i, x in enumerate(plain) if x in stop_tokens), 99)
        ends.append(prompt_lengths[b] + min(budgets[b], stop))
    whole = [TARGET(text.unsqueeze(0), taps=taps).hidden for text in TRUTH]
    before, drafts = [1, 1, 1], []
    inner = drafter_of(kind)

    def script(context: Context) -> Draft:
        nonlocal before
        check_context(context, TRUTH, whole, prompt_lengths, budgets, before, ends)
        assert set(context.hidden) == set(taps)
        assert context.rule is RULE
        if drafts:
            kept = drafts[-1].tokens.gather(1, context.path)
            for b, n in enumerate(context.n_accepted.tolist()):
                assert kept[b, :n].equal(context.new_tokens[b, :n])
                assert 0 <= int(context.n_new[b]) - n <= 1
        else:
            assert context.path.shape == (3, 0)
            assert context.n_accepted.tolist() == [0, 0, 0]
        before = context.lengths.tolist()
        drafts.append(inner.propose(context))
        return drafts[-1]

    generation = generate(
        TARGET,
        PROMPTS,
        Scripted(script, taps),
        max_new_tokens=budgets,
        rule=RULE,
        stop_tokens=stop_tokens,
    )
    assert [len(sequence) for sequence in generation.sequences] == ends
    assert len(drafts) == len(generation.rounds) >= 2


def test_prompts_of_one_token_give_no_pairs() -> None:
    """A prefill pass over nothing, or a first context without the shape of its taps."""
    seen: list[Context] = []

    def script(context: Context) -> Draft:
        seen.append(context)
        return Draft.empty(2)

    prompts = [torch.tensor([3]), torch.tensor([4])]
    drafter = Scripted(script, taps=(0, FINAL))
    generation = generate(TARGET, prompts, drafter, max_new_tokens=2)
    assert seen[0].n_new.tolist() == [0, 0]
    assert seen[0].new_tokens.shape == (2, 0)
    for states in seen[0].hidden.values():
        assert states.shape == (2, 0, TARGET.hidden_size)
        assert states.dtype == torch.float64
    assert seen[1].new_tokens.equal(torch.stack(generation.new_tokens)[:, :1])


ids = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "prompts: expected at least one"),
        ([ids, ids[:0]], {}, "prompts[1]: expected at least one token"),
        (ids[:0], {}, "prompts[0]: expected at least one token"),
        ([ids, torch.tensor([0, VOCAB])], {}, f"prompts[1]: expected ids in [0, {VOCAB}), got 0"),
        (torch.tensor([-1, 2]), {}, f"prompts[0]: expected ids in [0, {VOCAB}), got -1..2"),
        (ids.double(), {}, "prompts[0]: expected a 1-D int64 tensor, got torch.float64"),
        (ids.int(), {}, "prompts[0]: expected a 1-D int64 tensor, got torch.int32"),
        (ids.unsqueeze(0), {}, "prompts[0]: expected a 1-D int64 tensor, got torch.int64 of sh"),
        ([[1, 2, 3]], {}, "prompts[0]: expected a 1-D int64 tensor, got list"),
        (ids, {"max_new_tokens": 0}, "max_new_tokens: expected a number >= 1"),
        (ids, {"max_new_tokens": -3}, "max_new_tokens: expected a number >= 1"),
        ([ids, ids], {"max_new_tokens": [3, 0]}, "max_new_tokens: expected a number >= 1"),
        ([ids, ids], {"max_new_tokens": [3]}, "one per prompt (2), got [3]"),
        ([ids, ids], {"max_new_tokens": []}, "one per prompt (2), got []"),
        (ids, {"max_new_tokens": 126}, "prompts[0]: 3 tokens and max_new_tokens=126 exceed"),
        ([ids, ids], {"max_new_tokens": [1, 126]}, "prompts[1]: 3 tokens and max_new_tokens=126"),
        (ids, {"stop_tokens": [1, VOCAB]}, f"stop_tokens: expected ids in [0, {VOCAB})"),
        (ids, {"stop_tokens": [-1]}, "stop_tokens: expected ids in"),
        (ids, {"prefill_chunk": 0}, "prefill_chunk: expected at least 1, got 0"),
        (ids, {"rule": Coupled(seed=[1, 2])}, "seed: expected one int, or one per row (1), got 2"),
    ],
)
@pytest.mark.parametrize("run", [decode, generate])
def test_arguments_that_do_not_fit(run, prompts, changes, message) -> None:
    """An error from deep inside, or only at the first `next`: `decode` is never iterated here."""
    with pytest.raises(ValueError, match=re.escape(message)):
        run(TARGET, prompts, **{"max_new_tokens": 4, **changes})


@pytest.mark.parametrize(
    "container",
    [
        tuple,
        set,
        torch.tensor,
        iter,
    ],
)
def test_stop_tokens_stop_or_are_refused(container) -> None:
    """Stop tokens that are silently ignored, because of what holds them."""
    stop = PLAIN[0][3]
    try:
        generation = generate(
            TARGET, PROMPTS[0], max_new_tokens=20, rule=RULE, stop_tokens=container([stop])
        )
    except ValueError:
        return
    assert generation.new_tokens[0].tolist() == PLAIN[0][: PLAIN[0].index(stop) + 1]


@pytest.mark.parametrize("container", [list, tuple, iter])
def test_prompts_are_decoded_or_refused(container) -> None:
    """Prompts that are read once for the run and found gone when the sequences are put together."""
    try:
        generation = generate(TARGET, container(PROMPTS), max_new_tokens=2, rule=RULE)
    except ValueError:
        return
    assert [len(sequence) for sequence in generation.sequences] == [3, 5, 9]


def test_all_positions_of_the_target_can_be_used() -> None:
    """A limit off by one, of the target or of the draft model."""
    drafter = DraftModel(DRAFT_MODEL, 4)
    generation = generate(TARGET, ids, drafter, max_new_tokens=125, rule=RULE)
    assert len(generation.sequences[0]) == TARGET.max_position_embeddings == 128


def chain(tokens: list[int], **parts: Any) -> Draft:
    return Draft(torch.tensor([tokens]), **parts)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (chain([1, 2], parents=torch.tensor([[1, -1]])), "draft.parents: node 0 of row 0"),
        (chain([1, VOCAB]), f"draft.tokens: expected ids in [0, {VOCAB})"),
        (chain([1, -1]), "draft.tokens: expected ids in"),
        (Draft(torch.tensor([[1], [2]])), "draft.tokens: expected int64 of shape [1, N]"),
        (Draft(torch.tensor([[1.0]])), "draft.tokens: expected int64"),
        (chain([1], probs=torch.full((1, 1, VOCAB), 1.0)), "draft.probs: node 0 of row 0"),
        (chain([1], probs=torch.ones(1, 1, 3) / 3), "draft.probs: expected floats of shape"),
        (chain([1, 2], used=torch.tensor([[False, True]])), "draft.used: a used node hangs below"),
        (chain([1, 2], used=torch.tensor([[1, 1]])), "draft.used: expected bool"),
    ],
)
def test_drafts_that_do_not_fit(draft, message) -> None:
    """`validate_draft` unplugged: another error from inside the model, or a silent wrong run."""
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(TARGET, ids, Scripted(lambda context: draft), max_new_tokens=4)


@pytest.mark.parametrize(
    ("row", "node", "where"),
    [
        (0, 0, "row 0, after the root"),
        (1, 0, "row 1, after the root"),
        (2, 3, "row 2, after the draft node 2"),
    ],
)
def test_nan_logits_are_named(row, node, where) -> None:
    """A NaN that argmax takes for the largest number, and decoding goes on."""

    def after(n: int, output: Output) -> None:
        if n == 3:  # one prefill pass, one round, then this
            output.logits[row, node, 5] = torch.nan

    rounds = decode(
        Watched(TARGET, after), PROMPTS, drafter_of("chain"), max_new_tokens=20, rule=RULE
    )
    next(rounds)
    with pytest.raises(FloatingPointError, match=f"NaN in {where}$"):
        next(rounds)


class OutOfIdeasError(Exception):
    pass


@pytest.mark.parametrize("at", ["begin", "propose"])
def test_a_drafter_s_error_comes_through(at) -> None:
    """An error that is wrapped, swallowed (plain decoding instead), or made a StopIteration."""
    error = OutOfIdeasError("no draft")

    def fail(*_):
        raise error

    class Failing(Scripted):
        begin = fail if at == "begin" else Scripted.begin

    drafter = Failing(fail)
    with pytest.raises(OutOfIdeasError) as caught:
        generate(TARGET, ids, drafter, max_new_tokens=4)
    assert caught.value is error
    if at == "begin":
        with pytest.raises(OutOfIdeasError):
            decode(TARGET, ids, drafter, max_new_tokens=4)


def test_a_rule_of_one_s_own() -> None:
    """A loop that knows its rules by type instead of by what they answer."""

    class Never:
        """Accepts nothing and always says 7."""

        lossless = False

        def check(self, batch_size: int) -> None:
            assert batch_size == 1

        def for_row(self, row: int) -> "Never":
            return self

        def accept(self, draft: Draft, logits: Tensor, lengths: Tensor) -> Verdict:
            nothing = torch.zeros_like(lengths)
            return Verdict(torch.zeros_like(draft.tokens), nothing, nothing + 7)

        def pick(self, logits: Tensor, lengths: Tensor, depth: int, k: int = 1, *, draw=True):
            return logits.topk(k).indices, None

    generation = generate(TARGET, ids, DRAWN_CHAIN, max_new_tokens=3, rule=Never())
    assert generation.new_tokens[0].tolist() == [7, 7, 7]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_logits_nothing_can_be_picked_from_are_refused(value) -> None:
    """Token 0 for ever, from a target that overflowed."""

    class Broken(type(TARGET)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            return Output(torch.full_like(output.logits, value), output.hidden)

    broken = Broken(TARGET.config).double()
    with pytest.raises(FloatingPointError, match="infinities in row 0, after the root"):
        generate(broken, PROMPTS[0][:1], max_new_tokens=2, rule=RULE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected whole numbers"),
        ({"stop_tokens": [1.5]}, "stop_tokens: expected whole numbers"),
        ({"rule": Rejection(seed=2**63)}, "seed: expected ints of 64 bits"),
    ],
)
def test_numbers_of_the_wrong_kind_are_named(changes, message) -> None:
    """A bare TypeError from somewhere inside."""
    with pytest.raises(ValueError, match=message):
        generate(TARGET, PROMPTS[0], **{"max_new_tokens": 2, **changes})
