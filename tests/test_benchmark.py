"""The arithmetic between measurement and prediction."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from specdec.benchmark import Costs, by_size, calibrate, compare_drafters, verification_seconds
from specdec.draft import Draft
from specdec.drafters import PromptLookup
from specdec.generate import Round
from specdec.testing.strategies import small_target

COSTS = Costs(
    step=1.0,
    plain_loop=0.1,
    draft={True: 0.5, False: 0.0},
    loop=0.2,
    verify={1: 1.0, 3: 1.2, 9: 2.4},
)


def test_verification_is_linear_between_calibrated_sizes():
    """A block size looked up in the wrong interval, or not extrapolated."""
    sizes = (1, 2, 3, 6, 9, 12)
    assert [COSTS.verify_at(n) for n in sizes] == pytest.approx([1.0, 1.1, 1.2, 1.8, 2.4, 3.0])


def test_rows_compare_every_drafter_on_every_kind():
    """A speed-up over the wrong baseline; plain decoding that does not read 1x."""
    target = small_target(1)
    prompts = {"a": [torch.tensor([1, 2, 1, 2])], "b": [torch.tensor([3]), torch.tensor([4, 5])]}
    drafters = {"lookup": PromptLookup(2, 3)}
    costs = calibrate(target, drafters, prompts["b"], max_new_tokens=4)
    rows, runs = compare_drafters(
        target, drafters, prompts, max_new_tokens=6, costs=costs, repeats=2, progress=False
    )
    assert [(row.prompt_kind, row.drafter) for row in rows] == [
        ("a", "plain"),
        ("a", "lookup"),
        ("b", "plain"),
        ("b", "lookup"),
    ]
    assert set(runs) == {(row.drafter, row.prompt_kind) for row in rows}
    for row in rows:
        assert row.lossless
        assert row.spread[0] <= row.speedup <= row.spread[1]
        if row.drafter == "plain":
            assert row.speedup == row.predicted_speedup == row.tau == 1.0


def test_passes_cost_what_they_cost_in_the_rounds():
    """Hot passes one after another in place of those behind a draft; a size seen once, believed."""

    def taken(n_nodes: int, seconds: float) -> Round:
        tokens = torch.zeros(1, n_nodes, dtype=torch.long)
        return cast(
            Round, SimpleNamespace(draft=Draft(tokens), seconds=SimpleNamespace(verify=seconds))
        )

    rounds = [taken(2, s) for s in (1.0, 9.0, 2.0, 3.0, 2.5)] + [taken(4, 7.0)] * 4
    assert by_size(rounds) == {3: 2.5}


def test_calibration_takes_them(monkeypatch):
    """A table that is measured and not used."""
    monkeypatch.setattr("specdec.benchmark.by_size", lambda rounds: {1: 50.0, 3: 60.0})
    lookup = {"lookup": PromptLookup(2, 3)}
    costs = calibrate(small_target(1), lookup, [torch.tensor([1, 2, 1])], 4)["lookup"]
    assert (costs.step, costs.verify[1], costs.verify[3]) == (50.0, 50.0, 60.0)
    assert costs.verify[2] < 1.0


def test_verification_seconds_leave_the_cache_as_it_was():
    """Timing that grows its own context: every size must be timed after the same prefix."""
    seconds = verification_seconds(small_target(1), (1, 3), context=5, repeats=2)
    assert set(seconds) == {1, 3}
    assert all(value > 0 for value in seconds.values())
