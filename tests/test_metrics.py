"""Metrics of rounds written down by hand."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.accept import Coupled
from specdec.draft import Draft
from specdec.generate import Round, Seconds, generate
from specdec.metrics import DepthAcceptance, Metrics, measure
from tests.builders import EXAMPLE_TOKENS, Scripted, oracle
from tests.helpers import EXAMPLE_PARENTS, tiny_transformer


def a_round(
    draft: Draft,
    paths: Sequence[Sequence[int]],
    n_new: Sequence[int],
    *,
    live: Sequence[bool] | None = None,
    cut: Sequence[bool] | None = None,
) -> Round:
    """A round that accepted `paths` and emitted `n_new` tokens in every row."""
    width = draft.n_nodes
    path: Tensor = torch.tensor([[*p, *[0] * (width - len(p))] for p in paths], dtype=torch.long)
    rows = range(len(paths))
    return Round(
        draft=draft,
        path=path.view(len(paths), width),
        n_accepted=torch.tensor([len(p) for p in paths]),
        new_tokens=[torch.zeros(n, dtype=torch.long) for n in n_new],
        live=torch.tensor(live or [True for _ in rows]),
        cut=torch.tensor(cut or [False for _ in rows]),
        seconds=Seconds(0.0, 0.0, 0.0, 0.0, 0.0),
    )


def chain(n: int, n_rows: int = 1, used: list[list[bool]] | None = None) -> Draft:
    return Draft(
        torch.zeros(n_rows, n, dtype=torch.long), used=None if used is None else torch.tensor(used)
    )


def example(used: list[bool] | None = None) -> Draft:
    return Draft(
        torch.tensor([EXAMPLE_TOKENS]),
        torch.tensor([EXAMPLE_PARENTS]),
        used=None if used is None else torch.tensor([used]),
    )


def test_chain_by_hand() -> None:
    """A cut round that is judged, a full acceptance that counts as a refusal, K in place of K + 1.

    Accepted 3 of 3, 1 of 3, 0 of 3, and 2 of 3 when the budget ran out.
    """
    rounds = [
        a_round(chain(3), [[0, 1, 2]], [4]),
        a_round(chain(3), [[0]], [2]),
        a_round(chain(3), [[]], [1]),
        a_round(chain(3), [[0, 1]], [2], cut=[True]),
    ]
    assert measure(rounds) == Metrics(
        n_new_tokens=9,
        n_target_passes=4,
        n_row_passes=4,
        tau=9 / 4,
        tau_rows=9 / 4,
        acceptance_rate=4 / 6,  # 3 + 1 + 0 accepted; refused at depths 2 and 1
        by_depth=(
            DepthAcceptance(
                depth=1, conditional=2 / 3, marginal=2 / 3, n_tested=3, by_rank=(2 / 3,)
            ),
            DepthAcceptance(
                depth=2, conditional=1 / 2, marginal=1 / 3, n_tested=2, by_rank=(1 / 2,)
            ),
            DepthAcceptance(depth=3, conditional=1.0, marginal=1 / 3, n_tested=1, by_rank=(1.0,)),
        ),
        n_draft_nodes=12,
    )


def test_tree_by_hand() -> None:
    """A leaf taken for a refusal because other nodes are deeper; depth or rank counted by node.

    the-cat-sat-on and the-cat-is end at leaves, the-dog-ran could have gone on, the-cat too.
    """
    rounds = [a_round(example(), [path], [len(path) + 1]) for path in ([0, 2, 5], [0, 3])]
    rounds += [a_round(example(), [path], [len(path) + 1]) for path in ([1, 4], [0], [])]
    metrics = measure(rounds)
    assert metrics.acceptance_rate == 8 / 11
    assert metrics.by_depth == (
        DepthAcceptance(1, 4 / 5, 4 / 5, 5, (3 / 5, 1 / 5)),
        DepthAcceptance(
            2, 3 / 4, 3 / 5, 4, (2 / 4, 1 / 4)
        ),  # ran is a first child, is a second one
        DepthAcceptance(
            3, 1 / 2, 1 / 5, 2, (1 / 2,)
        ),  # on; to was refused; below `is` there was none
    )
    assert metrics.n_draft_nodes == 35


def test_unused_nodes_are_not_refused() -> None:
    """A masked child that counts as tested, or as drafted."""
    without_to = [True] * 6 + [False]
    metrics = measure([a_round(example(without_to), [[1, 4]], [3])])
    assert metrics.acceptance_rate == 1.0
    assert metrics.n_draft_nodes == 6
    used = [[True, False], [False, False]]
    metrics = measure([a_round(chain(2, 2, used), [[0], []], [2, 1])])
    assert metrics.acceptance_rate == 1.0
    assert metrics.by_depth == (DepthAcceptance(1, 1.0, 1 / 2, 1, (1.0,)),)
    assert metrics.n_draft_nodes == 1


def test_tau_pooled_and_by_row() -> None:
    """The mean of ratios for the ratio of sums; rows that are done and still count.

    Row 0 emits 4 tokens in one round; row 1 emits 1, 1 and 1.
    """
    rounds = [
        a_round(chain(3, 2), [[0, 1, 2], []], [4, 1]),
        a_round(chain(3, 2), [[], []], [0, 1], live=[False, True]),
        a_round(chain(3, 2), [[], []], [0, 1], live=[False, True]),
    ]
    metrics = measure(rounds)
    assert metrics.tau == 7 / 4
    assert metrics.tau_rows == (4 / 1 + 3 / 3) / 2
    assert (metrics.n_target_passes, metrics.n_row_passes) == (3, 4)
    assert metrics.acceptance_rate == 3 / 6
    assert metrics.n_draft_nodes == 12


def test_plain_decoding() -> None:
    """0/0 where nothing was drafted."""
    rounds = [a_round(Draft.empty(2), [[], []], [1, 1]) for _ in range(3)]
    assert measure(rounds) == Metrics(6, 3, 6, 1.0, 1.0, 0.0, (), 0)
    assert measure() == measure([]) == Metrics(0, 0, 0, 0.0, 0.0, 0.0, (), 0)


@pytest.mark.parametrize(
    "sizes",
    [(1,), (2,), (1, 1), (1, 2), (2, 1, 3)],
)
def test_rows_of_several_runs(sizes) -> None:
    """Rows of one run taken for those of another: row b of run i emits b + i + 1 tokens a round."""
    runs = []
    for i, size in enumerate(sizes):
        new = [b + i + 1 for b in range(size)]
        paths = [range(n - 1) for n in new]
        first = a_round(chain(5, size), paths, new)
        runs.append([first, *[a_round(chain(5, size), paths, new) for _ in range(i + 1)]])
    own = [b + i + 1 for i, size in enumerate(sizes) for b in range(size)]
    metrics = measure(*runs)
    assert metrics.tau_rows == sum(own) / len(own)
    passes = [len(run) for run in runs]
    assert metrics.n_target_passes == sum(passes)
    emitted = sum(n * (b + i + 1) for i, n in enumerate(passes) for b in range(sizes[i]))
    assert metrics.n_new_tokens == emitted
    assert metrics.tau == emitted / sum(n * size for n, size in zip(passes, sizes, strict=True))


@pytest.mark.parametrize("tree", [False, True])
def test_metrics_of_a_run(tree) -> None:
    """Rounds whose fields do not mean what `measure` reads in them.

    The oracle is right for two of three levels: three rounds of 3 tokens. In the last, the budget
    leaves room for two levels.
    """
    target, rule = tiny_transformer(tie_word_embeddings=False), Coupled(seed=2)
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    plain = generate(target, prompts, max_new_tokens=12, rule=rule)
    drafter = Scripted(oracle(plain.sequences, 3, lambda length: 2, tree=tree))
    generation = generate(target, prompts, drafter, max_new_tokens=9, rule=rule)
    metrics = generation.metrics
    assert metrics.n_new_tokens == 18
    assert metrics.n_target_passes == 3
    assert metrics.tau == metrics.tau_rows == 3.0
    assert [depth.n_tested for depth in metrics.by_depth] == [6, 6, 4]
    assert [depth.marginal for depth in metrics.by_depth] == [1.0, 1.0, 0.0]
    assert metrics.acceptance_rate == 12 / 16
    assert metrics.n_draft_nodes == 16 * (2 if tree else 1)
