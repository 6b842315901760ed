"""The hybrid: its cache equals plain passes, every drafter is lossless on it, bugs turn red."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st

import specdec.models.experts as experts
from specdec import (
    FINAL,
    Coupled,
    Draft,
    DraftModel,
    Greedy,
    LayerSkip,
    PromptLookup,
    generate,
)
from specdec.cache import everything
from specdec.drafters.dflash import DFlashNetwork
from specdec.drafters.dflash_draft import DFlash
from specdec.drafters.eagle import Eagle1, Eagle3
from specdec.drafters.eagle_tree import Eagle
from specdec.drafters.medusa import Medusa, MedusaHeads
from specdec.drafters.mtp import SequentialModules
from specdec.drafters.mtp_draft import MTPModules
from specdec.drafters.mtp_heads import MTPHeads, ParallelHeads
from specdec.models import QwenMoe, QwenMoeConfig, TransformerConfig
from specdec.models.experts import MoeMLP
from specdec.models.qwen_moe import FULL, LINEAR
from specdec.testing import LosslessError, check_lossless, plain_sequence, small_hybrid
from specdec.testing.drafters import Adversary, Flaky
from specdec.testing.strategies import hybrids, prompts, rules, small_target
from specdec.trees import dense_choices
from tests.builders import Scripted, oracle
from tests.helpers import along_paths, random_parents, random_tokens
from tests.models.test_delta_net import (
    PLANTED,
    VOCAB,
    difference,
    follow,
    is_red,
    long_plan,
    store_of,
)
from tests.test_cache import plans

EXACT = 1e-10  # a search over 299 random hybrids and plans found 2.1e-12 at most
MODEL = small_hybrid(0, vocab_size=VOCAB)
TAPS = (0, 1, 2, 3, 4, FINAL)


# The cache's law on the whole model


def test_the_example():
    """Catches the plain cases; the controls below break this plan."""
    assert follow(long_plan(), MODEL, TAPS) < EXACT


@given(plans())
@settings(max_examples=25, deadline=None)
def test_the_law(plan):
    """Catches a state, a window, a key or a position that is not that of a node's own prefix.

    Ragged rows, random trees grown in several appends, committed along random paths, for several
    rounds. The search goes for the largest difference.
    """
    worst = follow(plan, MODEL, TAPS)
    target(worst, label="largest difference")
    assert worst < EXACT


def variant(seed: int = 3, **changes: object) -> QwenMoe:
    """A hybrid of another shape, with the weights drawn anew."""
    like = small_hybrid(seed, vocab_size=VOCAB)
    model = QwenMoe(replace(like.config, **changes)).double()
    generator = torch.Generator().manual_seed(seed)
    model.reset_parameters(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.shape != (4,):  # gains; four heads keep decays
                parameter.add_(0.3 * torch.rand(len(parameter), generator=generator))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_experts": 0, "num_experts_per_tok": 1},
        {"layer_types": (LINEAR,) * 4},
        {"layer_types": (FULL,) * 4},
        {"layer_types": None},
        {"norm_topk_prob": False, "linear_conv_kernel_dim": 2},
        {"num_key_value_heads": 1, "linear_num_key_heads": 4, "partial_rotary_factor": 1.0},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_every_shape_keeps_the_law(changes):
    """Catches a store of no layers, a layer that is handed another's store or place in it."""
    model = variant(**changes)
    assert (model.head.weight is model.embedding.weight) == model.config.tie_word_embeddings
    assert follow(long_plan(), model, TAPS) < EXACT


def test_blocks_read_their_own_place_in_the_stores():
    """Catches two blocks that share a state: each block must change what is said, and only it."""
    model = variant(layer_types=(LINEAR, FULL, LINEAR, FULL))
    cache = model.new_cache(1, 8)
    model(torch.tensor([[1, 2, 3]]), cache)
    cache.commit(*everything(3, 1, "cpu"))
    states = store_of(cache).states
    assert states.shape == (2, 1, 4, 4, 6)
    assert not torch.equal(states[0], states[1])


def test_leaving_early_and_resuming():
    """Catches a recurrent layer whose pending nodes are counted twice, or not, once resumed.

    Nodes drafted by two blocks are taken up by the others; the next round sees all of it.
    """
    rng, cache = random.Random(5), MODEL.new_cache(2, 30)
    committed: list[list[int]] = [[], []]
    for _ in range(3):
        tokens, parents = random_tokens(rng, 2, 7, VOCAB), random_parents(rng, 2, 7)
        early, states = [], []
        for piece in (slice(0, 1), slice(1, 4)):
            low = MODEL(tokens[:, piece], cache, parents=parents[:, piece], exit_layer=2, taps=(2,))
            early.append(low.logits)
            states.append(low.hidden[2])
        expected = along_paths(
            lambda s: MODEL(s, exit_layer=2), committed, tokens[:, :4], parents[:, :4]
        )
        assert expected.logits is not None
        assert (torch.cat(early, dim=1) - expected.logits).abs().max() < EXACT
        resume = (2, torch.cat(states, dim=1))
        actual = MODEL(tokens, cache, parents=parents, resume=resume, taps=(3, 4, FINAL))
        expected = along_paths(lambda s: MODEL(s, taps=(3, 4, FINAL)), committed, tokens, parents)
        assert difference(actual, expected) < EXACT
        ends = [rng.randrange(7) for _ in range(2)]
        paths = []
        for row, end in zip(parents.tolist(), ends, strict=True):
            path = [end]
            while row[path[0]] >= 0:
                path.insert(0, row[path[0]])
            paths.append(path)
        padded = torch.tensor([path + [0] * (7 - len(path)) for path in paths])
        cache.commit(padded, torch.tensor([len(path) for path in paths]))
        for b, path in enumerate(paths):
            committed[b] += tokens[b, path].tolist()


def test_a_draft_of_two_blocks_may_be_dropped():
    """Catches states moved by a drafter that leaves early, and a commit that finds no nodes."""
    tokens, cache = torch.tensor([[1, 2, 3]] * 2), MODEL.new_cache(2, 9)
    MODEL(tokens, cache, exit_layer=1)
    with pytest.raises(ValueError, match="been through 1 of 4 blocks"):
        cache.commit(*everything(3, 2, "cpu"))
    cache.commit(tokens[:, :0], torch.zeros(2, dtype=torch.long))
    assert not bool(store_of(cache).states.any())
    assert difference(MODEL(tokens, cache), MODEL(tokens)) < EXACT


def test_loop_and_grouped_experts_say_the_same():
    """Catches a switch that reaches some blocks only, and experts that part between the two."""
    row, model = torch.tensor([1, 2]), small_hybrid(0)
    said = []
    for way in ("loop", "grouped"):
        model.set_experts(way)
        assert {b.mlp.experts for b in model.blocks if isinstance(b.mlp, MoeMLP)} == {way}
        said.append(generate(model, row, max_new_tokens=20).sequences[0].tolist())
    assert said[0] == said[1]
    with pytest.raises(ValueError, match=r"experts: .*got 'fast'"):
        model.set_experts("fast")
    with pytest.raises(ValueError, match=r"experts: .*got 'fast'"):
        QwenMoe(MODEL.config, experts="fast")


# Every drafter of the library

HYBRID = small_hybrid(1, n_layers=3)
DENSE = TransformerConfig(11, 16, 32, 1, 4, 2, tie_word_embeddings=False, qk_norm=True)
EXAMPLE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]
ROWS = [torch.tensor([3]), torch.tensor([1, 2, 1, 2, 4, 1])]


def drawn(network, seed: int = 0):
    """The network in float64 with every weight random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.double().parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, scale, generator=generator)
    return network.eval().requires_grad_(False)


def medusa(choices, draw: bool = False) -> Medusa:
    return Medusa(drawn(MedusaHeads.for_target(HYBRID, 3)), choices, draw=draw)


def dflash(**options: int) -> DFlash:
    config = replace(DENSE, num_hidden_layers=2)
    return DFlash(drawn(DFlashNetwork(config, (1, 3), mask_token=10, block_size=4)), **options)


def mtp(n_modules: int, tap: int = FINAL, **options: int) -> MTPModules:
    config = replace(DENSE, num_hidden_layers=n_modules)
    return MTPModules(drawn(SequentialModules(config, tap=tap, own_norm=True)), **options)


DRAFTERS = {
    "lookup": lambda: PromptLookup(2, 4),
    "dense draft model": lambda: DraftModel(small_target(2, n_layers=1), 3),
    "dense draft model, tree": lambda: DraftModel(
        small_target(2, n_layers=1), 3, branching=(3, 2, 1)
    ),
    "hybrid draft model": lambda: DraftModel(small_hybrid(2, n_layers=2), 3),
    "hybrid draft model, tree": lambda: DraftModel(
        small_hybrid(2, n_layers=2), 3, branching=(3, 1, 2)
    ),
    "the target itself": lambda: DraftModel(HYBRID, 3, branching=(2, 1, 1)),
    "medusa": lambda: medusa(dense_choices((1, 1, 1))),
    "medusa, tree": lambda: medusa(EXAMPLE, draw=True),
    "eagle 1": lambda: Eagle(drawn(Eagle1(DENSE)), 3),
    "eagle 1, tree": lambda: Eagle(drawn(Eagle1(DENSE)), 3, top_k=3, n_nodes=8),
    "eagle 3": lambda: Eagle(drawn(Eagle3(DENSE, (0, 1, 3))), 3),
    "eagle 3, tree": lambda: Eagle(drawn(Eagle3(DENSE, (0, 1, 3))), 3, top_k=3, n_nodes=8),
    "dflash": lambda: dflash(),
    "dflash, tree": lambda: dflash(top_k=3, n_nodes=9),
    "layerskip": lambda: LayerSkip(2, 3),
    "layerskip, tree": lambda: LayerSkip(1, 3, branching=(2, 2, 1)),
    "mtp heads": lambda: MTPHeads(drawn(ParallelHeads(DENSE, 4, 2))),
    "mtp heads, tree": lambda: MTPHeads(drawn(ParallelHeads(DENSE, 4, 2)), EXAMPLE),
    "mtp modules": lambda: mtp(2),
    "mtp module again, tree": lambda: mtp(1, 3, n_drafts=3, top_k=3, n_nodes=7),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_lossless(name):
    """Catches a drafter whose way of using the cache (uncommitted, resumed, dropped, grown level by
    level) a recurrent layer does not follow; replay compares the taps with plain passes.
    """
    check_lossless(
        HYBRID,
        DRAFTERS[name](),
        prompts=ROWS,
        max_new_tokens=6,
        rules=[Greedy() if "tree" in name else Coupled(0.8, seed=1)],
        n_samples=0,
    )


def test_a_drawn_drafter_follows_the_targets_law():
    """Catches a law p that is that of a neighbour in the tree."""
    check_lossless(
        HYBRID,
        DraftModel(small_hybrid(2, n_layers=2), 3, branching=(2, 1, 1)),
        prompts=ROWS,
        max_new_tokens=6,
        rules=[Greedy(), Coupled(0.6, top_k=8, seed=5)],
        with_replay=False,
        n_samples=128,
    )


def test_other_hybrids_are_lossless_under_deep_trees():
    """Catches what a perfect drafter's long paths show, with trees and unused rows around them.

    As `test_prove.py` does for dense targets; stop tokens, budgets and prompts of one token.
    """
    for seed, model in enumerate((small_hybrid(4, n_experts=0), small_hybrid(5))):
        truth = [plain_sequence(model, row, 10) for row in ROWS]
        for drafter in (
            Adversary(truth, n_nodes=12, accuracy=0.9, seed=seed),
            Adversary(truth, n_nodes=6, accuracy=1.0, tree=False, seed=seed),
        ):
            run = generate(model, ROWS, Flaky(drafter, 0.2, seed), max_new_tokens=10)
            assert [s.tolist() for s in run.sequences] == [t.tolist() for t in truth]
            assert run.metrics.tau > 1.3


@given(hybrids(), prompts(max_rows=3, max_length=6), rules(), st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_any_hybrid_and_rule(model, rows, rule, seed):
    """Catches shapes that the targets above do not have."""
    truth = [plain_sequence(model, row, 6, rule.for_row(b)) for b, row in enumerate(rows)]
    drafter = Adversary(truth, n_nodes=9, seed=seed)
    run = generate(model, rows, drafter, max_new_tokens=6, rule=rule)
    assert [s.tolist() for s in run.sequences] == [t.tolist() for t in truth]


@pytest.mark.parametrize("tree", [False, True])
def test_an_empty_draft_after_a_round_that_accepts(tree):
    """Catches a state that is moved twice, or not at all, by the one token of an empty draft."""
    truth = [plain_sequence(HYBRID, row, 20) for row in ROWS]
    script = oracle(truth, 3, lambda length: length % 4, tree=tree, vocab_size=11)
    calls = [0]

    def every_other(context) -> Draft:
        calls[0] += 1
        return Draft.empty(len(context.lengths)) if calls[0] % 2 else script(context)

    run = generate(HYBRID, ROWS, Scripted(every_other), max_new_tokens=20)
    assert [s.tolist() for s in run.sequences] == [t.tolist() for t in truth]
    accepted = [(int(r.n_accepted.sum()), s.draft.n_nodes) for r, s in pairwise(run.rounds)]
    assert sum(n > 0 and nodes == 0 for n, nodes in accepted) > 3


def test_positions_beyond_the_models_are_refused():
    """Catches a run that would leave the positions the model knows."""
    short = QwenMoe(replace(HYBRID.config, max_position_embeddings=8)).double()
    with pytest.raises(ValueError, match="9 positions, but max_position_embeddings is 8"):
        short(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"prompts\[0\]: 3 tokens and max_new_tokens=6 exceed"):
        generate(short, torch.tensor([1, 2, 3]), max_new_tokens=6)


def test_heads_copied_from_the_last_block_need_a_dense_target():
    """Catches copies of a block that the heads' cache cannot serve."""
    with pytest.raises(ValueError, match=r"target: expected a Transformer.* got QwenMoe"):
        ParallelHeads.for_target(HYBRID)  # pyright: ignore[reportArgumentType]


# Bad shapes

SHAPE = MODEL.config
COUNTS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "max_position_embeddings num_experts_per_tok moe_intermediate_size "
    "shared_expert_intermediate_size intermediate_size"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({name: 0}, rf"{name}: expected at least 1, got 0") for name in COUNTS.split()]
    + [
        ({"rope_theta": 0.0}, r"rope_theta: expected a positive number, got 0\.0"),
        ({"rms_norm_eps": -1e-6}, r"rms_norm_eps: expected a positive number, got -1e-06"),
        ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim: expected at least 2, got 1"),
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads: expected a divisor of num_attention_heads \(4\), got 3",
        ),
        (
            {"linear_num_key_heads": 3},
            r"linear_num_key_heads: expected a divisor of linear_num_value_heads \(4\), got 3",
        ),
        ({"num_experts": -1}, r"num_experts: expected 0, or at least .* \(2\), got -1"),
        ({"num_experts": 1}, r"num_experts: expected 0, or at least .* \(2\), got 1"),
        ({"partial_rotary_factor": 0.1}, r"partial_rotary_factor: .* head_dim 8, got 0\.1"),
        ({"partial_rotary_factor": 0.4}, r"partial_rotary_factor: .* head_dim 8, got 0\.4"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor: .* head_dim 8, got 1\.5"),
        ({"layer_types": (LINEAR,) * 3}, r"layer_types: expected 4 of 'linear_attention'"),
        ({"layer_types": ("sliding",) * 4}, r"layer_types: .* got \['sliding'"),
    ],
)
def test_shapes_that_make_no_model_are_named(changes, message):
    """Catches a wrong config that only shows as a shape error deep in a layer, or as silence."""
    with pytest.raises(ValueError, match=message):
        replace(SHAPE, **changes)


def test_layer_types_by_default_and_as_a_list():
    """Catches attention in the first block of four instead of the last."""
    kinds = replace(SHAPE, num_hidden_layers=9, layer_types=None).kinds
    assert [i for i, kind in enumerate(kinds) if kind == FULL] == [3, 7]
    assert {*kinds} == {FULL, LINEAR}


def test_the_preset_has_the_published_sizes():
    """Catches a mistyped number: 35B in all, 3B of them awake. Nothing is allocated."""
    config = QwenMoeConfig.qwen35_35b_a3b()
    with torch.device("meta"):
        model = QwenMoe(config)
    routed = sum(p.numel() for n, p in model.named_parameters() if ".routed." in n)
    total = sum(p.numel() for p in model.parameters())
    awake = total - routed + routed * config.num_experts_per_tok / config.num_experts
    assert 34e9 < total < 36e9
    assert 2.5e9 < awake < 3.6e9
    assert (config.kinds.count(LINEAR), config.kinds.count(FULL)) == (30, 10)


@pytest.mark.parametrize(
    ("batch_size", "max_length"), [(0, 4), (1, -1)], ids=["no rows", "negative"]
)
def test_a_cache_of_nothing_is_refused(batch_size, max_length):
    """Catches buffers of negative size."""
    with pytest.raises(ValueError, match=f"batch_size, max_length: .* got {batch_size}, "):
        MODEL.new_cache(batch_size, max_length)


def test_a_cache_of_another_model_is_refused():
    """Catches a cache of fewer blocks, whose stores would run out halfway through a pass."""
    with pytest.raises(ValueError, match="cache: expected 1 rows and 4 layers, got 1 rows and 3"):
        MODEL(torch.tensor([[1]]), HYBRID.new_cache(1, 4))


# Negative controls


def experts_not_unsorted(patch: pytest.MonkeyPatch) -> None:
    """What the experts say is combined in the order of experts."""
    patch.setattr(experts, "unsort", lambda out, order: out)


EVERY_PLANT = [*PLANTED, experts_not_unsorted]


@pytest.mark.parametrize("plant", EVERY_PLANT, ids=lambda plant: plant.__name__)
def test_planted_bugs_turn_the_law_red(monkeypatch, plant):
    """The comparison with fresh passes over every prefix must notice each of them."""
    plant(monkeypatch)
    assert is_red(long_plan(), MODEL)


def lossless(drafter) -> None:
    """Prompts of one token keep nothing while the long one's first chunk is committed."""
    rows = [torch.tensor([3]), torch.tensor([7]), torch.arange(12) * 5 % 11]
    check_lossless(
        HYBRID,
        drafter,
        prompts=rows,
        max_new_tokens=12,
        rules=[Coupled(seed=2)],
        with_replay=False,
        n_samples=0,
    )


@pytest.mark.parametrize("plant", EVERY_PLANT, ids=lambda plant: plant.__name__)
def test_planted_bugs_change_what_is_said(monkeypatch, plant):
    """`check_lossless` must notice each of them, too: one wrong state is another token soon."""
    plant(monkeypatch)
    drafter = DraftModel(small_target(2, n_layers=1), 3, branching=(3, 2, 1))
    with pytest.raises(LosslessError):
        lossless(drafter)


def test_without_a_planted_bug_nothing_is_red():
    """Controls that fail for another reason than the planted bug."""
    assert not is_red(long_plan(), MODEL)
    lossless(DraftModel(small_target(2, n_layers=1), 3, branching=(3, 2, 1)))
