"""The loop, one for every method: propose, verify, accept, commit.

    while any row is live:
        draft   = state.propose(context)
        output  = target(root + draft)               one pass, the draft as a pending tree
        verdict = rule.accept(draft, output.logits)
        cache.commit(root + accepted path)           cut by budget and stop tokens

A row ends at the first accepted stop token, even in the middle of an accepted path, or at its
budget, exactly where plain decoding ends. Plain decoding is this loop without a drafter.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .accept import Greedy, Rule
from .cache import everything
from .draft import Draft, depths, validate_draft
from .metrics import Metrics, measure
from .protocol import Context, Drafter, Model


@dataclass(frozen=True)
class Seconds:
    """Wall time of a round by part; `prefill` is that of the run, told by its first round only."""

    draft: float
    verify: float
    accept: float
    commit: float
    other: float
    prefill: float = 0.0

    @property
    def total(self) -> float:
        """The round's wall time, without the prefill."""
        return self.draft + self.verify + self.accept + self.commit + self.other


@dataclass(frozen=True)
class Round:
    """What one round did. Rows that were done before it have `live` False and emit nothing."""

    draft: Draft
    path: Tensor
    """[B, N] accepted nodes in order, padded."""
    n_accepted: Tensor
    """[B] how many of `path` were kept, after the cuts by budget and stop tokens."""
    new_tokens: list[Tensor]
    """One [n] tensor a row: the kept nodes' tokens, then the target's own unless `cut`."""
    live: Tensor
    """[B] bool: rows that took part."""
    cut: Tensor
    """[B] bool: rows whose verdict was shortened by budget or stop token."""
    seconds: Seconds


@dataclass(frozen=True)
class Generation:
    """A finished run: `sequences` (prompt + new tokens of each row) and the rounds behind them."""

    sequences: list[Tensor]
    rounds: list[Round]
    prompt_lengths: list[int] = field(default_factory=list)

    @property
    def metrics(self) -> Metrics:
        return measure(self.rounds)

    @property
    def new_tokens(self) -> list[Tensor]:
        """The new tokens of each row."""
        return [s[n:] for s, n in zip(self.sequences, self.prompt_lengths, strict=True)]

    @property
    def seconds(self) -> float:
        """Wall time of all rounds, without the prefill."""
        return sum(r.seconds.total for r in self.rounds)


def generate(
    target: Model,
    prompts: Tensor | Sequence[Tensor],
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int | Sequence[int],
    rule: Rule | None = None,
    stop_tokens: Iterable[int] = (),
    prefill_chunk: int = 512,
) -> Generation:
    """Decode to the end; arguments and errors are those of `decode`."""
    rows = [prompts] if isinstance(prompts, Tensor) else list(prompts)
    rounds = list(
        decode(
            target,
            rows,
            drafter,
            max_new_tokens=max_new_tokens,
            rule=rule,
            stop_tokens=stop_tokens,
            prefill_chunk=prefill_chunk,
        )
    )
    sequences = [
        torch.cat([prompt.to(target.device), *[r.new_tokens[b] for r in rounds]])
        for b, prompt in enumerate(rows)
    ]
    return Generation(sequences, rounds, [len(prompt) for prompt in rows])


def decode(
    target: Model,
    prompts: Tensor | Sequence[Tensor],
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int | Sequence[int],
    rule: Rule | None = None,
    stop_tokens: Iterable[int] = (),
    prefill_chunk: int = 512,
) -> Iterator[Round]:
    """Decode round by round.

    Args:
        target: the model whose output this is.
        prompts: one int64 tensor [T], or a list of them, a ragged batch.
        drafter: where drafts come from; None decodes plainly.
        max_new_tokens: budget of every row, or one per row.
        rule: how tokens are picked and drafts accepted; `Greedy()` by default.
        stop_tokens: ids that end a row; the stop token itself is emitted.
        prefill_chunk: prompt tokens a pass.

    Raises:
        ValueError: for arguments that do not fit, when called and not at the first round.
        FloatingPointError: when the target's logits hold a NaN, or nothing to pick from.
        Whatever the drafter raises comes through as it is.
    """
    rule = Greedy() if rule is None else rule
    rows = [prompts] if isinstance(prompts, Tensor) else list(prompts)
    stops = frozenset(_whole("stop_tokens", stop_tokens))
    budgets = _validate(target, rows, max_new_tokens, rule, stops, prefill_chunk)
    run = _Run(target, rows, drafter, budgets, rule, stops, prefill_chunk)

    def rounds() -> Iterator[Round]:
        while any(run.is_live):
            yield run.step()

    return rounds()


def _validate(
    target: Model,
    rows: list[Tensor],
    max_new_tokens: int | Sequence[int],
    rule: Rule,
    stop_tokens: frozenset[int],
    prefill_chunk: int,
) -> list[int]:
    if not rows:
        raise ValueError("prompts: expected at least one, got an empty list")
    for b, prompt in enumerate(rows):
        if not isinstance(prompt, Tensor) or prompt.ndim != 1 or prompt.dtype != torch.long:
            got = (
                f"{prompt.dtype} of shape {list(prompt.shape)}"
                if isinstance(prompt, Tensor)
                else type(prompt).__name__
            )
            raise ValueError(f"prompts[{b}]: expected a 1-D int64 tensor, got {got}")
        if not len(prompt):
            raise ValueError(f"prompts[{b}]: expected at least one token, got none")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= target.vocab_size:
            raise ValueError(
                f"prompts[{b}]: expected ids in [0, {target.vocab_size}), got {low}..{high}"
            )
    if not isinstance(max_new_tokens, Iterable):
        max_new_tokens = [max_new_tokens] * len(rows)
    budgets = _whole("max_new_tokens", max_new_tokens)
    if len(budgets) != len(rows) or min(budgets) < 1:
        raise ValueError(
            f"max_new_tokens: expected a number >= 1, or one per prompt "
            f"({len(rows)}), got {budgets}"
        )
    for b, (prompt, budget) in enumerate(zip(rows, budgets, strict=True)):
        if len(prompt) + budget > target.max_position_embeddings:
            raise ValueError(
                f"prompts[{b}]: {len(prompt)} tokens and max_new_tokens={budget} "
                f"exceed the target's max_position_embeddings="
                f"{target.max_position_embeddings}"
            )
    outside = [stop for stop in sorted(stop_tokens) if not 0 <= stop < target.vocab_size]
    if outside:
        raise ValueError(f"stop_tokens: expected ids in [0, {target.vocab_size}), got {outside}")
    if prefill_chunk < 1:
        raise ValueError(f"prefill_chunk: expected at least 1, got {prefill_chunk}")
    rule.check(len(rows))
    return budgets


class _Clock:
    """Laps of wall time; waits for CUDA before it is read."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.last = 0.0
        self.lap()

    def lap(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds


class _Run:
    """The state of one decoding: tokens, the target's cache, the drafter's state."""

    def __init__(
        self,
        target: Model,
        rows: list[Tensor],
        drafter: Drafter | None,
        budgets: list[int],
        rule: Rule,
        stops: frozenset[int],
        chunk: int,
    ) -> None:
        self.target, self.rule, self.stops, self.chunk = target, rule, stops, chunk
        device = target.device
        self.host_lengths = [len(row) for row in rows]
        self.left = list(budgets)
        self.is_live = [True] * len(rows)
        longest = max(n + left for n, left in zip(self.host_lengths, budgets, strict=True))
        # one column more than any row needs: where the padding of `new_tokens` goes
        self.tokens = torch.zeros(len(rows), longest + 1, dtype=torch.long, device=device)
        for b, row in enumerate(rows):
            self.tokens[b, : len(row)] = row
        self.lengths = torch.tensor(self.host_lengths, device=device)
        self.live = torch.ones(len(rows), dtype=torch.bool, device=device)
        self.roots = torch.stack([row[-1:] for row in rows]).to(device)  # [B, 1]
        self.none_cut = torch.zeros_like(self.live)
        self.no_draft = Draft.empty(len(rows), device)
        self.steps = torch.arange(longest, device=device)
        self.taps = () if drafter is None else tuple(dict.fromkeys(drafter.taps))  # each once
        self.state = None if drafter is None else drafter.begin(target, len(rows), longest)
        self.cache = target.new_cache(len(rows), longest)
        self.started = False

    @torch.no_grad()
    def step(self) -> Round:
        clock = _Clock(self.target.device)
        prefill = other = seconds_draft = 0.0
        if not self.started:
            self._prefill()
            prefill = clock.lap()
        live, draft, parents = self.live, self.no_draft, None
        if self.state is not None:
            context = self._context()
            other = clock.lap()
            draft = self.state.propose(context)
            seconds_draft = clock.lap()
            validate_draft(draft, len(self.roots), self.target.vocab_size)
            draft = self._within_budget(draft, context.depth_left)
            if draft.resume is None and self.cache.n_pending:  # what the drafter left there
                self.cache.commit(self.no_draft.tokens, torch.zeros_like(self.lengths))
        if draft.parents is not None:
            parents = torch.cat([torch.full_like(self.roots, -1), draft.parents + 1], dim=1)
        tokens = torch.cat([self.roots, draft.tokens], dim=1)
        other += clock.lap()
        output = self.target(
            tokens, self.cache, parents=parents, taps=self.taps, resume=draft.resume
        )
        seconds_verify = clock.lap()

        assert output.logits is not None
        _check_logits(output.logits)
        verdict = self.rule.accept(draft, output.logits, self.lengths)
        emitted, kept, cut = self._cut(draft, verdict.path, verdict.n_accepted, verdict.next_token)
        seconds_accept = clock.lap()

        counts = torch.tensor([[len(new) for new in emitted], kept], device=tokens.device)
        n_new, self.n_accepted = counts.unbind(0)
        nodes = self._with_root(draft, verdict.path)
        self.cache.commit(nodes, n_new)
        seconds_commit = clock.lap()

        new_tokens = self._emit(emitted, n_new)
        self.new_tokens, self.n_new, self.path = new_tokens, n_new, verdict.path
        self.hidden = {
            tap: _rows(states, nodes[:, : new_tokens.shape[1]])
            for tap, states in output.hidden.items()
        }
        rows = [new_tokens[b, : len(new)] for b, new in enumerate(emitted)]
        is_cut = torch.tensor(cut, device=tokens.device) if any(cut) else self.none_cut
        other += clock.lap()
        seconds = Seconds(
            seconds_draft, seconds_verify, seconds_accept, seconds_commit, other, prefill
        )
        return Round(draft, verdict.path, self.n_accepted, rows, live, is_cut, seconds)

    def _prefill(self) -> None:
        """Commit every prompt but its last token; keep the pairs (h_t, x_{t+1}) it yields."""
        self.started = True
        n_prefill = self.lengths - 1
        longest = max(self.host_lengths) - 1
        pieces: dict[int, list[Tensor]] = {tap: [] for tap in self.taps}
        for start in range(0, longest, self.chunk):
            piece = self.tokens[:, start : min(start + self.chunk, longest)]
            output = self.target(piece, self.cache, taps=self.taps, logits=False)
            path, whole = everything(piece.shape[1], len(piece), piece.device)
            self.cache.commit(path, torch.minimum((n_prefill - start).clamp(min=0), whole))
            for tap in self.taps:
                pieces[tap].append(output.hidden[tap])
        self.new_tokens, self.n_new = self.tokens[:, 1 : longest + 1], n_prefill
        self.path, self.n_accepted = self.no_draft.tokens, torch.zeros_like(self.lengths)
        nothing = torch.zeros(
            len(self.roots),
            0,
            self.target.hidden_size,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        self.hidden = {tap: torch.cat([nothing, *states], dim=1) for tap, states in pieces.items()}

    def _context(self) -> Context:
        # only a live row can use its draft: the budget less the target's own token
        depth_left = [
            max(left - 1, 0) if on else 0 for left, on in zip(self.left, self.is_live, strict=True)
        ]
        return Context(
            tokens=self.tokens[:, : max(self.host_lengths)],
            lengths=self.lengths,
            new_tokens=self.new_tokens,
            n_new=self.n_new,
            hidden=self.hidden,
            path=self.path,
            n_accepted=self.n_accepted,
            live=self.live,
            depth_left=torch.tensor(depth_left, device=self.tokens.device),
            max_depth=max(depth_left),
            cache=self.cache,
            rule=self.rule,
        )

    def _cut(
        self,
        draft: Draft,
        path: Tensor,
        n_accepted: Tensor,
        next_token: Tensor,
    ) -> tuple[list[list[int]], list[int], list[bool]]:
        """The tokens each row emits, how many drafts it keeps, and whether it was cut short.

        Reads the verdict on the host, once a round; updates what is live and left.
        """
        found = [n_accepted.unsqueeze(1), next_token.unsqueeze(1)]
        if draft.n_nodes:
            found.append(draft.tokens if draft.parents is None else draft.tokens.gather(1, path))
        emitted, kept, cut = [], [], []
        for b, (n, bonus, *drafted) in enumerate(torch.cat(found, dim=1).tolist()):
            new = [*drafted[:n], bonus][: self.left[b]] if self.is_live[b] else []
            stop = next((i for i, token in enumerate(new) if token in self.stops), None)
            if stop is not None:
                new = new[: stop + 1]
            self.left[b] -= len(new)
            cut.append(self.is_live[b] and len(new) <= n)
            self.is_live[b] = self.is_live[b] and stop is None and self.left[b] > 0
            emitted.append(new)
            kept.append(min(n, len(new)))
        return emitted, kept, cut

    def _within_budget(self, draft: Draft, depth_left: Tensor) -> Draft:
        """Nodes deeper than a row can use become unused.

        They could not be kept, but a sampling rule would test them: a row's tokens would depend on
        how deep its neighbours draft.
        """
        live = [left for left, on in zip(self.left, self.is_live, strict=True) if on]
        if draft.n_nodes < min(live):  # no node is deeper than there are nodes
            return draft
        counts = depths(draft.tree()) <= depth_left.unsqueeze(1)
        return replace(draft, used=draft.mask() & counts)

    def _with_root(self, draft: Draft, path: Tensor) -> Tensor:
        """A path of the draft as pending nodes of the target's cache: the root is node 0."""
        if draft.parents is None and draft.n_nodes < len(self.steps):
            return self.steps[: 1 + draft.n_nodes].expand(len(self.roots), -1)
        return torch.cat([torch.zeros_like(self.roots), path + 1], dim=1)

    def _emit(self, emitted: list[list[int]], n_new: Tensor) -> Tensor:
        """Append the emitted tokens of every row; returns them padded, [B, A]."""
        longest, spare = max(map(len, emitted)), self.tokens.shape[1] - 1
        padded = [row + [0] * (longest - len(row)) for row in emitted]
        where = [
            [have + i if i < len(row) else spare for i in range(longest)]
            for have, row in zip(self.host_lengths, emitted, strict=True)
        ]
        new = torch.tensor(padded, device=self.tokens.device)
        self.tokens.scatter_(1, torch.tensor(where, device=self.tokens.device), new)
        self.lengths = self.lengths + n_new
        self.host_lengths = [
            have + len(row) for have, row in zip(self.host_lengths, emitted, strict=True)
        ]
        # rows that are done keep their root
        self.roots = self.tokens.gather(1, self.lengths.unsqueeze(1) - 1)
        if not all(self.is_live):
            self.live = torch.tensor(self.is_live, device=self.tokens.device)
        return new


def _check_logits(logits: Tensor) -> None:
    """Raise where no token can be picked: a NaN, a +inf, or nothing but -inf."""
    top = logits.amax(dim=-1)  # NaN propagates
    if not math.isfinite(float(top.sum())) and not bool(top.isfinite().all()):
        b, i = (~top.isfinite()).nonzero()[0].tolist()
        raise FloatingPointError(
            f"logits: the target returned {'NaN' if top[b, i].isnan() else 'infinities'} in row "
            f"{b}, after the {'root' if i == 0 else f'draft node {i - 1}'}"
        )


def _whole(name: str, values: Iterable[int]) -> list[int]:
    """`values` as ints; a ValueError names the argument."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name}: expected whole numbers, got {values!r}") from None


def _rows(states: Tensor, nodes: Tensor) -> Tensor:
    """`states` [B, M, D] at `nodes` [B, A] -> [B, A, D]."""
    return states.gather(1, nodes.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
