"""Distillation: divergences by hand, the loss and its mask, stored labels, and the steps.

The literal pair of most tests is p = [1/2, 1/2] for the teacher and q = [1/4, 3/4] for the
student, whose logits are their logs.
"""

import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from specdec.distill import (
    TopK,
    acceptance_mix,
    distillation_loss,
    distillation_step,
    ensemble,
    feature_loss,
    forward_kl,
    jensen_shannon,
    mean_squared_error,
    mutual_step,
    on_policy_batch,
    reverse_kl,
    top_k_loss,
    top_k_teacher,
    total_variation,
)
from specdec.models import Transformer
from specdec.testing.strategies import small_target

ln = math.log
INF = math.inf
F_DIVERGENCES = [
    forward_kl,
    reverse_kl,
    jensen_shannon,
    partial(jensen_shannon, beta=0.1),
    total_variation,
    acceptance_mix,
]
DIVERGENCES = [*F_DIVERGENCES, mean_squared_error]


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected, tolerance: float = 1e-12) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)


P = tensor([1 / 2, 1 / 2]).log()
Q = tensor([1 / 4, 3 / 4]).log()
FORWARD = ln(4 / 3) / 2


def random_logits(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


class Bigram(nn.Module):
    """The smallest model: logits that depend on the current token alone."""

    def __init__(self, seed: int, vocab_size: int = 6, dropout: float = 0.0):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size, dtype=torch.float64)
        self.table.weight.data = random_logits(vocab_size, vocab_size, seed=seed)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.dropout(self.table(tokens)))


TOKENS = torch.tensor([[0, 1, 2, 3], [3, 5, 4, 0]])


def pair(lr: float = 0.1) -> tuple[Bigram, Bigram, torch.optim.Optimizer]:
    student, teacher = Bigram(seed=1), Bigram(seed=2).eval()
    return student, teacher, torch.optim.SGD(student.parameters(), lr=lr)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (forward_kl, ln(2) / 2 + ln(2 / 3) / 2),
        (reverse_kl, ln(1 / 2) / 4 + 3 * ln(3 / 2) / 4),
        (
            partial(jensen_shannon, beta=0.25),  # m = [5/16, 11/16]
            (ln(8 / 5) / 2 + ln(8 / 11) / 2) / 4 + 3 * (ln(4 / 5) / 4 + 3 * ln(12 / 11) / 4) / 4,
        ),
        (total_variation, 1 / 4),
        (mean_squared_error, (ln(2) ** 2 + ln(3 / 2) ** 2) / 2),
    ],
)
def test_divergences_by_hand(divergence, expected):
    """Catches p and q swapped, beta on the wrong side, a missing 1/2, a sum instead of a mean."""
    assert close(divergence(Q, P), expected)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences_vanish_at_the_teacher_and_are_positive_elsewhere(divergence):
    """Catches a cross entropy in place of a divergence, and a sign."""
    logits, other = random_logits(3, 5, seed=0), random_logits(3, 5, seed=1)
    assert close(divergence(logits, logits), torch.zeros(3))
    assert (divergence(other, logits) > 0.01).all()


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
def test_a_token_ruled_out_by_both_changes_nothing(divergence):
    """Catches 0 * (inf - inf): a vocabulary padded with -inf must not turn the loss into NaN."""
    student = tensor([1 / 4, 0, 3 / 4]).log().requires_grad_()
    value = divergence(student, tensor([1 / 2, 0, 1 / 2]).log())
    value.backward()
    assert close(value.detach(), divergence(Q, P))
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_jensen_shannon_tends_to_both_kls():
    """Catches beta weighting the wrong distribution in the mixture or outside it."""
    q, p = random_logits(4, seed=3), random_logits(4, seed=4)
    small = 1e-7
    assert close(jensen_shannon(q, p, beta=small) / small, forward_kl(q, p), 1e-5)
    assert close(jensen_shannon(q, p, beta=1 - small) / small, reverse_kl(q, p), 1e-5)


@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 8), n=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_total_variation_is_the_rejection_rate(seed, scale, n):
    """Catches a TV without its 1/2: one minus it must be sum_x q(x) min(1, p(x) / q(x))."""
    q_logits = random_logits(n, seed=seed, scale=scale)
    p_logits = random_logits(n, seed=seed + 1, scale=scale)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    accepted = (q * (p / q).clamp(max=1)).sum()
    assert close(1 - total_variation(q_logits, p_logits), accepted)
    assert close(accepted, torch.minimum(p, q).sum())


def test_loss_by_hand_with_temperature_and_labels():
    """Catches T for T^2, logits multiplied by T, alpha on the wrong part, a softened hard part.

    At T = 2 the softened pair is p and q; at T = 1 the student's is [1/10, 9/10].
    """
    student, teacher, labels = (
        2 * torch.stack([Q, Q]),
        2 * torch.stack([P, Q]),
        torch.tensor([1, 0]),
    )
    loss = partial(distillation_loss, student, teacher, temperature=2.0)
    soft = 4 * FORWARD / 2
    hard = (-ln(9 / 10) - ln(1 / 10)) / 2
    assert close(loss(), soft)
    assert close(loss(labels=labels, hard_weight=0.25), 0.75 * soft + 0.25 * hard)
    assert close(loss(labels=labels, hard_weight=1.0), hard)
    assert close(loss(labels=labels), soft)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_are_finite_and_reach_only_the_student(divergence):
    """Catches a teacher that is not detached, and divergences with NaN gradients at large gaps."""
    student = (30 * random_logits(2, 3, 7, seed=5)).requires_grad_()
    teacher = (30 * random_logits(2, 3, 7, seed=6)).requires_grad_()
    distillation_loss(student, teacher, divergence=divergence, temperature=1.5).backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert student.grad.abs().max() > 0
    assert teacher.grad is None


def test_gradient_size_does_not_depend_on_a_high_temperature():
    """Catches a missing T^2: the limit of the gradient is the centred gap of logits over V.

    The limit of the loss is half the mean squared error of centred logits.
    """
    gap = tensor([1.0, -2.0, 4.0])
    teacher = tensor([0.5, 0.0, -1.0])
    for temperature in (1e3, 1e5):
        student = (teacher + gap).requires_grad_()
        loss = distillation_loss(student, teacher, temperature=temperature)
        loss.backward()
        assert student.grad is not None
        assert close(student.grad, (gap - gap.mean()) / 3, 5e-3)
        assert close(loss.detach(), (gap - gap.mean()).square().mean() / 2, 5e-3)


def test_masked_tokens_are_not_read():
    """Catches a mask that weights instead of selects: NaN padding or label -100 read anyway."""
    student, teacher = random_logits(2, 3, 5, seed=7), random_logits(2, 3, 5, seed=8)
    labels = torch.tensor([[0, 4, -100], [-100, 2, 1]])
    mask = labels >= 0
    expected = distillation_loss(
        student[mask], teacher[mask], labels=labels[mask], hard_weight=0.3, divergence=reverse_kl
    )
    student[~mask], teacher[~mask] = math.nan, math.nan
    student.requires_grad_()
    loss = distillation_loss(
        student, teacher, labels=labels, hard_weight=0.3, divergence=reverse_kl, mask=mask
    )
    loss.backward()
    assert close(loss.detach(), expected)
    assert student.grad is not None
    assert (student.grad[~mask] == 0).all()
    assert (student.grad[mask] != 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_half_precision_logits_are_computed_in_float32(divergence):
    """Catches a division by the temperature, a softmax or a mean in bfloat16."""
    student = random_logits(4, 50, seed=9).bfloat16()
    teacher = random_logits(4, 50, seed=10).bfloat16()
    loss = distillation_loss(student, teacher, divergence=divergence, temperature=3.0)
    exact = distillation_loss(
        student.double(), teacher.double(), divergence=divergence, temperature=3.0
    )
    assert loss.dtype == torch.float32
    assert exact.dtype == torch.float64
    assert divergence(student, teacher).dtype == torch.float32
    assert close(loss.double(), exact, 1e-5)


def test_top_k_by_hand():
    """Catches kept tokens that are renormalised, or a rest that is dropped."""
    student = tensor([1 / 4, 1 / 4, 1 / 2]).log()
    labels = top_k_teacher(tensor([1 / 4, 1 / 2, 1 / 4]).log(), k=1)
    assert labels.indices.tolist() == [1]
    assert close(labels.log_probs.exp(), [1 / 2, 1 / 2])
    assert close(top_k_loss(student, labels), FORWARD)


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_top_k_is_the_full_loss_at_the_whole_vocabulary(divergence, temperature):
    """Catches a lost T^2, an empty bucket that adds to the loss, and its NaN gradient."""
    teacher = random_logits(2, 3, 5, seed=11)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    gradients = []
    values = []
    for stored in (False, True):
        student = random_logits(2, 3, 5, seed=12).requires_grad_()
        if stored:
            labels = top_k_teacher(teacher, k=5, temperature=temperature)
            loss = top_k_loss(student, labels, divergence=divergence, mask=mask)
        else:
            loss = distillation_loss(
                student, teacher, temperature=temperature, divergence=divergence, mask=mask
            )
        loss.backward()
        gradients.append(student.grad)
        values.append(loss.detach())
    assert close(values[1], values[0])
    assert close(gradients[1], gradients[0])


@given(seed=st.integers(0, 10**6), n=st.integers(2, 9), data=st.data())
@settings(max_examples=50, deadline=None)
def test_top_k_never_exceeds_the_full_loss_and_grows_with_k(seed, n, data):
    """Catches a bucket that is no probability: merging tokens cannot raise a divergence."""
    k = data.draw(st.integers(1, n - 1))
    divergence = data.draw(st.sampled_from(F_DIVERGENCES))
    student, teacher = random_logits(n, seed=seed), random_logits(n, seed=seed + 1)
    less, more = (
        top_k_loss(student, top_k_teacher(teacher, i), divergence=divergence) for i in (k, k + 1)
    )
    assert -1e-12 <= less <= more + 1e-12
    assert more <= distillation_loss(student, teacher, divergence=divergence) + 1e-12


def test_top_k_survives_a_padded_vocabulary():
    """Catches the log of an empty bucket when all tokens given away were impossible anyway."""
    student = tensor([1 / 4, 3 / 4, 0, 0]).log().requires_grad_()
    loss = top_k_loss(student, top_k_teacher(tensor([1 / 2, 1 / 2, 0, 0]).log(), k=2))
    loss.backward()
    assert close(loss.detach(), FORWARD)
    assert student.grad is not None
    assert close(student.grad, [-1 / 4, 1 / 4, 0, 0])


def test_ensemble_averages_probabilities():
    """Catches a mean of logits (a geometric mean), and a result that does not sum to one."""
    shifted = Q + 7
    assert close(ensemble([P, shifted]).exp(), [3 / 8, 5 / 8])
    assert close(ensemble([Q]), Q)


def test_feature_loss_by_hand():
    """Catches a sum instead of a mean, a mask or projection ignored, a teacher not detached."""
    student = tensor([[1.0, 2.0], [5.0, 5.0]]).requires_grad_()
    teacher = tensor([[3.0], [1.0]]).requires_grad_()
    double_sum = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    double_sum.weight.data = tensor([[2.0, 2.0]])  # 6 and 20
    loss = partial(feature_loss, student, teacher, double_sum)
    assert close(loss().detach(), (9 + 361) / 2)
    first = loss(mask=torch.tensor([True, False]))
    first.backward()
    assert close(first.detach(), 9)
    assert double_sum.weight.grad is not None
    assert close(double_sum.weight.grad, [[6.0, 12.0]])
    assert teacher.grad is None
    assert close(feature_loss(tensor([[1.0, 2.0]]), tensor([[3.0, 5.0]])), 6.5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_step_overfits_one_batch(divergence):
    """Catches a step that never moves, climbs, or pulls the student anywhere but to the teacher."""
    student, teacher, _ = pair()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.1)
    step = partial(distillation_step, student, teacher, TOKENS, optimizer, divergence=divergence)
    first, *_, last = [step(temperature=1.0) for _ in range(200)]
    assert first > 0.1
    assert last < 0.05 * first
    assert total_variation(student(TOKENS).logits, teacher(TOKENS).logits).max() < 0.06


def test_step_leaves_the_teacher_alone():
    """Catches gradients through the teacher, a teacher stepped, or a mode changed for it."""
    student, teacher, optimizer = pair()
    before = deepcopy(teacher.state_dict())
    distillation_step(student, teacher, TOKENS, optimizer)
    assert all(p.grad is None for p in teacher.parameters())
    assert all(torch.equal(teacher.state_dict()[name], w) for name, w in before.items())
    assert not teacher.training
    assert student.training


def test_step_refuses_a_teacher_in_training_mode():
    """Catches soft labels blurred by dropout, also where only a part was left in training mode."""
    student, teacher, optimizer = pair()
    teacher.dropout.train()
    with pytest.raises(ValueError, match="teacher must be in evaluation mode"):
        distillation_step(student, teacher, TOKENS, optimizer)


def test_step_pairs_each_position_with_its_next_token():
    """Catches hard labels that are not shifted, and soft and hard parts over other positions."""
    student, teacher, optimizer = pair()
    with torch.no_grad():
        q, p = student(TOKENS).logits, teacher(TOKENS).logits
    soft = 4 * forward_kl(q / 2, p / 2)
    hard = -q.log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0]
    mask = torch.tensor([[True, True, False, True], [True, False, True, False]])
    loss = partial(distillation_loss, q, p, temperature=2.0)
    step = partial(distillation_step, student, teacher, TOKENS, optimizer, temperature=2.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert step() == pytest.approx(float(loss()), abs=1e-12)
    assert step(mask=mask) == pytest.approx(float(soft[mask].mean()), abs=1e-12)
    expected = 0.75 * soft[:, :-1][mask[:, :-1]].mean() + 0.25 * hard[mask[:, :-1]].mean()
    assert step(mask=mask, hard_weight=0.25) == pytest.approx(float(expected), abs=1e-12)


def test_step_clips_and_forgets_old_gradients():
    """Catches clipping left out or after the step, and gradients that pile up between steps."""
    student, teacher, optimizer = pair(lr=1.0)
    before = student.table.weight.detach().clone()
    student.table.weight.grad = torch.full_like(before, 1e6)
    gradient = torch.autograd.grad(
        distillation_loss(student(TOKENS).logits, teacher(TOKENS).logits), student.table.weight
    )[0]
    distillation_step(student, teacher, TOKENS, optimizer, max_norm=0.01)
    moved = before - student.table.weight.detach()
    assert gradient.norm() > 0.02
    assert close(moved, 0.01 * gradient / gradient.norm(), 1e-6)


@pytest.mark.parametrize("culprit", ["loss", "gradient"])
def test_nothing_moves_on_a_non_finite_step(culprit):
    """Catches an optimizer that steps on NaN: neither weights nor Adam's moments may change."""
    student, teacher, _ = pair()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.1)

    def infinite_slope(q: Tensor, p: Tensor) -> Tensor:
        return forward_kl(q, p) + (q - q.detach()).sum(-1).sqrt()

    if culprit == "loss":
        teacher.table.weight.data[3] = math.nan
    divergence = forward_kl if culprit == "loss" else infinite_slope
    before = student.table.weight.detach().clone()
    with pytest.raises(FloatingPointError, match=f"{culprit}.* must be finite"):
        distillation_step(student, teacher, TOKENS, optimizer, divergence=divergence)
    assert torch.equal(student.table.weight, before)
    assert student.table.weight.grad is None
    assert not optimizer.state


def test_mutual_step_by_hand():
    """Catches a model as its own peer, gradients into peers, old ones kept, updates in turn."""
    models = [Bigram(seed=s) for s in (1, 2, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    before = [m.table.weight.detach().clone() for m in models]
    logits = [m(TOKENS).logits[:, :-1] for m in models]
    losses = []
    for k, own in enumerate(logits):
        hard = nn.functional.cross_entropy(own.flatten(0, 1), TOKENS[:, 1:].flatten())
        peers = [logits[j].detach() for j in range(3) if j != k]
        soft = sum((forward_kl(own, peer).mean() for peer in peers), start=tensor(0.0)) / 2
        losses.append((soft + hard) / 2)
    gradients = [
        torch.autograd.grad(loss, model.table.weight)[0]
        for loss, model in zip(losses, models, strict=True)
    ]
    for model in models:
        model.table.weight.grad = torch.ones_like(model.table.weight)
    values = mutual_step(models, optimizers, TOKENS, max_norm=1e9)
    assert values == pytest.approx([loss.item() for loss in losses], abs=1e-12)
    for model, weight, gradient in zip(models, before, gradients, strict=True):
        assert close(weight - model.table.weight.detach(), gradient)


def test_mutual_step_moves_all_or_none():
    """Catches peers that step before a NaN in another model is noticed."""
    models = [Bigram(seed=s) for s in (1, 2)]
    models[1].table.weight.data[5] = INF
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    before = models[0].table.weight.detach().clone()
    with pytest.raises(FloatingPointError, match="loss must be finite"):
        mutual_step(models, optimizers, TOKENS)
    assert torch.equal(models[0].table.weight, before)


LOGITS = torch.zeros(2, 3, 5)
LABELS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distillation_loss(LOGITS, LOGITS[:, :1]), r"teacher_logits .* \(2, 3, 5\), got"),
        (lambda: forward_kl(LOGITS, LOGITS[:1]), r"teacher_logits .* got \(1, 3, 5\)"),
        (lambda: mean_squared_error(LOGITS, LOGITS[..., :1]), r"teacher_logits .* got \(2, 3, 1\)"),
        (lambda: distillation_loss(LOGITS, LOGITS, temperature=0), "temperature .* got 0"),
        (lambda: distillation_loss(LOGITS, LOGITS, temperature=math.nan), "temperature .* got nan"),
        (lambda: distillation_loss(LOGITS, LOGITS, temperature=INF), "temperature .* got inf"),
        (
            lambda: distillation_loss(LOGITS, LOGITS, hard_weight=1.5),
            r"hard_weight must lie in .* got 1.5",
        ),
        (
            lambda: distillation_loss(LOGITS, LOGITS, hard_weight=-0.1),
            r"hard_weight must lie in .* got -0.1",
        ),
        (lambda: distillation_loss(LOGITS, LOGITS, hard_weight=0.5), "labels must be given"),
        (
            lambda: distillation_loss(LOGITS, LOGITS, hard_weight=0.5, labels=LABELS[:1]),
            r"labels must have shape \(2, 3\), got \(1, 3\)",
        ),
        (
            lambda: distillation_loss(LOGITS, LOGITS, hard_weight=0.5, labels=LABELS - 100),
            "labels must lie in 0..4, got -100",
        ),
        (
            lambda: distillation_loss(LOGITS, LOGITS, hard_weight=0.5, labels=LABELS + 5),
            "labels must lie in 0..4, got 5",
        ),
        (lambda: distillation_loss(LOGITS, LOGITS, mask=LABELS.bool()), "mask must be True some"),
        (lambda: distillation_loss(LOGITS, LOGITS, mask=LABELS), "mask must be bool, got"),
        (lambda: distillation_loss(LOGITS, LOGITS, mask=LABELS[0] == 0), "mask must have shape"),
        (lambda: distillation_loss(LOGITS[:0], LOGITS[:0]), "student_logits must not be empty"),
        (
            lambda: distillation_loss(LOGITS, LOGITS, divergence=nn.functional.mse_loss),
            r"divergence \(one value per token\) must have shape \(2, 3\), got \(\)",
        ),
        (lambda: jensen_shannon(LOGITS, LOGITS, beta=0.0), "beta .* got 0.0"),
        (lambda: jensen_shannon(LOGITS, LOGITS, beta=1.0), "beta .* got 1.0"),
        (lambda: top_k_teacher(LOGITS, 0), r"k must lie in 1..5 .* got 0"),
        (lambda: top_k_teacher(LOGITS, 6), r"k must lie in 1..5 .* got 6"),
        (lambda: top_k_teacher(LOGITS, 2, temperature=-1.0), "temperature .* got -1.0"),
        (
            lambda: top_k_loss(LOGITS[..., :4], top_k_teacher(LOGITS, 2)),
            r"student_logits must have shape \(2, 3, 5\), got \(2, 3, 4\)",
        ),
        (
            lambda: top_k_loss(LOGITS, TopK(LOGITS, LABELS[..., None], 5)),
            r"teacher_logits must have shape \(2, 3, 2\), got \(2, 3, 5\)",
        ),
        (lambda: ensemble([]), "at least one teacher"),
        (lambda: ensemble([LOGITS, LOGITS[:1]]), r"teacher_logits\[1\] must have shape"),
        (lambda: feature_loss(LOGITS, LOGITS[..., :4]), r"student_hidden \(projected\) must have"),
        (lambda: feature_loss(LOGITS, LOGITS, mask=LABELS.bool()), "mask must be True somewhere"),
        (
            lambda: distillation_step(*pair()[:2], TOKENS, pair()[2], max_norm=0.0),
            "max_norm .* 0.0",
        ),
        (
            lambda: distillation_step(*pair()[:2], TOKENS, pair()[2], mask=TOKENS[0] > 0),
            r"mask must have shape \(2, 4\), got \(4,\)",
        ),
        (
            lambda: distillation_step(*pair()[:2], TOKENS[:, :1], pair()[2], hard_weight=0.5),
            r"student_logits must not be empty, got shape \(2, 0, 6\)",
        ),
        (lambda: mutual_step([Bigram(1)], [], TOKENS), "models must hold at least two .* got 1"),
        (lambda: mutual_step([Bigram(1), Bigram(2)], [], TOKENS), "optimizers .* 2, got 0"),
    ],
)
def test_wrong_input_is_named(call, message):
    """Catches silent broadcasting, averages over nothing, ignored labels and crashes deep down."""
    with pytest.raises(ValueError, match=message):
        call()


def test_acceptance_mix_by_hand():
    """Catches l of the distance for l of the acceptance, and KL and TV in each other's place.

    TV of the literal pair is 1/4, so that 3/4 is accepted and l = exp(-9/4).
    """
    share = math.exp(-9 / 4)
    assert close(acceptance_mix(Q, P), share * FORWARD + (1 - share) / 4)
    assert close(acceptance_mix(Q, P, eta=0.0), FORWARD)
    assert close(acceptance_mix(Q, P, eta=1e3), 1 / 4)
    assert close(acceptance_mix(P, P), 0.0)


def test_acceptance_mix_where_nothing_is_accepted():
    """Catches a share that does not reach 1 as p and q part, where the TV has no gradient left."""
    q, p = tensor([30.0, 0.0]).requires_grad_(True), tensor([0.0, 30.0])
    mixed = acceptance_mix(q, p)
    assert close(mixed, forward_kl(q, p), 1e-9)
    (gradient,) = torch.autograd.grad(mixed, q)
    assert close(gradient, tensor([1.0, -1.0]), 1e-9)
    (vanished,) = torch.autograd.grad(total_variation(q, p), q)
    assert float(vanished.abs().max()) < 1e-9


def test_acceptance_mix_has_no_gradient_through_its_share():
    """Catches a share that is differentiated: it would push towards less acceptance."""
    q = Q.clone().requires_grad_(True)
    share = math.exp(-9 / 4)
    fixed = share * forward_kl(q, P) + (1 - share) * total_variation(q, P)
    (expected,) = torch.autograd.grad(fixed, q)
    (gradient,) = torch.autograd.grad(acceptance_mix(q, P), q)
    assert close(gradient, expected)


def test_on_policy_batch_marks_what_the_student_wrote():
    """A mask off by one: the teacher would score the prompt, or miss the first written token."""
    student = small_target(1)
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    tokens, mask = on_policy_batch(student, prompts, 2, seed=5)
    assert tokens.shape == (2, 5)
    assert tokens[0, :3].tolist() == [1, 2, 3]
    assert tokens[1].tolist()[0] == 4
    assert tokens[1].tolist()[3:] == [0, 0]
    assert mask.tolist() == [[False, False, True, True, False], [True, True, False, False, False]]
    teacher = small_target(2)
    trained = Transformer(student.config).double()
    trained.load_state_dict(student.state_dict())
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    assert distillation_step(trained, teacher, tokens, optimizer, mask=mask) > 0
