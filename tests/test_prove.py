"""The promise, as a law: any draft, any rule, any batch, and the target's own tokens come out.

`make prove` runs 2,000 examples, CI 200 (SPECDEC_EXAMPLES).
"""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import DraftModel, PromptLookup, Rejection, generate
from specdec.testing import compare, plain_sequence
from specdec.testing.drafters import Adversary, Flaky
from specdec.testing.strategies import prompts, rules, small_target, targets

EXAMPLES = int(os.environ.get("SPECDEC_EXAMPLES", "200"))
SLOW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def drafters(draw, truth):
    """From perfect to adversarial, around what plain decoding says."""
    kind = draw(st.sampled_from(["adversary", "adversary", "adversary", "lookup", "model"]))
    if kind == "lookup":
        return PromptLookup(draw(st.integers(1, 3)), draw(st.integers(1, 6)))
    if kind == "model":
        widths = draw(st.sampled_from([(1,), (1, 1, 1, 1), (3, 2), (2, 1, 2)]))
        model = small_target(draw(st.integers(0, 9)), n_layers=1)
        return Flaky(
            DraftModel(model, len(widths), branching=widths), draw(st.sampled_from([0.0, 0.3]))
        )
    return Adversary(
        truth,
        n_nodes=draw(st.integers(0, 24)),
        tree=draw(st.booleans()),
        accuracy=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        unused=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 2**16)),
    )


@SLOW
@given(data=st.data(), target=targets(), rows=prompts(), rule=rules(), budget=st.integers(1, 12))
def test_drafted_decoding_equals_plain_decoding(data, target, rows, rule, budget):
    """Bugs in masks, positions, commits, cuts, noise keys or the walk; a row that sees others."""
    truth = [plain_sequence(target, row, budget, rule.for_row(b)) for b, row in enumerate(rows)]
    spoken = torch.cat([t[len(row) :] for t, row in zip(truth, rows, strict=True)])
    stops = tuple(data.draw(st.lists(st.sampled_from(spoken.tolist()), max_size=2), label="stops"))
    drafter = data.draw(drafters(truth), label="drafter")
    result = generate(target, rows, drafter, max_new_tokens=budget, rule=rule, stop_tokens=stops)
    for b, (row, got) in enumerate(zip(rows, result.sequences, strict=True)):
        expected = plain_sequence(target, row, budget, rule.for_row(b), stops)
        difference = compare(target, expected, got, rule.for_row(b), b)
        assert difference is None, str(difference)


@settings(SLOW, max_examples=max(20, EXAMPLES // 5))
@given(
    target=targets(),
    rows=prompts(min_rows=2),
    seed=st.integers(0, 2**40),
    temperature=st.floats(0.3, 2.0),
    widths=st.sampled_from([(1, 1, 1), (3, 2), (2, 2, 1)]),
    draw=st.booleans(),
    budget=st.integers(1, 10),
)
def test_a_row_does_not_depend_on_its_batch(target, rows, seed, temperature, widths, draw, budget):
    """Noise keyed by slot, round or batch instead of by the row; padding that leaks."""
    drafter = DraftModel(small_target(5, n_layers=1), len(widths), branching=widths, draw=draw)
    rule = Rejection(temperature, top_p=0.95, seed=seed)
    together = generate(target, rows, drafter, max_new_tokens=budget, rule=rule).sequences
    for b, row in enumerate(rows):
        alone = generate(target, row, drafter, max_new_tokens=budget, rule=rule.for_row(b))
        assert alone.sequences[0].tolist() == together[b].tolist()
