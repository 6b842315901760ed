"""Knowledge distillation: train a student, the drafter, towards a teacher, the target.

p is the teacher's distribution over the next token and q the student's. At every position of a
sequence the student is pulled towards the whole of p, which also says how plausible the tokens
are that did not come; a hard label says one token. A drafter distilled from its target is
accepted more often, since its acceptance probability is 1 - TV(p, q).

* soft labels with a temperature: Hinton et al., arXiv:1503.02531
* generalized Jensen-Shannon: Agarwal et al. (GKD), arXiv:2306.13649
* total variation, for drafters: Zhou et al. (DistillSpec), arXiv:2310.08461
* total variation mixed with the KL by acceptance (LK losses): arXiv:2602.23881
* squared error of logits: Kim et al., arXiv:2105.08919
* hidden states: Romero et al. (FitNets), arXiv:1412.6550
* text the student writes: `on_policy_batch`
* peers that teach each other: Zhang et al. (deep mutual learning), arXiv:1706.00384

A divergence is a function (student_logits, teacher_logits) -> one value per token; a loss takes
the function itself, so a new divergence is a new function: `divergence=total_variation`, or
`divergence=functools.partial(jensen_shannon, beta=0.1)`. Everything is computed in float32, or
in float64 where the logits are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from .accept import Rejection
from .generate import generate
from .protocol import Model

Divergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(student_logits [..., V], teacher_logits [..., V]) -> [...], one value per token, float32 or
better. Those below refuse shapes that differ with a ValueError."""


def forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(p || q) = sum_x p(x) log(p(x) / q(x)), `[..., V]` twice -> `[...]`.

    Makes q cover all of p. Infinite where q rules out a token that p allows.
    """
    log_q, log_p = _log_probs(student_logits, teacher_logits)
    return _kl(log_p, log_q)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(q || p) = sum_x q(x) log(q(x) / p(x)), `[..., V]` twice -> `[...]`.

    Makes q settle on what p holds likely. Infinite where p rules out a token that q allows.
    """
    log_q, log_p = _log_probs(student_logits, teacher_logits)
    return _kl(log_q, log_p)


def jensen_shannon(student_logits: Tensor, teacher_logits: Tensor, *, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    `[..., V]` twice -> `[...]`. Never infinite. Divided by beta it tends to the forward KL as
    beta -> 0, divided by 1 - beta to the reverse KL as beta -> 1; at 0 and 1 themselves it
    vanishes for all p and q, so these are refused (ValueError). GKD, arXiv:2306.13649.
    """
    _require(0 < beta < 1, f"beta must lie strictly between 0 and 1, got {beta}")
    log_q, log_p = _log_probs(student_logits, teacher_logits)
    mixture = beta * log_p.exp() + (1 - beta) * log_q.exp()
    log_m = mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def total_variation(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """TV(p, q) = 1/2 sum_x |p(x) - q(x)|, `[..., V]` twice -> `[...]`.

    1 - TV(p, q) = sum_x min(p(x), q(x)) is the probability that a token drawn from q passes the
    verification against p (Leviathan et al., arXiv:2211.17192, Section 3): the loss is the
    rejection rate itself, as in DistillSpec, arXiv:2310.08461. It is of first order in the gap
    between the logits where the others are of second, so the factor temperature^2 of
    `distillation_loss` overcorrects it: use it at temperature 1, or the one you draw with.
    """
    log_q, log_p = _log_probs(student_logits, teacher_logits)
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def acceptance_mix(student_logits: Tensor, teacher_logits: Tensor, *, eta: float = 3.0) -> Tensor:
    """l KL(p || q) + (1 - l) TV(p, q) with l = exp(-eta a), `[..., V]` twice -> `[...]`.

    a = 1 - TV is the token's own acceptance probability, taken without gradient: the KL leads where
    hardly anything is accepted and the gradient of the TV vanishes, the TV where q is close. At the
    default 3 l falls from 1 to 0.05. The hybrid of LK losses, arXiv:2602.23881.
    """
    distance = total_variation(student_logits, teacher_logits)
    share = torch.exp(-eta * (1 - distance.detach()))
    return share * forward_kl(student_logits, teacher_logits) + (1 - share) * distance


def mean_squared_error(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """1/V sum_x (student_logits(x) - teacher_logits(x))^2, `[..., V]` twice -> `[...]`.

    Compares the logits themselves (they must be finite), so a constant added to all of them
    counts here and nowhere else. The temperature cancels in `distillation_loss`. Kim et al.,
    arXiv:2105.08919, sum over the vocabulary; we take the mean, which makes temperature^2 times
    the forward KL tend to half of this loss for centred logits as the temperature grows.
    """
    _has_shape("teacher_logits", teacher_logits, student_logits.shape)
    return (_float(student_logits) - _float(teacher_logits)).square().mean(-1)


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = forward_kl,
    labels: Tensor | None = None,
    hard_weight: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Mean distillation loss per token (Hinton et al., arXiv:1503.02531, Section 2).

        (1 - a) T^2 mean divergence(student_logits / T, teacher_logits / T)
            + a mean cross_entropy(student_logits, labels),     T temperature, a hard_weight

    Softened gradients shrink as 1 / T^2, so the factor T^2 keeps their size and the balance
    with the cross entropy, which stays at temperature 1. No gradient reaches the teacher.

    Args:
        student_logits: `[..., V]`, any floating dtype.
        teacher_logits: `[..., V]`, the same shape; log-probabilities serve as well.
        temperature: positive; above 1 it flattens both distributions.
        divergence: one value per token from the two softened logits.
        labels: `[...]` integers, the token that the logits at the same place predict; needed
            if `hard_weight` > 0, not read otherwise.
        hard_weight: in [0, 1].
        mask: `[...]` bool, True where a token counts; the rest is never computed, so padding
            may hold anything. None: all count.

    Returns:
        A scalar in float32 or better.

    Raises:
        ValueError: shapes that differ, a temperature that is not positive and finite, a
            `hard_weight` outside [0, 1] or without `labels`, a label outside the vocabulary, no
            token to average over, a divergence that returns anything but one value per token.
    """
    _positive("temperature", temperature)
    _require(0 <= hard_weight <= 1, f"hard_weight must lie in [0, 1], got {hard_weight}")
    _has_shape("teacher_logits", teacher_logits, student_logits.shape)
    student = _float(_select("student_logits", student_logits, mask))
    teacher = _float(_select("teacher_logits", teacher_logits.detach(), mask))
    values = divergence(student / temperature, teacher / temperature)
    _has_shape("the divergence (one value per token)", values, student.shape[:-1])
    soft = temperature**2 * values.mean()
    if hard_weight == 0:
        return soft
    if labels is None:
        raise ValueError(f"labels must be given where hard_weight is not 0, got {hard_weight}")
    _has_shape("labels", labels, student_logits.shape[:-1])
    labels = (labels if mask is None else labels[mask]).long()
    low, high, last = int(labels.min()), int(labels.max()), student.shape[-1] - 1
    _require(low >= 0 and high <= last, f"labels must lie in 0..{last}, got {low}..{high}")
    hard = F.cross_entropy(student.reshape(-1, last + 1), labels.reshape(-1))
    return (1 - hard_weight) * soft + hard_weight * hard


@dataclass(frozen=True)
class TopK:
    """A teacher's soft labels, small enough to store: its k likeliest tokens and one bucket.

    `log_probs` `[..., k + 1]`: of the kept tokens and, last, of all others together, at
    `temperature`. `indices` `[..., k]` integers: which tokens were kept, of `vocab_size`. The
    temperature is settled here, since the bucket at another one needs the logits given away.
    """

    log_probs: Tensor
    indices: Tensor
    vocab_size: int
    temperature: float = 1.0


def top_k_teacher(teacher_logits: Tensor, k: int, *, temperature: float = 1.0) -> TopK:
    """Keep the teacher's `k` likeliest tokens, `teacher_logits` `[..., V]`, without gradients.

    Raises ValueError for a `k` outside 1..V or a temperature that is not positive and finite.
    """
    vocab_size = teacher_logits.shape[-1]
    _require(1 <= k <= vocab_size, f"k must lie in 1..{vocab_size} (the vocabulary), got {k}")
    _positive("temperature", temperature)
    log_p = F.log_softmax(_float(teacher_logits.detach()) / temperature, dim=-1)
    indices = log_p.topk(k).indices  # [..., k]
    return TopK(_buckets(log_p, indices), indices, vocab_size, temperature)


def top_k_loss(
    student_logits: Tensor,
    teacher: TopK,
    *,
    divergence: Divergence = forward_kl,
    mask: Tensor | None = None,
) -> Tensor:
    """`distillation_loss` against stored labels: over the kept tokens and one bucket for the rest.

    Still a divergence between two distributions: zero only if the student agrees on the kept
    tokens, never more than the full loss, and equal to it at k = V. This holds for every
    divergence here but `mean_squared_error`, which has no meaning on a bucket.

    Args:
        student_logits: `[..., V]`.
        teacher: labels of the same leading shape and vocabulary, with their temperature.
        divergence, mask: as in `distillation_loss`.

    Returns:
        A scalar in float32 or better.

    Raises:
        ValueError: another leading shape or vocabulary than the labels', no token to average over.
    """
    stored = (*teacher.indices.shape[:-1], teacher.vocab_size)
    _has_shape("student_logits", student_logits, stored)
    log_q = F.log_softmax(_float(student_logits) / teacher.temperature, dim=-1)
    student = _buckets(log_q, teacher.indices)  # [..., k + 1]
    loss = distillation_loss(student, teacher.log_probs, divergence=divergence, mask=mask)
    return teacher.temperature**2 * loss


def ensemble(teacher_logits: Sequence[Tensor]) -> Tensor:
    """Several teachers as one: log of the mean of their distributions, usable as logits.

    `teacher_logits`: one `[..., V]` per teacher; returns `[..., V]` log-probabilities in float32
    or better. The mean is taken at temperature 1; a loss softens the mean. (The arithmetic mean
    of Hinton et al., arXiv:1503.02531.) Raises ValueError for no teacher or shapes that differ.
    """
    _require(len(teacher_logits) > 0, "teacher_logits must hold at least one teacher, got none")
    for i, logits in enumerate(teacher_logits):
        _has_shape(f"teacher_logits[{i}]", logits, teacher_logits[0].shape)
    log_p = torch.stack([F.log_softmax(_float(x), dim=-1) for x in teacher_logits])  # [n, ..., V]
    return log_p.logsumexp(0) - math.log(len(teacher_logits))


def feature_loss(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    projection: Callable[[Tensor], Tensor] | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Hint loss: mean squared error between hidden states (FitNets, arXiv:1412.6550, Eq. 3).

    The paper's 1/2 and sum over the width become a mean. No gradient reaches the teacher; the
    projection is trained with the student, so its weights belong in the optimizer.

    Args:
        student_hidden: `[..., D_student]`.
        teacher_hidden: `[..., D_teacher]`.
        projection: D_student -> D_teacher, such as `nn.Linear`; None: the widths are equal.
        mask: `[...]` bool, True where a position counts. None: all.

    Returns:
        A scalar in float32 or better.

    Raises:
        ValueError: shapes that differ after the projection, no position to average over.
    """
    student = _select("student_hidden", student_hidden, mask)
    teacher = _select("teacher_hidden", teacher_hidden.detach(), mask)
    if projection is not None:
        student = projection(student)  # [..., D_teacher]
    _has_shape("student_hidden (projected)", student, teacher.shape)
    return (_float(student) - _float(teacher)).square().mean()


def distillation_step(
    student: nn.Module,
    teacher: nn.Module,
    tokens: Tensor,
    optimizer: Optimizer,
    *,
    temperature: float = 1.0,
    divergence: Divergence = forward_kl,
    hard_weight: float = 0.0,
    mask: Tensor | None = None,
    max_norm: float = 1.0,
) -> float:
    """One offline step: the student matches the frozen teacher at every position of a batch.

    Both models are called as `model(tokens).logits` -> `[B, S, V]`. The teacher runs without
    gradients; the student in whatever mode it is in. With a `hard_weight` the labels are the
    next tokens, and the last position, which has none, is left out of both parts of the loss.

    Args:
        tokens: `[B, S]` int64.
        optimizer: over the student's parameters; their gradients are clipped together.
        temperature, divergence, hard_weight: as in `distillation_loss`.
        mask: `[B, S]` bool, True at positions whose prediction counts. None: all.
        max_norm: the gradient norm to clip to, positive.

    Returns:
        The loss before the step.

    Raises:
        ValueError: a teacher in training mode (its dropout would blur the labels), or what
            `distillation_loss` refuses.
        FloatingPointError: a loss or gradient that is not finite; the student is unchanged.
    """
    _require(
        not any(module.training for module in teacher.modules()),
        "teacher must be in evaluation mode, got a module in training mode: call teacher.eval()",
    )
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        teacher_logits = teacher(tokens).logits
    student_logits = student(tokens).logits  # [B, S, V]
    loss = _sequence_loss(
        student_logits, teacher_logits, tokens, temperature, divergence, hard_weight, mask
    )
    return _descend([loss], [optimizer], max_norm)[0]


def on_policy_batch(
    student: Model,
    prompts: Sequence[Tensor],
    n_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Text the student writes itself, to be scored by the teacher in a `distillation_step`.

    A student trained on other people's text never sees its own mistakes; a drafter reads little
    else. GKD, arXiv:2306.13649; for drafters, DistillSpec, arXiv:2310.08461.

    Args:
        student: any `Model`; it samples `n_tokens` after every prompt, without gradients.
        prompts: 1-D int64 tensors, of any lengths.
        temperature, seed: of the sampling (`Rejection`, without a drafter).

    Returns:
        tokens `[B, S]` int64, right-padded with 0, and mask `[B, S]` bool: True at positions whose
        prediction is a token the student wrote. The last token of a row predicts nothing.

    Raises:
        ValueError: what `generate` refuses.
    """
    rule = Rejection(temperature, seed=seed)
    rows = generate(student, prompts, max_new_tokens=n_tokens, rule=rule).sequences
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    written = torch.tensor([len(row) - n_tokens for row in rows], device=tokens.device)
    first = (written - 1).unsqueeze(1)  # the last prompt token predicts the first written one
    return tokens, (position >= first) & (position < first + n_tokens)


def mutual_step(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    divergence: Divergence = forward_kl,
    hard_weight: float = 0.5,
    mask: Tensor | None = None,
    max_norm: float = 1.0,
) -> list[float]:
    """One online step: models trained together, each with all others as its teachers.

    Model k minimises the mean over its peers j of `distillation_loss(logits_k, logits_j)`, with
    the next tokens as hard labels; a `hard_weight` of 1/2 is the paper's sum, halved. Deep mutual
    learning, arXiv:1706.00384, updates the models in turn; here all logits come from one forward
    pass each, before any update, and if one loss or gradient is not finite no model moves.

    `models`: at least two, `model(tokens).logits` -> `[B, S, V]`; `optimizers`: one per model.
    The rest, and what is raised, is as in `distillation_step`. Returns the losses in order.
    """
    _require(len(models) >= 2, f"models must hold at least two models, got {len(models)}")
    _require(
        len(optimizers) == len(models),
        f"optimizers must hold one per model, {len(models)}, got {len(optimizers)}",
    )
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    logits = [model(tokens).logits for model in models]
    losses = []
    for k, own in enumerate(logits):
        peers = logits[:k] + logits[k + 1 :]
        settings = (tokens, temperature, divergence, hard_weight, mask)
        losses.append(torch.stack([_sequence_loss(own, peer, *settings) for peer in peers]).mean())
    return _descend(losses, optimizers, max_norm)


def _sequence_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tokens: Tensor,
    temperature: float,
    divergence: Divergence,
    hard_weight: float,
    mask: Tensor | None,
) -> Tensor:
    """`distillation_loss` over a batch of sequences, whose next tokens are the labels."""
    if mask is not None:
        _has_shape("mask", mask, tokens.shape)
    labels = None
    if hard_weight > 0:
        labels, mask = tokens[:, 1:], None if mask is None else mask[:, :-1]
        student_logits, teacher_logits = student_logits[:, :-1], teacher_logits[:, :-1]
    return distillation_loss(
        student_logits,
        teacher_logits,
        temperature=temperature,
        divergence=divergence,
        labels=labels,
        hard_weight=hard_weight,
        mask=mask,
    )


def _descend(
    losses: Sequence[Tensor], optimizers: Sequence[Optimizer], max_norm: float
) -> list[float]:
    """Clip and step every optimizer on its own loss: all of them, or none if one is not finite."""
    _positive("max_norm", max_norm)
    values = [float(loss.detach()) for loss in losses]
    if not all(map(math.isfinite, values)):
        raise FloatingPointError(f"loss must be finite, got {values}; no parameter has changed")
    norms = []
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, max_norm)))
    if not all(map(math.isfinite, norms)):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(f"gradient norm must be finite, got {norms} at loss {values}")
    for optimizer in optimizers:
        optimizer.step()
    return values


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of two log-distributions; a token with p = 0 adds nothing, even where q = 0 as well."""
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)


def _log_probs(student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    _has_shape("teacher_logits", teacher_logits, student_logits.shape)
    log_q = F.log_softmax(_float(student_logits), dim=-1)
    return log_q, F.log_softmax(_float(teacher_logits), dim=-1)


def _buckets(log_probs: Tensor, indices: Tensor) -> Tensor:
    """Log-probabilities `[..., k + 1]` of the tokens at `indices` and of all others together."""
    kept = log_probs.gather(-1, indices.long())
    rest = log_probs.exp().scatter(-1, indices.long(), 0.0).sum(-1, keepdim=True)
    # An empty bucket gets the smallest number instead of 0, whose log has no finite gradient.
    return torch.cat([kept, rest.clamp_min(torch.finfo(rest.dtype).tiny).log()], dim=-1)


def _select(name: str, values: Tensor, mask: Tensor | None) -> Tensor:
    """The rows `[M, D]` of `values` `[..., D]` where the mask is True; without a mask, `values`."""
    if mask is not None:
        _require(mask.dtype == torch.bool, f"mask must be bool, got {mask.dtype}")
        _has_shape("mask", mask, values.shape[:-1])
        _require(bool(mask.any()), "mask must be True somewhere, got one that is False everywhere")
        values = values[mask]  # [M, D]
    _require(values.numel() > 0, f"{name} must not be empty, got shape {tuple(values.shape)}")
    return values


def _float(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _has_shape(name: str, values: Tensor, shape: Sequence[int]) -> None:
    expected, got = tuple(shape), tuple(values.shape)
    _require(got == expected, f"{name} must have shape {expected}, got {got}")


def _positive(name: str, value: float) -> None:
    finite = math.isfinite(value) and value > 0
    _require(finite, f"{name} must be positive and finite, got {value}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
