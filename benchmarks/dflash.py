"""`python -m benchmarks.dflash`: what a block costs, and what trees make of it.

1. T_draft of one DFlash pass over 2 to 16 slots, and of EAGLE-3 drafting 8 tokens, each behind
   the same contexts, with T_d/T_t and the tau of both.
2. DDTree at 32 nodes, with and without a budget, beside the chain whose length is best on other
   prompts: tau, speed-up over plain decoding, and the tree's ratio to the tuned chain.

3. With `--sampled` instead: tau of drafts that are drawn and of those that are chosen under
   `Rejection`, at three temperatures; no times are taken.

Quiet machine; all of it in one process, interleaved, medians of ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from tqdm import tqdm

from specdec import DDTree, DFlash, Drafter, Eagle, Generation, Model, Rejection, generate, load
from specdec.benchmark import verification_seconds
from specdec.drafters import Budget, DFlashNetwork, VerifyCosts
from specdec.drafters.block_tree import best_nodes
from specdec.metrics import measure
from specdec.prompts import CALIBRATION, PROMPTS
from specdec.trees import Node

CHAINS = (2, 3, 4, 5, 7, 10, 15)
PLAIN = "plain"

Runs = dict[str, list[list[Generation]]]
"""Name -> repetition -> one run a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=96, help="new bytes per prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sampled", action="store_true", help="part 3 in place of 1 and 2")
    arguments = parser.parse_args()
    bundle = load()
    target, encode = bundle.target, bundle.tokenizer.encode
    dflash, eagle3 = bundle.drafters["dflash"], bundle.drafters["eagle-3"]
    assert isinstance(dflash, DFlash) and isinstance(eagle3, Eagle)
    network = dflash.network
    if arguments.sampled:
        prompts = [encode(text) for texts in PROMPTS.values() for text in texts]
        sampled(target, network, prompts, arguments.tokens)
        return
    calibration = [encode(text) for text in CALIBRATION]
    blocks: dict[str, Drafter] = {
        f"DFlash, {size} slots": DFlash(network, block_size=size) for size in (2, 4, 8, 16)
    }
    blocks["EAGLE-3, 8 tokens"] = Eagle(eagle3.network, n_drafts=8)
    runs = interleaved(target, blocks, calibration, arguments.tokens, arguments.repeats)
    print("| drafter | T_draft ms (low-high) | over 2 slots | T_d/T_t | tau |")
    print("|---|---|---|---|---|")
    taken = {name: [drafting(repeat) for repeat in runs[name]] for name in blocks}
    base = taken["DFlash, 2 slots"]
    for name in blocks:
        ratio = statistics.median(a / b for a, b in zip(taken[name], base, strict=True))
        print(
            f"| {name} | {statistics.median(taken[name]) * 1e3:.2f} ({min(taken[name]) * 1e3:.2f}-"
            f"{max(taken[name]) * 1e3:.2f}) | {ratio:.2f}x | "
            f"{statistics.median(map(draft_to_verify, runs[name])):.2f} | "
            f"{tau(runs[name][0]):.2f} |"
        )

    chains = {f"chain {n}": DFlash(network, n) for n in CHAINS}
    tuning = interleaved(target, chains, calibration, arguments.tokens, 3)
    seconds = {name: statistics.median(map(total, own)) for name, own in tuning.items()}
    best = min(chains, key=seconds.__getitem__)
    sharp = confidence_temperature(target, network, calibration, arguments.tokens)
    budget = measured_budget(target, network, tuning[best], calibration)
    print(
        f"\nbest on the calibration prompts: {best}; trees of 32 with confidences at "
        f"temperature {sharp}\n"
    )
    drafters: dict[str, Drafter] = {
        f"tuned {best}": chains[best],
        "chain 15": chains["chain 15"],
        "DDTree, 32 nodes, as sure as it says": DDTree(network, 32),
        "DDTree, 32 nodes": DDTree(network, 32, confidence_temperature=sharp),
        "DDTree, budget": DDTree(network, 32, budget=budget, confidence_temperature=sharp),
    }
    print(
        "| prompts | drafter | tau | speed-up (low-high) | over the tuned chain (low-high) | nodes "
        "a round |\n|---|---|---|---|---|---|"
    )
    for kind, texts in PROMPTS.items():
        prompts = [encode(text) for text in texts]
        runs = interleaved(target, drafters, prompts, arguments.tokens, arguments.repeats)
        times = {name: list(map(total, own)) for name, own in runs.items()}
        for name in drafters:
            rounds = [r for run in runs[name][0] for r in run.rounds]
            nodes = statistics.fmean(int(r.draft.mask().sum()) for r in rounds)
            speedup = ratios(times[PLAIN], times[name])
            against = ratios(times[f"tuned {best}"], times[name])
            print(
                f"| {kind} | {name} | {tau(runs[name][0]):.2f} | {speedup} | {against} | "
                f"{nodes:.1f} |",
                flush=True,
            )


def sampled(
    target: Model, network: DFlashNetwork, prompts: list[Tensor], n_tokens: int, n_seeds: int = 4
) -> None:
    """Pooled over all prompts and seeds 0, 100, 200, ...; row b of a batch draws from seed + b."""
    print("| temperature | drawn | chosen |\n|---|---|---|")
    for temperature in (0.5, 0.8, 1.0):
        cells = []
        for draw in (True, False):
            runs = [
                generate(
                    target,
                    prompts,
                    DFlash(network, draw=draw),
                    max_new_tokens=n_tokens,
                    rule=Rejection(temperature, seed=100 * seed),
                )
                for seed in range(n_seeds)
            ]
            cells.append(f"{tau(runs):.2f}")
        print(f"| {temperature} | {cells[0]} | {cells[1]} |", flush=True)


def interleaved(
    target: Model,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Tensor],
    n_tokens: int,
    repeats: int,
) -> Runs:
    """Every prompt with every drafter and plainly, in turn; the first repetition warms up."""
    names = [PLAIN, *drafters]
    runs: Runs = {name: [[] for _ in range(repeats + 1)] for name in names}
    for repeat in tqdm(range(repeats + 1), leave=False):
        for prompt in prompts:
            for name in names:
                run = generate(target, prompt, drafters.get(name), max_new_tokens=n_tokens)
                runs[name][repeat].append(run)
                if not torch.equal(run.sequences[0], runs[PLAIN][repeat][-1].sequences[0]):
                    tqdm.write(f"{name}: differs from plain decoding")
    return {name: own[1:] for name, own in runs.items()}


class Promised:
    """In the place of a budget: trees of all nodes, and what they are worth noted."""

    def __init__(self) -> None:
        self.worth: list[float] = []

    def best_nodes(self, table: Sequence[Sequence[float]], n_nodes: int) -> list[Node]:
        nodes = best_nodes(table, n_nodes)
        self.worth.append(1 + sum(node.value for node in nodes))
        return nodes


def confidence_temperature(
    target: Model, network: DFlashNetwork, prompts: Sequence[Tensor], n_tokens: int
) -> float:
    """At which trees of 32 nodes have the highest tau; nothing is timed.

    Prints what drafts promise, tokens a round, and how many come: a chain of 7, trees of 12 and 32.
    """
    print("\n| confidences at | chain 7 | tree of 12 | tree of 32 | tau of 32 |")
    print("|---|---|---|---|---|")
    taus = {}
    for temperature in (1.0, 0.8, 0.7, 0.6, 0.5, 0.4):
        cells = []
        for n_nodes, n_ranks in ((7, 1), (12, 8), (32, 8)):
            noted = Promised()
            drafter = DDTree(
                network,
                n_nodes,
                n_ranks=n_ranks,
                budget=cast(Budget, noted),
                confidence_temperature=temperature,
            )
            runs = [generate(target, p, drafter, max_new_tokens=n_tokens) for p in prompts]
            rounds = [r for run in runs for r in run.rounds if r.draft.n_nodes]
            came = 1 + statistics.fmean(int(r.n_accepted[0]) for r in rounds)
            cells.append(f"{statistics.fmean(noted.worth):.2f}, {came:.2f}")
            taus[temperature] = tau(runs)
        print(f"| {temperature} | {' | '.join(cells)} | {taus[temperature]:.2f} |", flush=True)
    return max(taus, key=taus.__getitem__)


def draft_to_verify(runs: Sequence[Generation]) -> float:
    """T_d/T_t of whole drafts, medians; the first round, which reads the prompt, is left out."""
    rounds = [r for run in runs for r in run.rounds[1:] if r.draft.n_nodes]
    whole = max(r.draft.n_nodes for r in rounds)
    rounds = [r for r in rounds if r.draft.n_nodes == whole]
    return statistics.median(r.seconds.draft for r in rounds) / statistics.median(
        r.seconds.verify for r in rounds
    )


def drafting(runs: Sequence[Generation]) -> float:
    """Median seconds of a draft; the first round, which reads the prompt, is left out."""
    rounds = [r for run in runs for r in run.rounds[1:] if r.draft.n_nodes]
    return statistics.median(r.seconds.draft for r in rounds)


def measured_budget(
    target: Model, network: DFlashNetwork, chain: list[list[Generation]], prompts: Sequence[Tensor]
) -> Budget:
    """Costs of this machine: passes over chains, what a tree adds, the rest of a round."""
    context = round(statistics.fmean(len(prompt) for prompt in prompts)) + 48
    sizes = (1, 2, 3, 5, 9, 16, 25, 33)
    passes = VerifyCosts.of(verification_seconds(target, sizes, context))
    tree = interleaved(target, {"tree": DDTree(network, 16)}, prompts, 48, 2)["tree"]
    both = [[r for run in repeat for r in run.rounds[1:] if r.draft.n_nodes] for repeat in tree]
    rounds = [r for repeat in both for r in repeat]
    own = [r for repeat in chain for run in repeat for r in run.rounds[1:] if r.draft.n_nodes]
    loop = statistics.median(r.seconds.accept + r.seconds.commit + r.seconds.other for r in own)
    extra = statistics.median(
        r.seconds.verify
        - passes.at(r.draft.n_nodes + 1)
        + r.seconds.accept
        + r.seconds.commit
        + r.seconds.other
        - loop
        for r in rounds
    )
    draft = statistics.median(r.seconds.draft for r in rounds)
    return Budget(passes, passes.plus(max(0.0, extra)), draft + loop)


def total(runs: Sequence[Generation]) -> float:
    return sum(run.seconds for run in runs)


def tau(runs: Sequence[Generation]) -> float:
    return measure(*(run.rounds for run in runs)).tau


def ratios(slow: Sequence[float], fast: Sequence[float]) -> str:
    own = [a / b for a, b in zip(slow, fast, strict=True)]
    return f"{statistics.median(own):.2f}x ({min(own):.2f}-{max(own):.2f})"


if __name__ == "__main__":
    main()
