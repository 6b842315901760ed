"""Interleaved repetitions of every method on every prompt, and what they amount to.

A repetition decodes each prompt by all methods in turn, and another one begins with each prompt:
a machine that slows down slows all of them. A speed-up is the ratio of tokens per second within a
repetition; medians and extremes are over repetitions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from tqdm import tqdm

from ..accept import Greedy
from ..benchmark import PLAIN, Costs, Prediction, loop_share
from ..generate import Round
from ..metrics import Metrics, measure
from ..protocol import Model
from ..testing import Divergence, compare
from .prompts import Prompt
from .runs import SPECDEC, TRANSFORMERS, Method, Run


@dataclass(frozen=True)
class Spread:
    """A number over the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Result:
    """One method on one kind of prompt."""

    engine: str
    method: str
    prompt_kind: str
    n_prompts: int
    n_new_tokens: int
    tokens_per_second: Spread
    """Without the prefill."""
    call_tokens_per_second: Spread
    """With all that a call does."""
    speedup: Spread
    """Over plain decoding by the same engine."""
    over_transformers: Spread | None
    """Over the same method of `transformers`; None where that has none, or for itself."""
    tau: float
    """Pooled over the prompts."""
    tau_requests: tuple[float, ...]
    divergences: tuple[tuple[str, Divergence], ...]
    """Prompt and place of each difference from plain decoding by the same engine."""
    across: tuple[tuple[str, Divergence], ...]
    """The same, from our plain decoding."""
    metrics: Metrics | None = None
    prediction: Prediction | None = None
    loop_share: float | None = None

    @property
    def lossless(self) -> bool:
        return not self.divergences


@dataclass(frozen=True)
class Refusal:
    """A method that its engine does not offer for this target."""

    engine: str
    method: str
    reason: str


Runs = dict[tuple[str, str, str], list[list[Run]]]
"""(engine, method, kind of prompt) -> by repetition, the run of every prompt."""


def offered(
    methods: Sequence[Method], prompt: Prompt, n_tokens: int = 8
) -> tuple[list[Method], list[Refusal]]:
    """Try every method once, which warms it up, too; a ValueError is a refusal."""
    kept, refused = [], []
    for method in methods:
        try:
            method.run(prompt.tokens, n_tokens)
        except ValueError as error:
            refused.append(Refusal(method.engine, method.name, str(error)))
        else:
            kept.append(method)
    return kept, refused


def decode_all(
    methods: Sequence[Method],
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    max_new_tokens: int,
    repeats: int,
    progress: bool = True,
) -> Runs:
    """Every prompt by every method, `repeats` times."""
    runs: Runs = {
        (method.engine, method.name, kind): [[] for _ in range(repeats)]
        for kind in prompts
        for method in methods
    }
    total = sum(map(len, prompts.values())) * repeats * len(methods)
    with tqdm(total=total, desc="decoding", disable=not progress, leave=False) as bar:
        for turn, (repeat, kind, prompt) in enumerate(_cases(prompts, repeats)):
            first = turn % len(methods)
            for method in (*methods[first:], *methods[:first]):
                run = method.run(prompt.tokens, max_new_tokens)
                runs[method.engine, method.name, kind][repeat].append(run)
                bar.update()
    return runs


def _cases(
    prompts: Mapping[str, Sequence[Prompt]], repeats: int
) -> Iterator[tuple[int, str, Prompt]]:
    for repeat in range(repeats):
        for kind, own in prompts.items():
            for prompt in own:
                yield repeat, kind, prompt


def results_of(
    runs: Runs,
    prompts: Mapping[str, Sequence[Prompt]],
    target: Model,
    costs: Mapping[str, Costs],
) -> list[Result]:
    """One result a method and kind, in the order of `runs`.

    `target` judges differences; `costs` are those of our drafters by name.
    """
    results, judge = [], _Judge(target)
    for (engine, method, kind), own in runs.items():
        plain, mine = runs[engine, PLAIN, kind], runs[SPECDEC, PLAIN, kind]
        other = runs.get((TRANSFORMERS, method, kind)) if engine == SPECDEC else None
        rates = [rate(repeat) for repeat in own]
        once = own[0]
        rounds: list[Round] = [r for run in once for r in run.rounds]
        metrics = measure(*(run.rounds for run in once)) if rounds else None
        tau = sum(run.n_new for run in once) / sum(run.n_passes for run in once)
        told = costs.get(method) if engine == SPECDEC else None
        results.append(
            Result(
                engine=engine,
                method=method,
                prompt_kind=kind,
                n_prompts=len(once),
                n_new_tokens=sum(run.n_new for run in once),
                tokens_per_second=Spread.of(rates),
                call_tokens_per_second=Spread.of([call_rate(repeat) for repeat in own]),
                speedup=Spread.of(_ratios(rates, plain)),
                over_transformers=None if other is None else Spread.of(_ratios(rates, other)),
                tau=tau,
                tau_requests=tuple(run.tau for run in once),
                divergences=judge(plain, own, prompts[kind]),
                across=judge(mine, own, prompts[kind]),
                metrics=metrics,
                prediction=None if told is None else Prediction.of(rounds, tau, told),
                loop_share=loop_share(rounds) if rounds else None,
            )
        )
    return results


def rate(runs: Sequence[Run]) -> float:
    """Tokens per second of decoding, pooled; NaN where all came with the prefill."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.n_timed for run in runs) / seconds if seconds else math.nan


def call_rate(runs: Sequence[Run]) -> float:
    """New tokens per second of the calls, pooled."""
    return sum(run.n_new for run in runs) / sum(run.call_seconds for run in runs)


def _ratios(rates: Sequence[float], baseline: Sequence[Sequence[Run]]) -> list[float]:
    return [own / rate(other) for own, other in zip(rates, baseline, strict=True)]


class _Judge:
    """First differences between sequences; what it has judged it remembers."""

    def __init__(self, target: Model) -> None:
        self.target = target
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], Divergence | None] = {}

    def __call__(
        self,
        expected: Sequence[Sequence[Run]],
        got: Sequence[Sequence[Run]],
        prompts: Sequence[Prompt],
    ) -> tuple[tuple[str, Divergence], ...]:
        """The first difference of every prompt in any repetition."""
        found: dict[str, Divergence] = {}
        for plain_runs, runs in zip(expected, got, strict=True):
            for prompt, plain, run in zip(prompts, plain_runs, runs, strict=True):
                difference = self.difference(plain.sequence, run.sequence)
                if difference is not None:
                    found.setdefault(prompt.name, difference)
        return tuple(found.items())

    def difference(self, expected: Tensor, got: Tensor) -> Divergence | None:
        key = (tuple(expected.tolist()), tuple(got.tolist()))
        if key not in self.known:
            self.known[key] = compare(self.target, expected, got, Greedy())
        return self.known[key]
