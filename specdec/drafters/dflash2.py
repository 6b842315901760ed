"""What DFlash 2 adds to DFlash: short convolutions in every layer, and a selector of candidates.

The convolutions run over the slots of a block, causally, before and behind attention and MLP; their
kernels are a learned base plus one computed from what comes in, shared by groups of channels. The
selector restores what slots predicted side by side lack: among the likeliest tokens of a slot it
prefers those that go with the token chosen before, by a product of low rank.

After the PyTorch code that comes with the released checkpoints (PyPI `dflash` 0.1.0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVStore, View
from ..models import TransformerConfig
from ..models.layers import GatedMLP, RMSNorm
from ..models.transformer import attention_of


@dataclass(frozen=True)
class DFlash2:
    """Sizes of what DFlash 2 adds; a ValueError names the one that does not fit."""

    kernel_size: int = 2
    group_size: int = 4
    rank: int = 64
    top_k: int = 8

    def __post_init__(self) -> None:
        for name in ("kernel_size", "group_size", "rank", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


class BlockConv(nn.Module):
    """Two causal convolutions over the slots of a block, in front of a sub-layer and behind it.

    Both kernels are computed from what comes in front: `base` [2, kernel_size, D] plus a projection
    of it, one number for `group_size` channels.
    """

    def __init__(self, width: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        if width % group_size:
            raise ValueError(f"group_size: expected a divisor of {width}, got {group_size}")
        self.kernel_size, self.group_size = kernel_size, group_size
        self.base = nn.Parameter(torch.zeros(2, kernel_size, width))
        self.project = nn.Linear(width, 2 * kernel_size * (width // group_size), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks x [B, K, D] -> the first convolution of it, and the kernels of the second."""
        dynamic = self.project(x).unflatten(-1, (2, self.kernel_size, -1))  # [B, K, 2, k, D / g]
        dynamic = dynamic.repeat_interleave(self.group_size, dim=-1)  # [B, K, 2, k, D]
        kernels = self.base + dynamic
        return convolve(x, kernels[:, :, 0]), kernels[:, :, 1]


def convolve(x: Tensor, kernels: Tensor) -> Tensor:
    """y_i = sum_j kernels_ij x_{i-j}; x [B, K, D], kernels [B, K, k, D] -> [B, K, D]."""
    out = kernels[:, :, 0] * x
    for j in range(1, kernels.shape[2]):
        out = out + kernels[:, :, j] * F.pad(x, (0, 0, j, 0))[:, : x.shape[1]]
    return out


class ConvBlock(nn.Module):
    """A pre-norm decoder block with a `BlockConv` around attention and MLP; called as `Block` is.

    It runs over whole blocks of `block_size` slots, or one shorter block.
    """

    def __init__(self, config: TransformerConfig, sizes: DFlash2, block_size: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.block_size = block_size
        self.norm_attention = RMSNorm(width, eps)
        self.conv_attention = BlockConv(width, sizes.kernel_size, sizes.group_size)
        self.attention = attention_of(config)
        self.norm_mlp = RMSNorm(width, eps)
        self.conv_mlp = BlockConv(width, sizes.kernel_size, sizes.group_size)
        self.mlp = GatedMLP(width, config.intermediate_size)

    @torch.no_grad()
    def reset_own(self) -> None:
        """Convolutions that pass on what they read: learning starts at plain DFlash."""
        for conv in (self.conv_attention, self.conv_mlp):
            conv.base.zero_()[:, 0] = 1.0
            conv.project.weight.zero_()

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        store: KVStore | None = None,
        layer: int = 0,
        view: View | None = None,
    ) -> Tensor:
        rows, shape = (-1, min(x.shape[1], self.block_size), x.shape[2]), x.shape
        read, kernels = self.conv_attention(self.norm_attention(x).reshape(rows))
        mixed = self.attention(read.reshape(shape), rotary, store, layer, view)
        x = x + convolve(mixed.reshape(rows), kernels).reshape(shape)
        read, kernels = self.conv_mlp(self.norm_mlp(x).reshape(rows))
        return x + convolve(self.mlp(read), kernels).reshape(shape)


class Selector(nn.Module):
    """Scores the likeliest tokens of a slot by the token before: low-rank pairs, gated by the slot.

    score(x | y) = logit(x) + sum_r before_r(y) (W h)_r after_r(x)
    """

    def __init__(self, config: TransformerConfig, sizes: DFlash2) -> None:
        super().__init__()
        if sizes.top_k > config.vocab_size:
            raise ValueError(
                f"top_k: expected at most the vocabulary of {config.vocab_size}, got {sizes.top_k}"
            )
        self.top_k = sizes.top_k
        self.before = nn.Embedding(config.vocab_size, sizes.rank)
        self.after = nn.Embedding(config.vocab_size, sizes.rank)
        self.project = nn.Linear(config.hidden_size, sizes.rank, bias=False)

    @torch.no_grad()
    def reset_own(self) -> None:
        """Scores start as the logits themselves."""
        self.after.weight.zero_()

    def candidates(self, logits: Tensor) -> Tensor:
        """Logits [..., V] -> the likeliest tokens [..., k]."""
        return logits.topk(self.top_k, dim=-1).indices

    def scores(self, states: Tensor, logits: Tensor, ids: Tensor, before: Tensor) -> Tensor:
        """Scores [..., k] of candidates `ids` [..., k] behind the tokens `before` [...].

        `states` [..., D] and `logits` [..., V] of their slots; leading shapes may broadcast.
        """
        pair = self.before(before) * self.project(states)  # [..., r]
        return logits.gather(-1, ids) + (self.after(ids) @ pair.unsqueeze(-1)).squeeze(-1)

    def forward(self, states: Tensor, logits: Tensor, before: Tensor) -> Tensor:
        """The law of a slot behind each of M tokens, as logits [B, M, V]: -inf but at candidates.

        `states` [B, D] and `logits` [B, V] of the slot, `before` [B, M].
        """
        ids = self.candidates(logits).unsqueeze(1).expand(-1, before.shape[1], -1)  # [B, M, k]
        rows = logits.unsqueeze(1).expand(-1, before.shape[1], -1)  # [B, M, V]
        scores = self.scores(states.unsqueeze(1), rows, ids, before)
        return torch.full_like(rows, -torch.inf).scatter(-1, ids, scores)
