"""DDTree: the tree in a block of independent laws (Ringel and Romano, arXiv:2604.12989).

A block drafter (DFlash, parallel heads) says one law for each position below the root, whatever is
chosen at the others. So a node is as likely to be accepted as the product of the probabilities on
its path says, a tree's expected accepted length is the sum over its nodes, and the best tree of n
nodes is the n most valuable paths: `best_first` of `specdec.trees` over a small table, each round.
The block costs one pass; the tree only costs the target's pass more nodes::

    position 1: cat 0.6, dog 0.2        the ── cat 0.6 ─┬─ sat 0.30     best first: cat, cat sat,
    position 2: sat 0.5, is 0.4             │           └─ is  0.24     cat is, dog, dog sat, dog is
                                            └─ dog 0.2 ──── sat 0.10

A larger tree is never accepted less deep, so its size has to come from what a pass costs. `Budget`
takes the size that emits most tokens a second (CaDDTree, arXiv:2606.01813), and drafts a
chain where that pays more. Where we differ: costs are a measured table, convex or not, so that
every size is tried; the chain competes; ragged batches.

Nodes are *chosen*, not drawn: under `Rejection` a one-hot q, lossless whatever the tree is (with
`draw=False`). How many there are and how they hang together depends on the drafter's laws alone,
never on a drawn token, and in every row on its own laws alone: a row's draft does not depend on
who shares its batch, also with a budget. Confidences are taken at their word: an over-confident
drafter gets trees too deep (with a budget, also too large), an under-confident one too wide. One
that has learnt the target's law is under-confident in greedy decoding: the target's likeliest
token is drafted more often than the law has it. `DDTree(confidence_temperature=)` mends that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

import torch
from torch import Tensor

from ..draft import Draft
from ..protocol import Context
from ..trees import Node, best_first


def candidates(
    context: Context, logits: Tensor, n_ranks: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What each position may hold, the likeliest first, and how sure the drafter is of each rank.

    `logits` [B, K, V] the drafter's at positions 1..K below the root. Returns tokens [B, K, R]
    int64 and probabilities [B, K, R], float32 or better, R = min(n_ranks, V).

    The tokens are the rule's pick, so that under `Coupled` they are those its noise favours. Rank
    r is worth the r-th largest probability, as in `eagle_tree`: for the likeliest tokens their own.
    Probabilities are those at `temperature`; see `DDTree`.
    """
    n_ranks = min(n_ranks, logits.shape[-1])
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    probs = (exact.topk(n_ranks).values - exact.logsumexp(-1, keepdim=True)).exp()
    depths = torch.arange(logits.shape[1], device=logits.device)
    return context.rule.pick(logits, context.lengths, depths, n_ranks, draw=False)[0], probs


def block_tree(
    tokens: Tensor, probs: Tensor, n_nodes: int, deepest: Tensor, budget: Budget | None = None
) -> Draft:
    """The `n_nodes` most valuable nodes of every row, or as many of them as its `budget` says.

    Nodes come best first, so that a smaller tree is a prefix of a larger one; rows with fewer nodes
    than the widest end in unused ones. The draft is a chain (`parents` None) if every row's is.

    Args:
        tokens: [B, K, R] int64, the candidates of every position by rank; see `candidates`. With
            R < n_nodes a tree may miss siblings that would have been worth a place.
        probs: [B, K, R] floats, what each rank is worth, not rising with the rank.
        n_nodes: most nodes of a row, root excluded.
        deepest: [B] int64: row b has no node deeper than that, and spends its nodes above; 0: none.
        budget: what passes cost; each row then has the shape and size that pay best in a batch of
            its own. None: a tree of `n_nodes`.

    A node that is worth 0 is left out. Reads the host once: a table of B * K * R numbers.
    Raises ValueError for `n_nodes` below 1, or tensors whose shapes do not match.
    """
    if n_nodes < 1:
        raise ValueError(f"n_nodes: expected at least 1, got {n_nodes}")
    if tokens.ndim != 3 or probs.shape != tokens.shape or deepest.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens, probs, deepest: expected shapes [B, K, R], [B, K, R] and [B], got "
            f"{list(tokens.shape)}, {list(probs.shape)} and {list(deepest.shape)}"
        )
    _, n_depths, n_ranks = tokens.shape
    depths = torch.arange(1, n_depths + 1, device=probs.device)
    within = (depths <= deepest.unsqueeze(1)).unsqueeze(2)  # [B, K, 1]
    grow = best_nodes if budget is None else budget.best_nodes
    rows = [grow(table, n_nodes) for table in probs.double().where(within, 0.0).tolist()]

    width = max(map(len, rows), default=0)
    parents, places = [], []
    for nodes in rows:
        unused = range(len(nodes), width)
        parents.append([node.parent for node in nodes] + [i - 1 for i in unused])
        places.append(
            [(len(node.path) - 1) * n_ranks + node.path[-1] for node in nodes]
            + [-1 for _ in unused]
        )
    is_chain = all(row == list(range(-1, width - 1)) for row in parents)
    shape = torch.tensor([parents, places], dtype=torch.long, device=tokens.device)  # [2, B, N]
    drafted = tokens.flatten(1).gather(1, shape[1].clamp(min=0))
    return Draft(drafted, None if is_chain else shape[0], None, shape[1] >= 0)


def best_nodes(table: Sequence[Sequence[float]], n_nodes: int) -> list[Node]:
    """The `n_nodes` most valuable nodes of a table of K rows, best first; fewer if the rest is 0.

    See `specdec.trees.best_first`.
    """
    return list(takewhile(lambda node: node.value > 0, islice(best_first(table), n_nodes)))


@dataclass(frozen=True)
class VerifyCosts:
    """Measured seconds (or any unit) of a target pass over a few sizes: root + nodes, tokens.

    Linear between the sizes, and beyond them as between the nearest two. As
    `specdec.benchmark.verification_seconds` measures it: `VerifyCosts.of({1: 0.8, 33: 2.4})`.
    Raises ValueError for less than two sizes, sizes that do not rise from 1 or more, or seconds
    that are not positive.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or self.sizes[0] < 1 or any(a >= b for a, b in pairwise(self.sizes)):
            raise ValueError(f"sizes: expected two or more, rising from >= 1, got {self.sizes}")
        if len(self.seconds) != len(self.sizes) or not all(
            0 < s < float("inf") for s in self.seconds
        ):
            raise ValueError(
                f"seconds: expected {len(self.sizes)} positive numbers, got {self.seconds}"
            )

    @staticmethod
    def of(table: dict[int, float]) -> VerifyCosts:
        """From size -> seconds."""
        sizes = tuple(sorted(table))
        return VerifyCosts(sizes, tuple(table[size] for size in sizes))

    def plus(self, seconds: float) -> VerifyCosts:
        """The same passes, each this much longer."""
        return VerifyCosts(self.sizes, tuple(s + seconds for s in self.seconds))

    def at(self, n_tokens: int) -> float:
        """Seconds of a pass over `n_tokens`, root included."""
        i = min(max(bisect_left(self.sizes, n_tokens), 1), len(self.sizes) - 1)
        low, high = self.sizes[i - 1], self.sizes[i]
        share = (n_tokens - low) / (high - low)
        return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])


def best_n_nodes(
    values: Sequence[float], verify: Callable[[int], float], draft_seconds: float
) -> tuple[int, float]:
    """How many nodes emit most tokens a second, and how many tokens a second that is.

    With the n first nodes a round emits 1 + values[0] + ... + values[n - 1] tokens, the target's
    own and the drafts that are accepted, in draft_seconds + verify(n + 1); every n in
    0..len(values) is tried, and of equals the smallest wins. The rate of arXiv:2606.01813.

    Args:
        values: the probability of every node to be accepted, in the order in which they are added.
        verify: seconds of a pass over so many tokens, root included; in any unit.
        draft_seconds: what a round takes whatever its size: the draft, and the loop's own time.
    """
    tokens, best, most = 1.0, 0, 1.0 / (draft_seconds + verify(1))
    for n, value in enumerate(values, 1):
        tokens += value
        rate = tokens / (draft_seconds + verify(n + 1))
        if rate > most:
            best, most = n, rate
    return best, most


@dataclass(frozen=True)
class Budget:
    """What a round of one row costs, as chain and as tree: settles the draft's shape and size.

    Args:
        chain: passes over a chain.
        tree: passes over a tree of that many tokens: with its mask, and its walk when accepting;
            measured, or `chain.plus(seconds)`.
        draft_seconds: the rest of a round, in the unit of the passes.

    The rate is a round's own. It leaves out that what the draft has cost is spent either way, and
    that a batch's pass is as wide as its widest row: a row cannot see its neighbours and still
    draft as it does alone.
    """

    chain: VerifyCosts
    tree: VerifyCosts
    draft_seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.draft_seconds < float("inf"):
            raise ValueError(f"draft_seconds: expected a number >= 0, got {self.draft_seconds}")

    def best_nodes(self, table: Sequence[Sequence[float]], n_nodes: int) -> list[Node]:
        """The chain or tree of at most `n_nodes` nodes that pays best; the chain if both do."""
        chain = best_nodes([ranks[:1] for ranks in table], n_nodes)
        tree = best_nodes(table, n_nodes)
        n_chain, chain_rate = self._size(chain, self.chain)
        n_tree, tree_rate = self._size(tree, self.tree)
        return tree[:n_tree] if tree_rate > chain_rate else chain[:n_chain]

    def _size(self, nodes: list[Node], costs: VerifyCosts) -> tuple[int, float]:
        return best_n_nodes([node.value for node in nodes], costs.at, self.draft_seconds)
