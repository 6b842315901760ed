"""Attention-only models of `transformers` over our cache: trees and ragged batches, exactly.

What a model says at every node of a random tree, grown in several calls on rows of different
length, equals its own plain pass over the path to that node, in float64.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec.hf.attention
import specdec.hf.layers
import specdec.hf.masks
from specdec import FINAL
from specdec.cache import TreeCache, View
from specdec.hf import AttentionCache, HFModel, ScaledHead
from specdec.hf.layers import TreeLayer
from specdec.hf.masks import near, slot_positions
from specdec.protocol import Output
from tests.helpers import (
    EXAMPLE_PARENTS,
    along_paths,
    assert_same,
    path_of,
    random_parents,
    random_tokens,
)
from tests.hf_models import ATTENTION, MAX, V, built, served


def walk(model: HFModel, seed: int, *, tree: bool = True, n_rounds: int = 5) -> None:
    """Trees grown in 1 to 3 calls on 3 ragged rows; all must equal a pass without a cache."""
    rng, n_rows = random.Random(seed), 3
    kept = model.new_cache(n_rows, 4)  # too little: stores must grow
    committed: list[list[int]] = [[] for _ in range(n_rows)]
    taps = (0, 1, model.n_layers, FINAL)
    for number in range(n_rounds):
        tokens = torch.zeros(n_rows, 0, dtype=torch.long)
        parents = torch.zeros(n_rows, 0, dtype=torch.long)
        for _ in range(rng.choice([1, 2, 3])):
            first, n = kept.n_pending, rng.choice([1, 1, 3, 6])
            new = random_tokens(rng, n_rows, n, V)
            below = torch.arange(first - 1, first + n - 1).expand(n_rows, -1)  # a prompt, a chain
            if number and tree:  # deep enough for windows
                anywhere = random_parents(rng, n_rows, n, first)
                below = torch.where(random_tokens(rng, n_rows, n, 3) > 0, below, anywhere)
            tokens, parents = torch.cat([tokens, new], 1), torch.cat([parents, below], 1)
            got = model(new, kept, parents=below if tree else None, taps=taps)
            want = along_paths(lambda x: model(x, taps=taps), committed, tokens, parents, first)
            assert_same(got, want, atol=1e-10)
        paths = [path_of(row.tolist(), rng.randrange(-1, kept.n_pending)) for row in parents]
        n = torch.tensor([len(path) for path in paths])
        padded = [path + [0] * (kept.n_pending - len(path)) for path in paths]
        kept.commit(torch.tensor(padded), n)
        for b, path in enumerate(paths):
            committed[b] += tokens[b, path].tolist()
        assert kept.lengths.tolist() == [len(row) for row in committed]
        assert kept.n_pending == 0


@pytest.mark.parametrize("tree", [True, False], ids=["trees", "chains"])
@pytest.mark.parametrize("name", ATTENTION)
def test_every_path_equals_a_plain_pass(name: str, tree: bool) -> None:
    """Would catch masks and positions by slot, windows by slot, a store written off by a row."""
    for seed in range(3):
        walk(served(name), seed, tree=tree)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_eager_attention_takes_the_same_masks(name: str) -> None:
    """Would catch bool masks that are added to scores as 0 and 1."""
    model = built(name, attention="eager")
    assert model.config._attn_implementation == "eager"
    walk(HFModel(model), 0)


def test_a_layer_in_chunks() -> None:
    """Would catch chunks counted by slot; no model here has any, so one is made of a window."""
    parents = torch.tensor([EXAMPLE_PARENTS, EXAMPLE_PARENTS])
    tree = TreeCache(2, [], 1, torch.float64, "cpu")
    for n, counts in ((3, [3, 1]), (7, None)):
        tree.append(n, None if counts else parents)
        if counts:
            tree.commit(torch.arange(n).expand(2, -1), torch.tensor(counts))
    view = tree.view(0)
    # depths 1 1 2 2 2 3 3 behind 3 and 1 committed
    want = [[0, 1, 2, 3, 3, 4, 4, 4, 5, 5], [0, 1, 1, 2, 2, 2, 3, 3]]
    positions = slot_positions(view, tree.lengths)
    assert positions[0].tolist() == want[0] and positions[1, :8].tolist() == want[1]
    assert view.positions.tolist() == [want[0][3:], want[1][1:]]
    chunks = near(view, tree.lengths, "chunked_attention", 3)
    for b, row in enumerate(want):
        start = int(tree.lengths[b])
        for i in range(7):
            seen = [slot for slot, p in enumerate(row) if p // 3 == row[start + i] // 3]
            assert chunks[b, i, : len(row)].nonzero().flatten().tolist() == seen


Plant = Callable[[pytest.MonkeyPatch], None]


def masks(change: Callable[..., Any]) -> Plant:
    right = specdec.hf.masks.masks_of

    def planted(view: View, lengths: Tensor, sizes: Any, **options: Any) -> Any:
        return change(right, view, lengths, sizes, options)

    return lambda patch: patch.setattr(specdec.hf.attention, "masks_of", planted)


def no_mask(right: Any, view: View, lengths: Tensor, sizes: Any, options: Any) -> None:
    return None


def no_window(right: Any, view: View, lengths: Tensor, sizes: Any, options: Any) -> Any:
    return right(view, lengths, dict.fromkeys(sizes), **options)


def window_by_slot(patch: pytest.MonkeyPatch) -> None:
    def planted(view: View, lengths: Tensor) -> Tensor:
        return torch.arange(view.n_slots).unsqueeze(0)

    patch.setattr(specdec.hf.masks, "slot_positions", planted)


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = specdec.hf.masks.near
    patch.setattr(specdec.hf.masks, "near", lambda v, x, kind, n: right(v, x, kind, n + 1))


def other_positions(change: Callable[[Tensor], Tensor]) -> Plant:
    right = HFModel.run

    def planted(self: Any, tokens: Tensor, past: Any, positions: Any, *rest: Any) -> Output:
        return right(self, tokens, past, positions if past is None else change(positions), *rest)

    return lambda patch: patch.setattr(HFModel, "run", planted)


def by_slot(positions: Tensor) -> Tensor:
    return positions[:, :1] + torch.arange(positions.shape[1])


def no_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TreeLayer, "commit", lambda self, kept: None)


def values_not_cut(patch: pytest.MonkeyPatch) -> None:
    """Keys for values."""
    right = TreeLayer.update
    patch.setattr(TreeLayer, "update", lambda self, k, v, *a, **o: right(self, k, k, *a, **o))


PLANTS: dict[str, tuple[str, Plant]] = {
    "no mask": ("llama", masks(no_mask)),
    "no window": ("mistral", masks(no_window)),
    "windows by slot": ("gemma3", window_by_slot),
    "windows one wider": ("gpt_oss", window_off_by_one),
    "positions by slot": ("qwen3", other_positions(by_slot)),
    "learned positions by slot": ("gpt2", other_positions(by_slot)),
    "positions of the first row": ("phi", other_positions(lambda p: p[:1].expand_as(p))),
    "entries that stay where they were": ("mixtral", no_commit),
    "keys for values": ("llama", values_not_cut),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_turn_red(monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    """A walk that passes in spite of one of these has gone blind."""
    name, planted = PLANTS[plant]
    planted(monkeypatch)
    with pytest.raises(AssertionError, match=r"differ: "):
        walk(served(name), 0, n_rounds=12)


def test_taps_are_hidden_states() -> None:
    """Would catch a tap one layer off, and the norm's input where NanoChat uses it first."""
    tokens = torch.tensor([[3, 9, 4, 4, 1]])
    for name in ATTENTION:
        model = served(name)
        kept = model.new_cache(1, 8)
        every = (*range(model.n_layers + 1), FINAL)
        got = model(tokens, kept, taps=every)
        theirs = model.model(input_ids=tokens, output_hidden_states=True)
        for i in range(model.n_layers):
            torch.testing.assert_close(got.hidden[i], theirs.hidden_states[i], rtol=0, atol=1e-10)
        last = theirs.hidden_states[-1]
        torch.testing.assert_close(got.hidden[FINAL], last, rtol=0, atol=1e-10)
        torch.testing.assert_close(got.logits, theirs.logits, rtol=0, atol=1e-10)
        normed = model.norm(got.hidden[model.n_layers])
        torch.testing.assert_close(normed, last, rtol=0, atol=1e-10)
        torch.testing.assert_close(model.head(last), theirs.logits, rtol=0, atol=1e-10)


def test_heads_that_scale() -> None:
    """Would catch drafters that read the matrix where the logits are scaled or capped."""
    for name, kind in (("llama", torch.nn.Linear), ("gemma3", ScaledHead), ("cohere", ScaledHead)):
        assert isinstance(served(name).head, kind)
    head = ScaledHead(torch.nn.Identity(), 0.5, 2.0)
    want = 2 * torch.tensor([0.5, -1.0]).tanh()
    torch.testing.assert_close(head(torch.tensor([2.0, -4.0])), want)


def test_an_exception_drops_what_is_pending() -> None:
    """Would catch a cache that counts nodes which half of the layers have never seen."""
    model = served("mixtral")
    kept, tokens = model.new_cache(2, MAX), random_tokens(random.Random(3), 2, 9, V)
    model(tokens[:, :4], kept)
    kept.commit(torch.arange(4).expand(2, -1), torch.tensor([4, 2]))

    def breaks(module: Any, inputs: Any) -> None:
        raise RuntimeError("boom")

    body: Any = model.model.model
    model(tokens[:, 4:6], kept)
    handle = body.layers[2].mlp.register_forward_pre_hook(breaks)
    with pytest.raises(RuntimeError, match="boom"):
        model(tokens[:, 6:], kept)
    handle.remove()
    assert kept.n_pending == 0 and kept.lengths.tolist() == [4, 2]
    with pytest.raises(IndexError):  # a token of another vocabulary
        model(torch.full((2, 1), V), kept)
    assert kept.n_pending == 0
    got = model(tokens[:, 4:], kept)
    for b, n in enumerate((4, 2)):
        want = model(torch.cat([tokens[b, :n], tokens[b, 4:]])[None])
        assert got.logits is not None and want.logits is not None
        torch.testing.assert_close(got.logits[b], want.logits[0, n:], rtol=0, atol=1e-10)


def test_gradients_without_a_cache_only() -> None:
    """Would catch a graph that grows with the cache, and features that cannot be trained on."""
    model = HFModel(built("llama"))
    model.model.requires_grad_(True)
    tokens = torch.tensor([[3, 4, 5]])
    free, kept = model(tokens).logits, model.new_cache(1, 8)
    held = model(tokens, kept).logits
    assert free is not None and free.requires_grad
    assert held is not None and not held.requires_grad


def test_one_pass_serves_the_batch() -> None:
    """Would catch rows that are run one after another."""
    model = served("llama")
    kept, calls = model.new_cache(3, 8), []
    handle = model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    model(torch.ones(3, 4, dtype=torch.long), kept, parents=torch.tensor([[-1, -1, 0, 1]] * 3))
    handle.remove()
    assert len(calls) == 1


def test_bad_calls() -> None:
    """Would catch calls that fail after the cache has changed."""
    model = served("qwen3")
    kept, tokens = model.new_cache(2, 16), torch.tensor([[3, 4], [5, 6]])
    assert isinstance(kept, AttentionCache)
    for options, message in (
        ({"parents": torch.tensor([[-1], [-1]])}, r"parents: expected \[2, 2\], got \[2, 1\]"),
        ({"exit_layer": 1}, r"exit_layer, resume: expected None"),
        ({"resume": (1, torch.zeros(2, 1, 32))}, r"exit_layer, resume: expected None"),
        ({"taps": (0, 5, -2)}, r"taps: expected 0\.\.3 or FINAL \(-1\), got \[5, -2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, kept, **options)
    for other, message in (
        (served("llama").new_cache(2, 4), r"cache: expected one of this model's new_cache"),
        (model.new_cache(3, 4), r"tokens: expected 3 rows, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, other)
    with pytest.raises(ValueError, match=r"parents: a pass without a cache"):
        model(tokens, parents=torch.tensor([[-1, 0], [-1, 0]]))
    assert kept.n_pending == 0
    model(tokens, kept)
    with pytest.raises(ValueError, match=r"n: expected 0\.\.2 .* got \[1, 4\]"):
        kept.commit(torch.arange(2).expand(2, -1), torch.tensor([1, 4]))
    assert kept.n_pending == 2 and kept.lengths.tolist() == [0, 0]
