"""What the tests of the core build on: scripted drafters, watched models, contexts, chi-square."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from specdec.accept import Greedy, Rule
from specdec.draft import Draft
from specdec.protocol import Cache, Context, Model, Output

THE, CAT, DOG, SAT, IS, RAN, ON, TO = range(8)
EXAMPLE_TOKENS = [CAT, DOG, SAT, IS, RAN, ON, TO]
"""Tokens of the running example of `specdec.draft`; its parents are in `tests.helpers`."""

FALSE_ALARM = 1e-8
"""Level of every statistical test here; no test takes more than 60 of them (odds below 1e-6)."""


def law(*weights: float) -> Tensor:
    """A distribution [V] in float64."""
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def random_laws(seed: int, *shape: int, zeros: bool = False) -> Tensor:
    """Distributions [..., V] in float64; with `zeros`, a third of their entries are 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = -torch.rand(shape, generator=generator, dtype=torch.float64).log()
    if zeros:
        dropped = torch.rand(shape, generator=generator) < 1 / 3
        kept = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
        weights = weights.masked_fill(dropped.scatter(-1, kept, False), 0.0)
    return weights / weights.sum(-1, keepdim=True)


def chi_square(draws: Tensor, law: Tensor) -> float:
    """p-value of whole numbers `draws` in 0..K-1 under `law` [K]; 0 for an impossible draw."""
    counts = torch.bincount(draws, minlength=len(law))
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    expected = law[possible] * len(draws)
    assert expected.min() >= 20, "too few draws for the chi-square law to hold"
    return float(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


@dataclass(frozen=True)
class Scripted:
    """A drafter without state: `script` turns a context into a draft."""

    script: Callable[[Context], Draft]
    taps: tuple[int, ...] = ()

    def begin(self, target: Model, batch_size: int, max_length: int) -> "Scripted":
        return self

    def propose(self, context: Context) -> Draft:
        return self.script(context)


def oracle(
    rows: Sequence[Tensor],
    n: int = 4,
    n_right: Callable[[int], int] = lambda length: 99,
    *,
    tree: bool = False,
    vocab_size: int = 13,
) -> Callable[[Context], Draft]:
    """A script that drafts the next `n` tokens of the known `rows`, right down to a depth.

    `n_right` gives that depth from the row's length. A tree has a wrong sibling before every node.
    Nodes beyond the end of a row are unused.
    """

    def script(context: Context) -> Draft:
        lengths = context.lengths.tolist()
        longest = max(map(len, rows)) + n
        known = torch.stack([torch.cat([r, r.new_zeros(longest - len(r))]) for r in rows])
        index = torch.tensor(lengths).unsqueeze(1) + torch.arange(n)
        tokens = known.gather(1, index.clamp(max=longest - 1))
        right = torch.arange(n) < torch.tensor([[n_right(length)] for length in lengths])
        other = (tokens + 1) % vocab_size
        tokens = torch.where(right, tokens, other)
        used = index < torch.tensor([[len(r)] for r in rows])
        if not tree:
            return Draft(tokens, used=used)
        parents = torch.tensor([2 * (i // 2) - 1 for i in range(2 * n)]).expand(len(rows), -1)
        both = torch.stack([(tokens + 1) % vocab_size, tokens], dim=2).flatten(1)
        return Draft(both, parents, used=used.repeat_interleave(2, dim=1))

    return script


class Watched:
    """A model that notes its calls, (tokens a row, logits wanted), and the caches it makes.

    `after(n, output)` may meddle with what the n-th call returns.
    """

    def __init__(self, model: Any, after: Callable[[int, Output], None] | None = None) -> None:
        self.model, self.after = model, after
        self.calls: list[tuple[int, bool]] = []
        self.caches: list[Cache] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def new_cache(self, batch_size: int, max_length: int) -> Cache:
        self.caches.append(self.model.new_cache(batch_size, max_length))
        return self.caches[-1]

    def __call__(self, tokens: Tensor, cache: Cache | None = None, **options: Any) -> Output:
        self.calls.append((tokens.shape[1], options.get("logits", True)))
        output = self.model(tokens, cache, **options)
        if self.after is not None:
            self.after(len(self.calls), output)
        return output


def context_of(
    rows: Sequence[Sequence[int]],
    *,
    depth_left: Sequence[int] | None = None,
    live: Sequence[bool] | None = None,
    rule: Rule | None = None,
) -> Context:
    """The context of `rows` so far, for drafters that read tokens only."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    left = list(depth_left or [99] * len(rows))
    return Context(
        tokens=tokens,
        lengths=lengths,
        new_tokens=tokens[:, 1:],
        n_new=lengths - 1,
        hidden={},
        path=tokens[:, :0],
        n_accepted=torch.zeros_like(lengths),
        live=torch.tensor(live or [True] * len(rows)),
        depth_left=torch.tensor(left),
        max_depth=max(left),
        cache=None,  # type: ignore[arg-type]
        rule=Greedy() if rule is None else rule,
    )
