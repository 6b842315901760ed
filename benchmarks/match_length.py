"""`python -m benchmarks.match_length`: how far a match of prompt lookup can be trusted.

At every place of what SmolLM2 answers to the built-in questions, the longest suffix that was seen
before is looked up; counted is how many tokens behind it come true. Then the speed-up of decoding
the same answers with drafts of several lengths, predicted from the time of a pass over a block
(`--block-costs`, in steps; the default is what `python -m specdec.bench --model smollm2` measured
on two cores, docs/benchmark.md), without the loop.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from tqdm import tqdm

import specdec
from specdec.bench.prompts import built_in
from specdec.drafters.prompt_lookup import NgramIndex

LONGEST = 15
DEPTHS = (1, 2, 3, 5, 7, 10, 15)
POLICIES = (7, (0, 7, 7, 7), (2, 2, 2, 2), (2, 2, 7, 7), (2, 2, 7, 15), (2, 2, 15, 15))
COSTS = "1:1,2:1.16,3:1.24,4:1.43,8:1.59,16:1.85"


def accepted(draft: Sequence[int], truth: Sequence[int]) -> int:
    """How many tokens of a draft come true."""
    n = 0
    while n < min(len(draft), len(truth)) and draft[n] == truth[n]:
        n += 1
    return n


def by_match(row: list[int], n_prompt: int, max_ngram: int) -> list[tuple[int, int]]:
    """(length of the match, tokens that come true) at every place of the answer; 0: no match."""
    index, found = NgramIndex(max_ngram), []
    for place in range(n_prompt, len(row)):
        index.extend(row[len(index.tokens) : place])
        match = index.match()
        draft = [] if match is None else index.copy(match[1], LONGEST)
        found.append((0 if match is None else match[0], accepted(draft, row[place:])))
    return found


def steps_taken(
    found: Sequence[tuple[int, int]], n_drafts: int | tuple[int, ...], costs: Mapping[int, float]
) -> float:
    """Time of decoding an answer in steps."""
    blocks, prices = list(costs), list(costs.values())
    place, total = 0, 0.0
    while place < len(found):
        match, right = found[place]
        n = n_drafts if isinstance(n_drafts, int) else n_drafts[match - 1]
        n = n if match else 0
        total += float(np.interp(1 + n, blocks, prices))
        place += 1 + min(n, right)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--block-costs", default=COSTS, help=f"default: {COSTS}")
    arguments = parser.parse_args()
    pairs = (pair.split(":") for pair in arguments.block_costs.split(","))
    costs = {int(n): float(cost) for n, cost in pairs}
    target, tokenizer, _, _ = specdec.load("smollm2")
    questions, _ = built_in()
    found: dict[str, list[list[tuple[int, int]]]] = defaultdict(list)
    counts: dict[int, list[int]] = defaultdict(list)
    every = [(kind, question) for kind, own in questions.items() for question in own]
    for kind, question in tqdm(every, desc="answering", leave=False):
        prompt = tokenizer.chat([{"role": "user", "content": question.turns[0]}])
        run = specdec.generate(
            target, prompt, max_new_tokens=arguments.tokens, stop_tokens=tokenizer.stop_tokens
        )
        row = run.sequences[0].tolist()
        found[kind].append(by_match(row, len(prompt), 4))
        for match, right in by_match(row, len(prompt), 6):
            counts[match].append(right)
    print("| tokens that match | places | " + " | ".join(f"{d} come true" for d in DEPTHS) + " |")
    print("|---" * (2 + len(DEPTHS)) + "|")
    for match, rights in sorted(counts.items()):
        shares = [sum(right >= d for right in rights) / len(rights) for d in DEPTHS]
        cells = " | ".join(f"{share:.0%}" for share in shares)
        print(f"| {match} | {len(rights)} | {cells} |" if match else f"| none | {len(rights)} |")
    print("\n| drafts by match 1, 2, 3, 4 | " + " | ".join(found) + " | mean |")
    print("|---" * (2 + len(found)) + "|")
    for n_drafts in POLICIES:
        gains = [
            sum(map(len, own)) / sum(steps_taken(one, n_drafts, costs) for one in own)
            for own in found.values()
        ]
        cells = " | ".join(f"{gain:.2f}x" for gain in gains)
        print(f"| {n_drafts} | {cells} | {sum(gains) / len(gains):.2f}x |")


if __name__ == "__main__":
    main()
