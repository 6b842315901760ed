"""Parts of decoders: RMSNorm, rotary positions, gated MLP, attention over a pending tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Kept, KVStore, View


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467), x / rms(x) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.shape, self.eps = (width,), eps

    @property
    def gain(self) -> Tensor:
        """[width], what x / rms(x) is multiplied by."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class CentredRMSNorm(nn.Module):
    """RMSNorm whose weight counts from one, x / rms(x) * (1 + weight): what Qwen3-Next has.

    Computed in float32 or better, so that 1 + weight is not rounded to the model's dtype.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.shape, self.eps = (width,), eps

    @property
    def gain(self) -> Tensor:
        """[width], what x / rms(x) is multiplied by, in float32 or better."""
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(exact), self.shape, self.gain, self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def rotary_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of rotary positions (arXiv:2104.09864): [..., 2, 1, head_dim].

    The two halves of a head are rotated against each other. Angles are computed in float64 for a
    float64 model, else in float32, whatever the model's dtype.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    step = torch.arange(0, head_dim, 2, device=positions.device, dtype=exact)
    angle = positions.to(exact).unsqueeze(-1) * theta ** (-step / head_dim)  # [..., head_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    both = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=-2)
    return both.unsqueeze(-2).to(dtype)


class RotaryStore:
    """The angles of every position a cache can hold, looked up instead of computed per pass."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        n_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.head_dim, self.theta, self.dtype, self.device = head_dim, theta, dtype, device
        self.table = torch.empty(0, 2, 1, head_dim, dtype=dtype, device=device)
        self.reserve(n_slots)

    def reserve(self, n_slots: int) -> None:
        if n_slots > len(self.table):
            positions = torch.arange(max(n_slots, len(self.table) * 5 // 4), device=self.device)
            self.table = rotary_angles(positions, self.head_dim, self.theta, self.dtype)

    def commit(self, kept: Kept) -> None:
        """Positions do not move."""

    def at(self, view: View) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [B or 1, N, 1, head_dim] of a view's positions."""
        cos, sin = self.table[view.positions].unbind(2)
        return cos, sin


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads x [B, N, H, head_dim] by cosines and signed sines [B or 1, N, 1, head_dim].

    Angles of fewer dimensions rotate the first ones only (partial rotary positions).
    """
    cos, sin = rotary
    n = cos.shape[-1]
    if n < x.shape[-1]:
        return torch.cat([rotate(x[..., :n], rotary), x[..., n:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with optional q/k norm (Qwen3).

    `gated`: what the heads say is multiplied by a sigmoid of a projection of x (Qwen3-Next).
    `centred`: the norms are `CentredRMSNorm`.
    """

    def __init__(
        self,
        width: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        qk_norm: bool,
        eps: float,
        width_out: int | None = None,
        gated: bool = False,
        centred: bool = False,
    ) -> None:
        super().__init__()
        norm = CentredRMSNorm if centred else RMSNorm
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.qkv = nn.Linear(width, (n_heads + 2 * n_kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(n_heads * head_dim, width_out or width, bias=False)
        self.q_norm = norm(head_dim, eps) if qk_norm else None
        self.k_norm = norm(head_dim, eps) if qk_norm else None
        self.gate = nn.Linear(width, n_heads * head_dim, bias=False) if gated else None

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        store: KVStore | None = None,
        layer: int = 0,
        view: View | None = None,
    ) -> Tensor:
        """x [B, N, D] -> [B, N, D]; without a store a plain causal pass."""
        batch, n, _ = x.shape
        n_q, n_k = self.n_heads, self.n_kv_heads
        qkv = self.qkv(x).view(batch, n, n_q + 2 * n_k, self.head_dim)
        if self.q_norm is None or self.k_norm is None:
            q, k = rotate(qkv[:, :, : n_q + n_k], rotary).split([n_q, n_k], dim=2)
        else:
            q = rotate(self.q_norm(qkv[:, :, :n_q]), rotary)
            k = rotate(self.k_norm(qkv[:, :, n_q : n_q + n_k]), rotary)
        v = qkv[:, :, n_q + n_k :]
        if store is None or view is None:
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=n_q != n_k,
            )
            mixed = mixed.transpose(1, 2).reshape(batch, n, -1)
        else:
            keys, values = store.write(layer, view, k, v)
            mixed = (view.attend or grouped_attention)(q, keys, values, view.mask)
        return self.out(mixed if self.gate is None else mixed * self.gate(x).sigmoid())

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of x [B, N, D], each [B, N, H_kv, head_dim], without any query."""
        n_k = self.n_kv_heads
        weight = self.qkv.weight[self.n_heads * self.head_dim :]
        k, v = F.linear(x, weight).unflatten(-1, (2 * n_k, self.head_dim)).split(n_k, dim=2)
        return rotate(k if self.k_norm is None else self.k_norm(k), rotary), v


def for_groups(view: View, group: int) -> View:
    """The view with its mask repeated for the `group` query heads of each key head."""
    if group == 1 or view.mask is None:
        return view
    return replace(view, mask=view.mask.repeat(1, 1, group, 1))


def grouped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q [B, N, H, d] over keys and values [B, H_kv, S, d]; returns [B, N, H * d].

    The G query heads of a group become further queries of their key head, so that no key is
    copied; the additive `mask` [B or 1, 1, G * N, S] repeats itself for them (`for_groups`).
    """
    batch, n, n_heads, dim = q.shape
    group = n_heads // keys.shape[1]
    if n == 1:  # a step of plain decoding: nothing to reorder
        q = q.reshape(batch, -1, group, dim)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    elif group > 1:
        q = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, H_kv, G*N, d]
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        mixed = mixed.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4)  # [B, N, H_kv, G, d]
    else:
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        mixed = mixed.transpose(1, 2)
    return mixed.reshape(batch, n, n_heads * dim)


class Block(nn.Module):
    """Pre-norm decoder block: attention, or a recurrent layer in its place, then an MLP.

    Both are residual. Whatever the first is handed besides x is a `decoder.Lane`.
    """

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, norm_attention: nn.Module, norm_mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm_attention = norm_attention
        self.attention = attention
        self.norm_mlp = norm_mlp
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        store: Any = None,
        layer: int = 0,
        view: Any = None,
    ) -> Tensor:
        x = x + self.attention(self.norm_attention(x), rotary, store, layer, view)
        return x + self.mlp(self.norm_mlp(x))
