"""Where speculation stops paying: speed-up and T_t/L at batch sizes 1 to 32, chain and tree.

python -m benchmarks.batch
"""

from __future__ import annotations

import statistics

from specdec import generate, load
from specdec.benchmark import verification_seconds
from specdec.prompts import CALIBRATION, PROMPTS

SIZES = (1, 2, 4, 8, 16, 32)
TOKENS = 48


def main() -> None:
    bundle = load()
    texts = [*CALIBRATION, *(text for texts in PROMPTS.values() for text in texts)]
    pool = [
        bundle.tokenizer.encode(text[: len(text) - cut])
        for cut in range(0, 40, 10)
        for text in texts
    ]
    chain, tree = bundle.drafters["draft model"], bundle.drafters["draft model, tree"]
    print(
        "| B | plain bytes/s | over B = 1 | T_t/L, 5 tokens | T_t/L, 22-node tree | chain speed-up "
        "(low-high) | tree speed-up (low-high) |\n|---|---|---|---|---|---|---|"
    )
    alone = None
    for size in SIZES:
        prompts = pool[:size]
        times: dict[str, list[float]] = {"plain": [], "chain": [], "tree": []}
        for _ in range(5):
            for name, drafter in (("plain", None), ("chain", chain), ("tree", tree)):
                run = generate(bundle.target, prompts, drafter, max_new_tokens=TOKENS)
                times[name].append(run.seconds)
        rate = size * TOKENS / statistics.median(times["plain"])
        alone = alone or rate
        n_tree = 1 + 3 + 6 + 6 + 6
        verify = verification_seconds(bundle.target, (1, 5, n_tree), 300, batch_size=size)
        cells = []
        for name in ("chain", "tree"):
            ratios = [p / s for p, s in zip(times["plain"], times[name], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
        print(
            f"| {size} | {rate:.0f} | {rate / alone:.1f}x | {verify[5] / verify[1]:.2f} | "
            f"{verify[n_tree] / verify[1]:.2f} | {cells[0]} | {cells[1]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
