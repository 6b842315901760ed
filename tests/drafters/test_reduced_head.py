"""A head over the frequent tokens: DFlash that cannot name the others."""

import pytest
import torch

from specdec import generate
from specdec.drafters import DDTree, DFlash
from specdec.drafters.reduced_head import head_over, head_rows, spread
from specdec.testing import check_lossless, exact_law, target_law
from tests.drafters.test_dflash import PROMPT, SIZES, TARGET, TARGET3, network_for

IDS = torch.tensor([0, 3, 4, 7])


def test_the_rows_are_the_targets():
    """Catches rows of other tokens, an id taken for a row, a head that is not detached."""
    states = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).double()
    everything = TARGET.head(states)
    torch.testing.assert_close(states @ head_rows(TARGET).T, everything, rtol=0, atol=1e-12)
    head = head_over(TARGET, IDS)
    assert not head.weight.requires_grad and head.weight.shape == (4, 16)
    full = spread(head(states), IDS, 11)
    torch.testing.assert_close(full[..., IDS], everything[..., IDS], rtol=0, atol=1e-12)
    others = [i for i in range(11) if i not in IDS]
    assert bool((full[..., others] == -torch.inf).all())


@pytest.mark.parametrize("tree", [False, True])
def test_dflash_drafts_the_tokens_it_can_name_and_is_lossless(tree):
    """Catches ids of the small head taken for the target's, and -inf that a rule cannot bear."""
    network = network_for(TARGET).reduce_head(TARGET, IDS)
    drafter = DDTree(network, 6) if tree else DFlash(network)
    run = generate(TARGET, [PROMPT, PROMPT[:1]], drafter, max_new_tokens=12)
    drafted = torch.cat([r.draft.tokens[r.draft.mask()] for r in run.rounds])
    assert set(drafted.tolist()) <= set(IDS.tolist()) and len(drafted) > 12
    check_lossless(TARGET, drafter, max_new_tokens=8, n_samples=32)


def test_its_law_is_the_targets():
    """Catches a q over the small vocabulary declared for the whole one."""
    network = network_for(TARGET3, taps=(1, 2), mask_token=2)
    network.reduce_head(TARGET3, torch.tensor([0, 2]))
    own = target_law(TARGET3, PROMPT, 3)
    law = exact_law(TARGET3, DFlash(network, 2), PROMPT, 3)
    assert max(abs(law.get(k, 0.0) - own.get(k, 0.0)) for k in law.keys() | own.keys()) < 1e-9


def test_taken_back_it_is_as_before():
    """Catches a head that stays when all tokens are asked for again."""
    network = network_for(TARGET)
    before = generate(TARGET, PROMPT, DFlash(network), max_new_tokens=6)
    network.reduce_head(TARGET, IDS).reduce_head(TARGET, None)
    after = generate(TARGET, PROMPT, DFlash(network), max_new_tokens=6)
    for a, b in zip(before.rounds, after.rounds, strict=True):
        assert torch.equal(a.draft.tokens, b.draft.tokens)


def test_what_does_not_fit_is_refused():
    """Catches ids that repeat, and a selector whose codebooks know other tokens."""
    network = network_for(TARGET)
    with pytest.raises(ValueError, match=r"draft_ids: expected increasing ids in \[0, 11\), got"):
        network.reduce_head(TARGET, torch.tensor([3, 3]))
    assert network.reduced is None
    with pytest.raises(ValueError, match="draft_ids: expected None for DFlash 2"):
        network_for(TARGET, dflash2=SIZES).reduce_head(TARGET, IDS)
