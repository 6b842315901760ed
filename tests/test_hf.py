"""Hybrids of `transformers` as a `Model`: what the cache says equals a pass without one.

The models are those of `hf_models`. What `transformers` itself decodes is compared on its modules
as they are. Models without recurrent layers: `test_hf_attention`; refused ones: `test_hf_checks`.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

import specdec.hf.hybrid
from specdec import FINAL, Coupled, Draft, Drafter, DraftModel, PromptLookup, generate
from specdec.hf import FROZEN, Handed, HFModel, crop, frozen_linear_states
from specdec.protocol import Context, Output
from specdec.testing import check_lossless, plain_sequence
from specdec.testing.drafters import Adversary
from specdec.testing.lossless import _ended
from tests.builders import Scripted, oracle
from tests.helpers import assert_same, random_tokens
from tests.hf_models import HYBRIDS, MAX, TOKENS, V, built, served


def row_of(output: Output, b: int, here: slice) -> Output:
    assert output.logits is not None
    hidden = {tap: states[b, here] for tap, states in output.hidden.items()}
    return Output(output.logits[b, here], hidden)


def walk(model: HFModel, seed: int, n_steps: int = 9, n_rows: int = 2) -> None:
    """Append and commit at random, 1 to 3 appends a commit; all must equal a pass without cache."""
    rng = random.Random(seed)
    kept = model.new_cache(n_rows, MAX)
    committed: list[list[int]] = [[] for _ in range(n_rows)]
    taps = (0, 1, 2, model.n_layers, FINAL)
    for _ in range(n_steps):
        pending = torch.zeros(n_rows, 0, dtype=torch.long)
        for _ in range(rng.choice([1, 1, 2, 3])):
            tokens = random_tokens(rng, n_rows, rng.choice([1, 1, 3, 6]), V)
            first = kept.n_pending
            pending = torch.cat([pending, tokens], dim=1)
            got = model(tokens, kept, taps=taps)
            for b, row in enumerate(committed):
                want = model(torch.tensor([[*row, *pending[b].tolist()]]), taps=taps)
                new = slice(len(row) + first, None)
                assert_same(row_of(got, b, slice(None)), row_of(want, 0, new), atol=1e-9)
        most = kept.n_pending
        n = torch.tensor(
            [rng.choice([0, most, *rng.choices(range(most + 1), k=2)]) for _ in range(n_rows)]
        )
        kept.commit(torch.arange(most).expand(n_rows, -1), n)
        for b, count in enumerate(n.tolist()):
            committed[b] += pending[b, :count].tolist()
        assert kept.lengths.tolist() == [len(row) for row in committed]
        assert kept.n_pending == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_cached_equals_cacheless(name: str) -> None:
    """Would catch states that moved too far or not at all, a wrong crop, a tap one layer off."""
    walk(served(name), 0, n_steps=20)


Plant = Callable[[pytest.MonkeyPatch], None]
RIGHT = specdec.hf.hybrid._freeze


def freeze(change: Callable[[Any, Handed], None]) -> Plant:
    """A layer that is frozen, and then changed."""

    def planted(layer: Any) -> Handed:
        handed = RIGHT(layer)
        change(layer, handed)
        return handed

    return lambda patch: patch.setattr(specdec.hf.hybrid, "_freeze", planted)


def only_new(layer: Any, handed: Handed) -> None:
    frozen = layer.update_conv_state
    layer.update_conv_state = lambda new, *a, **k: frozen(new, *a, **k)[..., -new.shape[-1] :]


def only_state(layer: Any, handed: Handed) -> None:
    frozen = layer.update_conv_state
    keep = slice(4) if layer.has_previous_state[0] else slice(None)  # what a state holds
    layer.update_conv_state = lambda new, *a, **k: frozen(new, *a, **k)[..., keep]


def short_window(layer: Any, handed: Handed) -> None:
    frozen = layer.update_conv_state
    skip = 2 if layer.has_previous_state[0] else 0  # of the four that a state holds
    layer.update_conv_state = lambda new, *a, **k: frozen(new, *a, **k)[..., skip:]


def copied_back(layer: Any, handed: Handed) -> None:
    frozen, real = layer.update_recurrent_state, type(layer).update_recurrent_state
    layer.update_recurrent_state = lambda new, *a: (frozen(new, *a), real(layer, new, *a))[0]


def in_place(layer: Any, handed: Handed) -> None:
    """The road of one token; nothing is then handed over for the convolution."""
    layer.record_past = False
    if layer.has_previous_state[0]:
        handed.conv = layer.conv_states[0][..., :0]


def cropped_forward(patch: pytest.MonkeyPatch) -> None:
    right = DynamicLayer.crop
    patch.setattr(DynamicLayer, "crop", lambda self, n: right(self, -n))


def not_cropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicLayer, "crop", lambda self, n: None)


def stale(patch: pytest.MonkeyPatch) -> None:
    """A block that is kept whole, an empty draft for one, does not move the states."""
    right = specdec.hf.hybrid._Row.commit

    def planted(self: Any, n: int) -> None:
        if n == self.pending.shape[1]:
            self.handed = {}
        right(self, n)

    patch.setattr(specdec.hf.hybrid._Row, "commit", planted)


def replay_changed(change: Callable[[int], int], shift: int = 0) -> Plant:
    right = specdec.hf.hybrid.replay

    def planted(model: Any, past: Any, inputs: Any, n: int) -> None:
        right(model, past, {i: x.roll(shift, 1) for i, x in inputs.items()}, change(n))

    return lambda patch: patch.setattr(specdec.hf.hybrid, "replay", planted)


PLANTS: dict[str, Plant] = {
    "the convolution sees new tokens only": freeze(only_new),
    "the convolution sees the state only": freeze(only_state),
    "the convolution's window is short": freeze(short_window),
    "the state is copied back during the verification": freeze(copied_back),
    "a block of one token writes in place": freeze(in_place),
    "a positive crop": cropped_forward,
    "no crop": not_cropped,
    "stale states after an empty draft": stale,
    "replay over one token more": replay_changed(lambda n: n + 1),
    "replay over one token less": replay_changed(lambda n: max(n - 1, 1)),
    "replay over other tokens": replay_changed(lambda n: n, shift=1),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_turn_red(monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    """A walk that passes in spite of one of these has gone blind."""
    model = served("qwen3_5")
    PLANTS[plant](monkeypatch)
    message = r"differ: |`crop` with a positive value|shape .* is invalid for input of size"
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=message):
        walk(model, 0, n_steps=20)


def check(target: HFModel, drafter: Drafter) -> None:
    """Prompts of one token too, alone and ragged, stop tokens, budgets from 1, lost drafts."""
    prompts = [torch.tensor([3]), torch.tensor([5, 9, 9, 4, 5])]
    report = check_lossless(
        target,
        drafter,
        prompts=prompts,
        max_new_tokens=6,
        rules=[Coupled(0.8, seed=3)],
        n_samples=0,
        with_replay=False,
    )
    assert report.n_runs == 15 and not report.near_ties


@pytest.mark.parametrize("name", HYBRIDS)
def test_prompt_lookup_is_lossless(name: str) -> None:
    """Would catch a row that finishes early and moves on, or a stop token inside a block."""
    check(served(name), PromptLookup(max_ngram=1, n_drafts=4))


@pytest.mark.parametrize("draft", ["llama", "qwen3_5"])
def test_draft_models_are_lossless(draft: str) -> None:
    """Would catch pending tokens run from the wrong state when a draft model feeds its own."""
    check(served("qwen3_next"), DraftModel(served(draft), n_drafts=3))


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """Losslessness is blind to a drafter's cache; here a stale one costs accepted tokens."""
    model = served("qwen3_5")
    prompts = [torch.tensor([3, 9, 9, 4]), torch.tensor([7])]
    result = generate(model, prompts, DraftModel(model, n_drafts=3), max_new_tokens=17)
    assert len(result.rounds) == 5  # of 4 tokens each, the last cut
    for round_ in result.rounds[:-1]:
        assert round_.n_accepted.tolist() == [3, 3]


@pytest.mark.parametrize("name", HYBRIDS)
def test_any_chain_is_lossless_in_a_ragged_batch(name: str) -> None:
    """Would catch a commit that depends on how many tokens other rows keep."""
    model = served(name)
    rng = random.Random(1)
    prompts = [random_tokens(rng, 1, n, V)[0] for n in (1, 4, 11)]
    plain = [plain_sequence(model, p, 12) for p in prompts]
    stop = int(plain[2][-5])
    for stops in ((), (stop,)):
        rows = [_ended(row, len(p), 12, stops) for row, p in zip(plain, prompts, strict=True)]
        for seed in range(2):
            drafter = Adversary(rows, n_nodes=5, tree=False, seed=seed)
            got = generate(
                model, prompts, drafter, max_new_tokens=12, stop_tokens=stops, prefill_chunk=3
            )
            assert [s.tolist() for s in got.sequences] == [s.tolist() for s in rows]


def test_empty_drafts_after_accepting_rounds() -> None:
    """Would catch states that stay behind when a round has nothing to verify but the root."""
    model = served("qwen3_5_moe")
    prompts = [torch.tensor([3, 9, 4]), torch.tensor([7])]
    rows = [plain_sequence(model, p, 16) for p in prompts]
    script, calls = oracle(rows, n=3, vocab_size=V), iter(range(100))

    def every_other(context: Context) -> Draft:
        return script(context) if next(calls) % 2 == 0 else Draft.empty(2)

    got = generate(model, prompts, Scripted(every_other), max_new_tokens=16)
    assert [s.tolist() for s in got.sequences] == [s.tolist() for s in rows]
    assert [r.draft.n_nodes for r in got.rounds[:4]] == [3, 0, 3, 0]
    assert got.rounds[2].n_accepted.tolist() == [3, 3]


@pytest.mark.parametrize("name", [*HYBRIDS, "llama"])
def test_transformers_decodes_the_same(name: str) -> None:
    """Would catch a model that is run otherwise than `transformers` runs it: as it is, float32."""
    theirs = built(name, as_it_is=True)
    model, rng = HFModel(theirs), random.Random(2)
    for n in (1, 5, 9):
        prompt = random_tokens(rng, 1, n, V)
        want = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )[0]
        right = Scripted(oracle([want], n=3, n_right=lambda length: length % 3, vocab_size=V))
        for drafter in (None, right):
            got = generate(
                model, prompt[0], drafter, max_new_tokens=12, stop_tokens=[TOKENS["eos_token_id"]]
            )
            assert got.sequences[0].tolist() == want.tolist()


def test_an_exception_restores_the_layers_and_drops_what_is_pending() -> None:
    """Would catch layers that stay frozen, and attention layers that keep half a block."""
    model = served("qwen3_5")
    kept = model.new_cache(2, MAX)
    tokens = random_tokens(random.Random(3), 2, 9, V)
    model(tokens[:, :4], kept)
    kept.commit(torch.arange(4).expand(2, -1), torch.tensor([4, 2]))
    calls = iter(range(9))

    def breaks(module: Any, inputs: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("boom")  # in the second row: the first one is through

    model(tokens[:, 4:6], kept)
    handle = model.model.model.layers[2].mlp.register_forward_pre_hook(breaks)
    with pytest.raises(RuntimeError, match="boom"):
        model(tokens[:, 6:], kept)
    handle.remove()
    assert kept.n_pending == 0 and kept.lengths.tolist() == [4, 2]
    for row in kept.rows:
        for layer in row.past.layers:
            assert not {"update_conv_state", "update_recurrent_state"} & vars(layer).keys()
            assert not getattr(layer, "record_past", False)
        assert row.past.get_seq_length() == row.length
    got = model(tokens[:, 4:], kept)
    for b, n in enumerate((4, 2)):
        whole = torch.cat([tokens[b, :n], tokens[b, 4:]])[None]
        want = model(whole)
        assert_same(row_of(got, b, slice(None)), row_of(want, 0, slice(n, None)), atol=1e-9)


def test_frozen_states_stay_and_layers_are_as_before() -> None:
    """Would catch a state that moves inside the context, and a method that outlives it."""
    model = served("qwen3_next")
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(input_ids=torch.tensor([[3, 4, 5]]), cache=past)
        layer: Any = past.layers[0]
        before = layer.conv_states[0].clone(), layer.recurrent_states[0].clone()
        own = {name: vars(layer)[name] for name in FROZEN if name in vars(layer)}
        for n in (1, 2, 5):
            with frozen_linear_states(past) as handed:
                model.model(input_ids=torch.full((1, n), 7), cache=past)
            crop(past, 3)
            assert handed.keys() == {0, 2}
            assert handed[0].conv is not None and handed[0].conv.shape[-1] == n
            assert torch.equal(layer.conv_states[0], before[0])
            assert torch.equal(layer.recurrent_states[0], before[1])
            assert {name: vars(layer)[name] for name in FROZEN if name in vars(layer)} == own
            assert past.get_seq_length() == 3


def test_finished_rows_may_look_beyond_the_last_position() -> None:
    """Would catch learned positions that run out under the drafts of another row."""
    model = served("gpt2")
    prompts = [random_tokens(random.Random(4), 1, n, V)[0] for n in (MAX - 2, 3)]
    rows = [plain_sequence(model, p, n) for p, n in zip(prompts, (2, 12), strict=True)]
    drafter = Scripted(oracle(rows, n=5, vocab_size=V))
    got = generate(model, prompts, drafter, max_new_tokens=[2, 12])
    assert [s.tolist() for s in got.sequences] == [s.tolist() for s in rows]


def test_gradients_without_a_cache_only() -> None:
    """Would catch a graph that grows with the cache, and features that cannot be trained on."""
    model = HFModel(built("qwen3_5"))
    model.model.requires_grad_(True)
    tokens = torch.tensor([[3, 4, 5]])
    assert model(tokens).logits.requires_grad
    kept = model.new_cache(1, 8)
    assert not model(tokens, kept).logits.requires_grad
    kept.commit(torch.arange(3)[None], torch.tensor([2]))
    states = kept.rows[0].past.layers[0].recurrent_states[0]  # type: ignore[union-attr]
    assert not states.requires_grad


def test_what_a_model_says_of_itself() -> None:
    """Would catch names that drafters read and that stand for something else."""
    model = served("qwen3_5")
    assert (model.vocab_size, model.hidden_size, model.n_layers) == (V, 32, 3)
    assert (model.max_position_embeddings, model.dtype) == (MAX, torch.float64)
    tokens = torch.tensor([[3, 4, 5]])
    out = model(tokens, taps=(0, 3, FINAL))
    torch.testing.assert_close(model.embedding(tokens), out.hidden[0], rtol=0, atol=0)
    torch.testing.assert_close(model.norm(out.hidden[3]), out.hidden[FINAL], rtol=0, atol=1e-12)
    torch.testing.assert_close(model.head(out.hidden[FINAL]), out.logits, rtol=0, atol=1e-12)
    without = model(tokens, taps=(3,), logits=False)
    assert without.logits is None and torch.equal(without.hidden[3], out.hidden[3])


def test_bad_calls() -> None:
    """Would catch a tree taken for a chain, and calls that fail after the cache has changed."""
    model = served("qwen3_5")
    kept, tokens = model.new_cache(2, 16), torch.tensor([[3, 4], [5, 6]])
    chain, tree = torch.tensor([[-1, 0], [-1, 0]]), torch.tensor([[-1, 0], [-1, -1]])
    for options, message in (
        ({"parents": tree}, r"parents: expected a chain, \[-1, 0\].*specdec.models.QwenMoe"),
        ({"parents": chain[:, :1]}, r"parents: expected \[2, 2\], got \[2, 1\]"),
        ({"exit_layer": 1}, r"exit_layer, resume: expected None"),
        ({"resume": (1, torch.zeros(2, 1, 32))}, r"exit_layer, resume: expected None"),
        ({"taps": (0, 5, -2)}, r"taps: expected 0\.\.3 or FINAL \(-1\), got \[5, -2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, kept, **options)
    for other, message in (
        (served("llama").new_cache(2, 4), r"cache: expected one of this model's new_cache"),
        (model.new_cache(3, 4), r"tokens: expected 3 rows, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, other)
    with pytest.raises(ValueError, match=r"tokens: expected int64 of shape \[B, N\]"):
        model(tokens[0], kept)
    with pytest.raises(ValueError, match=r"tokens: 97 positions, .* is 96"):
        model(torch.zeros(1, MAX + 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"parents: a pass without a cache"):
        model(tokens, parents=chain)
    with pytest.raises(ValueError, match=r"max_length: .*=96, got 2, 97"):
        model.new_cache(2, MAX + 1)
    assert kept.n_pending == 0
    model(tokens, kept, parents=chain)
    model(tokens[:, :1], kept, parents=torch.tensor([[1], [1]]))
    path, n = torch.arange(3).expand(2, -1), torch.tensor([1, 3])
    for wrong, message in (
        ((path, torch.tensor([1, 4])), r"n: expected 0\.\.3 .* got \[1, 4\]"),
        ((path, n.double()), r"path, n: expected \[2, P\] and whole numbers"),
        ((path.flip(1), n), r"path: expected the nodes of a chain, .* got \[2, 1, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            kept.commit(*wrong)
    assert kept.n_pending == 3 and kept.lengths.tolist() == [0, 0]
    kept.commit(path, n)
    assert kept.lengths.tolist() == [1, 3]
