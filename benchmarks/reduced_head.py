"""`python -m benchmarks.reduced_head`: what a smaller draft vocabulary saves, and what it costs.

The head of Strix Halo's drafter, [2048 x 248320], beside one of the 32768 most frequent tokens:
bytes and time of one draft pass over 16 slots, bfloat16 and float32, random weights. Then what 3 %
of tokens that cannot be named take from tau, by the geometric model of acceptance.
"""

from __future__ import annotations

import statistics
import time

import torch

from specdec.speedup import acceptance_for_tau, tau_kept

WIDTH, FULL, REDUCED, SLOTS = 2048, 248_320, 32_768, 16
STRIX_TAU, STRIX_DRAFTS, UNNAMEABLE = 4.9, 15, 0.03


def seconds(heads: list[torch.Tensor], states: torch.Tensor, repeats: int) -> list[list[float]]:
    """Interleaved times of states [n, D] through each head [V, D]."""
    taken: list[list[float]] = [[] for _ in heads]
    with torch.no_grad():
        for repeat in range(repeats + 1):
            for own, head in zip(taken, heads, strict=True):
                start = time.perf_counter()
                torch.mm(states, head.T)
                if repeat:  # the first warms up
                    own.append(time.perf_counter() - start)
    return taken


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    print(
        f"heads [{WIDTH} x {FULL}] and [{WIDTH} x {REDUCED}], {torch.get_num_threads()} threads\n\n"
        "| dtype | slots | bytes, full | bytes, reduced | ratio | ms, full (low-high) "
        "| ms, reduced (low-high) | ratio |\n|---|---|---|---|---|---|---|---|"
    )
    for dtype in (torch.bfloat16, torch.float32):
        sizes = (FULL, REDUCED)
        heads = [torch.randn(size, WIDTH, generator=generator).to(dtype) for size in sizes]
        bytes_ = [head.numel() * head.element_size() for head in heads]
        for slots in (1, SLOTS):
            states = torch.randn(slots, WIDTH, generator=generator).to(dtype)
            full, reduced = seconds(heads, states, 7)
            medians = statistics.median(full), statistics.median(reduced)
            cells = [
                f"{middle * 1e3:.1f} ({min(own) * 1e3:.1f}-{max(own) * 1e3:.1f})"
                for middle, own in zip(medians, (full, reduced), strict=True)
            ]
            print(
                f"| {str(dtype).removeprefix('torch.')} | {slots} | {bytes_[0] / 1e9:.2f} GB | "
                f"{bytes_[1] / 1e9:.2f} GB | {bytes_[0] / bytes_[1]:.1f}x | {cells[0]} | "
                f"{cells[1]} | {medians[0] / medians[1]:.1f}x |"
            )
    acceptance = acceptance_for_tau(STRIX_TAU, STRIX_DRAFTS)
    kept = tau_kept(acceptance, STRIX_DRAFTS, UNNAMEABLE)
    print(
        f"\ntau {STRIX_TAU} with {STRIX_DRAFTS} drafts is an acceptance of {acceptance:.3f}; with "
        f"{UNNAMEABLE:.0%} of tokens refused for certain {kept:.1%} of it are left, "
        f"tau {STRIX_TAU * kept:.2f}"
    )


if __name__ == "__main__":
    main()
