"""DFlash 2: convolutions inside blocks alone, and a selector that knows the token before."""

import pytest
import torch

from specdec import Greedy, Rejection, generate
from specdec.drafters.dflash import DFlashNetwork
from specdec.drafters.dflash2 import BlockConv, ConvBlock, DFlash2, Selector, convolve
from specdec.drafters.dflash_draft import BlockLaws, DFlash
from specdec.drafters.dflash_loss import Blocks, run_blocks
from specdec.models import TransformerConfig
from specdec.testing.replay import Recorder, nodes
from tests.drafters.test_dflash import SIZES, STORY, TARGET, network_for, states_of


def test_a_convolution_by_hand():
    """Catches taps in reversed order, and a slot that sees the one behind it."""
    x = torch.tensor([[[1.0], [10.0], [100.0]]])
    kernels = torch.tensor([[[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]]])
    assert convolve(x, kernels).flatten().tolist() == [1.0, 30.0 + 4.0, 500.0 + 60.0]


def test_kernels_by_hand():
    """Catches a group's number in the wrong channels, base and second kernel mixed up."""
    conv = BlockConv(4, kernel_size=1, group_size=2)
    with torch.no_grad():
        conv.base.copy_(torch.tensor([[[1.0] * 4], [[10.0, 20.0, 30.0, 40.0]]]))
        conv.project.weight.zero_()
        conv.project.weight[1, 0] = 1.0  # the first kernel, channels 2 and 3
        conv.project.weight[2, 1] = 1.0  # the second, channels 0 and 1
    y, kernels = conv(torch.tensor([[[2.0, 5.0, 1.0, 1.0]]]))
    assert y.flatten().tolist() == [2.0, 5.0, 3.0, 3.0]
    assert kernels.flatten().tolist() == [15.0, 25.0, 30.0, 40.0]


def test_blocks_of_a_pass_do_not_leak():
    """Catches a convolution that runs from one training block into the next."""
    network = network_for(TARGET, dflash2=SIZES)
    hidden = states_of(STORY[None])
    anchors = torch.tensor([[3, 9]])
    held = torch.full((1, 2, 4), network.mask_token)
    states = []
    for root in (1, 2):
        held = held.clone()
        held[0, 0, -1] = root  # the last slot of the first block
        blocks = Blocks(anchors, held, held, held >= 0)
        states.append(run_blocks(network, TARGET, hidden, blocks))
    assert states[0][0, 1].equal(states[1][0, 1])
    assert not states[0][0, 0].equal(states[1][0, 0])


def test_fresh_weights_are_plain_dflash():
    """Catches convolutions or selector that do not start as if they were not there."""
    config = TransformerConfig(11, 16, 32, 2, 4, 2, qk_norm=True)
    fresh = [
        DFlashNetwork(config, (1, 3), mask_token=10, block_size=4, dflash2=sizes).double()
        for sizes in (SIZES, None)
    ]
    fresh[0].reset_parameters(torch.Generator().manual_seed(0))
    missing, unexpected = fresh[1].load_state_dict(fresh[0].state_dict(), strict=False)
    assert not missing and all("conv" in name or "selector" in name for name in unexpected)
    held = torch.tensor([[[5, 10, 10, 10], [2, 10, 10, 10]]])
    blocks = Blocks(torch.tensor([[4, 9]]), held, held, held >= 0)
    states = [run_blocks(network, TARGET, states_of(STORY[None]), blocks) for network in fresh]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-12)
    logits, selector = TARGET.head(states[0][0]), fresh[0].selector
    ids = selector.candidates(logits)
    scores = selector.scores(states[0][0], logits, ids, torch.tensor([[1], [2]]))
    assert scores.equal(logits.gather(-1, ids))


def selector_by_hand() -> Selector:
    selector = Selector(TransformerConfig(3, 2, 2, 1, 1), DFlash2(rank=1, top_k=2))
    with torch.no_grad():
        selector.before.weight.copy_(torch.tensor([[1.0], [2.0], [0.0]]))
        selector.after.weight.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))
        selector.project.weight.copy_(torch.tensor([[1.0, 1.0]]))
    return selector


def test_scores_by_hand():
    """Catches before and after mixed up, and a token that is none of the candidates."""
    selector = selector_by_hand()
    states, logits = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, -9.0, 1.0]])
    law = selector(states, logits, torch.tensor([[0, 1, 2]]))  # [1, 3, 3]
    inf = float("inf")
    assert law.tolist() == [[[1.0, -inf, 0.0], [2.0, -inf, -1.0], [0.0, -inf, 1.0]]]


@torch.no_grad()
def check_laws(drafter: DFlash) -> None:
    """The declared laws of a run are the selector's behind the token above, node by node."""
    network, recorder = drafter.network, Recorder(drafter)
    prompts = [STORY[:1], STORY[:7]]
    generate(TARGET, prompts, recorder, max_new_tokens=6, rule=Rejection(seed=2))
    laws = BlockLaws(network, drafter.block_size, TARGET, 2, 20)
    for context, draft in recorder.seen[:-1]:
        states, logits = laws.read(context, 3)
        for b in context.live.nonzero().flatten().tolist():
            root = int(context.tokens[b, context.lengths[b] - 1])
            for path, q in nodes(draft, b, int(context.depth_left[b])):
                slot, before = len(path) - 1, torch.tensor((root, *path)[-2])
                ids = logits[b, slot].topk(SIZES.top_k).indices
                scores = network.selector.scores(states[b, slot], logits[b, slot], ids, before)
                law = torch.zeros_like(q).scatter(-1, ids, scores.softmax(-1))
                assert (q - law).abs().max() < 1e-9


def test_a_law_is_that_behind_the_token_above(monkeypatch):
    """Catches the slot before's state or logits, and (planted) another predecessor.

    Such a drafter declares what it draws from and stays lossless; it drafts what nobody trained.
    """
    drafter = DFlash(network_for(TARGET, dflash2=SIZES))
    check_laws(drafter)
    right = Selector.forward
    monkeypatch.setattr(
        Selector, "forward", lambda self, x, logits, y: right(self, x, logits, torch.zeros_like(y))
    )
    with pytest.raises(AssertionError):
        check_laws(drafter)


def test_a_chosen_chain_follows_the_selector():
    """Catches a greedy draft of the logits alone, where the selector prefers another token."""
    network = network_for(TARGET, dflash2=SIZES)
    network.selector.after.weight.data.mul_(20)
    recorder = Recorder(DFlash(network))
    generate(TARGET, STORY[:7], recorder, max_new_tokens=5, rule=Greedy())
    context, draft = recorder.seen[0]
    states, logits = BlockLaws(network, 4, TARGET, 1, 20).read(context, 3)
    token, expected = STORY[None, 6:7], []
    for slot in range(3):
        token = network.selector(states[:, slot], logits[:, slot], token).argmax(-1)
        expected.append(int(token))
    assert draft.tokens[0].tolist() == expected
    assert expected != logits[0].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DFlash2(kernel_size=0), "kernel_size: expected at least 1, got 0"),
        (lambda: DFlash2(top_k=0), "top_k: expected at least 1, got 0"),
        (lambda: network_for(TARGET, dflash2=DFlash2(group_size=3)), "group_size: .*16, got 3"),
        (lambda: network_for(TARGET, dflash2=DFlash2(top_k=12)), "top_k: .*of 11, got 12"),
    ],
)
def test_bad_sizes_are_named(call, message):
    """Catches sizes that fail deep down, or in the middle of a run."""
    with pytest.raises(ValueError, match=message):
        call()


def test_one_shorter_block_is_convolved_as_a_whole():
    """Catches blocks of fewer slots than trained with that are cut or padded."""
    network = network_for(TARGET, dflash2=SIZES)
    block = network.blocks[0]
    assert isinstance(block, ConvBlock)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).double()
    block.attention.forward = lambda read, *_: read
    whole = block(x, (x, x))
    for b in range(2):
        torch.testing.assert_close(block(x[b : b + 1], (x, x)), whole[b : b + 1])
