"""The hybrid target's recipe: its loss, who trains what, and drafters of its dense shape."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from specdec.models.layers import CentredRMSNorm, RMSNorm
from specdec.models.routing import load_balancing_loss, recorded
from specdec.training.corpus import Corpus
from specdec.training.fit import optimizers
from specdec.training.hybrid import dense_shape, hybrid_loss, new_hybrid
from specdec.training.recipes import dflash

SHAPE = {"width": 32, "layers": 4, "experts": 3, "top_k": 2, "inner": 8, "shared_inner": 8}
ARGUMENTS = SimpleNamespace(**SHAPE, seed=0, batch=2, length=12, steps=9, mtp_weight=0.0)
TOKENS = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(0))
TEXT = cast(Corpus, SimpleNamespace(batch=lambda step, batch, length, seed: TOKENS))


def test_the_loss_is_that_of_its_parts():
    """Catches a balance left out, or as heavy as the text; an MTP weight that stays."""
    target, module = new_hybrid(ARGUMENTS)
    loss = hybrid_loss(target, module, TEXT, ARGUMENTS)(0)
    with torch.no_grad(), recorded(target) as routes:
        logits = target(TOKENS[:, :-1]).logits
    assert logits is not None and len(routes) == 4
    text = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(
        float(text + 0.01 * load_balancing_loss(routes)), abs=1e-6
    )
    both = SimpleNamespace(**vars(ARGUMENTS) | {"mtp_weight": 0.3})
    early, late = (
        float((hybrid_loss(target, module, TEXT, both)(step) - loss).detach()) for step in (0, 8)
    )
    assert early == pytest.approx(3 * late, rel=1e-4)
    assert early > 0.1


def test_convolutions_are_no_matrices():
    """Catches a short convolution's taps made orthogonal by Muon."""
    target, _ = new_hybrid(ARGUMENTS)
    adam, muon = optimizers(target, 1e-3, 1e-3)
    taps = {id(p) for name, p in target.named_parameters() if name.endswith("convolution")}
    assert taps and taps <= {id(p) for group in adam.param_groups for p in group["params"]}
    assert all(p.ndim == 2 for group in muon.param_groups for p in group["params"])


@pytest.mark.parametrize("norm", [RMSNorm, CentredRMSNorm])
def test_a_gain_is_what_a_norm_multiplies_by(norm):
    """Catches a weight that counts from one, taken for the gain."""
    own, plain = norm(6, 1e-6), RMSNorm(6, 1e-6)
    with torch.no_grad():
        own.weight.copy_(torch.linspace(-0.4, 0.6, 6))
        plain.weight.copy_(own.gain)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(own(x), plain(x))


def test_drafters_of_a_hybrid_are_dense_and_start_at_its_scale():
    """Catches an MLP of width 1, and a final norm of ones before a head of another scale."""
    target, _ = new_hybrid(ARGUMENTS)
    with torch.no_grad():
        target.norm.weight.fill_(0.5)
    shape = dense_shape(target.config, 2)
    assert (shape.num_hidden_layers, shape.intermediate_size, shape.qk_norm) == (2, 72, True)
    own = {"taps": [0, 1, 2], "block": 4, "sight": "mixed", "window": None, "at_input": False}
    own |= {"inner": None, "mask_token": None}
    arguments = SimpleNamespace(**vars(ARGUMENTS) | own | {"layers": 1, "dflash2": False})
    network = dflash(target, arguments, TEXT).network
    assert network.get_parameter("norm.weight").tolist() == [1.5] * 32
