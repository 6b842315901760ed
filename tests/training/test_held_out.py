"""Held-out tau, the number a drafter is selected by."""

import numpy as np
import pytest
import torch

from specdec.accept import Coupled
from specdec.drafters import DraftModel
from specdec.generate import generate
from specdec.testing.targets import small_target
from specdec.training.corpus import Corpus
from specdec.training.held_out import held_out_prompts, held_out_tau
from tests.builders import Scripted, oracle

TARGET = small_target(1)
BYTES = np.random.default_rng(0).integers(0, 11, 300).astype(np.uint8)
TEXT = Corpus(BYTES[:100], BYTES[100:])


def test_prompts_are_a_ragged_batch_of_held_out_text():
    """Catches prompts that were trained on, and a batch without raggedness."""
    prompts = held_out_prompts(TEXT, 5, shortest=2, longest=10)
    assert [len(prompt) for prompt in prompts] == [2, 4, 6, 8, 10]
    held_out = TEXT.held_out.tobytes()
    assert all(bytes(prompt.tolist()) in held_out for prompt in prompts)
    assert bytes(prompts[-1].tolist()) not in TEXT.train.tobytes()
    assert all(map(torch.equal, prompts, held_out_prompts(TEXT, 5, shortest=2, longest=10)))
    other = held_out_prompts(TEXT, 5, shortest=2, longest=10, seed=1)
    assert not torch.equal(prompts[-1], other[-1])
    assert len(held_out_prompts(TEXT, 1)) == 1
    for bad in ({"n_prompts": 0}, {"shortest": 0}, {"shortest": 9, "longest": 8}):
        with pytest.raises(ValueError, match="n_prompts, shortest, longest: expected"):
            held_out_prompts(TEXT, **bad)


def test_tau_by_hand():
    """Two of four drafts right every round: three tokens a pass, pooled over ragged rows.

    Catches accepted drafts counted without the target's own token, and a mean over rounds.
    """
    prompts = held_out_prompts(TEXT, 3, shortest=1, longest=5)
    rows = generate(TARGET, prompts, max_new_tokens=12).sequences
    two_right = Scripted(oracle(rows, 4, lambda length: 2, vocab_size=11))
    assert held_out_tau(TARGET, two_right, prompts, max_new_tokens=12) == 3.0
    none_right = Scripted(oracle(rows, 4, lambda length: 0, vocab_size=11))
    assert held_out_tau(TARGET, none_right, prompts, max_new_tokens=12) == 1.0


def test_tau_of_the_target_as_its_own_drafter():
    """Catches a rule that is not handed on; chains of 4 are accepted whole: 5 tokens a pass."""
    prompts = held_out_prompts(TEXT, 3, shortest=1, longest=5)
    itself = DraftModel(TARGET, 4)
    assert held_out_tau(TARGET, itself, prompts, max_new_tokens=10) == 5.0
    other = DraftModel(small_target(2), 4)
    greedy = held_out_tau(TARGET, other, prompts, max_new_tokens=16)
    flat = held_out_tau(TARGET, other, prompts, max_new_tokens=16, rule=Coupled(50.0))
    assert greedy < flat  # two nearly flat laws under the same noise agree
