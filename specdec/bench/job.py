"""What is to be measured: a target, prompts as it reads them, the methods of either engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..benchmark import PLAIN
from ..checkpoints import load_drafter, load_target
from ..drafters import DraftModel, PromptLookup
from ..generate import generate
from ..load import load
from ..models import QwenMoe, Transformer
from ..pack import Packed, pack
from ..prompts import CALIBRATION as TEXTS_TO_CALIBRATE
from ..protocol import Drafter
from .measure import Refusal
from .prompts import (
    Prompt,
    Question,
    Reader,
    built_in,
    check_prompts,
    choose,
    read_prompt,
    read_questions,
    reader_for,
)
from .runs import SPECDEC, TRANSFORMERS, Method, ours

LOOKUP, ASSISTANT = "prompt lookup", "draft model"
"""Methods of both engines."""

OURS = PromptLookup(max_ngram=4, n_drafts=(2, 2, 7, 15))
"""Where a bundle has none of its own: the more of a match, the longer the draft."""

THEIRS = 7
"""Tokens that prompt lookup of `transformers` drafts, whatever the match."""


@dataclass(frozen=True)
class Wanted:
    """What a caller asks for; see `python -m specdec.bench --help`."""

    model: str
    prompts: Path | None = None
    kinds: tuple[str, ...] | None = None
    limit: int | None = None
    n_turns: int = 1
    n_tokens: int = 128
    n_drafts: int | None = None
    """Tokens that prompt lookup drafts in both engines; None: the bundle's, `THEIRS`."""
    drafters: tuple[str, ...] | None = None
    """Words, one of which is in the name of a drafter of the bundle; None: all."""
    drafter: Path | None = None
    assistant: Path | None = None
    packed: bool = True
    transformers: bool = True


@dataclass(frozen=True)
class Job:
    """Ready to be measured."""

    target: Transformer | QwenMoe
    packed: Packed | None
    """What was packed of it."""
    drafters: dict[str, Drafter]
    prompts: dict[str, list[Prompt]]
    calibration: list[Tensor]
    left_out: list[str]
    """Prompts too long for the target."""
    methods: list[Method]
    refused: list[Refusal]


def prepare(wanted: Wanted) -> Job:
    """Load and check everything, before any time is taken.

    Raises:
        ValueError: for a model, drafter or prompts file that cannot be read, names that nothing
            has, prompts of another tokenizer, or a package that is missing.
    """
    questions = None if wanted.prompts is None else read_questions(wanted.prompts)
    bundle = load(wanted.model)
    target = bundle.target
    if bundle.tokenizer is not None:
        reader = reader_for(bundle.tokenizer)
    else:
        from .engines import reader_of

        reader = reader_of(wanted.model)
    calibration = questions_of("calibration", TEXTS_TO_CALIBRATE)
    if questions is None and not reader.is_chat:
        questions = {kind: questions_of(kind, own) for kind, own in bundle.prompts.items()}
    if reader.is_chat or not questions:
        built, calibration = built_in()
        questions = questions or built
    questions = choose(questions, wanted.kinds, wanted.limit)
    assistant = None if wanted.assistant is None else load_target(wanted.assistant, target.dtype)
    drafters = drafters_of(wanted, target, bundle.drafters, assistant)

    packed = pack(target) if wanted.packed else None
    prompts, left_out = prompts_of(wanted, questions, reader, target)
    calibrating, _ = check_prompts(
        {"": [read_prompt(q, reader, 1, lambda ids: ids, 0) for q in calibration]},
        target.vocab_size,
        target.max_position_embeddings - 64,
    )
    methods = [Method(SPECDEC, PLAIN, ours(target, None, reader.stop_tokens))]
    methods += [
        Method(SPECDEC, name, ours(target, drafter, reader.stop_tokens))
        for name, drafter in drafters.items()
    ]
    refused = []
    if wanted.transformers:
        if assistant is None:
            assistant = assistant_of(bundle.drafters)
        n_drafts = wanted.n_drafts or THEIRS
        theirs, refused = of_transformers(target, assistant, reader.stop_tokens, n_drafts)
        methods += theirs
    return Job(
        target,
        packed,
        drafters,
        prompts,
        [prompt.tokens for own in calibrating.values() for prompt in own],
        left_out,
        methods,
        refused,
    )


def questions_of(kind: str, texts: Sequence[str]) -> list[Question]:
    """A bundle's own prompts."""
    return [Question(f"{kind}-{i}", kind, (text,)) for i, text in enumerate(texts, start=1)]


def prompts_of(
    wanted: Wanted,
    questions: Mapping[str, Sequence[Question]],
    reader: Reader,
    target: Transformer | QwenMoe,
) -> tuple[dict[str, list[Prompt]], list[str]]:
    """The questions as ids; between two turns the target answers plainly, in as many tokens."""

    def answer(prompt: Tensor) -> Tensor:
        made = generate(
            target, prompt, max_new_tokens=wanted.n_tokens, stop_tokens=reader.stop_tokens
        )
        return made.new_tokens[0]

    longest = target.max_position_embeddings - wanted.n_tokens
    prompts = {
        kind: [read_prompt(question, reader, wanted.n_turns, answer, longest) for question in own]
        for kind, own in questions.items()
    }
    return check_prompts(prompts, target.vocab_size, longest)


def drafters_of(
    wanted: Wanted,
    target: Transformer | QwenMoe,
    bundled: Mapping[str, Drafter],
    assistant: Transformer | QwenMoe | None,
) -> dict[str, Drafter]:
    """The bundle's drafters, prompt lookup first, and those named by a folder."""
    lookup = bundled.get(LOOKUP, OURS)
    if wanted.n_drafts is not None:
        lookup = PromptLookup(OURS.max_ngram, wanted.n_drafts)
    drafters: dict[str, Drafter] = {LOOKUP: lookup} | {**bundled, LOOKUP: lookup}
    words = wanted.drafters
    if words is not None:
        chosen = {n: d for n, d in drafters.items() if any(word in n for word in words)}
        if not chosen:
            raise ValueError(f"drafters: expected part of a name of {list(drafters)}, got {words}")
        drafters = chosen
    if wanted.drafter is not None:
        name = wanted.drafter.resolve().name
        if name in drafters:
            raise ValueError(
                f"drafter: {name} is a drafter of the bundle; name the folder otherwise"
            )
        drafters[name] = load_drafter(wanted.drafter, target)
    if assistant is not None:
        drafter = DraftModel(assistant)
        drafter.begin(target, 1, 1)  # refuses another vocabulary
        drafters[ASSISTANT] = drafter
    return drafters


def assistant_of(drafters: Mapping[str, Drafter]) -> Transformer | None:
    """The bundle's draft model, for `transformers` to be assisted by."""
    for drafter in drafters.values():
        if isinstance(drafter, DraftModel) and isinstance(drafter.model, Transformer):
            return drafter.model
    return None


def of_transformers(
    target: Transformer | QwenMoe,
    assistant: Transformer | QwenMoe | None,
    stop_tokens: Sequence[int],
    n_drafts: int,
) -> tuple[list[Method], list[Refusal]]:
    """Plain decoding, prompt lookup and assisted decoding by `transformers`."""
    try:
        from .engines import as_transformers, generates
    except ImportError as error:
        raise ValueError(
            f"transformers: needs a package that is missing ({error.name}): pip install "
            f"'specdec-torch[hf]', or leave it out with --no-transformers"
        ) from error
    model = as_transformers(target)
    methods = [
        Method(TRANSFORMERS, PLAIN, generates(model, stop_tokens)),
        Method(TRANSFORMERS, LOOKUP, generates(model, stop_tokens, prompt_lookup=n_drafts)),
    ]
    if assistant is None:
        reason = "there is no draft model for this target; name one with --assistant FOLDER"
        return methods, [Refusal(TRANSFORMERS, ASSISTANT, reason)]
    helper = as_transformers(assistant)
    methods.append(Method(TRANSFORMERS, ASSISTANT, generates(model, stop_tokens, assistant=helper)))
    return methods, []
