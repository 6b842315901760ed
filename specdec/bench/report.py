"""Results as text and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from ..benchmark import PLAIN
from ..testing import Divergence
from .bandwidth import Bound
from .measure import Refusal, Result, Spread
from .runs import SPECDEC, TRANSFORMERS

NOTE = (
    "tau: tokens per target pass, greedy. tokens/s: without the prefill. speed-up: over plain "
    "decoding by the same engine. predicted: from a calibration on other prompts. vs hf: over the "
    "same method of transformers. -: all tokens came with the prefill."
)


def table(results: Sequence[Result]) -> str:
    """One line a method and kind; where outputs differ, a line on each difference below."""
    head = (
        *("prompts", "engine", "method", "lossless", "= specdec"),
        *("tau", "tokens/s", "speed-up", "(low-high)", "predicted", "vs hf", "(low-high)"),
    )
    lines: list[tuple[str, ...]] = [head]
    for r in results:
        told = f"{r.prediction.speedup:.2f}x" if r.prediction else ""
        lines.append(
            (
                r.prompt_kind,
                r.engine,
                r.method,
                word(r.divergences),
                word(r.across),
                f"{r.tau:.2f}",
                shown(r.tokens_per_second.median, ".1f"),
                shown(r.speedup.median, ".2f", "x"),
                extremes(r.speedup),
                told,
                shown(r.over_transformers.median, ".2f", "x") if r.over_transformers else "",
                extremes(r.over_transformers) if r.over_transformers else "",
            )
        )
    return "\n".join([*columns(lines, n_left=5), NOTE, *differences(results)])


def costs_table(results: Sequence[Result]) -> str:
    """What a round costs, what bounds the speed-up, and how deep drafts are accepted."""
    head = (
        *("prompts", "method", "L ms", "T_d ms", "T_t ms", "T_d/T_t", "T_t/L"),
        *("T_d->0", "T_t->L", "loop", "tau per request", "accepted by depth"),
    )
    lines: list[tuple[str, ...]] = [head]
    for r in results:
        if r.prediction is None or r.metrics is None or r.loop_share is None:
            continue
        p, own = r.prediction, r.tau_requests
        lines.append(
            (
                r.prompt_kind,
                r.method,
                *(f"{seconds * 1e3:.2f}" for seconds in (p.step, p.draft, p.verify)),
                f"{p.draft / p.verify:.2f}",
                f"{p.verify / p.step:.2f}",
                f"{p.bounds.free_draft:.2f}x",
                f"{p.bounds.verify_as_step:.2f}x",
                f"{r.loop_share:.1%}",
                f"{min(own):.2f} {statistics.median(own):.2f} {max(own):.2f}",
                " ".join(f"{depth.marginal:.0%}" for depth in r.metrics.by_depth),
            )
        )
    note = (
        "L, T_d, T_t: calibrated. T_d->0, T_t->L: the speed-up with a free draft, and with a "
        "verification that costs one step. loop: wall time outside passes of target and drafter. "
        "tau per request: lowest, median, highest. accepted by depth: of all rounds."
    )
    return "\n".join([*columns(lines, n_left=2), note]) if len(lines) > 1 else ""


def averages(results: Sequence[Result]) -> str:
    """Each method's speed-up, the mean over kinds of prompts."""
    names = list(dict.fromkeys((r.engine, r.method) for r in results))
    lines = [("engine", "method", "speed-up", "vs hf")]
    for engine, method in names:
        own = [r for r in results if (r.engine, r.method) == (engine, method)]
        speedup = mean(r.speedup.median for r in own)
        over = [r.over_transformers.median for r in own if r.over_transformers]
        against = shown(mean(over), ".2f", "x") if over else ""
        lines.append((engine, method, shown(speedup, ".2f", "x"), against))
    return "\n".join(["mean over the kinds of prompts:", *columns(lines, n_left=2)])


def reading(bound: Bound, results: Sequence[Result]) -> str:
    """What plain decoding of either engine reaches of what memory allows."""
    text = (
        f"a step reads {bound.step_bytes / 1e6:.1f} MB; this machine reads "
        f"{bound.bytes_per_second / 1e9:.1f} GB/s: at best {1 / bound.step_seconds:.1f} tokens/s"
    )
    for engine in (SPECDEC, TRANSFORMERS):
        own = [r for r in results if (r.engine, r.method) == (engine, PLAIN)]
        if own:
            speed = statistics.median(r.tokens_per_second.median for r in own)
            text += f"; {engine} reaches {bound.reached(speed):.0%}"
    return text


def blocks(seconds: Mapping[int, float]) -> str:
    """Passes by their number of tokens, in steps."""
    step = seconds[1]
    told = ", ".join(f"{n} tokens {own / step:.2f}" for n, own in seconds.items() if n > 1)
    return f"a pass takes, in steps of {step * 1e3:.1f} ms: {told}"


def refusals(refused: Sequence[Refusal]) -> str:
    return "\n".join(f"{r.engine} refused {r.method}: {r.reason}" for r in refused)


def differences(results: Sequence[Result]) -> list[str]:
    """Every output that differs, with the target's top-2 gap where it first does."""
    lines = [
        f"! {r.engine}, {r.method} on {name}: {found}"
        for r in results
        for name, found in r.divergences
    ]
    return lines + [
        f"! {TRANSFORMERS}, {r.method} beside specdec's plain decoding on {name}: {found}"
        for r in results
        if r.engine == TRANSFORMERS
        for name, found in r.across
    ]


def word(found: Sequence[tuple[str, Divergence]]) -> str:
    """yes, near-ties only, or NO."""
    if not found:
        return "yes"
    return "near-tie" if all(d.near_tie for _, d in found) else "NO"


def extremes(spread: Spread) -> str:
    return f"({shown(spread.low, '.2f')}-{shown(spread.high, '.2f')})"


def shown(value: float, digits: str, unit: str = "") -> str:
    """A number, or a dash where there is none: all tokens came with the prefill."""
    return "-" if math.isnan(value) else f"{value:{digits}}{unit}"


def mean(values: Iterable[float]) -> float:
    """The mean of those that are numbers; NaN if none is."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def columns(lines: Sequence[tuple[str, ...]], n_left: int) -> list[str]:
    """Aligned lines, a rule after the head and where the first cell changes."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for i, line in enumerate(lines):
        if i == 1 or (i > 1 and n_left > 2 and line[0] != lines[i - 1][0]):
            text.append("-" * (sum(widths) + 2 * len(widths) - 2))
        cells = (
            cell.ljust(width) if j < n_left else cell.rjust(width)
            for j, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  ".join(cells).rstrip())
    return text


def record(result: Result, bound: Bound) -> dict[str, object]:
    """A result as JSON, seconds and ratios as they are; None where a key does not apply."""
    r, p, m = result, result.prediction, result.metrics
    reached = bound.reached(r.tokens_per_second.median) if r.method == PLAIN else None
    return {
        "engine": r.engine,
        "method": r.method,
        "prompt_kind": r.prompt_kind,
        "tokens_per_second": number(r.tokens_per_second.median),
        "tau": r.tau,
        "lossless": r.lossless,
        "speedup": number(r.speedup.median),
        "predicted_speedup": p.speedup if p else None,
        "speedup_spread": spread_of(r.speedup),
        "over_transformers": number(r.over_transformers.median) if r.over_transformers else None,
        "over_transformers_spread": spread_of(r.over_transformers),
        "tokens_per_second_spread": spread_of(r.tokens_per_second),
        "call_tokens_per_second": number(r.call_tokens_per_second.median),
        "call_tokens_per_second_spread": spread_of(r.call_tokens_per_second),
        "predicted_without_overhead": p.without_overhead if p else None,
        "prompts": r.n_prompts,
        "new_tokens": r.n_new_tokens,
        "tau_requests": list(r.tau_requests),
        "acceptance_rate": m.acceptance_rate if m else None,
        "acceptance_by_depth": [asdict(depth) for depth in m.by_depth] if m else None,
        "step_seconds": p.step if p else None,
        "draft_seconds": p.draft if p else None,
        "verify_seconds": p.verify if p else None,
        "draft_to_verify": p.draft / p.verify if p else None,
        "verify_to_step": p.verify / p.step if p else None,
        "bound_free_draft": p.bounds.free_draft if p else None,
        "bound_verify_as_step": p.bounds.verify_as_step if p else None,
        "loop_share": r.loop_share,
        "bandwidth_share": number(reached) if reached is not None else None,
        "near_ties_only": all(found.near_tie for _, found in r.divergences),
        "divergences": [f"{name}: {found}" for name, found in r.divergences],
        "same_as_specdec": not r.across,
        "divergences_from_specdec": [f"{name}: {found}" for name, found in r.across],
        "refused": None,
    }


def refusal_record(refused: Refusal, kind: str) -> dict[str, object]:
    """A method that was refused, with the keys that every object has."""
    keys = ("tokens_per_second", "tau", "lossless", "speedup", "predicted_speedup")
    return {
        "engine": refused.engine,
        "method": refused.method,
        "prompt_kind": kind,
        **dict.fromkeys(keys),
        "refused": refused.reason,
    }


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def spread_of(spread: Spread | None) -> list[float | None] | None:
    return None if spread is None else [number(spread.low), number(spread.high)]
