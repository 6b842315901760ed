"""One fit loop for everything that is trained: progress bar, clipping, resumable checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm


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
    description: str = "fit",
) -> list[tuple[int, float]]:
    """Minimise `loss_of(step)`; returns (step, value) of every call of `evaluate`.

    With a `folder`, weights and optimizer states are written to `folder/last.pt` every
    `save_every` steps and training goes on from there when called again. Raises FloatingPointError
    at a non-finite loss or gradient, naming the step; the last checkpoint stays as it was.
    """
    optimizers = list(optimizers)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    checkpoint = None if folder is None else Path(folder) / "last.pt"
    start, history = 0, []
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(state["module"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start, history = state["step"], [tuple(entry) for entry in state["history"]]
    module.train()
    bar = tqdm(
        range(start, n_steps), initial=start, total=n_steps, desc=description, mininterval=1.0
    )
    smooth = None
    for step in bar:
        for optimizer, base in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * schedule(step, n_steps, warmup)
        loss = loss_of(step)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"loss is {value} at step {step}")
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), max_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm} at step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
        last = step + 1 == n_steps
        if evaluate is not None and (last or (step + 1) % evaluate_every == 0):
            module.eval()
            history.append((step + 1, evaluate()))
            module.train()
            tqdm.write(f"step {step + 1}: {history[-1][1]:.4f}")
        if checkpoint is not None and (last or (step + 1) % save_every == 0):
            save_state(checkpoint, module, optimizers, step + 1, history)
    module.eval()
    return history


def save_state(
    checkpoint: Path,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    history: list[tuple[int, float]],
) -> None:
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = checkpoint.with_suffix(".partial")
    torch.save(
        {
            "module": module.state_dict(),
            "step": step,
            "history": history,
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        },
        partial,
    )
    os.replace(partial, checkpoint)  # never half a checkpoint
