"""Medusa: lossless, agrees with the published trees, trains on what it drafts from."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import specdec.drafters.medusa
from specdec import (
    FINAL,
    Coupled,
    Draft,
    Greedy,
    Rejection,
    Typical,
    from_functional,
    generate,
)
from specdec.draft import ancestors
from specdec.drafters.medusa import (
    Medusa,
    MedusaHeads,
    MedusaState,
    medusa2_loss,
    medusa2_parameter_groups,
    medusa2_weight,
    medusa_loss,
)
from specdec.drafters.static_draft import rank_accuracies
from specdec.testing import LosslessError, check_lossless, exact_law, target_law
from specdec.testing.lossless import check_law
from specdec.testing.replay import Recorder, nodes
from specdec.testing.strategies import small_target
from specdec.trees import StaticTree, dense_choices, search_choices, static_tree
from tests.builders import Scripted, context_of

GOLDEN = Path(__file__).parents[1] / "golden"
EXAMPLE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]
CHAIN = dense_choices((1, 1, 1))
PROMPT = torch.tensor([1, 2])


def random_heads(target, n_heads: int = 3, seed: int = 0) -> MedusaHeads:
    """Heads that no longer agree with each other or the target."""
    heads, generator = MedusaHeads.for_target(target, n_heads), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return heads


TARGET, TARGET3 = small_target(1), small_target(3, vocab_size=3)
HEADS, HEADS3 = random_heads(TARGET), random_heads(TARGET3)


def hidden_of(target, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return target(tokens, taps=(FINAL,), logits=False).hidden[FINAL]


def train(heads: MedusaHeads, hidden: Tensor, tokens: Tensor, n_steps: int = 150) -> float:
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.03)
    loss = torch.tensor(math.nan)
    for _ in range(n_steps):
        loss = medusa_loss(heads, hidden, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


# 24 tokens without a short period, so that a shift shows
STORY = generate(TARGET, torch.tensor([10, 0]), max_new_tokens=24).sequences[0]


@pytest.fixture(scope="module")
def trained() -> MedusaHeads:
    heads = MedusaHeads.for_target(TARGET, 3)
    train(heads, hidden_of(TARGET, STORY[None]), STORY[None])
    return heads


def tau(heads: MedusaHeads, choices=CHAIN) -> float:
    """Tokens a pass on the text the heads were trained on, the last round left out."""
    run = generate(TARGET, STORY[:2], Medusa(heads, choices), max_new_tokens=24)
    assert run.sequences[0].equal(STORY)
    whole = [r for r in run.rounds if not r.cut.any()]
    return sum(len(r.new_tokens[0]) for r in whole) / len(whole)


def check_decoding_is_training(drafter: Medusa, prompts=(STORY[:5], STORY[:1])) -> None:
    """Every node holds what the head saw in training holds at the root: logits and tokens."""
    seen: list[Tensor] = []
    hooks = [
        head.register_forward_hook(lambda _, args, output: seen.append(output))
        for head in drafter.heads.heads
    ]
    recorder = Recorder(drafter)
    generate(TARGET, list(prompts), recorder, max_new_tokens=8)
    for hook in hooks:
        hook.remove()
    n_compared = 0
    for context, draft in recorder.seen:
        n_levels = min(3, context.max_depth) if draft.n_nodes else 0
        logits, seen = seen[:n_levels], seen[n_levels:]
        for b in (context.live & (context.n_new > 0)).nonzero().flatten().tolist():
            row = context.tokens[b : b + 1, : int(context.lengths[b])]
            trained_on = drafter.heads(hidden_of(TARGET, row))[0, -2]  # [n_heads, V]
            for k in range(n_levels):
                assert (logits[k][b, 0] - trained_on[k]).abs().max() < 1e-9
            depth_left = int(context.depth_left[b])
            top = trained_on.topk(drafter.tree.max_rank + 1).indices.tolist()
            assert [path for path, _ in nodes(draft, b, depth_left)] == [
                tuple(top[k][rank] for k, rank in enumerate(path))
                for path in drafter.tree.paths
                if len(path) <= depth_left
            ]
            n_compared += 1
    assert n_compared >= 2


@dataclass(frozen=True)
class Once:
    """Drafts in the first round only, which keeps an enumeration short."""

    drafter: Medusa
    taps = (FINAL,)

    def begin(self, target, batch_size, max_length):
        state = self.drafter.begin(target, batch_size, max_length)
        return Scripted(
            lambda context: (
                state.propose(context)
                if int(context.lengths[0]) == len(PROMPT)
                else Draft.empty(batch_size)
            )
        )


def law_error(drafter: Medusa, n_tokens: int = 3, rule: Rejection | None = None) -> float:
    law = exact_law(TARGET3, Once(drafter), PROMPT, n_tokens, rule)
    own = target_law(TARGET3, PROMPT, n_tokens, rule)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(law.get(key, 0.0) - own.get(key, 0.0)) for key in law.keys() | own.keys())


@pytest.mark.parametrize(
    ("drafter", "rules"),
    [
        (Medusa(HEADS, CHAIN), [Greedy(), Coupled(0.6, top_k=8, seed=1)]),
        (Medusa(HEADS, EXAMPLE), [Greedy(), Coupled(1.4, top_p=0.9, min_p=0.02, seed=2)]),
        (Medusa(HEADS, EXAMPLE, draw=True), [Coupled(seed=3)]),
    ],
    ids=["chain", "tree", "drawn tree"],
)
def test_medusa_is_lossless(drafter, rules):
    """Catches rows that read each other's state, drafts that depend on the past, wrong laws."""
    report = check_lossless(TARGET, drafter, max_new_tokens=6, rules=rules, n_samples=64)
    assert report.n_replayed > 40
    assert not report.near_ties


def test_trained_heads_are_lossless_and_accepted(trained):
    """Catches bugs that need accepted nodes to show: the state read from a rejected node."""
    prompts, rules = [STORY[:2], STORY[:9]], [Greedy()]
    report = check_lossless(
        TARGET,
        Medusa(trained, EXAMPLE),
        prompts=prompts,
        rules=rules,
        max_new_tokens=9,
        n_samples=0,
    )
    assert report.tau["Greedy"] > 2


@pytest.mark.parametrize(
    ("choices", "draw"),
    [
        (dense_choices((1, 1)), True),
        (dense_choices((2,)), True),
        ([(0,), (1,), (0, 0), (1, 0)], True),
        (dense_choices((1, 1)), False),
        (dense_choices((2,)), False),
    ],
    ids=["chain", "siblings", "candidates shared by two parents", "chosen chain", "chosen"],
)
def test_rejection_follows_the_targets_law_exactly(choices, draw):
    """Catches q of the wrong depth or rank, and candidates shared by nodes that are both tested."""
    assert law_error(Medusa(HEADS3, choices, draw=draw), 1 + len(choices[-1])) < 1e-9


def test_truncated_laws_are_exact_too():
    """Catches a q that skips the rule's temperature or truncation, or a draw after q ran out."""
    drafter = Medusa(HEADS3, dense_choices((2, 1)), draw=True)
    for rule in (Rejection(0.7, top_k=2), Rejection(1.5, top_p=0.6)):
        assert law_error(drafter, rule=rule) < 1e-9


@pytest.mark.parametrize("name", ["medusa_tree", "medusa_tree_63"])
def test_agrees_with_the_published_implementation(name):
    """Catches another token at a node, another mask, another path taken than the published one."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    case = load_file(GOLDEN / name / "case.safetensors")
    heads = MedusaHeads(2, config["vocab_size"], config["heads"], bias=True)
    with torch.no_grad():  # heads that say the recorded logits, whatever they are fed
        for head, logits in zip(heads.heads, case["head_logits"], strict=True):
            head.get_parameter("head.weight").zero_()
            head.get_parameter("head.bias").copy_(logits)
    root = int(case["target_logits"].argmax())
    context = replace(context_of([[0, root]]), hidden={FINAL: torch.zeros(1, 1, 2)})
    state = MedusaState(Medusa(heads, config["choices"]), torch.device("cpu"))
    with torch.no_grad():
        draft = state.propose(context)
    assert [root, *draft.tokens[0].tolist()] == case["tree_tokens"].tolist()
    assert ancestors(draft.tree())[0].equal(case["attention_mask"][1:, 1:].bool())

    settings = config["typical"]
    typical = Typical(
        settings["posterior_threshold"], settings["posterior_alpha"], settings["temperature"]
    )
    plain, agreeing = case["verify_logits"][None], case["verify_logits_agreeing"][None]
    verdicts = [
        rule.accept(draft, logits, context.lengths)
        for rule, logits in ((Greedy(), plain), (Greedy(), agreeing), (typical, agreeing))
    ]
    assert [int(v.n_accepted) for v in verdicts] == case["accepted"].tolist()
    path = verdicts[1].path[0, : int(verdicts[1].n_accepted)] + 1
    assert [0, *path.tolist()] == case["accepted_path_agreeing"].tolist()


def test_heads_start_as_the_targets_own():
    """Catches a block that is not the identity at first, and heads that share or freeze weights."""
    assert not TARGET.head.weight.requires_grad
    heads = MedusaHeads.for_target(TARGET, 2)
    hidden = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert heads(hidden).shape == (2, 5, 2, 11)
    for k in range(2):
        assert heads(hidden)[:, :, k].equal(TARGET.head(hidden))
    assert all(parameter.requires_grad for parameter in heads.parameters())
    before = TARGET.head.weight.clone()
    train(heads, hidden_of(TARGET, STORY[None]), STORY[None], 2)
    assert TARGET.head.weight.equal(before)


def test_the_head_by_hand():
    """Catches the residual left out, the activation on the wrong side, the bias forgotten."""
    heads = MedusaHeads(1, 2, 1)
    state = {"block.weight": 2.0, "block.bias": 1.0}
    with torch.no_grad():
        for name, value in state.items():
            heads.heads[0].get_parameter(name).fill_(value)
        heads.heads[0].get_parameter("head.weight").copy_(torch.tensor([[1.0], [-2.0]]))
    # x = 3: 3 + silu(2 * 3 + 1) = 3 + 7 * sigmoid(7)
    x = 3 + 7 / (1 + math.exp(-7))
    assert heads(torch.tensor([3.0]))[0].tolist() == pytest.approx([x, -2 * x], rel=1e-6)


class Says(torch.nn.Module):
    """A head that returns its input as logits: what a loss test can check by hand."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def two_heads(vocab_size: int = 3) -> MedusaHeads:
    heads = MedusaHeads(vocab_size, vocab_size, 2)
    heads.heads = torch.nn.ModuleList([Says(), Says()])
    return heads


LN = torch.tensor(
    [[[8, 1, 1], [1, 8, 1], [1, 1, 2], [1, 1, 1], [1, 1, 1]]], dtype=torch.float64
).log()
WORDS = torch.tensor([[0, 1, 2, 1, 0]])


def test_the_loss_by_hand():
    """Head 1 at t = 0, 1, 2 against x_2, x_3, x_4 = 2, 1, 0; head 2 at t = 0, 1 against x_3, x_4.

    Catches labels off by one, weights 0.8^(k-1), a sum for a mean, a mask shifted.
    """
    nll = [math.log(10 / 1), math.log(10 / 8), math.log(4 / 1)], [math.log(10), math.log(10)]
    expected = 0.8 * sum(nll[0]) / 3 + 0.64 * sum(nll[1]) / 2
    assert float(medusa_loss(two_heads(), LN, WORDS)) == pytest.approx(expected, abs=1e-12)
    mask = torch.tensor([[True, True, False, True, False]])  # only x_3 counts
    expected = 0.5 * math.log(10 / 8) + 0.25 * math.log(10)
    got = medusa_loss(two_heads(), LN, WORDS, mask=mask, decay=0.5)
    assert float(got) == pytest.approx(expected, abs=1e-12)


def test_the_loss_against_the_targets_law_by_hand():
    """Catches p read at t instead of t + k, p and q swapped, the two weights swapped."""
    p = torch.full((1, 5, 3), 1 / 3, dtype=torch.float64)
    p[0, 1], p[0, 2], p[0, 3] = torch.tensor([[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]]).double()
    kl = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.1)  # head 1, t = 0: p at 1
    kl += math.log(10 / 8)  # t = 1: p at 2
    kl += math.log(4 / 2)  # t = 2: p at 3
    kl2 = math.log(10) + math.log(10)  # head 2: p at 2 and 3
    expected = 0.8 * kl / 3 + 0.64 * kl2 / 2
    options = {"target_logits": p.log(), "hard_weight": 0.0}
    got = float(medusa_loss(two_heads(), LN, WORDS, **options))
    assert got == pytest.approx(expected, abs=1e-12)
    hard = float(medusa_loss(two_heads(), LN, WORDS))
    mixed = float(medusa_loss(two_heads(), LN, WORDS, **options | {"hard_weight": 0.25}))
    assert mixed == pytest.approx(0.25 * hard + 0.75 * expected, abs=1e-12)


def test_gradients_are_finite_and_reach_every_head():
    """Catches a head left out of the sum, and a loss that does not depend on a parameter."""
    heads = MedusaHeads.for_target(TARGET, 3)
    hidden = hidden_of(TARGET, STORY[None]).requires_grad_()
    logits = torch.zeros(1, len(STORY), 11)
    medusa_loss(heads, hidden, STORY[None], target_logits=logits, hard_weight=0.5).backward()
    for parameter in [*heads.parameters(), hidden]:
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


def test_overfits_one_batch(trained):
    """Catches gradients that do not train: what the heads learnt by heart they then draft."""
    hidden = hidden_of(TARGET, STORY[None])
    untrained = medusa_loss(MedusaHeads.for_target(TARGET, 3), hidden, STORY[None])
    assert float(untrained.detach()) > 1
    assert float(medusa_loss(trained, hidden, STORY[None]).detach()) < 0.05
    assert tau(trained) == 4.0
    assert tau(trained, EXAMPLE) == 4.0


def test_training_forward_is_decoding_forward(trained):
    """Catches another state, another position or another head in decoding than in training."""
    check_decoding_is_training(Medusa(HEADS, EXAMPLE))
    check_decoding_is_training(Medusa(trained, CHAIN), prompts=[STORY[:3]])


def test_coupled_drafts_see_the_noise():
    """Catches candidates chosen without the rule's noise: a head that knows p exactly must agree
    with every draw."""
    target = small_target(1, n_layers=1)
    with torch.no_grad():  # p does not depend on the context, so copies of the head know it
        target.norm.weight.zero_()
    heads = MedusaHeads.for_target(target, 3)
    run = generate(target, PROMPT, Medusa(heads, CHAIN), max_new_tokens=17, rule=Coupled(seed=3))
    assert [len(r.new_tokens[0]) for r in run.rounds] == [4, 4, 4, 4, 1]


def test_a_row_does_not_depend_on_its_batch():
    """Catches drawn candidates keyed by row or slot, under the one rule that check_lossless does
    not replay."""
    rows, rule = [STORY[:1], STORY[:4], STORY[:9]], Rejection(seed=5)
    drafter = Medusa(HEADS, EXAMPLE, draw=True)
    together = generate(TARGET, rows, drafter, max_new_tokens=8, rule=rule).sequences
    for b, row in enumerate(rows):
        alone = generate(TARGET, row, drafter, max_new_tokens=8, rule=rule.for_row(b))
        assert alone.sequences[0].equal(together[b])


def test_typical_acceptance_takes_medusas_drafts(trained):
    """Catches a draft that the rule of the paper cannot read."""
    rows = [STORY[:1], STORY[:6]]
    run = generate(TARGET, rows, Medusa(trained, EXAMPLE), max_new_tokens=9, rule=Typical())
    assert [len(new) for new in run.new_tokens] == [9, 9]
    assert run.metrics.tau > 1


def test_drafts_stop_where_they_cannot_count():
    """Catches nodes deeper than the budget, rows that are done or have no state yet, and a tree
    where a chain would do."""
    recorder = Recorder(Medusa(HEADS, EXAMPLE))
    generate(TARGET, [STORY[:1], STORY[:4]], recorder, max_new_tokens=3)
    (first, draft), *_ = recorder.seen
    assert first.max_depth == 2
    assert draft.tokens.shape == (2, 5)  # depths 1 and 2
    assert draft.mask().tolist() == [[False] * 5, [True] * 5]
    recorder = Recorder(Medusa(HEADS, EXAMPLE))
    generate(TARGET, [STORY[:4], STORY[:4]], recorder, max_new_tokens=[2, 9])
    assert recorder.seen[0][1].mask().tolist() == [[True] * 2 + [False] * 5, [True] * 7]
    chain = Recorder(Medusa(HEADS, CHAIN))
    generate(TARGET, [STORY[:1]], chain, max_new_tokens=4)
    assert [(d.n_nodes, d.parents) for _, d in chain.seen][:2] == [(0, None), (2, None)]


def test_accuracies_are_what_greedy_decoding_accepts(trained):
    """Catches a rank table off by one token or head; the searched tree of trained heads is deep,
    that of random heads wide."""
    table = rank_accuracies(TARGET, trained, [STORY], n_ranks=4)
    assert table.shape == (3, 4)
    assert table[:, 0].min() > 0.95
    assert search_choices(table, 3) == CHAIN
    own = rank_accuracies(TARGET, HEADS, [STORY[:9], STORY, STORY[:2]], n_ranks=11)
    assert torch.allclose(own.sum(1), torch.ones(3, dtype=torch.float64))
    hits = []  # head 2 by hand
    for row in (STORY[:9], STORY):
        top = HEADS(hidden_of(TARGET, row[None]))[0, :-3, 1].topk(11).indices
        hits += [(top[t] == row[t + 3]).nonzero().item() for t in range(len(row) - 3)]
    assert own[1].tolist() == pytest.approx([hits.count(r) / len(hits) for r in range(11)])


def fresh_pair():
    return small_target(2).requires_grad_(True), MedusaHeads.for_target(TARGET, 2)


def test_medusa2_is_the_sum_of_both_losses():
    """Catches a weight on the wrong term, the target's own labels shifted, a mask left out."""
    target, heads = fresh_pair()
    tokens, mask = STORY[None, :12], torch.rand(1, 12, generator=torch.Generator()) < 2
    mask[0, :4] = False
    output = target(tokens, taps=(FINAL,))
    nll = -output.logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None]).squeeze(-1)
    for options, own in (({}, nll.mean()), ({"mask": mask}, nll[3:].mean())):
        extra = medusa_loss(heads, output.hidden[FINAL], tokens, **options)
        got = medusa2_loss(target, heads, tokens, 0.3, **options)
        assert float(got.detach()) == pytest.approx(float((own + 0.3 * extra).detach()), abs=1e-12)
    kept = medusa2_loss(target, heads, tokens, 0.0, original_logits=output.logits.detach())
    assert float(kept.detach()) == pytest.approx(0.0, abs=1e-12)


def test_medusa2_trains_the_target_through_the_heads():
    """Catches states that are detached, and groups that leave a parameter out or share a rate."""
    target, heads = fresh_pair()
    tokens = STORY[None, :12]
    through = [p for name, p in target.named_parameters() if "head" not in name]
    alone = torch.autograd.grad(medusa2_loss(target, heads, tokens, 0.0), through)
    joint = torch.autograd.grad(medusa2_loss(target, heads, tokens, 1.0), through)
    assert all((a - j).abs().max() > 1e-6 for a, j in zip(alone, joint, strict=True))

    groups = medusa2_parameter_groups(target, heads, 1e-3)
    assert [group["lr"] for group in groups] == [1e-3, 4e-3]
    grouped = {id(p) for group in groups for p in group["params"]}
    assert grouped == {id(p) for p in [*target.parameters(), *heads.parameters()]}
    optimizer = torch.optim.Adam(groups)
    losses = []
    for step in range(40):
        loss = medusa2_loss(target, heads, tokens, medusa2_weight(step, 20))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


def test_the_warm_up_of_lambda_0():
    """Catches a ramp that starts at 0, ends off its peak, or falls after it."""
    ramp = [medusa2_weight(step, 4) for step in range(6)]
    expected = [0.2 * math.sin(math.pi / 8 * n) for n in (1, 2, 3)] + [0.2] * 3
    assert ramp == pytest.approx(expected)
    assert medusa2_weight(0, 0, peak=0.5) == 0.5


def test_a_state_shifted_by_one(monkeypatch):
    """The planted bug: the state that predicted the token before the root."""
    right = specdec.drafters.medusa.take
    monkeypatch.setattr(
        specdec.drafters.medusa, "take", lambda states, i: right(states, (i - 1).clamp(min=0))
    )
    with pytest.raises(LosslessError, match="replay"):
        check_lossless(TARGET, Medusa(HEADS, CHAIN), max_new_tokens=8, n_samples=0)
    with pytest.raises(AssertionError):
        check_decoding_is_training(Medusa(HEADS, EXAMPLE))


def test_the_wrong_tap(monkeypatch):
    """The planted bug: the residual stream before the final norm. Only training == decoding sees
    it, as every round reads the same wrong thing."""
    monkeypatch.setattr(specdec.drafters.medusa, "FINAL", TARGET.n_layers)
    monkeypatch.setattr(Medusa, "taps", (TARGET.n_layers,))
    check_lossless(TARGET, Medusa(HEADS, CHAIN), rules=[Greedy()], max_new_tokens=4, n_samples=0)
    with pytest.raises(AssertionError):
        check_decoding_is_training(Medusa(HEADS, EXAMPLE))


def test_labels_off_by_one(trained):
    """The planted bug: head k trained on x_{t+k}, the root itself for head 1."""
    heads = MedusaHeads.for_target(TARGET, 3)
    hidden = hidden_of(TARGET, STORY[None])
    assert train(heads, hidden[:, 1:], STORY[None, :-1]) < 0.05
    assert tau(trained) - tau(heads) > 1.5


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("parents", lambda tree: torch.tensor([-1, -1, 0, 0, 0, 2, 2])),
        ("ranks", lambda tree: tree.ranks.flip(0)),
    ],
)
def test_a_tree_put_together_wrongly(monkeypatch, part, change):
    """The planted bugs: a child below the wrong node, candidates of the wrong rank."""
    drafter = Medusa(HEADS, EXAMPLE)
    monkeypatch.setattr(StaticTree, part, change(static_tree(EXAMPLE)))
    with pytest.raises(AssertionError):
        check_decoding_is_training(drafter)


def test_a_law_that_is_not_the_law_drawn_from(monkeypatch):
    """The planted bug: every node declares the law of its depth's first candidate."""
    drafter = Medusa(random_heads(TARGET3, seed=1), dense_choices((2,)), draw=True)
    assert law_error(drafter, 2) < 1e-9
    right = MedusaState.propose

    def first(self, context):
        draft = right(self, context)
        if draft.probs is None:
            return draft
        return replace(draft, probs=draft.probs[:, :1].expand_as(draft.probs).contiguous())

    monkeypatch.setattr(MedusaState, "propose", first)
    assert law_error(drafter, 2) > 1e-3
    sharp = Medusa(random_heads(TARGET, seed=2), dense_choices((4,)), draw=True)
    with pytest.raises(LosslessError, match="do not follow"):
        check_law(TARGET, sharp, PROMPT, 512, 4)


def heads_of(width: int = 16, vocab_size: int = 11, n_heads: int = 3) -> MedusaHeads:
    return MedusaHeads(width, vocab_size, n_heads).double()


HIDDEN, TOKENS = torch.zeros(1, 6, 16, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.long)


def loss_of(heads=None, hidden=HIDDEN, tokens=TOKENS, **options):
    return medusa_loss(heads or heads_of(), hidden, tokens, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MedusaHeads(0, 11), "hidden_size: expected at least 1, got 0"),
        (lambda: MedusaHeads(16, 0), "vocab_size: .* got 0"),
        (lambda: MedusaHeads.for_target(TARGET, 0), "n_heads: .* got 0"),
        (
            lambda: MedusaHeads.for_target(
                from_functional(lambda t, c: (t, []), vocab_size=11, max_position_embeddings=9)
            ),
            "target: expected a head that is an nn.Linear",
        ),
        (lambda: Medusa(HEADS), r"choices: expected a depth of at most 3, .* got 4"),
        (lambda: Medusa(HEADS3, [[0], [1], [2], [3]]), "choices: .* vocabulary of 3, got 3"),
        (lambda: Medusa(HEADS, [[0], [2]], draw=True), r"got \(2,\) without .* rank 1"),
        (lambda: Medusa(HEADS, [[0], [1, 0]]), r"choices: \(1, 0\) hangs below"),
        (
            lambda: generate(TARGET, PROMPT, Medusa(heads_of(8), CHAIN), max_new_tokens=2),
            "heads: expected the target's hidden_size of 16, got 8",
        ),
        (
            lambda: generate(TARGET, PROMPT, Medusa(heads_of(16, 12), CHAIN), max_new_tokens=2),
            "heads: expected the target's vocab_size of 11, got 12",
        ),
        (lambda: loss_of(tokens=TOKENS.int()), "tokens: expected int64"),
        (lambda: loss_of(tokens=TOKENS[:, :4]), r"tokens: .* T >= 5 for 3 heads"),
        (lambda: loss_of(hidden=HIDDEN[:, 1:]), r"hidden: expected shape \[1, 6, 16\], got"),
        (lambda: loss_of(mask=TOKENS), r"mask: expected bool of shape \[1, 6\], got torch.int64"),
        (lambda: loss_of(mask=TOKENS == 1), "mask: expected a token that head 1 predicts"),
        (
            lambda: loss_of(mask=torch.tensor([[True] * 4 + [False] * 2])),
            "mask: expected a token that head 3 predicts",
        ),
        (lambda: loss_of(decay=0.0), "decay: .* got 0.0"),
        (lambda: loss_of(hard_weight=1.5), "hard_weight: .* got 1.5"),
        (lambda: loss_of(hard_weight=0.5), r"target_logits: expected shape \[1, 6, 11\], got None"),
        (lambda: loss_of(hard_weight=0.5, target_logits=HIDDEN), r"target_logits: .* 16\]"),
        (lambda: medusa2_loss(TARGET, HEADS, TOKENS, -0.1), "lambda_0: .* got -0.1"),
        (
            lambda: medusa2_loss(TARGET, HEADS, TOKENS, 0.1, original_logits=HIDDEN),
            r"original_logits: expected shape \[1, 6, 11\]",
        ),
        (lambda: medusa2_weight(-1, 4), "step: .* got -1"),
        (lambda: medusa2_weight(0, -4), "n_warmup: .* got -4"),
        (lambda: medusa2_parameter_groups(TARGET, HEADS, 1e-3), "target: expected parameters"),
        (lambda: medusa2_parameter_groups(HEADS, HEADS, 0.0), "lr, head_lr_multiplier: .* got 0.0"),
        (lambda: rank_accuracies(TARGET, HEADS, [STORY], 12), r"n_ranks: expected 1\.\.11, got 12"),
        (lambda: rank_accuracies(TARGET, HEADS, [STORY[None]]), "sequences: expected 1-D int64"),
        (lambda: rank_accuracies(TARGET, HEADS, [STORY[:4]]), "one of at least 5 tokens"),
        (lambda: rank_accuracies(TARGET3, HEADS, [STORY]), "heads: expected the target's vocab"),
    ],
)
def test_wrong_input_is_named(call, message):
    """Catches averages over nothing, broadcasting, and crashes deep down in the first round."""
    with pytest.raises(ValueError, match=message):
        call()


def test_chosen_nodes_declare_no_law():
    """Catches candidates drawn and declared chosen, which are accepted less often."""
    recorder = Recorder(Medusa(HEADS, EXAMPLE))
    generate(TARGET, PROMPT, recorder, max_new_tokens=6, rule=Rejection(seed=1))
    assert all(draft.probs is None for _, draft in recorder.seen)
    drafted: list[Draft] = [draft for _, draft in recorder.seen if draft.n_nodes]
    top = HEADS(hidden_of(TARGET, PROMPT[None]))[0, -2].topk(2).indices
    assert drafted[0].tokens[0, :2].equal(top[0])
