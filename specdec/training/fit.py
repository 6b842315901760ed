"""One fit loop for everything that is trained.

Progress bar, clipping, checkpoints that resume exactly, several processes, and the best weights by
a held-out number: bits for a language model, tau for a drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from .distributed import ALONE, Ranks
from .shards import replace_file


def optimizers(
    module: nn.Module, lr: float, muon_lr: float | None = None, weight_decay: float = 0.01
) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings, heads and gains; Muon for the matrices of the blocks if `muon_lr`."""
    inner, rest = [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        matrix = (
            parameter.ndim == 2 and ".embedding" not in f".{name}" and ".head" not in f".{name}"
        )
        (inner if matrix and muon_lr else rest).append(parameter)
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    ]
    if muon_lr and inner:
        chosen.append(
            torch.optim.Muon(
                inner, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return chosen


def schedule(step: int, n_steps: int, warmup: int) -> float:
    """Share of the learning rate at `step`: linear warm-up, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, n_steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True)
class Best:
    """The weights (and buffers) of the best evaluation so far."""

    step: int
    value: float
    weights: dict[str, Tensor]


def fit(
    module: nn.Module,
    loss_of: Callable[[int], Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
    n_steps: int,
    *,
    folder: Path | str | None = None,
    warmup: int = 100,
    max_norm: float = 1.0,
    save_every: int = 200,
    evaluate: Callable[[], float] | None = None,
    evaluate_every: int = 500,
    maximize: bool = False,
    on_loss: Callable[[int, float], None] | None = None,
    ranks: Ranks = ALONE,
    description: str = "fit",
) -> list[tuple[int, float]]:
    """Minimise `loss_of(step)`; `module` ends with the weights that `evaluate` finds best.

    Args:
        module: what is trained; every parameter of it is saved, so leave a frozen target out.
        loss_of: the loss of a step, a scalar; under several ranks, over this rank's share.
        optimizers: of the module's parameters; their rates are warmed up and decayed (`schedule`).
        folder: `last.pt` (weights and optimizers) is written there every `save_every` steps, and
            training goes on from it when called again; `best.safetensors` holds the parameters
            of the best evaluation (`load_best` reads it).
        evaluate: a number to minimise, or to maximise such as `held_out_tau`; called every
            `evaluate_every` steps and after the last, on the first rank alone, with the module in
            evaluation mode. The first of equal values is kept. None: the last weights are.
        on_loss: receives (step, loss over all ranks) on the first rank.
        ranks: the processes that train together, see `specdec.training.distributed`.

    Returns:
        (step, value) of every evaluation, those before a break included.

    Raises:
        FloatingPointError: at a loss, gradient or evaluation that is not finite, naming the step;
            the last checkpoint and the best weights stay as they were.
        ValueError: for `ranks` that are not those that run.
    """
    ranks.check()
    optimizers = list(optimizers)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    folder = None if folder is None else Path(folder)
    start, history = resume(module, optimizers, folder, ranks)
    best = None if folder is None else read_best(folder / BEST, history)
    bar = tqdm(
        range(start, n_steps), initial=start, total=n_steps, desc=description, mininterval=1.0,
        disable=not ranks.is_first,
    )  # fmt: skip
    module.train()
    smooth = None
    for step in bar:
        for optimizer, base in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * schedule(step, n_steps, warmup)
        loss = loss_of(step)
        value = ranks.mean(loss.item())
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {step}")
        loss.backward()
        ranks.average_gradients(module.parameters())
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), max_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm} at step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if on_loss is not None and ranks.is_first:
            on_loss(step, value)
        smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
        done, last, is_better = step + 1, step + 1 == n_steps, False
        if evaluate is not None and (last or done % evaluate_every == 0):
            module.eval()
            value = ranks.broadcast(evaluate() if ranks.is_first else math.nan)
            module.train()
            if not math.isfinite(value):
                raise FloatingPointError(f"the evaluation is {value} after step {step}")
            history.append((done, value))
            is_better = best is None or (value > best.value if maximize else value < best.value)
            if is_better:
                best = Best(done, value, tensors_of(module))
            if ranks.is_first:
                tqdm.write(f"step {done}: {value:.4f}{' (best)' if is_better else ''}")
        if folder is not None and ranks.is_first:
            if is_better and best is not None:
                write_best(folder / BEST, best)
            if last or is_better or done % save_every == 0:
                save_state(folder / LAST, module, optimizers, done, history)
    if best is not None:
        copy_into(module, best.weights)
    ranks.wait()  # what the first rank has written is there for all
    module.eval()
    return history


LAST, BEST = "last.pt", "best.safetensors"


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
