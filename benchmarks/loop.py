"""What the loop itself costs: its share of wall time, and its growth with context.

python -m benchmarks.loop
"""

from __future__ import annotations

import statistics
import time

import torch

from specdec import Context, Drafter, Generation, Greedy, PromptLookup, generate, load
from specdec.generate import Round
from specdec.prompts import CALIBRATION
from specdec.protocol import Cache


def loop_share(rounds: list[Round]) -> float:
    """Median over rounds of the time outside passes of target and drafter."""
    return statistics.median(
        1 - (r.seconds.draft + r.seconds.verify) / r.seconds.total for r in rounds
    )


def shares() -> None:
    bundle = load()
    prompts = [bundle.tokenizer.encode(text) for text in CALIBRATION]
    print("| drafter | loop, share of wall time (median round) | pooled |\n|---|---|---|")
    for name, drafter in {"plain": None, **bundle.drafters}.items():
        runs = [
            generate(bundle.target, prompt, drafter, max_new_tokens=96)
            for _ in range(3)
            for prompt in prompts
        ]
        rounds = [r for run in runs for r in run.rounds[1:]]
        pooled = 1 - (
            sum(r.seconds.draft + r.seconds.verify for r in rounds)
            / sum(r.seconds.total for r in rounds)
        )
        print(f"| {name} | {loop_share(rounds):.1%} | {pooled:.1%} |")


def growth() -> None:
    """Time per token at growing context, against the shortest one."""
    bundle = load()
    text = bundle.tokenizer.encode((CALIBRATION[0] + CALIBRATION[1]) * 8)
    contexts = (128, 512, 1024, 1900)
    taken: dict[tuple[str, int], list[float]] = {}
    drafters: dict[str, Drafter | None] = {"plain": None, **bundle.drafters}
    for repeat in range(4):
        for context in contexts:
            for name, drafter in drafters.items():
                run = generate(bundle.target, text[:context], drafter, max_new_tokens=64)
                if repeat:
                    taken.setdefault((name, context), []).append(per_round(run))
    print(
        "\n| ms a round after a context of | "
        + " | ".join(map(str, contexts))
        + " bytes | growth |"
    )
    print("|---|" + "---|" * (len(contexts) + 1))
    for name in drafters:
        times = [statistics.median(taken[name, context]) for context in contexts]
        print(
            f"| {name} | "
            + " | ".join(f"{1e3 * t:.2f}" for t in times)
            + f" | {times[-1] / times[0]:.2f}x |"
        )


def per_round(run: Generation) -> float:
    """Median seconds of a round, the first (with the drafter's own prefill) left out."""
    return statistics.median(r.seconds.total for r in run.rounds[1:])


def lookup() -> None:
    """Prompt lookup's time per round at 1k and at 32k tokens of context."""
    target = load().target
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50_000, (1, 33_000), generator=generator)
    states = {n: PromptLookup(3, 8).begin(target, 1, 33_000) for n in (1_000, 32_000)}
    cache = target.new_cache(1, 8)  # the target's, which prompt lookup does not read
    taken: dict[int, list[float]] = {n: [] for n in states}
    for n, state in states.items():
        state.propose(context_at(tokens, n, cache))
    for step in range(1, 401):  # interleaved
        for n, state in states.items():
            context = context_at(tokens, n + step, cache)
            start = time.perf_counter()
            state.propose(context)
            taken[n].append(time.perf_counter() - start)
    medians = {n: statistics.median(seconds) for n, seconds in taken.items()}
    print("\n| prompt lookup after | us a round |\n|---|---|")
    for n, seconds in medians.items():
        print(f"| {n} tokens | {1e6 * seconds:.1f} |")
    print(f"\n32k over 1k: {medians[32_000] / medians[1_000]:.2f}x")


def context_at(tokens: torch.Tensor, length: int, cache: Cache) -> Context:
    """The first `length` tokens as a row with a generous budget."""
    one = torch.ones(1, dtype=torch.long)
    none = tokens[:, :0]
    return Context(
        tokens=tokens[:, :length],
        lengths=one * length,
        new_tokens=none,
        n_new=one * 0,
        hidden={},
        path=none,
        n_accepted=one * 0,
        live=one.bool(),
        depth_left=one * 100,
        max_depth=100,
        cache=cache,
        rule=Greedy(),
    )


if __name__ == "__main__":
    shares()
    growth()
    lookup()
