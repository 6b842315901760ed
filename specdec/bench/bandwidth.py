"""What plain decoding is bound by: the bytes a step has to read, and how fast the machine reads.

A step multiplies every weight with one vector: it takes at least as long as reading the weights
and the cache once from memory. The machine's speed is measured, not looked up: the sum of a tensor
much larger than the caches, with the threads that decoding has.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from ..cache import KVStore
from ..models import QwenMoe, Transformer
from ..models.delta_net import DeltaStore
from ..models.experts import MoeMLP


@dataclass(frozen=True)
class Bound:
    """How plain decoding could do at best."""

    step_bytes: int
    bytes_per_second: float
    """The median of the machine's read bandwidth."""

    @property
    def step_seconds(self) -> float:
        return self.step_bytes / self.bytes_per_second

    def reached(self, tokens_per_second: float) -> float:
        """Tokens per second of plain decoding as a share of the bound."""
        return tokens_per_second * self.step_seconds


def read_bandwidth(
    n_bytes: int = 2**30, repeats: int = 9, device: torch.device | str = "cpu"
) -> float:
    """Median bytes per second of summing `n_bytes` of float32.

    Raises:
        ValueError: for fewer than 4 bytes or a repetition less than one.
    """
    if n_bytes < 4 or repeats < 1:
        raise ValueError(
            f"n_bytes, repeats: expected at least 4 and at least 1, got {n_bytes}, {repeats}"
        )
    data = torch.ones(n_bytes // 4, device=device)
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        data.sum().item()  # waits for a GPU, too
        taken.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(taken[1:])  # the first warms up


def step_bytes(model: Transformer | QwenMoe, context: int) -> int:
    """Bytes that one step behind `context` tokens reads: weights, and keys and values.

    Of a table of embeddings that is no head, too, one row; of E experts the k that a token wakes.
    Activations are not counted, nor what is written.
    """
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    table = model.embedding.weight
    if model.head.weight is not table:
        n_bytes -= table.nbytes - table[0].nbytes
    for module in model.modules():
        if isinstance(module, MoeMLP):
            n_bytes -= _asleep(module)
    return n_bytes + _cache_bytes(model, context)


def _asleep(mlp: MoeMLP) -> int:
    """Bytes of the experts that one token does not wake."""
    n_experts = len(mlp.routed.down_proj)
    all_of_them = sum(parameter.nbytes for parameter in mlp.routed.parameters())
    return all_of_them * (n_experts - mlp.router.top_k) // n_experts


def _cache_bytes(model: Transformer | QwenMoe, context: int) -> int:
    """Keys and values of `context` tokens; states and last inputs of recurrent layers."""
    n_bytes = 0
    for store in model.new_cache(1, 0).stores:
        if isinstance(store, KVStore):
            n_bytes += store.buffer[:, :, :, :, 0].nbytes * context
        if isinstance(store, DeltaStore):
            n_bytes += store.states.nbytes + store.inputs.nbytes
    return n_bytes
