"""`python -m benchmarks.real_size`: Qwen3.5-35B-A3B projected from two of its blocks.

1. Parameters by part, of the whole model on the meta device: nothing is allocated.
2. One recurrent block, one that attends, and the head, at real shapes with random weights, over 1
   and over 16 tokens; and the routed experts under routings that wake exactly 8 to 102 of 256.
3. The line through the experts' times, and what it says of the whole model: T_t/L of a verification
   of 16 tokens by the experts it wakes, and eta at Strix Halo's tau and T_d/T_t.

In float32, 6 GB, or with --bfloat16, where torch's CPU products of a single row can be slow by
orders of magnitude. Quiet machine; interleaved, medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from specdec.cache import everything
from specdec.models import QwenMoe, QwenMoeConfig
from specdec.models.delta_net import GatedDeltaNet
from specdec.models.experts import MoeMLP, grouped_experts
from specdec.models.layers import Block
from specdec.models.qwen_moe import LINEAR
from specdec.speedup import experts_woken

WOKEN = (8, 16, 32, 47, 64, 102)
BLOCK, CONTEXT = 16, 512
STRIX_TAU, STRIX_DRAFT, STRIX_VERIFY, STRIX_WOKEN = 4.9, 0.12, 1.6, 47


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bfloat16", action="store_true")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.bfloat16 else torch.float32
    config = QwenMoeConfig.qwen35_35b_a3b()
    with torch.device("meta"):
        counts = parts(QwenMoe(config))
    print("| part | parameters |\n|---|---|")
    for name, n in counts.items():
        print(f"| {name} | {n:,} |")
    print(f"| all | {sum(counts.values()):,} |")

    taken = measured(pieces(config, dtype), arguments.repeats)
    spread = {name: (min(own), statistics.median(own), max(own)) for name, own in taken.items()}
    print(
        f"\n{torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}, "
        f"{arguments.repeats} rounds\n\n| piece | ms (low-high) |\n|---|---|"
    )
    for name, (low, middle, high) in spread.items():
        print(f"| {name} | {middle * 1e3:.2f} ({low * 1e3:.2f}-{high * 1e3:.2f}) |")
    at = {name: middle for name, (_, middle, _) in spread.items()}
    projection(config, at)


def parts(model: QwenMoe) -> dict[str, int]:
    """Parameters of the model by what they are for."""
    counts: dict[str, int] = {}

    def add(name: str, module: nn.Module | None) -> None:
        if module is not None:
            counts[name] = counts.get(name, 0) + sum(p.numel() for p in module.parameters())

    add("embedding", model.embedding)
    for block in model.blocks:
        assert isinstance(block, Block)
        recurrent = isinstance(block.attention, GatedDeltaNet)
        add("recurrent layers" if recurrent else "attention", block.attention)
        mlp = block.mlp
        assert isinstance(mlp, MoeMLP)
        add("routed experts", mlp.routed)
        add("shared experts, routers, gates", mlp.shared)
        add("shared experts, routers, gates", mlp.shared_gate)
        add("shared experts, routers, gates", mlp.router)
        add("norms", block.norm_attention)
        add("norms", block.norm_mlp)
    add("norms", model.norm)
    add("head", model.head)
    return counts


def routing(n_tokens: int, top_k: int, n_woken: int) -> Tensor:
    """Experts [n_tokens, top_k], distinct within a token, that wake exactly `n_woken`."""
    slots = torch.arange(n_tokens * top_k)
    assert top_k <= n_woken <= len(slots)
    return (slots % n_woken).view(n_tokens, top_k)


def pieces(config: QwenMoeConfig, dtype: torch.dtype) -> dict[str, Callable[[int], object]]:
    """What is timed, by name; each is called with the number of the repetition."""
    c, generator = config, torch.Generator().manual_seed(0)
    small = dataclasses.replace(  # a block of each kind, with the shared expert for an MLP
        c,
        vocab_size=64,
        num_hidden_layers=2,
        layer_types=c.kinds[2:4],
        num_experts=0,
        intermediate_size=c.shared_expert_intermediate_size,
    )
    with torch.device("meta"):
        model, head = QwenMoe(small), nn.Linear(c.hidden_size, c.vocab_size, bias=False)
    model = model.to(dtype).to_empty(device="cpu").reset_parameters(generator)
    model.requires_grad_(False).eval()
    head = head.to(dtype).to_empty(device="cpu").requires_grad_(False)
    for weight in head.parameters():
        weight.normal_(0.0, c.hidden_size**-0.5, generator=generator)
    shapes = (
        (c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size),
        (c.num_experts, c.hidden_size, c.moe_intermediate_size),
    )
    gate_up, down = (torch.empty(shape, dtype=dtype) for shape in shapes)
    for weight in (gate_up, down):
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)

    cache = model.new_cache(1, CONTEXT)
    model(torch.randint(64, (1, CONTEXT), generator=generator), cache, logits=False)
    cache.commit(*everything(CONTEXT, 1, "cpu"))
    none = torch.zeros(1, dtype=torch.long)
    states = torch.randn(1, BLOCK, c.hidden_size, generator=generator).to(dtype)

    def block(i: int, n: int) -> Callable[[int], None]:
        def run(_: int) -> None:
            cache.append(n, None)
            model.blocks[i](states[:, :n], *model.lanes(n, cache, 0)[i])
            cache.commit(none.view(1, 1)[:, :0], none)

        return run

    def routed(n: int, n_woken: int) -> Callable[[int], None]:
        own = routing(n, c.num_experts_per_tok, n_woken)
        weights = torch.full(own.shape, 1 / c.num_experts_per_tok, dtype=dtype)
        x = states[0, :n]

        def run(repeat: int) -> None:  # other experts in every repetition: none is warm
            indices = (own * 5 + 37 * repeat) % c.num_experts  # 5 is prime to 256: still distinct
            grouped_experts(x, indices, weights, gate_up, down)

        return run

    return {
        **{
            f"{'recurrent' if kind == LINEAR else 'attending'} block, {n} tokens": block(i, n)
            for i, kind in enumerate(small.kinds)
            for n in (1, BLOCK)
        },
        **{f"head, {n} tokens": lambda _, n=n: head(states[:, :n]) for n in (1, BLOCK)},
        "1 token, 8 experts": routed(1, c.num_experts_per_tok),
        **{f"{BLOCK} tokens, {n} experts": routed(BLOCK, n) for n in WOKEN},
    }


def measured(pieces: Mapping[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every piece, one after the other in every repetition; the first two warm up."""
    taken: dict[str, list[float]] = {name: [] for name in pieces}
    with torch.no_grad():
        for repeat in range(repeats + 2):
            for name, run in pieces.items():
                start = time.perf_counter()
                run(repeat)
                if repeat >= 2:
                    taken[name].append(time.perf_counter() - start)
    return taken


def projection(config: QwenMoeConfig, at: Mapping[str, float]) -> None:
    """The line through the experts' times, and T_t/L and eta of the whole model."""
    seconds = np.array([at[f"{BLOCK} tokens, {n} experts"] for n in WOKEN])
    slope, intercept = np.polyfit(WOKEN, seconds, 1)
    left = seconds - (intercept + slope * np.array(WOKEN))
    explained = 1 - left.var() / seconds.var()
    print(
        f"\nexperts: {intercept * 1e3:.2f} ms + {slope * 1e3:.3f} ms an expert (R2 {explained:.3f})"
    )
    n_linear = config.kinds.count(LINEAR)
    n_full = config.num_hidden_layers - n_linear

    def model_seconds(n: int, experts: float) -> float:
        return (
            n_linear * at[f"recurrent block, {n} tokens"]
            + n_full * at[f"attending block, {n} tokens"]
            + config.num_hidden_layers * experts
            + at[f"head, {n} tokens"]
        )

    step = model_seconds(1, at["1 token, 8 experts"])
    print(
        f"a step of the whole model, projected: {step * 1e3:.0f} ms, of them "
        f"{config.num_hidden_layers * at['1 token, 8 experts'] / step:.0%} in experts\n\n"
        "| experts woken by 16 tokens | T_t/L | eta at tau 4.9, T_d/T_t 0.12 |\n|---|---|---|"
    )
    uniform = experts_woken(BLOCK, config.num_experts, config.num_experts_per_tok)
    for n, note in (
        (8, "all tokens alike"),
        (STRIX_WOKEN, "what Strix Halo counted"),
        (round(uniform), "uniform routing"),
    ):
        ratio = model_seconds(BLOCK, intercept + slope * n) / step
        eta = STRIX_TAU / (ratio * (1 + STRIX_DRAFT))
        print(f"| {n} ({note}) | {ratio:.2f} | {eta:.2f} |")
    eta = STRIX_TAU / (STRIX_VERIFY * (1 + STRIX_DRAFT))
    print(
        f"| Strix Halo, measured: {STRIX_WOKEN} | {STRIX_VERIFY} | {eta:.1f} predicted, "
        "2.1 measured |\n\n"
        "Real routing is correlated: the tokens of a block choose much the same experts."
    )


if __name__ == "__main__":
    main()
