"""`python -m specdec`: decode held-out prompts with every drafter of the embedded bundle.

Prints one table (lossless? tau, speed-up measured and predicted), what the pieces cost, and a
coloured trace of one decoding; of a target with experts how many a verification wakes, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from . import __version__
from .benchmark import PLAIN, Costs, Row, calibrate, compare_drafters
from .load import load
from .models import QwenMoe
from .page import to_html
from .prompts import CALIBRATION
from .trace import to_terminal, trace
from .woken import report

KINDS = ("code", "edit")
"""Prompts that are decoded by default."""


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    bundle = load(arguments.bundle)
    target, tokenizer, drafters = bundle.target, bundle.tokenizer, bundle.drafters
    if arguments.only:
        drafters = {
            name: drafter
            for name, drafter in drafters.items()
            if any(word in name for word in arguments.only)
        }
    if not drafters:
        raise SystemExit(f"--only: expected part of a name of {list(bundle.drafters)}")
    n_prompts = None if arguments.all else 1
    prompts = {
        kind: [tokenizer.encode(text) for text in texts[:n_prompts]]
        for kind, texts in bundle.prompts.items()
        if arguments.all or kind in KINDS
    }
    print(
        f"specdec {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"target: {parameters(target):,} parameters, bytes as tokens"
    )
    longest = max(len(prompt) for rows in prompts.values() for prompt in rows)
    if longest + arguments.tokens > target.max_position_embeddings:
        raise SystemExit(
            f"--tokens: expected at most {target.max_position_embeddings - longest}, "
            f"got {arguments.tokens}"
        )
    calibration = [tokenizer.encode(text) for text in CALIBRATION]
    costs = calibrate(target, drafters, calibration, 24, progress=True)
    rows, runs = compare_drafters(
        target,
        drafters,
        prompts,
        max_new_tokens=arguments.tokens,
        costs=costs,
        repeats=arguments.repeats,
    )
    print(table(rows))
    print(pieces(rows, costs))
    if isinstance(target, QwenMoe):
        timed = {name: d for name, d in drafters.items() if name.startswith("dflash")} or drafters
        print(
            report(
                target,
                drafters,
                timed,
                prompts,
                calibration,
                max_new_tokens=arguments.tokens,
                repeats=arguments.repeats,
            )
        )
    kind = next(iter(prompts))
    best = max((row for row in rows if row.prompt_kind == kind), key=lambda row: row.tau).drafter
    print(f"\n{kind}, drafted by {best}:\n")
    print(
        to_terminal(
            trace(runs[best, kind].rounds, tokenizer.decode),
            prompt=bundle.prompts[kind][0],
            colour=use_colour(),
        )
    )
    if arguments.html:
        shown = [(name, kind) for name, kind in runs if name != PLAIN]
        traces = [
            (f"{name} on {kind}", trace(runs[name, kind].rounds, tokenizer.decode))
            for name, kind in shown
        ]
        texts = [bundle.prompts[kind][0] for _, kind in shown]
        arguments.html.write_text(
            to_html(traces, title="specdec: who wrote which byte", prompt=texts)
        )
        print(f"wrote {arguments.html}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps([record(row, arguments) for row in rows], indent=2) + "\n"
        )
        print(f"wrote {arguments.json}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m specdec",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--bundle",
        default="tiny",
        choices=["tiny", "tiny-moe"],
        help="which embedded models (default: tiny)",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"all prompts, not one each of {' and '.join(KINDS)}"
    )
    parser.add_argument(
        "--only", action="append", metavar="WORD", help="drafters with this in their name"
    )
    parser.add_argument("--tokens", type=int, default=40, help="new bytes per prompt (default: 40)")
    parser.add_argument("--repeats", type=int, default=2, help="repetitions (default: 2)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the traces as one page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args(argv)
    for name in ("tokens", "repeats", "threads"):
        if (getattr(arguments, name) is not None) and getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(arguments, name)}")
    for name in ("html", "json"):  # before a minute of work, not after it
        file = getattr(arguments, name)
        if file and (file.is_dir() or not file.absolute().parent.is_dir()):
            parser.error(f"--{name}: expected a file in an existing folder, got {file}")
    return arguments


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def table(rows: list[Row]) -> str:
    """The rows as text, grouped by kind of prompt."""
    head = (
        "prompts",
        "drafter",
        "lossless",
        "tau",
        "accept.",
        "passes",
        "bytes/s",
        "speed-up",
        "(low-high)",
        "predicted",
        "no loop",
    )
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        lines.append(
            (
                row.prompt_kind,
                row.drafter,
                "yes" if row.lossless else lossless_word(row),
                f"{row.tau:.2f}",
                f"{row.acceptance_rate:.0%}" if row.drafter != PLAIN else "",
                str(row.target_passes),
                f"{row.tokens_per_second:.0f}",
                f"{row.speedup:.2f}x",
                f"({row.spread[0]:.2f}-{row.spread[1]:.2f})",
                f"{row.predicted_speedup:.2f}x",
                f"{row.predicted_without_overhead:.2f}x",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for i, line in enumerate(lines):
        if i and line[0] != lines[i - 1][0]:
            text.append("-" * (sum(widths) + 2 * len(widths) - 2))
        text.append(
            "  ".join(
                cell.ljust(w) if j < 3 else cell.rjust(w)
                for j, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
        )
    note = (
        "tau: bytes emitted per target pass, greedy. predicted: tau L / (T_d + T_t), with the "
        "loop's own time; no loop: without it."
    )
    notes = [f"! {row.drafter} on {row.prompt_kind}: {d}" for row in rows for d in row.divergences]
    return "\n".join(["", *text, note, *notes])


def lossless_word(row: Row) -> str:
    return "near-tie" if all(d.near_tie for d in row.divergences) else "NO"


def pieces(rows: list[Row], costs: dict[str, Costs]) -> str:
    """T_d, T_t, L and what bounds each drafter, from the calibration."""
    lines = ["", "what the pieces cost (calibrated on other prompts), and the two bounds:"]
    for name, cost in costs.items():
        own = [row for row in rows if row.drafter == name]
        mid = sorted(own, key=lambda row: row.speedup)[len(own) // 2]
        assert mid.bounds is not None
        lines.append(
            f"  {name:20} on {mid.prompt_kind:9}  L {cost.step * 1e3:.2f} ms  "
            f"T_d/T_t {mid.draft_to_verify:.2f}  T_t/L {mid.verify_to_step:.2f}  "
            f"T_d->0: {mid.bounds.free_draft:.2f}x  T_t->L: {mid.bounds.verify_as_step:.2f}x  "
            f"loop {mid.loop_share:.1%}"
        )
    return "\n".join(lines)


def record(row: Row, arguments: argparse.Namespace) -> dict[str, object]:
    """A row as JSON, stamped with what it was measured with."""
    names = (
        "drafter",
        "prompt_kind",
        "lossless",
        "tau",
        "acceptance_rate",
        "target_passes",
        "tokens_per_second",
        "speedup",
        "spread",
        "predicted_speedup",
        "predicted_without_overhead",
        "draft_to_verify",
        "verify_to_step",
        "loop_share",
    )
    return {name: getattr(row, name) for name in names} | {
        "tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "version": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of this checkout, None for an installed package."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def use_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


if __name__ == "__main__":
    main()
