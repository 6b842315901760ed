"""Questions: the layout of Spec-Bench, the built-in ones, and how they become ids."""

import json

import pytest
import torch

from specdec.bench.prompts import (
    Prompt,
    Question,
    Reader,
    built_in,
    check_prompts,
    choose,
    joined,
    read_prompt,
    read_questions,
    reader_for,
)
from specdec.tokenizer import ByteTokenizer

GOOD = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}


def write(tmp_path, *lines: str):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_questions_are_read_by_category(tmp_path):
    """Catches a reader that stops at further keys, drops turns, or trips on empty lines."""
    other = {"question_id": "a-1", "category": "maths", "turns": ["2 + 2?"]}
    file = write(tmp_path, json.dumps(GOOD), "", json.dumps(other))
    assert read_questions(file) == {
        "writing": [Question("81", "writing", ("Write.", "Again."))],
        "maths": [Question("a-1", "maths", ("2 + 2?",))],
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"question_id": 1,', "a JSON object"),
        ("[1, 2]", "a JSON object, got list"),
        (json.dumps({**GOOD, "question_id": None}), "question_id to be a number or text, got None"),
        (json.dumps({**GOOD, "category": 3}), "category to be a text, got 3"),
        (json.dumps({**GOOD, "turns": []}), r"turns to be a list of texts, got \[\]"),
        (json.dumps({**GOOD, "turns": "Write."}), "turns to be a list of texts, got 'Write.'"),
        (json.dumps({**GOOD, "turns": ["Write.", " "]}), "turns to be a list of texts"),
        (json.dumps({"question_id": 1, "category": "x"}), "turns to be a list of texts, got None"),
    ],
)
def test_a_broken_line_is_told_by_its_number(tmp_path, line, expected):
    """Catches numbers from 0, or that skip empty lines; a text taken for a list of letters."""
    file = write(tmp_path, json.dumps(GOOD), "", line, json.dumps(GOOD))
    with pytest.raises(ValueError, match=rf"prompts: line 3 of .*: expected {expected}"):
        read_questions(file)


def test_files_without_questions_are_refused(tmp_path):
    """Catches a benchmark of nothing."""
    with pytest.raises(
        ValueError, match=r"prompts: expected at least one question in .*, got none"
    ):
        read_questions(write(tmp_path, "", " "))
    with pytest.raises(ValueError, match=r"prompts: .*missing.jsonl cannot be read"):
        read_questions(tmp_path / "missing.jsonl")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts: .*latin cannot be read"):
        read_questions(tmp_path / "latin")


def test_the_built_in_questions_are_of_real_size():
    """Catches a kind with too few prompts, or toy texts where copying is to be measured."""
    questions, calibration = built_in()
    kinds = ["chat", "code", "maths", "summarising", "question", "editing"]
    assert list(questions) == kinds
    assert all(len(own) >= 4 for own in questions.values())
    for kind in ("summarising", "question"):
        assert all(150 <= len(q.turns[0].split()) <= 420 for q in questions[kind])
    assert all(30 <= q.turns[0].count("\n") <= 65 for q in questions["editing"])
    texts = [q.turns[0] for own in questions.values() for q in own]
    assert len(set(texts)) == len(texts)
    assert len(calibration) >= 4
    assert not {q.turns[0] for q in calibration} & set(texts)


def test_kinds_and_a_limit_are_chosen():
    """Catches a limit over all kinds together; a misspelt kind that measures nothing."""
    questions = {kind: [Question(f"{kind}{i}", kind, ("?",)) for i in range(3)] for kind in "abc"}
    chosen = choose(questions, ("c", "a"), 2)
    assert {kind: [q.name for q in own] for kind, own in chosen.items()} == {
        "a": ["a0", "a1"],
        "c": ["c0", "c1"],
    }
    assert choose(questions, None, None) == questions
    with pytest.raises(ValueError, match=r"kinds: expected some of \['a', 'b', 'c'\], got \['d'\]"):
        choose(questions, ("a", "d"), None)
    with pytest.raises(ValueError, match="limit: expected at least 1, got 0"):
        choose(questions, None, 0)


def test_later_turns_follow_the_answers():
    """Catches turns without the answers between them, or a stop token kept in an answer."""
    tokenizer = ByteTokenizer()
    stop = ord(".")
    reader = Reader(lambda m: tokenizer.encode(joined(m)), tokenizer.decode, (stop,), True)
    asked = []

    def answer(prompt):
        asked.append(tokenizer.decode(prompt))
        return tokenizer.encode(f"yes{len(asked)}.")

    question = Question("q", "chat", ("One?", "Two?", "Three?"))
    prompt = read_prompt(question, reader, 3, answer, 99)
    assert tokenizer.decode(prompt.tokens) == "One?\n\nyes1\n\nTwo?\n\nyes2\n\nThree?"
    assert asked == ["One?", "One?\n\nyes1\n\nTwo?"]
    assert tokenizer.decode(read_prompt(question, reader, 1, answer, 99).tokens) == "One?"
    assert len(read_prompt(question, reader, 9, answer, 99).tokens) == len(prompt.tokens)
    asked.clear()  # what is too long to be answered is left as it is, for check_prompts to name
    cut = read_prompt(question, reader, 3, answer, len("One?"))
    assert tokenizer.decode(cut.tokens) == "One?\n\nyes1\n\nTwo?"
    assert asked == ["One?"]


def test_bytes_are_read_as_they_are():
    """Catches a chat template, or a stop token, where the target knows none."""
    reader = reader_for(ByteTokenizer())
    assert reader.encode([{"role": "user", "content": "ab"}]).tolist() == [97, 98]
    assert (reader.stop_tokens, reader.is_chat) == ((), False)


def test_prompts_must_fit_the_target():
    """Catches another model's ids (an index error deep below), and long prompts cut in silence."""
    short, long = Prompt("s", torch.tensor([1, 2])), Prompt("l", torch.tensor([1, 2, 3]))
    kept, left_out = check_prompts({"a": [short, long], "b": [long]}, 4, 2)
    assert (kept, left_out) == ({"a": [short]}, ["l", "l"])
    with pytest.raises(ValueError, match=r"prompts: l: expected ids in \[0, 3\).*another model's"):
        check_prompts({"a": [long]}, 3, 9)
    with pytest.raises(ValueError, match=r"at most 1 tokens .* got 2, all longer"):
        check_prompts({"a": [short, long]}, 4, 1)
    wrong = (
        torch.tensor([[1]]),
        torch.tensor([1.0]),
        torch.zeros(0, dtype=torch.long),
    )
    for ids in wrong:
        with pytest.raises(ValueError, match=r"prompts: w: expected int64 ids \[T\], T >= 1"):
            check_prompts({"a": [Prompt("w", ids)]}, 4, 9)
