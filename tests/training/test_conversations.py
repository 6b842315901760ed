"""Questions, and the target's own answers to them joined to rows."""

import json

import numpy as np
import pytest
import torch

from specdec.accept import Coupled, Greedy
from specdec.generate import generate
from specdec.testing.targets import small_target
from specdec.training.conversations import Conversations, write_conversations
from specdec.training.questions import questions, read_questions

TARGET = small_target(1, sharpness=4.0)
PROMPTS = [torch.tensor(row) for row in ([1, 2, 3], [4], [5, 6], [7, 8, 9, 1], [2], [3, 3])]
STOP = 5


def write(folder, rule=None, n_batches=None, prompts=PROMPTS):
    return write_conversations(
        folder,
        TARGET,
        prompts,
        n_batches,
        stop_tokens=[STOP],
        max_new_tokens=9,
        batch_size=2,
        rule=rule,
    )


@pytest.mark.parametrize("rule", [Coupled(temperature=0.8, seed=3), Greedy()])
def test_answers_are_what_plain_decoding_gives(tmp_path, rule):
    """Catches noise that hangs on the batch, answers that go on behind their stop token."""
    found = {tuple(row[:n].tolist()): (row, n) for row, n in write(tmp_path, rule)}
    assert len(found) == len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        row, n = found[tuple(prompt.tolist())]
        own = rule if isinstance(rule, Greedy) else rule.for_row(i)
        alone = generate(TARGET, prompt, max_new_tokens=9, rule=own, stop_tokens=[STOP])
        assert row.tolist() == alone.sequences[0].tolist() and n == len(prompt)
    assert any(STOP in row[n:-1].tolist() for row, n in found.values()) is False
    assert len({len(row) - n for row, n in found.values()}) > 1  # some did stop


def test_writing_goes_on_where_it_was_left(tmp_path):
    """Catches batches in another order when there are more of them."""
    few = write(tmp_path, n_batches=2)
    assert len(few) == 4
    whole = write(tmp_path)
    assert len(whole) == 6
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(few, whole, strict=False))
    with pytest.raises(ValueError, match="n_prompts=6 instead of 5"):
        write(tmp_path, prompts=PROMPTS[:5])


def test_rows_hold_every_token_once_and_mark_the_answers():
    """Catches a mask shifted by one, a conversation that begins anew in every row."""
    talks = [(torch.arange(10, 17), 3), (torch.arange(20, 24), 1), (torch.arange(30, 36), 5)]
    text = Conversations.join(talks, 5)
    assert text.rows.tolist() == [
        [10, 11, 12, 13, 14],
        [15, 16, 20, 21, 22],
        [23, 30, 31, 32, 33],
    ]
    assert text.answers.astype(int).tolist() == [
        [0, 0, 0, 1, 1],
        [1, 1, 0, 1, 1],
        [1, 0, 0, 0, 0],
    ]
    with pytest.raises(ValueError, match="length: rows of 50 tokens need more than the 17"):
        Conversations.join(talks, 50)


def test_batches_take_every_row_once_an_epoch_with_its_mask():
    """Catches rows drawn with replacement, a mask of another batch, the same order every epoch."""
    rows = np.arange(35, dtype=np.int32).reshape(7, 5)
    text = Conversations(rows, rows % 2 == 0)
    seen = torch.cat([text.batch(step, 2, 4, seed=1) for step in range(7)])
    assert sorted(seen[:7, 0].tolist()) == sorted(seen[7:, 0].tolist()) == rows[:, 0].tolist()
    assert seen[:7].tolist() != seen[7:].tolist()
    for step in range(7):
        tokens, own = text.batch(step, 2, 3, seed=1), text.own(step, 2, 3, seed=1)
        assert tokens.shape == (2, 4) and own.tolist() == (tokens % 2 == 0).tolist()
    with pytest.raises(ValueError, match="a window of 6 tokens does not fit rows of 5"):
        text.batch(0, 2, 5, seed=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": []}, "prompts: expected at least 1, got 0"),
        ({"rule": Coupled(seed=-1)}, "rule: expected a seed .* got -1"),
        ({"n_batches": 0}, "n_batches: expected at least 1, got 0"),
        ({"prompts": [torch.zeros(260, dtype=torch.long)]}, "max_new_tokens: 9 behind a prompt"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, changed, message):
    """Catches an empty folder that is taken for a text."""
    with pytest.raises(ValueError, match=message):
        write(tmp_path, **changed)
    assert not list(tmp_path.iterdir())


def test_questions_differ_and_come_back(tmp_path):
    """Catches one kind only, duplicates, a global generator."""
    found = questions(120)
    assert len(set(found)) == 120 and found == questions(120) and found != questions(120, seed=1)
    assert sum("```python" in text for text in found) >= 10
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        questions(0)


def test_files_of_questions(tmp_path):
    """Catches the second turn taken for the first, and a broken line without its number."""
    file = tmp_path / "some.jsonl"
    lines = [{"turns": ["a", "b"]}, {"question": "c", "answer": "d"}, {"text": "e"}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_questions(file) == ["a", "c", "e"]
    file.write_text(json.dumps(lines[0]) + '\n{"turns": []}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*some.jsonl is no JSON object"):
        read_questions(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no question"):
        read_questions(file)
