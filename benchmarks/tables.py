"""`python -m benchmarks.tables ROWS.json [WORD ...]`: rows of `python -m specdec --json FILE`.

Markdown, for the docs: the drafters with one of the words in their name, or all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = (
    "prompts", "drafter", "lossless", "tau (bytes)", "acceptance", "passes", "speed-up", "low-high",
    "predicted", "predicted, no loop", "T_d/T_t", "T_t/L",
)  # fmt: skip


def table(rows: list[dict], words: list[str]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for row in rows:
        if row["drafter"] == "plain" or (words and not any(w in row["drafter"] for w in words)):
            continue
        low, high = row["spread"]
        cells = (
            row["prompt_kind"],
            row["drafter"],
            "yes" if row["lossless"] else "no",
            f"{row['tau']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            str(row["target_passes"]),
            f"{row['speedup']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{row['predicted_speedup']:.2f}x",
            f"{row['predicted_without_overhead']:.2f}x",
            f"{row['draft_to_verify']:.2f}",
            f"{row['verify_to_step']:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    print(table(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]))
