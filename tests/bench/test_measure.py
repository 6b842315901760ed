"""What runs amount to, from runs made by hand."""

import math

import pytest
import torch

from specdec.bench.measure import Spread, call_rate, decode_all, offered, rate, results_of
from specdec.bench.prompts import Prompt
from specdec.bench.runs import SPECDEC, TRANSFORMERS, Method, Run
from specdec.testing import plain_sequence, small_target

PROMPTS = {"a": [Prompt("a-1", torch.tensor([1, 2]))], "b": [Prompt("b-1", torch.tensor([3, 4]))]}


def made(sequence, seconds, n_passes=4, n_timed=4):
    return Run(torch.as_tensor(sequence), n_timed, seconds, 4, 2 * seconds, n_passes)


def test_rates_pool_tokens_and_time():
    """Catches a mean of rates, in which a short answer counts like a long one; 0 / 0."""
    runs = [made([1], 1.0), made([1], 3.0, n_timed=2)]
    assert rate(runs) == 6 / 4
    assert call_rate(runs) == 8 / 8
    assert math.isnan(rate([made([1], 0.0, n_timed=0)]))


def test_speedups_are_ratios_within_a_repetition():
    """Catches a ratio of medians: the machine was four times as slow in the second repetition."""
    target = small_target(0)
    said = plain_sequence(target, torch.tensor([1, 2]), 4)
    seconds = {
        (SPECDEC, "plain"): (1.0, 4.0, 2.0),
        (SPECDEC, "lookup"): (0.5, 2.0, 0.5),
        (TRANSFORMERS, "plain"): (2.0, 8.0, 4.0),
        (TRANSFORMERS, "lookup"): (1.0, 3.0, 8.0),
    }
    runs = {(*key, "a"): [[made(said, s)] for s in own] for key, own in seconds.items()}
    results = {(r.engine, r.method): r for r in results_of(runs, {"a": PROMPTS["a"]}, target, {})}
    lookup = results[SPECDEC, "lookup"]
    assert lookup.speedup == Spread(2.0, 2.0, 4.0)
    assert lookup.over_transformers == Spread(2.0, 1.5, 16.0)
    assert lookup.tokens_per_second == Spread(8.0, 2.0, 8.0)
    assert results[SPECDEC, "plain"].over_transformers == Spread(2.0, 2.0, 2.0)
    theirs = results[TRANSFORMERS, "lookup"]
    assert theirs.speedup == Spread(2.0, 0.5, 8 / 3)  # over its own plain decoding
    assert theirs.over_transformers is None
    assert all(r.lossless and not r.across for r in results.values())


def test_differences_are_found_in_any_repetition_and_between_engines():
    """Catches a check of the first repetition only, or against the other engine's plain text."""
    target = small_target(0)
    said = plain_sequence(target, torch.tensor([1, 2]), 4)
    other = said.clone()
    other[4] = (other[4] + 1) % target.vocab_size
    runs = {
        (SPECDEC, "plain", "a"): [[made(said, 1.0)], [made(said, 1.0)]],
        (SPECDEC, "lookup", "a"): [[made(said, 1.0)], [made(other, 1.0)]],
        (TRANSFORMERS, "plain", "a"): [[made(other, 1.0)], [made(other, 1.0)]],
        (TRANSFORMERS, "lookup", "a"): [[made(other, 1.0)], [made(other, 1.0)]],
    }
    _, lookup, plain, theirs = results_of(runs, {"a": PROMPTS["a"]}, target, {})
    ((name, found),) = lookup.divergences
    assert not lookup.lossless
    assert (name, found.position, found.expected) == ("a-1", 4, int(said[4]))
    assert found.gap > 0 and not found.near_tie
    assert plain.lossless and theirs.lossless
    assert [name for name, _ in plain.across] == [name for name, _ in theirs.across] == ["a-1"]


def test_tau_is_pooled_and_told_by_request():
    """Catches a mean of the requests' taus in place of the pooled one."""
    target = small_target(0)
    pair = [Prompt("1", torch.tensor([1])), Prompt("2", torch.tensor([2]))]
    said = [plain_sequence(target, prompt.tokens, 4) for prompt in pair]
    runs = {
        (SPECDEC, "plain", "a"): [[made(s, 1.0) for s in said]],
        (SPECDEC, "lookup", "a"): [[made(said[0], 1.0, 1), made(said[1], 1.0, 4)]],
    }
    lookup = results_of(runs, {"a": pair}, target, {})[1]
    assert (lookup.tau, lookup.tau_requests) == (8 / 5, (4.0, 1.0))


def test_methods_take_turns():
    """Catches all repetitions of one method in a row, and one that always comes first."""
    order = []

    def method(name):
        def run(prompt, n):
            order.append((name, prompt.tolist(), n))
            return made(prompt, 1.0)

        return Method(SPECDEC, name, run)

    runs = decode_all(
        [method("x"), method("y")], PROMPTS, max_new_tokens=4, repeats=2, progress=False
    )
    assert order == [
        *(("x", [1, 2], 4), ("y", [1, 2], 4), ("y", [3, 4], 4), ("x", [3, 4], 4)),
        *(("x", [1, 2], 4), ("y", [1, 2], 4), ("y", [3, 4], 4), ("x", [3, 4], 4)),
    ]
    assert {key: [len(own) for own in value] for key, value in runs.items()} == {
        (SPECDEC, name, kind): [1, 1] for kind in "ab" for name in "xy"
    }


def test_a_method_that_raises_a_value_error_is_refused():
    """Catches a benchmark that ends with it, or that hides other errors."""

    def refuses(prompt, n):
        raise ValueError("not for this one")

    def breaks(prompt, n):
        raise IndexError

    fine = Method(SPECDEC, "fine", lambda prompt, n: made(prompt, 1.0))
    kept, refused = offered([fine, Method(TRANSFORMERS, "lookup", refuses)], PROMPTS["a"][0])
    assert kept == [fine]
    assert [(r.engine, r.method, r.reason) for r in refused] == [
        (TRANSFORMERS, "lookup", "not for this one")
    ]
    with pytest.raises(IndexError):
        offered([Method(SPECDEC, "broken", breaks)], PROMPTS["a"][0])
