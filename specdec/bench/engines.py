"""`transformers` with the weights of our models, and its `generate` as a method to compare with.

Of a `Transformer` nothing is copied: q, k and v, gate and up are views of our joined products. A
`QwenMoe` is written to a temporary folder and read back.

Its prefill ends with the first tokens that it streams; neither they nor their time are counted as
decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..chat import Messages
from ..checkpoints import save_qwen_moe
from ..checkpoints.published import decoder_names, fields_of, split
from ..models import QwenMoe, Transformer
from .prompts import Reader, joined
from .runs import Run


def as_transformers(model: Transformer | QwenMoe) -> PreTrainedModel:
    """The model of `transformers` with the weights, dtype and device of `model`.

    It is in evaluation mode and without gradients. A `Transformer` becomes a Llama, or a Qwen3
    where it norms queries and keys, and shares its memory: changing one changes the other.
    """
    if isinstance(model, QwenMoe):
        with TemporaryDirectory() as folder, quiet():
            save_qwen_moe(model, folder)
            # their fast ways with experts do not take float64
            experts = {"experts_implementation": "eager"} if model.dtype == torch.float64 else {}
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, **experts)
    else:
        theirs = _dense(model)
    cast(nn.Module, theirs).to(model.device)
    return theirs.eval().requires_grad_(False)


def _dense(model: Transformer) -> PreTrainedModel:
    c = model.config
    kind = Qwen3Config if c.qk_norm else LlamaConfig
    told = {"tie_word_embeddings": c.tie_word_embeddings, "bos_token_id": None}
    config = kind.from_dict({**fields_of(c), **told, "eos_token_id": None})
    state = model.state_dict()
    weights = split(state, decoder_names(state, c.num_hidden_layers), c)
    with quiet():
        theirs = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
        theirs.load_state_dict(weights, assign=True)
        theirs.tie_weights()
    return theirs


def generates(
    model: PreTrainedModel,
    stop_tokens: Sequence[int],
    *,
    prompt_lookup: int | None = None,
    assistant: PreTrainedModel | None = None,
    n_assistant: int = 4,
) -> Callable[[Tensor, int], Run]:
    """Greedy decoding by `model.generate`: plain, with `prompt_lookup` tokens, or an `assistant`.

    The assistant drafts `n_assistant` tokens, always; else it would guess more or fewer from call
    to call, and a repetition would not be one. Whatever else `generate` decides by default stays.
    """
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = n_assistant
        assistant.generation_config.num_assistant_tokens_schedule = "constant"

    def run(prompt: Tensor, max_new_tokens: int) -> Run:
        stops = list(stop_tokens)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            prompt_lookup_num_tokens=prompt_lookup,
        )
        ids, watch = prompt.unsqueeze(0).to(model.device), Watch()
        with quiet():
            start = time.perf_counter()
            made = cast(Any, model).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                assistant_model=assistant,
                streamer=watch,
            )
            taken = time.perf_counter() - start
        sequence = cast(Tensor, made)[0]
        n_new = len(sequence) - len(prompt)
        (first_at, n_first), (last_at, _) = watch.emitted[0], watch.emitted[-1]
        return Run(sequence, n_new - n_first, last_at - first_at, n_new, taken, len(watch.emitted))

    return run


class Watch(BaseStreamer):
    """Notes when `generate` has new tokens, and how many; the prompt comes first and is skipped."""

    def __init__(self) -> None:
        self.started = False
        self.emitted: list[tuple[float, int]] = []

    def put(self, value: Tensor) -> None:
        if self.started:
            self.emitted.append((time.perf_counter(), value.numel()))
        self.started = True

    def end(self) -> None:
        """The last tokens were put before."""


def reader_of(folder: Path | str) -> Reader:
    """What reads prompts for the model in a folder: its tokenizer, chat template and stop tokens.

    Raises:
        ValueError: for a folder without a tokenizer.
    """
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"model: expected a tokenizer in {folder}: {error}") from error
        try:
            stops = GenerationConfig.from_pretrained(str(folder)).eos_token_id
        except OSError:  # no generation_config.json
            stops = tokenizer.eos_token_id
    is_chat = tokenizer.chat_template is not None

    def encode(messages: Messages) -> Tensor:
        if is_chat:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        else:
            ids = tokenizer.encode(joined(messages))
        return torch.tensor(ids, dtype=torch.long)

    stop_tokens = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
    return Reader(encode, lambda ids: str(tokenizer.decode(ids)), stop_tokens, is_chat)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, `transformers` logs errors only and shows no bars; afterwards as before."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
