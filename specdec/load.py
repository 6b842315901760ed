"""`load(name)`: a target with everything that goes with it, ready to decode."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch

from .checkpoints import load_eagle, load_heads, load_medusa, load_modules, load_transformer
from .drafters import DraftModel, Eagle, LayerSkip, Medusa, MTPHeads, MTPModules, PromptLookup
from .drafters.mtp import resized
from .models import Transformer
from .prompts import PROMPTS
from .protocol import Drafter
from .tokenizer import ByteTokenizer

N_NODES = 20
"""Nodes of the trees: on two cores a pass over as many costs about twice a step."""


class Bundle(NamedTuple):
    """A target, its tokenizer, drafters by name, and prompts by kind."""

    target: Transformer
    tokenizer: ByteTokenizer
    drafters: dict[str, Drafter]
    prompts: dict[str, list[str]]


def load(name: str = "tiny", dtype: torch.dtype = torch.float32) -> Bundle:
    """Load an embedded bundle.

    `"tiny"`: a byte-level decoder trained on the source of Python's standard library, a drafter of
    every method trained for it, and prompts that none has seen. Weights are converted to `dtype`.

    Raises:
        ValueError: for an unknown name.
    """
    if name != "tiny":
        raise ValueError(f"name: expected 'tiny', got {name!r}")
    folder = Path(str(resources.files("specdec"))) / "pretrained"
    target = load_transformer(folder / "tiny-target", dtype)
    return Bundle(target, ByteTokenizer(), drafters_of(target, folder), PROMPTS)


def drafters_of(target: Transformer, folder: Path) -> dict[str, Drafter]:
    """Every method's drafter, as a chain and, where it has one, as a tree of `N_NODES`."""
    model = load_transformer(folder / "tiny-draft", target.dtype)
    medusa = load_medusa(folder / "tiny-medusa", target)
    eagle1 = load_eagle(folder / "tiny-eagle1", target)
    eagle3 = load_eagle(folder / "tiny-eagle3", target)
    heads = load_heads(folder / "tiny-heads", target)
    modules = load_modules(folder / "tiny-mtp", target)
    chain = [(0,) * depth for depth in range(1, 5)]
    return {
        "prompt lookup": PromptLookup(max_ngram=4, n_drafts=8),
        "draft model": DraftModel(model, n_drafts=4),
        "draft model, tree": DraftModel(model, n_drafts=4, branching=(3, 2, 1, 1)),
        "medusa": Medusa(medusa, chain),
        "medusa, tree": Medusa(medusa, choices(folder / "tiny-medusa")),
        "eagle-1": Eagle(eagle1, n_drafts=4),
        "eagle-1, tree": Eagle(eagle1, n_drafts=5, top_k=4, n_nodes=N_NODES),
        "eagle-3": Eagle(eagle3, n_drafts=4),
        "eagle-3, tree": Eagle(eagle3, n_drafts=5, top_k=4, n_nodes=N_NODES),
        "mtp heads": MTPHeads(heads, chain[:3]),
        "mtp heads, tree": MTPHeads(heads, choices(folder / "tiny-heads")),
        "mtp, 1 module": MTPModules(resized(modules, 1), n_drafts=4),
        "mtp, 3 modules": MTPModules(modules, n_drafts=3),
        "mtp, 3 modules, tree": MTPModules(modules, n_drafts=3, top_k=4, n_nodes=N_NODES),
        "layerskip": LayerSkip(exit_layer=3, n_drafts=4),
    }


def choices(folder: Path) -> list[tuple[int, ...]]:
    """The tree that was searched for a folder's heads when they were trained."""
    fields = json.loads((folder / "config.json").read_text())
    return [tuple(path) for path in fields["training"]["choices"]]
