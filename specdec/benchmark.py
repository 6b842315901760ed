"""Measuring: tau, tokens per second and speed-up of drafters beside plain decoding.

All runs of a comparison happen in one process, interleaved, on the same prompts; medians of ratios.
The prediction takes T_draft, T_verify and L from a calibration on other prompts.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from .accept import Greedy
from .generate import Generation, Round, generate
from .metrics import measure
from .protocol import Drafter, Model
from .speedup import EtaBounds, eta, eta_bounds
from .testing import Divergence, compare

PLAIN = "plain"


@dataclass(frozen=True)
class Costs:
    """Calibrated seconds of one drafter: of a draft, of the loop, and of passes by block size."""

    step: float
    """L: a target pass over the root alone."""
    plain_loop: float
    """The loop's own time in a round of plain decoding."""
    draft: dict[bool, float]
    """T_draft of a round that drafts something (True) or nothing (False)."""
    loop: float
    """The loop's own time in a round."""
    verify: dict[int, float]
    """Block size (root + nodes) -> seconds of a target pass."""

    def verify_at(self, n_tokens: int) -> float:
        """Seconds of a pass over `n_tokens`, linear between the calibrated sizes."""
        sizes = sorted(self.verify)
        at = min(max(bisect_left(sizes, n_tokens), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        share = (n_tokens - low) / (high - low)
        return self.verify[low] + share * (self.verify[high] - self.verify[low])

    def of(self, rounds: Sequence[Round]) -> tuple[float, float]:
        """Mean T_draft and T_verify of rounds with these block sizes."""
        sizes = [r.draft.n_nodes for r in rounds]
        return (
            statistics.fmean(self.draft[n > 0] for n in sizes),
            statistics.fmean(self.verify_at(n + 1) for n in sizes),
        )


@dataclass(frozen=True)
class Prediction:
    """What calibrated costs say of a run with its tau and its block sizes. Times in seconds."""

    step: float
    """L."""
    draft: float
    """T_d, the mean over the run's rounds."""
    verify: float
    """T_t, the mean over the run's rounds."""
    speedup: float
    """With the loop's own overhead."""
    without_overhead: float
    bounds: EtaBounds

    @classmethod
    def of(cls, rounds: Sequence[Round], tau: float, costs: Costs) -> Prediction:
        """Only tau and the sizes of the drafts are taken from the run, no time."""
        draft, verify = costs.of(rounds)
        loops = {"loop_seconds": costs.loop, "plain_loop_seconds": costs.plain_loop}
        return cls(
            costs.step,
            draft,
            verify,
            eta(tau, costs.step, draft, verify, **loops),
            eta(tau, costs.step, draft, verify),
            eta_bounds(tau, costs.step, draft, verify),
        )


def loop_share(rounds: Sequence[Round]) -> float:
    """The part of the rounds' wall time that is spent outside passes of target and drafter."""
    passes = sum(r.seconds.draft + r.seconds.verify for r in rounds)
    return 1 - passes / sum(r.seconds.total for r in rounds)


@dataclass(frozen=True)
class Row:
    """One drafter on one kind of prompt."""

    drafter: str
    prompt_kind: str
    lossless: bool
    tau: float
    acceptance_rate: float
    target_passes: int
    tokens_per_second: float
    speedup: float
    spread: tuple[float, float]
    """Lowest and highest ratio over the repetitions."""
    predicted_speedup: float
    """With the loop's own overhead."""
    predicted_without_overhead: float
    bounds: EtaBounds | None
    draft_to_verify: float
    verify_to_step: float
    loop_share: float
    """The part of the wall time spent outside passes of target and drafter."""
    divergences: tuple[Divergence, ...] = ()


def verification_seconds(
    target: Model, sizes: Sequence[int], context: int, repeats: int = 15, batch_size: int = 1
) -> dict[int, float]:
    """Median seconds of a target pass over chains of `sizes` tokens after `context` tokens."""
    cache = target.new_cache(batch_size, context + max(sizes))
    tokens = torch.randint(
        0,
        target.vocab_size,
        (batch_size, context + max(sizes)),
        generator=torch.Generator().manual_seed(0),
    ).to(target.device)
    none = torch.zeros(batch_size, dtype=torch.long, device=target.device)
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    with torch.no_grad():
        target(tokens[:, :context], cache, logits=False)
        cache.commit(
            torch.arange(context, device=target.device).expand(batch_size, -1), none + context
        )
        for repeat in range(repeats + 2):
            for size in sizes:
                start = time.perf_counter()
                target(tokens[:, :size], cache)
                if target.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                cache.commit(tokens[:, :0], none)
                if repeat >= 2:  # the first two warm up
                    taken[size].append(seconds)
    return {size: statistics.median(seconds) for size, seconds in taken.items()}


def calibrate(
    target: Model,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Tensor],
    max_new_tokens: int = 48,
    *,
    progress: bool = False,
) -> dict[str, Costs]:
    """Costs of every drafter, from decoding prompts that no result is reported on.

    Passes of a size that a drafter's rounds have at least 5 times cost what they cost there, behind
    a draft and at the length of its rows; other sizes are measured one after another.
    """
    runs: dict[str, list[Round]] = {name: [] for name in (PLAIN, *drafters)}
    cases = [(prompt, name) for _ in range(2) for prompt in prompts for name in runs]
    for prompt, name in tqdm(cases, desc="calibrating", disable=not progress, leave=False):
        run = generate(target, prompt, drafters.get(name), max_new_tokens=max_new_tokens)
        runs[name] += run.rounds
    widest = max((r.draft.n_nodes for rounds in runs.values() for r in rounds), default=0)
    sizes = sorted({1, 2, 3, 5, 9, widest + 1} - set(range(widest + 2, 10)))
    context = round(statistics.fmean(len(prompt) for prompt in prompts)) + max_new_tokens // 2
    verify = verification_seconds(target, sizes if len(sizes) > 1 else [1, 2], context)
    loop = {
        name: statistics.median(
            r.seconds.accept + r.seconds.commit + r.seconds.other for r in rounds
        )
        for name, rounds in runs.items()
    }
    step = by_size(runs[PLAIN]).get(1, verify[1])
    costs = {}
    for name in drafters:
        draft = {}
        for something in (True, False):
            taken = [r.seconds.draft for r in runs[name] if (r.draft.n_nodes > 0) == something]
            draft[something] = statistics.median(taken) if taken else 0.0
        own = verify | by_size(runs[name])
        costs[name] = Costs(step, loop[PLAIN], draft, loop[name], own)
    return costs


def by_size(rounds: Sequence[Round], at_least: int = 5) -> dict[int, float]:
    """Median seconds of the passes over root + nodes, by their number, where there are enough."""
    taken: dict[int, list[float]] = {}
    for r in rounds:
        taken.setdefault(r.draft.n_nodes + 1, []).append(r.seconds.verify)
    return {n: statistics.median(own) for n, own in taken.items() if len(own) >= at_least}


def compare_drafters(
    target: Model,
    drafters: Mapping[str, Drafter],
    prompts: Mapping[str, Sequence[Tensor]],
    *,
    max_new_tokens: int,
    costs: Mapping[str, Costs],
    repeats: int = 3,
    progress: bool = True,
) -> tuple[list[Row], dict[tuple[str, str], Generation]]:
    """Decode every kind of prompt with every drafter, greedily; rows, and each last run."""
    rows: list[Row] = []
    runs: dict[tuple[str, str], Generation] = {}
    names = (PLAIN, *drafters)
    total = sum(map(len, prompts.values())) * repeats * len(names)
    with tqdm(total=total, desc="decoding", disable=not progress, leave=False) as bar:
        for kind, rows_of_kind in prompts.items():
            seconds: dict[str, list[float]] = {name: [0.0] * repeats for name in names}
            results: dict[str, list[Generation]] = {name: [] for name in names}
            for repeat in range(repeats):
                for prompt in rows_of_kind:
                    for name in names:
                        run = generate(
                            target, prompt, drafters.get(name), max_new_tokens=max_new_tokens
                        )
                        seconds[name][repeat] += run.seconds
                        if repeat == 0:
                            results[name].append(run)
                        bar.update()
            for name in names:
                rows.append(_row(target, name, kind, results, seconds, costs.get(name)))
                runs[name, kind] = results[name][0]
    return rows, runs


def _row(
    target: Model,
    name: str,
    kind: str,
    results: Mapping[str, list[Generation]],
    seconds: Mapping[str, list[float]],
    costs: Costs | None,
) -> Row:
    rounds = [r for run in results[name] for r in run.rounds]
    metrics = measure(*(run.rounds for run in results[name]))
    divergences = tuple(
        difference
        for plain, run in zip(results[PLAIN], results[name], strict=True)
        if (difference := compare(target, plain.sequences[0], run.sequences[0], Greedy()))
    )
    ratios = [p / s for p, s in zip(seconds[PLAIN], seconds[name], strict=True)]
    told = None if costs is None else Prediction.of(rounds, metrics.tau, costs)
    return Row(
        drafter=name,
        prompt_kind=kind,
        lossless=not divergences,
        tau=metrics.tau,
        acceptance_rate=metrics.acceptance_rate,
        target_passes=metrics.n_target_passes,
        tokens_per_second=metrics.n_new_tokens / statistics.median(seconds[name]),
        speedup=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        predicted_speedup=told.speedup if told else 1.0,
        predicted_without_overhead=told.without_overhead if told else 1.0,
        bounds=told.bounds if told else None,
        draft_to_verify=told.draft / told.verify if told else 0.0,
        verify_to_step=told.verify / told.step if told else 1.0,
        loop_share=loop_share(rounds),
        divergences=divergences,
    )
