"""`check_lossless`: one call that proves a drafter, or shows the first token it got wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..accept import Coupled, Greedy, Rejection
from ..generate import generate
from ..noise import key, uniform
from ..protocol import Drafter, Model
from .divergence import Divergence, LosslessError, compare, plain_sequence
from .drafters import Flaky
from .replay import Recorder, replay


@dataclass
class Report:
    """What was checked: `near_ties` lists differences that low precision explains."""

    n_runs: int = 0
    n_tokens: int = 0
    n_replayed: int = 0
    n_sampled: int = 0
    tau: dict[str, float] = field(default_factory=dict)
    near_ties: list[Divergence] = field(default_factory=list)

    def __str__(self) -> str:
        tau = ", ".join(f"{name} {value:.2f}" for name, value in self.tau.items())
        return (
            f"lossless: {self.n_runs} runs, {self.n_tokens} tokens equal to plain decoding, "
            f"{self.n_replayed} drafts replayed, {self.n_sampled} sampled tokens in law; "
            f"tau: {tau}; near-ties: {len(self.near_ties)}"
        )


def check_lossless(
    target: Model,
    drafter: Drafter,
    *,
    prompts: Sequence[Tensor] | None = None,
    max_new_tokens: int = 16,
    rules: Sequence[Greedy | Coupled] | None = None,
    with_replay: bool = True,
    n_samples: int = 256,
    seed: int = 0,
    progress: bool = False,
) -> Report:
    """Prove that a drafter changes nothing, or raise at the first difference.

    Every rule decodes every prompt alone and all of them as one ragged batch, with and without a
    stop token that plain decoding meets, with budgets of 1, 2 and `max_new_tokens`, and with
    drafts lost in between; each row must equal plain decoding without a cache and without the
    loop. Replay: a drafter begun afresh must propose the same drafts (turn it off for drafters
    that adapt). Last, `n_samples` rows decode under `Rejection` and their tokens are tested
    against the target's law.

    Args:
        target: best in float64 (`model.double()`), where any difference is an error. In lower
            precision a difference that a float64 recomputation supports is kept as a near-tie.
        drafter: yours.
        prompts: 1-D int64 tensors; by default random ones of 1, 5 and 12 tokens.
        max_new_tokens: longest budget.
        rules: by default greedy, and coupled sampling at three settings.
        with_replay: whether to replay drafts.
        n_samples: rows to decode under `Rejection`; 0 leaves that out.
        seed: of prompts, stop tokens, lost drafts and sampling.
        progress: show a bar.

    Raises:
        LosslessError: with row, position, tokens, the target's top-2 gap and a float64 referee.
    """
    rng = np.random.default_rng(seed)
    if prompts is None:
        prompts = [torch.from_numpy(rng.integers(0, target.vocab_size, n)) for n in (1, 5, 12)]
    if rules is None:
        rules = [
            Greedy(),
            Coupled(1.0, seed=seed),
            Coupled(0.6, top_k=8, seed=seed + 100),
            Coupled(1.4, top_p=0.9, min_p=0.02, seed=seed + 200),
        ]
    report = Report()
    cases = list(product(rules, _batches(len(prompts))))
    for rule, rows in tqdm(cases, desc="check_lossless", disable=not progress):
        _check_case(
            target,
            drafter,
            [prompts[b] for b in rows],
            max_new_tokens,
            rule,
            rng,
            with_replay,
            report,
        )
    if n_samples:
        check_law(target, drafter, prompts[-1], n_samples, min(4, max_new_tokens), seed)
        report.n_sampled = n_samples * min(4, max_new_tokens)
    return report


def _batches(n: int) -> list[list[int]]:
    return [[b] for b in range(n)] + ([list(range(n))] if n > 1 else [])


def _check_case(
    target: Model,
    drafter: Drafter,
    prompts: list[Tensor],
    budget: int,
    rule: Greedy | Coupled,
    rng: np.random.Generator,
    with_replay: bool,
    report: Report,
) -> None:
    plain = [
        plain_sequence(target, prompt, budget, rule.for_row(b)) for b, prompt in enumerate(prompts)
    ]
    spoken = torch.cat([p[len(prompt) :] for p, prompt in zip(plain, prompts, strict=True)])
    stop = int(spoken[int(rng.integers(len(spoken)))])
    for stops, n_new, lost in (
        ((), budget, 0.0),
        ((stop,), budget, 0.0),
        ((), 1, 0.0),
        ((), 2, 0.0),
        ((stop,), budget, 0.3),
    ):
        recorder = Recorder(drafter)
        used = Flaky(recorder, lost, int(rng.integers(2**31))) if lost else recorder
        result = generate(target, prompts, used, max_new_tokens=n_new, rule=rule, stop_tokens=stops)
        for b, got in enumerate(result.sequences):
            expected = _ended(plain[b], len(prompts[b]), n_new, stops)
            difference = compare(target, expected, got, rule.for_row(b), b)
            if difference is not None:
                if not difference.near_tie:
                    raise LosslessError(
                        f"{type(rule).__name__}, {len(prompts)} row(s), budget "
                        f"{n_new}, stop tokens {list(stops)}: {difference}"
                    )
                report.near_ties.append(difference)
            report.n_tokens += len(got) - len(prompts[b])
        report.n_runs += 1
        if n_new == budget and not stops:
            name = type(rule).__name__ if isinstance(rule, Greedy) else f"T={rule.temperature}"
            report.tau[name] = result.metrics.tau
        if with_replay:
            tolerance = 1e-9 if target.dtype == torch.float64 else 1e-2
            report.n_replayed += replay(target, drafter, recorder.seen, rule, tolerance)


def _ended(plain: Tensor, n_prompt: int, budget: int, stops: Sequence[int]) -> Tensor:
    """`plain` cut where a budget or a stop token ends it."""
    for i, token in enumerate(plain[n_prompt : n_prompt + budget].tolist()):
        if token in stops:
            return plain[: n_prompt + i + 1]
    return plain[: n_prompt + budget]


def check_law(
    target: Model,
    drafter: Drafter,
    prompt: Tensor,
    n_rows: int,
    n_tokens: int,
    seed: int = 0,
    *,
    n_bins: int = 8,
    max_batch: int = 64,
) -> None:
    """Test the tokens of `n_rows` sampled rows against the target's law; raises LosslessError.

    Two kinds of chi-square test, each with odds of a false alarm below 1e-7. The first token of
    every row against p itself, likely tokens one by one and the rest together. All tokens by the
    probability integral transform: with tokens in some order, F(x - 1) + v p(x) is uniform where x
    follows p and v is uniform, whatever p is, and independent from token to token; in four orders
    (by probability, and three hashed ones) and `n_bins` bins.
    """
    seeds = [seed + 7919 * row for row in range(n_rows)]
    values: list[Tensor] = []
    first: list[Tensor] = []
    p = torch.empty(0)
    for batch in _chunks(seeds, max_batch):
        result = generate(
            target,
            [prompt] * len(batch),
            drafter,
            max_new_tokens=n_tokens,
            rule=Rejection(seed=batch),
        )
        rows = torch.stack(result.sequences)
        with torch.no_grad():
            logits = target(rows[:, :-1]).logits
        assert logits is not None
        p = Rejection().log_probs(logits[:, len(prompt) - 1 :]).exp().double()
        keys = key(torch.tensor(batch), 99).unsqueeze(1) + torch.arange(n_tokens)
        values.append(_transforms(p, rows[:, len(prompt) :], uniform(keys)))
        first.append(rows[:, len(prompt)])
    own = torch.bincount(torch.cat(first), minlength=p.shape[-1]).double()
    likely = p[0, 0] * n_rows >= 5
    _chi_square(
        torch.cat([own[likely], own[~likely].sum()[None]]),
        n_rows * torch.cat([p[0, 0][likely], p[0, 0][~likely].sum()[None]]),
        "the first token, likely ones by id and the rest",
    )
    bins = (torch.cat(values, dim=1) * n_bins).long().clamp(max=n_bins - 1)  # [orders, samples]
    for order, row in enumerate(bins):
        counts = torch.bincount(row, minlength=n_bins).double()
        _chi_square(counts, torch.full_like(counts, len(row) / n_bins), f"order {order}")


def _chi_square(counts: Tensor, expected: Tensor, what: str) -> None:
    counts, expected = counts[expected > 0.5], expected[expected > 0.5]
    df = len(counts) - 1
    if df < 1:
        return
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Wilson-Hilferty: the cube root of chi2 / df is nearly normal; 5.3 sigma is 6e-8
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    if z > 5.3:
        raise LosslessError(
            f"Rejection: {int(counts.sum())} sampled tokens do not follow the target's law "
            f"({what}: {counts.int().tolist()}, expected {expected.round().int().tolist()}, z = "
            f"{z:.1f}); does the drafter declare the q its tokens were drawn from?"
        )


def _chunks(rows: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _transforms(p: Tensor, tokens: Tensor, v: Tensor) -> Tensor:
    """Transforms of `tokens` [B, T] under `p` [B, T, V] in four orders: [4, B * T]."""
    vocab = torch.arange(p.shape[-1])
    own = p.gather(-1, tokens.unsqueeze(-1))
    values = []
    for order in range(4):
        rank = -p if order == 0 else uniform(key(vocab, order)).expand_as(p)
        mine = rank.gather(-1, tokens.unsqueeze(-1))
        before = (rank < mine) | ((rank == mine) & (vocab < tokens.unsqueeze(-1)))
        values.append(((p * before).sum(-1) + v * own.squeeze(-1)).flatten())
    return torch.stack(values)
