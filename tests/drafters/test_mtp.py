"""MTP modules: lossless, they draft what training says they should, laws as declared, losses."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import specdec.drafters.mtp_draft as mtp_draft
from specdec import FINAL, Coupled, Greedy, Rejection, Typical, generate
from specdec.accept import without_replacement
from specdec.drafters.eagle_tree import CachedLayer
from specdec.drafters.mtp import SequentialModules, mtp_loss, resized
from specdec.drafters.mtp_draft import MTPModules, MTPState
from specdec.models import TransformerConfig
from specdec.models.transformer import angles_of
from specdec.testing import LosslessError, check_lossless, exact_law, target_law
from specdec.testing.replay import Recorder, nodes
from specdec.testing.strategies import small_target
from tests.drafters.test_eagle import round_law_error


def with_norm(target, seed: int = 0):
    """Final norms have weights of their own, so that a missing or doubled one shows."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(target.hidden_size, generator=generator, dtype=torch.float64)
    target.norm.weight.copy_(0.5 + drawn)
    return target


def network_for(target, n_modules: int, tap: int = FINAL, own_norm: bool = False, seed: int = 0):
    config = dataclasses.replace(target.config, num_hidden_layers=n_modules)
    network = SequentialModules(config, tap=tap, own_norm=own_norm).double()
    generator = torch.Generator().manual_seed(seed)
    network.reset_parameters(generator)
    for parameter in network.parameters():
        if parameter.ndim == 1:
            parameter.data.copy_(0.5 + torch.rand(len(parameter), generator=generator))
    return network.eval()


TARGET, TARGET3 = with_norm(small_target(4), 4), small_target(3, vocab_size=3)
LAST = TARGET.n_layers
PROMPT = torch.tensor([1, 2])
# 24 tokens without a short period, so that a shift shows
STORY = generate(TARGET, torch.tensor([7, 2]), max_new_tokens=24).sequences[0]


def states_of(target, network, tokens: Tensor) -> dict[int, Tensor]:
    return dict(target(tokens, taps=network.taps, logits=False).hidden)


def train(network, parameters, n_steps: int, **options) -> float:
    optimizer, loss = torch.optim.Adam(parameters, lr=0.03), torch.tensor(math.nan)
    hidden = states_of(TARGET, network, STORY[None])
    for _ in range(n_steps):
        loss = mtp_loss(network, TARGET, hidden, STORY[None], weight=1.0, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.fixture(scope="module")
def trained() -> dict:
    """Modules that know STORY by heart, by their number."""
    networks = {1: network_for(TARGET, 1), 3: network_for(TARGET, 3, LAST, True)}
    for network in networks.values():
        train(network, network.parameters(), 30)
    return networks | {2: resized(networks[3], 2)}


def tau(drafter: MTPModules) -> float:
    """Tokens a pass on STORY, the last round left out."""
    run = generate(TARGET, STORY[:2], drafter, max_new_tokens=24)
    assert run.sequences[0].equal(STORY)
    whole = [r for r in run.rounds if not r.cut.any()]
    return sum(len(r.new_tokens[0]) for r in whole) / len(whole)


# What training sees: no cache, no tree, one path at a time


@torch.no_grad()
def trained_law(network, row: Tensor, path: tuple[int, ...]) -> Tensor:
    """q [V] after `path` below the root of `row` by training's forward pass.

    Of one module that is run again: by plain causal passes over all it has been fed.
    """
    behind = [*path, *[0] * network.n_modules]  # training's texts are longer than D
    tokens, known = torch.cat([row, torch.tensor(behind)])[None], len(row) - 1
    states = states_of(TARGET, network, tokens)[network.tap]
    states[:, known:] = 0.0  # the target has not seen the root yet
    if network.n_modules > 1:
        return network(states, tokens, TARGET)[len(path)][0, known - 1].softmax(-1)
    states, embeddings = states[:, :known], TARGET.embedding(tokens[:, 1:])
    for n in range(known, known + len(path) + 1):
        rotary = angles_of(network.config, n, states)
        handed = network.step(1, TARGET, states, embeddings[:, :n], rotary)
        states = torch.cat([states, handed[:, -1:]], dim=1)
    return network.logits(1, states[:, -1:], TARGET)[0, 0].softmax(-1)


def check_drafts(
    drafter: MTPModules,
    plant: Callable[[pytest.MonkeyPatch], None] | None = None,
    prompts=(STORY[:1], STORY[:2], STORY[:6]),
    n_new: int = 7,
) -> None:
    """The law of every node, in every round, is what training gives.

    `plant` puts a bug into decoding; training stays as it is.
    """
    recorder = Recorder(drafter)
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        run = generate(
            TARGET, list(prompts), recorder, max_new_tokens=n_new, rule=Rejection(seed=1)
        )
    assert len({int(n) for r in run.rounds for n in r.n_accepted}) > 1, "nothing was tried"
    compared = [0] * drafter.n_drafts
    for context, draft in recorder.seen:
        for b in (context.live & (context.lengths > 1)).nonzero().flatten().tolist():
            row = context.tokens[b, : int(context.lengths[b])]
            siblings: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
            for path, q in nodes(draft, b, 99):
                assert q is not None
                siblings.setdefault(path[:-1], []).append((path[-1], q))
            for above, drawn in siblings.items():
                tokens, laws = torch.tensor([token for token, _ in drawn]), [q for _, q in drawn]
                expected = without_replacement(trained_law(drafter.network, row, above), tokens)
                assert (torch.stack(laws) - expected).abs().max() < 1e-9
                compared[len(above)] += 1
    assert min(compared) > 2


VARIANTS = [
    (n, tap, own)
    for n, (tap, own) in itertools.product(
        (1, 2, 3), [(FINAL, False), (FINAL, True), (LAST, False), (LAST, True)]
    )
]


@pytest.mark.parametrize(("n_modules", "tap", "own_norm"), VARIANTS)
def test_a_drafted_chain_is_what_training_says(n_modules, tap, own_norm):
    """Catches states, tokens, places, norms or masks of decoding that training never saw.

    Above all the token that is off by one: the same tokens come out, by losslessness, and a state
    begun afresh reads the same wrong token, so that replay is blind to it as well.
    """
    network = network_for(TARGET, n_modules, tap, own_norm)
    check_drafts(MTPModules(network, 3 if n_modules == 1 else None))


@pytest.mark.parametrize("n_modules", [1, 2, 3])
def test_a_drafted_tree_is_what_training_says(trained, n_modules):
    """Catches nodes that read the state of another parent, or see another branch."""
    n_drafts = max(2, n_modules)
    check_drafts(MTPModules(trained[n_modules], n_drafts, top_k=3, n_nodes=3 * n_drafts))


# Losslessness


@pytest.mark.parametrize(
    ("n_modules", "options"),
    [
        (1, {"n_drafts": 3}),
        (1, {"n_drafts": 3, "top_k": 3, "n_nodes": 7}),
        (2, {}),
        (3, {}),
        (3, {"top_k": 3, "n_nodes": 9}),
    ],
    ids=["one again", "one again, tree", "two", "three", "three, tree"],
)
def test_chains_and_trees_are_lossless(trained, n_modules, options):
    """Catches rows that read each other, states that go stale (by replay), a wrong law."""
    report = check_lossless(
        TARGET,
        MTPModules(trained[n_modules], **options),
        prompts=[STORY[:1], STORY[:9]],
        max_new_tokens=5,
        rules=[Greedy() if n_modules == 3 else Coupled(0.3)],
        n_samples=64 if n_modules == 3 else 0,
    )
    assert max(report.tau.values()) > 1.2
    assert not report.near_ties


@pytest.mark.parametrize("rule", [Typical(), Rejection(0.7, top_k=4), Coupled(top_p=0.8)])
@pytest.mark.parametrize("n_modules", [1, 3])
def test_every_rule_and_budget_runs(trained, rule, n_modules):
    """Catches drafts that a truncation makes invalid, and rows that end before their neighbours."""
    for top_k in (1, 3):
        drafter = MTPModules(trained[n_modules], 3, top_k=top_k, n_nodes=9)
        prompts = [STORY[:1], STORY[:6], STORY[:3]]
        run = generate(TARGET, prompts, drafter, max_new_tokens=[7, 1, 4], rule=rule)
        assert [len(new) for new in run.new_tokens] == [7, 1, 4]
        for r in run.rounds:
            assert not r.draft.mask()[~r.live].any()


TWO3 = network_for(TARGET3, 2, LAST, True)


@pytest.mark.parametrize(
    ("drafter", "n_tokens", "rule"),
    [
        (MTPModules(TWO3), 3, Rejection(top_k=2)),
        (MTPModules(TWO3, 1, top_k=2, n_nodes=2), 2, Rejection()),
    ],
    ids=["chain", "tree"],
)
def test_rejection_follows_the_targets_law_exactly(drafter, n_tokens, rule):
    """Catches a declared q that is not the law drawn from, in this round or in the next."""
    own = target_law(TARGET3, PROMPT, n_tokens, rule)
    law = exact_law(TARGET3, drafter, PROMPT, n_tokens, rule)
    assert max(abs(law.get(k, 0.0) - own.get(k, 0.0)) for k in law.keys() | own.keys()) < 1e-9


@pytest.mark.parametrize(
    "drafter",
    [
        MTPModules(TWO3),
        MTPModules(TWO3, draw=False),
        MTPModules(TWO3, top_k=2, n_nodes=2),
        MTPModules(TWO3, top_k=2, n_nodes=4, draw=False),
        MTPModules(network_for(TARGET3, 1), 2),
    ],
    ids=["drawn chain", "chosen chain", "drawn tree", "chosen tree", "one again"],
)
def test_a_round_follows_the_targets_law_exactly(drafter):
    """Catches drawn nodes that are pruned, and laws of chosen ones."""
    assert round_law_error(drafter) < 1e-9


# Planted bugs


def plant_pass(change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Change what a module is given: state, k, piece, states, tokens, parents -> the last four."""
    right = MTPState._pass

    def run(self, k, piece, states, tokens, parents):
        return right(self, k, *change(self, k, piece, states, tokens, parents))

    return lambda patch: patch.setattr(MTPState, "_pass", run)


def token_before(state, k, piece, states, tokens, parents):
    """Module k reads x_{i+k-1}; in rows of one length, as a chain."""
    first = state.context.tokens.gather(1, piece.before.unsqueeze(1) - 1)
    return piece, states, torch.cat([first, tokens[:, :-1]], dim=1), parents


def token_behind(state, k, piece, states, tokens, parents):
    """Module k reads x_{i+k+1} where it is known."""
    return piece, states, torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1), parents


def with_context(plant: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    right = MTPState.propose

    def propose(self, context):
        self.context = context
        return right(self, context)

    def planted(patch):
        patch.setattr(MTPState, "propose", propose)
        plant(patch)

    return planted


@pytest.mark.parametrize("change", [token_before, token_behind])
@pytest.mark.parametrize("n_modules", [1, 2, 3])
def test_a_token_off_by_one_is_seen(change, n_modules):
    """Planted: the embedding of x_{i+k-1}, or of x_{i+k+1}, where x_{i+k} belongs."""
    drafter = MTPModules(network_for(TARGET, n_modules), max(2, n_modules))
    check_drafts(drafter, prompts=[STORY[:5]])
    with pytest.raises(AssertionError):
        check_drafts(drafter, with_context(plant_pass(change)), prompts=[STORY[:5]])


def test_losslessness_and_replay_are_blind_to_a_token_off_by_one(monkeypatch):
    """Why training == decoding is tested: this planted bug passes all of `check_lossless`."""
    with_context(plant_pass(token_before))(monkeypatch)
    drafter = MTPModules(network_for(TARGET, 2))
    check_lossless(
        TARGET, drafter, prompts=[STORY[:5]], max_new_tokens=6, rules=[Greedy()], n_samples=0
    )


def states_before(state, k, piece, states, tokens, parents):
    return piece, states.roll(1, dims=1) if k == 1 else states, tokens, parents


def states_behind(state, k, piece, states, tokens, parents):
    return piece, states.roll(-1, dims=1) if k > 1 else states, tokens, parents


def tokens_before_the_first(state, k, piece, states, tokens, parents):
    """Tokens that module k has no entry for are seen by those behind them."""
    chain = torch.arange(-1, tokens.shape[1] - 1)
    return piece, states, tokens, None if parents is None else parents.maximum(chain)


@pytest.mark.parametrize("change", [states_before, states_behind, tokens_before_the_first])
def test_states_and_places_that_are_off_are_seen(change):
    """Planted: h_{i-1} for h_i, h^1_{i+1} for h^1_i, entries at places below 0."""
    check_drafts(MTPModules(network_for(TARGET, 3)))
    with pytest.raises(AssertionError):
        check_drafts(MTPModules(network_for(TARGET, 3)), plant_pass(change))


def test_a_wrong_module_at_a_depth_is_seen():
    """Planted: module 2's weights, or its norm, draft depth 3."""
    network = network_for(TARGET, 3, LAST, True)
    step, logits = SequentialModules.step, SequentialModules.logits
    plants = {
        "step": lambda self, k, *rest: step(self, min(k, 2), *rest),
        "logits": lambda self, k, *rest: logits(self, min(k, 2), *rest),
    }
    check_drafts(MTPModules(network))
    for name, planted in plants.items():
        with pytest.raises(AssertionError):
            check_drafts(
                MTPModules(network),
                lambda p, n=name, f=planted: p.setattr(SequentialModules, n, f),
            )


def test_a_norm_too_many_is_seen():
    """Planted: module 2 reads the residual stream where training hands on the normed state."""
    network = network_for(TARGET, 2)
    step = SequentialModules.step

    def planted(self, k, *rest):
        self.tap = LAST
        stream = step(self, k, *rest)
        self.tap = FINAL
        return stream

    with pytest.raises(AssertionError):
        check_drafts(
            MTPModules(network), lambda patch: patch.setattr(SequentialModules, "step", planted)
        )


def test_stale_states_across_rounds_are_seen(monkeypatch):
    """Planted: what is handed on to the next round is that of the first; replay sees it too."""
    right = MTPState._pass

    def run(self, k, piece, *rest):
        before = self.last[k - 1]
        handed = right(self, k, piece, *rest)
        if bool((piece.before > 1).all()):
            self.last[k - 1] = before
        return handed

    drafter, prompts = MTPModules(network_for(TARGET, 2)), [STORY[:5]]
    check_drafts(drafter, prompts=prompts)
    with pytest.raises(AssertionError):
        check_drafts(drafter, lambda p: p.setattr(MTPState, "_pass", run), prompts=prompts)
    monkeypatch.setattr(MTPState, "_pass", run)
    with pytest.raises(LosslessError, match="replay"):
        check_lossless(
            TARGET,
            MTPModules(network_for(TARGET, 2), draw=False),
            prompts=prompts,
            max_new_tokens=12,
            rules=[Greedy(), Coupled(1.0)],
            n_samples=0,
        )


def test_a_cache_that_is_not_rewound_is_seen(trained):
    """Planted: the first drafted node stays in a module's cache, in the place of a true token."""

    def drop(self):
        if self.cache.n_pending:
            first = torch.zeros_like(self.cache.lengths)
            self.cache.commit(first.unsqueeze(1), first + 1)
            self.cache.lengths -= 1  # on the books it is gone

    with pytest.raises(AssertionError):
        check_drafts(
            MTPModules(trained[1], 3),
            lambda patch: patch.setattr(CachedLayer, "drop", drop),
            prompts=[STORY[:5]],
        )

    right = MTPState._pass

    def run(self, k, piece, states, tokens, parents):
        if tokens.shape[1] > piece.width:  # the draft's first node counts as a new token
            more = torch.cat([piece.tokens, tokens[:, :1]], dim=1)
            piece = dataclasses.replace(piece, tokens=more, n=piece.n + 1)
        return right(self, k, piece, states, tokens, parents)

    with pytest.raises(ValueError, match="call propose in every round"):
        check_drafts(
            MTPModules(trained[3]),
            lambda patch: patch.setattr(MTPState, "_pass", run),
            prompts=[STORY[:5]],
        )


@pytest.mark.parametrize(("n_modules", "name"), [(1, "_run_again"), (3, "_run_next")])
def test_parents_that_are_off_are_seen(trained, n_modules, name):
    """Planted: a node of the tree hangs below the node before its parent."""
    right = getattr(MTPState, name)

    def planted(self, tokens, parents):
        return right(self, tokens, (parents - 1).clamp(min=-1))

    drafter = MTPModules(trained[n_modules], 3, top_k=3, n_nodes=9)
    with pytest.raises(AssertionError):
        check_drafts(drafter, lambda patch: patch.setattr(MTPState, name, planted))


# The rounds


def test_modules_run_once_a_round_and_only_where_they_count(trained):
    """Catches the prefix read again, and modules that run for depths beyond the budget."""
    calls: list[tuple[int, int]] = []
    hooks = [
        block.register_forward_hook(lambda _, args, out, k=k: calls.append((k, out.shape[1])))
        for k, block in enumerate(trained[3].blocks, start=1)
    ]
    run = generate(TARGET, STORY[:5], MTPModules(trained[3]), max_new_tokens=16)
    for hook in hooks:
        hook.remove()
    new, left = 4, 16
    for r in run.rounds:
        depth = min(3, left - 1)
        assert calls[:depth] == [(k, new + k - 1) for k in range(1, depth + 1)]
        calls = calls[depth:]
        new, left = len(r.new_tokens[0]), left - len(r.new_tokens[0])
    assert not calls
    assert left == 0


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    """Catches pieces that see another past than a whole, in a ragged batch."""
    drafter = MTPModules(network_for(TARGET, 3, LAST), top_k=2)
    prompts = [STORY[:3], STORY[:12], STORY[:1], STORY[:9]]
    drafts = []
    for size in (512, 1, 2, 4):
        monkeypatch.setattr(mtp_draft, "_CHUNK", size)
        recorder = Recorder(drafter)
        generate(TARGET, prompts, recorder, max_new_tokens=4, rule=Greedy())
        drafts.append([[nodes(d, b, 9) for b in range(4)] for _, d in recorder.seen])
    assert drafts[0] == drafts[1] == drafts[2] == drafts[3]
    monkeypatch.setattr(mtp_draft, "_CHUNK", 2)
    check_drafts(MTPModules(network_for(TARGET, 3, LAST)))


@pytest.mark.parametrize("n_modules", [1, 3])
def test_a_round_that_was_left_out_is_named(n_modules):
    """Catches a wrapper that does not call `propose` each round, and pairs lost for good."""
    drafter = MTPModules(network_for(TARGET, n_modules), 3)
    recorder = Recorder(drafter)
    generate(TARGET, STORY[:5], recorder, max_new_tokens=12, rule=Coupled(2.0))
    state = drafter.begin(TARGET, 1, 20)
    state.propose(recorder.seen[0][0])
    have = [layer.cache.lengths.clone() for layer in state.layers]
    with pytest.raises(ValueError, match=r"context.new_tokens: .*call propose in every round"):
        state.propose(recorder.seen[2][0])
    assert all(n.equal(layer.cache.lengths) for n, layer in zip(have, state.layers, strict=True))
    state.propose(recorder.seen[1][0])


# Training

TOKENS = torch.stack([STORY[:9], STORY[11:20]])
MASK = torch.ones(2, 9, dtype=torch.bool)
MASK[0, 3], MASK[1, 6:] = False, False


@pytest.mark.parametrize(("tap", "own_norm"), [(FINAL, False), (LAST, True)])
def test_gradients_reach_modules_and_target(tap, own_norm):
    """Catches a part that the loss does not train, and states that are cut off the target."""
    network = network_for(TARGET, 3, tap, own_norm)
    target = copy.deepcopy(TARGET).requires_grad_(True)
    mtp_loss(network, target, states_of(target, network, TOKENS), TOKENS, mask=MASK).backward()
    named = [*network.named_parameters(), *target.named_parameters()]
    for name, parameter in named:
        if name == "norm.weight" and tap != FINAL and own_norm:
            assert parameter.grad is None  # the target's final norm is not used
            continue
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().max()) > 0, name
    mtp_loss(network, TARGET, states_of(TARGET, network, TOKENS), TOKENS).backward()
    assert all(parameter.grad is None for parameter in TARGET.parameters())


def test_the_loss_by_hand():
    """Catches a sum for a mean, lambda not divided by D, labels of another module's offset."""
    network = SequentialModules(TransformerConfig(2, 2, 2, 2, 1), tap=FINAL)
    ln3 = math.log(3)
    # module 1 at places 0..2, module 2 at 0 and 1; the last place of each has no label
    first = torch.tensor([[[ln3, 0.0], [0.0, 0.0], [9.0, 0.0]]])
    second = torch.tensor([[[ln3, 0.0], [9.0, 0.0]]])
    network.forward = lambda *_, first=1, a=first, b=second: [a, b][first - 1 :]
    tokens, mirror = torch.tensor([[0, 0, 0, 1]]), SimpleNamespace()
    hidden = {FINAL: torch.zeros(1, 4, 2)}
    # labels of module 1: tokens 2 and 3, q = 3/4 and 1/2; of module 2: token 3, q = 1/4
    one, two = (math.log(4 / 3) + math.log(2)) / 2, math.log(4)
    loss = mtp_loss(network, mirror, hidden, tokens)
    assert float(loss) == pytest.approx(0.3 / 2 * (one + two), abs=1e-6)
    loss = mtp_loss(network, mirror, hidden, tokens, weight=0.1, first=2)
    assert float(loss) == pytest.approx(0.1 * two, abs=1e-6)
    mask = torch.tensor([[True, True, False, True]])
    loss = mtp_loss(network, mirror, hidden, tokens, weight=1.0, mask=mask)
    assert float(loss) == pytest.approx((math.log(2) + two) / 2, abs=1e-6)


@pytest.mark.parametrize("first", [1, 2])
def test_the_loss_place_by_place(first):
    """Catches any shift between states, tokens, masks and labels of a module."""
    network = network_for(TARGET, 3, LAST)
    means = []
    for k in range(first, 4):
        values = []
        for row, counts in zip(TOKENS, MASK, strict=True):
            for i in range(9 - k - 1):
                if counts[i + k + 1]:  # what the row up to i + 1, then a path of k - 1, leads to
                    q = trained_law(network, row[: i + 2], tuple(row[i + 2 : i + k + 1].tolist()))
                    values.append(-math.log(q[row[i + k + 1]]))
        means.append(sum(values) / len(values))
    hidden = states_of(TARGET, network, TOKENS)
    got = mtp_loss(network, TARGET, hidden, TOKENS, weight=0.5, mask=MASK, first=first)
    assert float(got.detach()) == pytest.approx(0.5 * sum(means) / len(means), abs=1e-9)


def test_padding_changes_nothing():
    """Catches padding that is learnt, or seen by what comes before it."""
    network, n = network_for(TARGET, 3), 9
    short = mtp_loss(network, TARGET, states_of(TARGET, network, TOKENS), TOKENS)
    tokens = torch.cat([TOKENS, torch.zeros(2, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(n + 4) < n).expand(2, -1)
    padded = mtp_loss(network, TARGET, states_of(TARGET, network, tokens), tokens, mask=mask)
    assert float((short - padded).detach().abs()) < 1e-12


def test_modules_learn_one_text_and_draft_it(trained):
    """Catches labels or states shifted in training: no module could predict what it drafts.

    What is accepted rises with every module; on its own text each further one adds a draft a round.
    """
    taus = [tau(MTPModules(trained[3], n)) for n in (1, 2, 3)]
    assert taus[0] > 1.8
    assert taus[0] + 0.7 < taus[1] < taus[2] - 0.6
    assert tau(MTPModules(network_for(TARGET, 3, LAST, True))) < 1.5
    assert tau(MTPModules(trained[3], top_k=3, n_nodes=30)) > 3.0


def test_dropped_modules_leave_the_target_as_it_is(trained):
    """Catches modules that hold, hook into or write to the target."""
    target = copy.deepcopy(TARGET)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    logits = target(STORY[None]).logits
    for network in trained.values():
        run = generate(target, STORY[:2], MTPModules(network), max_new_tokens=24)
        assert run.sequences[0].equal(STORY)
        mtp_loss(network, target, states_of(target, network, TOKENS), TOKENS)
        assert not {id(p) for p in network.parameters()} & {id(p) for p in target.parameters()}
        assert all(name.startswith("blocks.") for name in network.state_dict())
    assert target(STORY[None]).logits.equal(logits)
    assert all(tensor.equal(before[name]) for name, tensor in target.state_dict().items())


# MiMo's recipe: one module, copied, the copies fine-tuned


def test_copies_are_those_of_the_last_module():
    """Catches shared weights, a lost tap, norm or dtype, and copies that stay frozen."""
    for tap, own_norm in ((FINAL, False), (LAST, True)):
        network = network_for(TARGET, 2, tap, own_norm).requires_grad_(False)
        more = resized(network, 4)
        assert (more.n_modules, more.config.num_hidden_layers, more.tap) == (4, 4, tap)
        for k, block in enumerate(more.blocks):
            expected = network.blocks[min(k, 1)].state_dict()
            assert block.state_dict().keys() == expected.keys()
            assert all(block.state_dict()[name].equal(expected[name]) for name in expected)
            assert all(parameter.requires_grad == (k > 1) for parameter in block.parameters())
        own, others = more.parameters(), {id(p) for p in network.parameters()}
        assert len({id(p) for p in own} | others) == 3 * len(others)
        assert not more.training
    fewer = resized(network, 1)
    assert fewer.n_modules == fewer.config.num_hidden_layers == 1
    states, tokens = torch.randn(1, 6, 16, dtype=torch.float64), STORY[None, :6]
    assert fewer(states, tokens, TARGET)[0].equal(network(states, tokens, TARGET)[0])


def test_fine_tuned_copies_draft_deeper(trained):
    """Catches a first module that the copies' loss moves, and copies that never train."""
    network = resized(trained[1], 3)
    first = {name: w.clone() for name, w in network.blocks[0].state_dict().items()}
    again, copied = tau(MTPModules(trained[1], 3)), tau(MTPModules(network))
    target = copy.deepcopy(TARGET).requires_grad_(True)
    loss = mtp_loss(network, target, states_of(target, network, TOKENS), TOKENS, first=2)
    loss.backward()
    assert all(parameter.grad is None for parameter in network.blocks[0].parameters())
    for block in network.blocks[1:]:
        assert all(float(parameter.grad.abs().max()) > 0 for parameter in block.parameters())
    assert all(parameter.grad is None for parameter in target.blocks.parameters())

    loss = train(network, network.parameters(), 30, first=2)
    assert all(w.equal(first[name]) for name, w in network.blocks[0].state_dict().items())
    assert tau(MTPModules(network)) > max(again, copied) + 0.5
    assert loss < 0.2


# Bad input

NETWORK2, NETWORK1 = network_for(TARGET, 2), network_for(TARGET, 1)
HIDDEN = {FINAL: torch.zeros(1, 6, 16, dtype=torch.float64)}
ROW = torch.zeros(1, 6, dtype=torch.long)


def loss_of(tokens=ROW, hidden=None, **options) -> Tensor:
    return mtp_loss(NETWORK2, TARGET, HIDDEN if hidden is None else hidden, tokens, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MTPModules(NETWORK2, 3), "n_drafts: expected at most 2, one a module .*got 3"),
        (lambda: MTPModules(NETWORK2, 0), "n_drafts: expected at least 1, got 0"),
        (lambda: MTPModules(NETWORK1, 0), "n_drafts: expected at least 1, got 0"),
        (lambda: MTPModules(NETWORK1, top_k=12), r"top_k: expected 1\.\.11 .*got 12"),
        (lambda: MTPModules(NETWORK1, 5, n_nodes=4), "n_nodes: expected at least n_drafts=5"),
        (lambda: network_for(TARGET, 1, tap=0), "tap: expected the target's number of blocks"),
        (lambda: resized(NETWORK1, 0), "n_modules: expected at least 1, got 0"),
        (lambda: loss_of(ROW[:, :3]), r"tokens: .*T >= 4 for 2 module\(s\), got"),
        (lambda: loss_of(ROW.int()), r"tokens: expected int64 .*got torch.int32"),
        (lambda: loss_of(hidden={0: HIDDEN[FINAL]}), r"hidden: .*tap -1 .*got the taps \[0\]"),
        (lambda: loss_of(ROW[:, :5]), r"hidden: .*\[1, 5, 16\], got \[1, 6, 16\]"),
        (lambda: loss_of(weight=0.0), "weight: expected a positive number, got 0.0"),
        (lambda: loss_of(weight=math.nan), "weight: expected a positive number, got nan"),
        (lambda: loss_of(first=0), r"first: expected 1\.\.2 \(modules\), got 0"),
        (lambda: loss_of(first=3), r"first: expected 1\.\.2 \(modules\), got 3"),
        (lambda: loss_of(mask=ROW), r"mask: expected bool of shape \[1, 6\], got torch.int64"),
        (lambda: loss_of(mask=ROW > 0), "mask: .*module 1 predicts, got none"),
        (lambda: loss_of(mask=torch.arange(6)[None] < 3), "mask: .*module 2 predicts, got none"),
    ],
)
def test_bad_arguments_are_named(call, message):
    """Catches arguments that run, and give something else than was meant."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("network", "target", "length", "message"),
    [
        (NETWORK1, TARGET3, 9, "vocabulary of 11 and width 16, but the target has 3"),
        (NETWORK1, small_target(4).float(), 9, "float64 on cpu, but the target is .*float32"),
        (NETWORK1, TARGET, 257, "max_position_embeddings=256 is below the run's 257"),
        (network_for(TARGET, 1, tap=1), TARGET, 9, "reads tap 1, .*last state: 2"),
        (network_for(TARGET, 1, tap=3), TARGET, 9, r"taps \[3\].*0\.\.2"),
    ],
)
def test_modules_of_another_target_are_refused(network, target, length, message):
    """Catches a mismatch that shows only in the middle of a run, or not at all."""
    with pytest.raises(ValueError, match=message):
        MTPModules(network).begin(target, 1, length)
