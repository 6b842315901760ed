"""Which experts a token goes to: the router, its balancing loss, and how many experts a pass woke.

A pass over n tokens wakes E (1 - (1 - k/E)^n) of E experts if each token picks its k uniformly
(`speedup.experts_woken`): 102 of 256 for 16 tokens and k = 8. Real tokens of one text agree with
each other and wake fewer (`woken` counts them; the Strix Halo post saw 47). Router and loss are
those of Qwen3-Next and Qwen3.5 in `transformers`; differing from it, a float64 model routes in
float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """Where tokens [...] went: [M] inside a layer, [B, N] in the list that a pass fills."""

    indices: Tensor
    """[..., k] int64, the likeliest experts, the best first."""
    weights: Tensor
    """[..., k] in the dtype of the states."""
    probabilities: Tensor
    """[..., E] over all experts, in float32 or better, for `load_balancing_loss`."""


class Router(nn.Module):
    """Softmax over all E experts, then the top k; `norm_topk_prob`: their weights sum to 1.

    Qwen3.5 always normalises, Qwen3-Next where its config says so.
    """

    def __init__(self, n_experts: int, top_k: int, width: int, *, norm_topk_prob: bool = True):
        super().__init__()
        if not 1 <= top_k <= n_experts:
            raise ValueError(f"top_k: expected 1..{n_experts} (n_experts), got {top_k}")
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.weight = nn.Parameter(torch.empty(n_experts, width).normal_(0.0, width**-0.5))

    def forward(self, x: Tensor) -> Routing:
        """x [..., D] -> indices and weights [..., k], probabilities [..., E]."""
        exact = torch.promote_types(x.dtype, torch.float32)
        probabilities = F.softmax(F.linear(x, self.weight), dim=-1, dtype=exact)
        weights, indices = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(indices, weights.to(x.dtype), probabilities)


def load_balancing_loss(routes: Sequence[Routing], used: Tensor | None = None) -> Tensor:
    """E sum_e f_e P_e (arXiv:2101.03961, eq. 4-6), a scalar; k where routing is uniform.

    f_e is how many of its k slots a token gives expert e on average, P_e the mean probability of
    e; both over all tokens of all layers, as `transformers` has it (the paper: k = 1, per layer).
    `used` [B, N] bool leaves tokens out. Gradients flow through P only.
    """
    if not routes:
        raise ValueError("routes: expected the routing of one layer or more, got none")
    kept = [[each if used is None else each[used] for each in routing] for routing in routes]
    n_experts = routes[0].probabilities.shape[-1]
    probabilities = torch.cat([p.flatten(0, -2) for _, _, p in kept])  # [tokens, E]
    counts = torch.cat([i.flatten() for i, _, _ in kept]).bincount(minlength=n_experts)
    share = counts.to(probabilities.dtype) / len(probabilities)
    return n_experts * (share * probabilities.mean(dim=0)).sum()


def woken(indices: Tensor, used: Tensor | None = None) -> int:
    """How many distinct experts a layer's pass woke: `indices` [B, N, k], or any [..., k].

    `used` [B, N] bool: nodes that count; padding and rows that are done wake nothing of interest.
    """
    if used is not None and (used.dtype != torch.bool or used.shape != indices.shape[:-1]):
        raise ValueError(
            f"used: expected bool {list(indices.shape[:-1])}, got {used.dtype} {list(used.shape)}"
        )
    return len((indices if used is None else indices[used]).unique())


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Routing]]:
    """Within the context every pass of `model` appends its layers' `Routing` to the list.

    By forward hooks on its routers, which are gone afterwards.
    """
    routes: list[Routing] = []

    def keep(_: nn.Module, __: object, routing: Routing) -> None:
        routes.append(routing)

    hooks = [
        module.register_forward_hook(keep)
        for module in model.modules()
        if isinstance(module, Router)
    ]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()
