"""The arithmetic between measurement and prediction."""

import pytest
import torch

from specdec.benchmark import Costs, calibrate, compare_drafters, verification_seconds
from specdec.drafters import PromptLookup
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


def test_verification_seconds_leave_the_cache_as_it_was():
    """Timing that grows its own context: every size must be timed after the same prefix."""
    seconds = verification_seconds(small_target(1), (1, 3), context=5, repeats=2)
    assert set(seconds) == {1, 3}
    assert all(value > 0 for value in seconds.values())
