"""Routed experts: one signature, several ways (Switch Transformers, arXiv:2101.03961).

Each token goes through k of E small gated MLPs, chosen by a router, and gets their weighted sum:
y = sum_j w_j down_ij(silu(gate_ij(x)) * up_ij(x)). A pass reads the weights of every expert that
any of its tokens woke, so a verified block costs more than a step (`routing.woken`).

* `loop_experts`: the reference, a Python loop over the experts that are hit.
* `grouped_experts`: tokens sorted by expert, then `torch.nn.functional.grouped_mm`, one launch a
  projection, or one expert after another over a slice of the sorted rows (see `one_launch`).
* `triton_experts`, an optional extra for GPUs, in `experts_triton.py`.

All of them write the k results of a token into its own k slots and add those in slot order: nothing
is accumulated by atomics or into repeated rows, and a token never notices whom it was sorted
beside, rounding of the products apart. Weights have the layout of Qwen3-Next and Qwen3.5 in
`transformers`; `experts_hf.py` puts these functions into its modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import GatedMLP
from .routing import Router

HALF = (torch.bfloat16, torch.float16)


def loop_experts(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """The reference: x [M, D] through its experts `indices` [M, k] int64, weighted; [M, D].

    `weights` [M, k]; `gate_up` [E, 2I, D], an expert's gate above its up projection; `down`
    [E, D, I]; all floats of one dtype. Indices out of range raise ValueError, but are not looked at
    on an accelerator, where that would wait for it.
    """
    check_experts(x, indices, weights, gate_up, down)
    slots = x.new_zeros(*indices.shape, x.shape[1])  # [M, k, D]
    for expert in indices.unique().tolist():
        token, slot = (indices == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        slots[token, slot] = F.linear(F.silu(gate) * up, down[expert])
    return combine(slots, weights)


def grouped_experts(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """As `loop_experts`, with the tokens sorted by expert: no search per expert, no scattering."""
    check_experts(x, indices, weights, gate_up, down)
    if not len(x):
        return x.clone()
    if len(x) == 1 and x.device.type == "cpu":  # nothing to sort, and a step is what all waits for
        out = segments([x] * indices.shape[1], indices[0].tolist(), gate_up, down)
        return combine(out.unsqueeze(0), weights)
    rows, ends, order = sort_by_expert(x, indices, len(gate_up))
    if one_launch(rows, gate_up, down):
        gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    else:
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        hit = [expert for expert, count in enumerate(counts) if count]
        slices = rows.split([counts[expert] for expert in hit])
        out = segments(slices, hit, gate_up, down)
    return combine(unsort(out, order).view(*indices.shape, x.shape[1]), weights)


def sort_by_expert(x: Tensor, indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x [M, D] once per slot, sorted by expert, [M k, D]; with the ends and the order.

    `ends` [E] int32: where each expert's rows end. `order` [M k]: the slot (token k + j) a sorted
    row belongs to; slots of one expert keep their order.
    """
    experts, order = indices.flatten().sort(stable=True)
    every = torch.arange(n_experts, device=x.device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    return x[order // indices.shape[1]], ends, order


def unsort(out: Tensor, order: Tensor) -> Tensor:
    """Undo `sort_by_expert`: sorted rows [M k, D] back into the order of slots."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return out[place]


def combine(slots: Tensor, weights: Tensor) -> Tensor:
    """sum_j w_j slots_j over the slots [M, k, D] of each token, in float32 or better; [M, D]."""
    exact = torch.promote_types(slots.dtype, torch.float32)
    return (slots.to(exact) * weights.to(exact).unsqueeze(-1)).sum(dim=1).to(slots.dtype)


def segments(slices: Sequence[Tensor], hit: list[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert of `hit` after another over its slice [m, D] of the rows; all rows [M k, D]."""
    # the gradient of gate_up[i] is as large as gate_up; those of unbind are stacked once
    graph = torch.is_grad_enabled() and (gate_up.requires_grad or down.requires_grad)
    up_to, down_from = (gate_up.unbind(), down.unbind()) if graph else (gate_up, down)
    return torch.cat(
        [expert_mlp(x, up_to[i], down_from[i]) for x, i in zip(slices, hit, strict=True)]
    )


def expert_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert, gate_up [2I, D] and down [D, I], over rows x [m, D]."""
    gate, up = few_rows(x, gate_up).chunk(2, dim=-1)
    return few_rows(F.silu(gate) * up, down)


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T for few rows x [m, D] and a large weight [O, D], which is read once.

    A library that packs its second factor would copy the weight: half precision and m of 8 or more
    go through weight x^T, a single row through a matrix-vector product.
    """
    if len(x) == 1:
        return torch.mv(weight, x[0])[None]
    if x.dtype in HALF or len(x) >= 8:
        return (weight @ x.T).T
    return x @ weight.T


def one_launch(rows: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether `grouped_mm` may be used for sorted rows [S, D], and is the better way.

    It takes float32, bfloat16 and float16 whose strides and addresses are multiples of 16 bytes,
    on CPUs and on CUDA from capability 8.0. On a CPU it is a loop in C++ over *all* experts:
    better where Python's own time counts, not where most experts have no row (S < E/2), and not in
    half precision from 2^18 numbers a matrix on, where it packs every weight (see `few_rows`).
    """
    size = gate_up.element_size()
    aligned = rows.shape[1] * size % 16 == 0 and down.shape[2] * size % 16 == 0
    aligned &= gate_up.is_contiguous() and down.is_contiguous()
    if not aligned or rows.dtype not in (torch.float32, *HALF):
        return False
    if rows.device.type == "cuda":
        return torch.cuda.get_device_capability(rows.device) >= (8, 0)
    if rows.device.type != "cpu" or gate_up.data_ptr() % 16 or down.data_ptr() % 16:
        return False
    large = gate_up.shape[1] * gate_up.shape[2] >= 2**18
    return len(rows) >= len(gate_up) / 2 and not (large and rows.dtype in HALF)


def check_experts(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> None:
    """ValueError unless shapes and dtypes agree and the indices (on a CPU) are in range."""
    if x.ndim != 2 or indices.ndim != 2 or len(indices) != len(x) or indices.dtype != torch.long:
        raise ValueError(
            f"indices: expected int64 [M, k] for x [M, D], got {indices.dtype} of shape "
            f"{list(indices.shape)} for {list(x.shape)}"
        )
    if weights.shape != indices.shape:
        raise ValueError(
            f"weights: expected the shape of indices, {list(indices.shape)}, "
            f"got {list(weights.shape)}"
        )
    n_experts, inner, width = len(gate_up), down.shape[-1], x.shape[1]
    fits = gate_up.shape == (n_experts, 2 * inner, width)
    if not fits or down.shape != (n_experts, width, inner):
        raise ValueError(
            f"gate_up, down: expected [E, 2I, {width}] and [E, {width}, I], "
            f"got {list(gate_up.shape)} and {list(down.shape)}"
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"x: expected the dtype of gate_up and down ({gate_up.dtype}, {down.dtype}), "
            f"got {x.dtype}"
        )
    if indices.device.type == "cpu" and indices.numel():
        low, high = (int(each) for each in indices.aminmax())
        if low < 0 or high >= n_experts:
            raise ValueError(f"indices: expected 0..{n_experts - 1}, got {low}..{high}")


def triton_experts(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """As `loop_experts`, by a Triton kernel: see `experts_triton`, imported at the first call."""
    from . import experts_triton

    return experts_triton.triton_experts(x, indices, weights, gate_up, down)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "loop": loop_experts,
    "grouped": grouped_experts,
    "triton": triton_experts,
}


def check_way(name: str) -> str:
    """The name, or ValueError if there is no such way or it lacks its package."""
    if name not in WAYS:
        raise ValueError(f"experts: expected one of {sorted(WAYS)}, got {name!r}")
    if name == "triton" and find_spec("triton") is None:
        raise ValueError("experts: 'triton' needs a package that is missing: pip install triton")
    return name


class Experts(nn.Module):
    """The weights of E experts, `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I]."""

    def __init__(self, n_experts: int, width: int, inner: int) -> None:
        super().__init__()
        for name, value in (("n_experts", n_experts), ("width", width), ("inner", inner)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(n_experts, width, inner))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> Experts:
        """Normal of 1/sqrt(fan in), as `transformer.draw_weights`: here the *last* dimension."""
        for weight in (self.gate_up_proj, self.down_proj):
            weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[-1]), generator=generator)
        return self

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, way: str = "grouped") -> Tensor:
        """x [M, D], indices and weights [M, k] -> [M, D]."""
        return WAYS[way](x, indices, weights, self.gate_up_proj, self.down_proj)


class MoeMLP(nn.Module):
    """Routed experts, and one that every token passes, behind a sigmoid gate of its own.

    `experts` ("loop", "grouped" or "triton") is how the routed ones are computed; it may be set at
    any time.
    `shared_inner` None: no shared expert (Qwen3-MoE).
    """

    def __init__(
        self,
        width: int,
        inner: int,
        n_experts: int,
        top_k: int,
        *,
        shared_inner: int | None = None,
        norm_topk_prob: bool = True,
        experts: str = "grouped",
    ) -> None:
        super().__init__()
        self.router = Router(n_experts, top_k, width, norm_topk_prob=norm_topk_prob)
        self.routed = Experts(n_experts, width, inner)
        self.shared = None if shared_inner is None else GatedMLP(width, shared_inner)
        self.shared_gate = None if shared_inner is None else nn.Linear(width, 1, bias=False)
        self.experts = experts

    @property
    def experts(self) -> str:
        return self._experts

    @experts.setter
    def experts(self, name: str) -> None:
        self._experts = check_way(name)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]; where its tokens went is heard by `routing.recorded`."""
        routing = self.router(x)
        flat = x.flatten(0, -2)  # [M, D]
        indices, weights = routing.indices.flatten(0, -2), routing.weights.flatten(0, -2)
        mixed = self.routed(flat, indices, weights, self.experts).view_as(x)
        if self.shared is None or self.shared_gate is None:
            return mixed
        return mixed + self.shared_gate(x).sigmoid() * self.shared(x)
