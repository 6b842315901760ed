"""`python -m benchmarks.experts`: routed experts of real shape, our ways beside `transformers`'.

256 experts, 8 a token, [2048 -> 512], uniform routing; 1, 16 and 64 tokens; float32 and bfloat16.
Every round draws new tokens and a new routing and runs every way on it, in an order that changes.
Each call shifts the numbers of the experts at random, so that nobody finds the weights that
another way has just pulled into the caches; how many rows share an expert stays the same.

Medians of the times, and of the ratios within a round; one token, which takes little time, has
four times the rounds, and `batched_mm`, which copies the weights of every slot and takes up to
fifty times as long as the others, three. Quiet machine; random weights, 3.2 GB in float32, and up
to 6.4 GB more that `batched_mm` gathers.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from specdec.models.experts import WAYS
from specdec.models.routing import woken
from specdec.speedup import experts_woken

THEIRS = ("eager", "batched_mm", "grouped_mm")
SLOW, SLOW_REPEATS = "hf batched_mm", 3
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=512)
    a = parser.parse_args()
    print(
        f"{a.experts} experts, {a.top_k} a token, [{a.width} -> {a.inner}], "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {a.repeats} rounds\n\n"
        "| dtype | tokens | woken (uniform) | way | ms (low-high) | to the best of all "
        "| eager takes |\n|---|---|---|---|---|---|---|"
    )
    for dtype in (torch.float32, torch.bfloat16):
        ways = all_ways(a.experts, a.top_k, a.width, a.inner, dtype)
        for n in a.tokens:
            repeats = a.repeats * 4 if n == 1 else a.repeats
            taken, counts = interleaved(ways, n, a.experts, a.top_k, a.width, dtype, repeats)
            best = min(ways, key=lambda name: statistics.median(taken[name]))
            expected = experts_woken(n, a.experts, a.top_k)
            for name, own in taken.items():
                low, middle, high = min(own), statistics.median(own), max(own)
                print(
                    f"| {str(dtype).removeprefix('torch.')} | {n} | "
                    f"{statistics.fmean(counts):.0f} ({expected:.0f}) | {name} | "
                    f"{middle * 1e3:.2f} ({low * 1e3:.2f}-{high * 1e3:.2f}) | "
                    f"{ratio(own, taken[best]):.2f}x | {ratio(taken['hf eager'], own):.2f}x |",
                    flush=True,
                )
        del ways
        gc.collect()  # before the weights of the next dtype


def all_ways(
    n_experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype
) -> dict[str, Way]:
    """Ours and theirs, all over the same weights."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=width,
        moe_intermediate_size=inner,
        num_experts=n_experts,
        num_experts_per_tok=top_k,
    )
    with torch.device("meta"):
        module = Qwen3_5MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    shapes = (n_experts, 2 * inner, width), (n_experts, width, inner)
    gate_up, down = (torch.empty(shape, dtype=dtype) for shape in shapes)
    for weight in (gate_up, down):
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    module.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
    module.down_proj = nn.Parameter(down, requires_grad=False)

    def our(name: str) -> Way:
        return lambda x, indices, weights: WAYS[name](x, indices, weights, gate_up, down)

    def their(name: str) -> Way:
        def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            config._experts_implementation = name
            return module(x, indices, weights)

        return run

    ours = {f"ours {name}": our(name) for name in ("loop", "grouped")}
    return ours | {f"hf {name}": their(name) for name in THEIRS}


@torch.no_grad()
def interleaved(
    ways: dict[str, Way],
    n: int,
    n_experts: int,
    top_k: int,
    width: int,
    dtype: torch.dtype,
    repeats: int,
) -> tuple[dict[str, list[float]], list[int]]:
    """Seconds of each way in each round, and the experts woken; the first round is a check.

    Raises ValueError where a way disagrees with the loop by more than rounding.
    """
    generator = torch.Generator().manual_seed(n)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    counts: list[int] = []
    for repeat in range(repeats + 1):
        x = torch.randn(n, width, generator=generator).to(dtype)
        logits = torch.randn(n, n_experts, generator=generator)
        weights, indices = logits.softmax(-1).topk(top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
        names = [name for name in ways if name != SLOW or repeat <= SLOW_REPEATS]
        order = torch.randperm(len(names), generator=generator).tolist()
        results: dict[str, Tensor] = {}
        for name in (names[i] for i in order):
            shift = int(torch.randint(n_experts, (), generator=generator)) if repeat else 0
            routed = (indices + shift) % n_experts
            start = time.perf_counter()
            results[name] = ways[name](x, routed, weights)
            seconds = time.perf_counter() - start
            if repeat:
                taken[name].append(seconds)
        if repeat:
            counts.append(woken(indices))
        else:
            check(results, dtype)
    return taken, counts


def check(results: dict[str, Tensor], dtype: torch.dtype) -> None:
    want = results["ours loop"].float()
    bound = (0.03 if dtype == torch.bfloat16 else 1e-4) * float(want.abs().max())
    for name, got in results.items():
        off = float((got.float() - want).abs().max())
        if off > bound:
            raise ValueError(f"{name}: differs from the loop by {off:.2g}, expected {bound:.2g}")


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the ratios within a round, over the rounds that both have."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=False))


if __name__ == "__main__":
    main()
