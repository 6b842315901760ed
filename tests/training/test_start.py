"""Where a layer of EAGLE-3 starts from."""

import dataclasses

import pytest
import torch

from specdec import FINAL
from specdec.drafters import Eagle3
from specdec.testing.targets import small_target
from specdec.training.start import QUIET, start_scaled

TARGET = small_target(22)
TOKENS = torch.randint(11, (2, 40), generator=torch.Generator().manual_seed(0))


def fresh(taps: tuple[int, ...]) -> Eagle3:
    config = dataclasses.replace(TARGET.config, num_hidden_layers=1)
    return Eagle3(config, taps).double().reset_parameters(torch.Generator().manual_seed(0))


def test_every_tap_is_fused_at_its_own_size() -> None:
    """Catches columns of another tap, sizes that multiply, a first token that sets the size."""
    target = small_target(22)
    hook = target.blocks[0].register_forward_hook(
        lambda _, __, x: x * torch.where(torch.arange(x.shape[1]) == 0, 1e4, 50.0).view(1, -1, 1)
    )
    plain, scaled = fresh((0, 1, FINAL)), start_scaled(fresh((0, 1, FINAL)), target, TOKENS)
    hidden = target(TOKENS, taps=scaled.taps, logits=False).hidden
    hook.remove()
    width = target.hidden_size
    for i, tap in enumerate(scaled.taps):
        columns = slice(i * width, (i + 1) * width)
        size = hidden[tap][:, 1:].square().mean().sqrt()
        torch.testing.assert_close(scaled.fc.weight[:, columns] * size, plain.fc.weight[:, columns])


def test_first_laws_are_nearly_uniform() -> None:
    """Catches a final norm that is left as it is, or not the target's."""
    target = small_target(22)
    with torch.no_grad():
        target.norm.weight.copy_(torch.linspace(1, 3, target.hidden_size))
    scaled = start_scaled(fresh((0, 1, 2)).copy_head(target), target, TOKENS)
    states = torch.randn(1, 8, target.hidden_size, dtype=torch.float64)
    expected = QUIET * target.head(target.norm(states))
    torch.testing.assert_close(scaled.draft_logits(states), expected)


def test_rows_without_a_size() -> None:
    """Catches a mean over no token, which makes all weights NaN."""
    network = fresh((0, 1, 2))
    with pytest.raises(ValueError, match=r"tokens: expected \[B, N\] with N >= 2, got \[2, 1\]"):
        start_scaled(network, TARGET, TOKENS[:, :1])
