"""What a fit keeps on disk: `last.pt` to go on from, `best.safetensors` to draft with.

Both are put in place in one move, so that there is never half a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .distributed import Ranks
from .shards import replace_file

LAST, BEST = "last.pt", "best.safetensors"


@dataclass(frozen=True)
class Best:
    """The weights (and buffers) of the best evaluation so far."""

    step: int
    value: float
    weights: dict[str, Tensor]


def resume(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    folder: Path | None,
    ranks: Ranks,
) -> tuple[int, list[tuple[int, float]]]:
    """Load `folder/last.pt`, if there is one: the next step and the history.

    Ranks start from the first rank's weights, with or without a checkpoint.
    """
    file = None if folder is None else folder / LAST
    state = None
    if file is not None and ranks.is_first and file.exists():
        state = torch.load(file, map_location="cpu", weights_only=True)
    state = ranks.broadcast(state)
    if state is None:
        if ranks.size > 1:
            copy_into(module, ranks.broadcast(tensors_of(module)))
        return 0, []
    module.load_state_dict(state["module"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], [(step, value) for step, value in state["history"]]


def save_state(
    checkpoint: Path,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    history: list[tuple[int, float]],
) -> None:
    state = {
        "module": module.state_dict(),
        "step": step,
        "history": history,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    replace_file(checkpoint, lambda partial: torch.save(state, partial))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, on the CPU; tied ones once, under their first name."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}


@torch.no_grad()
def copy_into(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `tensors_of`; a ValueError for weights of another module."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    wrong = [
        name
        for name in sorted(named.keys() | weights.keys())
        if name not in named or name not in weights or named[name].shape != weights[name].shape
    ]
    if wrong:
        raise ValueError(f"weights: these do not fit the module: {wrong}")
    for name, tensor in named.items():
        tensor.copy_(weights[name])


def write_best(file: Path, best: Best) -> None:
    # written before the checkpoint of the same step, see read_best
    about = {"step": str(best.step), "value": repr(best.value)}
    replace_file(file, lambda partial: save_file(best.weights, partial, metadata=about))


def read_best(file: Path, history: list[tuple[int, float]]) -> Best | None:
    """The best weights on disk; None if there are none, or none of the run that `history` tells.

    A run that broke between the two files has written best weights that the checkpoint does not
    know of: it comes to them again.
    """
    if not file.exists():
        return None
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    step, value = int(about["step"]), float(about["value"])
    return Best(step, value, load_file(file)) if (step, value) in history else None


def load_best(module: nn.Module, folder: Path | str) -> tuple[int, float]:
    """Load `folder/best.safetensors` into `module`; returns its (step, value).

    Raises ValueError if there is none, or if it holds the weights of another module.
    """
    file = Path(folder) / BEST
    if not file.is_file():
        raise ValueError(f"folder: expected {BEST} in {folder}, found no such file")
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    copy_into(module, load_file(file))
    return int(about["step"]), float(about["value"])
