"""`python -m benchmarks.pack [--layers 30] [--repeats 15] [--only PART ...] [--clock cpu]`.

What a block costs beside a step on a CPU, and what `specdec.pack` does about it. Everything is
timed in one process, interleaved: each repetition runs every way at every block size once, and the
first repetition warms up. Cells: median (lowest-highest) ms, times the plain median at one row;
behind the slash the same of the lowest times. `--clock cpu` counts the time of the one thread
instead (OMP_NUM_THREADS=1), a way to look while the machine is busy. Weights are random, in
SmolLM2's shape (width 576,
inner 1536, 9 heads of which 3 have keys, vocabulary 49152) or the embedded target's.

kernels: the linear layers of a pass alone, one after another, so that no weight is still in a
    core's cache when it comes round again, through the products that torch offers.
passes: whole passes over a block behind 200 committed tokens.
sizes: where packing begins to gain, by the size of a weight.
bf16: bfloat16 layers (`pack` leaves them alone).
rows: whether a row comes out the same to the bit in blocks of other sizes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import load, pack
from specdec.models import Transformer, TransformerConfig

BLOCKS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
CONTEXT = 200
SMOLLM2 = TransformerConfig(49152, 576, 1536, 30, 9, 3, 64)
Way: TypeAlias = Callable[[int], object]
"""Runs a block of so many rows."""
Product: TypeAlias = Callable[[Tensor], Tensor]
"""x [n, in] -> [n, out]."""


@dataclass(frozen=True)
class Run:
    """How to time: repetitions after the one that warms up, and a clock in seconds."""

    repeats: int
    clock: Callable[[], float]


def shapes_of(c: TransformerConfig) -> list[tuple[int, int]]:
    """[out, in] of every linear layer of a pass, in order."""
    kv, q = c.n_kv_heads * c.head_size, c.num_attention_heads * c.head_size
    block = [
        (q + 2 * kv, c.hidden_size),
        (c.hidden_size, q),
        (2 * c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    ]
    return block * c.num_hidden_layers + [(c.vocab_size, c.hidden_size)]


def random_weights(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(s, generator=generator) * s[1] ** -0.5).to(dtype) for s in shapes]


def in_onednn_order(weights: list[Tensor], hint: int) -> list[Tensor]:
    return [torch.ops.mkldnn._reorder_linear_weight(weight, hint) for weight in weights]


def onednn(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def products(weights: list[Tensor]) -> dict[str, list[Product]]:
    """Ways to multiply x by each of the weights: name -> one product a weight."""
    ways: dict[str, list[Product]] = {
        "F.linear": [partial(F.linear, weight=weight) for weight in weights],
        "x @ W.T, W.T laid out": [
            partial(torch.matmul, other=weight.T.contiguous()) for weight in weights
        ],
    }
    for hint in (1, 16):
        ways[f"oneDNN, packed for {hint}"] = [
            partial(onednn, packed=packed) for packed in in_onednn_order(weights, hint)
        ]
    if torch.backends.mkl.is_available() and weights[0].dtype == torch.float32:
        order, product = torch.ops.mkl._mkl_reorder_linear_weight, torch.ops.mkl._mkl_linear
        ordered = [order(weight, 8) for weight in weights]
        ways["MKL, packed for 8"] = [
            lambda x, w=weight, p=laid_out: product(x, p, w, None, 8)
            for weight, laid_out in zip(weights, ordered, strict=True)
        ]
    return ways


def stack(weights: list[Tensor], each: list[Product]) -> Way:
    """One product after another over a block of rows."""
    width = {weight.shape[1] for weight in weights}
    generator = torch.Generator().manual_seed(1)
    dtype = weights[0].dtype
    inputs = {
        (n, k): torch.randn(n, k, generator=generator).to(dtype) for n in BLOCKS for k in width
    }

    def way(n: int) -> None:
        for weight, product in zip(weights, each, strict=True):
            product(inputs[n, weight.shape[1]])

    return way


def measure(
    ways: Mapping[str, Way], blocks: Sequence[int], run: Run
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every way at every block size, interleaved."""
    taken: dict[tuple[str, int], list[float]] = {(w, n): [] for w in ways for n in blocks}
    with torch.inference_mode():
        for repeat in range(run.repeats + 1):
            for n in blocks:
                for name, way in ways.items():
                    start = run.clock()
                    way(n)
                    if repeat:
                        taken[name, n].append(run.clock() - start)
    return taken


def show(title: str, ways: Mapping[str, Way], blocks: Sequence[int], run: Run) -> None:
    taken = measure(ways, blocks, run)
    first = taken[next(iter(ways)), 1]
    print(f"\n{title}\n\n| rows | " + " | ".join(map(str, blocks)) + " |")
    print("|---" * (len(blocks) + 1) + "|")
    for name in ways:
        cells = []
        for n in blocks:
            own = taken[name, n]
            middle, low = statistics.median(own), min(own)
            cells.append(
                f"{1e3 * middle:.1f} ({1e3 * low:.1f}-{1e3 * max(own):.1f}) "
                f"{middle / statistics.median(first):.2f}x / {low / min(first):.2f}x"
            )
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def kernels(name: str, config: TransformerConfig, run: Run) -> None:
    weights = random_weights(shapes_of(config), torch.float32)
    ways = {way: stack(weights, each) for way, each in products(weights).items()}
    show(f"Linear layers of {name}, float32", ways, BLOCKS, run)


def bf16(config: TransformerConfig, run: Run) -> None:
    weights = random_weights(shapes_of(config), torch.bfloat16)
    ways = {way: stack(weights, each) for way, each in products(weights).items()}
    show("Linear layers of SmolLM2, bfloat16", ways, BLOCKS, run)


def passes(name: str, target: Transformer, run: Run) -> None:
    models = {"plain": target, "pack": copy.deepcopy(target), "all": copy.deepcopy(target)}
    models["same kernel"] = copy.deepcopy(target)
    print(f"\n{name}, pack: {pack(models['pack'])}")
    pack(models["all"], min_bytes=0)
    pack(models["same kernel"], min_bytes=0, same_kernel=True)
    tokens = torch.randint(
        target.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(2)
    )

    def way(model: Transformer) -> Way:
        cache = model.new_cache(1, CONTEXT + 1)
        with torch.inference_mode():
            model(tokens, cache, logits=False)
            cache.commit(torch.arange(CONTEXT)[None], torch.tensor([CONTEXT]))

        def block(n: int) -> None:
            model(tokens[:, :n], cache)
            cache.commit(torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]))

        return block

    names = {
        "plain": "plain",
        "pack": "`pack`",
        "all": "`min_bytes=0`",
        "same kernel": "`min_bytes=0, same_kernel=True`",
    }
    ways = {names[key]: way(model) for key, model in models.items()}
    show(f"Passes of {name}, float32", ways, BLOCKS, run)


def sizes(run: Run) -> None:
    """Products of one size over about 64 MB of weights: packed over plain, medians."""
    blocks = (1, 2, 3, 4, 8, 16, 32)
    print("\nPacked over plain, by the size of a weight: medians / lowest\n")
    print("| [out, in] | MiB | " + " | ".join(f"{n} rows" for n in blocks) + " |")
    print("|---" * (len(blocks) + 2) + "|")
    for shape in (
        (256, 256), (576, 256), (1152, 256), (576, 576), (512, 1024), (960, 576), (1024, 1024),
        (576, 1536), (3072, 576), (2048, 2048), (49152, 576),
    ):  # fmt: skip
        weights = random_weights(
            [shape] * max(1, 16_000_000 // (shape[0] * shape[1])), torch.float32
        )
        every = products(weights)
        ways = {
            "plain": stack(weights, every["F.linear"]),
            "packed": stack(weights, every["oneDNN, packed for 16"]),
        }
        taken = measure(ways, blocks, run)
        cells = [
            f"{statistics.median(taken['packed', n]) / statistics.median(taken['plain', n]):.2f}"
            f" / {min(taken['packed', n]) / min(taken['plain', n]):.2f}"
            for n in blocks
        ]
        mib = shape[0] * shape[1] * 4 / 2**20
        print(f"| {list(shape)} | {mib:.2f} | " + " | ".join(cells) + " |", flush=True)


def rows() -> None:
    """Block sizes that give the first row the same bits, in groups."""
    print("\nBlock sizes whose first row is equal to the bit, in groups\n")
    print("| [out, in] | way | groups | largest error |\n|---|---|---|---|")
    for shape in ((576, 256), (960, 576), (3072, 576), (576, 1536), (49152, 576)):
        (weight,) = random_weights([shape], torch.float32)
        x = torch.randn(BLOCKS[-1], shape[1], generator=torch.Generator().manual_seed(3))
        exact = x.double() @ weight.double().T
        with torch.inference_mode():
            for name, (product,) in products([weight]).items():
                groups: list[list[int]] = []
                first: list[Tensor] = []
                for n in range(1, BLOCKS[-1] + 1):
                    row = product(x[:n])[0]
                    known = [i for i, own in enumerate(first) if torch.equal(own, row)]
                    if known:
                        groups[known[0]].append(n)
                    else:
                        groups.append([n])
                        first.append(row)
                error = float((product(x).double() - exact).abs().max())
                spans = ", ".join(spanned(group) for group in groups)
                print(f"| {list(shape)} | {name} | {spans} | {error:.1e} |")


def spanned(group: list[int]) -> str:
    """Whole numbers in order, as `1`, `2-12` or, with gaps, `2-64 (12 of them)`."""
    low, high = group[0], group[-1]
    if low == high:
        return f"{low}"
    return f"{low}-{high}" + ("" if high - low + 1 == len(group) else f" ({len(group)} of them)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=SMOLLM2.num_hidden_layers)
    parser.add_argument("--repeats", type=int, default=15)
    every = ["kernels", "passes", "sizes", "bf16", "rows"]
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args()
    if arguments.clock == "cpu" and torch.get_num_threads() > 1:
        parser.error("--clock cpu counts one thread: set OMP_NUM_THREADS=1")
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    run = Run(arguments.repeats, clock)
    smollm2 = TransformerConfig(49152, 576, 1536, arguments.layers, 9, 3, 64)
    tiny = load("tiny").target
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, {arguments.layers} layers, "
        f"{run.repeats} repeats, {arguments.clock} clock"
    )
    if "kernels" in arguments.only:
        kernels("SmolLM2", smollm2, run)
        kernels("the embedded target", tiny.config, run)
    if "passes" in arguments.only:
        target = Transformer(smollm2).reset_parameters(torch.Generator().manual_seed(0))
        passes("SmolLM2", target.eval().requires_grad_(False), run)
        passes("the embedded target", tiny, run)
    if "sizes" in arguments.only:
        sizes(run)
    if "bf16" in arguments.only:
        bf16(smollm2, run)
    if "rows" in arguments.only:
        rows()


if __name__ == "__main__":
    main()
