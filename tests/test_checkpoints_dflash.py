"""Published DFlash folders: read as they are, equal to the published code, refused where unfit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import specdec
from specdec import FINAL, Context, generate
from specdec.cache import TreeCache, everything
from specdec.checkpoints import dflash as module
from specdec.checkpoints import load_dflash, load_drafter, load_eagle, save_dflash, strix_halo
from specdec.drafters.dflash import DFlashNetwork, Sight, sights_of
from specdec.drafters.dflash2 import DFlash2
from specdec.drafters.dflash_draft import BlockLaws, DFlash
from specdec.models import Transformer, TransformerConfig
from tests.builders import context_of
from tests.helpers import tiny_transformer

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = ["dflash_full", "dflash_sliding", "dflash2"]
IDS = {"dflash_full": (2, 3, 4), "dflash_sliding": (2, 3, 5, 6), "dflash2": (2, 3, 4)}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def context(tokens: Tensor, hidden: dict[int, Tensor]) -> Context:
    """The row `tokens` [1, T], whose last states are new."""
    n = next(iter(hidden.values())).shape[1]
    return replace(
        context_of(tokens.tolist()),
        new_tokens=tokens[:, -n:],
        n_new=torch.tensor([n]),
        hidden=hidden,
    )


def check_golden(name: str) -> None:
    """Both rounds on one cache: features, states, logits; then the draft, and whole sequences."""
    case = load_file(GOLDEN / name / "case.safetensors")
    target = specdec.load(GOLDEN / name / "target").target
    drafter = load_drafter(GOLDEN / name, target)
    assert isinstance(drafter, DFlash)
    hidden = dict(target(case["prompt"], taps=drafter.taps, logits=False).hidden)
    first = context(torch.cat([case["prompt"], case["block"][:, :1]], dim=1), hidden)
    laws = drafter.begin(target, 1, 64).laws
    states, logits = laws.read(first, 7)
    close(states, case["draft_hidden"][:, 1:])
    if "draft_logits" in case:
        close(logits, case["draft_logits"])
    draft = drafter.begin(target, 1, 64).propose(first)
    assert draft.tokens.tolist() == case["draft_tokens"].tolist()
    parts = case["round2_target_hidden"].split(target.hidden_size, dim=-1)
    row = torch.cat([case["round2_context_tokens"], case["round2_root"]], dim=1)
    states, _ = laws.read(context(row, dict(zip(drafter.taps, parts, strict=True))), 7)
    close(states, case["round2_draft_hidden"][:, 1:])


@pytest.mark.parametrize("name", FOLDERS)
def test_agrees_with_the_published_code(name):
    """Catches any difference in layer, wiring, mask, head or selector, and a stale cache."""
    check_golden(name)


@pytest.mark.parametrize("name", FOLDERS)
def test_taps_are_the_published_features(name):
    """Catches a target read wrongly, or hidden states counted from another end."""
    case = load_file(GOLDEN / name / "case.safetensors")
    target = specdec.load(GOLDEN / name / "target").target
    taps = load_dflash(GOLDEN / name, target).taps
    assert taps == IDS[name]
    hidden = target(case["prompt"], taps=taps, logits=False).hidden
    close(torch.cat([hidden[tap] for tap in taps], dim=-1), case["target_hidden"])


@pytest.mark.parametrize("name", FOLDERS)
def test_the_whole_sequence_is_the_published_one(name):
    """Catches a loop or target that decodes something else."""
    case = load_file(GOLDEN / name / "case.safetensors")
    target = specdec.load(GOLDEN / name / "target").target
    expected, prompt = case["greedy_sequence"][0], case["prompt"][0]
    run = generate(
        target,
        prompt,
        load_drafter(GOLDEN / name, target),
        max_new_tokens=len(expected) - len(prompt),
    )
    assert run.sequences[0].tolist() == expected.tolist()
    assert run.rounds[0].draft.n_nodes == 7


def masks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 0 is not the root's embedding."""
    monkeypatch.setattr(
        DFlashNetwork,
        "block_tokens",
        lambda self, roots, n: torch.full((*roots.shape, n), self.mask_token),
    )


def taps_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published id taken as a tap."""
    monkeypatch.setattr(module, "_tap", lambda layer, n_target_layers: layer)


def root_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block sees h_a: the context ends at the root instead of before it."""
    append = BlockLaws._append

    def shifted(self, context):
        first = self.cache.lengths.item() + 1
        taps = self.network.taps
        hidden = self.target(context.tokens, taps=taps, logits=False).hidden
        append(self, replace(context, hidden={tap: hidden[tap][:, first:] for tap in taps}))

    monkeypatch.setattr(BlockLaws, "_append", shifted)


def context_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the new context appended twice."""
    append = BlockLaws._append

    def twice(self, context):
        for _ in range(2):
            append(self, replace(context, lengths=self.cache.lengths + context.n_new + 1))

    monkeypatch.setattr(BlockLaws, "_append", twice)


def noise_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's own keys and values stay in the cache (and nobody counts)."""
    append, commit = BlockLaws._append, TreeCache.commit

    def uncounted(self, context):
        append(self, replace(context, lengths=self.cache.lengths + context.n_new + 1))

    def keep(self, path, n):
        if not path.shape[1]:
            path, n = everything(self.n_pending, len(n), path.device)
        commit(self, path, n)

    monkeypatch.setattr(BlockLaws, "_append", uncounted)
    monkeypatch.setattr(TreeCache, "commit", keep)


def other_windows(change: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        sees = Sight.sees

        def wrong(self, query, key):
            window = None if self.window is None else self.window + change
            return sees(replace(self, window=window), query, key)

        monkeypatch.setattr(Sight, "sees", wrong)

    return plant


def no_sight_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers bidirectional, as the published code once had them."""
    sees = Sight.sees
    monkeypatch.setattr(
        Sight, "sees", lambda self, query, key: sees(replace(self, causal=False), query, key)
    )


@pytest.mark.parametrize(
    ("plant", "name"),
    [(masks_alone, name) for name in FOLDERS]
    + [(taps_off_by_one, name) for name in FOLDERS]
    + [(root_seen, name) for name in FOLDERS]
    + [(context_twice, name) for name in FOLDERS]
    + [(noise_left, name) for name in FOLDERS]
    + [(other_windows(1), "dflash_sliding"), (other_windows(-1), "dflash_sliding")]
    + [(no_sight_is_causal, "dflash_sliding")],
)
def test_planted_bugs_are_seen(monkeypatch, plant, name):
    """Each of these drafts losslessly and badly: only parity tells."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check_golden(name)


def test_noise_left_in_the_cache_is_noticed_by_the_drafter(monkeypatch):
    """Planted: the block stays in the cache. The next round does not add up and says so."""
    commit = TreeCache.commit

    def keep(self, path, n):
        if not path.shape[1]:
            path, n = everything(self.n_pending, len(n), path.device)
        commit(self, path, n)

    monkeypatch.setattr(TreeCache, "commit", keep)
    with pytest.raises(ValueError, match="expected all since the last call"):
        check_golden("dflash_full")


CONFIG = TransformerConfig(
    13, 16, 24, 3, 4, 2, 6, 1e-5, 500.0, 99, tie_word_embeddings=False, qk_norm=True
)
SIGHTS = {
    "bidirectional": sights_of("bidirectional", 3),
    "causal": sights_of("causal", 3),
    "mixed": sights_of("mixed", 3, 4),
    "mixed without windows": sights_of("mixed", 3),
    "bidirectional with windows": sights_of("bidirectional", 3, 3),
    "causal with windows": sights_of("causal", 3, 3),
    "causal, some with a window": (Sight(True, 4), Sight(True), Sight(True, 4)),
    "windows that differ": (Sight(True, 4), Sight(True, 5), Sight()),
}


def network_of(**changes) -> DFlashNetwork:
    arguments = {"config": CONFIG, "taps": (1, 2), "mask_token": 12, "block_size": 5} | changes
    network = DFlashNetwork(**arguments).double()
    return network.reset_parameters(torch.Generator().manual_seed(1))


def drafts(network: DFlashNetwork, target: Transformer) -> list[list]:
    run = generate(target, torch.arange(9), DFlash(network), max_new_tokens=3)
    return [r.draft.tokens.tolist() for r in run.rounds]


def check_round_trip(folder: Path, network: DFlashNetwork, **options) -> dict:
    """Save, read, compare; returns config.json."""
    target = tiny_transformer()
    save_dflash(network, folder, metadata={"steps": 3}, **options)
    again = load_dflash(folder, target)
    for name in ("config", "taps", "sights", "inject", "dflash2", "block_size", "mask_token"):
        assert getattr(again, name) == getattr(network, name), name
    assert again.state_dict().keys() == network.state_dict().keys()
    for name, weight in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    network.eval().requires_grad_(False)
    assert drafts(again, target) == drafts(network, target)
    fields = json.loads((folder / "config.json").read_text())
    assert fields["training"] == {"steps": 3}
    return fields


@pytest.mark.parametrize("kind", SIGHTS)
def test_round_trip_of_sights(tmp_path, kind):
    """Catches what a layer sees lost on the way, or a window that was none."""
    check_round_trip(tmp_path / "new", network_of(sights=SIGHTS[kind]))


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"inject": False}, {}),
        ({"dflash2": DFlash2(3, 8, 5, 4)}, {}),
        ({"dflash2": DFlash2(2, 4, 5, 4), "sights": SIGHTS["mixed"]}, {"n_target_layers": 3}),
        ({"taps": (0, 2, FINAL)}, {}),
        ({"taps": (0, 2, FINAL)}, {"n_target_layers": 3}),
        ({"taps": (1, 3)}, {"n_target_layers": 3}),
        ({"block_size": 1}, {}),
        ({"config": replace(CONFIG, qk_norm=False)}, {}),
    ],
)
def test_round_trip(tmp_path, changes, options):
    """Catches a weight, field or tap that is lost, or joined in another order than split."""
    check_round_trip(tmp_path, network_of(**changes), **options)


def written(folder: Path, network: DFlashNetwork, **options) -> dict:
    save_dflash(network, folder, **options)
    return json.loads((folder / "config.json").read_text())


def test_a_reduced_head_comes_back_without_its_rows(tmp_path):
    """Catches rows of the target's head stored a second time, ids taken for offsets."""
    target = tiny_transformer()
    ids = torch.tensor([0, 3, 4, 7])
    network = network_of().reduce_head(target, ids)
    save_dflash(network, tmp_path, n_target_layers=target.n_layers)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "d2t" in names and not [n for n in names if "reduced" in n or "lm_head" in n]
    again = load_dflash(tmp_path, target)
    states = torch.randn(1, 2, target.hidden_size, dtype=target.dtype)
    assert again.draft_ids is not None and again.draft_ids.tolist() == ids.tolist()
    torch.testing.assert_close(again.logits(states, target), network.logits(states, target))


def test_ours_is_written_only_where_the_published_fields_cannot_say_it(tmp_path):
    """Catches folders that the published code reads as something else, without need."""
    deep = {"n_target_layers": 3}
    plain = written(tmp_path / "a", network_of(sights=SIGHTS["mixed"]), **deep)
    assert not {"taps", "sights", "inject", "is_causal"} & plain.keys()
    assert plain["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]
    assert (plain["sliding_window"], plain["use_sliding_window"]) == (4, True)
    assert plain["dflash_config"]["target_layer_ids"] == [0, 1]
    causal = written(tmp_path / "b", network_of(sights=SIGHTS["causal"]), **deep)
    assert "sights" not in causal
    assert causal["is_causal"] is True
    mixed = written(tmp_path / "c", network_of(sights=SIGHTS["mixed without windows"]), **deep)
    assert mixed["layer_types"] == plain["layer_types"]
    assert mixed["sliding_window"] == 99 + 5  # wider than any context with its block
    assert mixed["sights"][0] == {"causal": True, "window": None}
    other = written(tmp_path / "d", network_of(sights=SIGHTS["windows that differ"]))
    assert "layer_types" not in other
    last = written(tmp_path / "e", network_of(taps=(1, FINAL)), **deep)
    assert last["dflash_config"]["target_layer_ids"] == [0, 2]
    assert "taps" not in last
    residual = written(tmp_path / "f", network_of(taps=(1, 3)), **deep)
    assert residual["taps"] == [1, 3]
    unknown = written(tmp_path / "g", network_of(taps=(1, FINAL)))
    assert unknown["taps"] == [1, FINAL]
    assert "target_layer_ids" not in unknown["dflash_config"]


@pytest.mark.parametrize("name", FOLDERS)
def test_what_was_published_is_written_again(tmp_path, name):
    """Catches other weight names or fields than the published ones."""
    target = specdec.load(GOLDEN / name / "target").target
    network = load_dflash(GOLDEN / name, target)
    save_dflash(network, tmp_path, n_target_layers=target.n_layers)
    published = load_file(GOLDEN / name / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    for part in ("predecessor", "successor"):  # the released files are without the suffix
        if f"candidate_selector.{part}_codebook.weight" in published:
            weight = published.pop(f"candidate_selector.{part}_codebook.weight")
            published[f"candidate_selector.{part}_codebook"] = weight
    assert weights.keys() == published.keys()
    assert all(torch.equal(weights[n], published[n]) for n in published)
    fields = json.loads((tmp_path / "config.json").read_text())
    expected = json.loads((GOLDEN / name / "config.json").read_text())
    expected["rope_theta"] = expected.pop("rope_parameters")["rope_theta"]
    assert {n: fields.get(n) for n in expected} == expected


def test_what_is_read_can_be_trained_no_further_and_fits_the_target():
    """Catches gradients that are collected for nothing, and a dtype other than the target's."""
    target = specdec.load(GOLDEN / "dflash2" / "target", torch.float64).target
    network = load_dflash(GOLDEN / "dflash2", target)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float64}


def test_a_dtype_can_be_asked_for(tmp_path):
    """Catches weights that are written as they are trained."""
    save_dflash(network_of(), tmp_path, dtype=torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def change(tmp_path: Path, name: str, fields: dict | None = None, weights: dict | None = None):
    """A copy of a golden folder with other fields and weights (None: without), and its target."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config["dflash_config"] |= (fields or {}).get("dflash_config", {})
    config |= {n: v for n, v in (fields or {}).items() if n != "dflash_config"}
    config["dflash_config"] = {n: v for n, v in config["dflash_config"].items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    changed = load_file(GOLDEN / name / "model.safetensors") | (weights or {})
    save_file({n: w for n, w in changed.items() if w is not None}, tmp_path / "model.safetensors")
    n_layers = config["num_target_layers"] if "num_target_layers" not in (fields or {}) else 6
    target = SimpleNamespace(
        vocab_size=97,
        hidden_size=32,
        n_layers=n_layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return tmp_path, target


def own(**fields) -> dict:
    return {"dflash_config": fields}


FULL, SLIDING = "dflash_full", "dflash_sliding"


@pytest.mark.parametrize(
    ("name", "fields", "weights", "message"),
    [
        (FULL, own(mask_token_id=None), {}, "expected mask_token_id"),
        (FULL, own(mask_token_id=97), {}, "below the vocabulary of 97, got 97"),
        (FULL, own(mask_token_id="<mask>"), {}, "mask_token_id='<mask>'; expected a number"),
        (FULL, own(block_size=0), {}, "block_size: expected at least 1"),
        (FULL, own(target_layer_ids=[1, 2, 6]), {}, r"target_layer_ids=\[1, 2, 6\].*6 layers"),
        (FULL, own(target_layer_ids=[-2, 2, 3]), {}, r"target_layer_ids=\[-2, 2, 3\]"),
        (FULL, own(target_layer_ids=[1, 2]), {}, r"do not fit its config: \['fc.weight'\]"),
        (FULL, {"taps": [1, 2, 7]}, {}, r"taps \[1, 2, 7\], but the target has 0\.\.6"),
        (FULL, own(projector_type="domino"), {}, r"dflash_config has \['projector_type'\]"),
        (FULL, own(input_embedding_scale=2.0), {}, "input_embedding_scale=2.0; expected 1"),
        (FULL, own(output_multiplier=0.5), {}, "output_multiplier=0.5; expected 1"),
        (FULL, {"output_multiplier": 0.5}, {}, "output_multiplier=0.5; expected 1"),
        (FULL, own(final_logit_softcapping=30), {}, "final_logit_softcapping=30; expected None"),
        (FULL, {"hidden_size": 64}, {}, "hidden_size=64; expected 32"),
        (FULL, {"vocab_size": 96}, {}, "vocab_size=96; expected 97"),
        (FULL, {"draft_vocab_size": 32}, {}, "a reduced draft vocabulary needs d2t"),
        (FULL, {"num_target_layers": 7}, {}, "num_target_layers=7; expected 6"),
        (FULL, {"num_hidden_layers": 2}, {}, "layer_types.*for each of 2 layers"),
        (FULL, {"num_hidden_layers": 2, "layer_types": None}, {}, "do not fit.*layers.2"),
        (FULL, {"layer_types": ["full_attention", "chunked_attention"] * 2}, {}, "layer_types"),
        (FULL, {"layer_types": ["chunked_attention"] * 3}, {}, "chunked_attention.*expected"),
        (FULL, {"layer_types": ["sliding_attention"] * 3}, {}, "sliding_window=None"),
        (SLIDING, {"use_sliding_window": False}, {}, "use_sliding_window=False; expected True"),
        (SLIDING, {"sliding_window": 0}, {}, "window: expected at least 1"),
        (FULL, {"rope_scaling": {"type": "yarn"}}, {}, "rope_scaling='yarn'; expected 'default'"),
        (FULL, {"rope_parameters": {"rope_type": "yarn"}}, {}, "rope_parameters='yarn'"),
        (FULL, {"rope_parameters": {"full": {"rope_theta": 9}}}, {}, r"rope_parameters=\['full'"),
        (FULL, {"partial_rotary_factor": 0.25}, {}, "partial_rotary_factor=0.25; expected 1"),
        (FULL, {"attention_bias": True}, {}, "attention_bias=True; expected False"),
        (FULL, {"hidden_act": "gelu"}, {}, "hidden_act='gelu'; expected 'silu'"),
        (FULL, {"quantization_config": {"bits": 4}}, {}, "quantization_config={'bits': 4}"),
        (FULL, {"num_key_value_heads": 3}, {}, "num_key_value_heads: expected a divisor"),
        (FULL, {"hidden_size": "32"}, {}, "cannot be read"),
        (FULL, own(selector_rank=8), {}, r"expected all of .*got \['selector_rank'\]"),
        ("dflash2", own(conv_group_size=5), {}, "group_size: expected a divisor of 32, got 5"),
        ("dflash2", own(selector_rank=9), {}, "do not fit.*predecessor_codebook"),
        (FULL, {}, {"fc.weight": None}, "holds no DFlash layers"),
        (FULL, {}, {"layers.1.mlp.up_proj.weight": None}, "do not fit.*layers.1.mlp.up_proj"),
        (FULL, {}, {"layers.3.mlp.up_proj.weight": torch.ones(1)}, "do not fit.*layers.3"),
        (FULL, {}, {"norm.weight": torch.ones(31)}, r"do not fit its config: \['norm.weight'\]"),
        (FULL, {}, {"lm_head.weight": torch.ones(97, 32)}, "do not fit.*lm_head"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, name, fields, weights, message):
    """Catches layers that are half read, or run as if they were of another kind."""
    folder, target = change(tmp_path, name, fields, weights)
    with pytest.raises(ValueError, match=message):
        load_dflash(folder, target)


def test_a_missing_field_is_named(tmp_path):
    """Catches a stack trace about keys."""
    folder, target = change(tmp_path, FULL)
    fields = json.loads((folder / "config.json").read_text())
    del fields["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"expected \['intermediate_size'\] in config.json"):
        load_dflash(folder, target)


def test_the_published_defaults(tmp_path):
    """Catches a folder without ids, sizes or layer types that is refused, or read otherwise."""
    (tmp_path / "a").mkdir()
    folder, target = change(
        tmp_path / "a", SLIDING, own(target_layer_ids=None) | {"layer_types": None}
    )
    network = load_dflash(folder, target)
    assert network.taps == (2, 3, 5, 6)  # ids 1 + i 4 / 3, rounded
    assert network.sights == sights_of("bidirectional", 4)
    (tmp_path / "b").mkdir()
    folder, target = change(tmp_path / "b", FULL, own(block_size=None, target_layer_ids=[-1, 2, 5]))
    network = load_dflash(folder, target)
    assert network.block_size == 8  # the one beside dflash_config
    assert network.taps == (0, 3, FINAL)


@pytest.mark.parametrize("causal", [True, False])
def test_is_causal_settles_it_for_all_layers(tmp_path, causal):
    """Catches layer types that overrule it, or windows that go with it."""
    folder, target = change(tmp_path, SLIDING, {"is_causal": causal})
    expected = [Sight(causal, 8)] * 3 + [Sight(causal)]
    assert list(load_dflash(folder, target).sights) == expected


def test_the_methods_are_told_apart():
    """Catches DFlash taken for EAGLE-1, whose weight names it has as well, and the other way."""
    target = specdec.load(GOLDEN / FULL / "target").target
    with pytest.raises(ValueError, match="holds no EAGLE layer"):
        load_eagle(GOLDEN / FULL, target)
    with pytest.raises(ValueError, match="holds no DFlash layers"):
        load_dflash(GOLDEN / "eagle1", target)


def test_released_codebooks_have_no_suffix(tmp_path):
    """Catches DFlash 2 as it was released, whose codebooks are plain parameters."""
    names = [f"candidate_selector.{part}_codebook" for part in ("predecessor", "successor")]
    weights = load_file(GOLDEN / "dflash2" / "model.safetensors")
    renamed = {name: weights[f"{name}.weight"] for name in names}
    renamed |= {f"{name}.weight": None for name in names}
    folder, target = change(tmp_path, "dflash2", own(selector_vocab_size=96), renamed)
    network = load_dflash(folder, target)
    assert torch.equal(network.selector.before.weight, weights[f"{names[0]}.weight"])


def test_strix_halo():
    """Catches a preset of other sizes than the released drafter's."""
    network = strix_halo()
    layer = 2048 * 128 * (32 + 8 + 8 + 32) + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    expected = 8 * 2048 * 2048 + 6 * layer + 2 * 2048
    assert sum(parameter.numel() for parameter in network.parameters()) == expected == 385_906_176
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    assert network.sights == (Sight(True, 4096),) * 5 + (Sight(),)
    assert network.taps == (2, 7, 12, 17, 23, 28, 33, 38)
    assert (network.block_size, network.mask_token) == (16, 248077)
    assert DFlash(network).n_drafts == 15


def test_strix_halo_made_small_is_written_and_read(tmp_path):
    """Catches a shape that the format cannot hold."""
    full = strix_halo()
    small = replace(
        full.config,
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=4,
    )
    network = DFlashNetwork(
        small, full.taps, mask_token=12, block_size=full.block_size, sights=full.sights
    ).reset_parameters(torch.Generator().manual_seed(0))
    save_dflash(network, tmp_path, n_target_layers=40)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["dflash_config"]["target_layer_ids"] == [1, 6, 11, 16, 22, 27, 32, 37]
    assert fields["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert (fields["num_target_layers"], fields["sliding_window"]) == (40, 4096)
    assert not {"taps", "sights", "inject", "is_causal"} & fields.keys()
    again = load_dflash(tmp_path, tiny_transformer(num_hidden_layers=40).float())
    assert (again.taps, again.sights, again.config) == (full.taps, full.sights, small)
