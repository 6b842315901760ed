"""EAGLE: lossless, drafts what it was trained to say, trees as in the papers, laws as declared."""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import specdec.drafters.eagle as eagle
import specdec.drafters.eagle_tree as eagle_tree
from specdec import FINAL, Coupled, Greedy, Rejection, Typical, generate
from specdec.accept import rejection_laws
from specdec.drafters.eagle import (
    Eagle1,
    Eagle3,
    eagle1_loss,
    eagle3_loss,
    eagle3_taps,
    soft_cross_entropy,
    unroll,
)
from specdec.drafters.eagle_tree import Eagle, EagleState, Level, children, join, ranked
from specdec.drafters.reduced_head import frequent_tokens
from specdec.models import TransformerConfig
from specdec.testing import check_lossless, exact_law, target_law
from specdec.testing.exact import Choices, Enumerated, outcomes
from specdec.testing.replay import Recorder, fresh_draft, nodes
from specdec.testing.strategies import small_target

IDS = [0, 2, 3, 5, 8]  # the draft tokens of the reduced vocabulary


def network_for(target, version: int, ids: list[int] | None = None, seed: int = 0):
    config = dataclasses.replace(target.config, num_hidden_layers=1)
    if version == 1:
        network = Eagle1(config)
    else:
        network = Eagle3(config, (0, 1, 2), None if ids is None else torch.tensor(ids))
    return network.double().reset_parameters(torch.Generator().manual_seed(seed)).eval()


TARGET, TARGET3 = small_target(22), small_target(3, vocab_size=3)
NETWORKS = {
    "eagle1": network_for(TARGET, 1),
    "eagle3": network_for(TARGET, 3),
    "eagle3 reduced": network_for(TARGET, 3, IDS),
}
PROMPT = torch.tensor([1, 2])
WEIGHTS = (1.0, 0.8, 0.64)
# 24 tokens without a short period, so that a shift shows
STORY = generate(TARGET, torch.tensor([7, 2]), max_new_tokens=24).sequences[0]


def hidden_of(target, network, tokens: Tensor) -> dict[int, Tensor]:
    with torch.no_grad():
        return dict(target(tokens, taps=(*network.taps, FINAL), logits=False).hidden)


def loss_of(network, tokens: Tensor, **options) -> Tensor:
    loss = eagle1_loss if isinstance(network, Eagle1) else eagle3_loss
    return loss(network, TARGET, hidden_of(TARGET, network, tokens), tokens, **options)


def train(network, n_steps: int = 60) -> float:
    optimizer, loss = torch.optim.Adam(network.parameters(), lr=0.02), torch.tensor(math.nan)
    options = {} if isinstance(network, Eagle1) else {"step_weights": WEIGHTS}
    hidden = hidden_of(TARGET, network, STORY[None])
    function = eagle1_loss if isinstance(network, Eagle1) else eagle3_loss
    for _ in range(n_steps):
        loss = function(network, TARGET, hidden, STORY[None], **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.fixture(scope="module")
def trained() -> dict:
    """Layers that know STORY by heart."""
    networks = {"eagle1": network_for(TARGET, 1), "eagle3": network_for(TARGET, 3)}
    for network in networks.values():
        train(network)
    return networks


def tau(drafter: Eagle) -> float:
    """Tokens a pass on STORY, the last round left out."""
    run = generate(TARGET, STORY[:2], drafter, max_new_tokens=24)
    assert run.sequences[0].equal(STORY)
    whole = [r for r in run.rounds if not r.cut.any()]
    return sum(len(r.new_tokens[0]) for r in whole) / len(whole)


# What training sees: the same layer, no cache, no tree, one path at a time


@torch.no_grad()
def trained_features(network, target, row: Tensor, path: tuple[int, ...]) -> Tensor:
    """Training's forward pass at the row's last pair and at each node of `path`, [1 + depth, D]."""
    hidden = hidden_of(target, network, row[None])
    fused = network.fuse({tap: states[:, :-1] for tap, states in hidden.items()})
    n, depth = fused.shape[1], len(path)
    fused = torch.cat([fused, fused.new_zeros(1, depth, fused.shape[2])], dim=1)  # never seen
    tokens = torch.cat([row[1:], torch.tensor(path, dtype=torch.long)])
    steps = unroll(network, fused, target.embedding(tokens[None]), depth + 1)
    return torch.cat([step[:, n - 1] for step in steps])


def trained_log_q(network, target, row: Tensor, path: tuple[int, ...]) -> Tensor:
    """log q [V] after a path below the row's root, as trained."""
    feature = trained_features(network, target, row, path)[-1:]
    return network.logits(feature[None], target).log_softmax(dim=-1)[0, 0]


def plain_tree(drafter: Eagle, row: Tensor, n_levels: int) -> list[tuple[int, ...]]:
    """EAGLE-2 by plain lists: paths of the tree's nodes, level by level."""
    found: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(n_levels):
        below = []
        for value, path in frontier:
            top = trained_log_q(drafter.network, TARGET, row, path).topk(drafter.top_k)
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            below += [(value + v, (*path, token)) for v, token in pairs]
        found += below
        frontier = sorted(below, key=lambda node: -node[0])[: drafter.top_k]
    kept = sorted(found, key=lambda node: -node[0])[: drafter.n_nodes]
    return [path for value, path in found if (value, path) in kept]


def check_trees(drafter: Eagle, prompts=(STORY[:1], STORY[:5]), n_new: int = 8) -> None:
    recorder = Recorder(drafter)
    generate(TARGET, list(prompts), recorder, max_new_tokens=n_new)
    n_compared = 0
    for context, draft in recorder.seen:
        for b in (context.live & (context.lengths > 1)).nonzero().flatten().tolist():
            row, left = context.tokens[b, : int(context.lengths[b])], int(context.depth_left[b])
            expected = plain_tree(drafter, row, min(drafter.n_drafts, left))
            assert [path for path, _ in nodes(draft, b, 99)] == expected
            n_compared += 1
    assert n_compared > 4


def check_chain(drafter: Eagle, prompts=(STORY[:1], STORY[:5])) -> None:
    """Every feature of a drafted chain equals that of training on the same tokens."""
    seen: list[Tensor] = []
    hook = drafter.network.register_forward_hook(lambda _, args, output: seen.append(output))
    recorder = Recorder(drafter)
    generate(TARGET, list(prompts), recorder, max_new_tokens=8)
    hook.remove()
    n_compared = 0
    for context, draft in recorder.seen:
        steps, seen = seen[: draft.n_nodes], seen[draft.n_nodes :]
        for b in (context.live & (context.lengths > 1)).nonzero().flatten().tolist():
            row = context.tokens[b, : int(context.lengths[b])]
            path = tuple(draft.tokens[b, : draft.n_nodes - 1].tolist())
            if not steps:
                continue
            expected = trained_features(drafter.network, TARGET, row, path)
            last = int(context.n_new[b]) - 1
            got = torch.stack([steps[0][b, last], *[step[b, 0] for step in steps[1:]]])
            assert (got - expected).abs().max() < 1e-9
            n_compared += len(got)
    assert n_compared > 8
    assert not seen


@pytest.mark.parametrize("name", NETWORKS)
def test_a_drafted_chain_is_what_training_unrolls(name):
    """Catches features, tokens, positions or masks of decoding that training never saw."""
    check_chain(Eagle(NETWORKS[name], 3))


@pytest.mark.parametrize("name", ["eagle1", "eagle3 reduced"])
def test_a_drafted_tree_is_that_of_plain_lists(name):
    """Catches wrong parents, features of another node, values that do not add up, re-ranking."""
    check_trees(Eagle(NETWORKS[name], 3, top_k=3, n_nodes=8))


# Losslessness


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_trained_chains_and_trees_are_lossless(trained, name):
    """Catches a cache that keeps rejected nodes, rows that read each other, a wrong law."""
    prompts = [STORY[:1], STORY[:9]]
    drafter = Eagle(trained[name], 4, top_k=1 if name == "eagle3" else 3, n_nodes=9)
    report = check_lossless(
        TARGET,
        drafter,
        prompts=prompts,
        max_new_tokens=8,
        rules=[Greedy(), Coupled(0.8)],
        n_samples=64,
    )
    assert report.tau["Greedy"] > 1.3
    assert not report.near_ties


def test_a_reduced_vocabulary_is_lossless():
    """Catches laws over draft tokens, and noise that is keyed by them."""
    drafter = Eagle(NETWORKS["eagle3 reduced"], 3, top_k=2, n_nodes=6)
    prompts, rules = [STORY[:1], STORY[3:8]], [Coupled(1.0, seed=3)]
    check_lossless(
        TARGET, drafter, prompts=prompts, max_new_tokens=6, rules=rules, n_samples=64, seed=1
    )


@pytest.mark.parametrize("rule", [Typical(), Rejection(0.7, top_k=4), Rejection(top_p=0.8)])
@pytest.mark.parametrize("name", ["eagle1", "eagle3 reduced"])
def test_every_rule_runs(rule, name):
    """Catches a draft that a rule's truncation makes invalid: the loop validates every one."""
    for drafter in (Eagle(NETWORKS[name], 3), Eagle(NETWORKS[name], 3, top_k=3, n_nodes=9)):
        run = generate(TARGET, [STORY[:1], STORY[:6]], drafter, max_new_tokens=[7, 4], rule=rule)
        assert [len(new) for new in run.new_tokens] == [7, 4]


def round_law_error(drafter: Eagle, n_tokens: int = 3) -> float:
    """Largest error of the law of `n_tokens` tokens, of which one round drafts, by enumeration.

    Every draw of the drafter is a branch; what the rule does with a draft is computed, not run.
    """
    own = target_law(TARGET3, PROMPT, n_tokens)
    law: dict[tuple[int, ...], float] = {}

    @functools.cache
    def p_after(path: tuple[int, ...]) -> Tensor:
        row = torch.tensor([*PROMPT.tolist(), *path])
        return TARGET3(row[None]).logits[0, -1].softmax(-1)

    @functools.cache
    def after(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        """The target's law of what follows `prefix`, up to `n_tokens` in all."""
        n = len(prefix)
        total = sum(p for key, p in own.items() if key[:n] == prefix)
        return {key: p / total for key, p in own.items() if key[:n] == prefix}

    def run(choices: Choices) -> tuple[int, ...]:
        rule = Enumerated(Rejection(), choices)
        draft = fresh_draft(TARGET3, drafter, PROMPT, n_tokens - 1, rule)
        paths = [()] + [path for path, _ in nodes(draft, 0, 99)]
        assert len(paths) == 1 + draft.n_nodes
        accept, owed = rejection_laws(draft, torch.stack([p_after(path) for path in paths])[None])
        parents = draft.tree()[0].tolist()

        def walk(node: int, here: float) -> None:
            for child in (i for i in range(draft.n_nodes) if parents[i] == node):
                walk(child, here * float(accept[0, child]))
                here *= 1 - float(accept[0, child])
            for token, share in enumerate(owed[0, node + 1].tolist()):
                for key, q in after((*paths[node + 1], token)).items():
                    law[key] = law.get(key, 0.0) + choices.probability * here * share * q

        walk(-1, 1.0)
        return ()

    assert outcomes(run)[()] == pytest.approx(1.0, abs=1e-12)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(law.get(key, 0.0) - own.get(key, 0.0)) for key in law.keys() | own.keys())


EAGLE1_3, EAGLE3_3 = network_for(TARGET3, 1), network_for(TARGET3, 3, [0, 2])


@pytest.mark.parametrize(
    "drafter",
    [
        Eagle(EAGLE1_3, 2),
        Eagle(EAGLE1_3, 2, draw=False),
        Eagle(EAGLE1_3, 2, top_k=2, n_nodes=4),
        Eagle(EAGLE1_3, 2, top_k=3, n_nodes=7, draw=False),
        Eagle(EAGLE3_3, 2, top_k=2, n_nodes=4),
        Eagle(EAGLE3_3, 2, top_k=2, n_nodes=4, draw=False),
    ],
    ids=[
        "chain", "chosen chain", "drawn tree", "chosen tree", "reduced", "reduced, chosen",
    ],
)  # fmt: skip
def test_rejection_follows_the_targets_law_exactly(drafter):
    """Catches a declared q that is not the law drawn from, and drawn nodes that are pruned."""
    assert round_law_error(drafter) < 1e-9


def test_rejection_is_exact_over_several_rounds():
    """Catches a law that is right in the first round only."""
    law, own = exact_law(TARGET3, Eagle(EAGLE3_3, 1), PROMPT, 3), target_law(TARGET3, PROMPT, 3)
    assert max(abs(law.get(key, 0.0) - p) for key, p in own.items()) < 1e-9


def own_confidence(
    logits: Tensor, tokens: Tensor, probs: Tensor | None, value: Tensor, at: Tensor, limit: int
) -> Level:
    """`children` with the confidence of a drawn node taken from its own token."""
    assert probs is not None
    own = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
    kept = ranked((value.unsqueeze(-1) + own).flatten(1), limit).sort(dim=1).values
    whole = children(logits, tokens, probs, value, at, 99)
    fields = {n: eagle_tree.select(x, kept) for n, x in vars(whole).items()}
    return Level(**fields)


def test_drawn_nodes_kept_by_their_own_probability_are_seen(monkeypatch):
    """Planted: how many children a node gets depends on what was drawn."""
    monkeypatch.setattr(eagle_tree, "children", own_confidence)
    assert round_law_error(Eagle(EAGLE1_3, 2, top_k=2, n_nodes=2)) > 1e-3


def test_drawn_nodes_re_ranked_are_seen(monkeypatch):
    """Planted: of drawn siblings the one is kept that the layer holds likeliest."""

    def rerank(levels: list[Level], n_nodes: int, deepest: Tensor):
        draft = join(levels, n_nodes, deepest)
        assert draft.probs is not None and draft.used is not None
        own = draft.probs.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
        return dataclasses.replace(draft, used=draft.used & (own == own.max()))

    monkeypatch.setattr(eagle_tree, "join", rerank)
    drafter = Eagle(EAGLE1_3, 1, top_k=2)
    law, own = exact_law(TARGET3, drafter, PROMPT, 2), target_law(TARGET3, PROMPT, 2)
    assert max(abs(law.get(key, 0.0) - p) for key, p in own.items()) > 1e-3


# Planted bugs


def shift_features(right: Callable) -> Callable:
    def append(self, context):
        hidden = {tap: states.roll(1, dims=1) for tap, states in context.hidden.items()}
        return right(self, dataclasses.replace(context, hidden=hidden))

    return append


def shift_tokens(right: Callable) -> Callable:
    def append(self, context):
        tokens = context.new_tokens.roll(1, dims=1)
        return right(self, dataclasses.replace(context, new_tokens=tokens))

    return append


@pytest.mark.parametrize("plant", [shift_features, shift_tokens])
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_pairs_shifted_by_one_are_seen(monkeypatch, plant, name):
    """Planted: h_t beside x_{t+2}, or x_t."""
    monkeypatch.setattr(EagleState, "_append", plant(EagleState._append))
    with pytest.raises(AssertionError):
        check_chain(Eagle(NETWORKS[name], 3))


def test_a_wrong_tap_is_seen(monkeypatch):
    """Planted: in decoding the middle tap is the high one."""
    right = EagleState._append

    def append(self, context):
        hidden = {0: context.hidden[0], 1: context.hidden[2], 2: context.hidden[2]}
        return right(self, dataclasses.replace(context, hidden=hidden))

    monkeypatch.setattr(EagleState, "_append", append)
    with pytest.raises(AssertionError):
        check_chain(Eagle(NETWORKS["eagle3"], 3))


def test_a_state_before_the_final_norm_is_seen(trained, monkeypatch):
    """Planted: EAGLE-1 trained on the normed states reads the residual stream."""
    right = tau(Eagle(trained["eagle1"], 4))
    monkeypatch.setattr(Eagle1, "taps", (TARGET.n_layers,))
    monkeypatch.setattr(Eagle1, "fuse", lambda self, hidden: hidden[TARGET.n_layers])
    assert tau(Eagle(trained["eagle1"], 4)) < right - 0.5


def plant_in_run(change: Callable) -> Callable:
    right = EagleState._run

    def run(self, features, tokens, parents):
        return right(self, *change(features, tokens, parents))

    return run


def test_parents_that_are_off_are_seen(monkeypatch):
    """Planted: a node of the grown tree hangs below the node before its parent."""
    drafter = Eagle(NETWORKS["eagle1"], 3, top_k=3, n_nodes=8)

    def change(features, tokens, parents):
        return features, tokens, None if parents is None else (parents - 1).clamp(min=-1)

    monkeypatch.setattr(EagleState, "_run", plant_in_run(change))
    with pytest.raises(AssertionError):
        check_trees(drafter, n_new=12)


def test_features_of_another_node_are_seen(monkeypatch):
    """Planted: the feature a node is fed is not that of its own parent."""
    drafter = Eagle(NETWORKS["eagle1"], 3, top_k=3, n_nodes=8)

    def change(features, tokens, parents):
        return features if parents is None else features.roll(1, dims=1), tokens, parents

    monkeypatch.setattr(EagleState, "_run", plant_in_run(change))
    with pytest.raises(AssertionError):
        check_trees(drafter)


def test_a_cache_that_is_not_rewound_is_seen(monkeypatch):
    """Planted: a drafted node stays in the layer's cache, below the true pairs."""
    right = EagleState._append

    def append(self, context):
        if self.cache.n_pending:
            first = torch.zeros_like(context.lengths).unsqueeze(1)
            self.cache.commit(first, torch.ones_like(context.lengths))
            self.cache.lengths -= 1  # on the books it is gone
        return right(self, context)

    monkeypatch.setattr(EagleState, "_append", append)
    with pytest.raises(AssertionError):
        check_chain(Eagle(NETWORKS["eagle1"], 3), [STORY[:5]])


def test_a_round_that_was_left_out_is_named():
    """Catches a wrapper that does not call `propose` each round, and pairs lost for good."""
    state = Eagle(NETWORKS["eagle1"], 3).begin(TARGET, 1, 20)
    recorder = Recorder(Eagle(NETWORKS["eagle1"], 3))
    generate(TARGET, STORY[:5], recorder, max_new_tokens=8)
    context = recorder.seen[0][0]
    state.propose(context)
    with pytest.raises(ValueError, match=r"context.new_tokens: .*call propose in every round"):
        state.propose(recorder.seen[2][0])


# The tree


def level_of(values: list[float], parents: list[int], n_above: int = 1) -> Level:
    value = torch.tensor([values])
    return Level(
        torch.arange(value.shape[1])[None] + 10 * n_above,
        torch.zeros_like(value, dtype=torch.long),
        torch.tensor([parents]),
        value,
        None,
    )


def test_re_ranking_by_hand():
    """Catches a kept child whose parent is dropped, parents not renumbered, budgets off by one."""
    levels = [level_of([-1.0, -2.0, -0.5], [-1, -1, -1]), level_of([-0.6, -3.0], [2, 0], 2)]
    draft = join(levels, 3, torch.tensor([2]))
    assert draft.tokens.tolist() == [[10, 12, 20]]  # worth -1, -0.5 and -0.6
    assert draft.tree().tolist() == [[-1, -1, 1]]
    assert draft.mask().all()
    draft = join(levels, 9, torch.tensor([2]))
    assert draft.tokens.tolist() == [[10, 11, 12, 20, 21]]
    assert draft.tree().tolist() == [[-1, -1, -1, 2, 0]]


def test_nodes_that_cannot_count_take_no_others_place():
    """Catches a row of small budget that spends its nodes on depths it cannot use."""
    levels = [level_of([-1.0, -2.0, -0.5], [-1, -1, -1]), level_of([-0.6, -3.0], [2, 0], 2)]
    draft = join(levels, 3, torch.tensor([1]))
    assert draft.tokens.tolist() == [[10, 11, 12]]
    assert draft.mask().all()
    draft = join(levels, 4, torch.tensor([1]))
    assert draft.mask().tolist() == [[True, True, True, False]]
    assert not join(levels, 4, torch.tensor([0])).mask().any()


def test_a_certain_child_does_not_push_out_its_parent():
    """Catches an order of equals in which a child, worth as much as its parent, comes first."""
    assert ranked(torch.tensor([[-1.0, 0.0, -1.0, 0.0]]), 3).tolist() == [[1, 3, 0]]
    levels = [level_of([-1.0, -1.0], [-1, -1]), level_of([-1.0, -1.0], [0, 1], 2)]
    for n_nodes, parents in ((1, [-1]), (2, [-1, -1]), (3, [-1, -1, 0])):
        assert join(levels, n_nodes, torch.tensor([9])).tree().tolist() == [parents]


def test_values_of_children_by_hand():
    """Catches confidences of the wrong node, sums that start anew, drawn nodes not limited."""
    q = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]])
    tokens, value = torch.tensor([[[2, 0], [0, 2]]]), torch.tensor([[0.5, 0.25]]).log()
    level = children(q.log(), tokens, None, value, torch.tensor([[4, 3]]), 1)
    assert level.tokens.tolist() == [[2, 0, 0, 2]]
    assert level.parents.tolist() == [[4, 4, 3, 3]]
    torch.testing.assert_close(level.value.exp(), torch.tensor([[0.25, 0.15, 0.2, 0.025]]))
    laws = torch.rand(1, 2, 2, 3)
    level = children(q.log(), tokens, laws, value, torch.tensor([[4, 3]]), 3)
    assert level.tokens.tolist() == [[2, 0, 0]]  # the second child of the second node is left out
    assert level.probs is not None
    assert level.probs.equal(laws.flatten(1, 2)[:, :3])


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    """Catches pieces that see another past than a whole, in a ragged batch."""
    drafter, prompts = Eagle(NETWORKS["eagle3"], 3, top_k=2), [STORY[:3], STORY[:12], STORY[:1]]
    drafts = []
    for size in (512, 4):
        monkeypatch.setattr(eagle_tree, "_CHUNK", size)
        recorder = Recorder(drafter)
        generate(TARGET, prompts, recorder, max_new_tokens=4)
        drafts.append([[nodes(d, b, 9) for b in range(3)] for _, d in recorder.seen])
    assert drafts[0] == drafts[1]


# Training


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_reach_every_weight_and_are_finite(name):
    """Catches a part that the loss does not train, and NaN from masked places."""
    network = network_for(TARGET, 1 if name == "eagle1" else 3, IDS if "reduced" in name else None)
    loss_of(network, torch.stack([STORY[:12], STORY[12:24]])).backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
        assert float(parameter.grad.abs().max()) > 0, parameter_name
    assert all(parameter.grad is None for parameter in TARGET.parameters())


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_no_gradient_reaches_the_states_that_are_read(name):
    """Catches a `detach` that is lost: training would bend a target that is not frozen."""
    network, tokens = NETWORKS[name], STORY[None, :12]
    hidden = {
        tap: states.requires_grad_() for tap, states in hidden_of(TARGET, network, tokens).items()
    }
    loss = eagle1_loss if name == "eagle1" else eagle3_loss
    loss(
        network,
        TARGET,
        hidden,
        tokens,
        **({} if name == "eagle1" else {"step_weights": (1.0, 1.0)}),
    ).backward()
    assert all(states.grad is None for states in hidden.values())
    network.zero_grad()


def floor(network) -> float:
    """The loss of a layer whose every law is the target's, on STORY."""
    log_p = TARGET(STORY[None]).logits[0].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    if isinstance(network, Eagle1):
        return 0.1 * float(entropy[1:-1].mean())
    return sum(w * float(entropy[s + 1 : -1].mean()) for s, w in enumerate(WEIGHTS))


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_layer_learns_one_text_and_drafts_it(trained, name):
    """Catches labels or features shifted in training, and a tree that loses its best path."""
    options = {} if name == "eagle1" else {"step_weights": WEIGHTS}
    fresh = float(loss_of(NETWORKS[name], STORY[None], **options).detach())
    learnt = float(loss_of(trained[name], STORY[None], **options).detach())
    lowest = floor(trained[name])
    assert lowest < learnt < lowest + 0.1 * (fresh - lowest)
    assert tau(Eagle(trained[name], 4)) > 2.5
    assert tau(Eagle(trained[name], 4, top_k=3, n_nodes=30)) > 2.5


@torch.no_grad()
def by_places(network, tokens: Tensor, mask: Tensor, weights: tuple[float, ...]) -> float:
    """Both losses with a loop over places: one pass of the layer and one label at a time."""
    total = 0.0
    for s, weight in enumerate(weights):
        values = []
        for row, counts in zip(tokens, mask, strict=True):
            for t in range(len(row) - 2 - s):
                if not counts[t + s + 2]:
                    continue
                # the tokens up to the one fed at step s, the target's law of the next
                own = trained_features(network, TARGET, row[: t + 2], tuple(row[t + 2 : t + s + 2]))
                output = TARGET(row[None, : t + s + 2], taps=(FINAL,))
                p = output.logits[0, -1]
                q = network.logits(own[None, -1:], TARGET)[0, 0]
                if isinstance(network, Eagle3) and network.draft_ids is not None:
                    if int(p.argmax()) not in network.draft_ids.tolist():
                        continue
                    p, q = p[network.draft_ids], q[network.draft_ids]
                value = float(-(p.softmax(-1) * q.log_softmax(-1)).sum())
                if isinstance(network, Eagle1):
                    gap = (own[-1] - output.hidden[FINAL][0, -1]).abs()
                    value = 0.1 * value + float(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
                values.append(value)
        total += weight * sum(values) / len(values)
    return total


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_place_by_place(name):
    """Catches any shift between features, tokens, steps, masks and labels."""
    network = NETWORKS[name]
    tokens, mask = torch.stack([STORY[:7], STORY[9:16]]), torch.ones(2, 7, dtype=torch.bool)
    mask[0, 3], mask[1, 5:] = False, False
    weights = (1.0,) if name == "eagle1" else (1.0, 0.5)
    options = {} if name == "eagle1" else {"step_weights": weights}
    got = float(loss_of(network, tokens, mask=mask, **options).detach())
    assert got == pytest.approx(by_places(network, tokens, mask, weights), abs=1e-9)


TINY = TransformerConfig(2, 2, 2, 1, 1)
MIRROR = SimpleNamespace(embedding=lambda tokens: torch.zeros(*tokens.shape, 2), head=lambda h: h)


def test_eagle1_loss_by_hand(monkeypatch):
    """Catches a sum for a mean, a hard label for a law, weights on the wrong term."""
    hidden = {FINAL: torch.tensor([[[9.0, 9.0], [0.0, 0.0], [math.log(3), 0.0], [7.0, 7.0]]])}
    predicted = torch.tensor([[[0.5, 0.0], [0.0, 3.0]]])
    monkeypatch.setattr(eagle, "unroll", lambda *_: [predicted])
    tokens = torch.zeros(1, 4, dtype=torch.long)
    # gaps 0.5, 0, ln 3 and 3: SmoothL1 gives 0.125, 0, ln 3 - 0.5 and 2.5
    regression = (0.125 + 0.0 + math.log(3) - 0.5 + 2.5) / 4
    first = (math.log(1 + math.exp(0.5)) - 0.25) * 1.0  # p = (1/2, 1/2), q = softmax(0.5, 0)
    second = math.log(1 + math.exp(3)) - 0.25 * 3  # p = (3/4, 1/4), q = softmax(0, 3)
    expected = regression + 0.1 * (first + second) / 2
    loss = eagle1_loss(Eagle1(TINY), MIRROR, hidden, tokens)
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    mask = torch.tensor([[False, False, False, True]])
    loss = eagle1_loss(Eagle1(TINY), MIRROR, hidden, tokens, mask=mask, token_weight=1.0)
    assert float(loss) == pytest.approx((math.log(3) - 0.5 + 2.5) / 2 + second, abs=1e-6)


def test_eagle3_loss_by_hand(monkeypatch):
    """Catches steps that are averaged, weights in another order, a law over other tokens."""
    network = Eagle3(TINY, (FINAL,))
    network.draft_logits = lambda features: features
    ln3 = math.log(3)
    law, steps = [ln3, 0.0], [torch.tensor([[[ln3, 0.0], [0.0, ln3]]]), torch.zeros(1, 1, 2)]
    monkeypatch.setattr(eagle, "unroll", lambda *_: steps)
    hidden = {FINAL: torch.tensor([[[0.0, 0.0], law, law, [0.0, 0.0]]])}
    tokens = torch.zeros(1, 4, dtype=torch.long)
    # p = (3/4, 1/4) everywhere; q = (3/4, 1/4) and (1/4, 3/4) at step 0, (1/2, 1/2) at step 1
    good = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    bad = -0.75 * math.log(0.25) - 0.25 * math.log(0.75)
    loss = eagle3_loss(network, MIRROR, hidden, tokens, step_weights=(2.0, 0.5))
    expected = 2 * (good + bad) / 2 + 0.5 * math.log(2)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_padding_changes_nothing():
    """Catches padding that is learnt, or seen by what comes before it."""
    for network in NETWORKS.values():
        short = loss_of(network, STORY[None, :12])
        tokens = torch.cat([STORY[None, :12], torch.zeros(1, 4, dtype=torch.long)], dim=1)
        padded = loss_of(network, tokens, mask=torch.arange(16)[None] < 12)
        assert float((short - padded).detach().abs()) < 1e-12


def test_noise_comes_from_the_generator():
    """Catches the global generator, noise on the labels, and a range that is not +-noise."""
    tokens, network = STORY[None, :12], NETWORKS["eagle1"]
    draws = [
        loss_of(network, tokens, noise=0.1, generator=torch.Generator().manual_seed(seed)).item()
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    with pytest.raises(ValueError, match=r"generator: expected one to draw noise=0.1 from"):
        loss_of(network, tokens, noise=0.1)
    seen: list[Tensor] = []
    hook = network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    loss_of(network, tokens, noise=0.1, generator=torch.Generator().manual_seed(0))
    loss_of(network, tokens)
    hook.remove()
    gap = seen[0] - seen[1]
    assert 0.08 < float(gap.max()) <= 0.1
    assert -0.1 <= float(gap.min()) < -0.08


def test_a_head_copied_from_the_target_says_the_same():
    """Catches rows of other tokens, and a head read the wrong way round."""
    for name in ("eagle3", "eagle3 reduced"):
        network = network_for(TARGET, 3, IDS if "reduced" in name else None).copy_head(TARGET)
        states = torch.randn(1, 4, 16, dtype=torch.float64)
        logits = network.head(states)
        expected = TARGET.head(states)
        torch.testing.assert_close(logits, expected[..., IDS] if "reduced" in name else expected)


def test_logits_are_scattered_to_the_targets_tokens():
    """Catches draft tokens that are taken for the target's."""
    network, features = NETWORKS["eagle3 reduced"], torch.randn(2, 3, 16, dtype=torch.float64)
    logits = network.logits(features, TARGET)
    assert logits.shape == (2, 3, 11)
    assert logits[..., IDS].equal(network.draft_logits(features))
    others = [token for token in range(11) if token not in IDS]
    assert bool((logits[..., others] == -torch.inf).all())


def test_helpers():
    """Catches ids that are not the most frequent, and taps of other layers than published."""
    tokens = torch.tensor([[4, 4, 1], [7, 1, 4]])
    assert frequent_tokens(tokens, 9, 2).tolist() == [1, 4]
    assert frequent_tokens(tokens, 9, 4).tolist() == [0, 1, 4, 7]
    assert eagle3_taps(32) == (2, 16, 29)
    p = torch.tensor([[0.0, 0.0]])
    assert float(soft_cross_entropy(p, p)) == pytest.approx(math.log(2))


# Bad input

STATES = {tap: torch.zeros(1, 6, 16, dtype=torch.float64) for tap in (FINAL, 0, 1, 2)}
TOKENS = torch.zeros(1, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Eagle(NETWORKS["eagle1"], 0), "n_drafts: expected at least 1, got 0"),
        (lambda: Eagle(NETWORKS["eagle1"], top_k=12), r"top_k: expected 1\.\.11 .*got 12"),
        (lambda: Eagle(NETWORKS["eagle3 reduced"], top_k=6), r"top_k: expected 1\.\.5 .*got 6"),
        (lambda: Eagle(NETWORKS["eagle1"], 5, n_nodes=4), "n_nodes: expected at least n_drafts=5"),
        (lambda: Eagle1(TARGET.config), "num_hidden_layers: EAGLE has one layer, got 2"),
        (lambda: Eagle3(TINY, ()), "taps: expected some of"),
        (lambda: Eagle3(TINY, (0, -2)), "taps: expected some of"),
        (lambda: Eagle3(TINY, (0,), torch.tensor([1, 1])), "draft_ids: expected increasing ids"),
        (lambda: Eagle3(TINY, (0,), torch.tensor([0, 2])), r"in \[0, 2\), got 0\.\.2"),
        (lambda: Eagle3(TINY, (0,), torch.ones(2)), "draft_ids: expected int64"),
        (lambda: eagle3_taps(4), "n_layers: expected at least 5"),
        (lambda: frequent_tokens(TOKENS, 9, 10), r"n: expected 1\.\.9 .*got 10"),
        (lambda: loss_of(NETWORKS["eagle1"], STORY[None, :2]), r"tokens: .* T >= 3 for 1 step"),
        (lambda: loss_of(NETWORKS["eagle3"], STORY[None, :8]), r"tokens: .* T >= 9 for 7 step"),
        (
            lambda: loss_of(NETWORKS["eagle3"], STORY[None], step_weights=()),
            "step_weights: expected at least one",
        ),
        (
            lambda: loss_of(NETWORKS["eagle1"], TOKENS, mask=TOKENS > 0),
            "mask: expected a token to predict at step 0, got none",
        ),
        (
            lambda: loss_of(
                NETWORKS["eagle3"], TOKENS, mask=torch.arange(6)[None] < 4, step_weights=(1, 1, 1)
            ),
            "mask: expected a token to predict at step 2, got none",
        ),
        (
            lambda: loss_of(network_for(TARGET, 3, [0]), STORY[None, :4], step_weights=(1,)),
            "mask: expected a token to predict at step 0, got none",
        ),
        (
            lambda: loss_of(NETWORKS["eagle1"], TOKENS, mask=TOKENS),
            r"mask: expected bool of shape \[1, 6\], got torch.int64",
        ),
        (
            lambda: eagle1_loss(NETWORKS["eagle1"], TARGET, {0: STATES[0]}, TOKENS),
            r"hidden: expected tap -1 of shape \[1, 6, 16\], got the taps \[0\]",
        ),
        (
            lambda: eagle3_loss(NETWORKS["eagle3"], TARGET, STATES, TOKENS[:, :5]),
            r"tokens: .*T >= 9",
        ),
        (
            lambda: eagle1_loss(NETWORKS["eagle1"], TARGET, STATES, TOKENS[:, :5]),
            r"hidden: expected tap -1 of shape \[1, 5, 16\], got \[1, 6, 16\]",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    """Catches arguments that run, and give something else than was meant."""
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("network", "target", "length", "message"),
    [
        (NETWORKS["eagle1"], TARGET3, 9, "vocabulary of 11 and width 16, but the target has 3"),
        (NETWORKS["eagle3"], small_target(22, n_layers=1), 9, r"taps \[0, 1, 2\].*0\.\.1"),
        (NETWORKS["eagle1"], small_target(22).float(), 9, "float64 on cpu, but the target is .*32"),
        (NETWORKS["eagle1"], TARGET, 257, "max_position_embeddings=256 is below the run's 257"),
    ],
)
def test_a_layer_of_another_target_is_refused(network, target, length, message):
    """Catches a mismatch that shows only in the middle of a run, or not at all."""
    with pytest.raises(ValueError, match=message):
        Eagle(network).begin(target, 1, length)
