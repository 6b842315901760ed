"""LayerSkip: the drafter against plain decoding, its passes counted, its training by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import Coupled, Draft, Greedy, Rejection, Typical, decode, generate
from specdec.cache import TreeCache
from specdec.drafters.layerskip import (
    ExitChoice,
    LayerSkip,
    best_exit,
    block_states,
    draw_kept,
    early_exit_loss,
    exit_acceptance,
    exit_loss,
    exit_loss_weights,
    gradual_curriculum,
    layer_dropout_rates,
    resumed_verify_cost,
    rotational_curriculum,
)
from specdec.functional import from_functional
from specdec.models import Transformer
from specdec.models.layers import Block, rotary_angles
from specdec.speedup import expected_speedup
from specdec.testing import LosslessError, check_lossless, exact_law, target_law
from specdec.testing.strategies import small_target
from tests.helpers import tiny_transformer

TARGET, TARGET3 = small_target(1, n_layers=3), small_target(3, vocab_size=3, n_layers=2)
PROMPT = torch.tensor([1, 2])
RAGGED = [torch.tensor([3]), torch.tensor([1, 2, 3, 4, 5]), torch.tensor([7, 7])]
TOKENS = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))


def quick(drafter, target=TARGET) -> None:
    """Losslessness of a few rows, greedy: what planted bugs are held against."""
    check_lossless(
        target, drafter, prompts=RAGGED[:2], max_new_tokens=8, rules=[Greedy()], n_samples=0
    )


def early_target(exit_layer: int, n_layers: int = 3, seed: int = 1) -> Transformer:
    """A target whose blocks from `exit_layer` on add nothing: the exit's law is the target's."""
    target = small_target(seed, n_layers=n_layers)
    with torch.no_grad():
        for block in target.blocks[exit_layer:]:
            assert isinstance(block, Block)
            block.attention.out.weight.zero_()
            block.mlp.down.weight.zero_()
    return target


@dataclass(frozen=True)
class Planted:
    """A drafter whose drafts are changed by `change(draft)` on the way out."""

    drafter: LayerSkip
    change: Callable[[Draft], Draft]
    taps = ()

    def begin(self, target, batch_size, max_length):
        state, change = self.drafter.begin(target, batch_size, max_length), self.change

        class State:
            def propose(self, context):
                draft = state.propose(context)
                return change(draft) if draft.n_nodes else draft

        return State()


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        (TARGET, LayerSkip(2, 3)),
        (small_target(5, n_layers=4, n_kv_heads=4), LayerSkip(2, 3, branching=(3, 1, 2))),
    ],
    ids=["chain", "tree"],
)
def test_lossless(target, drafter):
    """Catches a resumed state, position, parent, law or dropped draft that is off anywhere."""
    rules = [Greedy(), Coupled(0.8, top_k=8)]
    check_lossless(target, drafter, max_new_tokens=8, rules=rules, n_samples=64)


@pytest.mark.parametrize(
    ("drafter", "n"), [(LayerSkip(1, 2), 3), (LayerSkip(1, 2, branching=(2, 1)), 2)]
)
def test_law_under_rejection_by_enumeration(drafter, n):
    """Two drafts deep, and two siblings. Catches a q that is another node's, or not drawn from."""
    law, own = exact_law(TARGET3, drafter, PROMPT, n), target_law(TARGET3, PROMPT, n)
    assert max(abs(law.get(key, 0.0) - p) for key, p in own.items()) < 1e-9


@pytest.mark.parametrize("rule", [Greedy(), Coupled(seed=5), Rejection(seed=5)])
@pytest.mark.parametrize("branching", [1, 2])
def test_a_perfect_exit_is_accepted_whole(rule, branching):
    """Catches picks at the wrong depth or from the wrong node, which merely draft worse."""
    target, drafter = early_target(2), LayerSkip(2, 3, branching=branching)
    run = generate(target, RAGGED, drafter, max_new_tokens=8, rule=rule)
    # two rounds of 3 drafts and the target's own token: 8; every child of a drawn tree is tested
    if branching == 1 or not isinstance(rule, Rejection):
        assert [r.n_accepted.tolist() for r in run.rounds] == [[3, 3, 3], [3, 3, 3]]
    assert run.metrics.tau > 3.0


@pytest.mark.parametrize(
    ("rule", "branching"), [(Rejection(seed=3), 1), (Rejection(seed=3), 2), (Typical(seed=3), 2)]
)
def test_rows_do_not_depend_on_who_shares_their_batch(rule, branching):
    """Unequal budgets, so rows die one by one. Catches drafts beyond a row's own budget, or dead
    rows that still draft."""
    drafter, budgets = LayerSkip(1, 3, branching=branching), [4, 11, 2]
    together = generate(TARGET, RAGGED, drafter, max_new_tokens=budgets, rule=rule)
    for b, (prompt, budget) in enumerate(zip(RAGGED, budgets, strict=True)):
        alone = generate(TARGET, prompt, drafter, max_new_tokens=budget, rule=rule.for_row(b))
        assert alone.sequences[0].tolist() == together.sequences[b].tolist()
    assert not any((r.draft.mask() & ~r.live.unsqueeze(1)).any() for r in together.rounds)


@pytest.mark.parametrize("rule", [Coupled(seed=2), Rejection(seed=2), Typical(seed=2)])
@pytest.mark.parametrize("branching", [1, 2])
def test_reused_states_give_the_rounds_of_recomputed_ones(rule, branching):
    """The fast path beside its reference. Catches any state that is not what a fresh pass gives."""
    runs = [
        generate(
            TARGET,
            RAGGED,
            LayerSkip(2, 3, branching=branching, reuse=reuse),
            max_new_tokens=12,
            rule=rule,
        )
        for reuse in (True, False)
    ]
    assert [s.tolist() for s in runs[0].sequences] == [s.tolist() for s in runs[1].sequences]
    for fast, slow in zip(runs[0].rounds, runs[1].rounds, strict=True):
        assert fast.draft.resume is not None or not fast.draft.n_nodes
        assert slow.draft.resume is None
        assert fast.draft.tokens.tolist() == slow.draft.tokens.tolist()
        assert fast.n_accepted.tolist() == slow.n_accepted.tolist()


def count_passes(drafter: LayerSkip, target: Transformer = TARGET) -> tuple[int, int]:
    """Passes of a token through a block in one full round, and the draft's nodes."""
    counted: list[int] = []
    hooks = [
        block.register_forward_hook(lambda block, inputs, x: counted.append(x[..., 0].numel()))
        for block in target.blocks
    ]
    # a prompt of one token needs no prefill, and the budget cuts nothing
    round_ = next(decode(target, PROMPT[:1], drafter, max_new_tokens=20))
    for hook in hooks:
        hook.remove()
    return sum(counted), round_.draft.n_nodes


@pytest.mark.parametrize("n_drafts", [1, 2, 5])
@pytest.mark.parametrize("exit_layer", [1, 2])
def test_no_block_sees_a_token_twice(exit_layer, n_drafts):
    """(K + 1) L passes, against K E + (K + 1) L. Catches a block run again on root or drafts."""
    K, E, L = n_drafts, exit_layer, TARGET.n_layers
    assert count_passes(LayerSkip(E, K)) == ((K + 1) * L, K)
    assert count_passes(LayerSkip(E, K, reuse=False)) == (K * E + (K + 1) * L, K)
    # the planner's count, where computing is what takes time: a pass over n tokens costs n steps
    planned = K * E / L + resumed_verify_cost(E, L, K + 1)
    assert planned * L == pytest.approx((K + 1) * L)


def test_no_block_sees_a_node_of_a_tree_twice():
    """2 + 4 + 4 nodes, the last level never fed. Catches a tree that is run again, node by node."""
    drafter = LayerSkip(2, 3, branching=(2, 2, 1))
    assert count_passes(drafter) == (11 * TARGET.n_layers, 10)
    again = LayerSkip(2, 3, branching=(2, 2, 1), reuse=False)
    assert count_passes(again) == (7 * 2 + 11 * TARGET.n_layers, 10)


def test_a_draft_is_no_deeper_than_the_budget():
    """Budgets of 1 to 3 tokens. Catches a root that is fed for nothing, and levels past the end."""
    for budget in (1, 2, 3):
        first = next(decode(TARGET, PROMPT, LayerSkip(1, 5), max_new_tokens=budget))
        assert first.draft.n_nodes == budget - 1


def resume_with(change: Callable[[Tensor], Tensor]) -> Callable[[Draft], Draft]:
    def changed(draft: Draft) -> Draft:
        assert draft.resume is not None
        return replace(draft, resume=(draft.resume[0], change(draft.resume[1])))

    return changed


def test_the_unplanted_code_passes():
    """Controls that fail for another reason than the planted bug."""
    quick(Planted(LayerSkip(2, 3), lambda draft: draft))
    quick(Planted(LayerSkip(2, 3, branching=(2, 2, 1)), lambda draft: draft))


@pytest.mark.parametrize(
    "change",
    [lambda h: h.roll(1, dims=1), TARGET.norm, torch.zeros_like, lambda h: h.roll(1, dims=0)],
    ids=["shifted by one", "after the norm", "zeros", "another row's"],
)
def test_planted_states(change):
    """States shifted by one, normed too early, lost, or of another row."""
    with pytest.raises(LosslessError):
        quick(Planted(LayerSkip(2, 3), resume_with(change)))


def test_planted_states_of_the_wrong_tap(monkeypatch):
    """The states before the exit block in place of those after it."""
    right = Transformer.forward

    def one_too_low(self, tokens, cache=None, *, taps=(), exit_layer=None, **rest):
        if exit_layer is None:
            return right(self, tokens, cache, taps=taps, **rest)
        output = right(self, tokens, cache, taps=(exit_layer - 1,), exit_layer=exit_layer, **rest)
        return replace(output, hidden={exit_layer: output.hidden[exit_layer - 1]})

    monkeypatch.setattr(Transformer, "forward", one_too_low)
    with pytest.raises(LosslessError):
        quick(LayerSkip(2, 3))


def test_planted_parents():
    """A tree verified below other nodes than it was grown from."""
    flat = Planted(
        LayerSkip(2, 3, branching=(2, 2, 1)),
        lambda draft: replace(draft, parents=(draft.tree() - 1).clamp(min=-1)),
    )
    with pytest.raises(LosslessError):
        quick(flat)


def test_planted_recomputation_on_top_of_the_pending_nodes(monkeypatch):
    """The draft's nodes not dropped: the model refuses, and the suite sees it where it does not."""
    right = TreeCache.commit

    def never_drop(self, path, n):
        if path.shape[1]:
            right(self, path, n)

    def never_drop_nor_tell(self, path, n):
        never_drop(self, path, n)
        self.depth_done = self.n_layers

    recomputing = LayerSkip(2, 3, reuse=False)
    monkeypatch.setattr(TreeCache, "commit", never_drop)
    with pytest.raises(ValueError, match="its pending nodes stop at block 2; resume them, or drop"):
        quick(recomputing)
    monkeypatch.setattr(TreeCache, "commit", never_drop_nor_tell)
    with pytest.raises(LosslessError):
        quick(recomputing)


@pytest.mark.parametrize(
    "resume",
    [lambda E, h: (E, h[:, :-1]), lambda E, h: (E, torch.cat([h, h[:, -1:]], 1))],
    ids=["the last fed node left out", "the last draft counted as fed"],
)
def test_planted_counts_are_refused(resume):
    """A count of fed nodes off by one, in either direction."""

    def change(draft: Draft) -> Draft:
        assert draft.resume is not None
        return replace(draft, resume=resume(*draft.resume))

    with pytest.raises(ValueError, match="resume: expected the 3 pending nodes at block 2"):
        quick(Planted(LayerSkip(2, 3), change))


def test_layer_dropout_rates():
    """By hand: D(l) = 2^(l/4) - 1. Catches a schedule off by one layer, in base e, or falling."""
    root = 2**0.25
    expected = [0.2 * d for d in (0.0, root - 1, root**2 - 1, root**3 - 1, 1.0)]
    assert layer_dropout_rates(5, 0.2) == pytest.approx(expected)
    halfway = [(math.sqrt(2) - 1) * rate for rate in expected]
    assert layer_dropout_rates(5, 0.2, progress=0.5) == pytest.approx(halfway)
    assert layer_dropout_rates(5, 0.2, progress=0.0) == [0.0] * 5
    assert layer_dropout_rates(5, 0.2, linear=True) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_exit_loss_weights():
    """By hand. Catches sums that count from 1, a scaled last layer, and weights off by a layer."""
    total = 0.2 * 0 + 0.2 * 1 + 0.2 * 3 + (3 + 0.2 * 3)
    expected = [0.0, 0.2 / total, 0.6 / total, 3.6 / total]
    assert exit_loss_weights(4, 0.2) == pytest.approx(expected)
    assert exit_loss_weights(4) == pytest.approx([0, 0.1, 0.3, 0.6])  # sums 0, 1, 3, 6
    assert exit_loss_weights(4, 0.0) == [0, 0, 0, 1]
    assert exit_loss_weights(4, linear=True) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert exit_loss_weights(4, 0.5, linear=True) == pytest.approx(
        [w / 7 for w in (0.5, 1, 1.5, 4)]
    )
    on = [True, False, True, True]
    assert exit_loss_weights(4, on=on) == pytest.approx([0, 0, 1 / 3, 2 / 3])


def test_rotational_curriculum():
    """Catches a rotation that leaves a layer out, is off by one, or drops the last layer."""
    on = [rotational_curriculum(step, 7, 3) for step in range(6)]
    assert [[i for i, each in enumerate(row) if each] for row in on] == [
        [0, 3, 6],
        [1, 4, 6],
        [2, 5, 6],
        [0, 3, 6],
        [1, 4, 6],
        [2, 5, 6],
    ]
    assert rotational_curriculum(5, 4, 1) == [True] * 4


def test_gradual_curriculum():
    """One layer more every T / 2L = 3 steps. Catches layers that come from below or too late."""
    for step in range(24):
        n_on = min(4, 1 + step // 3)
        assert gradual_curriculum(step, 4, 24) == [False] * (4 - n_on) + [True] * n_on
    assert all(gradual_curriculum(50, 12, 100))


def test_exit_loss_by_hand():
    """Two exits, their states the logits. Catches weights swapped, a sum for a mean, the mask."""
    model = SimpleNamespace(n_layers=2, hidden_size=2, norm=lambda x: x, head=lambda x: x)
    hidden = {
        1: torch.zeros(1, 2, 2, dtype=torch.float64),  # each -log(1/2)
        2: torch.tensor([[[3.0, 1.0], [1.0, 9.0]]], dtype=torch.float64).log(),  # 3/4 and 1/10
    }
    labels = torch.zeros(1, 2, dtype=torch.long)
    final = (math.log(4 / 3) + math.log(10)) / 2
    loss = exit_loss(model, hidden, labels, [0.25, 0.75])
    assert float(loss) == pytest.approx(0.25 * math.log(2) + 0.75 * final)
    first = torch.tensor([[True, False]])
    loss = exit_loss(model, hidden, labels, [0.25, 0.75], first)
    assert float(loss) == pytest.approx(0.25 * math.log(2) + 0.75 * math.log(4 / 3))
    assert exit_loss(model, {2: hidden[2]}, labels, [0.0, 1.0]).dtype == torch.float64


def test_the_loss_without_exits_is_the_plain_one():
    """Catches a missing norm or block, and labels that are not the next tokens."""
    model = tiny_transformer()
    logits = model(TOKENS).logits
    assert logits is not None
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    only_last = exit_loss_weights(3, 0.0)
    torch.testing.assert_close(early_exit_loss(model, TOKENS, only_last), plain)
    draw = torch.Generator().manual_seed(0)
    torch.testing.assert_close(early_exit_loss(model, TOKENS, only_last, [0.0] * 3, draw), plain)
    mask = torch.rand(TOKENS.shape, generator=draw) < 0.5
    some = F.cross_entropy(logits[:, :-1][mask[:, :-1]], TOKENS[:, 1:][mask[:, :-1]])
    torch.testing.assert_close(early_exit_loss(model, TOKENS, only_last, mask=mask), some)


def test_training_reads_what_decoding_reads():
    """Training forward == decoding forward at every exit, token by token in a cache, and drafts.

    Catches an exit one block off, before or after another norm, and other positions."""
    model = tiny_transformer(qk_norm=True)
    hidden = block_states(model, TOKENS)
    for exit_layer in (1, 2):
        trained = model.head(model.norm(hidden[exit_layer]))
        cache = model.new_cache(3, 9)
        for t in range(9):
            output = model(TOKENS[:, t : t + 1], cache, taps=(exit_layer,), exit_layer=exit_layer)
            assert output.logits is not None
            torch.testing.assert_close(
                output.hidden[exit_layer][:, 0], hidden[exit_layer][:, t], rtol=0, atol=1e-9
            )
            torch.testing.assert_close(output.logits[:, 0], trained[:, t], rtol=0, atol=1e-9)
        drafter = LayerSkip(exit_layer, 1)
        for t in range(1, 9):
            first = next(decode(model, list(TOKENS[:, :t]), drafter, max_new_tokens=9))
            drafts = first.draft.tokens[:, 0]
            assert drafts.tolist() == trained[:, t - 1].argmax(-1).tolist()
    whole = model(TOKENS, taps=(1, 2, 3)).hidden
    for tap, states in hidden.items():
        torch.testing.assert_close(states, whole[tap], rtol=0, atol=1e-9)


def test_a_dropped_block_leaves_a_sequence_as_it_is():
    """Rates 0 and 1. Catches dropout off by a layer, inverted, or rescaled."""
    model = tiny_transformer()
    hidden = block_states(model, TOKENS, draw_kept([0.0, 1.0, 0.0], 3, torch.Generator()))
    torch.testing.assert_close(hidden[1], hidden[2])
    without = tiny_transformer()
    del without.blocks[1]
    expected = without(TOKENS, taps=(1,), logits=False).hidden
    torch.testing.assert_close(hidden[2], expected[1])
    positions = without(TOKENS).logits
    torch.testing.assert_close(model.head(model.norm(hidden[3])), positions)


def test_sequences_are_dropped_each_on_its_own_at_their_rate():
    """4,000 sequences; 5 standard deviations, odds of a false alarm 6e-7 a rate, fixed seed.

    Catches one draw for the whole batch or for all blocks, and rates of the wrong block."""
    model, rates, n = tiny_transformer(), [0.0, 0.2, 0.7], 4000
    tokens = TOKENS[:1, :2].expand(n, -1)
    hidden = block_states(model, tokens, draw_kept(rates, n, torch.Generator().manual_seed(1)))
    taps = {0: model.embedding(tokens)} | hidden
    dropped = torch.stack([(taps[i] == taps[i + 1]).all(-1).all(-1) for i in range(3)])
    for rate, rows in zip(rates, dropped, strict=True):
        assert abs(float(rows.double().mean()) - rate) <= 5 * math.sqrt(rate * (1 - rate) / n)
    both = float((dropped[1] & dropped[2]).double().mean())
    assert abs(both - 0.14) < 5 * math.sqrt(0.14 * 0.86 / n)
    whole = block_states(model, tokens[:1])
    torch.testing.assert_close(hidden[1], whole[1].expand(n, -1, -1))
    kept = ~dropped[1] & ~dropped[2]
    torch.testing.assert_close(hidden[3][kept], whole[3].expand(int(kept.sum()), -1, -1))


def test_dropout_draws_from_its_generator_alone():
    """Catches a draw from the global generator, and draws that depend on the rates."""
    model = tiny_transformer()
    weights = exit_loss_weights(3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    losses, draws = [], []
    for rates in ([0.0, 0.5, 0.5], [0.0, 0.5, 0.5], [0.0, 0.0, 0.1]):
        draw = torch.Generator().manual_seed(7)
        losses.append(float(early_exit_loss(model, TOKENS, weights, rates, draw)))
        draws.append(float(torch.rand(1, generator=draw)))
    assert losses[0] == losses[1] != losses[2]
    assert draws[0] == draws[1] == draws[2]
    assert torch.equal(before, torch.get_rng_state())


def test_gradients_are_finite_and_reach_every_exit():
    """Against dropout that computes everything. Catches a graph cut where sequences are skipped."""
    model, expected = tiny_transformer(tie_word_embeddings=False).requires_grad_(True), {}
    kept = torch.tensor([[True, True, True], [True, False, False], [False, True, True]])
    angles = rotary_angles(torch.arange(8), 4, model.config.rope_theta, torch.float64)
    x, everywhere = model.embedding(TOKENS[:, :-1]), {}
    for i, block in enumerate(model.blocks):  # as the post does: computed, then thrown away
        x = torch.where(kept[i, :, None, None], block(x, angles.unsqueeze(0).unbind(2)), x)
        everywhere[i + 1] = x
    for hidden in (everywhere, block_states(model, TOKENS[:, :-1], kept)):
        model.zero_grad()
        exit_loss(model, hidden, TOKENS[:, 1:], exit_loss_weights(3)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
            if hidden is everywhere:
                expected[name] = parameter.grad.clone()
            torch.testing.assert_close(parameter.grad, expected[name])
    model.zero_grad()
    early_exit_loss(model, TOKENS, [1.0, 0.0, 0.0]).backward()
    assert model.blocks[0].mlp.down.weight.grad.any()
    assert model.blocks[1].mlp.down.weight.grad is None


def test_overfits_one_batch_and_then_drafts_it_whole():
    """The loss, the exits and the drafter in one: catches training that decoding cannot use."""
    model = tiny_transformer(hidden_size=32, tie_word_embeddings=False).requires_grad_(True)
    tokens = torch.stack([torch.arange(10), (torch.arange(10) * 5 + 2) % 13])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights, rates = exit_loss_weights(3, linear=True), layer_dropout_rates(3, 0.2)
    for step in range(60):
        draw = torch.Generator().manual_seed(step)
        loss = early_exit_loss(model, tokens, weights, rates, draw)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert early_exit_loss(model, tokens, weights).item() < 0.05
    assert set(exit_acceptance(model, tokens[:, 1:-1]).values()) == {1.0}
    run = generate(model, [row[:2] for row in tokens], LayerSkip(1, 3), max_new_tokens=8)
    assert [s.tolist() for s in run.sequences] == tokens.tolist()
    assert run.metrics.tau == 4.0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_exit_acceptance(temperature):
    """Against passes that exit. Catches states of another tap and a missing temperature."""
    mask = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    model = tiny_transformer()
    shares = exit_acceptance(model, TOKENS, temperature=temperature, mask=mask)
    assert shares.keys() == {1, 2}
    p = model(TOKENS).logits
    for layer, share in shares.items():
        q = model(TOKENS, exit_layer=layer).logits
        if temperature:
            both = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1))
            expected = both.sum(-1)
        else:
            expected = (p.argmax(-1) == q.argmax(-1)).double()
        assert share == pytest.approx(float(expected[mask].mean()))
    perfect = exit_acceptance(early_target(2), TOKENS, temperature=temperature)
    assert perfect[2] == pytest.approx(1.0)
    assert perfect[1] < 0.99


def test_exit_acceptance_is_what_the_loop_accepts():
    """One draft a round, greedy: every second token is tested. Catches positions off by one."""
    target = small_target(4, n_layers=3)
    run = generate(target, RAGGED[1], LayerSkip(2, 1), max_new_tokens=100)
    at = 5 + torch.tensor([0, *[len(r.new_tokens[0]) for r in run.rounds]]).cumsum(0)[:-1] - 1
    judged = [not r.cut.any() and r.draft.n_nodes == 1 for r in run.rounds]
    mask = torch.zeros(1, len(run.sequences[0]), dtype=torch.bool)
    mask[0, at[judged]] = True  # the roots: their next token was the draft
    share = exit_acceptance(target, run.sequences[0].unsqueeze(0), mask=mask)[2]
    assert 0.0 < share < 1.0
    assert share == pytest.approx(run.metrics.acceptance_rate)


def test_best_exit():
    """Against trying everything. Catches costs of another exit, and a K that is off by one."""
    acceptance = {1: 0.3, 2: 0.6, 3: 0.8, 5: 0.9}
    draft_cost = {1: 0.15, 2: 0.28, 3: 0.4, 5: 0.7}

    def verify(layer: int, n: int) -> float:
        return resumed_verify_cost(layer, 6, 1 + 0.05 * n)

    best = best_exit(acceptance, 6, draft_cost=draft_cost, verify=verify, max_drafts=8)
    tried = {
        (E, K): expected_speedup(a, K, draft_cost[E], verify_cost=verify(E, K + 1))
        for E, a in acceptance.items()
        for K in range(1, 9)
    }
    assert best.speedup == pytest.approx(max(tried.values()))
    assert tried[best.exit_layer, best.n_drafts] == max(tried.values())
    # a = 3/4 for E / L = 1/8: K = 4 gives (1 - a^5) / (1/4) / 1.5 = 2.034, K = 5 gives 2.024
    assert best_exit({1: 0.75}, 8)[:2] == (1, 4)
    assert best_exit({1: 0.75}, 8).speedup == pytest.approx((1 - 0.75**5) * 4 / 1.5)
    assert best_exit({1: 0.1, 2: 0.2}, 4) == ExitChoice(1, 0, 1.0)


def test_resumed_verify_cost():
    """By hand. Catches shares of drafted and verified blocks swapped."""
    assert resumed_verify_cost(3, 4, 1.0) == 1.0
    assert resumed_verify_cost(3, 4, 5.0) == 2.0
    costs = [resumed_verify_cost(E, 4, 2.0) for E in (1, 2, 3)]
    assert all(a > b for a, b in pairwise(costs))


def plain_model():
    return from_functional(
        lambda tokens, cache: (tokens, []), vocab_size=11, max_position_embeddings=9
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: LayerSkip(0), "exit_layer: expected at least 1, got 0"),
        (lambda: LayerSkip(1, 0), "n_drafts: expected at least 1, got 0"),
        (lambda: LayerSkip(1, 3, branching=(2, 1)), r"branching: expected .* one or 3, got \(2, 1"),
        (lambda: LayerSkip(1, 2, branching=(1, 0)), "branching: expected numbers of at least 1"),
        (
            lambda: LayerSkip(3).begin(TARGET, 1, 9),
            r"exit_layer: expected 1\.\.2 .* 3 blocks, got 3",
        ),
        (lambda: LayerSkip(1).begin(small_target(1, n_layers=1), 1, 9), "at least 2 blocks.*got 1"),
        (lambda: LayerSkip(1).begin(plain_model(), 1, 9), "at least 2 blocks.*got 0"),
        (lambda: LayerSkip(1, 1, branching=12).begin(TARGET, 1, 9), "vocabulary of 11, got 12"),
        (lambda: layer_dropout_rates(1, 0.1), "n_layers: expected at least 2 blocks.*got 1"),
        (lambda: layer_dropout_rates(4, 1.5), r"p_max: expected a number in \[0, 1\], got 1.5"),
        (lambda: layer_dropout_rates(4, 0.1, progress=-1), "progress: expected a number in"),
        (lambda: exit_loss_weights(1), "n_layers: expected at least 2 blocks"),
        (lambda: exit_loss_weights(4, -1.0), "e_scale: expected a finite number .* got -1.0"),
        (lambda: exit_loss_weights(4, on=[True]), r"on: expected one bool per layer \(4\), got 1"),
        (lambda: exit_loss_weights(2, on=[True, False]), "on: expected a layer whose weight"),
        (lambda: rotational_curriculum(0, 4, 0), "every: expected at least 1, got 0"),
        (lambda: gradual_curriculum(0, 4, 0), "n_steps: expected at least 1, got 0"),
        (lambda: block_states(TARGET, TOKENS[0]), r"tokens: expected int64 .* of \[9\]"),
        (lambda: block_states(TARGET, TOKENS.int()), "tokens: expected int64 .* torch.int32"),
        (lambda: early_exit_loss(TARGET, TOKENS[0], [1.0] * 3), r"tokens: expected .* of \[8\]"),
        (lambda: early_exit_loss(TARGET, TOKENS[:, :1], [1.0] * 3), r"tokens: .* of \[3, 0\]"),
        (
            lambda: block_states(TARGET, torch.zeros(1, 300, dtype=torch.long)),
            "tokens: 300 positions, but max_position_embeddings is 256",
        ),
        (lambda: draw_kept([0.1, 2.0], 3, torch.Generator()), r"rates: .* \[0, 1\], got \[0.1, 2"),
        (lambda: block_states(TARGET, TOKENS, TOKENS > 0), r"kept: .* \[3, 3\], .* \[3, 9\]"),
        (lambda: block_states(TARGET, TOKENS, TOKENS[:, :3]), "kept: expected bool .* torch.int64"),
        (lambda: early_exit_loss(TARGET, TOKENS, [0, 0, 1], [0, 0, 0.1]), "generator: layer drop"),
        (
            lambda: early_exit_loss(TARGET, TOKENS, [0, 0, 1], [0.1], torch.Generator()),
            r"rates: expected one a layer \(3\), got 1",
        ),
        (lambda: early_exit_loss(TARGET, TOKENS, [1.0]), r"weights: .* per layer \(3\).* \[1.0\]"),
        (lambda: early_exit_loss(TARGET, TOKENS, [0.0] * 3), "weights: .* not all 0"),
        (lambda: early_exit_loss(TARGET, TOKENS, [-1.0, 0, 1]), "weights: expected one finite"),
        (
            lambda: early_exit_loss(TARGET, TOKENS, [0, 0, 1], mask=TOKENS < 0),
            r"mask: expected \[3, 8\] with a position that counts, got \[3, 8\] with 0",
        ),
        (
            lambda: exit_loss(TARGET, {}, TOKENS, [0, 1, 0]),
            r"hidden\[2\]: .*\[3, 9, 16\], got none",
        ),
        (
            lambda: exit_loss(TARGET, block_states(TARGET, TOKENS[:, 1:]), TOKENS, [0, 0, 1]),
            r"hidden\[3\]: expected states of shape \[3, 9, 16\], got \[3, 8, 16\]",
        ),
        (lambda: exit_acceptance(TARGET, TOKENS, temperature=-1), "temperature: .* got -1"),
        (lambda: exit_acceptance(TARGET, TOKENS, mask=TOKENS < 0), "mask: expected a position"),
        (lambda: best_exit({}, 4), "acceptance: expected at least one exit layer, got none"),
        (lambda: best_exit({4: 0.5}, 4), r"exit_layer: expected 1\.\.3 .* got 4"),
        (lambda: best_exit({2: 0.5}, 4, draft_cost={1: 0.3}), "draft_cost: expected .* layer 2"),
        (lambda: best_exit({2: 1.5}, 4), "acceptance is 1.5"),
        (lambda: resumed_verify_cost(4, 4, 1.0), r"exit_layer: expected 1\.\.3 .* got 4"),
    ],
)
def test_bad_input_is_refused_by_name(act, message):
    """Catches a check that is gone: the error would come later, unnamed, or not at all."""
    with pytest.raises(ValueError, match=message):
        act()
