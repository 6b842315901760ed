"""`python -m benchmarks.reduced_vocabulary DFLASH TEXT`: heads over K tokens, end to end.

DFLASH is a folder of SmolLM2's DFlash layers, TEXT that of the answers they were trained on
(`--written`): there tokens are counted. For each K, on the built-in questions that nobody was
trained on, greedily and interleaved: the share of the target's tokens that can be named, bytes and
milliseconds of the head over a block, tau beside what the geometric model predicts from the whole
vocabulary's tau and the share, and the speed-up over plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

import specdec
from specdec.bench.prompts import built_in
from specdec.checkpoints import load_dflash
from specdec.drafters.dflash import DFlashNetwork
from specdec.drafters.reduced_head import frequent_tokens
from specdec.metrics import measure
from specdec.speedup import acceptance_for_tau, expected_tau, tau_kept

SIZES = (2048, 4096, 8192, 16384, 32768)


def counted(folder: Path) -> Tensor:
    """All tokens of a folder of written conversations."""
    shards = sorted(folder.glob("shard-*.safetensors"))
    return torch.cat([load_file(shard)["tokens"] for shard in shards]).long()


def head_seconds(
    networks: list[DFlashNetwork], target, n_drafts: int, repeats: int = 15
) -> list[float]:
    """Median seconds of every network's head over the slots of a block, interleaved."""
    states = torch.randn(1, n_drafts, target.hidden_size)
    taken: list[list[float]] = [[] for _ in networks]
    for repeat in range(repeats + 2):
        for network, own in zip(networks, taken, strict=True):
            start = time.perf_counter()
            network.logits(states, target)
            if repeat >= 2:
                own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in taken]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dflash", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=2, help="questions of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n-drafts", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=["chat", "code", "maths"])
    arguments = parser.parse_args()
    target, tokenizer, _, _ = specdec.load("smollm2")
    specdec.pack(target)
    n_drafts: int = arguments.n_drafts
    questions, _ = built_in()
    prompts = [
        tokenizer.chat([{"role": "user", "content": question.turns[0]}])
        for kind in arguments.kinds
        for question in questions[kind][: arguments.limit]
    ]
    seen, vocabulary = counted(arguments.text), target.vocab_size
    networks = {}
    for size in (*SIZES, vocabulary):
        networks[size] = load_dflash(arguments.dflash, target)
        ids = None if size == vocabulary else frequent_tokens(seen, vocabulary, size)
        networks[size].reduce_head(target, ids)
    names: list[int | None] = [None, *networks]
    seconds: dict[int | None, list[float]] = {name: [] for name in names}
    runs: dict[int | None, list] = {}
    cases = [(repeat, name) for repeat in range(arguments.repeats) for name in names]
    for _, name in tqdm(cases, desc="decoding", leave=False):
        drafter = None if name is None else specdec.DFlash(networks[name], n_drafts)
        runs[name] = [
            specdec.generate(
                target,
                prompt,
                drafter,
                max_new_tokens=arguments.tokens,
                stop_tokens=tokenizer.stop_tokens,
            )
            for prompt in prompts
        ]
        seconds[name].append(sum(run.seconds for run in runs[name]))
    said = torch.cat([run.new_tokens[0] for run in runs[None]])
    plain = [run.sequences[0].tolist() for run in runs[None]]
    heads = dict(
        zip(networks, head_seconds(list(networks.values()), target, n_drafts), strict=True)
    )
    taus = {size: measure([r for run in runs[size] for r in run.rounds]).tau for size in networks}
    acceptance = acceptance_for_tau(taus[vocabulary], n_drafts)
    print(
        f"{len(prompts)} questions of {', '.join(arguments.kinds)}, {arguments.tokens} tokens, "
        f"{n_drafts} drafts, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"{len(seen):,} tokens counted\n\n"
        "| K | named | head, MB | head, ms | tau | tau predicted | speed-up | (low-high) "
        "| lossless |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for size, network in networks.items():
        ids = network.draft_ids
        named = 1.0 if ids is None else torch.isin(said, ids).double().mean().item()
        kept = tau_kept(acceptance, n_drafts, 1 - named) if named < 1 else 1.0
        ratios = [p / s for p, s in zip(seconds[None], seconds[size], strict=True)]
        same = [run.sequences[0].tolist() for run in runs[size]] == plain
        print(
            f"| {size:,} | {named:.1%} | {size * target.hidden_size * 4 / 1e6:.1f} "
            f"| {heads[size] * 1e3:.2f} | {taus[size]:.2f} "
            f"| {expected_tau(acceptance, n_drafts) * kept:.2f} | {statistics.median(ratios):.2f}x "
            f"| ({min(ratios):.2f}-{max(ratios):.2f}) | {'yes' if same else 'no'} |"
        )


if __name__ == "__main__":
    main()
