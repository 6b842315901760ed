"""Routed experts: the loop by hand, the sorted form against the loop and against `transformers`."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

import specdec.models.experts as module
from specdec.models.experts import (
    WAYS,
    MoeMLP,
    few_rows,
    grouped_experts,
    loop_experts,
    one_launch,
)

HERE = ("loop", "grouped")  # Triton has tests of its own
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
CASES = ("spread", "one token", "one expert for all", "every expert", "no token", "zero weights")


def case(name: str = "spread", dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """x [M, 12], indices and weights [M, k], weights of 7 experts that are 8 wide inside.

    Widths are multiples of 16 bytes in float32, so that `grouped_mm` takes them.
    """
    n_experts, width, inner = 7, 12, 8
    m = {"one token": 1, "no token": 0}.get(name, 9)
    k = n_experts if name == "every expert" else 3
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    score = torch.rand(m, n_experts, generator=generator)
    score[:, 2] = -1.0  # nobody's but where every expert is taken
    if name == "one expert for all":
        score[:, 4] = 2.0
    indices = score.topk(k, dim=-1).indices
    weights = normal(m, k).softmax(-1)
    if name == "zero weights":
        weights[4:] = 0.0
    gate_up, down = normal(n_experts, 2 * inner, width), normal(n_experts, width, inner)
    return normal(m, width), indices, weights, gate_up, down


def by_formula(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor):
    """One token and one slot at a time, in Python."""
    out = torch.zeros_like(x)
    inner = down.shape[2]
    for m in range(len(x)):
        for j, expert in enumerate(indices[m].tolist()):
            gate, up = gate_up[expert][:inner] @ x[m], gate_up[expert][inner:] @ x[m]
            out[m] += weights[m, j] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    return out


def assert_near(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_an_example_by_hand() -> None:
    """Would catch up before gate, weights of the wrong expert, an expert that is left out."""
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    gate_up = torch.tensor([[[1.0], [3.0]], [[-1.0], [1.0]], [[7.0], [7.0]]], dtype=torch.float64)
    down = torch.tensor([[[1.0]], [[10.0]], [[1.0]]], dtype=torch.float64)
    indices = torch.tensor([[0, 1], [1, 0]])
    weights = torch.tensor([[0.75, 0.25], [1.0, 0.0]], dtype=torch.float64)

    def silu(z: float) -> float:
        return z / (1 + math.exp(-z))

    first = 0.75 * silu(1) * 3 + 0.25 * 10 * silu(-1) * 1
    second = 10 * silu(-2) * 2
    want = torch.tensor([[first], [second]], dtype=torch.float64)
    for way in (loop_experts, grouped_experts):
        assert_near(way(x, indices, weights, gate_up, down), want)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", HERE)
def test_every_way_is_the_formula(way, name) -> None:
    """Would catch a sort not undone, wrong ends where an expert has no row, a wrong slot."""
    arguments = case(name)
    assert_near(WAYS[way](*arguments), by_formula(*arguments))


@given(
    m=st.integers(0, 24),
    n_experts=st.integers(1, 9),
    k=st.integers(1, 9),
    repeated=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_grouped_is_the_loop(m, n_experts, k, repeated, seed) -> None:
    """Would catch any shape at which slices and rows part, also one expert in two slots."""
    generator = torch.Generator().manual_seed(seed)
    k = min(k, n_experts)
    indices = torch.rand(m, n_experts, generator=generator).topk(k).indices
    if repeated:
        indices = torch.randint(n_experts, (m, k), generator=generator)
    shapes = (m, 5), (m, k), (n_experts, 6, 5), (n_experts, 5, 3)
    x, weights, gate_up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    arguments = x, indices, weights, gate_up, down
    assert_near(grouped_experts(*arguments), loop_experts(*arguments))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("launch", [True, False])
def test_one_launch_and_segments(monkeypatch, launch, name, dtype, tolerance) -> None:
    """Would catch a wrong `offs`, or gate and up swapped, in the form that the others do not run.

    bfloat16 stands beside the float64 result of the same rounded weights.
    """
    if dtype == torch.bfloat16:  # 12 and 8 numbers are no multiples of 16 bytes
        x, indices, weights, gate_up, down = case(name, dtype)
        arguments = x.repeat(1, 2), indices, weights, gate_up.repeat(1, 1, 2), down.repeat(1, 2, 1)
    else:
        arguments = case(name, dtype)
    monkeypatch.setattr(module, "one_launch", lambda *_: launch)
    want = by_formula(*(each if each.dtype == torch.long else each.double() for each in arguments))
    got = grouped_experts(*arguments)
    assert got.dtype == dtype
    scale = float(want.abs().max()) if len(want) else 1.0
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=tolerance * scale)


@pytest.mark.parametrize("name", [name for name in CASES if name != "no token"])
@pytest.mark.parametrize(
    ("launch", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.float64)]
)
def test_gradients_are_those_of_the_loop(monkeypatch, launch, name, dtype) -> None:
    """Would catch a gradient that stops at the sort, or garbage where an expert had no row."""
    monkeypatch.setattr(module, "one_launch", lambda *_: launch)
    x, indices, *floats = case(name, dtype)
    grown = [each.requires_grad_() for each in (x, *floats)]
    toward = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = torch.autograd.grad((loop_experts(x, indices, *floats) * toward).sum(), grown)
    got = torch.autograd.grad((grouped_experts(x, indices, *floats) * toward).sum(), grown)
    for ours, theirs in zip(got, want, strict=True):
        assert_near(ours, theirs, 1e-12 if dtype == torch.float64 else 2e-4)
    if name != "every expert":
        assert not got[2][2].any() and not got[3][2].any()  # expert 2 is nobody's


def test_frozen_experts_pass_gradients_on() -> None:
    """Would catch segments that need the weights to be trained."""
    x, *rest = case()
    got = torch.autograd.grad(grouped_experts(x.requires_grad_(), *rest).sum(), x)[0]
    assert_near(got, torch.autograd.grad(loop_experts(x, *rest).sum(), x)[0])


@pytest.mark.parametrize("way", HERE)
def test_a_token_does_not_feel_its_neighbours(way) -> None:
    """Would catch slots that another token wrote into, and combination in sorted order."""
    x, indices, weights, *experts = case()
    together = WAYS[way](x, indices, weights, *experts)
    for m in range(len(x)):
        alone = WAYS[way](x[m : m + 1], indices[m : m + 1], weights[m : m + 1], *experts)
        assert_near(alone[0], together[m])
    other = torch.cat([indices[:1], indices[1:].roll(1, 0)])  # the others go elsewhere
    assert_near(WAYS[way](x, other, weights, *experts)[0], together[0])


@pytest.mark.parametrize("way", HERE)
def test_the_same_bits_every_time(way) -> None:
    """Would catch accumulation whose order is left to threads."""
    arguments = case(dtype=torch.float32)
    first = WAYS[way](*arguments)
    assert all(torch.equal(WAYS[way](*arguments), first) for _ in range(5))


def unsorted(out: Tensor, order: Tensor) -> Tensor:
    return out


def sorted_twice(out: Tensor, order: Tensor) -> Tensor:
    return out[order]


def wrong_slot(slots: Tensor, weights: Tensor) -> Tensor:
    return (slots * weights.flip(1).unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(
    ("name", "bug"), [("unsort", unsorted), ("unsort", sorted_twice), ("combine", wrong_slot)]
)
def test_planted_bugs_turn_red(monkeypatch, name, bug) -> None:
    """The comparison above must notice a sort not undone and the weight of another slot."""
    arguments = case()
    want = by_formula(*arguments)
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        assert_near(grouped_experts(*arguments), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 20])
def test_few_rows_is_a_linear_map(m, dtype) -> None:
    """Would catch a transpose forgotten in one of the three forms."""
    generator = torch.Generator().manual_seed(m)
    x, weight = (torch.randn(n, 6, generator=generator).to(dtype) for n in (m, 4))
    got = few_rows(x, weight)
    assert got.shape == (m, 4)
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, F.linear(x, weight), rtol=tolerance, atol=tolerance)


def test_one_launch_where_it_is_allowed_and_better() -> None:
    """Would catch float64, odd strides or addresses reaching grouped_mm, which refuses them."""

    def rule(n_rows: int, n_experts: int, inner: int, width: int, dtype: torch.dtype) -> bool:
        experts = torch.zeros(n_experts, 2 * inner, width, dtype=dtype)
        return one_launch(
            torch.zeros(n_rows, width, dtype=dtype),
            experts,
            torch.zeros(n_experts, width, inner, dtype=dtype),
        )

    assert rule(8, 16, 8, 12, torch.float32)
    assert not rule(7, 16, 8, 12, torch.float32)  # most experts without a row
    assert not rule(8, 16, 8, 12, torch.float64)
    assert not rule(8, 16, 8, 13, torch.float32) and not rule(8, 16, 7, 12, torch.float32)
    assert rule(8, 4, 8, 16, torch.bfloat16) and not rule(8, 4, 8, 12, torch.bfloat16)
    assert rule(8, 2, 256, 512, torch.float32) and not rule(8, 2, 256, 512, torch.bfloat16)
    shifted = torch.zeros(2 * 16 * 12 + 1)[1:].view(2, 16, 12)  # 4 bytes off
    assert not one_launch(torch.zeros(8, 12), shifted, torch.zeros(2, 12, 8))
    turned = torch.zeros(2, 12, 16).mT
    assert not one_launch(torch.zeros(8, 12), turned, torch.zeros(2, 12, 8))


def moe(experts: str = "grouped", norm_topk_prob: bool = True) -> MoeMLP:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MoeMLP(
            12, 8, 7, 3, shared_inner=20, norm_topk_prob=norm_topk_prob, experts=experts
        ).double()


def theirs_of(ours: MoeMLP, dtype: torch.dtype) -> Qwen3_5MoeSparseMoeBlock:
    """The block of `transformers` with our weights."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=12,
        moe_intermediate_size=8,
        num_experts=7,
        num_experts_per_tok=3,
        shared_expert_intermediate_size=20,
        experts_implementation="eager",
    )
    block = Qwen3_5MoeSparseMoeBlock(config)
    assert ours.shared is not None and ours.shared_gate is not None
    gate, up = ours.shared.gate_up.weight.chunk(2)
    block.load_state_dict(
        {
            "gate.weight": ours.router.weight,
            "experts.gate_up_proj": ours.routed.gate_up_proj,
            "experts.down_proj": ours.routed.down_proj,
            "shared_expert.gate_proj.weight": gate,
            "shared_expert.up_proj.weight": up,
            "shared_expert.down_proj.weight": ours.shared.down.weight,
            "shared_expert_gate.weight": ours.shared_gate.weight,
        }
    )
    return block.to(dtype)


X = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("experts", HERE)
def test_the_layer_is_that_of_transformers(experts) -> None:
    """Would catch a forgotten shared gate, weights that are not normalised, another order."""
    ours = moe(experts)
    with torch.no_grad():
        # the oracle's router computes in float32, whatever the model
        assert_near(ours(X), theirs_of(ours, torch.float64)(X), 1e-6)
        single = ours.float()(X.float())
        assert_near(single, theirs_of(ours, torch.float32)(X.float()), 1e-5)


def test_weights_that_do_not_sum_to_one_turn_red() -> None:
    """The comparison with `transformers` must notice top-k weights left as they are."""
    ours = moe(norm_topk_prob=False)
    with torch.no_grad(), pytest.raises(AssertionError):
        assert_near(ours(X), theirs_of(ours, torch.float64)(X), 1e-6)


def test_the_way_may_change_and_must_exist(monkeypatch) -> None:
    """Would catch a switch that is not looked at: the loop must be what runs once it is set."""
    layer = moe("loop")
    with torch.no_grad():
        loop = layer(X)
        layer.experts = "grouped"
        assert_near(layer(X), loop)
        with pytest.raises(ValueError, match=r"experts: expected one of .*'grouped'.* got 'fast'"):
            layer.experts = "fast"
        assert layer.experts == "grouped"
        assert_near(layer(X[0]), loop[0])  # [N, D] as well
    with pytest.raises(ValueError, match=r"experts: .* got 'eager'"):
        moe("eager")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"experts: 'triton' needs .* pip install triton"):
        layer.experts = "triton"
    assert set(layer.state_dict()) == {
        "router.weight",
        "routed.gate_up_proj",
        "routed.down_proj",
        "shared.gate_up.weight",
        "shared.down.weight",
        "shared_gate.weight",
    }


def test_a_switch_reaches_the_function(monkeypatch) -> None:
    """Would catch an attribute that nothing reads."""
    calls: list[str] = []

    def noted(name: str):
        def way(x: Tensor, *rest: Tensor) -> Tensor:
            calls.append(name)
            return x

        return way

    for name in HERE:
        monkeypatch.setitem(WAYS, name, noted(name))
    layer = moe("loop")
    for name in ("loop", "grouped", "loop"):
        layer.experts = name
        layer(X)
    assert calls == ["loop", "grouped", "loop"]


def test_without_a_shared_expert() -> None:
    """Would catch a shared expert that is counted although there is none."""
    layer = MoeMLP(12, 8, 7, 3).double()
    indices, weights, _ = layer.router(X[0])
    want = loop_experts(X[0], indices, weights, layer.routed.gate_up_proj, layer.routed.down_proj)
    assert_near(layer(X[0]), want)
    assert len(layer.state_dict()) == 3


def test_a_tiny_layer_learns() -> None:
    """Would catch a gradient that does not reach router, routed or shared weights."""
    layer = moe().float()
    x, want = X.float(), X.float().roll(1, -1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), want)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("way", HERE)
def test_bad_input_is_named(way) -> None:
    """Would catch an index that reads another expert's weights, or wraps around to the last."""
    x, indices, weights, gate_up, down = case()
    run = WAYS[way]
    for wrong in (-1, 7):
        with pytest.raises(ValueError, match=r"indices: expected 0\.\.6, got "):
            run(x, indices.masked_fill(indices == 3, wrong), weights, gate_up, down)
    with pytest.raises(ValueError, match=r"indices: expected int64 \[M, k\].* torch\.int32"):
        run(x, indices.int(), weights, gate_up, down)
    with pytest.raises(ValueError, match=r"indices: expected int64 \[M, k\].*\[8, 3\] for \[9, 12"):
        run(x, indices[1:], weights, gate_up, down)
    with pytest.raises(ValueError, match=r"weights: .*\[9, 3\], got \[9, 2\]"):
        run(x, indices, weights[:, 1:], gate_up, down)
    with pytest.raises(ValueError, match=r"gate_up, down: .*\[E, 2I, 12\].* got \[7, 12, 16\]"):
        run(x, indices, weights, gate_up.mT, down)
    with pytest.raises(ValueError, match=r"x: expected the dtype .*float64.* got torch\.float32"):
        run(x.float(), indices, weights, gate_up, down)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((12, 8, 7, 8), r"top_k: expected 1\.\.7 \(n_experts\), got 8"),
        ((12, 8, 7, 0), r"top_k: expected 1\.\.7 \(n_experts\), got 0"),
        ((12, 0, 7, 3), r"inner: expected at least 1, got 0"),
    ],
)
def test_shapes_that_make_no_layer(sizes, message) -> None:
    """Would catch a layer that fails at its first token only."""
    with pytest.raises(ValueError, match=message):
        MoeMLP(*sizes)
