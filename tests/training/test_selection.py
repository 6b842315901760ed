"""What a fit ends with: the weights of its best evaluation, also after a break."""

import math

import pytest
import torch
from torch import nn

from specdec.training.checkpoint import BEST, LAST, load_best
from specdec.training.fit import fit


class Tied(nn.Module):
    """Two names for one weight, and a buffer: what a file of tensors by name trips over."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1, bias=False).double()
        self.embedding = nn.Linear(3, 1, bias=False).double()
        self.embedding.weight = self.head.weight
        self.register_buffer("ids", torch.tensor([3, 1, 2]))
        with torch.no_grad():
            self.head.weight.fill_(1.0)


class StopHereError(Exception):
    pass


def run(values, folder=None, *, maximize=False, stop_at=None, save_every=100):
    """A step an evaluation, which gives `values` in turn (by step); another weight at each.

    Returns the module, the history, and the weight at each evaluation by its step.
    """
    module, seen = Tied(), {}

    def loss_of(step: int):
        if step == stop_at:
            raise StopHereError
        calls.append(step)
        return module.embedding.weight.square().sum()

    def evaluate() -> float:
        step = calls[-1] + 1
        seen[step] = module.head.weight[0, 0].item()
        return values[step - 1]

    calls: list[int] = []
    history: list[tuple[int, float]] = []
    try:
        history = fit(
            module, loss_of, [torch.optim.SGD(module.parameters(), lr=0.05)], len(values),
            folder=folder, warmup=0, save_every=save_every, evaluate=evaluate, evaluate_every=1,
            maximize=maximize,
        )  # fmt: skip
    except StopHereError:
        assert stop_at is not None
    return module, history, seen


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("values", "maximize", "best"),
    [
        ([3.0, 1.0, 2.0], False, 2),
        ([3.0, 1.0, 2.0], True, 1),
        ([1.0, 3.0, 3.0, 2.0], True, 2),  # the first of equal ones
        ([2.0, 1.0, 1.0], False, 2),
        ([1.0, 2.0, 3.0], True, 3),
        ([-1.0, -2.0], True, 1),
    ],
)
def test_the_best_weights_are_kept(tmp_path, values, maximize, best, on_disk):
    """Catches the last weights instead of the best, the wrong sign, and a view of the weights.

    The file holds them too, each once, and says whose they are.
    """
    module, history, seen = run(values, tmp_path if on_disk else None, maximize=maximize)
    assert history == list(enumerate(values, start=1))
    assert len(set(seen.values())) == len(values)
    assert module.head.weight[0, 0].item() == seen[best]
    assert not module.training
    if on_disk:
        other = Tied()
        assert load_best(other, tmp_path) == (best, values[best - 1])
        assert other.embedding.weight[0, 0].item() == seen[best]


def test_the_best_weights_survive_a_break(tmp_path):
    """Catches a resumed run that forgets what was best before, or takes its first evaluation."""
    values = [1.0, 5.0, 2.0, 3.0, 4.0, 1.0]
    whole, history, _ = run(values, maximize=True)
    run(values, tmp_path, maximize=True, stop_at=4, save_every=1)
    resumed, resumed_history, seen = run(values, tmp_path, maximize=True)
    assert sorted(seen) == [5, 6]
    assert resumed_history == history
    assert torch.equal(resumed.head.weight, whole.head.weight)
    # read once more, all done: the best again, not the last
    again, _, seen = run(values, tmp_path, maximize=True)
    assert seen == {}
    assert torch.equal(again.head.weight, whole.head.weight)


def test_training_goes_on_from_the_last_weights_not_from_the_best(tmp_path):
    """Catches a best that is loaded into the module when a run resumes."""
    values = [5.0, 1.0, 1.0, 9.0]
    _, _, unbroken = run(values, maximize=True)
    run(values, tmp_path, maximize=True, stop_at=3, save_every=1)
    _, _, seen = run(values, tmp_path, maximize=True)
    assert seen == {4: unbroken[4]}


def test_best_weights_of_another_run_are_not_taken(tmp_path):
    """Catches a best whose checkpoint was never written: the history does not know of it."""
    run([1.0, 5.0, 2.0], tmp_path / "a", maximize=True)
    run([1.0, 2.0, 3.0], tmp_path / "b", maximize=True, stop_at=1)
    (tmp_path / "a" / BEST).rename(tmp_path / "b" / BEST)
    module, _, seen = run([1.0, 2.0, 3.0], tmp_path / "b", maximize=True)
    assert module.head.weight[0, 0].item() == seen[3]


def test_a_checkpoint_from_before_there_were_best_weights_is_read(tmp_path):
    """Catches a folder that holds last.pt alone and cannot be resumed."""
    run([3.0, 1.0, 2.0, 4.0], tmp_path, stop_at=2, save_every=1)
    (tmp_path / BEST).unlink()
    assert set(torch.load(tmp_path / LAST)) == {"module", "step", "history", "optimizers"}
    module, history, seen = run([3.0, 1.0, 2.0, 4.0], tmp_path)
    assert [step for step, _ in history] == [1, 2, 3, 4]
    assert module.head.weight[0, 0].item() == seen[3]  # the best of those whose weights there are


def test_without_an_evaluation_the_last_weights_stay(tmp_path):
    """Catches an empty best that overwrites the module."""
    module = Tied()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    fit(module, lambda step: module.head.weight.sum(), [sgd], 1, folder=tmp_path, warmup=0)
    assert module.head.weight[0, 0].item() < 1.0
    assert not (tmp_path / BEST).exists()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_evaluation_that_is_not_finite_stops_the_fit(tmp_path, bad):
    """Catches NaN, which is neither below nor above the best and would be passed over."""
    with pytest.raises(FloatingPointError, match=f"the evaluation is {bad} after step 1"):
        run([1.0, bad, 2.0], tmp_path)
    assert load_best(Tied(), tmp_path) == (1, 1.0)
    assert torch.load(tmp_path / LAST)["step"] == 1


def test_best_weights_of_another_module_are_refused(tmp_path):
    """Catches weights that are copied where names happen to agree."""
    run([1.0], tmp_path)
    before = nn.Linear(3, 1).double()
    with pytest.raises(ValueError, match="weights: these do not fit the module"):
        load_best(before, tmp_path)
    with pytest.raises(ValueError, match=r"folder: expected best.safetensors in"):
        load_best(Tied(), tmp_path / "nowhere")


def test_losses_are_told(tmp_path):
    """Catches `on_loss` with a smoothed value, or the step after."""
    module, told = Tied(), []
    sgd = torch.optim.SGD(module.parameters(), lr=0.0)
    fit(
        module, lambda step: module.head.weight.sum() * 0 + step, [sgd], 3, warmup=0,
        on_loss=lambda step, value: told.append((step, value)),
    )  # fmt: skip
    assert told == [(0, 0.0), (1, 1.0), (2, 2.0)]
