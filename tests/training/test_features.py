"""Features for training equal those that decoding sees, on the fly and from disk."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.accept import Coupled
from specdec.generate import generate
from specdec.protocol import FINAL, Context
from specdec.testing.targets import small_target
from specdec.training.corpus import Corpus
from specdec.training.distributed import Ranks
from specdec.training.features import CachedFeatures, TargetFeatures
from specdec.training.shards import fingerprint, shard_file
from specdec.training.written import WrittenText
from tests.builders import Scripted, oracle

TAPS = (0, 2, 3, FINAL)
BYTES = np.random.default_rng(0).integers(0, 11, 400).astype(np.uint8)
TEXT = Corpus(BYTES[:300], BYTES[300:])
TARGET = small_target(3, n_layers=3)


class StopHereError(Exception):
    pass


def features_of(**changes) -> TargetFeatures:
    given: dict = {"target": TARGET, "text": TEXT, "taps": TAPS, "batch_size": 4, "length": 9}
    return TargetFeatures(**(given | changes))


def seen_by_decoding(prompts: list[Tensor], rows: list[Tensor], rule, *, tree: bool):
    """Run the loop with drafts that are right now and then; what a drafter reads, row by row.

    Returns for every row the tokens it was told of and, by tap, the states that came with them.
    """
    told: list[list[Tensor]] = [[] for _ in rows]
    states: list[dict[int, list[Tensor]]] = [{tap: [] for tap in TAPS} for _ in rows]
    script = oracle(rows, 3, lambda length: length % 4, tree=tree, vocab_size=11)

    def probe(context: Context):
        for b, n in enumerate(context.n_new.tolist()):
            told[b].append(context.new_tokens[b, :n])
            for tap in TAPS:
                states[b][tap].append(context.hidden[tap][b, :n])
        return script(context)

    n_new = [len(row) - len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    run = generate(TARGET, prompts, Scripted(probe, TAPS), max_new_tokens=n_new, rule=rule)
    for b, row in enumerate(rows):
        assert torch.equal(run.sequences[b], row)
    return (
        [torch.cat(each) for each in told],
        [{tap: torch.cat(each[tap]) for tap in TAPS} for each in states],
    )


@pytest.fixture(scope="module")
def decoded():
    """Rows [4, 20] that the target wrote, with what drafters were told on the way."""
    rule, prompts = Coupled(seed=5), [torch.tensor([b, 1, 2, 3, 4][: b + 1]) for b in range(4)]
    rows = generate(TARGET, prompts, max_new_tokens=[19 - b for b in range(4)], rule=rule).sequences
    return rows, [seen_by_decoding(prompts, rows, rule, tree=tree) for tree in (False, True)]


@pytest.mark.parametrize("cached", [False, True])
def test_features_are_those_that_decoding_sees(tmp_path, decoded, cached):
    """Catches another tap, states shifted by one, padding read as text, and rows mixed up.

    Ragged prompts from one token; the states of the loop come from prefill, chains and trees.
    """
    rows, runs = decoded
    text = WrittenText(torch.stack(rows).numpy(), BYTES, n_given=1)
    features = features_of(text=text, length=19, batch_size=8)
    source = CachedFeatures(features, tmp_path, 2) if cached else features
    tokens, hidden = source(1)
    assert {tuple(row.tolist()) for row in tokens} <= {tuple(row.tolist()) for row in rows}
    for told, states in runs:
        n_compared = 0
        for i, row in enumerate(tokens):
            b = next(b for b, each in enumerate(rows) if torch.equal(each, row))
            n = len(told[b])
            assert torch.equal(told[b], row[1 : n + 1])
            assert 12 <= n <= 19  # all but what the last round emitted
            for tap in TAPS:
                torch.testing.assert_close(hidden[tap][i, :n], states[b][tap], rtol=0, atol=1e-9)
            n_compared += n
        assert n_compared >= 8 * 12


@pytest.mark.parametrize("planted", ["shifted", "other tap"])
def test_the_comparison_with_decoding_has_power(decoded, planted):
    """Negative control: states shifted by one, or one block further, are far from equal."""
    rows, runs = decoded
    text = WrittenText(torch.stack(rows).numpy(), BYTES, n_given=1)
    tokens, hidden = features_of(text=text, length=19, batch_size=8)(1)
    told, states = runs[0]
    b = next(b for b, each in enumerate(rows) if torch.equal(each, tokens[0]))
    n = len(told[b])
    wrong = hidden[2][0, 1 : n + 1] if planted == "shifted" else hidden[3][0, :n]
    assert (wrong - states[b][2]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_cache_gives_what_the_fly_gives_to_the_bit(tmp_path, dtype):
    """Catches another rounding, steps out of order across shards, a dtype that is not undone."""
    source = features_of(dtype=dtype)
    cached = CachedFeatures(source, tmp_path, 5, steps_per_shard=2)
    for step in (0, 3, 4):
        tokens, hidden = source(step)
        from_disk, states = cached(step)
        assert torch.equal(tokens, TEXT.batch(step, 4, 9, 0))
        assert torch.equal(from_disk, tokens) and from_disk.dtype == torch.long
        assert list(hidden) == list(states) == list(TAPS)
        for tap in TAPS:
            assert torch.equal(hidden[tap], states[tap])
            assert states[tap].dtype == hidden[tap].dtype == torch.float64
            assert not states[tap].requires_grad
        exact = features_of()(step)[1]
        error = max(float((hidden[tap] - exact[tap]).abs().max()) for tap in TAPS)
        assert (error == 0) == (dtype is None)
        assert error < 0.05
    # the next epoch
    assert torch.equal(cached(7)[1][2], source(2)[1][2])


def test_a_cache_is_made_once_and_goes_on_where_it_broke(tmp_path, monkeypatch):
    """Catches work done again, a shard left half, and an index that forbids more steps."""
    passes: list[int] = []
    breaks_at = [5]
    original = TargetFeatures.__call__

    def counted(self: TargetFeatures, step: int):
        if step in breaks_at:
            raise StopHereError
        passes.append(step)
        return original(self, step)

    monkeypatch.setattr(TargetFeatures, "__call__", counted)
    with pytest.raises(StopHereError):
        CachedFeatures(features_of(), tmp_path, 8, steps_per_shard=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    breaks_at.clear()
    passes.clear()
    cached = CachedFeatures(features_of(), tmp_path, 8, steps_per_shard=2)
    assert passes == [4, 5, 6, 7]
    tokens, _ = cached(6)
    assert torch.equal(tokens, TEXT.batch(6, 4, 9, 0))
    CachedFeatures(features_of(), tmp_path, 9, steps_per_shard=2)
    assert passes == [4, 5, 6, 7, 8, 9]  # shards are whole


def test_ranks_read_their_rows(tmp_path):
    """Catches every rank reading the whole batch, or all the same rows."""
    whole = features_of()(1)
    for dtype in (None, torch.float32):
        parts = [features_of(ranks=Ranks(rank, 2), dtype=dtype)(1) for rank in (0, 1)]
        assert torch.equal(torch.cat([tokens for tokens, _ in parts]), whole[0])
        for tap in TAPS:
            states = torch.cat([hidden[tap] for _, hidden in parts])
            atol = 1e-12 if dtype is None else 1e-6
            torch.testing.assert_close(states, whole[1][tap], rtol=0, atol=atol)
    cached = CachedFeatures(features_of(), tmp_path, 2)
    for rank in (0, 1):
        cached.source = features_of(ranks=Ranks(rank, 2))
        tokens, hidden = cached(1)
        assert torch.equal(tokens, whole[0][2 * rank : 2 * rank + 2])
        assert torch.equal(hidden[FINAL], whole[1][FINAL][2 * rank : 2 * rank + 2])


OTHER_TARGET = small_target(3, n_layers=3)
with torch.no_grad():
    OTHER_TARGET.blocks[0].norm_mlp.weight[0] += 1e-9


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": OTHER_TARGET}, "target="),
        ({"text": Corpus(BYTES[:299], BYTES[299:])}, "text="),
        ({"taps": (0, 2, FINAL)}, "taps="),
        ({"taps": (2, 0, 3, FINAL)}, "taps="),
        ({"seed": 1}, "seed=0 instead of 1"),
        ({"batch_size": 2}, "batch_size=4 instead of 2"),
        ({"length": 8}, "length=9 instead of 8"),
        ({"dtype": torch.float32}, "dtype='float64' instead of 'float32'"),
    ],
)
def test_a_stale_cache_is_refused(tmp_path, changes, named):
    """Catches features of another target, text or tap that are trained on unnoticed."""
    CachedFeatures(features_of(), tmp_path, 1, steps_per_shard=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf"folder: the shards of .* were made with {named}"):
        CachedFeatures(features_of(**changes), tmp_path, 2, steps_per_shard=1)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match="steps_per_shard=1 instead of 3"):
        CachedFeatures(features_of(), tmp_path, 2, steps_per_shard=3)


def test_shards_without_an_index_are_refused(tmp_path):
    """Catches a folder of unknown shards that is taken for this one's."""
    CachedFeatures(features_of(), tmp_path / "a", 1, steps_per_shard=1)
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    assert index["taps"] == list(TAPS) and index["target"] == fingerprint(TARGET)
    (tmp_path / "b").mkdir()
    shutil.copy(shard_file(tmp_path / "a", 0), tmp_path / "b")
    with pytest.raises(ValueError, match=r"holds shards but no index.json"):
        CachedFeatures(features_of(), tmp_path / "b", 1, steps_per_shard=1)


def test_a_fingerprint_tells_targets_apart():
    """Catches a hash of names and shapes, one that ignores the config, and one by identity."""
    assert fingerprint(TARGET) == fingerprint(small_target(3, n_layers=3))
    turned = small_target(3, n_layers=3)
    turned.config = replace(turned.config, rope_theta=500.0)
    others = [OTHER_TARGET, small_target(4, n_layers=3), TARGET.__class__(TARGET.config), turned]
    assert len({fingerprint(each) for each in [TARGET, *others]}) == 5
    bfloat = small_target(3).bfloat16()
    assert fingerprint(bfloat) != fingerprint(small_target(3))
    with pytest.raises(ValueError, match="target: expected a torch module, got str"):
        fingerprint("target")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": ()}, "taps: expected some of 0..3"),
        ({"taps": (4,)}, "taps: expected some of 0..3"),
        ({"taps": (-2,)}, "taps: expected some of 0..3"),
        ({"taps": (1, 1)}, "taps: expected some of 0..3"),
        ({"length": 256}, "length: expected 1..255"),
        ({"length": 0}, "length: expected 1..255"),
        ({"batch_size": 0}, "batch_size: expected a multiple of the 1 ranks, got 0"),
        ({"batch_size": 3, "ranks": Ranks(0, 2)}, "batch_size: expected a multiple of the 2"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    """Catches an error from deep inside the target, hours into a run."""
    with pytest.raises(ValueError, match=message):
        features_of(**changes)
    features_of(length=255)


def test_counts_below_one_are_refused(tmp_path):
    """Catches a cache of nothing, which would divide by zero at the first step."""
    with pytest.raises(ValueError, match="n_steps: expected at least 1, got 0"):
        CachedFeatures(features_of(), tmp_path, 0)
    with pytest.raises(ValueError, match="steps_per_shard: expected at least 1, got 0"):
        CachedFeatures(features_of(), tmp_path, 1, steps_per_shard=0)
    assert not list(tmp_path.iterdir())
