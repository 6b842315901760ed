"""What a block costs a target with routed experts: how many it wakes, and what that makes of eta.

One token wakes the k experts a block routes it to; a block of n tokens wakes the union of theirs,
and each expert that is awake has its weights read. Under uniform routing E (1 - (1 - k/E)^n) of E
are awake (`speedup.experts_woken`); real routing is correlated, so it is fewer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from .benchmark import PLAIN, Costs, Prediction, calibrate
from .generate import Round, decode, generate
from .metrics import measure
from .models import QwenMoe
from .models.routing import recorded, woken
from .protocol import Drafter
from .speedup import experts_woken

EXPERTS = ("loop", "grouped")


@dataclass(frozen=True)
class Woken:
    """Means over the rounds of a run; experts also over the blocks (layers) of the target."""

    n_tokens: float
    """Tokens that a target pass verified: roots of live rows and used nodes."""
    experts: float
    """Distinct experts that they woke."""
    uniform: float
    """As many tokens under uniform routing."""


def experts_of_rounds(
    target: QwenMoe, prompts: Sequence[Tensor], drafter: Drafter | None, max_new_tokens: int
) -> Woken:
    """Decode a ragged batch greedily and count in every round what its verification woke.

    Unused nodes and rows that are done do not count, though their tokens are computed, too.
    """
    config = target.config
    tokens: list[float] = []
    experts: list[float] = []
    uniform: list[float] = []
    with recorded(target) as routes:
        for r in decode(target, list(prompts), drafter, max_new_tokens=max_new_tokens):
            verified = routes[-target.n_layers :]  # the last pass: the first round prefills, too
            used = r.live.unsqueeze(1) & torch.cat(
                [torch.ones_like(r.live).unsqueeze(1), r.draft.mask()], dim=1
            )
            n = int(used.sum())
            tokens.append(n)
            experts.append(statistics.fmean(woken(layer.indices, used) for layer in verified))
            uniform.append(experts_woken(n, config.num_experts, config.num_experts_per_tok))
            routes.clear()
    return Woken(*map(statistics.fmean, (tokens, experts, uniform)))


@dataclass(frozen=True)
class Timed:
    """One drafter with one way to compute the experts."""

    experts: str
    drafter: str
    plain_per_second: float
    """Tokens of plain decoding."""
    per_second: float
    verify_to_step: float
    """T_t / L of the run's own blocks."""
    speedup: float
    """eta, measured: median of the repetitions' ratios."""
    spread: tuple[float, float]
    predicted: float
    """eta, from calibrated costs, with the loop's own time."""


def time_experts(
    target: QwenMoe,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Tensor],
    calibration: Sequence[Tensor],
    *,
    max_new_tokens: int,
    repeats: int,
    progress: bool = True,
) -> list[Timed]:
    """Plain decoding and every drafter, greedily, with both ways in turn; medians.

    The target's own way is that of before afterwards. Raises ValueError for one without experts.
    """
    before = target.experts
    if before is None:
        raise ValueError("target: expected a model with routed experts, got a dense one")
    names = (PLAIN, *drafters)
    costs: dict[str, dict[str, Costs]] = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    runs: dict[tuple[str, str], list[Round]] = {}
    try:
        for way in EXPERTS:
            target.set_experts(way)
            costs[way] = calibrate(target, drafters, calibration, 24)
        cases = [(i, way, name) for i in range(repeats) for way in EXPERTS for name in names]
        for _, way, name in tqdm(cases, desc="experts", disable=not progress, leave=False):
            target.set_experts(way)
            own = [
                generate(target, prompt, drafters.get(name), max_new_tokens=max_new_tokens)
                for prompt in prompts
            ]
            seconds.setdefault((way, name), []).append(sum(run.seconds for run in own))
            runs[way, name] = [r for run in own for r in run.rounds]
    finally:
        target.set_experts(before)
    rows = []
    for way in EXPERTS:
        plain = seconds[way, PLAIN]
        for name in drafters:
            metrics = measure(runs[way, name])
            told = Prediction.of(runs[way, name], metrics.tau, costs[way][name])
            ratios = [p / s for p, s in zip(plain, seconds[way, name], strict=True)]
            rows.append(
                Timed(
                    way,
                    name,
                    metrics.n_new_tokens / statistics.median(plain),
                    metrics.n_new_tokens / statistics.median(seconds[way, name]),
                    told.verify / told.step,
                    statistics.median(ratios),
                    (min(ratios), max(ratios)),
                    told.speedup,
                )
            )
    return rows


def report(
    target: QwenMoe,
    drafters: Mapping[str, Drafter],
    timed_drafters: Mapping[str, Drafter],
    prompts: Mapping[str, Sequence[Tensor]],
    calibration: Sequence[Tensor],
    *,
    max_new_tokens: int,
    repeats: int,
) -> str:
    """As text what the blocks of `drafters` wake, and what those of `timed_drafters` cost."""
    config, everything = target.config, [prompt for rows in prompts.values() for prompt in rows]
    lines = [
        "",
        f"experts woken by a verification, mean of {target.n_layers} blocks and all rounds, one "
        f"row at a time; one token wakes {config.num_experts_per_tok} of {config.num_experts}:",
        f"  {'drafter':20}  {'tokens':>6}  {'woken':>6}  {'uniform routing':>15}",
    ]
    for name, drafter in drafters.items():
        own = [experts_of_rounds(target, [p], drafter, max_new_tokens) for p in everything]
        n, found, expected = (
            statistics.fmean(values)
            for values in zip(*[(w.n_tokens, w.experts, w.uniform) for w in own], strict=True)
        )
        lines.append(f"  {name:20}  {n:6.1f}  {found:6.1f}  {expected:15.1f}")
    timed = time_experts(
        target,
        timed_drafters,
        everything,
        calibration,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
    )
    lines += [
        "",
        "both ways to compute experts, interleaved; tokens a second are bytes:",
        f"  {'experts':8}  {'drafter':20}  {'plain/s':>8}  {'with/s':>8}  {'T_t/L':>6}  "
        f"{'eta':>6}  {'(low-high)':>12}  {'predicted':>9}",
    ]
    for t in timed:
        spread = f"({t.spread[0]:.2f}-{t.spread[1]:.2f})"
        lines.append(
            f"  {t.experts:8}  {t.drafter:20}  {t.plain_per_second:8.0f}  {t.per_second:8.0f}  "
            f"{t.verify_to_step:6.2f}  {t.speedup:5.2f}x  {spread:>12}  {t.predicted:8.2f}x"
        )
    return "\n".join(lines)
