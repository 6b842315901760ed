"""`python -m benchmarks.acceptance`: how deep and at which rank each drafter's nodes are accepted.

Held-out text of the corpus, greedy, ragged batches: no times are taken. Prints tau and, for every
depth, the conditional and marginal acceptance and the share of each rank; `--plot FILE` draws them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from specdec import Drafter, Model, generate, load
from specdec.metrics import Metrics
from specdec.training import Corpus


def held_out_prompts(n: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """`n` windows of files that no embedded model has seen, [length] int64 each."""
    return list(Corpus.standard_library().held_out_batch(n, length - 1, seed))


def measure_all(
    target: Model, drafters: Mapping[str, Drafter], prompts: list[torch.Tensor], n_tokens: int
) -> dict[str, Metrics]:
    plain = generate(target, prompts, max_new_tokens=n_tokens)
    metrics = {}
    for name, drafter in tqdm(drafters.items(), desc="acceptance"):
        run = generate(target, prompts, drafter, max_new_tokens=n_tokens)
        same = [bool((a == b).all()) for a, b in zip(run.sequences, plain.sequences, strict=True)]
        if not all(same):
            tqdm.write(
                f"{name}: {same.count(False)} of {len(same)} rows differ from plain decoding"
            )
        metrics[name] = run.metrics
    return metrics


def table(metrics: Mapping[str, Metrics]) -> str:
    lines = [
        "| drafter | tau | depth | conditional | marginal | by rank | tested |",
        "|---" * 7 + "|",
    ]
    for name, m in metrics.items():
        for d in m.by_depth:
            ranks = " ".join(f"{share:.0%}" for share in d.by_rank) if len(d.by_rank) > 1 else ""
            head = (f"{name} | {m.tau:.2f}") if d.depth == 1 else " | "
            lines.append(
                f"| {head} | {d.depth} | {d.conditional:.0%} | {d.marginal:.0%} | {ranks} "
                f"| {d.n_tested} |"
            )
    return "\n".join(lines)


def plot(metrics: Mapping[str, Metrics], file: Path) -> None:
    """Conditional and marginal acceptance by depth, a line a drafter."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for i, (name, m) in enumerate(metrics.items()):
        depth = [d.depth for d in m.by_depth]
        style = {"marker": "o", "markersize": 4, "color": colours[i % 20]}
        style["linestyle"] = "--" if "tree" in name else "-"
        axes[0].plot(depth, [d.conditional for d in m.by_depth], label=name, **style)
        axes[1].plot(depth, [d.marginal for d in m.by_depth], label=name, **style)
    axes[0].set_title("conditional: given that its parent was accepted")
    axes[1].set_title("marginal: over all rounds")
    for axis in axes:
        axis.set_xlabel("depth in the draft")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accepted")
    axes[0].set_ylim(0, 1)
    axes[1].legend(fontsize=8, ncols=2)
    figure.savefig(file)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=256, help="bytes a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new bytes a prompt")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot (svg, png, pdf)")
    arguments = parser.parse_args()
    bundle = load("tiny")
    prompts = held_out_prompts(arguments.prompts, arguments.length)
    metrics = measure_all(bundle.target, bundle.drafters, prompts, arguments.tokens)
    print(table(metrics))
    if arguments.plot:
        plot(metrics, arguments.plot)
        print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()
