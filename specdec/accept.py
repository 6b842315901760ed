"""Acceptance rules: how the target picks tokens, and which nodes of a draft it keeps.

Every rule turns the target's logits into one bit a node (does it pass, given that its parent was
reached?); one walk then takes the deepest node whose whole path passes. The rule also draws for the
drafters (`pick`), so that p and q go through the same temperature and truncation.

p is the target's law, q the drafter's. Row b draws from its own seed; noise is keyed by seed,
position, purpose, depth and node, so a row's output never depends on who shares its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .draft import Draft, ancestors, depths, earlier_siblings, path_to, reachable
from .noise import gumbel, key, uniform

_DRAFT, _ACCEPT, _NEXT, _COUPLED = range(4)  # purposes of noise


@dataclass(frozen=True)
class Verdict:
    """`path` [B, N] accepted nodes in order, `n_accepted` [B] how many hold, `next_token` [B]."""

    path: Tensor
    n_accepted: Tensor
    next_token: Tensor


class Rule(Protocol):
    """How a run picks tokens."""

    lossless: ClassVar[bool]
    """Whether the output follows the target's law exactly."""

    def check(self, batch_size: int) -> None:
        """Raise a ValueError if the rule cannot serve a batch of this size."""
        ...

    def for_row(self, row: int) -> Rule:
        """The rule under which row `row` alone picks the same tokens as in its batch."""
        ...

    def accept(self, draft: Draft, logits: Tensor, lengths: Tensor) -> Verdict:
        """Judge a draft: `logits` [B, 1 + N, V] at root and nodes, `lengths` [B] at round start."""
        ...

    def pick(
        self, logits: Tensor, lengths: Tensor, depth: int | Tensor, k: int = 1, *, draw: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Pick `k` children for each of M nodes at `depth` (the root has 0); [M] int64: one a node.

        `logits` [B, M, V] are the drafter's. Returns tokens [B, M, k] and, where they are drawn,
        the law of each given its earlier siblings [B, M, k, V]; None where they are chosen: by
        rules that never draw, and where `draw` is False. One call a depth and round: the noise is
        keyed by both.
        """
        ...


def follow(draft: Draft, passing: Tensor, score: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The deepest node whose whole path passes: its `path` [B, N] from the root, and length [B].

    `passing` [B, N] bool. Among nodes of one depth the highest `score` [B, N] wins, then the first.
    """
    if not draft.n_nodes:
        return draft.tokens, torch.zeros_like(passing, dtype=torch.long).sum(dim=1)
    if draft.used is not None:
        passing = passing & draft.used
    if draft.parents is None:
        n = passing.cumprod(dim=1).sum(dim=1)  # int64 of bool
        return torch.arange(draft.n_nodes, device=n.device).expand_as(passing), n
    reached = reachable(draft.parents, passing)
    rank = torch.where(reached, depths(draft.parents), 0)
    if score is not None:
        best = rank == rank.amax(dim=1, keepdim=True)
        rank = torch.where(best & reached, score, -torch.inf)
    end = torch.where(reached.any(dim=1), rank.argmax(dim=1), -1)
    return path_to(draft.parents, end)


def end_of(path: Tensor, n: Tensor) -> Tensor:
    """Index of the last accepted token among root and nodes, [B]: 0 is the root."""
    if not path.shape[1]:
        return torch.zeros_like(n)
    last = path.gather(1, (n - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(n > 0, last + 1, 0)


def at_parents(values: Tensor, draft: Draft) -> Tensor:
    """`values` [B, 1 + N, ...] of root and nodes -> [B, N, ...], each node's parent's."""
    if draft.parents is None:
        return values[:, :-1]
    index = (draft.parents + 1).reshape(*draft.parents.shape, *[1] * (values.ndim - 2))
    return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


def take(values: Tensor, index: Tensor) -> Tensor:
    """`values` [B, M, ...] at `index` [B] -> [B, ...]."""
    return values[torch.arange(len(index), device=index.device), index]


def _accept_predictions(draft: Draft, predictions: Tensor) -> Verdict:
    """Accept the nodes that hold what was predicted [B, 1 + N] after their parent."""
    if not draft.n_nodes:
        return Verdict(draft.tokens, torch.zeros_like(predictions[:, 0]), predictions[:, 0])
    path, n = follow(draft, draft.tokens == at_parents(predictions, draft))
    end = n if draft.parents is None else end_of(path, n)
    return Verdict(path, n, predictions.gather(1, end.unsqueeze(1)).squeeze(1))


@dataclass(frozen=True)
class Greedy:
    """Follow the target's argmax, the lowest id on a tie."""

    lossless: ClassVar[bool] = True

    def check(self, batch_size: int) -> None:
        """Any batch will do."""

    def for_row(self, row: int) -> Greedy:
        return self

    def scores(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """What the next token maximises, [B, V], from the logits [B, V] after rows of `lengths`."""
        return logits

    def accept(self, draft: Draft, logits: Tensor, lengths: Tensor) -> Verdict:
        return _accept_predictions(draft, logits.argmax(dim=-1))

    def pick(
        self, logits: Tensor, lengths: Tensor, depth: int | Tensor, k: int = 1, *, draw: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return _top(logits, k), None


def _top(scores: Tensor, k: int) -> Tensor:
    return scores.argmax(dim=-1, keepdim=True) if k == 1 else scores.topk(k, dim=-1).indices


def log_law(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> Tensor:
    """Log-probabilities after temperature, then top-k, then nucleus, then min-p truncation.

    In float32 or better. Tokens tied with the k-th are kept; the nucleus (arXiv:1904.09751) is the
    smallest set of likeliest tokens whose mass reaches `top_p`; min-p (arXiv:2407.01082) keeps
    tokens of at least `min_p` times the likeliest's probability.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        floor = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        cut = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    log_probs = logits.log_softmax(dim=-1)
    if min_p > 0.0:
        floor = log_probs.amax(dim=-1, keepdim=True) + torch.tensor(min_p).log().item()
        log_probs = log_probs.masked_fill(log_probs < floor, -torch.inf).log_softmax(dim=-1)
    return log_probs


def _check_sampling(temperature: float, top_k: int | None, top_p: float, min_p: float) -> None:
    if not 0.0 < temperature < float("inf"):
        raise ValueError(
            f"temperature: expected a positive number (Greedy() is the limit 0), got {temperature}"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1 or None, got {top_k}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: expected a share in (0, 1], got {top_p}")
    if not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p: expected a share in [0, 1], got {min_p}")


def _check_seed(seed: int | Sequence[int], batch_size: int) -> None:
    if not isinstance(seed, int) and len(seed) != batch_size:
        raise ValueError(f"seed: expected one int, or one per row ({batch_size}), got {len(seed)}")
    rows = [_row_seed(seed, row) for row in range(batch_size)]
    if not all(isinstance(row, int) and -(2**63) <= row < 2**63 for row in rows):
        raise ValueError(f"seed: expected ints of 64 bits, got {seed}")


def _row_seed(seed: int | Sequence[int], row: int) -> int:
    return seed + row if isinstance(seed, int) else seed[row]


def _seeds(seed: int | Sequence[int], like: Tensor) -> Tensor:
    """One seed per row [B]; row b of a single seed draws from seed + b."""
    rows = [_row_seed(seed, b) for b in range(len(like))]
    return torch.tensor(rows, device=like.device)


def _node_depths(draft: Draft) -> Tensor:
    """Depth [B or 1, 1 + N] of root and nodes."""
    if draft.parents is None:
        return torch.arange(1 + draft.n_nodes, device=draft.tokens.device).unsqueeze(0)
    below = depths(draft.parents)
    return torch.cat([below.new_zeros(len(below), 1), below], dim=1)


@dataclass(frozen=True)
class Coupled:
    """Sample the token at index t as argmax(log p + Gumbel noise keyed by (seed, t)).

    Drafters perturb their q with the same noise, so drafts agree as often as the laws allow, and
    plain decoding with the same seed gives the same tokens whatever the drafter: losslessness at
    temperature > 0 as an equality (Daliri, Musco and Suresh, arXiv:2408.07978).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] = 0
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def check(self, batch_size: int) -> None:
        _check_seed(self.seed, batch_size)

    def for_row(self, row: int) -> Coupled:
        return replace(self, seed=_row_seed(self.seed, row))

    def scores(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """What the next token maximises, [B, V], from the logits [B, V] after rows of `lengths`."""
        log_p = self.log_probs(logits)
        return log_p + self._noise(log_p, lengths, 0).squeeze(1)

    def accept(self, draft: Draft, logits: Tensor, lengths: Tensor) -> Verdict:
        scores = self.log_probs(logits)
        depth = _node_depths(draft)
        levels = torch.arange(int(depth.max()) + 1, device=depth.device)
        noise = self._noise(scores, lengths, levels)  # [B, depths, V]
        if draft.parents is not None:
            noise = noise.gather(1, depth.unsqueeze(-1).expand(-1, -1, noise.shape[-1]))
        return _accept_predictions(draft, (scores + noise).argmax(dim=-1))

    def pick(
        self, logits: Tensor, lengths: Tensor, depth: int | Tensor, k: int = 1, *, draw: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        scores = self.log_probs(logits)
        return _top(scores + self._noise(scores, lengths, depth), k), None

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-law of `logits` [..., V] after temperature and truncation."""
        return log_law(logits, self.temperature, self.top_k, self.top_p, self.min_p)

    def _noise(self, scores: Tensor, lengths: Tensor, depth: int | Tensor) -> Tensor:
        """Noise of the tokens at index lengths + depth: [B, 1, V], or [B, M, V] of depths [M]."""
        index = lengths.unsqueeze(1) + depth
        keys = key(_seeds(self.seed, lengths).unsqueeze(1), index, _COUPLED)
        return gumbel(keys, scores.shape[-1]).to(scores.dtype)


def accept_or_residual(r: Tensor, q: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """One speculative test: the probability to accept, and the law if the token is refused.

    `r` [..., V] the law still owed, `q` [..., V] the law `tokens` [...] were drawn from (None: they
    were chosen, a one-hot q). Accept with min(1, r(x)/q(x)), else owe norm(max(r - q, 0)), which
    keeps r where it rounds to zero. Theorem 3.5 of arXiv:2211.17192; for several children in turn,
    arXiv:2305.09781.
    """
    x = tokens.unsqueeze(-1)
    wanted = r.gather(-1, x).squeeze(-1)
    if q is None:
        accept, left = wanted, r.scatter(-1, x, 0.0)
    else:
        q = q.to(r.dtype)
        accept = (wanted / q.gather(-1, x).squeeze(-1)).clamp(max=1.0)
        left = (r - q).clamp(min=0.0)
    total = left.sum(dim=-1, keepdim=True)
    return accept, torch.where(total > 0, left / total, r)


def rejection_laws(draft: Draft, p: Tensor) -> tuple[Tensor, Tensor]:
    """The exact law of a round under `Rejection`, given its draft.

    `p` [B, 1 + N, V]: the target's law after the root and every node. Returns `accept` [B, N], the
    probability that a node passes once its earlier siblings were refused, and `owed` [B, 1 + N, V],
    the law of the next token where the walk ends. Children are tested in order, each against what
    its refused siblings left; a test never depends on what happened elsewhere in the tree.
    """
    if not draft.n_nodes:
        return p.new_zeros(len(p), 0), p
    used = draft.mask()
    if draft.parents is None:
        accept, left = accept_or_residual(p[:, :-1], draft.probs, draft.tokens)
        left = torch.where(used.unsqueeze(-1), left, p[:, :-1])
        return accept * used, torch.cat([left, p[:, -1:]], dim=1)
    owed, accept = p.clone(), p.new_zeros(draft.tokens.shape)
    before = earlier_siblings(draft.parents) & used.unsqueeze(1)
    rank = torch.where(used, before.sum(dim=-1), -1)  # how many siblings are tested first
    for turn in range(int(rank.max()) + 1):
        rows, nodes = (rank == turn).nonzero(as_tuple=True)
        above = draft.parents[rows, nodes] + 1
        q = None if draft.probs is None else draft.probs[rows, nodes]
        passes, left = accept_or_residual(owed[rows, above], q, draft.tokens[rows, nodes])
        accept[rows, nodes] = passes
        owed[rows, above] = left
    return accept, owed


@dataclass(frozen=True)
class Rejection:
    """Modified rejection sampling: the output follows the target's law exactly.

    Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318) for chains, SpecInfer
    (arXiv:2305.09781) for several children, drawn with or without replacement, or chosen.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] = 0
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def check(self, batch_size: int) -> None:
        _check_seed(self.seed, batch_size)

    def for_row(self, row: int) -> Rejection:
        return replace(self, seed=_row_seed(self.seed, row))

    def accept(self, draft: Draft, logits: Tensor, lengths: Tensor) -> Verdict:
        accept, owed = rejection_laws(draft, self.log_probs(logits).exp())
        row = key(_seeds(self.seed, lengths), lengths)
        node = torch.arange(draft.n_nodes, device=lengths.device)
        passing = uniform(key(row.unsqueeze(1), _ACCEPT, node)) < accept
        if (
            draft.parents is not None
        ):  # the first sibling that passes is taken, the rest are untried
            before = earlier_siblings(draft.parents) & passing.unsqueeze(1)
            passing = passing & ~before.any(dim=-1)
        path, n = follow(draft, passing)
        scores = take(owed, end_of(path, n)).log()
        next_token = (scores + gumbel(key(row, _NEXT), scores.shape[-1])).argmax(dim=-1)
        return Verdict(path, n, next_token)

    def pick(
        self, logits: Tensor, lengths: Tensor, depth: int | Tensor, k: int = 1, *, draw: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Draw children without replacement: the k largest of log q + Gumbel noise, in order."""
        if not draw:
            return _top(logits, k), None
        log_q = self.log_probs(logits)
        node = torch.arange(logits.shape[1], device=logits.device)
        keys = key(
            _seeds(self.seed, lengths).unsqueeze(1), lengths.unsqueeze(1), _DRAFT, depth, node
        )
        tokens = _top(log_q + gumbel(keys, log_q.shape[-1]).to(log_q.dtype), k)
        return tokens, without_replacement(log_q.exp(), tokens)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-law of `logits` [..., V] after temperature and truncation."""
        return log_law(logits, self.temperature, self.top_k, self.top_p, self.min_p)


def without_replacement(q: Tensor, tokens: Tensor) -> Tensor:
    """The law of each of `tokens` [..., k] given those before it: [..., k, V], from `q` [..., V].

    A token drawn after q has run out is a chosen one: its law is one-hot.
    """
    laws = []
    for i in range(tokens.shape[-1]):
        total = q.sum(dim=-1, keepdim=True)
        one_hot = torch.zeros_like(q).scatter(-1, tokens[..., i : i + 1], 1.0)
        drawn = q.gather(-1, tokens[..., i : i + 1]) > 0
        laws.append(torch.where(drawn, q / total.clamp(min=torch.finfo(q.dtype).tiny), one_hot))
        q = q.scatter(-1, tokens[..., i : i + 1], 0.0)
    return torch.stack(laws, dim=-2)


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (arXiv:2401.10774, section 2.3.1): fast, and *not lossless*.

    A node passes where p(x) > min(epsilon, delta exp(-H(p))). Among the paths that pass the
    longest is kept, then the likeliest; the next token is drawn from the tokens that would pass.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    temperature: float = 0.7
    seed: int | Sequence[int] = 0
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_sampling(self.temperature, None, 1.0, 0.0)
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name}: expected a share in (0, 1), got {value}")

    def check(self, batch_size: int) -> None:
        _check_seed(self.seed, batch_size)

    def for_row(self, row: int) -> Typical:
        return replace(self, seed=_row_seed(self.seed, row))

    def accept(self, draft: Draft, logits: Tensor, lengths: Tensor) -> Verdict:
        log_p = log_law(logits, self.temperature, None, 1.0, 0.0)  # [B, 1 + N, V]
        entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(dim=-1, keepdim=True)
        typical = log_p.exp() > (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        token = draft.tokens.unsqueeze(-1)
        passing = at_parents(typical, draft).gather(-1, token).squeeze(-1)
        likelihood = None
        if draft.parents is not None:
            likelihood = _along_path(at_parents(log_p, draft).gather(-1, token).squeeze(-1), draft)
        path, n = follow(draft, passing, likelihood)
        end = end_of(path, n)
        scores = take(log_p, end).masked_fill(~take(typical, end), -torch.inf)
        noise = gumbel(key(_seeds(self.seed, lengths), lengths, _NEXT), scores.shape[-1])
        return Verdict(path, n, (scores + noise).argmax(dim=-1))

    def pick(
        self, logits: Tensor, lengths: Tensor, depth: int | Tensor, k: int = 1, *, draw: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return _top(logits, k), None


def _along_path(values: Tensor, draft: Draft) -> Tensor:
    """Sum of `values` [B, N] over each node and its ancestors."""
    table = ancestors(draft.tree())
    return torch.where(table, values.unsqueeze(1), 0.0).sum(dim=-1)
