"""The Triton kernel in Triton's interpreter, chosen before the import: hence a subprocess."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from specdec.models.experts_triton import tiles_of, triton_experts

COMPARE = """
import torch
from specdec.models import experts_triton
from specdec.models.experts import MoeMLP, loop_experts
from specdec.models.experts_triton import triton_experts

def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)

def indices_of(m, n_experts, k):
    return torch.rand(m, n_experts, generator=generator).topk(k).indices

generator = torch.Generator().manual_seed(0)
for name, m, n_experts, k, width, inner in (
    ("tiles full and begun", 40, 3, 2, 70, 66),  # more than one block of 64, none of them full
    ("most experts asleep", 2, 9, 2, 20, 9),
    ("one token", 1, 5, 5, 16, 16),
    ("no token", 0, 5, 2, 16, 16),
):
    indices = indices_of(m, n_experts, k)
    weights = normal(m, k).softmax(-1)
    x, gate_up, down = (
        normal(m, width), normal(n_experts, 2 * inner, width), normal(n_experts, width, inner)
    )
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.005)):
        x_, weights_, gate_up_, down_ = (t.to(dtype) for t in (x, weights, gate_up, down))
        got = triton_experts(x_, indices, weights_, gate_up_, down_)
        want = loop_experts(
            x_.double(), indices, weights_.double(), gate_up_.double(), down_.double()
        )
        assert got.dtype == dtype and got.shape == want.shape
        off = float((got.double() - want).abs().max()) if m else 0.0
        assert off <= tolerance * (float(want.abs().max()) if m else 1.0), (name, dtype, off)
in_order = experts_triton.tiles_of  # a GPU runs tiles in any order: none may write another's rows
experts_triton.tiles_of = lambda *sizes: tuple(each.flip(0) for each in in_order(*sizes))
arguments = normal(20, 16), indices_of(20, 5, 2), normal(20, 2), normal(5, 16, 16), normal(5, 16, 8)
x, indices, *floats = (t if t.dtype == torch.long else t.float() for t in arguments)
torch.testing.assert_close(
    triton_experts(x, indices, *floats), loop_experts(x, indices, *floats), rtol=1e-4, atol=1e-4
)
layer = MoeMLP(16, 8, 5, 2, experts="triton").requires_grad_(False)
x = torch.randn(2, 3, 16)
got = layer(x)
layer.experts = "loop"
torch.testing.assert_close(got, layer(x), rtol=1e-5, atol=1e-5)
print("equal")
"""


def test_the_kernel_is_the_loop() -> None:
    """Would catch a tile that runs into the next expert, a mask forgotten, gate and up swapped."""
    done = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


def test_tiles_by_hand() -> None:
    """Would catch a tile too few for the worst routing, or one that begins at another's rows."""
    ends = torch.tensor([0, 5, 5, 6, 10], dtype=torch.int32)  # 0, 5, 0, 1 and 4 rows
    expert, row = tiles_of(ends, 10, height=4)
    assert expert.tolist() == [1, 1, 3, 4, 5, 5, 5]
    assert row.tolist()[:4] == [0, 4, 5, 6]
    worst = torch.tensor([1, 2, 3, 4, 10], dtype=torch.int32)  # 1, 1, 1, 1 and 6
    assert tiles_of(worst, 10, height=4)[0].tolist() == [0, 1, 2, 3, 4, 4, 5]


def test_where_it_cannot_run() -> None:
    """Would catch a failure deep inside Triton, and gradients that silently stop."""
    gate_up, down = torch.zeros(2, 8, 16), torch.zeros(2, 16, 4)
    indices, weights = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"x: expected a CUDA device, .* got cpu"):
        triton_experts(torch.zeros(3, 16), indices, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"x: expected float32, .* got torch\.float64"):
        triton_experts(
            torch.zeros(3, 16).double(), indices, weights, gate_up.double(), down.double()
        )
