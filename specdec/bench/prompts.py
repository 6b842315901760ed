"""Questions by kind, in the layout of Spec-Bench and MT-Bench: one JSON object a line.

    {"question_id": 81, "category": "writing", "turns": ["Write ...", "Now ..."]}

Other keys are ignored. The built-in ones (`prompts.jsonl`) were written for this benchmark; their
kind `calibration` is for taking times, so that a prediction is never made from the run it is
compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from ..chat import Messages
from ..tokenizer import BPETokenizer, Tokenizer

CALIBRATION = "calibration"


@dataclass(frozen=True)
class Reader:
    """How a target reads questions, and where its answers end."""

    encode: Callable[[Messages], Tensor]
    """Messages -> ids [T], up to where the answer begins."""
    decode: Callable[[Tensor], str]
    stop_tokens: tuple[int, ...]
    is_chat: bool
    """Whether a chat template is written; else the target goes on with the text as it is."""


def reader_for(tokenizer: Tokenizer) -> Reader:
    """The reader of a bundle's tokenizer."""
    if not isinstance(tokenizer, BPETokenizer):
        return Reader(lambda m: tokenizer.encode(joined(m)), tokenizer.decode, (), False)
    if tokenizer.template is None:
        stops = tokenizer.stop_tokens
        return Reader(lambda m: tokenizer.encode(joined(m)), tokenizer.decode, stops, False)
    return Reader(tokenizer.chat, tokenizer.decode, tokenizer.stop_tokens, True)


def joined(messages: Messages) -> str:
    """Messages as one text, for a target without a chat template."""
    return "\n\n".join(message["content"] for message in messages)


@dataclass(frozen=True)
class Question:
    """What a user says, turn after turn."""

    name: str
    kind: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """A question as the target reads it, ids [T]."""

    name: str
    tokens: Tensor


def read_questions(file: Path | str) -> dict[str, list[Question]]:
    """The questions of a file by category, in its order. Empty lines are skipped.

    Raises:
        ValueError: for a file that cannot be read or has no question; with the number of the first
            line that is no JSON object of `question_id`, `category` and `turns`.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts: {file} cannot be read: {error}") from error
    questions: dict[str, list[Question]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            question = _question(line, f"prompts: line {number} of {file}")
            questions.setdefault(question.kind, []).append(question)
    if not questions:
        raise ValueError(f"prompts: expected at least one question in {file}, got none")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected a JSON object, got {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(fields).__name__}")
    name, kind, turns = (fields.get(key) for key in ("question_id", "category", "turns"))
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise ValueError(f"{where}: expected question_id to be a number or text, got {name!r}")
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"{where}: expected category to be a text, got {kind!r}")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError(f"{where}: expected turns to be a list of texts, got {turns!r}")
    return Question(str(name), kind, tuple(turns))


def built_in() -> tuple[dict[str, list[Question]], list[Question]]:
    """The questions written for this benchmark, and those for calibration."""
    with resources.as_file(resources.files("specdec.bench") / "prompts.jsonl") as file:
        questions = read_questions(file)
    return questions, questions.pop(CALIBRATION)


def choose(
    questions: Mapping[str, Sequence[Question]], kinds: Sequence[str] | None, limit: int | None
) -> dict[str, list[Question]]:
    """The first `limit` questions of each of `kinds`; None: all.

    Raises:
        ValueError: for a kind that is not there, or a limit below 1.
    """
    unknown = sorted(set(kinds or ()) - set(questions))
    if unknown:
        raise ValueError(f"kinds: expected some of {list(questions)}, got {unknown}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least 1, got {limit}")
    return {kind: list(own)[:limit] for kind, own in questions.items() if kind in (kinds or [kind])}


def read_prompt(
    question: Question,
    reader: Reader,
    n_turns: int,
    answer: Callable[[Tensor], Tensor],
    longest: int,
) -> Prompt:
    """The question up to turn `n_turns` or its last, as ids.

    `answer`: ids [T] of a prompt -> [n], what the target says between two turns. The question ends
    at a turn of more than `longest` ids, which cannot be answered.
    """
    messages: list[Mapping[str, str]] = []
    for i, turn in enumerate(question.turns[:n_turns]):
        if i:
            so_far = reader.encode(messages)
            if len(so_far) > longest:
                return Prompt(question.name, so_far)
            said = answer(so_far)
            kept = said[:-1] if len(said) and int(said[-1]) in reader.stop_tokens else said
            messages.append({"role": "assistant", "content": reader.decode(kept)})
        messages.append({"role": "user", "content": turn})
    return Prompt(question.name, reader.encode(messages))


def check_prompts(
    prompts: Mapping[str, Sequence[Prompt]], vocab_size: int, longest: int
) -> tuple[dict[str, list[Prompt]], list[str]]:
    """The prompts of at most `longest` tokens, and the names of those left out.

    Raises:
        ValueError: for prompts that are no int64 ids [T], T >= 1, below `vocab_size` (they come
            from another model's tokenizer), or if none is short enough.
    """
    kept: dict[str, list[Prompt]] = {}
    left_out: list[str] = []
    for kind, own in prompts.items():
        for prompt in own:
            ids = prompt.tokens
            if ids.ndim != 1 or ids.dtype != torch.long or not len(ids):
                raise ValueError(
                    f"prompts: {prompt.name}: expected int64 ids [T], T >= 1, got {ids.dtype} of "
                    f"shape {list(ids.shape)}"
                )
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"prompts: {prompt.name}: expected ids in [0, {vocab_size}), the target's "
                    f"vocabulary, got {low}..{high}: the tokenizer is another model's"
                )
            if len(ids) > longest:
                left_out.append(prompt.name)
            else:
                kept.setdefault(kind, []).append(prompt)
    if not kept:
        raise ValueError(
            f"prompts: expected at least one of at most {longest} tokens (the target's positions "
            f"less the new tokens), got {len(left_out)}, all longer"
        )
    return kept, left_out
