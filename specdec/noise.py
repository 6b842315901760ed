"""Counter-based noise: the same numbers for the same key, on any device, in any batch.

A key is hashed from whole numbers (seed, length, purpose, depth, node); its stream is SplitMix64
(Steele, Lea and Flood, OOPSLA 2014): output v of a key is mix(key + (v + 1) * golden). No
generator, no state: what a row draws depends on nothing but its own key.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _fold(x: Tensor, n: int) -> Tensor:
    return x ^ ((x >> n) & ((1 << (64 - n)) - 1))  # logical shift: int64 shifts in the sign


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, a bijection that changes half the bits."""
    return _fold(_fold(_fold(x, 30) * _FIRST, 27) * _SECOND, 31)


def key(first: Tensor, *rest: Tensor | int) -> Tensor:
    """Hash whole numbers that broadcast against each other into keys, int64."""
    state = mix(first * _GOLDEN + _GOLDEN)
    for part in rest:
        step = _signed(part * _GOLDEN % 2**64) if isinstance(part, int) else part * _GOLDEN
        state = mix(state + step + _GOLDEN)
    return state


def uniform(keys: Tensor, n: int | None = None) -> Tensor:
    """Uniform numbers in (0, 1), float64, of `keys`' shape, with a last dimension `n` if given."""
    counter = torch.arange(1, (n or 1) + 1, device=keys.device) * _GOLDEN
    bits = mix(keys.unsqueeze(-1) + counter)
    # 52 bits and a half: exact in float64, so that neither 0 nor 1 can come out
    numbers = (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
    return numbers.squeeze(-1) if n is None else numbers


def gumbel(keys: Tensor, n: int) -> Tensor:
    """Standard Gumbel noise [*keys.shape, n], float64: argmax(log p + gumbel) is a draw from p."""
    return -torch.log(-torch.log(uniform(keys, n)))
