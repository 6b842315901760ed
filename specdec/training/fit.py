"""One fit loop for everything that is trained.

Progress bar, clipping, checkpoints that resume exactly, several processes, and the best weights by
a held-out number: bits for a language model, tau for a drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .checkpoint import (
    BEST,
    LAST,
    Best,
    copy_into,
    read_best,
    resume,
    save_state,
    tensors_of,
    write_best,
)
from .distributed import ALONE, Ranks


def optimizers(
    module: nn.Module, lr: float, muon_lr: float | None = None, weight_decay: float = 0.01
) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings, heads, gains, experts; Muon for the blocks' matrices if `muon_lr`."""
    inner, rest = [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        apart = (".embedding", ".head", ".convolution")
        matrix = parameter.ndim == 2 and not any(part in f".{name}" for part in apart)
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
    maximize: bool = False,
    on_loss: Callable[[int, float], None] | None = None,
    ranks: Ranks = ALONE,
    description: str = "fit",
) -> list[tuple[int, float]]:
    """Minimise `loss_of(step)`; `module` ends with the weights that `evaluate` finds best.

    Args:
        module: what is trained; every parameter of it is saved, so leave a frozen target out.
        loss_of: the loss of a step, a scalar; under several ranks, over this rank's share. One that
            has run its own backward passes, as `parallel_backward` does, returns a value without.
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
        ValueError: for `ranks` that are not those that run, or a loss without any gradient.
    """
    ranks.check()
    optimizers = list(optimizers)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    folder = None if folder is None else Path(folder)
    start, history = resume(module, optimizers, folder, ranks)
    found = read_best(folder / BEST, history) if folder is not None and ranks.is_first else None
    best = ranks.broadcast(found)
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
        if loss.requires_grad:
            loss.backward()
        elif all(parameter.grad is None for parameter in module.parameters()):
            raise ValueError(f"loss_of: no gradient reaches the module at step {step}")
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
            score = ranks.broadcast(evaluate() if ranks.is_first else math.nan)
            module.train()
            if not math.isfinite(score):
                raise FloatingPointError(f"the evaluation is {score} after step {step}")
            history.append((done, score))
            is_better = best is None or (score > best.value if maximize else score < best.value)
            if is_better:
                best = Best(done, score, tensors_of(module))
            if ranks.is_first:
                tqdm.write(f"step {done}: {score:.4f}{' (best)' if is_better else ''}")
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
