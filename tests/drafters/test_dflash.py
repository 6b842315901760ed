"""DFlash: lossless, training sees what decoding sees, planted bugs, bad input."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec.drafters.dflash_draft as dflash_draft
import specdec.drafters.dflash_loss as dflash_loss
from specdec import FINAL, Coupled, Greedy, Rejection, Typical, generate
from specdec.cache import TreeCache
from specdec.drafters.dflash import DFlashNetwork, Sight, dflash_taps, sights_of
from specdec.drafters.dflash2 import DFlash2
from specdec.drafters.dflash_draft import BlockLaws, DDTree, DFlash
from specdec.drafters.dflash_loss import Blocks, run_blocks
from specdec.testing import check_lossless, exact_law, target_law
from specdec.testing.replay import Recorder, fresh_draft, nodes
from specdec.testing.strategies import small_target
from specdec.training.features import CachedFeatures, TargetFeatures
from tests.drafters.test_eagle import round_law_error

SIZES = DFlash2(kernel_size=2, group_size=4, rank=3, top_k=4)
VARIANTS: dict[str, dict] = {
    "bidirectional": {},
    "causal": {"kind": "causal"},
    "mixed": {"kind": "mixed", "window": 3},
    "window": {"window": 4},
    "at the input": {"inject": False},
    "at the input, mixed": {"inject": False, "kind": "mixed", "window": 3},
    "dflash2": {"dflash2": SIZES, "kind": "mixed", "window": 3},
}
MASK = 10


def network_for(
    target,
    kind: str = "bidirectional",
    window: int | None = None,
    taps=(1, 3),
    mask_token: int = MASK,
    block_size: int = 4,
    seed: int = 0,
    **options,
) -> DFlashNetwork:
    """Two layers; gains are drawn, and what starts at zero, so that a missing part shows."""
    config = dataclasses.replace(target.config, num_hidden_layers=2, qk_norm=True)
    network = DFlashNetwork(
        config,
        taps,
        mask_token=mask_token,
        block_size=block_size,
        sights=sights_of(kind, 2, window),
        **options,
    ).double()
    generator = torch.Generator().manual_seed(seed)
    network.reset_parameters(generator)
    for parameter in network.parameters():
        drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 1:
            parameter.data.copy_(0.5 + drawn)
        elif parameter.ndim == 3 or not bool(parameter.any()):
            parameter.data.add_(drawn - 0.5)
    return network.eval()


TARGET, TARGET3 = small_target(4, n_layers=3), small_target(3, vocab_size=3)
PROMPT = torch.tensor([1, 2])
# 24 tokens without a short period, so that a shift shows
STORY = generate(TARGET, torch.tensor([7, 2]), max_new_tokens=24).sequences[0]


def states_of(tokens: Tensor, taps=(1, 3, FINAL)) -> dict[int, Tensor]:
    return dict(TARGET(tokens, taps=taps, logits=False).hidden)


def train(network: DFlashNetwork, n_steps: int, **options) -> float:
    optimizer, loss = torch.optim.Adam(network.parameters(), lr=0.03), torch.zeros(())
    hidden, generator = states_of(STORY[None]), torch.Generator().manual_seed(0)
    for _ in range(n_steps):
        loss = dflash_loss.dflash_loss(
            network, TARGET, hidden, STORY[None], generator, decay=100.0, **options
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def tau(drafter: DFlash) -> float:
    """Tokens a pass on STORY, the last round left out."""
    run = generate(TARGET, STORY[:2], drafter, max_new_tokens=24)
    assert run.sequences[0].equal(STORY)
    whole = [r for r in run.rounds if not r.cut.any()]
    return sum(len(r.new_tokens[0]) for r in whole) / len(whole)


@pytest.fixture(scope="module")
def trained() -> dict[str, DFlashNetwork]:
    """Networks that know most of STORY, by variant: some of what they draft is accepted."""
    networks = {name: network_for(TARGET, **options) for name, options in VARIANTS.items()}
    for network in networks.values():
        train(network, 16)
    return networks


# Losslessness


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("bidirectional", {}, Coupled(0.5)),
        ("causal", {"draw": False}, Greedy()),
        ("mixed", {"n_drafts": 2}, Greedy()),
        ("mixed", {"top_k": 2, "n_nodes": 9}, Greedy()),
        ("window", {"block_size": 3}, Greedy()),
        ("window", {"block_size": 6, "draw": False}, Greedy()),
        ("at the input", {}, Greedy()),
        ("dflash2", {}, Coupled(0.3)),
        ("dflash2", {"top_k": 2, "n_nodes": 9, "draw": False}, Greedy()),
    ],
)
def test_drafts_are_lossless(trained, name, options, rule):
    """Catches rows that read each other, contexts that go stale (by replay), a wrong law.

    Prompts of one token have no context; stop tokens, budgets from 1 and lost drafts come with it.
    """
    drawn = options.get("draw", True)
    report = check_lossless(
        TARGET,
        DFlash(trained[name], **options),
        prompts=[STORY[:1], STORY[:9]],
        max_new_tokens=6,
        rules=[rule],
        n_samples=64 if drawn and name in ("mixed", "dflash2") else 0,
    )
    assert max(report.tau.values()) > 1.1, "hardly anything was accepted"
    assert not report.near_ties


@pytest.mark.parametrize("rule", [Typical(), Rejection(0.7, top_k=2), Coupled(top_p=0.8)])
@pytest.mark.parametrize("name", ["mixed", "dflash2"])
def test_every_rule_and_budget_runs(trained, rule, name):
    """Catches drafts that a truncation makes invalid, and rows that end before their neighbours.

    In a tree of more children than the selector has candidates some tokens have no probability.
    """
    for options in ({}, {"top_k": 6, "n_nodes": 18}, {"top_k": 6, "draw": False}):
        prompts = [STORY[:1], STORY[:6], STORY[:3]]
        drafter = DFlash(trained[name], **options)
        run = generate(TARGET, prompts, drafter, max_new_tokens=[7, 1, 4], rule=rule)
        assert [len(new) for new in run.new_tokens] == [7, 1, 4]
        for r in run.rounds:
            assert not r.draft.mask()[~r.live].any()


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_trees_of_a_block_are_lossless(trained, temperature):
    """Catches slots read at another depth; a law, or a wrong token, from laws made sharper."""
    drafter = DDTree(trained["mixed"], 9, confidence_temperature=temperature)
    report = check_lossless(TARGET, drafter, rules=[Greedy(), Coupled(0.5)], n_samples=128)
    assert report.tau["Greedy"] > 1.3
    assert report.n_replayed > 40


def test_a_block_of_the_root_alone_decodes_plainly():
    """Catches a pass for nothing, and taps that are asked for and not read."""
    for drafter in (
        DFlash(network_for(TARGET, block_size=1)),
        DFlash(network_for(TARGET), block_size=1),
    ):
        assert drafter.taps == ()
        run = generate(TARGET, STORY[:3], drafter, max_new_tokens=5)
        assert run.sequences[0].equal(STORY[:8])
        assert [r.draft.n_nodes for r in run.rounds] == [0] * 5


NETWORK3 = network_for(TARGET3, taps=(0, 2), mask_token=2, block_size=3)
MIXED3 = network_for(TARGET3, kind="mixed", window=1, taps=(1,), mask_token=0, block_size=3)
SELECTED3 = network_for(
    TARGET3, taps=(1,), mask_token=0, block_size=3, dflash2=DFlash2(2, 4, 3, top_k=2)
)


@pytest.mark.parametrize(
    ("drafter", "n_tokens", "rule"),
    [
        (DFlash(NETWORK3), 3, Rejection(top_k=2)),
        (DFlash(NETWORK3, draw=False), 3, Rejection()),
        (DFlash(MIXED3), 3, Rejection(1.5, top_k=2)),
        (DFlash(SELECTED3), 3, Rejection(top_k=2)),
        (DFlash(SELECTED3, draw=False), 3, Rejection()),
        (DFlash(NETWORK3, 1, top_k=2, n_nodes=2), 2, Rejection()),
    ],
    ids=["drawn", "chosen", "mixed", "selector", "selector, chosen", "tree"],
)
def test_rejection_follows_the_targets_law_exactly(drafter, n_tokens, rule):
    """Catches a declared q that is not the law drawn from, in this round or in the next.

    With the selector q depends on the token drawn before.
    """
    own = target_law(TARGET3, PROMPT, n_tokens, rule)
    law = exact_law(TARGET3, drafter, PROMPT, n_tokens, rule)
    assert max(abs(law.get(k, 0.0) - own.get(k, 0.0)) for k in law.keys() | own.keys()) < 1e-9


@pytest.mark.parametrize(
    "drafter",
    [
        DFlash(NETWORK3),
        DFlash(NETWORK3, draw=False),
        DFlash(NETWORK3, top_k=2, n_nodes=2),
        DFlash(SELECTED3),
        DFlash(SELECTED3, top_k=2, n_nodes=4),
        DFlash(SELECTED3, top_k=2, draw=False),
    ],
    ids=["drawn", "chosen", "tree", "selector", "selector, tree", "selector, chosen tree"],
)
def test_a_round_follows_the_targets_law_exactly(drafter):
    """Catches drawn nodes that are pruned, and laws of chosen ones."""
    assert round_law_error(drafter) < 1e-9


# Rows and rounds


@pytest.mark.parametrize("name", ["bidirectional", "mixed", "at the input", "dflash2"])
def test_a_rows_draft_does_not_depend_on_its_neighbours(trained, name):
    """Catches padding that is seen, and blocks that are as long as the longest budget of a batch.

    Row 0 has 3 tokens left, its neighbours 2 and 12, and it is alone.
    """
    prompts, budgets = [STORY[:5], STORY[:1], STORY[:11]], [3, 2, 12]
    for rule in (Rejection(seed=[5, 6, 7]), Greedy()):
        for options in ({}, {"top_k": 2, "n_nodes": 9}):
            drafter = DFlash(trained[name], **options)
            recorder = Recorder(drafter)
            generate(TARGET, prompts, recorder, max_new_tokens=budgets, rule=rule)
            context, draft = recorder.seen[0]
            for b, prompt in enumerate(prompts):
                left = int(context.depth_left[b])
                alone = fresh_draft(TARGET, drafter, prompt, left, rule.for_row(b))
                got, expected = nodes(draft, b, left), nodes(alone, 0, left)
                assert [path for path, _ in got] == [path for path, _ in expected]
                for (_, q), (_, own) in zip(got, expected, strict=True):
                    assert q is None or (own is not None and (q - own).abs().max() < 1e-9)


def test_blocks_cut_to_the_longest_budget_are_seen(trained, monkeypatch):
    """Planted: a block has as many slots as some row can use; what a slot says changes."""
    right = BlockLaws.read

    def read(self, context, n_levels):
        self.block_size = n_levels + 1
        return right(self, context, n_levels)

    monkeypatch.setattr(BlockLaws, "read", read)
    with pytest.raises(AssertionError):
        test_a_rows_draft_does_not_depend_on_its_neighbours(trained, "bidirectional")


@pytest.mark.parametrize("name", ["bidirectional", "at the input"])
def test_a_long_prompt_is_read_in_pieces(monkeypatch, name):
    """Catches pieces that see another past than a whole, in a ragged batch."""
    drafter = DFlash(network_for(TARGET, **VARIANTS[name]))
    prompts, states = [STORY[:3], STORY[:12], STORY[:1], STORY[:9]], []
    recorder = Recorder(drafter)
    generate(TARGET, prompts, recorder, max_new_tokens=4)
    for size in (512, 1, 2, 4):
        monkeypatch.setattr(dflash_draft, "_CHUNK", size)
        laws = BlockLaws(drafter.network, 4, TARGET, 4, 20)
        states.append([laws.read(context, 3)[0] for context, _ in recorder.seen])
    for other in states[1:]:
        for got, expected in zip(other, states[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_the_context_is_projected_once(trained):
    """Catches a prefix that is read again every round, and layers that run over the context."""
    network = trained["bidirectional"]
    read, blocks = list[int](), list[int]()
    hooks = [
        network.fc.register_forward_hook(lambda *x: read.append(x[-1].shape[1])),
        network.blocks[0].register_forward_hook(lambda *x: blocks.append(x[-1].shape[1])),
    ]
    run = generate(TARGET, STORY[:5], DFlash(network), max_new_tokens=12)
    for hook in hooks:
        hook.remove()
    new = [len(r.new_tokens[0]) for r in run.rounds]
    n_drafted = len(read)
    assert read == [4, *new][:n_drafted]
    assert n_drafted >= len(run.rounds) - 1
    assert blocks == [4] * n_drafted


def test_a_round_that_was_left_out_is_named():
    """Catches a wrapper that does not call `propose` each round, and states lost for good."""
    drafter = DFlash(network_for(TARGET))
    recorder = Recorder(drafter)
    generate(TARGET, STORY[:5], recorder, max_new_tokens=12, rule=Coupled(2.0))
    state = drafter.begin(TARGET, 1, 20)
    state.propose(recorder.seen[0][0])
    have = state.laws.cache.lengths.clone()
    with pytest.raises(ValueError, match=r"context.new_tokens: .*call propose in every round"):
        state.propose(recorder.seen[2][0])
    assert state.laws.cache.lengths.equal(have)
    state.propose(recorder.seen[1][0])


# Training forward == decoding forward


class Rows:
    """The rows of a run as a text: one batch, right-padded."""

    n_given = 0

    def __init__(self, rows: list[Tensor]) -> None:
        self.tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self.train = self.held_out = self.tokens.numpy().astype(np.uint8)

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Tensor:
        return self.tokens

    held_out_batch = batch


Plant = Callable[[pytest.MonkeyPatch], object]


def check_training_is_decoding(
    network: DFlashNetwork, plant: Plant | None = None, folder=None, rule=None
) -> None:
    """All blocks of a ragged run: states in one pass of training, and round by round in decoding.

    The contexts are those the loop hands out. `plant` puts a bug into one of the two sides.
    """
    recorder = Recorder(DFlash(network))
    prompts, budgets = [STORY[:1], STORY[:10], STORY[:4]], [12, 5, 9]
    run = generate(
        TARGET, prompts, recorder, max_new_tokens=budgets, rule=rule or Rejection(0.5, seed=3)
    )
    assert len({int(n) for r in run.rounds for n in r.n_accepted}) > 1, "nothing was tried"
    contexts = [context for context, _ in recorder.seen if context.max_depth]
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        text = Rows(run.sequences)
        batch, length = text.tokens.shape
        source = TargetFeatures(TARGET, text, tuple(dict.fromkeys(network.taps)), batch, length - 1)
        tokens, hidden = (source if folder is None else CachedFeatures(source, folder, 1))(0)
        anchors = torch.stack([context.lengths - 1 for context in contexts], dim=1)  # [B, M]
        held = torch.full((*anchors.shape, network.block_size), network.mask_token)
        held[..., 0] = tokens.gather(1, anchors)
        blocks = Blocks(anchors, held, held, held >= 0)
        with torch.no_grad():
            expected = run_blocks(network, TARGET, hidden, blocks)[:, :, 1:]
            laws = BlockLaws(network, network.block_size, TARGET, batch, length)
            for m, context in enumerate(contexts):
                states, _ = laws.read(context, network.block_size - 1)
                for b in context.live.nonzero().flatten().tolist():
                    n, end = int(context.n_new[b]), int(context.lengths[b]) - 1
                    for tap in network.taps:  # features for training are those decoding sees
                        own = hidden[tap][b, end - n : end]
                        assert n == 0 or (context.hidden[tap][b, :n] - own).abs().max() < 1e-9
                    assert (states[b] - expected[b, m]).abs().max() < 1e-9, f"round {m}, row {b}"


@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_decoding(trained, name, tmp_path):
    """Catches masks, places, windows, roots or features of decoding that training never saw.

    The same tokens come out, by losslessness, and a state begun afresh makes the same mistake, so
    that replay is blind to it as well. Windows are smaller than the context.
    """
    check_training_is_decoding(trained[name])
    fresh = network_for(TARGET, **VARIANTS[name], taps=(0, 2, FINAL), seed=1)
    check_training_is_decoding(fresh, folder=tmp_path, rule=Coupled(3.0))


def no_root(patch) -> None:
    right = DFlashNetwork.block_tokens
    patch.setattr(
        DFlashNetwork, "block_tokens", lambda s, r, n: right(s, torch.full_like(r, MASK), n)
    )


def roots_predecessor(patch) -> None:
    patch.setattr(
        dflash_draft,
        "roots_of",
        lambda c: c.tokens.gather(1, (c.lengths - 2).clamp(min=0).unsqueeze(1)),
    )


def taps_off_by_one(patch) -> None:
    right = TargetFeatures.__call__

    def features(self, step):
        tokens, hidden = right(dataclasses.replace(self, taps=[t - 1 for t in self.taps]), step)
        return tokens, {tap + 1: states for tap, states in hidden.items()}

    patch.setattr(TargetFeatures, "__call__", features)


def states_off_by_one(patch) -> None:
    """Seen by the network alone: the features that are compared stay as they are."""
    right = BlockLaws._append

    def append(self, context):
        hidden = {tap: states.roll(1, dims=1) for tap, states in context.hidden.items()}
        return right(self, dataclasses.replace(context, hidden=hidden))

    patch.setattr(BlockLaws, "_append", append)


def anchors_state_is_seen(patch) -> None:
    right = dflash_loss.block_mask

    def mask(anchors, block_size, n_context, sight):
        seen = right(anchors, block_size, n_context, sight)
        root = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)
        seen[..., :n_context] |= torch.arange(n_context) == root
        return seen

    patch.setattr(dflash_loss, "block_mask", mask)


def other_blocks_are_seen(patch) -> None:
    right = dflash_loss.block_mask

    def mask(anchors, block_size, n_context, sight):
        seen = right(anchors, block_size, n_context, sight)
        seen[..., n_context] = True
        return seen

    patch.setattr(dflash_loss, "block_mask", mask)


def window_one_too_wide(patch) -> None:
    right = dflash_loss.block_mask

    def mask(anchors, block_size, n_context, sight):
        wide = sight.window and sight.window + 1
        return right(anchors, block_size, n_context, dataclasses.replace(sight, window=wide))

    patch.setattr(dflash_loss, "block_mask", mask)


def lenient(append: Callable) -> Callable:
    """`_append` that is told what the cache holds, so that its own check is blind."""

    def run(self, context):
        extra = self.cache.lengths - (context.lengths - 1 - context.n_new)
        return append(self, dataclasses.replace(context, lengths=context.lengths + extra))

    return run


def context_twice(patch) -> None:
    right = lenient(BlockLaws._append)
    patch.setattr(BlockLaws, "_append", lambda *a: (right(*a), right(*a)))


def noise_is_left(patch) -> None:
    patch.setattr(BlockLaws, "_append", lenient(BlockLaws._append))
    right = TreeCache.commit

    def commit(self, path, n):
        if path.shape[1] == 0:
            path, n = self.lengths.new_zeros(len(n), 1), torch.ones_like(n)
        return right(self, path, n)

    patch.setattr(TreeCache, "commit", commit)


PLANTS = [
    (no_root, "bidirectional"),
    (roots_predecessor, "causal"),
    (taps_off_by_one, "bidirectional"),
    (states_off_by_one, "at the input"),
    (anchors_state_is_seen, "mixed"),
    (other_blocks_are_seen, "bidirectional"),
    (window_one_too_wide, "mixed"),
    (window_one_too_wide, "window"),
    (context_twice, "bidirectional"),
    (context_twice, "mixed"),
    (noise_is_left, "bidirectional"),
    (noise_is_left, "at the input"),
]


@pytest.mark.parametrize(("plant", "name"), PLANTS, ids=[f"{p.__name__}-{n}" for p, n in PLANTS])
def test_planted_bugs_are_seen(trained, plant, name):
    """Negative controls: each is a bug of published training or serving code."""
    with pytest.raises(AssertionError):
        check_training_is_decoding(trained[name], plant)


def test_contexts_of_other_lengths_are_refused(trained, monkeypatch):
    """Without `lenient` the same two bugs end in an error of their own: the books do not agree."""
    right = BlockLaws._append
    monkeypatch.setattr(BlockLaws, "_append", lambda *a: (right(*a), right(*a)))
    with pytest.raises(ValueError, match=r"context\.new_tokens"):
        generate(TARGET, STORY[:5], DFlash(trained["causal"]), max_new_tokens=6)


# The parts


def test_the_example_of_a_sight():
    """Catches a window that counts another way in the past than ahead, or off by one."""
    query, key = torch.tensor([[4], [5]]), torch.arange(7)
    rows = {
        Sight(): ["1111111", "1111111"],
        Sight(causal=True): ["1111100", "1111110"],
        Sight(causal=True, window=2): ["0001100", "0000110"],
        Sight(window=2): ["0001110", "0000111"],
        Sight(window=1): ["0000100", "0000010"],
    }
    for sight, expected in rows.items():
        seen = sight.sees(query, key).int().tolist()
        assert ["".join(map(str, row)) for row in seen] == expected


def test_sights_by_name():
    """Catches the full layer at another end than the released checkpoints have it."""
    assert sights_of("mixed", 3, 8) == (Sight(True, 8), Sight(True, 8), Sight())
    assert sights_of("causal", 2) == (Sight(True), Sight(True))
    assert sights_of("bidirectional", 1, 5) == (Sight(False, 5),)


def test_the_published_taps():
    """Catches layer ids taken for taps: Strix Halo's ids of 40 layers, and one tap half-way."""
    ids = [1, 6, 11, 16, 22, 27, 32, 37]
    assert dflash_taps(40, 8) == tuple(layer + 1 for layer in ids)
    assert dflash_taps(36, 1) == (19,)
    assert dflash_taps(6, 2) == (2, 4)


# Bad input

NETWORK = network_for(TARGET)
CONFIG = NETWORK.config


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DFlash(NETWORK, block_size=0), r"block_size: expected at least 1 \(the root\)"),
        (lambda: DFlash(NETWORK, 4), r"n_drafts: expected 1\.\.3, .*got 4"),
        (lambda: DFlash(NETWORK, 0), r"n_drafts: expected 1\.\.3, .*got 0"),
        (lambda: DFlash(NETWORK, 3, block_size=3), r"n_drafts: expected 1\.\.2, .*got 3"),
        (lambda: DFlash(NETWORK, 1, block_size=1), r"n_drafts: expected None for a block of 1"),
        (lambda: DFlash(NETWORK, top_k=12), r"top_k: expected 1\.\.11 .*got 12"),
        (lambda: DFlash(NETWORK, n_nodes=2), "n_nodes: expected at least n_drafts=3, got 2"),
        (
            lambda: DFlash(network_for(TARGET, dflash2=SIZES), block_size=8),
            "block_size: expected at most 4, .*DFlash 2 .*got 8",
        ),
        (lambda: network_for(TARGET, block_size=0), "block_size: expected at least 1"),
        (lambda: network_for(TARGET, mask_token=11), "mask_token: .*vocabulary of 11, got 11"),
        (lambda: network_for(TARGET, mask_token=-1), "mask_token: .*got -1"),
        (lambda: network_for(TARGET, taps=()), r"taps: expected some of .*got \[\]"),
        (lambda: network_for(TARGET, taps=(1, -2)), r"taps: .*got \[1, -2\]"),
        (lambda: network_for(TARGET, kind="full"), "kind: expected .*got 'full'"),
        (lambda: network_for(TARGET, window=0), "window: expected at least 1 or None, got 0"),
        (
            lambda: DFlashNetwork(CONFIG, (1,), mask_token=0, sights=[Sight()]),
            "sights: expected 2, one a layer, got 1",
        ),
        (lambda: network_for(TARGET, inject=False, dflash2=SIZES), "inject: .*got False"),
        (lambda: DDTree(NETWORK, 0), "n_nodes: expected at least 1, got 0"),
        (
            lambda: DDTree(NETWORK, confidence_temperature=0.0),
            r"confidence_temperature: expected a number above 0, got 0\.0",
        ),
        (lambda: dflash_taps(5, 3), r"n_taps: expected 1\.\.2 for 5 blocks, got 3"),
        (lambda: dflash_taps(40, 0), r"n_taps: expected 1\.\.37 for 40 blocks, got 0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    """Catches arguments that run, and give something else than was meant."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("network", "target", "length", "message"),
    [
        (NETWORK, TARGET3, 9, "vocabulary of 11 and width 16, but the target has 3"),
        (NETWORK, small_target(4, n_layers=3).float(), 9, "float64 on cpu, but .*float32"),
        (NETWORK, TARGET, 257, "max_position_embeddings=256 is below the run's 257"),
        (network_for(TARGET, taps=(1, 4)), TARGET, 9, r"taps \[1, 4\].*0\.\.3"),
    ],
)
def test_a_network_of_another_target_is_refused(network, target, length, message):
    """Catches a mismatch that shows only in the middle of a run, or not at all."""
    with pytest.raises(ValueError, match=message):
        DFlash(network).begin(target, 1, length)
