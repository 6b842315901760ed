"""Router, balancing loss and counts against `transformers`, by hand, and by simulation."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from specdec.models.experts import MoeMLP
from specdec.models.routing import Router, Routing, load_balancing_loss, recorded, woken

X = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))


def router(norm_topk_prob: bool = True) -> Router:
    made = Router(8, 3, 5, norm_topk_prob=norm_topk_prob)
    with torch.no_grad():
        made.weight.normal_(generator=torch.Generator().manual_seed(1))
    return made


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_is_that_of_transformers(norm, dtype) -> None:
    """Would catch a softmax over the top k alone, one in half precision, weights in float32."""
    ours = router(norm).to(dtype)
    config = Qwen3NextConfig(
        hidden_size=5, num_experts=8, num_experts_per_tok=3, norm_topk_prob=norm
    )
    theirs = Qwen3NextTopKRouter(config).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        logits, weights, indices = theirs(X.to(dtype))
        got = ours(X.to(dtype))
    assert torch.equal(got.indices.flatten(0, 1), indices)
    assert got.weights.dtype == dtype and got.probabilities.dtype == torch.float32
    assert torch.equal(got.weights.flatten(0, 1), weights)
    assert torch.equal(got.probabilities.flatten(0, 1), logits.softmax(-1, dtype=torch.float32))
    total = got.weights.float().sum(-1)
    assert ((total - 1).abs() < 0.01).all() == norm


def test_a_float64_model_routes_in_float64() -> None:
    """Would catch float32 in the middle: batches would differ by 1e-7 and tests could not be sharp.

    Its gradient is checked on the way: it flows through the weights that were picked.
    """
    made = router().double()
    got = made(X.double())
    assert got.probabilities.dtype == got.weights.dtype == torch.float64
    want = (X.double() @ made.weight.T).softmax(-1).topk(3).values
    torch.testing.assert_close(got.weights, want / want.sum(-1, keepdim=True), rtol=0, atol=1e-14)
    (got.weights[..., 0].sum()).backward()
    assert made.weight.grad is not None and made.weight.grad.any()


def routing_of(logits: Tensor, k: int) -> Routing:
    probabilities = logits.softmax(-1)
    weights, indices = probabilities.topk(k)
    return Routing(indices, weights, probabilities)


@pytest.mark.parametrize("masked", [False, True])
def test_balancing_loss_is_that_of_transformers(masked) -> None:
    """Would catch a missing factor E, shares of slots instead of tokens, padding that counts."""
    generator = torch.Generator().manual_seed(2)
    layers = [torch.randn(2, 6, 8, generator=generator).requires_grad_() for _ in range(3)]
    used = torch.rand(2, 6, generator=generator) < 0.6 if masked else None
    ours = load_balancing_loss([routing_of(layer, 3) for layer in layers], used)
    theirs = load_balancing_loss_func(
        tuple(layer.flatten(0, 1) for layer in layers),
        num_experts=8,
        top_k=3,
        attention_mask=None if used is None else used.long(),
    )
    assert isinstance(theirs, Tensor)
    torch.testing.assert_close(ours, theirs)
    for got, want in zip(
        torch.autograd.grad(ours, layers), torch.autograd.grad(theirs, layers), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_balancing_loss_by_hand() -> None:
    """Would catch a loss that does not fall when routing gets even: E = 2, k = 1, two tokens."""
    even = routing_of(torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log(), 1)
    assert float(load_balancing_loss([even])) == pytest.approx(1.0)
    uneven = routing_of(torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log(), 1)
    assert float(load_balancing_loss([uneven])) == pytest.approx(2 * 1.0 * 0.75)
    only = torch.tensor([True, False])
    assert float(load_balancing_loss([even], only)) == pytest.approx(2 * 1.0 * 0.75)
    with pytest.raises(ValueError, match="routes: expected"):
        load_balancing_loss([])


def test_woken_counts_distinct_experts_of_used_nodes() -> None:
    """Would catch repeated experts counted twice, and nodes counted that are only padding."""
    indices = torch.tensor([[[0, 1], [1, 2]], [[5, 0], [6, 7]]])
    assert woken(indices) == 6
    assert woken(indices, torch.tensor([[True, True], [True, False]])) == 4
    assert woken(indices, torch.tensor([[True, True], [False, False]])) == 3  # a row that is done
    assert woken(indices, torch.zeros(2, 2, dtype=torch.bool)) == 0
    with pytest.raises(ValueError, match=r"used: expected bool \[2, 2\], got .*\[2\]"):
        woken(indices, torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"used: expected bool \[2, 2\], got torch\.int64"):
        woken(indices, torch.ones(2, 2, dtype=torch.long))


def test_recorded_is_a_pass_s_own() -> None:
    """Would catch a layer that is not heard, rows that are lost, and hooks that stay behind."""
    layer = MoeMLP(12, 8, 7, 3).double()
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(0)).double()
    with recorded(nn.Sequential(layer, layer)) as routes:
        layer(layer(x))
    assert [r.indices.shape for r in routes] == [(2, 9, 3)] * 2
    assert routes[0].probabilities.shape == (2, 9, 7) and routes[0].weights.shape == (2, 9, 3)
    assert torch.equal(routes[0].indices, layer.router(x).indices)
    with pytest.raises(RuntimeError), recorded(layer) as broken:
        layer(x[..., :5])
    layer(x)
    assert len(routes) == 2 and not broken
