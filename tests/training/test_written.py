"""Text that the target writes itself, in place of a corpus."""

import numpy as np
import pytest
import torch

from specdec.accept import Coupled, Rejection
from specdec.drafters import PromptLookup
from specdec.generate import generate
from specdec.testing.targets import small_target
from specdec.training import written
from specdec.training.corpus import Corpus
from specdec.training.written import WrittenText, write_text

TARGET = small_target(1, sharpness=4.0)
BYTES = np.random.default_rng(0).integers(0, 11, 300).astype(np.uint8)
TEXT = Corpus(BYTES[:200], BYTES[200:])
RULE = Coupled(temperature=0.8, seed=3)
SHAPE = {"batch_size": 3, "n_given": 5, "n_new": 7}


class StopHereError(Exception):
    pass


@pytest.mark.parametrize("rule", [RULE, Rejection(seed=3)])
def test_rows_are_what_plain_decoding_writes(tmp_path, rule):
    """Catches prompts of another row, noise shared between batches, and greedy text."""
    text = write_text(tmp_path, TARGET, TEXT, 2, rule=rule, **SHAPE)
    assert text.rows.shape == (6, 12) and text.rows.dtype == np.uint8
    for i, row in enumerate(torch.from_numpy(text.rows.astype(np.int64))):
        prompt = TEXT.batch(i // 3, 3, 4, 3)[i % 3]
        alone = generate(TARGET, prompt, max_new_tokens=7, rule=rule.for_row(i))
        assert torch.equal(row, alone.sequences[0])
    assert len({tuple(row) for row in text.rows.tolist()}) == 6
    greedy = generate(TARGET, list(TEXT.batch(0, 3, 4, 3)), max_new_tokens=7)
    assert any(a.tolist() != b.tolist() for a, b in zip(greedy.sequences, text.rows, strict=False))


def test_the_same_seed_writes_the_same_text(tmp_path):
    """Catches a global generator; a drafter changes nothing under `Coupled`, another seed does."""
    texts = [
        write_text(tmp_path / name, TARGET, TEXT, 2, rule=rule, drafter=drafter, **SHAPE).rows
        for name, rule, drafter in (
            ("a", RULE, None),
            ("b", RULE, None),
            ("c", RULE, PromptLookup()),
            ("d", Coupled(temperature=0.8, seed=4), None),
            ("e", Coupled(temperature=2.5, seed=3), None),
        )
    ]
    assert (texts[0] == texts[1]).all() and (texts[0] == texts[2]).all()
    assert (texts[0] != texts[3]).any()
    assert (texts[0][:, :5] == texts[4][:, :5]).all()  # the prompts hang on the seed alone
    assert (texts[0] != texts[4]).any()


def test_writing_goes_on_where_it_broke(tmp_path, monkeypatch):
    """Catches batches written again, or numbered anew."""
    whole = write_text(tmp_path / "whole", TARGET, TEXT, 4, rule=RULE, **SHAPE)
    calls: list[int] = []

    def breaks(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise StopHereError
        return generate(*arguments, **options)

    monkeypatch.setattr(written, "generate", breaks)
    with pytest.raises(StopHereError):
        write_text(tmp_path / "broken", TARGET, TEXT, 3, rule=RULE, **SHAPE)
    text = write_text(tmp_path / "broken", TARGET, TEXT, 4, rule=RULE, **SHAPE)
    assert len(calls) == 3 + 2
    assert (text.rows == whole.rows).all()
    some = write_text(tmp_path / "broken", TARGET, TEXT, 1, rule=RULE, **SHAPE)
    assert (some.rows == whole.rows[:3]).all()


def test_it_serves_in_place_of_a_corpus(tmp_path):
    """Catches windows across rows, a mask off by one, and held-out text that the target wrote."""
    text = write_text(tmp_path, TARGET, TEXT, 2, rule=RULE, **SHAPE)
    batch = text.batch(4, 8, 9, seed=1)
    assert batch.shape == (8, 10) and batch.dtype == torch.long
    starts = {tuple(row[:10]) for row in text.rows.tolist()}
    assert {tuple(row) for row in batch.tolist()} <= starts
    assert torch.equal(batch, text.batch(4, 8, 9, seed=1))
    assert not torch.equal(batch, text.batch(5, 8, 9, seed=1))
    assert not torch.equal(batch, text.batch(4, 8, 9, seed=2))
    mask = text.own(4, 8, 9, seed=1)
    assert mask is not None
    assert mask.tolist() == [[False] * 5 + [True] * 5] * 8
    assert TEXT.own(4, 8, 9, seed=1) is None
    assert text.train.tolist() == [token for row in text.rows.tolist() for token in row]
    assert torch.equal(text.held_out_batch(4, 9), TEXT.held_out_batch(4, 9))
    assert text.batch(0, 2, 11, 0).shape == (2, 12)
    with pytest.raises(ValueError, match="length: a window of 13 tokens does not fit rows of 12"):
        text.batch(0, 2, 12, 0)


def test_a_large_vocabulary_is_kept(tmp_path):
    """Catches ids above 255 that are cut to a byte."""
    target = small_target(0, vocab_size=700)
    text = write_text(tmp_path, target, TEXT, 1, rule=Coupled(seed=0), **SHAPE)
    assert text.rows.max() > 255
    assert text.batch(0, 2, 11, 0).max() < 700


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": small_target(2)}, "target="),
        ({"corpus": Corpus(BYTES[:150], BYTES[150:])}, "text="),
        ({"rule": Coupled(temperature=0.9, seed=3)}, "rule="),
        ({"rule": Rejection(temperature=0.8, seed=3)}, "rule="),
        ({"n_new": 8}, "n_new=7 instead of 8"),
        ({"n_given": 4}, "n_given=5 instead of 4"),
        ({"batch_size": 4}, "batch_size=3 instead of 4"),
    ],
)
def test_text_written_otherwise_is_refused(tmp_path, changes, named):
    """Catches text of another target, temperature or seed that is mixed in."""
    given: dict = {"target": TARGET, "corpus": TEXT, "n_batches": 1, "rule": RULE, **SHAPE}
    write_text(tmp_path, **given)
    with pytest.raises(ValueError, match=f"were made with {named}"):
        write_text(tmp_path, **(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_batches": 0}, "n_batches: expected at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"n_given": 0}, "n_given: expected at least 1, got 0"),
        ({"n_new": 0}, "n_new: expected at least 1, got 0"),
        ({"n_new": 252}, r"n_given, n_new: 5 \+ 252 tokens exceed"),
        ({"rule": Coupled(seed=[1, 2, 3])}, "rule: expected a seed that is one number"),
        ({"rule": Coupled(seed=-1)}, "rule: expected a seed that is one number"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    """Catches an index that is written before the arguments are looked at."""
    given: dict = {"target": TARGET, "corpus": TEXT, "n_batches": 1, "rule": RULE, **SHAPE}
    with pytest.raises(ValueError, match=message):
        write_text(tmp_path / "out", **(given | changes))
    assert not (tmp_path / "out").exists()


def test_a_text_without_given_tokens_counts_everywhere():
    """Catches a mask that leaves out the first token of plain text."""
    text = WrittenText(np.zeros((2, 4), dtype=np.uint8), BYTES, n_given=0)
    assert text.own(0, 2, 3, 0) is None
