"""`python -m specdec.bench`: specdec beside `transformers`' generate, in one process.

Decodes the same prompts with the same weights by every method of both engines, interleaved, and
compares what comes out token by token. Prints what it takes, slow-downs like speed-ups.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .. import __version__
from ..__main__ import commit, parameters
from ..benchmark import calibrate, verification_seconds
from .bandwidth import Bound, read_bandwidth, step_bytes
from .job import Job, Wanted, prepare
from .measure import Refusal, Result, decode_all, offered, results_of
from .plot import check_plot, draw
from .report import (
    averages,
    blocks,
    costs_table,
    reading,
    record,
    refusal_record,
    refusals,
    table,
)

BLOCKS = (1, 2, 4, 8, 16)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    try:
        job = prepare(wanted_of(arguments))
    except ValueError as error:
        raise SystemExit(f"python -m specdec.bench: error: {error}") from error
    n_prompts = sum(map(len, job.prompts.values()))
    print(
        f"specdec {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"{arguments.model}: {parameters(job.target):,} parameters, {job.target.dtype}; "
        f"{n_prompts} prompts, {arguments.tokens} new tokens, {arguments.repeats} repetitions"
    )
    print("weights not packed" if job.packed is None else job.packed)
    if job.left_out:
        print(f"left out, too long for the target: {', '.join(job.left_out)}")
    context = middle_of(job, arguments.tokens)
    bound = Bound(step_bytes(job.target, context), read_bandwidth(device=job.target.device))
    taken = verification_seconds(job.target, BLOCKS, context)
    calibrating = job.calibration[: arguments.calibration]
    costs = calibrate(job.target, job.drafters, calibrating, progress=True)
    methods, refused = offered(job.methods, next(iter(job.prompts.values()))[0])
    refused = [*job.refused, *refused]
    runs = decode_all(
        methods, job.prompts, max_new_tokens=arguments.tokens, repeats=arguments.repeats
    )
    results = results_of(runs, job.prompts, job.target, costs)
    parts = (
        table(results),
        averages(results),
        costs_table(results),
        reading(bound, results),
        blocks(taken),
        refusals(refused),
    )
    print(*("\n" + part for part in parts if part), sep="\n")
    if arguments.plot:
        draw(results, arguments.plot, f"{arguments.model}, {torch.get_num_threads()} threads")
        print(f"wrote {arguments.plot}")
    if arguments.json:
        rows = records(results, refused, bound, taken, arguments)
        arguments.json.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n")
        print(f"wrote {arguments.json}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m specdec.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2 (default), tiny, tiny-moe, or a FOLDER")
    add("--prompts", type=Path, metavar="FILE", help="questions in the layout of Spec-Bench")
    add("--kinds", nargs="+", metavar="KIND", help="kinds of prompts (default: all)")
    add("--limit", type=int, help="prompts of a kind (default: all)")
    add("--turns", type=int, default=1, help="turns of a question (default: 1)")
    add("--tokens", type=int, default=128, help="new tokens a prompt, at most (default: 128)")
    add("--repeats", type=int, default=3, help="repetitions (default: 3)")
    add("--calibration", type=int, help="prompts to take times on (default: all of the set)")
    add("--threads", type=int, help="torch threads (default: torch's own)")
    add("--drafters", nargs="+", metavar="WORD", help="drafters with this in their name")
    add("--drafter", type=Path, metavar="FOLDER", help="one more drafter, for load_drafter")
    add("--assistant", type=Path, metavar="FOLDER", help="a draft model, for both engines")
    add("--n-drafts", type=int, help="of prompt lookup (default: the bundle's own; theirs 7)")
    pack = argparse.BooleanOptionalAction
    add("--pack", action=pack, default=True, help="specdec.pack the target (default: yes)")
    add("--transformers", action=pack, default=True, help="compare with it (default: yes)")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the results, .png or .svg")
    arguments = parser.parse_args(argv)
    least = {
        "limit": 1,
        "turns": 1,
        "tokens": 2,
        "repeats": 1,
        "threads": 1,
        "n_drafts": 1,
        "calibration": 1,
    }
    for name, low in least.items():
        value = getattr(arguments, name)
        if value is not None and value < low:
            parser.error(f"--{name.replace('_', '-')}: expected at least {low}, got {value}")
    for name in ("json", "plot"):  # before a minute of work, not after it
        file = getattr(arguments, name)
        if file and (file.is_dir() or not file.absolute().parent.is_dir()):
            parser.error(f"--{name}: expected a file in an existing folder, got {file}")
    for name in ("drafter", "assistant"):
        folder = getattr(arguments, name)
        if folder and not folder.is_dir():
            parser.error(f"--{name}: expected a folder, got {folder}")
    if arguments.plot:
        try:
            check_plot(arguments.plot)
        except ValueError as error:
            parser.error(f"--{error}")
    return arguments


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    a = arguments
    return Wanted(
        model=a.model,
        prompts=a.prompts,
        kinds=tuple(a.kinds) if a.kinds else None,
        limit=a.limit,
        n_turns=a.turns,
        n_tokens=a.tokens,
        n_drafts=a.n_drafts,
        drafters=tuple(a.drafters) if a.drafters else None,
        drafter=a.drafter,
        assistant=a.assistant,
        packed=a.pack,
        transformers=a.transformers,
    )


def middle_of(job: Job, n_tokens: int) -> int:
    """Tokens in the cache in the middle of an average decoding."""
    lengths = [len(prompt.tokens) for own in job.prompts.values() for prompt in own]
    return min(
        sum(lengths) // len(lengths) + n_tokens // 2,
        job.target.max_position_embeddings - max(BLOCKS),
    )


def records(
    results: Sequence[Result],
    refused: Sequence[Refusal],
    bound: Bound,
    taken: Mapping[int, float],
    arguments: argparse.Namespace,
) -> list[dict[str, object]]:
    """Results and refusals as JSON, stamped with what they were measured with."""
    stamp = {
        "step_bytes": bound.step_bytes,
        "read_bytes_per_second": bound.bytes_per_second,
        "seconds_by_block": {str(n): own for n, own in taken.items()},
        "tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "n_drafts": arguments.n_drafts,
        "packed": arguments.pack,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "version": __version__,
        "commit": commit(),
    }
    kinds = dict.fromkeys(result.prompt_kind for result in results)
    rows = [record(result, bound) for result in results]
    rows += [refusal_record(one, kind) for one in refused for kind in kinds]
    return [{"model": arguments.model, **row, **stamp} for row in rows]


if __name__ == "__main__":
    main()
