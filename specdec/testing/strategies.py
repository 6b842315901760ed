"""Hypothesis strategies for property tests: targets, prompts, trees, rules. Needs `hypothesis`."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..accept import Coupled, Greedy
from ..models import QwenMoe, Transformer
from .targets import small_hybrid, small_target


def targets(vocab_size: int = 11) -> st.SearchStrategy[Transformer | QwenMoe]:
    """Random targets: dense ones of 1-4 layers and, one time in five, hybrids of 1-4."""
    dense = st.builds(
        small_target,
        st.integers(0, 50),
        st.just(vocab_size),
        st.integers(1, 4),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1.0, 3.0]),
    )
    return st.one_of(dense, dense, dense, dense, hybrids(vocab_size))


def hybrids(vocab_size: int = 11) -> st.SearchStrategy[QwenMoe]:
    """Random targets with recurrent layers, of 1-4 blocks, with experts and without."""
    return st.builds(
        small_hybrid,
        st.integers(0, 50),
        st.just(vocab_size),
        st.integers(1, 4),
        st.sampled_from([0, 3]),
        st.sampled_from([1.0, 3.0]),
    )


def prompts(
    vocab_size: int = 11, min_rows: int = 1, max_rows: int = 4, max_length: int = 10
) -> st.SearchStrategy[list[Tensor]]:
    """Ragged batches of prompts, from one token."""
    token = st.integers(0, vocab_size - 1)
    row = st.lists(token, min_size=1, max_size=max_length)
    return st.lists(row, min_size=min_rows, max_size=max_rows).map(
        lambda rows: [torch.tensor(row) for row in rows]
    )


def parents(max_nodes: int = 24) -> st.SearchStrategy[list[int]]:
    """Parents of a random tree, parents before children, -1 the root."""

    def grow(choices: list[int]) -> list[int]:
        return [choice % (i + 1) - 1 for i, choice in enumerate(choices)]

    return st.lists(st.integers(0, 2**16), min_size=1, max_size=max_nodes).map(grow)


def rules() -> st.SearchStrategy[Greedy | Coupled]:
    """The rules under which drafted and plain decoding give the same tokens."""
    coupled = st.builds(
        Coupled,
        temperature=st.floats(0.3, 2.0),
        top_k=st.sampled_from([None, 1, 3, 7]),
        top_p=st.sampled_from([1.0, 0.9, 0.5]),
        min_p=st.sampled_from([0.0, 0.05, 0.3]),
        seed=st.integers(0, 2**40),
    )
    return st.one_of(st.just(Greedy()), coupled)


__all__ = ["hybrids", "parents", "prompts", "rules", "small_hybrid", "small_target", "targets"]
