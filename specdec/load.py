"""`load(name)`: a target with everything that goes with it, ready to decode."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch

from .checkpoints import load_transformer
from .drafters import DraftModel, PromptLookup
from .models import Transformer
from .prompts import PROMPTS
from .protocol import Drafter
from .tokenizer import ByteTokenizer


class Bundle(NamedTuple):
    """A target, its tokenizer, drafters by name, and prompts by kind."""

    target: Transformer
    tokenizer: ByteTokenizer
    drafters: dict[str, Drafter]
    prompts: dict[str, list[str]]


def load(name: str = "tiny", dtype: torch.dtype = torch.float32) -> Bundle:
    """Load an embedded bundle.

    `"tiny"`: a byte-level decoder trained on the source of Python's standard library, a draft model
    distilled from it, and prompts that neither has seen. Weights are converted to `dtype`.

    Raises:
        ValueError: for an unknown name.
    """
    if name != "tiny":
        raise ValueError(f"name: expected 'tiny', got {name!r}")
    folder = Path(str(resources.files("specdec"))) / "pretrained"
    target = load_transformer(folder / "tiny-target", dtype)
    draft = load_transformer(folder / "tiny-draft", dtype)
    drafters: dict[str, Drafter] = {
        "prompt lookup": PromptLookup(max_ngram=4, n_drafts=8),
        "draft model": DraftModel(draft, n_drafts=4),
        "draft model, tree": DraftModel(draft, n_drafts=4, branching=(3, 2, 1, 1)),
    }
    return Bundle(target, ByteTokenizer(), drafters, PROMPTS)
