"""Experts that a verification wakes, and both ways to compute them beside each other."""

import torch

from specdec import generate
from specdec.drafters import PromptLookup
from specdec.models.routing import recorded
from specdec.testing.targets import small_hybrid
from specdec.woken import experts_of_rounds, time_experts

TARGET = small_hybrid(3)
PROMPTS = [torch.tensor([1, 2, 3, 1, 2]), torch.tensor([4])]
LOOKUP = {"lookup": PromptLookup(n_drafts=3)}


def test_plain_decoding_of_one_row_wakes_k_experts():
    """Catches the prefill's experts counted, or those of all layers together."""
    found = experts_of_rounds(TARGET, PROMPTS[:1], None, 6)
    k = TARGET.config.num_experts_per_tok
    assert (found.n_tokens, found.experts, found.uniform) == (1, k, k)


def test_a_finished_row_and_unused_nodes_wake_nothing():
    """Catches counts of what is computed, not of what is verified."""
    both = experts_of_rounds(TARGET, PROMPTS, PromptLookup(n_drafts=3), 8)
    run = generate(TARGET, PROMPTS, PromptLookup(n_drafts=3), max_new_tokens=8)
    used = [int(r.live.sum() + (r.draft.mask() & r.live.unsqueeze(1)).sum()) for r in run.rounds]
    assert both.n_tokens == sum(used) / len(used)
    computed = [r.draft.n_nodes + 1 for r in run.rounds]
    assert both.n_tokens < 2 * sum(computed) / len(computed)
    assert TARGET.config.num_experts_per_tok <= both.experts <= TARGET.config.num_experts


def test_both_ways_are_timed_and_the_targets_own_comes_back():
    """Catches a target left with the reference, hooks left on its routers, a way timed twice."""
    before = TARGET.experts
    with recorded(TARGET) as routes:
        rows = time_experts(
            TARGET, LOOKUP, PROMPTS[:1], PROMPTS[:1], max_new_tokens=6, repeats=2, progress=False
        )
    assert routes and TARGET.experts == before == "grouped"
    assert [(row.experts, row.drafter) for row in rows] == [
        ("loop", "lookup"),
        ("grouped", "lookup"),
    ]
    assert all(row.plain_per_second > 0 and row.spread[0] <= row.speedup for row in rows)
