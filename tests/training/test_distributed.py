"""Two processes under torchrun train as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from specdec.training.distributed import ALONE, Ranks, joined
from specdec.training.fit import fit
from tests.training.two_ranks import N_STEPS, curve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes noted: one torchrun for all tests."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.training.two_ranks", str(out)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600,  # a busy machine; seconds on a free one
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)], done


@pytest.fixture(scope="module")
def one():
    """Losses and history of one process, and its weights [P]."""
    _, told, history, weights = curve(ALONE)
    return told, history, torch.cat([weight.flatten() for weight in weights])


def distance(noted: list[float], expected: list[float]) -> float:
    assert len(noted) == len(expected) == N_STEPS
    return max(abs(a - b) for a, b in zip(noted, expected, strict=True))


def test_two_processes_give_the_loss_curve_and_weights_of_one(ranks, one):
    """Catches sums for means, and a parameter that one rank does not use in a step."""
    losses, history, weights = one
    for found in ranks[0]:
        assert [step for step, _ in found["averaged"]["history"]] == [7, 14, 20]
        for (_, value), (_, alone) in zip(found["averaged"]["history"], history, strict=True):
            assert value == pytest.approx(alone, abs=1e-9)
        got = torch.tensor(found["averaged"]["weights"], dtype=torch.float64)
        torch.testing.assert_close(got, weights, rtol=0, atol=1e-9)
    first, second = (found["averaged"] for found in ranks[0])
    assert distance(first["told"], losses) < 1e-9
    means = [(a + b) / 2 for a, b in zip(first["own"], second["own"], strict=True)]
    assert distance(means, losses) < 1e-9
    assert distance(first["own"], second["own"]) > 0.1  # they did see different rows
    assert first["weights"] == second["weights"]  # to the bit: the ranks never drift apart


@pytest.mark.parametrize("wrong", ["not averaged", "same slice"])
def test_the_comparison_has_power(ranks, one, wrong):
    """Negative controls: without averaging, or with the same rows everywhere, the curve differs."""
    first, second = (found[wrong] for found in ranks[0])
    means = [(a + b) / 2 for a, b in zip(first["own"], second["own"], strict=True)]
    assert distance(means, one[0]) > 1e-3


def test_all_ranks_start_from_the_weights_of_the_first(ranks):
    """Catches ranks that drew other weights and average their gradients all the same."""
    for found in ranks[0]:
        assert found["other weights"]["weights"] == found["averaged"]["weights"]


def test_two_processes_go_on_where_they_were_broken_off(ranks):
    """Catches an optimizer state, history or best that only the first rank reads back."""
    for found in ranks[0]:
        assert len(found["broken off"]["own"]) == 15
        assert len(found["resumed"]["own"]) == N_STEPS - 14
        assert found["resumed"]["history"] == found["averaged"]["history"]
        assert found["resumed"]["weights"] == found["averaged"]["weights"]


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(ranks):
    """Catches a rank that waits for ever for one that has stopped."""
    for found in ranks[0]:
        assert found["nan"] == "loss is nan at step 0"
        assert found["inf"] == "loss is inf at step 0"


def test_ranks_that_were_not_given_to_fit_are_missed(ranks):
    """Catches a forgotten `ranks=`: every process would train by itself on its own slice."""
    for found in ranks[0]:
        assert found["forgotten"].startswith("ranks: expected the 2 that run")
    module = nn.Linear(1, 1)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="ranks: expected the 1 that run"):
        fit(module, lambda step: module.weight.sum(), [sgd], 1, ranks=Ranks(0, 2))


def test_ranks_share_the_work_of_shards(ranks):
    """Catches shards made twice, or read before the other rank has made its own."""
    first, second = ranks[0]
    assert (first["made"], second["made"]) == ([0, 2, 4], [1, 3])
    assert first["there"] == second["there"] == 5


def test_the_first_rank_alone_speaks(ranks):
    """Catches two bars over each other, evaluations told twice, and losses told by all."""
    n_finished = 5  # fits that came to the last of their steps
    assert ranks[1].stdout.count("step 20: ") == n_finished
    assert ranks[0][1]["averaged"]["told"] == []


def test_shares_are_dealt_out_in_order():
    """Catches rows that no rank gets, or two; along the second dimension, too."""
    rows = torch.arange(24).view(6, 4)
    for dim in (0, 1):
        parts = [Ranks(rank, 2).share(rows, dim) for rank in (0, 1)]
        assert torch.equal(torch.cat(parts, dim), rows)
        assert parts[0].shape[dim] == rows.shape[dim] // 2
    assert torch.equal(ALONE.share(rows), rows)
    with pytest.raises(ValueError, match="batch: expected a multiple of the 4 ranks, got 6 rows"):
        Ranks(1, 4).share(rows)


def test_without_torchrun_a_process_is_alone(monkeypatch):
    """Catches a process group that is waited for though nobody else comes."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined() as ranks:
        assert ranks == ALONE
        assert ranks.is_first
        assert ranks.mean(3.0) == 3.0
    with (
        pytest.raises(ValueError, match="device: expected 'cpu' or 'cuda', got 'tpu'"),
        joined("tpu"),
    ):
        pass
