"""Bytes of a step, counted by hand."""

import pytest

from specdec.bench.bandwidth import Bound, read_bandwidth, step_bytes
from specdec.testing import small_hybrid
from tests.helpers import tiny_transformer


def test_a_step_reads_every_weight_and_the_cache_once():
    """Catches a tied table counted twice, an embedding read whole, keys without values."""
    # V 13, D 16, inner 24, 4 heads of 4, 2 of them with keys; float64
    block = 16 * (16 + 2 * 2 * 4) + 16 * 16 + 3 * 16 * 24 + 2 * 16
    tied = 3 * block + 16 + 13 * 16
    keys_values = 2 * 3 * 2 * 4  # a token
    assert step_bytes(tiny_transformer(), 0) == 8 * tied
    assert step_bytes(tiny_transformer(), 10) == 8 * (tied + 10 * keys_values)
    free = tiny_transformer(tie_word_embeddings=False)
    assert step_bytes(free, 0) == 8 * (tied + 16)  # the embedding's own row


def test_experts_asleep_are_not_read():
    """Catches all experts counted, or the states of recurrent layers forgotten."""
    # experts: 3 products of [8, 16], of which 2 of 4 are woken in each of 4 blocks
    model = small_hybrid(0, n_experts=4)
    n_all = sum(p.numel() for p in model.parameters()) - 11 * 16 + 16
    states = 3 * 4 * 4 * 6  # three recurrent layers, four heads of 4 x 6
    inputs = 3 * 3 * (2 * 2 * 4 + 4 * 6)  # the last three inputs of every channel
    assert step_bytes(model, 0) == 8 * (n_all - 4 * 2 * 3 * 8 * 16 + states + inputs)
    assert step_bytes(model, 5) - step_bytes(model, 0) == 8 * 5 * 2 * 2 * 8


def test_the_bound():
    """Catches a share that is turned upside down."""
    bound = Bound(step_bytes=50, bytes_per_second=1000.0)
    assert bound.step_seconds == 0.05
    assert bound.reached(10.0) == 0.5


def test_bandwidth_is_that_of_reading(monkeypatch):
    """Catches bytes taken for numbers (a quarter of it), a mean, or a warm-up that counts."""
    taken = iter([9.0, 0.5, 0.5, 7.0])
    marks = [0.0]
    for seconds in taken:
        marks += [marks[-1] + seconds] * 2
    clock = iter(marks)
    monkeypatch.setattr("specdec.bench.bandwidth.time.perf_counter", lambda: next(clock))
    assert read_bandwidth(4000, repeats=3) == 4000 / 0.5


def test_sizes_are_checked():
    """Catches the median of nothing."""
    with pytest.raises(ValueError, match=r"n_bytes, repeats: expected .* got 3, 1"):
        read_bandwidth(3, 1)
    with pytest.raises(ValueError, match=r"n_bytes, repeats: expected .* got 4, 0"):
        read_bandwidth(4, 0)
