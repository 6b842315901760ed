"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464), as a rule that can be rolled back.

A head keeps one matrix S. Every token first lets it fade, then corrects what S says of its key::

    S <- exp(g) S,    u = beta (v - S^T k),    S <- S + k u^T,    o = S^T q

Three ways to compute it, with one signature: token by token (the reference), in chunks (training,
prompts), and over a tree of pending nodes. The chunkwise form solves one triangular system for the
pseudo-values u of all tokens. Nothing in it needs a chain: with the ancestors of a node in place of
all that came before, and the decay summed along its path, it is exact on a tree. With G_i the sum
of g over the pending ancestors of i, itself included, and S the committed state::

    D_ij = exp(G_i - G_j)   where j is i or above it, else 0
    A_ij = beta_i (k_i . k_j) D_ij   where j is above i
    u    = (I + A)^-1 [ beta_i (v_i - exp(G_i) S^T k_i) ]
    o_i  = exp(G_i) S^T q_i + sum_j (q_i . k_j) D_ij u_j

u_j depends on what is above j only, so committing a path that ends in e needs no node again::

    S <- exp(G_e) S + sum_{j on the path} exp(G_e - G_j) k_j u_j^T

Shapes: q, k [B, N, H_k, d_k], v [B, N, H_v, d_v], g and beta [B, N, H_v], S [B, H_v, d_k, d_v];
value head h has the key head h // (H_v / H_k). k is of length 1, q of length 1/sqrt(d_k) (`unit`).
All in the dtype of S, float32 or float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..draft import ancestors as ancestors_of

CHUNK = 64
"""Tokens whose triangular system is solved in one go."""


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / |x| over the last dimension, with eps below the root as in the published models."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def step_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Node by node, each from the state of its parent: the reference.

    `parents` [B, N], -1 for `state`; None: a chain. Returns o and u, each [B, N, H_v, d_v].
    """
    o, u, _ = snapshots(q, k, v, g, beta, state, parents)
    return o, u


def snapshots(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `step_delta`, with the state behind every node: [B, N + 1, H_v, d_k, d_v], first `state`.

    Kept, these are the simplest way to roll back, and the one that holds most memory.
    """
    batch, n = k.shape[:2]
    group, rows = v.shape[2] // k.shape[2], torch.arange(batch, device=k.device)
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    states, outputs, values = [state], [], []
    for i in range(n):
        S = states[-1] if parents is None else torch.stack(states, 1)[rows, parents[:, i] + 1]
        S = S * g[:, i, :, None, None].exp()
        u = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhkv,bhk->bhv", S, k[:, i]))
        S = S + k[:, i, :, :, None] * u[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, i]))
        values.append(u)
        states.append(S)
    return torch.stack(outputs, dim=1), torch.stack(values, dim=1), torch.stack(states, dim=1)


def chunk_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, parents: None
) -> tuple[Tensor, Tensor]:
    """A chain, `CHUNK` tokens at a time; `parents` must be None. Returns o and u."""
    outputs, values = [], []
    for first in range(0, k.shape[1], CHUNK):
        here = slice(first, first + CHUNK)
        o, u = tree_delta(
            q[:, here], k[:, here], v[:, here], g[:, here], beta[:, here], state, None
        )
        outputs.append(o)
        values.append(u)
        if here.stop < k.shape[1]:
            state = advance(state, k[:, here], u, g[:, here])
    return torch.cat(outputs, dim=1), torch.cat(values, dim=1)


@dataclass(frozen=True)
class Pending:
    """What pending nodes leave behind.

    `k` [B, N, H_k, d_k], `u` [B, N, H_v, d_v], `g` [B, N, H_v], and `G` [B, N, H_v], the sum of g
    over each node and those it descends from.
    """

    k: Tensor
    u: Tensor
    g: Tensor
    G: Tensor


def tree_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    parents: Tensor | None,
    *,
    ancestors: Tensor | None = None,
    before: Pending | None = None,
) -> tuple[Tensor, Tensor]:
    """All nodes at once; see the module's first lines. Returns o and u.

    `before`: M nodes that were pending already; `parents` then counts them, too, and holds
    [B, M + N]. Instead of `parents` the table `ancestors` [B or 1, N, M + N] can be given, which
    one pass shares among its layers.
    """
    n, n_before = k.shape[1], 0 if before is None else before.k.shape[1]
    chain = parents is None and ancestors is None
    table = table_of(parents, n_before, n, k.device) if ancestors is None else ancestors
    group = v.shape[2] // k.shape[2]

    def heads(x: Tensor) -> Tensor:  # [B, N, H_v, ...] -> [B, H_k, group, N, ...]
        return x.transpose(1, 2).unflatten(1, (-1, group))

    sums = path_sums(g, None if chain else table, before)
    keys = k if before is None else torch.cat([before.k, k], dim=1)
    G, G_all = heads(sums), heads(sums if before is None else torch.cat([before.G, sums], dim=1))
    keys, queries = keys.transpose(1, 2).unsqueeze(2), q.transpose(1, 2).unsqueeze(2)
    new, S = keys[..., n_before:, :], state.unflatten(1, (-1, group))
    rate, fade = heads(beta).unsqueeze(-1), G.exp().unsqueeze(-1)  # [B, H_k, group, N, 1]
    # masked before exp: a node that is not above may have faded less, and inf * 0 is nan
    D = (G.unsqueeze(-1) - G_all.unsqueeze(-2)).masked_fill(~table[:, None, None], -torch.inf)
    D = D.exp()  # [B, H_k, group, N, M + N]

    u = rate * (heads(v) - fade * (new @ S))
    if n_before or n > 1:
        A = rate * (new @ keys.mT) * D
        if before is not None:
            u = u - A[..., :n_before] @ heads(before.u)
        # the solver takes the diagonal as 1, whatever stands there
        u = torch.linalg.solve_triangular(A[..., n_before:], u, upper=False, unitriangular=True)
    every = u if before is None else torch.cat([heads(before.u), u], dim=-2)
    o = fade * (queries @ S) + ((queries @ keys.mT) * D) @ every
    return o.flatten(1, 2).transpose(1, 2), u.flatten(1, 2).transpose(1, 2)


def table_of(parents: Tensor | None, n_before: int, n: int, device: torch.device | str) -> Tensor:
    """Ancestor table [B or 1, N, M + N] of the last `n` nodes, behind M = `n_before`."""
    if parents is not None:
        return ancestors_of(parents)[:, n_before:]
    table = torch.ones(1, n, n_before + n, dtype=torch.bool, device=device)
    return table.tril(n_before)


def path_sums(g: Tensor, ancestors: Tensor | None, before: Pending | None) -> Tensor:
    """G [B, N, H_v] of nodes with log-decays `g` [B, N, H_v]; `ancestors` None: a chain."""
    if ancestors is None:
        return g.cumsum(1) if before is None else before.G[:, -1:] + g.cumsum(1)
    every = g if before is None else torch.cat([before.g, g], dim=1)
    return ancestors.to(g.dtype) @ every


def extend(
    before: Pending | None, k: Tensor, u: Tensor, g: Tensor, ancestors: Tensor | None
) -> Pending:
    """The pending nodes, with new ones behind them."""
    G = path_sums(g, ancestors, before)
    if before is None:
        return Pending(k, u, g, G)
    pairs = ((before.k, k), (before.u, u), (before.g, g), (before.G, G))
    return Pending(*(torch.cat(pair, dim=1) for pair in pairs))


def advance(state: Tensor, k: Tensor, u: Tensor, g: Tensor, n: Tensor | None = None) -> Tensor:
    """The state behind a chain of nodes, of whose entries the first `n` [B] count (None: all).

    `k` [B, P, H_k, d_k], `u` [B, P, H_v, d_v], `g` [B, P, H_v]. A row with n = 0 keeps its state.
    """
    fade, keys, fading = _written(k, u, g, n)
    return fade * state + (keys @ fading).flatten(1, 2)


def advance_(state: Tensor, k: Tensor, u: Tensor, g: Tensor, n: Tensor | None = None) -> None:
    """As `advance`, into `state`, which is contiguous and has no gradient."""
    fade, keys, fading = _written(k, u, g, n)
    keys = keys.expand(-1, -1, fading.shape[2], -1, -1).flatten(0, 2)
    state.mul_(fade).flatten(0, 1).baddbmm_(keys, fading.flatten(0, 2))


def _written(k: Tensor, u: Tensor, g: Tensor, n: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What is left of a state [B, H_v, 1, 1], and the two factors of what is written into it.

    Keys [B, H_k, 1, d_k, P] and faded values [B, H_k, group, P, d_v].
    """
    if n is not None:
        counts = torch.arange(k.shape[1], device=k.device) < n.unsqueeze(1)  # [B, P]
        g, u = g * counts.unsqueeze(-1), u * counts[..., None, None]
    # what is left of node j at the end: the decay of those behind it; small sums, nothing cancels
    left = g.flip(1).cumsum(1).flip(1)
    rest = (left - g).exp()
    group = u.shape[2] // k.shape[2]
    fading = (u * rest.unsqueeze(-1)).transpose(1, 2).unflatten(1, (-1, group))
    return left[:, 0].exp()[..., None, None], k.transpose(1, 2).unsqueeze(2).mT, fading
