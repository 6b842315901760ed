"""Training DFlash: anchors, corruption, weights and losses by hand, and what is learnt."""

import copy
import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch import Tensor

import specdec.drafters.dflash_loss as module
from specdec import FINAL, Greedy
from specdec.distill import acceptance_mix, forward_kl, reverse_kl, total_variation
from specdec.drafters.dflash import DFlashNetwork, Sight
from specdec.drafters.dflash2 import DFlash2
from specdec.drafters.dflash_draft import BlockLaws, DFlash
from specdec.drafters.dflash_flex import flex_view, slot_sees
from specdec.drafters.dflash_loss import (
    Blocks,
    block_mask,
    decay_weights,
    dense_view,
    dflash_loss,
    dpace_weights,
    draw_blocks,
    run_blocks,
)
from specdec.generate import _Run
from specdec.models import TransformerConfig
from tests.builders import FALSE_ALARM
from tests.drafters.test_dflash import STORY, TARGET, VARIANTS, network_for, states_of, tau, train

MASK = 10
TOKENS = torch.stack([STORY[:9], STORY[11:20]])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(tokens=TOKENS, block_size=4, n_blocks=99, seed=0, **options) -> Blocks:
    return draw_blocks(tokens, block_size, n_blocks, MASK, seeded(seed), **options)


# Blocks


def test_anchors_come_from_the_mask():
    """Catches anchors in the prompt or the padding, the last block, and one drawn twice."""
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 2:8], mask[1, 4:] = True, True
    blocks = draw(mask=mask)
    # anchors may stand at 0..5; the second row has two, its others learn nothing
    assert blocks.anchors.shape == (2, 4)
    assert blocks.anchors[0].tolist() == [2, 3, 4, 5]
    learned = blocks.counts.any(dim=-1)
    assert blocks.anchors[1][learned[1]].tolist() == [4, 5]
    assert (blocks.anchors.diff(dim=1) > 0).all()
    assert blocks.counts[0].int().tolist() == [[0, 1, 1, 1]] * 3 + [[0, 1, 1, 0]]
    assert torch.equal(blocks.places[..., 0], blocks.anchors)
    assert torch.equal(blocks.labels[1], TOKENS[1][blocks.places[1]])


def test_few_anchors_are_drawn_evenly():
    """Catches anchors that prefer a place, and draws that a generator does not settle."""
    first = draw(n_blocks=2, seed=3)
    assert first.anchors.equal(draw(n_blocks=2, seed=3).anchors)
    tokens = torch.zeros(4000, 9, dtype=torch.long)
    anchors = draw(tokens, n_blocks=2, seed=1).anchors
    counts = torch.bincount(anchors.flatten(), minlength=6)
    # 2 of 6 places a row, without replacement: less spread than chi-square has
    assert stats.chisquare(counts.numpy()).pvalue > FALSE_ALARM
    assert not (anchors[:, 0] == anchors[:, 1]).any()


def test_a_full_block_is_what_decoding_runs():
    """Catches a masked root, a slot that holds its label, and the mask of another token."""
    blocks = draw()
    assert blocks.tokens[..., 0].equal(blocks.labels[..., 0])
    assert (blocks.tokens[..., 1:] == MASK).all()
    assert blocks.counts[..., 1:].all() and not blocks.counts[..., 0].any()


def test_uniform_corruption():
    """Catches a masked anchor, blocks without a masked slot, given slots that are learned from.

    The number of masked slots is uniform, with none counted as one: not binomial around a half.
    """
    tokens = torch.arange(9).repeat(3000, 1)
    blocks = draw(tokens, block_size=6, n_blocks=1, corruption="uniform")
    masked = blocks.tokens == MASK
    assert not masked[..., 0].any()
    assert torch.equal(blocks.counts, masked)
    assert torch.equal(blocks.tokens[~masked], blocks.labels[~masked])
    n = masked.sum(dim=-1).flatten()
    counts = torch.bincount(n, minlength=6)[1:]
    expected = 3000 * torch.tensor([2.0, 1, 1, 1, 1]) / 6
    assert int(n.min()) == 1
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > FALSE_ALARM
    assert draw(tokens, seed=5, corruption="uniform").tokens.equal(
        draw(tokens, seed=5, corruption="uniform").tokens
    )


def test_padding_is_never_shown():
    """Catches unmasked slots of uniform corruption that hold padding: no truth, and no lesson."""
    mask = (torch.arange(9) < 6).repeat(500, 1)
    tokens = torch.where(mask, 3, 0)
    blocks = draw(tokens, corruption="uniform", mask=mask)
    assert (blocks.tokens != 0).all()
    own = blocks.counts.any(dim=-1) | ~mask.gather(1, blocks.anchors)
    beyond = blocks.places[..., 1] >= 6
    assert (own | beyond).all(), "every block with a token that counts learns at least one"


# What a slot sees


def test_the_mask_by_hand():
    """Catches h_a seen by its block, blocks that see each other, a causal slot that looks ahead."""
    picture = {
        Sight(): ["1000 110000", "1000 110000", "1110 001100", "1110 001100", "", ""],
        Sight(causal=True): ["1000 100000", "1000 110000", "1110 001000", "1110 001100"],
        Sight(causal=True, window=2): ["1000 100000", "0000 110000", "0010 001000", "0000 001100"],
    }
    for sight, rows in picture.items():
        seen = block_mask(torch.tensor([[1, 3, 0]]), 2, 4, sight)[0].int().tolist()
        for got, expected in zip(seen, rows, strict=False):
            assert not expected or "".join(map(str, got)) == expected.replace(" ", "")
        assert seen[4][:4] == [0, 0, 0, 0]  # nothing stands before the first token


# Weights


def test_decay_weights():
    """Catches exp(-k / decay): the slot behind the anchor weighs 1."""
    expected = [math.exp(-(k - 1) / 7) for k in range(1, 16)]
    assert decay_weights(16, 7.0).tolist() == pytest.approx(expected, rel=1e-6)


def test_dpace_weights_by_hand():
    """Catches a prefix sum for the suffix sum, alpha on the wrong side, slots not passed over."""
    q, counts = torch.tensor([0.5, 0.2, 0.8]), torch.tensor([True, True, True])
    # c = 0.75, 0.6, 0.9; products 0.75, 0.45, 0.405
    assert dpace_weights(q, counts).tolist() == pytest.approx([1.605, 0.855, 0.405])
    counts[1] = False  # products 0.75 and 0.675
    assert dpace_weights(q, counts).tolist() == pytest.approx([1.425, 0.0, 0.675])
    assert dpace_weights(q, ~counts & False).tolist() == [0.0, 0.0, 0.0]
    assert dpace_weights(q, counts | True, alpha=1.0).tolist() == pytest.approx([3.0, 2.0, 1.0])


def test_dpace_weights_are_a_gradient():
    """Catches weights that are not what each slot adds to the expected accepted length.

    At alpha = 0, which the loss refuses, they are dS / d log q_j of S = sum over m of q_1 .. q_m.
    """
    logs = torch.rand(5, 7, generator=seeded(), dtype=torch.float64).log().requires_grad_(True)
    logs.cumsum(dim=-1).exp().sum().backward()
    weights = dpace_weights(logs.exp(), torch.ones(5, 7, dtype=torch.bool), alpha=0.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, logs.grad)


# The loss by hand: states are logits, the head is the identity

SMALL = DFlashNetwork(TransformerConfig(2, 2, 2, 1, 1), (0,), mask_token=0, block_size=3)
COPY = SimpleNamespace(head=lambda x: x)
LN3, LN2 = math.log(3), math.log(2)
ROW = torch.tensor([[1, 0, 1, 1]])
# two blocks, at 0 and 1; q of token 0 at their slots: 3/4 and 1/4; 1/2 and 3/4
LOGITS = torch.tensor([[[[9.0, 0], [LN3, 0], [0, LN3]], [[9, 0], [0, 0], [LN3, 0]]]]).double()
HIDDEN = {0: torch.zeros(1, 4, 2).double(), FINAL: torch.zeros(1, 4, 2).double()}
# labels 0, 1; 1, 1: q of each 3/4, 3/4; 1/2, 1/4
CE = torch.tensor([[[math.log(4 / 3), math.log(4 / 3)], [LN2, 2 * LN2]]]).double()


def by_hand(monkeypatch, network=SMALL, hidden=None, **options) -> float:
    monkeypatch.setattr(module, "run_blocks", lambda *_: LOGITS)
    loss = dflash_loss(network, COPY, {**HIDDEN, **(hidden or {})}, ROW, seeded(), **options)
    return float(loss.detach())


def test_cross_entropy_by_hand(monkeypatch):
    """Catches labels shifted by one, weights by place and not by slot, a mean of block means."""
    w = torch.tensor([1.0, math.exp(-1 / 2)]).double()
    expected = float((w * CE).sum() / (2 * w.sum()))
    assert by_hand(monkeypatch, decay=2.0) == pytest.approx(expected, abs=1e-6)
    mask = torch.tensor([[True, True, True, False]])
    expected = float((CE[0, 0] * w).sum() + CE[0, 1, 0]) / float(w.sum() + 1)
    assert by_hand(monkeypatch, decay=2.0, mask=mask) == pytest.approx(expected, abs=1e-6)


def test_kl_by_hand(monkeypatch):
    """Catches p of the token before or behind: the state at place i is of token i + 1."""
    final = torch.tensor([[[LN3, 0.0], [0, 0], [0, LN3], [50, 0]]]).double()  # p(0) 3/4, 1/2, 1/4
    q = LOGITS.softmax(-1)[0, :, 1:, 0]
    p = torch.tensor([[3 / 4, 1 / 2], [1 / 2, 1 / 4]]).double()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    got = by_hand(monkeypatch, hidden={FINAL: final}, decay=1e9, divergence=forward_kl)
    assert got == pytest.approx(float(kl.mean()), abs=1e-6)


def test_dpace_by_hand(monkeypatch):
    """Catches weights of the KL's p for q of the truth, and a mean over slots for one of blocks."""
    c = 0.5 * torch.tensor([[3 / 4, 3 / 4], [1 / 2, 1 / 4]]).double() + 0.5
    w = torch.stack([c[:, 0] + c[:, 0] * c[:, 1], c[:, 0] * c[:, 1]], dim=1)
    expected = float((w * CE[0]).sum() / 2)
    assert by_hand(monkeypatch, dpace=0.5) == pytest.approx(expected, abs=1e-6)


def test_the_selectors_loss_by_hand(monkeypatch):
    """Catches the predicted token for the one before, and slots whose truth is no candidate."""
    network = DFlashNetwork(
        TransformerConfig(2, 2, 2, 1, 1),
        (0,),
        mask_token=0,
        block_size=3,
        dflash2=DFlash2(group_size=1, rank=1, top_k=2),
    ).double()
    selector = network.selector
    assert selector is not None
    with torch.no_grad():
        selector.project.weight.copy_(torch.tensor([[0.0, 1.0]]))  # only the slot of [0, ln 3]
        selector.before.weight.copy_(torch.tensor([[1.0], [5.0]]))
        selector.after.weight.copy_(torch.tensor([[0.0], [1.0]]))
    plain = by_hand(monkeypatch, decay=1e9)
    # that slot, of label 1 behind a 0: ln 3 + 1 * ln 3 * 1 against 0; the others as they were
    expected = (float(CE.sum()) - math.log(4 / 3) + math.log(1 + 1 / 9)) / 4
    got = by_hand(monkeypatch, network, decay=1e9, selector_weight=0.5)
    assert got == pytest.approx(plain + 0.5 * expected, abs=1e-6)
    selector.top_k = 1  # the truth is the likeliest in the first block alone
    assert by_hand(monkeypatch, network, decay=1e9) == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    "divergence",
    [forward_kl, reverse_kl, total_variation, acceptance_mix],
    ids=lambda f: f.__name__,
)
def test_a_drafter_that_copies_the_target_has_no_loss(monkeypatch, divergence):
    """Catches p of another place than q's, with a real head, and (planted) h shifted by one."""
    hidden, network = states_of(TOKENS), network_for(TARGET)

    def copied(network, target, given, blocks, see):
        rows = torch.arange(len(TOKENS))[:, None, None]
        return hidden[FINAL][rows, (blocks.places - 1).clamp(min=0)]

    monkeypatch.setattr(module, "run_blocks", copied)
    shifted = hidden | {FINAL: hidden[FINAL].roll(1, dims=1)}
    losses = [
        float(dflash_loss(network, TARGET, given, TOKENS, seeded(), divergence=divergence))
        for given in (hidden, shifted)
    ]
    assert losses[0] < 1e-12
    assert losses[1] > 1e-2


# The loss place by place: what decoding says of every block


@torch.no_grad()
def decoded_law(network: DFlashNetwork, row: Tensor) -> Tensor:
    """Logits [K - 1, V] of a block behind `row`, its root last, as a run begun there has them."""
    size = network.block_size
    run = _Run(TARGET, [row], DFlash(network), [size], Greedy(), frozenset(), 512)
    run._prefill()
    laws = BlockLaws(network, size, TARGET, 1, len(row) + size)
    return laws.read(run._context(), size - 1)[1][0]


def loss_by_decoding(network: DFlashNetwork, mask: Tensor, decay: float, divergence) -> float:
    total = weight = 0.0
    for row, counts in zip(TOKENS, mask, strict=True):
        p = TARGET(row[None]).logits[0]
        for anchor in range(len(row) - network.block_size + 1):
            if not counts[anchor]:
                continue
            q = decoded_law(network, row[: anchor + 1])
            for k in range(1, network.block_size):
                place, w = anchor + k, math.exp(-(k - 1) / decay)
                if counts[place]:
                    value = -q[k - 1].log_softmax(-1)[row[place]]
                    if divergence is not None:
                        value = divergence(q[k - 1], p[place - 1])
                    total, weight = total + w * float(value), weight + w
    return total / weight


EARLY = torch.ones(2, 9, dtype=torch.bool)
EARLY[0, 3], EARLY[1, 6:] = False, False


def check_place_by_place(divergence=None, name: str = "mixed") -> None:
    network = network_for(TARGET, **VARIANTS[name])
    got = dflash_loss(
        network,
        TARGET,
        states_of(TOKENS),
        TOKENS,
        seeded(),
        mask=EARLY,
        divergence=divergence,
        decay=2.0,
    )
    expected = loss_by_decoding(network, EARLY, 2.0, divergence)
    assert float(got.detach()) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("divergence", [None, forward_kl])
@pytest.mark.parametrize("name", ["mixed", "at the input"])
def test_the_loss_place_by_place(divergence, name):
    """Catches any shift between states, blocks, masks, labels and p."""
    check_place_by_place(divergence, name)


def shift_labels(patch) -> None:
    def shifted(*args, **options):
        blocks = draw_blocks(*args, **options)
        labels = blocks.labels.roll(-1, dims=-1)
        return Blocks(blocks.anchors, blocks.tokens, labels, blocks.counts)

    patch.setattr(module, "draw_blocks", shifted)


def test_shifted_labels_are_seen(monkeypatch):
    """Planted: slot j learns token j + 1; the loss differs, and what is learnt is not drafted."""
    shift_labels(monkeypatch)
    with pytest.raises(AssertionError):
        check_place_by_place()
    network = network_for(TARGET)
    train(network, 30)
    assert tau(DFlash(network)) < 2.0


# Learning


@pytest.mark.parametrize(
    ("name", "n_steps", "options"),
    [
        ("bidirectional", 45, {}),
        ("mixed", 45, {}),
        ("at the input", 45, {}),
        ("dflash2", 45, {}),
        ("bidirectional", 45, {"dpace": 0.5}),
        ("bidirectional", 90, {"divergence": forward_kl}),
        ("bidirectional", 90, {"corruption": "uniform"}),
    ],
    ids=["bidirectional", "mixed", "at the input", "dflash2", "dpace", "kl", "uniform"],
)
def test_one_text_is_learnt_and_drafted(name, n_steps, options):
    """Catches labels, anchors or features shifted in training, and gradients that do not arrive.

    Given slots of uniform corruption that leaked their own label would teach nothing. A block of 4
    has 3 drafts: at most 4 tokens a pass.
    """
    network = network_for(TARGET, **VARIANTS[name])
    assert tau(DFlash(network)) < 1.5
    train(network, n_steps, **options)
    assert tau(DFlash(network)) >= 3.0


@pytest.mark.parametrize("name", ["mixed", "at the input", "dflash2"])
@pytest.mark.parametrize("divergence", [None, acceptance_mix])
def test_gradients_reach_every_weight_and_none_of_the_target(name, divergence):
    """Catches a part that the loss does not train, and a target that learns from its drafter."""
    network = network_for(TARGET, **VARIANTS[name])
    target = copy.deepcopy(TARGET).requires_grad_(True)
    target.head.requires_grad_(False)
    hidden = dict(target(TOKENS, taps=(1, 3, FINAL), logits=False).hidden)
    loss = dflash_loss(network, target, hidden, TOKENS, seeded(), divergence=divergence)
    loss.backward()
    for part, parameter in network.named_parameters():
        assert parameter.grad is not None, part
        assert bool(parameter.grad.isfinite().all()), part
        assert float(parameter.grad.abs().max()) > 0, part
    assert all(parameter.grad is None for parameter in target.parameters())


def test_padding_changes_nothing():
    """Catches padding that is learnt, or seen from before it."""
    network = network_for(TARGET)
    mask = (torch.arange(9) < 6).expand(2, -1)
    losses = []
    for filler in (0, 5):
        tokens = torch.where(mask, TOKENS, filler)
        hidden = states_of(tokens)
        for corruption in ("full", "uniform"):
            losses.append(
                dflash_loss(
                    network, TARGET, hidden, tokens, seeded(), mask=mask, corruption=corruption
                )
            )
    torch.testing.assert_close(losses[:2], losses[2:], rtol=0, atol=1e-12)


# FlexAttention

FLEX_WARNING = "ignore:flex_attention called without torch.compile"


@pytest.mark.parametrize("sight", [Sight(), Sight(True), Sight(True, 3), Sight(False, 2)])
def test_both_masks_say_the_same(sight):
    """Catches a rule of the fast path that is not the reference's, in any row, slot or key."""
    blocks = draw(n_blocks=3)
    rule = slot_sees(blocks.anchors, 4, 9, sight)
    row, query, key = torch.meshgrid(
        torch.arange(2), torch.arange(12), torch.arange(9 + 12), indexing="ij"
    )
    seen = rule(row, torch.zeros_like(row), query, key)
    assert seen.equal(block_mask(blocks.anchors, 4, 9, sight))


@pytest.mark.filterwarnings(FLEX_WARNING)
@pytest.mark.parametrize("name", VARIANTS)
def test_flex_attention_is_the_reference(name):
    """Catches rows, groups, heads or blocks in another order than the reference has them."""
    network = network_for(TARGET, **VARIANTS[name])
    blocks, hidden = draw(n_blocks=5), states_of(TOKENS)
    with torch.no_grad():
        expected = run_blocks(network, TARGET, hidden, blocks, dense_view)
        got = run_blocks(network, TARGET, hidden, blocks, flex_view)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.skipif(
    not os.environ.get("SPECDEC_COMPILE") or not shutil.which("g++"),
    reason="compiles for ten seconds or more; SPECDEC_COMPILE=1 runs it where there is g++",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_forward_pass_is_the_reference():
    """Catches a kernel that skips a tile it should visit, and anchors frozen at the first call."""
    see = partial(flex_view, compiled=True)
    network = network_for(TARGET, "mixed", 3).float()
    target = copy.deepcopy(TARGET).float()
    tokens = STORY.repeat(2, 12)
    hidden = dict(target(tokens[:, :250], taps=(1, 3), logits=False).hidden)
    for seed in (0, 1):
        blocks = draw(tokens[:, :250], n_blocks=40, seed=seed)
        with torch.no_grad():
            expected = run_blocks(network, target, hidden, blocks)
            got = run_blocks(network, target, hidden, blocks, see)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_flex_attention_on_a_cpu_has_no_gradient():
    """Catches a PyTorch that has learnt it: then the docstring is out of date."""
    network = network_for(TARGET)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        dflash_loss(network, TARGET, states_of(TOKENS), TOKENS, seeded(), see=flex_view)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no backward pass on a CPU")
@pytest.mark.parametrize("name", ["bidirectional", "mixed", "at the input"])
def test_compiled_gradients_are_the_references(name):
    """Catches a compiled kernel that skips a tile it should visit, forwards or backwards."""
    config = TransformerConfig(11, 64, 64, 2, 2, 1, qk_norm=True)
    target = copy.deepcopy(TARGET).float().cuda()
    target.embedding = torch.nn.Embedding(11, 64, device="cuda").requires_grad_(False)
    network = DFlashNetwork(
        config,
        (1,),
        mask_token=10,
        block_size=4,
        sights=network_for(TARGET, **VARIANTS[name]).sights,
        inject=VARIANTS[name].get("inject", True),
    ).cuda()
    network.reset_parameters()
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = {1: torch.randn(2, 300, 64, device="cuda", generator=generator)}
    tokens = torch.randint(10, (2, 300), device="cuda", generator=generator)
    blocks, found = draw(tokens, n_blocks=40), []
    for see in (dense_view, flex_view):
        states = run_blocks(network, target, hidden, blocks, see)
        found.append([states, *torch.autograd.grad(states.square().sum(), network.parameters())])
    for expected, got in zip(*found, strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-2 * scale)


# Bad input


def loss_of(tokens=TOKENS, taps=(1, 3, FINAL), network=None, **options) -> Tensor:
    hidden = {tap: torch.zeros(2, 9, 16).double() for tap in taps}
    network = network or network_for(TARGET)
    return dflash_loss(network, TARGET, hidden, tokens, seeded(), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loss_of(TOKENS.int()), r"tokens: expected int64 .*got torch.int32"),
        (lambda: loss_of(TOKENS[0]), r"tokens: expected int64 of shape \[B, T\], .*\[9\]"),
        (lambda: loss_of(TOKENS[:, :8]), r"hidden: expected \[2, 8, 16\] at tap 1, got \[2, 9"),
        (lambda: loss_of(taps=(1, FINAL)), r"hidden: expected tap 3, got \[-1, 1\]"),
        (lambda: loss_of(taps=(1, 3), divergence=forward_kl), r"hidden: expected tap -1"),
        (lambda: loss_of(mask=EARLY.int()), r"mask: expected bool of shape \[2, 9\], got torch.i"),
        (lambda: loss_of(mask=EARLY[:1]), r"mask: expected bool of shape \[2, 9\], .*\[1, 9\]"),
        (lambda: loss_of(mask=EARLY & False), "mask: expected a token .*0 tokens that count"),
        (lambda: loss_of(mask=torch.arange(9).expand(2, -1) > 5), "mask: .*3 places behind it"),
        (lambda: loss_of(mask=torch.arange(9).expand(2, -1) < 1), "mask: no slot of the drawn"),
        (lambda: loss_of(network=network_for(TARGET, block_size=10)), "mask: .*got 9 places"),
        (lambda: loss_of(network=network_for(TARGET, block_size=1)), "block_size: .*at least 2"),
        (lambda: loss_of(n_blocks=0), "n_blocks: expected at least 1, got 0"),
        (lambda: loss_of(corruption="half"), "corruption: expected .*got 'half'"),
        (lambda: loss_of(decay=0.0), "decay: expected a positive number, got 0.0"),
        (lambda: loss_of(decay=math.nan), "decay: expected a positive number, got nan"),
        (lambda: loss_of(dpace=0.0), r"dpace: expected an alpha in \(0, 1\], got 0.0"),
        (lambda: loss_of(dpace=1.5), r"dpace: expected an alpha in \(0, 1\], got 1.5"),
    ],
)
def test_bad_arguments_are_named(call, message):
    """Catches arguments that run, and give something else than was meant."""
    with pytest.raises(ValueError, match=message):
        call()
