"""Gated DeltaNet as a layer of Qwen3-Next and Qwen3.5, and what its cache keeps.

A projection gives q, k and v, which pass a short causal convolution; log-decays g, writing rates
beta and an output gate z come of the same input. The state of a head stays at the committed prefix
while nodes are pending; a commit advances it along the path, without a projection run again. The
convolution reads the inputs of a node's own ancestors, and behind them the last committed ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Kept, View
from .gated_delta import CHUNK, Pending, advance_, chunk_delta, extend, tree_delta, unit
from .layers import RMSNorm


@dataclass(frozen=True)
class DeltaShape:
    """Heads of keys and of values, their sizes, and how far the convolution reaches."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def n_channels(self) -> int:
        """Channels of q, k and v: what the convolution goes over."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim


@dataclass(frozen=True)
class DeltaView:
    """What pending nodes `first`.. descend from, for the recurrent layers of one pass.

    `ancestors` as in `View`. `reach` [B, N, kernel]: where among the committed inputs and all
    pending ones a node's convolution reads, the farthest first. Both None: a chain.
    """

    first: int
    ancestors: Tensor | None
    reach: Tensor | None


class DeltaStore:
    """States [layers, B, H_v, d_k, d_v] and last inputs [layers, B, kernel - 1, C] of all layers.

    States are in float32, or float64 for a float64 model. Nothing here carries a gradient.
    """

    def __init__(
        self,
        n_layers: int,
        batch_size: int,
        shape: DeltaShape,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        s, exact = shape, torch.promote_types(dtype, torch.float32)
        self.shape = shape
        self.states = torch.zeros(
            n_layers,
            batch_size,
            s.n_value_heads,
            s.key_dim,
            s.value_dim,
            dtype=exact,
            device=device,
        )
        self.inputs = torch.zeros(
            n_layers, batch_size, s.kernel - 1, s.n_channels, dtype=dtype, device=device
        )
        self.pending: list[Pending | None] = [None] * n_layers
        self.pending_inputs: list[Tensor | None] = [None] * n_layers  # [B, P, C]

    def reserve(self, n_slots: int) -> None:
        """A state does not grow."""

    def at(self, view: View) -> DeltaView:
        if view.parents is None or view.ancestors is None:
            return DeltaView(view.first, None, None)
        parents, rows = view.parents, torch.arange(len(view.parents), device=view.parents.device)
        node = torch.arange(view.first, parents.shape[1], device=parents.device)
        steps = [node.expand(len(parents), -1)]
        for _ in range(self.shape.kernel - 1):  # -1 is the last committed token, -2 the one before
            up = parents[rows.unsqueeze(1), steps[-1].clamp(min=0)]
            steps.append(torch.where(steps[-1] >= 0, up, steps[-1] - 1))
        reach = torch.stack(steps[::-1], dim=-1) + self.shape.kernel - 1
        return DeltaView(view.first, view.ancestors, reach)

    def read(self, layer: int, new: Tensor) -> Tensor:
        """Committed, pending and new inputs [B, kernel - 1 + P, C]; the new [B, N, C] are kept."""
        earlier = self.pending_inputs[layer]
        pending = new.detach() if earlier is None else torch.cat([earlier, new.detach()], dim=1)
        self.pending_inputs[layer] = pending
        return torch.cat([self.inputs[layer], pending], dim=1)

    def commit(self, kept: Kept) -> None:
        if kept.longest:
            rows = torch.arange(len(kept.n), device=kept.n.device).unsqueeze(1)
            last = torch.arange(self.shape.kernel - 1, device=kept.n.device)
            for layer, (pending, new) in enumerate(
                zip(self.pending, self.pending_inputs, strict=True)
            ):
                assert pending is not None and new is not None
                on_path = [pending.k, pending.u, pending.g, new]
                if kept.moves is None:
                    k, u, g, new = (x[:, : kept.longest] for x in on_path)
                else:  # padding may be any number
                    path = kept.path.clamp(0, new.shape[1] - 1)
                    k, u, g, new = (x[rows, path] for x in on_path)
                advance_(self.states[layer], k, u, g, kept.n)
                seen = torch.cat([self.inputs[layer], new], dim=1)
                self.inputs[layer] = seen[rows, kept.n.unsqueeze(1) + last]
        self.pending = [None] * len(self.pending)
        self.pending_inputs = [None] * len(self.pending)


class GatedDeltaNet(nn.Module):
    """The layer; where the published weights keep several projections, here they are one product.

    Rows of `projection`: q, k, v (the convolution's channels), z, b, a.
    """

    def __init__(self, width: int, shape: DeltaShape, eps: float) -> None:
        super().__init__()
        s = self.shape = shape
        n_values = s.n_value_heads * s.value_dim
        self.sizes = [s.n_channels, n_values, s.n_value_heads, s.n_value_heads]
        self.projection = nn.Linear(width, sum(self.sizes), bias=False)
        self.convolution = nn.Parameter(torch.zeros(s.kernel, s.n_channels))  # the farthest first
        self.A_log = nn.Parameter(torch.zeros(s.n_value_heads))
        self.dt_bias = nn.Parameter(torch.ones(s.n_value_heads))
        self.norm = RMSNorm(s.value_dim, eps)
        self.out = nn.Linear(n_values, width, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: object = None,
        store: DeltaStore | None = None,
        layer: int = 0,
        view: DeltaView | None = None,
    ) -> Tensor:
        """x [B, N, D] -> [B, N, D]; without a store a plain causal pass. Positions play no part."""
        s, n = self.shape, x.shape[1]
        inputs, z, b, a = self.projection(x).split(self.sizes, dim=-1)
        exact = torch.promote_types(x.dtype, torch.float32)
        if store is None or view is None:
            seen, reach = F.pad(inputs, (0, 0, s.kernel - 1, 0)), None
        else:
            seen, reach = store.read(layer, inputs), view.reach
        mixed = F.silu(self._convolve(seen, n, reach)).to(exact)
        n_keys = s.n_key_heads * s.key_dim
        q, k, v = mixed.split([n_keys, n_keys, self.sizes[1]], dim=-1)
        q = unit(q.unflatten(-1, (-1, s.key_dim))) * s.key_dim**-0.5
        k, v = unit(k.unflatten(-1, (-1, s.key_dim))), v.unflatten(-1, (-1, s.value_dim))
        beta = b.sigmoid().to(exact)
        g = -self.A_log.to(exact).exp() * F.softplus(a.to(exact) + self.dt_bias.to(exact))

        if store is None or view is None:
            state = k.new_zeros(len(x), s.n_value_heads, s.key_dim, s.value_dim)
            o, _ = chunk_delta(q, k, v, g, beta, state, None)
        else:
            state, before = store.states[layer], store.pending[layer]
            if before is None and view.ancestors is None and n > CHUNK:
                o, u = chunk_delta(q, k, v, g, beta, state, None)
            else:
                o, u = tree_delta(
                    q, k, v, g, beta, state, None, ancestors=view.ancestors, before=before
                )
            k, u, g = k.detach(), u.detach(), g.detach()
            store.pending[layer] = extend(before, k, u, g, view.ancestors)
        gate = F.silu(z.unflatten(-1, (-1, s.value_dim)))
        return self.out((self.norm(o.to(x.dtype)) * gate).flatten(2))

    def _convolve(self, seen: Tensor, n: int, reach: Tensor | None) -> Tensor:
        """Depthwise convolution at the last `n` places of `seen` [B, T, C], or along `reach`."""
        first, rows = seen.shape[1] - n, torch.arange(len(seen), device=seen.device).unsqueeze(1)
        total = None
        for t, weight in enumerate(self.convolution):
            back = self.shape.kernel - 1 - t
            x = (
                seen[:, first - back : seen.shape[1] - back]
                if reach is None
                else seen[rows, reach[..., t]]
            )
            total = x * weight if total is None else torch.addcmul(total, x, weight)
        assert total is not None
        return total
