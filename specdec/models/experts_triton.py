"""Routed experts as two launches of one Triton kernel: the form for GPUs (extra: `triton`).

The rows are sorted as in `grouped_experts` and cut into tiles that never cross an expert. Which
expert a tile belongs to is worked out on the device, so nothing waits for it: there are as many
programs as the worst routing would need, and those without a tile return at once. The first launch
computes silu(gate) * up in place of both. Few rows share an expert in a verified block, so tiles
are 16 rows high, the least that `tl.dot` takes, and the weights of a woken expert are read once
per 16 of its rows.

For inference, in float32, bfloat16 or float16; sums are float32, products of float32 not rounded to
TF32. On a CPU it runs in Triton's interpreter only (TRITON_INTERPRET=1 before the import), which is
how it is tested. It has not been timed on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton import knobs  # pyright: ignore[reportMissingImports]

from .experts import HALF, check_experts, combine, sort_by_expert, unsort

ROWS = 16


@triton.jit
def _tile_times_expert(
    rows_in,
    weight,
    rows_out,
    tile_expert,
    tile_row,
    ends,
    n_experts,
    n_in,
    n_out,
    GATED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """A tile of rows [., n_in] times [n_out, n_in], or silu(gate) * up of [2 n_out, n_in]."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < n_experts:
        row = tl.load(tile_row + tile) + tl.arange(0, BLOCK_ROWS)
        column = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        row_there = (row < tl.load(ends + expert))[:, None]  # the next rows are another expert's
        height = 2 * n_out if GATED else n_out
        # the experts together hold more numbers than an int32 counts
        own = weight + expert.to(tl.int64) * height * n_in
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
        total_up = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
        for start in range(0, n_in, BLOCK_IN):
            inner = start + tl.arange(0, BLOCK_IN)
            inside = (inner < n_in)[None, :]
            x = tl.load(
                rows_in + row[:, None] * n_in + inner[None, :], mask=row_there & inside, other=0.0
            )
            where = own + column[:, None] * n_in + inner[None, :]
            there = (column < n_out)[:, None] & inside
            w = tl.load(where, mask=there, other=0.0)
            if WIDEN:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
            if GATED:
                w_up = tl.load(where + n_out * n_in, mask=there, other=0.0).to(w.dtype)
                total_up = tl.dot(x, tl.trans(w_up), total_up, input_precision="ieee")
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        tl.store(
            rows_out + row[:, None] * n_out + column[None, :],
            total.to(rows_out.dtype.element_ty),
            mask=row_there & (column < n_out)[None, :],
        )


def tiles_of(ends: Tensor, n_rows: int, height: int = ROWS) -> tuple[Tensor, Tensor]:
    """Expert (E where there is no tile) and first row of each tile, int32 [as many as may be].

    `ends` [E]: where each expert's sorted rows end. An expert with r rows has ceil(r / height)
    tiles, which for S rows and E experts are never more than S // height + min(S, E).
    """
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tile_ends = ((ends - starts + height - 1) // height).cumsum(0, dtype=torch.int32)
    tile = torch.arange(
        n_rows // height + min(n_rows, len(ends)), device=ends.device, dtype=torch.int32
    )
    expert = torch.searchsorted(tile_ends, tile, right=True, out_int32=True)
    of = expert.clamp(max=len(ends) - 1).long()
    before = torch.cat([tile_ends.new_zeros(1), tile_ends[:-1]])[of]
    return expert, starts[of] + (tile - before) * height


def triton_experts(
    x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """As `experts.loop_experts`, without gradients; ValueError where the kernel cannot run."""
    check_experts(x, indices, weights, gate_up, down)
    if x.dtype not in (torch.float32, *HALF):
        raise ValueError(f"x: expected float32, bfloat16 or float16 for Triton, got {x.dtype}")
    if x.device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(
            f"x: expected a CUDA device, or TRITON_INTERPRET=1 before the import, got {x.device}"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weights, gate_up, down)):
        raise ValueError("x: Triton's experts have no gradients; train with experts='grouped'")
    if not len(x):
        return x.clone()
    gate_up, down = gate_up.contiguous(), down.contiguous()
    rows, ends, order = sort_by_expert(x, indices, len(gate_up))
    tiles = tiles_of(ends, len(rows))
    mixed = _launch(rows, gate_up, ends, tiles, gated=True)
    out = _launch(mixed, down, ends, tiles, gated=False)
    return combine(unsort(out, order).view(*indices.shape, x.shape[1]), weights)


def _launch(
    rows: Tensor, weight: Tensor, ends: Tensor, tiles: tuple[Tensor, Tensor], *, gated: bool
) -> Tensor:
    n_in, n_out = rows.shape[1], weight.shape[1] // (2 if gated else 1)
    out = rows.new_empty(len(rows), n_out)
    expert, row = tiles
    block = 64
    kernel: Any = _tile_times_expert  # its constants are typed as what they are inside
    kernel[(len(expert), triton.cdiv(n_out, block))](
        rows, weight, out, expert, row, ends, len(ends), n_in, n_out,
        GATED=gated,
        WIDEN=knobs.runtime.interpret,  # whose `dot` takes the bits of bfloat16 for whole numbers
        BLOCK_ROWS=ROWS, BLOCK_OUT=block, BLOCK_IN=block,
    )  # fmt: skip
    return out
