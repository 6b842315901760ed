"""Drafts of any kind on models of `transformers` without recurrent layers change no token."""

import random
from typing import Any

import pytest
import torch

from specdec import Coupled, Draft, Drafter, DraftModel, Greedy, PromptLookup, generate
from specdec.hf import HFModel
from specdec.testing import check_lossless, plain_sequence
from specdec.testing.drafters import Adversary
from specdec.testing.lossless import _ended
from tests.builders import Scripted, oracle
from tests.helpers import random_tokens
from tests.hf_models import ATTENTION, MAX, TOKENS, V, built, served


def check(target: HFModel, drafter: Drafter) -> None:
    """Prompts of one token too, alone and ragged, stop tokens, budgets from 1, lost drafts."""
    report = check_lossless(
        target,
        drafter,
        prompts=[torch.tensor([3]), torch.tensor([5, 9, 9, 4, 5, 9, 9, 4])],
        max_new_tokens=6,
        rules=[Coupled(0.8, seed=3)],
        n_samples=0,
        with_replay=False,
    )
    assert report.n_runs == 15 and not report.near_ties


@pytest.mark.parametrize("name", ATTENTION)
def test_chains_are_lossless(name: str) -> None:
    """Would catch a row that finishes early and moves on, or a stop token inside a block."""
    check(served(name), PromptLookup(max_ngram=1, n_drafts=4))


@pytest.mark.parametrize("name", ATTENTION)
def test_trees_are_lossless(name: str) -> None:
    """Would catch a branch that sees its sibling, in the target or in its own drafts."""
    check(served(name), DraftModel(served(name), 3, branching=(2, 2, 1)))


@pytest.mark.parametrize("name", ATTENTION)
def test_any_tree_is_lossless_in_a_ragged_batch(name: str) -> None:
    """Would catch a commit that depends on what other rows keep, and padding that is written."""
    model, rng = served(name), random.Random(1)
    prompts = [random_tokens(rng, 1, n, V)[0] for n in (1, 4, 11)]
    plain = [plain_sequence(model, p, 12) for p in prompts]
    stop = int(plain[2][-5])
    for stops in ((), (stop,)):
        rows = [_ended(row, len(p), 12, stops) for row, p in zip(plain, prompts, strict=True)]
        for seed in range(2):
            drafter = Adversary(rows, n_nodes=7, tree=True, seed=seed)
            got = generate(
                model, prompts, drafter, max_new_tokens=12, stop_tokens=stops, prefill_chunk=3
            )
            assert [s.tolist() for s in got.sequences] == [s.tolist() for s in rows]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2"])
def test_transformers_decodes_the_same(name: str) -> None:
    """Would catch a model that is run otherwise than `transformers` runs it: as it is, float32."""
    theirs: Any = built(name, as_it_is=True)
    model, rng = HFModel(theirs), random.Random(2)
    for n in (1, 9):
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


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """Losslessness is blind to a drafter's cache; here a stale one costs accepted tokens."""
    model = served("gemma3")
    prompts = [torch.tensor([3, 9, 9, 4]), torch.tensor([7])]
    result = generate(model, prompts, DraftModel(model, n_drafts=3), max_new_tokens=17)
    assert len(result.rounds) == 5  # of 4 tokens each, the last cut
    for round_ in result.rounds[:-1]:
        assert round_.n_accepted.tolist() == [3, 3]


def test_finished_rows_may_look_beyond_the_last_position() -> None:
    """Would catch learned positions that run out under the drafts of another row."""
    model = served("gpt2")
    prompts = [random_tokens(random.Random(4), 1, n, V)[0] for n in (MAX - 2, 3)]
    rows = [plain_sequence(model, p, n) for p, n in zip(prompts, (2, 12), strict=True)]
    drafter = Scripted(oracle(rows, n=5, vocab_size=V))
    got = generate(model, prompts, drafter, max_new_tokens=[2, 12])
    assert [s.tolist() for s in got.sequences] == [s.tolist() for s in rows]


def test_empty_drafts_and_unused_rows() -> None:
    """Would catch a pass of the root alone that is masked as if it were a block."""
    model = served("gemma2")
    prompts = [torch.tensor([3, 9, 4]), torch.tensor([7])]
    rows = [plain_sequence(model, p, 10) for p in prompts]
    script, calls = oracle(rows, n=3, vocab_size=V), iter(range(100))
    every_other = Scripted(lambda c: script(c) if next(calls) % 2 == 0 else Draft.empty(2))
    got = generate(model, prompts, every_other, max_new_tokens=10)
    assert [s.tolist() for s in got.sequences] == [s.tolist() for s in rows]


def test_a_drafter_begun_afresh_drafts_the_same() -> None:
    """Would catch keys of refused branches that a draft model goes on from: replay, with taps."""
    report = check_lossless(
        served("gemma3"),
        DraftModel(served("mistral"), 2, branching=(2, 1)),
        prompts=[torch.tensor([3, 7]), torch.tensor([5, 9, 9, 4])],
        max_new_tokens=6,
        rules=[Greedy()],
        n_samples=64,
    )
    assert report.n_replayed > 20
