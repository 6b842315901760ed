"""The cache's law: a pending node says what a pass without a cache says about its root path.

A `plan` is a run of the cache: rounds of appends, each ending in a commit. `follow` runs a plan and
holds every appended node against `along_paths`; the negative controls plant a bug and expect it
to fail.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.cache import TreeCache, everything
from specdec.models import Transformer
from specdec.protocol import FINAL
from tests.helpers import (
    EXAMPLE_PARENTS,
    along_paths,
    assert_same,
    path_of,
    random_parents,
    random_tokens,
    tiny_transformer,
)

EXACT = 1e-10
MODEL = tiny_transformer()
TAPS = (0, 1, 2, 3, FINAL)


@dataclass(frozen=True)
class Step:
    """One round: `appends` of (tokens [B, N], parents [B, N] or None), then commit(path, n)."""

    appends: list[tuple[Tensor, Tensor | None]]
    path: Tensor
    n: Tensor


def pending_tree(appends: list[tuple[Tensor, Tensor | None]], batch_size: int) -> Tensor:
    """Parents [B, P] of everything appended, also of chains."""
    tree = torch.zeros(batch_size, 0, dtype=torch.long)
    for tokens, parents in appends:
        if parents is None:
            last = torch.arange(tree.shape[1], tree.shape[1] + tokens.shape[1]) - 1
            parents = last.expand(batch_size, -1)
        tree = torch.cat([tree, parents], dim=1)
    return tree


def random_step(rng: random.Random, kinds: list[tuple[int, bool]], batch_size: int) -> Step:
    """Appends of the given (size, is it a tree), and a commit of part of a path in every row.

    What lies behind `n` in the path is padding and holds any node.
    """
    appends, first = [], 0
    for size, is_tree in kinds:
        parents = random_parents(rng, batch_size, size, first) if is_tree else None
        appends.append((random_tokens(rng, batch_size, size, MODEL.vocab_size), parents))
        first += size
    paths = [
        path_of(row, rng.randint(-1, first - 1))
        for row in pending_tree(appends, batch_size).tolist()
    ]
    n = [rng.choice([len(path), rng.randint(0, len(path))]) for path in paths]
    width = max(map(len, paths)) + rng.randint(0, 2)
    padded = [path + [rng.randrange(first) for _ in range(width - len(path))] for path in paths]
    return Step(appends, torch.tensor(padded, dtype=torch.long), torch.tensor(n))


kinds = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3)


@st.composite
def plans(draw) -> list[Step]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    batch_size = draw(st.integers(1, 4))
    return [
        random_step(rng, each, batch_size) for each in draw(st.lists(kinds, min_size=1, max_size=4))
    ]


def follow(plan: list[Step], model: Transformer = MODEL) -> TreeCache:
    """Run a plan, checking every append; then one more token, which sees what the last commit kept.

    The cache is made for two tokens, so that it has to grow.
    """
    batch_size = len(plan[0].n)
    cache = model.new_cache(batch_size, max_length=2)
    committed: list[list[int]] = [[] for _ in range(batch_size)]
    last = torch.arange(batch_size).unsqueeze(1)
    end = Step([(last, None)], torch.zeros(batch_size, 1, dtype=torch.long), plan[0].n * 0)
    for step in [*plan, end]:
        tokens = torch.zeros(batch_size, 0, dtype=torch.long)
        for i, (new, parents) in enumerate(step.appends):
            actual = model(new, cache, parents=parents, taps=TAPS)
            first, tokens = tokens.shape[1], torch.cat([tokens, new], dim=1)
            tree = pending_tree(step.appends[: i + 1], batch_size)
            expected = along_paths(
                lambda sequences: model(sequences, taps=TAPS), committed, tokens, tree, first
            )
            assert_same(actual, expected, atol=EXACT)
        cache.commit(step.path, step.n)
        for b, (path, n) in enumerate(zip(step.path.tolist(), step.n.tolist(), strict=True)):
            committed[b] += tokens[b, path[:n]].tolist()
        assert cache.lengths.tolist() == [len(row) for row in committed]
    return cache


def example_plan() -> list[Step]:
    """Two ragged rows: a prompt, the running example grown in two pieces, a chain."""
    tokens = torch.arange(2 * 20).view(2, 20) % MODEL.vocab_size
    tree = torch.tensor([EXAMPLE_PARENTS, [-1, 0, 1, 0, -1, 4, 5]])
    return [
        Step([(tokens[:, :5], None)], torch.arange(5).expand(2, -1), torch.tensor([5, 2])),
        Step(
            [(tokens[:, 5:9], tree[:, :4]), (tokens[:, 9:12], tree[:, 4:])],
            torch.tensor([[1, 4, 6], [0, 3, 0]]),
            torch.tensor([3, 2]),
        ),
        Step([(tokens[:, 12:15], None)], torch.arange(3).expand(2, -1), torch.tensor([1, 3])),
    ]


def test_the_law_on_the_example():
    """Catches a cache that is wrong in the plainest case; the controls below break this plan."""
    assert follow(example_plan()).lengths.tolist() == [9, 7]


@given(plans())
@settings(max_examples=40, deadline=None)
def test_the_law(plan):
    """Catches whatever makes a cached node differ from its own sequence: mask, position, slot,
    a chain after a tree, growth, a commit that keeps the wrong entries or writes the padding.
    """
    follow(plan)


def positions_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    true_view = TreeCache.view

    def view(self, first):
        slots = self.lengths.unsqueeze(1) + torch.arange(first, self.n_pending)
        return replace(true_view(self, first), positions=slots)

    monkeypatch.setattr(TreeCache, "view", view)


def parents_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    true_append = TreeCache.append

    def append(self, n_new, parents):
        true_append(self, n_new, None if parents is None else (parents - 1).clamp(min=-1))

    monkeypatch.setattr(TreeCache, "append", append)


def path_in_slot_order(monkeypatch: pytest.MonkeyPatch) -> None:
    true_commit = TreeCache.commit

    def commit(self, path, n):
        true_commit(self, torch.arange(path.shape[1]).expand_as(path), n)

    monkeypatch.setattr(TreeCache, "commit", commit)


def siblings_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(parents):
        n = parents.shape[1]
        return torch.ones(n, n, dtype=torch.bool).tril().expand(len(parents), -1, -1)

    monkeypatch.setattr("specdec.cache.ancestors", causal)


def padding_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is taken to be as long as the longest."""
    true_view = TreeCache.view

    def view(self, first):
        true, self.lengths = self.lengths, torch.full_like(self.lengths, max(self._lengths))
        try:
            return true_view(self, first)
        finally:
            self.lengths = true

    monkeypatch.setattr(TreeCache, "view", view)


@pytest.mark.parametrize(
    "plant",
    [positions_by_slot, parents_off_by_one, path_in_slot_order, siblings_seen, padding_seen],
)
def test_a_planted_bug_breaks_the_law(monkeypatch, plant):
    """Negative controls. Catches a law that holds of anything, and so proves nothing."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="logits differ"):
        follow(example_plan())


@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 3),
    exit_layer=st.integers(1, 2),
    pieces=kinds,
    extra=st.tuples(st.integers(0, 3), st.booleans()),
)
@settings(max_examples=25, deadline=None)
def test_resumed_nodes_obey_the_law(seed, batch_size, exit_layer, pieces, extra):
    """Draft through the first blocks, resume the nodes and append more: as if done in one pass.

    Catches a resumed node whose deeper keys are missing, new nodes that do not see the resumed
    ones, and hidden states put together in the wrong order.
    """
    rng = random.Random(seed)
    cache = MODEL.new_cache(batch_size, 2)
    prompt = random_step(rng, [(rng.randint(1, 5), False)], batch_size)
    MODEL(prompt.appends[0][0], cache)
    cache.commit(prompt.path, prompt.n)
    committed = [prompt.appends[0][0][b, : prompt.n[b]].tolist() for b in range(batch_size)]
    step = random_step(rng, [*pieces, extra] if extra[0] else pieces, batch_size)
    drafted = step.appends[: len(pieces)]

    def early(sequences):
        return MODEL(sequences, taps=(exit_layer, FINAL), exit_layer=exit_layer)

    tokens, states = torch.zeros(batch_size, 0, dtype=torch.long), []
    for i, (new, parents) in enumerate(drafted):
        actual = MODEL(new, cache, parents=parents, taps=(exit_layer, FINAL), exit_layer=exit_layer)
        first, tokens = tokens.shape[1], torch.cat([tokens, new], dim=1)
        tree = pending_tree(drafted[: i + 1], batch_size)
        assert_same(actual, along_paths(early, committed, tokens, tree, first), atol=EXACT)
        states.append(actual.hidden[exit_layer])

    tokens = torch.cat([tokens, *(new for new, _ in step.appends[len(drafted) :])], dim=1)
    tree = pending_tree(step.appends, batch_size)
    only_chains = all(parents is None for _, parents in step.appends)
    taps = (*range(exit_layer + 1, 4), FINAL)
    actual = MODEL(
        tokens,
        cache,
        parents=None if only_chains else tree,
        taps=taps,
        resume=(exit_layer, torch.cat(states, dim=1)),
    )
    expected = along_paths(lambda s: MODEL(s, taps=taps), committed, tokens, tree)
    assert_same(actual, expected, atol=EXACT)

    cache.commit(step.path, step.n)
    for b in range(batch_size):
        committed[b] += tokens[b, step.path[b, : step.n[b]]].tolist()
    new = random_tokens(rng, batch_size, 2, MODEL.vocab_size)
    chain = torch.tensor([[-1, 0]]).expand(batch_size, -1)
    assert_same(MODEL(new, cache), along_paths(MODEL, committed, new, chain), atol=EXACT)


def test_resuming_twice_climbs_in_two_steps():
    """Catches the depth that pending nodes have reached, lost when resumed only part of the way."""
    tokens = torch.tensor([[1, 2, 3], [3, 2, 1]])
    tree = torch.tensor([[-1, 0, 0], [-1, -1, 1]])
    cache = MODEL.new_cache(2, 4)
    low = MODEL(tokens, cache, parents=tree, taps=(1,), exit_layer=1)
    middle = MODEL(tokens, cache, resume=(1, low.hidden[1]), taps=(2,), exit_layer=2)
    assert cache.depth_done == 2
    actual = MODEL(tokens, cache, resume=(2, middle.hidden[2]), taps=(3, FINAL))
    expected = along_paths(lambda s: MODEL(s, taps=(3, FINAL)), [[], []], tokens, tree)
    assert_same(actual, expected, atol=EXACT)


def test_a_commit_of_nothing_drops_what_is_pending():
    """Catches rejected nodes that stay visible, and a count of pending nodes that is not reset."""
    tokens, parents = torch.tensor([[4, 5, 6]] * 2), torch.tensor([[-1, -1, 0]] * 2)
    cache = MODEL.new_cache(2, 8)
    MODEL(tokens, cache)
    cache.commit(torch.arange(3).expand(2, -1), torch.tensor([3, 1]))
    expected = along_paths(MODEL, [[4, 5, 6], [4]], tokens[:, :1], parents[:, :1])
    for exit_layer in (None, 1):
        MODEL(tokens, cache, parents=parents, exit_layer=exit_layer)
        assert cache.n_pending == 3
        cache.commit(torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 0]))
        assert (cache.n_pending, cache.depth_done) == (0, MODEL.n_layers)
        assert cache.lengths.tolist() == [3, 1]
        assert_same(MODEL(tokens[:, :1], cache), expected, atol=EXACT)
        cache.commit(torch.zeros(2, 4, dtype=torch.long), torch.tensor([0, 0]))


def kept_entries(cache: TreeCache) -> Iterator[Tensor]:
    """The committed keys and values of every row, [layers, 2, H_kv, length, d]."""
    for b, length in enumerate(cache.lengths.tolist()):
        yield cache.stores[0].buffer[:, :, b, :, :length].clone()


def test_a_commit_leaves_the_committed_entries_alone():
    """Row 0 commits a path, row 1 less of one, row 2 nothing at all.

    Catches a move that runs over all rows to the longest path and writes padding over a shorter
    row, and one that is off by a slot.
    """
    cache = MODEL.new_cache(3, 2)
    MODEL(torch.arange(12).view(3, 4), cache)
    cache.commit(torch.arange(4).expand(3, -1), torch.tensor([4, 1, 2]))
    before = list(kept_entries(cache))
    tree = torch.tensor([EXAMPLE_PARENTS] * 3)
    MODEL(torch.arange(21).view(3, 7) % 13, cache, parents=tree)
    cache.commit(torch.tensor([[1, 4, 6], [0, 3, 3], [1, 1, 1]]), torch.tensor([3, 2, 0]))
    assert cache.lengths.tolist() == [7, 3, 2]
    for old, new in zip(before, kept_entries(cache), strict=True):
        assert torch.equal(old, new[:, :, :, : old.shape[3]])


def test_the_buffers_grow_and_keep_what_they_hold():
    """Catches growth that forgets the committed entries, or leaves the rotary table behind."""
    tokens = random_tokens(random.Random(0), 2, 60, MODEL.vocab_size)
    small, large = MODEL.new_cache(2, 1), MODEL.new_cache(2, 100)
    for start in range(0, 60, 20):
        piece = tokens[:, start : start + 20]
        actual, expected = MODEL(piece, small, taps=TAPS), MODEL(piece, large, taps=TAPS)
        assert_same(actual, expected, atol=EXACT)
        before = list(kept_entries(small))
        small.commit(*everything(20, 2, "cpu"))
        large.commit(*everything(20, 2, "cpu"))
        for old, new in zip(before, kept_entries(small), strict=True):
            assert torch.equal(old, new[:, :, :, : old.shape[3]])
    keys_values, angles = small.stores
    assert keys_values.buffer.shape[4] >= 60
    assert len(angles.table) >= 60


@pytest.fixture
def fresh_memory_is_nan():
    """Memory that nobody wrote reads as NaN, as it may on a bad day."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_slots_never_written_leak_no_nan():
    """Catches `torch.empty` for a buffer, new or grown: a masked slot has weight 0, 0 * NaN = NaN.

    Row 1 stays short, so that slots between its nodes and the end of row 0 are never written.
    """
    tokens = torch.arange(30).view(2, 15) % MODEL.vocab_size
    long, short = torch.arange(15).expand(2, -1), torch.tensor([15, 1])
    follow([*example_plan(), Step([(tokens, None)], long, short), example_plan()[1]])


def test_stale_entries_in_free_slots_change_nothing():
    """Catches a mask that lets a query look beyond its row, where what was dropped still lies."""
    tokens = torch.arange(10).view(2, 5)
    tree = torch.tensor([[-1, 0, 0, 1, 2], [-1, -1, 0, 1, 2]])
    outputs = []
    for garbage in (0.0, 1e100):
        cache = MODEL.new_cache(2, 40)
        MODEL(tokens, cache)
        cache.commit(torch.arange(5).expand(2, -1), torch.tensor([5, 1]))
        for b, length in enumerate(cache.lengths.tolist()):
            cache.stores[0].buffer[:, :, b, :, length:] = garbage
        outputs.append(MODEL(tokens, cache, parents=tree, taps=TAPS))
    assert_same(*outputs, atol=0.0)


def pending_cache(n: int = 3, exit_layer: int | None = None) -> TreeCache:
    cache = MODEL.new_cache(2, 8)
    MODEL(torch.zeros(2, n, dtype=torch.long), cache, exit_layer=exit_layer)
    return cache


@pytest.mark.parametrize(
    ("path", "n", "message"),
    [
        ([[0, 1, 2, 0]] * 2, [4, 0], r"n: expected 0\.\.3 .*got \[4, 0\]"),
        ([[0, 1]] * 2, [3, 0], r"n: expected 0\.\.2 .*got \[3, 0\]"),
        ([[0, 1]] * 2, [1, -1], r"n: expected 0\.\.2 .*got \[1, -1\]"),
        (
            [0, 1],
            [1, 1],
            r"path, n: .*numbers \[2\], got \[2\] and torch.int64 of \[2\]",
        ),
        (
            [[0]] * 3,
            [1, 1],
            r"path, n: .*numbers \[2\], got \[3, 1\] and torch.int64 of \[2\]",
        ),
        (
            [[0]] * 2,
            [1, 1, 1],
            r"path, n: .*numbers \[2\], got \[2, 1\] and torch.int64 of \[3\]",
        ),
        (
            [[0]] * 2,
            [],
            r"path, n: .*numbers \[2\], got \[2, 1\] and torch.int64 of \[0\]",
        ),
    ],
)
def test_commit_errors_name_the_argument(path, n, message):
    """Catches a commit of nodes that are not there; nothing has changed when it raises."""
    cache = pending_cache()
    with pytest.raises(ValueError, match=message):
        cache.commit(torch.tensor(path), torch.tensor(n, dtype=torch.long))
    assert (cache.n_pending, cache.lengths.tolist()) == (3, [0, 0])
    cache.commit(torch.arange(3).expand(2, -1), torch.tensor([3, 2]))


def test_unresumed_nodes_cannot_be_committed():
    """Catches a prefix whose deeper layers hold nothing: LayerSkip's draft taken for the truth."""
    cache = pending_cache(exit_layer=2)
    with pytest.raises(ValueError, match="been through 2 of 3 blocks; resume them first"):
        cache.commit(torch.zeros(2, 1, dtype=torch.long), torch.tensor([1, 0]))
    cache.commit(torch.zeros(2, 1, dtype=torch.long), torch.tensor([0, 0]))
    assert cache.n_pending == 0


def test_everything_is_the_path_of_a_chain():
    """Catches a path one short, or in one row only."""
    path, n = everything(3, 2, "cpu")
    assert path.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert n.tolist() == [3, 3]
