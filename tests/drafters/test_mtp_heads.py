"""Parallel heads: lossless, draft what they were trained to say, one head's logits at a time."""

import dataclasses
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import specdec.drafters.mtp_heads as mtp_heads
from specdec import Coupled, Draft, Greedy, Rejection, Typical, from_functional, generate
from specdec.cache import TreeCache
from specdec.drafters.mtp_heads import (
    MTPHeads,
    MTPHeadsState,
    ParallelHeads,
    parallel_backward,
    parallel_loss,
)
from specdec.drafters.static_draft import rank_accuracies
from specdec.models import TransformerConfig
from specdec.models.layers import RotaryStore
from specdec.testing import LosslessError, check_lossless, exact_law, target_law
from specdec.testing.replay import Recorder, nodes
from specdec.testing.strategies import small_target
from specdec.trees import dense_choices, search_choices
from tests.builders import Scripted

EXAMPLE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]
PROMPT = torch.tensor([1, 2])


def random_heads(target, n_heads: int = 4, seed: int = 0) -> ParallelHeads:
    """Heads that no longer agree with each other or the target."""
    generator = torch.Generator().manual_seed(seed)
    network = ParallelHeads.for_target(target, n_heads).reset_parameters(generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return network


TARGET, TARGET3 = small_target(22), small_target(3, vocab_size=3)
HEADS, HEADS3 = random_heads(TARGET), random_heads(TARGET3, 3)
# 24 tokens without a short period, so that a shift shows
STORY = generate(TARGET, torch.tensor([7, 2]), max_new_tokens=24).sequences[0]


def train(network: ParallelHeads, z: Tensor, tokens: Tensor, n_steps: int = 30) -> float:
    optimizer, loss = torch.optim.Adam(network.parameters(), lr=0.02), torch.tensor(math.nan)
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = parallel_backward(network, TARGET, {network.tap: z}, tokens, head_1=False)
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimizer.step()
    return float(loss)


@pytest.fixture(scope="module")
def trained() -> ParallelHeads:
    """Heads that know STORY by heart."""
    network = ParallelHeads.for_target(TARGET)
    train(network, network.trunk(TARGET, STORY[None])[1], STORY[None])
    return network


def tau(network: ParallelHeads, choices=None) -> float:
    """Tokens a pass on STORY, the last round left out."""
    run = generate(TARGET, STORY[:2], MTPHeads(network, choices), max_new_tokens=24)
    assert run.sequences[0].equal(STORY)
    whole = [r for r in run.rounds if not r.cut.any()]
    return sum(len(r.new_tokens[0]) for r in whole) / len(whole)


@torch.no_grad()
def check_decoding_is_training(drafter: MTPHeads, prompts=(STORY[:5], STORY[:1])) -> None:
    """Every head's residual stream and every node's token are those of training at the root."""
    network, n_blocks, seen = drafter.network, drafter.tree.max_depth, list[Tensor]()
    hooks = [
        block.register_forward_hook(lambda _, args, output: seen.append(output))
        for block in network.blocks
    ]
    recorder = Recorder(drafter)
    generate(TARGET, list(prompts), recorder, max_new_tokens=8)
    for hook in hooks:
        hook.remove()
    n_compared = 0
    for context, draft in recorder.seen:
        streams, seen = seen[:n_blocks], seen[n_blocks:]
        for b in (context.live & (context.n_new > 0)).nonzero().flatten().tolist():
            row, left = context.tokens[b, : int(context.lengths[b])], int(context.depth_left[b])
            if not draft.n_nodes:
                continue
            z = network.trunk(TARGET, row[None])[network.tap]
            last = int(context.n_new[b]) - 1
            for head, stream in enumerate(streams, start=2):
                expected = network.stream(head, z)[0, -2]  # where the root was predicted
                assert (stream[b, last] - expected).abs().max() < 1e-9
                n_compared += 1
            top = [logits[0, -2].topk(drafter.tree.max_rank + 1) for logits in network(z, TARGET)]
            assert [path for path, _ in nodes(draft, b, left)] == [
                tuple(int(top[k].indices[rank]) for k, rank in enumerate(path))
                for path in drafter.tree.paths
                if len(path) <= left
            ]
    assert n_compared > 4
    assert not seen


@dataclasses.dataclass(frozen=True)
class Once:
    """Drafts in the first round only, which keeps an enumeration short."""

    drafter: MTPHeads

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    def begin(self, target, batch_size, max_length):
        state = self.drafter.begin(target, batch_size, max_length)
        return Scripted(
            lambda context: (
                state.propose(context)
                if int(context.lengths[0]) == len(PROMPT)
                else Draft.empty(batch_size)
            )
        )


def law_error(drafter, n_tokens: int = 3, rule: Rejection | None = None) -> float:
    law = exact_law(TARGET3, drafter, PROMPT, n_tokens, rule)
    own = target_law(TARGET3, PROMPT, n_tokens, rule)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(law.get(key, 0.0) - own.get(key, 0.0)) for key in law.keys() | own.keys())


# Drafting


@pytest.mark.parametrize(
    ("drafter", "rules", "n_samples"),
    [
        (MTPHeads(HEADS), [Coupled(0.6, top_k=8, seed=1)], 0),
        (MTPHeads(HEADS, EXAMPLE), [Greedy()], 0),
        (MTPHeads(HEADS, EXAMPLE, draw=True), [Coupled(1.4, top_p=0.9, seed=2)], 64),
        (MTPHeads(random_heads(small_target(22, n_layers=1), 2)), [Greedy()], 0),
    ],
    ids=["chain", "tree", "drawn tree", "a trunk without blocks"],
)
def test_parallel_heads_are_lossless(drafter, rules, n_samples):
    """Catches rows that read each other, a cache that does not follow what was accepted."""
    target = TARGET if drafter.network.tap else small_target(22, n_layers=1)
    report = check_lossless(target, drafter, max_new_tokens=6, rules=rules, n_samples=n_samples)
    assert report.n_replayed > 30
    assert not report.near_ties


def test_trained_heads_are_lossless_and_accepted(trained):
    """Catches bugs that need accepted nodes to show: states of rejected nodes in the cache."""
    drafter, prompts = MTPHeads(trained, EXAMPLE), [STORY[:1], STORY[:9]]
    report = check_lossless(
        TARGET, drafter, prompts=prompts, rules=[Greedy()], max_new_tokens=8, n_samples=0
    )
    assert report.tau["Greedy"] > 2


@pytest.mark.parametrize(
    ("choices", "draw"),
    [
        (None, True),
        (dense_choices((2,)), True),
        ([(0,), (1,), (0, 0), (1, 0)], True),
        (None, False),
        (dense_choices((2,)), False),
    ],
    ids=["chain", "siblings", "candidates shared by two parents", "chosen chain", "chosen"],
)
def test_rejection_follows_the_targets_law_exactly(choices, draw):
    """Catches a q of another depth or rank than the node's."""
    drafter = MTPHeads(HEADS3, choices, draw=draw)
    assert law_error(Once(drafter), 1 + drafter.tree.max_depth) < 1e-9


def test_rejection_is_exact_over_rounds_and_truncation():
    """Catches a law that is right in the first round only, or skips the rule's temperature."""
    assert law_error(MTPHeads(HEADS3, [(0,)], draw=True), 3) < 1e-9
    rule = Rejection(0.7, top_k=2)
    assert law_error(Once(MTPHeads(HEADS3, [(0,), (1,)], draw=True)), 2, rule) < 1e-9


def test_a_row_does_not_depend_on_its_batch():
    """Catches drawn candidates keyed by slot, under the one rule that is not replayed."""
    rows, rule = [STORY[:1], STORY[:4], STORY[:9]], Rejection(seed=5)
    drafter = MTPHeads(HEADS, EXAMPLE, draw=True)
    together = generate(TARGET, rows, drafter, max_new_tokens=8, rule=rule).sequences
    for b, row in enumerate(rows):
        alone = generate(TARGET, row, drafter, max_new_tokens=8, rule=rule.for_row(b))
        assert alone.sequences[0].equal(together[b])


def test_typical_acceptance_takes_the_drafts(trained):
    """Catches a draft that this rule cannot read."""
    rows, drafter = [STORY[:1], STORY[:6]], MTPHeads(trained, EXAMPLE)
    run = generate(TARGET, rows, drafter, max_new_tokens=[9, 5], rule=Typical())
    assert [len(new) for new in run.new_tokens] == [9, 5]
    assert run.metrics.tau > 1


def test_drafts_stop_where_they_cannot_count():
    """Catches nodes beyond the budget, rows that are done or have no state yet, blocks that no
    node needs, and a tree where a chain would do."""
    recorder = Recorder(MTPHeads(HEADS, EXAMPLE))
    generate(TARGET, [STORY[:1], STORY[:4]], recorder, max_new_tokens=[3, 4])
    (first, draft), *later = recorder.seen
    assert first.max_depth == 3
    assert draft.mask().tolist() == [[False] * 7, [True] * 7]
    assert all(not d.mask()[~c.live].any() for c, d in later if d.n_nodes)
    chain = Recorder(MTPHeads(HEADS))
    generate(TARGET, [STORY[:1]], chain, max_new_tokens=5)
    assert [(d.n_nodes, d.parents) for _, d in chain.seen][:2] == [(0, None), (3, None)]
    state = MTPHeads(HEADS, [(0,), (1,)]).begin(TARGET, 1, 9)
    assert len(state.blocks) == len(state.store.keys) == 1


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    """Catches pieces that see another past than the whole, in a ragged batch."""
    drafter, prompts = MTPHeads(HEADS, EXAMPLE), [STORY[:3], STORY[:12], STORY[:1]]
    drafts = []
    for size in (512, 4):
        monkeypatch.setattr(mtp_heads, "_CHUNK", size)
        recorder = Recorder(drafter)
        generate(TARGET, prompts, recorder, max_new_tokens=4)
        drafts.append([[nodes(d, b, 9) for b in range(3)] for _, d in recorder.seen])
    assert drafts[0] == drafts[1]


def test_training_forward_is_decoding_forward(trained):
    """Catches another state, position, past or head in decoding than in training."""
    check_decoding_is_training(MTPHeads(HEADS, EXAMPLE))
    check_decoding_is_training(MTPHeads(HEADS, dense_choices((2, 1))))
    check_decoding_is_training(MTPHeads(trained), prompts=[STORY[:3]])


# Planted bugs


def another_head(right: Callable) -> Callable:
    return lambda self, context: right(self, context).roll(1, dims=0)


def shifted_states(right: Callable) -> Callable:
    def append(self, context):
        hidden = {tap: states.roll(1, dims=1) for tap, states in context.hidden.items()}
        return right(self, dataclasses.replace(context, hidden=hidden))

    return append


@pytest.mark.parametrize("plant", [another_head, shifted_states])
def test_what_only_training_sees(monkeypatch, plant):
    """Planted: head i read for depth i; z_{t-1} for z_t."""
    monkeypatch.setattr(MTPHeadsState, "_append", plant(MTPHeadsState._append))
    with pytest.raises(AssertionError):
        check_decoding_is_training(MTPHeads(HEADS))


def only_the_last(right: Callable) -> Callable:
    """A cache to which a round adds the last state alone, not those of the accepted tokens."""

    def append(self, context):
        n, seen = context.n_new, self.cache.lengths
        if not bool(seen.any()):
            return right(self, context)
        rows = torch.arange(len(n)), (n - 1).clamp(min=0)
        kept = {tap: states[rows].unsqueeze(1) for tap, states in context.hidden.items()}
        one = dataclasses.replace(
            context, hidden=kept, n_new=n.clamp(max=1), lengths=seen + n.clamp(max=1) + 1
        )
        return right(self, one)

    return append


def test_a_cache_without_the_accepted_tokens_is_seen(monkeypatch, trained):
    """Planted: only the state of the target's own token goes into the cache."""
    options = {"prompts": [STORY[:3]], "rules": [Greedy()], "max_new_tokens": 12, "n_samples": 0}
    check_lossless(TARGET, MTPHeads(trained, EXAMPLE), **options)
    monkeypatch.setattr(MTPHeadsState, "_append", only_the_last(MTPHeadsState._append))
    with pytest.raises(LosslessError, match="replay"):
        check_lossless(TARGET, MTPHeads(trained, EXAMPLE), **options)


class Everything(TreeCache):
    """Commits the padding of the shorter rows with them."""

    def commit(self, path, n):
        super().commit(path, torch.full_like(n, path.shape[1]))


def test_a_cache_with_padding_is_seen(monkeypatch):
    """Planted: what is no state of the row goes into its cache."""
    monkeypatch.setattr(mtp_heads, "TreeCache", Everything)
    with pytest.raises(ValueError, match="call propose in every round"):
        generate(TARGET, [STORY[:3], STORY[:9]], MTPHeads(HEADS), max_new_tokens=6)


class FromZero(RotaryStore):
    """Positions counted from the pass instead of the row."""

    def at(self, view):
        return super().at(
            dataclasses.replace(view, positions=view.positions - view.positions[:, :1])
        )


def test_a_position_that_starts_over_is_seen(monkeypatch):
    """Planted: every round's states stand at 0, 1, ..."""
    monkeypatch.setattr(mtp_heads, "RotaryStore", FromZero)
    with pytest.raises(AssertionError):
        check_decoding_is_training(MTPHeads(HEADS))


def test_labels_off_by_one(trained):
    """Planted: head i trained on x_{t+i-1}, the root itself for head 2."""
    network = ParallelHeads.for_target(TARGET)
    z = network.trunk(TARGET, STORY[None])[1]
    assert train(network, z[:, 1:], STORY[None, :-1]) < 0.3
    assert tau(trained) - tau(network) > 1.5


def test_a_round_left_out_is_refused():
    """Catches a wrapper that skips rounds: the cache would have a hole."""
    recorder = Recorder(MTPHeads(HEADS))
    generate(TARGET, [STORY[:3]], recorder, max_new_tokens=8)
    state = MTPHeads(HEADS).begin(TARGET, 1, 20)
    with pytest.raises(ValueError, match="call propose in every round"):
        state.propose(recorder.seen[1][0])


# Training


def test_heads_start_as_the_targets_last_block():
    """Catches a trunk one block off, another norm or head, weights that are shared or frozen."""
    network, tokens = ParallelHeads.for_target(TARGET), STORY[None]
    hidden = network.trunk(TARGET, tokens)
    assert list(hidden) == [network.tap] == [1]
    assert hidden[1].equal(TARGET(tokens, taps=(1,)).hidden[1])
    expected = TARGET(tokens).logits
    for logits in network(hidden[1], TARGET):
        assert (logits - expected).abs().max() < 1e-12
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert network.state_dict().keys() == {
        f"blocks.{k}.{name}" for k in range(3) for name in TARGET.blocks[-1].state_dict()
    }
    before = TARGET.blocks[-1].mlp.down.weight.clone()
    train(network, hidden[1], tokens, 2)
    assert TARGET.blocks[-1].mlp.down.weight.equal(before)
    assert not network.blocks[0].mlp.down.weight.equal(network.blocks[1].mlp.down.weight)


def test_a_target_of_one_block_has_the_embeddings_for_a_trunk():
    """Catches an exit layer of 0, which is none."""
    target = small_target(1, n_layers=1)
    network = ParallelHeads.for_target(target, 2)
    assert network.trunk(target, STORY[None])[0].equal(target.embedding(STORY[None]))


def test_fresh_weights():
    """Catches weights of another size than the target's own, and a generator that is ignored."""
    config = TransformerConfig(11, 64, 128, 9, 4)
    drawn = [
        ParallelHeads(config, 3, 7).reset_parameters(torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    weights = [network.blocks[1].mlp.down.weight for network in drawn]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    assert float(weights[0].detach().std()) == pytest.approx(1 / math.sqrt(128 * 2 * 8), rel=0.05)
    assert drawn[0].config == dataclasses.replace(config, num_hidden_layers=2)


class Says(nn.Module):
    """A block that returns its input: what a loss test can check by hand."""

    def forward(self, x: Tensor, rotary: object) -> Tensor:
        return x


def spoken() -> tuple[ParallelHeads, SimpleNamespace]:
    """Three heads and a target in which the trunk's states are the logits."""
    network = ParallelHeads(TransformerConfig(3, 3, 3, 1, 1, head_dim=2), 3, 0)
    network.blocks = nn.ModuleList([Says(), Says()])
    target = SimpleNamespace(
        vocab_size=3,
        hidden_size=3,
        n_layers=1,
        blocks=[Says()],
        norm=lambda x: x,
        head=lambda x: x,
        rotary=lambda n: None,
    )
    return network, target


LN = torch.tensor(
    [[[8, 1, 1], [1, 8, 1], [1, 1, 2], [1, 1, 1], [1, 1, 1]]], dtype=torch.float64
).log()
WORDS = torch.tensor([[0, 1, 2, 1, 0]])


@pytest.mark.parametrize("loss", [parallel_loss, parallel_backward])
def test_the_loss_by_hand(loss):
    """Head 1 at t = 0..3 against x_1..x_4 = 1, 2, 1, 0; head 2 at t = 0..2 against 2, 1, 0; head 3
    at t = 0, 1 against 1, 0.

    Catches labels off by one, a mean over heads, a sum over places, a mask shifted.
    """
    network, target = spoken()
    hidden = {0: LN.clone().requires_grad_()}
    one = math.log(10) + math.log(10) + math.log(4) + math.log(3)
    two = math.log(10) + math.log(10 / 8) + math.log(4)
    three = math.log(10) + math.log(10)
    whole = loss(network, target, hidden, WORDS)
    assert float(whole.detach()) == pytest.approx(one / 4 + two / 3 + three / 2, abs=1e-12)
    rest = loss(network, target, hidden, WORDS, head_1=False)
    assert float(rest.detach()) == pytest.approx(two / 3 + three / 2, abs=1e-12)
    mask = torch.tensor([[True, True, False, True, False]])  # x_1 and x_3 count
    expected = (math.log(10) + math.log(4)) / 2 + math.log(10 / 8) + math.log(10)
    got = loss(network, target, hidden, WORDS, mask=mask)
    assert float(got.detach()) == pytest.approx(expected, abs=1e-12)


BATCH = torch.stack([STORY[:12], STORY[9:21]])
MASK = torch.arange(12)[None] < torch.tensor([[12], [9]])


def setting(name: str):
    """A network, a target and what is trained: the heads alone, all of it, or the trunk alone."""
    tied = dataclasses.replace(TARGET.config, tie_word_embeddings=True)
    target = small_target(22) if name == "frozen" else type(TARGET)(tied).double()
    if name != "frozen":
        target.reset_parameters(torch.Generator().manual_seed(1))
    target.requires_grad_(name != "frozen")
    network = random_heads(target)
    return network.requires_grad_(name != "trunk alone"), target


def gradients(name: str, loss: Callable[..., Tensor], **options) -> tuple[float, dict[str, Tensor]]:
    network, target = setting(name)
    value = loss(network, target, network.trunk(target, BATCH), BATCH, **options)
    if loss is parallel_loss:
        value.backward()
    parameters = {**dict(network.named_parameters()), **dict(target.named_parameters("target"))}
    assert not value.requires_grad or loss is parallel_loss
    return float(value.detach()), {
        key: parameter.grad for key, parameter in parameters.items() if parameter.grad is not None
    }


@pytest.mark.parametrize("name", ["frozen", "joint", "trunk alone"])
@pytest.mark.parametrize("options", [{}, {"mask": MASK, "head_1": False}], ids=["all", "masked"])
def test_the_memory_saving_backward_is_the_plain_one(name, options):
    """Catches a head left out, a trunk that goes backward more than once or not at all, head 1 or
    the shared weights without gradients, gradients for what is frozen."""
    value, plain = gradients(name, parallel_loss, **options)
    saving_value, saving = gradients(name, parallel_backward, **options)
    assert saving_value == pytest.approx(value, abs=1e-12)
    assert saving.keys() == plain.keys()
    for key, gradient in plain.items():
        assert (saving[key] - gradient).abs().max() < 1e-12, key
        assert float(gradient.abs().max()) > 0, key
        assert bool(gradient.isfinite().all()), key
    heads = {key for key in plain if key.startswith("blocks")}
    own = {key for key in plain if key.startswith("target.blocks.1")}
    assert bool(heads) == (name != "trunk alone")
    assert bool(own) == (name != "frozen" and not options)
    assert ("target.embedding.weight" in plain) == (name != "frozen")


def test_gradients_add_to_those_that_are_there():
    """Catches a backward pass that overwrites: accumulation over batches would break."""
    network, target = setting("joint")
    for _ in range(2):
        parallel_backward(network, target, network.trunk(target, BATCH), BATCH)
    _, once = gradients("joint", parallel_loss)
    for key, parameter in [*network.named_parameters(), *target.named_parameters("target")]:
        assert (parameter.grad - 2 * once[key]).abs().max() < 1e-12


@dataclasses.dataclass(eq=False)
class Packed:
    tensor: Tensor


class Logits:
    """Counts the tensors of [.., V] that the graph holds: `most` of them at a time."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = {weight.data_ptr() for weight in weights}
        self.held: dict[int, int] = {}  # storage -> how often it is saved
        self.most = 0

    def pack(self, tensor: Tensor) -> Packed:
        packed, here = Packed(tensor), tensor.data_ptr()
        if tensor.shape[-1:] == (TARGET.vocab_size,) and here not in self.weights:
            self.held[here] = self.held.get(here, 0) + 1
            self.most = max(self.most, len(self.held))
            weakref.finalize(packed, self.drop, here)
        return packed

    def drop(self, here: int) -> None:
        self.held[here] -= 1
        if not self.held[here]:
            del self.held[here]


@pytest.mark.parametrize("name", ["frozen", "joint"])
def test_one_heads_logits_live_at_a_time(name):
    """Catches a graph kept from head to head. The plain form, the control, holds all four."""
    most, tokens = {}, BATCH[:, :10]  # no other dimension has the vocabulary's size of 11
    for loss in (parallel_loss, parallel_backward):
        network, target = setting(name)
        hidden, watch = network.trunk(target, tokens), Logits(list(target.parameters()))
        with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda packed: packed.tensor):
            value = loss(network, target, hidden, tokens, head_1=name == "joint")
            if loss is parallel_loss:
                value.backward()
        del value
        most[loss] = watch.most
        assert not watch.held
    n_heads = 4 if name == "joint" else 3
    assert most == {parallel_loss: n_heads, parallel_backward: 1}


def test_overfits_one_batch(trained):
    """Catches gradients that do not train: what the heads learnt by heart they then draft."""
    hidden = trained.trunk(TARGET, STORY[None])
    fresh = ParallelHeads.for_target(TARGET)
    options = {"head_1": False}
    assert float(parallel_loss(fresh, TARGET, hidden, STORY[None], **options).detach()) > 5
    assert float(parallel_loss(trained, TARGET, hidden, STORY[None], **options).detach()) < 0.2
    assert tau(trained) == 4.0
    assert tau(trained, EXAMPLE) == 4.0


def test_padding_changes_nothing():
    """Catches padding that is learnt, or seen by what comes before it."""
    short, long = STORY[None, :12], torch.cat([STORY[None, :12], STORY[None, :4]], dim=1)
    losses = [
        parallel_loss(HEADS, TARGET, HEADS.trunk(TARGET, tokens), tokens, mask=mask).detach()
        for tokens, mask in ((short, None), (long, torch.arange(16)[None] < 12))
    ]
    assert float((losses[0] - losses[1]).abs()) < 1e-12


def test_accuracies_are_what_greedy_decoding_accepts(trained):
    """Catches a rank table off by one token or head."""
    table = rank_accuracies(TARGET, trained, [STORY], n_ranks=4)
    assert table.shape == (3, 4)
    assert table[:, 0].min() > 0.95
    assert search_choices(table, 3) == dense_choices((1, 1, 1))
    own = rank_accuracies(TARGET, HEADS, [STORY[:9], STORY, STORY[:2]], n_ranks=11)
    assert torch.allclose(own.sum(1), torch.ones(3, dtype=torch.float64))
    hits = []  # head 3, depth 2, by hand
    for row in (STORY[:9], STORY):
        top = list(HEADS.logits_by_depth(TARGET, row[None]))[1][0].topk(11).indices
        hits += [(top[t] == row[t + 3]).nonzero().item() for t in range(len(row) - 3)]
    assert own[1].tolist() == pytest.approx([hits.count(r) / len(hits) for r in range(11)])


# Bad input

STATES, TOKENS = torch.zeros(1, 6, 16, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.long)


def loss_of(network=HEADS, target=TARGET, hidden=None, tokens=TOKENS, **options) -> Tensor:
    hidden = {1: STATES} if hidden is None else hidden
    return parallel_backward(network, target, hidden, tokens, **options)


def of(**changes) -> ParallelHeads:
    config = dataclasses.replace(TARGET.config, **changes)
    return ParallelHeads(config, 3, 1).double()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ParallelHeads(TARGET.config, 1, 1), "n_heads: expected at least 2, .* got 1"),
        (lambda: ParallelHeads(TARGET.config, 2, -1), "tap: .* got -1"),
        (lambda: ParallelHeads.for_target(TARGET, 0), "n_heads: .* got 0"),
        (
            lambda: ParallelHeads.for_target(
                from_functional(lambda t, c: (t, []), vocab_size=11, max_position_embeddings=9)
            ),
            "target: expected a Transformer",
        ),
        (lambda: MTPHeads(HEADS, dense_choices([1] * 4)), "choices: .* at most 3, .* got 4"),
        (lambda: MTPHeads(HEADS3, [[0], [1], [2], [3]]), "choices: .* vocabulary of 3, got 3"),
        (lambda: MTPHeads(HEADS, [[0], [2]], draw=True), r"got \(2,\) without .* rank 1"),
        (lambda: MTPHeads(HEADS, [[0], [1, 0]]), r"choices: \(1, 0\) hangs below"),
        (lambda: loss_of(tokens=TOKENS.int()), "tokens: expected int64"),
        (lambda: loss_of(tokens=TOKENS[:, :4]), r"tokens: .* T >= 5 for 4 heads"),
        (lambda: loss_of(hidden={0: STATES}), r"hidden: expected tap 1 .* got the taps \[0\]"),
        (lambda: loss_of(hidden={1: STATES[:, 1:]}), r"hidden: .* \[1, 6, 16\], got \[1, 5, 16\]"),
        (lambda: loss_of(mask=TOKENS), r"mask: expected bool of shape \[1, 6\], got torch.int64"),
        (lambda: loss_of(mask=TOKENS == 1), "mask: expected a token that head 1 predicts"),
        (
            lambda: loss_of(mask=torch.arange(6)[None] < 3),
            "mask: expected a token that head 3 predicts",
        ),
        (
            lambda: loss_of(mask=torch.arange(6)[None] < 1, head_1=False),
            "mask: expected a token that head 2 predicts",
        ),
        (lambda: loss_of(of(vocab_size=12)), "vocabulary of 12 and width 16, but .* 11 and 16"),
        (lambda: loss_of(target=small_target(1, n_layers=3)), "reads tap 1, .* target has 3"),
        (
            lambda: loss_of(random_heads(TARGET).requires_grad_(False)),
            "expected something that requires a gradient",
        ),
        (lambda: rank_accuracies(TARGET, HEADS, [STORY], 12), r"n_ranks: expected 1\.\.11, got 12"),
        (lambda: rank_accuracies(TARGET, HEADS, [STORY[:4]]), "one of at least 5 tokens"),
        (lambda: rank_accuracies(TARGET3, HEADS, [STORY]), "network: made for a vocabulary of 11"),
    ],
)
def test_wrong_input_is_named(call, message):
    """Catches averages over nothing, broadcasting, and crashes deep down in the first round."""
    with pytest.raises(ValueError, match=message):
        call()
    assert all(parameter.grad is None for parameter in HEADS.parameters())


@pytest.mark.parametrize(
    ("network", "target", "length", "message"),
    [
        (HEADS, TARGET3, 9, "vocabulary of 11 and width 16, but the target has 3"),
        (of(hidden_size=32), TARGET, 9, "and width 32, but the target has 11 and 16"),
        (HEADS, small_target(22, n_layers=3), 9, "tap 1, the states before the last of 2 blocks"),
        (HEADS, small_target(22).float(), 9, "float64 on cpu, but the target is .*32"),
        (HEADS, TARGET, 257, "max_position_embeddings=256 is below the run's 257"),
    ],
)
def test_heads_of_another_target_are_refused(network, target, length, message):
    """Catches a mismatch that shows only in the middle of a run, or not at all."""
    with pytest.raises(ValueError, match=message):
        MTPHeads(network).begin(target, 1, length)
