"""The recurrent layer: every pending node is the last token of a plain pass over its own path.

`follow` runs a plan of `tests.test_cache` (rounds of appends, each ending in a commit) on one layer
or a whole model and returns the largest difference; `PLANTED` are the known ways to be wrong.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import specdec.models.delta_net as delta_net
import specdec.models.gated_delta as gated_delta
from specdec.cache import TreeCache, everything
from specdec.models.delta_net import DeltaShape, DeltaStore, DeltaView, GatedDeltaNet
from specdec.models.gated_delta import CHUNK, Pending, advance, advance_
from specdec.protocol import Output
from tests.helpers import EXAMPLE_PARENTS, along_paths, path_of, random_parents
from tests.models.test_gated_delta import decay_by_slot, masked_after_exp
from tests.test_cache import Step, pending_tree, plans

EXACT, VOCAB, WIDTH = 1e-11, 13, 10
SHAPE = DeltaShape(n_key_heads=2, n_value_heads=4, key_dim=4, value_dim=6, kernel=4)


def layer_of(kernel: int = 4, seed: int = 0, fastest: float = 15.0) -> GatedDeltaNet:
    """Every weight drawn; heads fade slowly to within a token, `fastest` times their step."""
    layer = GatedDeltaNet(WIDTH, replace(SHAPE, kernel=kernel), eps=1e-6).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.6, generator=generator)
        layer.A_log.copy_(torch.tensor([0.1, 0.6, 3.0, fastest]).log())
    return layer.eval().requires_grad_(False)


class Lone:
    """A model of one recurrent layer: what it says is what the layer does."""

    def __init__(self, layer: GatedDeltaNet, dtype: torch.dtype = torch.float64) -> None:
        self.layer, self.dtype = layer.to(dtype), dtype
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)

    def new_cache(self, batch_size: int, max_length: int) -> TreeCache:
        store = DeltaStore(1, batch_size, self.layer.shape, self.dtype, "cpu")
        return TreeCache(batch_size, [store], 1, self.dtype, "cpu")

    def __call__(
        self,
        tokens: Tensor,
        cache: TreeCache | None = None,
        *,
        parents: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Output:
        x = self.table[tokens]
        if cache is None:
            return Output(self.layer(x))
        first, store = cache.n_pending, store_of(cache)
        cache.append(tokens.shape[1], parents)
        return Output(self.layer(x, None, store, 0, store.at(cache.view(first))))


LONE = Lone(layer_of())


def store_of(cache: TreeCache) -> DeltaStore:
    return next(store for store in cache.stores if isinstance(store, DeltaStore))


def difference(actual: Output, expected: Output) -> float:
    """The largest over logits and taps; inf where one is no number."""
    assert actual.logits is not None
    assert expected.logits is not None
    assert actual.hidden.keys() == expected.hidden.keys()
    pairs = [(actual.logits, expected.logits)]
    pairs += [(actual.hidden[tap], expected.hidden[tap]) for tap in actual.hidden]
    worst = max(float((have - want).abs().max()) for have, want in pairs)
    finite = all(bool(have.isfinite().all()) for pair in pairs for have in pair)
    return worst if finite else float("inf")


def follow(plan: list[Step], model, taps: tuple[int, ...] = ()) -> float:
    """Run a plan, then one more token; the largest difference of a node from its own plain pass.

    A row that commits nothing must keep state and inputs to the bit.
    """
    batch_size, worst = len(plan[0].n), 0.0
    cache = model.new_cache(batch_size, max_length=2)
    committed: list[list[int]] = [[] for _ in range(batch_size)]
    last = torch.arange(batch_size).unsqueeze(1)
    end = Step([(last, None)], torch.zeros(batch_size, 1, dtype=torch.long), plan[0].n * 0)
    for step in [*plan, end]:
        tokens = torch.zeros(batch_size, 0, dtype=torch.long)
        store = store_of(cache)
        before = store.states.clone(), store.inputs.clone()
        for i, (new, parents) in enumerate(step.appends):
            actual = model(new, cache, parents=parents, taps=taps)
            first, tokens = tokens.shape[1], torch.cat([tokens, new], dim=1)
            tree = pending_tree(step.appends[: i + 1], batch_size)
            expected = along_paths(
                lambda sequences: model(sequences, taps=taps), committed, tokens, tree, first
            )
            worst = max(worst, difference(actual, expected))
        cache.commit(step.path, step.n)
        for b, (path, n) in enumerate(zip(step.path.tolist(), step.n.tolist(), strict=True)):
            committed[b] += tokens[b, path[:n]].tolist()
            for old, now in zip(before, (store.states, store.inputs), strict=True):
                assert n or torch.equal(old[:, b], now[:, b]), f"row {b} was not to move"
    return worst


def long_plan() -> list[Step]:
    """Three ragged rows: a prompt, a tree in two pieces, an empty draft, a chain, an empty draft.

    Among what is committed: all of a path, a part, nothing; the padding of paths is any node.
    """
    rng = random.Random(3)
    tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)])
    tree = torch.tensor([EXAMPLE_PARENTS, [-1, 0, 1, 0, -1, 4, 5], [-1, 0, -1, 2, 3, 4, 2]])
    one = torch.zeros(3, 1, dtype=torch.long)
    return [
        Step([(tokens[:, :6], None)], torch.arange(6).expand(3, -1), torch.tensor([6, 2, 0])),
        Step(
            [(tokens[:, 6:10], tree[:, :4]), (tokens[:, 10:13], tree[:, 4:])],
            torch.tensor([[1, 4, 6, 0], [0, 3, 5, 1], [2, 6, 3, 3]]),
            torch.tensor([3, 2, 0]),
        ),
        Step([(tokens[:, 13:14], None)], one, torch.tensor([1, 1, 0])),
        Step(
            [(tokens[:, 14:16], None), (tokens[:, 16:19], None)],
            torch.arange(5).expand(3, -1),
            torch.tensor([1, 5, 3]),
        ),
        Step([(tokens[:, 19:20], None)], one, torch.tensor([1, 1, 1])),
        Step([(tokens[:, 13:20], tree)], torch.tensor([[0, 3], [4, 5], [2, 3]]), one[:, 0] + 2),
    ]


def long_chains(n: int = 12) -> list[Step]:
    """Two chains of n nodes side by side."""
    tokens = torch.arange(2 * n).view(1, -1) % VOCAB
    parents = torch.tensor([[-1, *range(n - 1), -1, *range(n, 2 * n - 1)]])
    path = torch.arange(n, 2 * n).unsqueeze(0)
    return [Step([(tokens, parents)], path, torch.tensor([n]))]


# The convolution


def test_a_plain_convolution_is_conv1d():
    """Catches taps in reverse order, and a window that is not causal or is shifted by one."""
    layer = layer_of()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, SHAPE.n_channels, generator=generator, dtype=torch.float64)
    weight = layer.convolution.T.unsqueeze(1)  # [C, 1, kernel]
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight, groups=SHAPE.n_channels).mT
    got = layer._convolve(F.pad(x, (0, 0, 3, 0)), 9, None)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 5), st.integers(1, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_a_convolution_along_ancestors_is_conv1d_of_the_path(seed, batch, kernel, n, data):
    """Catches a tap that reads the slot before instead of the parent, or the wrong committed one.

    One chunk of nodes after `first` others, behind random committed inputs.
    """
    rng, shape = random.Random(seed), replace(SHAPE, kernel=kernel)
    first = data.draw(st.integers(0, n - 1), label="first")
    layer, parents = layer_of(kernel), random_parents(rng, batch, n)
    store = DeltaStore(1, batch, shape, torch.float64, "cpu")
    cache = TreeCache(batch, [store], 1, torch.float64, "cpu")
    cache.append(n, parents)
    view = store.at(cache.view(first))
    generator = torch.Generator().manual_seed(rng.randrange(99))
    size = batch, kernel - 1 + n, shape.n_channels
    seen = torch.randn(size, generator=generator, dtype=torch.float64)
    got = layer._convolve(seen, n - first, view.reach)
    weight = layer.convolution.T.unsqueeze(1)
    for b, row in enumerate(parents.tolist()):
        for i in range(first, n):
            place = [*range(kernel - 1), *(j + kernel - 1 for j in path_of(row, i))]
            path = seen[b, place].T[None]
            expected = F.conv1d(path, weight, groups=shape.n_channels)[0, :, -1]
            torch.testing.assert_close(got[b, i - first], expected, rtol=0, atol=1e-12)


# The layer with its cache


@pytest.mark.parametrize("n", [1, 2, 3, 4, 63, 64, 65, 130])
def test_a_cached_chain_is_a_plain_pass(n):
    """Catches a chunk that starts at the wrong state, and chunks whose decays are summed on."""
    tokens = torch.arange(2 * n).view(2, n) % VOCAB
    cache = LONE.new_cache(2, n)
    assert difference(LONE(tokens, cache), LONE(tokens)) < EXACT
    cache.commit(*everything(n, 2, "cpu"))
    again = torch.cat([tokens, tokens], dim=1)
    expected = LONE(again).logits
    assert expected is not None
    for i in range(0, n, 50):  # in pieces, all of them pending
        piece = LONE(tokens[:, i : i + 50], cache)
        expected_piece = Output(expected[:, n + i : n + min(i + 50, n)])
        assert difference(piece, expected_piece) < EXACT


def test_the_example():
    """Catches the plain cases; the controls below break this plan."""
    assert follow(long_plan(), LONE) < EXACT


@given(plans())
@settings(max_examples=40, deadline=None)
def test_the_law(plan):
    """Catches whatever makes a pending node differ from its own sequence: decay, convolution,
    pieces, ragged rows, a commit of the wrong entries, a row that moves though nothing was kept.
    """
    assert follow(plan, LONE) < EXACT


@pytest.mark.parametrize("kernel", [2, 3, 6])
def test_any_reach_of_the_convolution(kernel):
    """Catches a window that is tied to four taps."""
    assert follow(long_plan(), Lone(layer_of(kernel))) < EXACT


def test_heads_that_forget_at_once():
    """Catches inf * 0 where one chain of nodes fades and another stands beside it."""
    assert follow(long_chains(), Lone(layer_of(fastest=300.0))) < EXACT


def test_an_empty_commit_forgets_what_is_pending():
    """Catches rejected nodes that stay, and pending inputs that are dropped apart from the rest."""
    tokens = torch.tensor([[4, 5, 6], [1, 2, 3]])
    cache = LONE.new_cache(2, 8)
    LONE(tokens, cache)
    cache.commit(torch.arange(3).expand(2, -1), torch.tensor([3, 2]))
    before = store_of(cache).states.clone(), store_of(cache).inputs.clone()
    expected = LONE(tokens, cache)
    for _ in range(2):
        cache.commit(torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0]))
        assert store_of(cache).pending == store_of(cache).pending_inputs == [None]
        assert torch.equal(store_of(cache).states, before[0])
        assert torch.equal(store_of(cache).inputs, before[1])
        assert torch.equal(LONE(tokens, cache).logits, expected.logits)


@pytest.mark.parametrize("padding", [-1, -9, 99])
def test_the_padding_of_a_path_may_be_anything(padding):
    """Catches an index out of range halfway through a commit, layer 0 moved and layer 1 not."""
    tree, tokens = torch.tensor([EXAMPLE_PARENTS] * 2), torch.arange(14).view(2, 7) % VOCAB
    states = []
    for pad in (padding, 0):
        cache = LONE.new_cache(2, 8)
        LONE(tokens, cache, parents=tree)
        cache.commit(torch.tensor([[1, 4, 6], [0, pad, pad]]), torch.tensor([3, 1]))
        states.append((store_of(cache).states, store_of(cache).inputs))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_a_half_precision_layer_keeps_its_state_in_float32():
    """Catches a state that is rounded at every commit."""
    half = Lone(layer_of(), torch.bfloat16)
    store = store_of(half.new_cache(1, 4))
    assert (store.states.dtype, store.inputs.dtype) == (torch.float32, torch.bfloat16)
    tokens = torch.arange(40).view(2, 20) % VOCAB
    cache = half.new_cache(2, 20)
    pieces = []
    for i in range(0, 20, 5):
        pieces.append(half(tokens[:, i : i + 5], cache).logits)
        cache.commit(*everything(5, 2, "cpu"))
    expected = half(tokens).logits
    assert expected is not None
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0.05, atol=0.05)


def test_gradients_flow_through_a_plain_pass_and_stay_out_of_the_store():
    """Catches a weight that training does not reach, and a graph that grows from round to round."""
    lone = Lone(layer_of().requires_grad_())
    lone(torch.arange(70)[None] % VOCAB).logits.square().sum().backward()
    for name, parameter in lone.layer.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
    cache = lone.new_cache(1, 8)
    assert lone(torch.tensor([[1, 2]]), cache).logits.requires_grad
    cache.commit(*everything(2, 1, "cpu"))
    assert not store_of(cache).states.requires_grad
    assert not store_of(cache).inputs.requires_grad


# Negative controls: each must turn the law red, here and on whole models (test_qwen_moe.py)

Plant = Callable[[pytest.MonkeyPatch], None]


def state_copied_back(patch: pytest.MonkeyPatch) -> None:
    """The verification leaves its last state behind, and the commit trusts it."""
    right = GatedDeltaNet.forward

    def forward(self, x, rotary=None, store=None, layer=0, view=None):
        out = right(self, x, rotary, store, layer, view)
        if store is not None:
            new = (each[:, view.first :] for each in pending_of(store, layer))
            store.states[layer] = advance(store.states[layer], *new)
        return out

    patch.setattr(GatedDeltaNet, "forward", forward)
    patch.setattr(delta_net, "advance_", lambda state, *rest: None)


def pending_of(store: DeltaStore, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    pending = store.pending[layer]
    assert isinstance(pending, Pending)
    return pending.k, pending.u, pending.g


def stale_after_an_empty_draft(patch: pytest.MonkeyPatch) -> None:
    """A block of one token is taken for one whose state has already been moved."""
    right = DeltaStore.commit

    def commit(self, kept):
        states = self.states.clone()
        alone = all(inputs is not None and inputs.shape[1] == 1 for inputs in self.pending_inputs)
        right(self, kept)
        if alone:
            self.states = states

    patch.setattr(DeltaStore, "commit", commit)


def window_one_short(patch: pytest.MonkeyPatch) -> None:
    """Of the committed inputs the farthest is missing."""
    right = DeltaStore.read

    def read(self, layer, new):
        seen = right(self, layer, new)
        return torch.cat([torch.zeros_like(seen[:, :1]), seen[:, 1:]], dim=1)

    patch.setattr(DeltaStore, "read", read)


def convolution_by_slot(patch: pytest.MonkeyPatch) -> None:
    """The inputs before a node are those of the slots before it."""
    right = DeltaStore.at

    def at(self, view):
        return DeltaView(view.first, right(self, view).ancestors, None)

    patch.setattr(DeltaStore, "at", at)


def decay_in_slot_order(patch: pytest.MonkeyPatch) -> None:
    """Decays are summed over all nodes before, not over those above."""
    patch.setattr(gated_delta, "path_sums", decay_by_slot)


def entries_beyond_n(patch: pytest.MonkeyPatch) -> None:
    """The whole padded path is written into the state."""
    patch.setattr(delta_net, "advance_", lambda state, k, u, g, n: advance_(state, k, u, g))


def finished_rows_moved(patch: pytest.MonkeyPatch) -> None:
    """A row that keeps nothing takes the root along."""
    patch.setattr(
        delta_net, "advance_", lambda state, k, u, g, n: advance_(state, k, u, g, n.clamp(min=1))
    )


def mask_after_exp(patch: pytest.MonkeyPatch) -> None:
    """exp of everything, then zeros: inf * 0."""
    patch.setattr(Tensor, "masked_fill", masked_after_exp)


PLANTED: list[Plant] = [
    state_copied_back,
    stale_after_an_empty_draft,
    window_one_short,
    convolution_by_slot,
    decay_in_slot_order,
    entries_beyond_n,
    finished_rows_moved,
]


def is_red(plan: list[Step], model) -> bool:
    try:
        return follow(plan, model) > 1e-6
    except AssertionError:
        return True


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_turn_red(monkeypatch, plant):
    """The law must notice every one of them."""
    plant(monkeypatch)
    assert is_red(long_plan(), LONE)


def test_a_mask_after_exp_turns_red(monkeypatch):
    """Planted: needs heads that forget at once, twelve nodes long."""
    mask_after_exp(monkeypatch)
    assert is_red(long_chains(), Lone(layer_of(fastest=300.0)))


def test_a_chain_longer_than_a_chunk_takes_the_chunks(monkeypatch):
    """Catches a prompt that is solved as one system: its cost grows with the cube of its length."""
    seen: list[int] = []
    right = gated_delta.tree_delta

    def noted(q, *rest, **options):
        seen.append(q.shape[1])
        return right(q, *rest, **options)

    monkeypatch.setattr(gated_delta, "tree_delta", noted)
    LONE(torch.zeros(1, 3 * CHUNK + 1, dtype=torch.long), LONE.new_cache(1, 300))
    assert seen == [CHUNK, CHUNK, CHUNK, 1]
