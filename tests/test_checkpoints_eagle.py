"""Published EAGLE folders: read as they are, equal to the published code, refused where unfit."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec.checkpoints.eagle
from specdec import FINAL
from specdec.checkpoints.eagle import eagle_version, load_eagle, save_eagle
from specdec.drafters.eagle import Eagle1, Eagle3, unroll
from specdec.drafters.eagle_tree import Eagle
from specdec.models import TransformerConfig
from tests.builders import context_of

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = ["eagle1", "eagle3", "eagle3_reduced_vocab"]


def fake_target(case: dict, **changes) -> SimpleNamespace:
    """As much of a target as EAGLE asks for."""
    embedding, head = case["embed_tokens"], case.get("lm_head")
    parts = {
        "vocab_size": len(embedding),
        "hidden_size": embedding.shape[1],
        "n_layers": 8,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "embedding": lambda tokens: embedding[tokens],
        "head": lambda hidden: hidden @ head.T,
    }
    return SimpleNamespace(**(parts | changes))


def check_golden(name: str) -> None:
    case = load_file(GOLDEN / name / "case.safetensors")
    settings = json.loads((GOLDEN / name / "config.json").read_text())["tree"]
    target, tokens = fake_target(case), case["tokens"]
    network = load_eagle(GOLDEN / name, target)
    pieces = case["target_features"].split(target.hidden_size, dim=-1)
    hidden = dict(zip(network.taps, pieces, strict=True))
    features = unroll(network, network.fuse(hidden), target.embedding(tokens[:, 1:]))[0]
    expected = case["draft_features" if name == "eagle1" else "draft_hidden"]
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    if isinstance(network, Eagle3):
        logits = network.draft_logits(features)
    else:
        logits = network.logits(features, target)
    torch.testing.assert_close(logits, case["draft_logits"], rtol=1e-4, atol=1e-4)
    # the published depth counts expansions, its number of tokens the root
    drafter = Eagle(
        network,
        settings["depth"] + 1,
        top_k=settings["top_k"],
        n_nodes=settings["total_tokens"] - 1,
    )
    context = context_of([tokens[0].tolist()])
    context = type(context)(**(vars(context) | {"hidden": hidden}))
    draft = drafter.begin(target, 1, 64).propose(context)
    assert draft.tokens[0].tolist() == case["tree_tokens"].tolist()
    assert draft.tree()[0].tolist() == case["tree_parents"].tolist()


@pytest.mark.parametrize("name", FOLDERS)
def test_agrees_with_the_published_code(name):
    """Catches any difference in layer, wiring, head, draft vocabulary or tree."""
    check_golden(name)


def test_taps_in_another_order_are_seen(monkeypatch):
    """Planted: the fused states the wrong way round."""
    monkeypatch.setattr(
        Eagle3,
        "fuse",
        lambda self, hidden: self.fc(torch.cat([hidden[t] for t in self.taps[::-1]], dim=-1)),
    )
    with pytest.raises(AssertionError, match="not close"):
        check_golden("eagle3")


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_the_embedding_of_another_token_is_seen(monkeypatch, name):
    """Planted: feature h_t paired with token x_t instead of x_{t+1}."""
    forward = {"eagle1": Eagle1, "eagle3": Eagle3}[name].forward

    def shifted(self, features, embeddings, rotary, store=None, view=None):
        return forward(self, features, embeddings.roll(1, dims=1), rotary, store, view)

    monkeypatch.setattr({"eagle1": Eagle1, "eagle3": Eagle3}[name], "forward", shifted)
    with pytest.raises(AssertionError, match="not close"):
        check_golden(name)


def test_d2t_taken_as_an_index_is_seen(monkeypatch):
    """Planted: draft token i as target token d2t[i] instead of i + d2t[i]."""
    right = specdec.checkpoints.eagle._network

    def as_index(version, fields, weights, target, taps):
        offsets = weights["d2t"].clone()
        network = right(version, fields, weights, target, taps)
        network.draft_ids = offsets
        return network

    monkeypatch.setattr(specdec.checkpoints.eagle, "_network", as_index)
    with pytest.raises(AssertionError, match=r"assert \["):
        check_golden("eagle3_reduced_vocab")


def test_the_version_is_told_by_the_weights():
    """Catches a folder of another method read as EAGLE."""
    for name, version in zip(FOLDERS, (1, 3, 3), strict=True):
        assert eagle_version(load_file(GOLDEN / name / "model.safetensors")) == version
    assert eagle_version(["fc.weight", "layers.0.mlp.down_proj.weight"]) is None
    assert eagle_version(load_file(GOLDEN / "eagle1" / "case.safetensors")) is None


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_read_can_be_trained_no_further_and_fits_the_target(name):
    """Catches gradients that are collected for nothing, and a dtype other than the target's."""
    case = load_file(GOLDEN / name / "case.safetensors")
    network = load_eagle(GOLDEN / name, fake_target(case, dtype=torch.float64))
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float64}


CONFIG = TransformerConfig(11, 16, 24, 1, 4, 2, rope_theta=500.0, max_position_embeddings=99)


@pytest.mark.parametrize(
    "network",
    [
        Eagle1(CONFIG),
        Eagle1(CONFIG, bias=False),
        Eagle3(CONFIG, (0, 3, FINAL)),
        Eagle3(CONFIG, (1, 2), torch.tensor([0, 4, 5, 10])),
        Eagle3(dataclasses.replace(CONFIG, qk_norm=True, head_dim=6), (1,)),
    ],
    ids=["eagle1", "eagle1 without bias", "eagle3", "eagle3 reduced", "eagle3 with q/k norm"],
)
def test_round_trip(tmp_path, network):
    """Catches a weight, field or tap that is lost, or joined in another order than split."""
    network.reset_parameters(torch.Generator().manual_seed(1))
    case = {"embed_tokens": torch.zeros(11, 16)}
    save_eagle(network, tmp_path / "new", metadata={"steps": 3})
    again = load_eagle(tmp_path / "new", fake_target(case))
    assert type(again) is type(network)
    assert again.taps == network.taps
    assert again.config.rope_theta == 500.0
    assert again.config.max_position_embeddings == 99
    assert again.state_dict().keys() == network.state_dict().keys()
    for name, weight in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert json.loads((tmp_path / "new" / "config.json").read_text())["training"] == {"steps": 3}


def test_pytorch_model_bin_is_read_too(tmp_path):
    """Catches the older layout, in which most published folders come."""
    weights = load_file(GOLDEN / "eagle1" / "model.safetensors")
    shutil.copy(GOLDEN / "eagle1" / "config.json", tmp_path)
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    case = load_file(GOLDEN / "eagle1" / "case.safetensors")
    weights["embed_tokens.weight"] = case["embed_tokens"].half()  # the target's, as published
    torch.save(weights, tmp_path / "pytorch_model.bin")
    network = load_eagle(tmp_path, fake_target(case))
    assert torch.equal(network.fc.weight, weights["fc.weight"])


def change(tmp_path: Path, name: str, fields: dict | None = None, weights: dict | None = None):
    """A copy of a golden folder with other fields and weights (None: without)."""
    config = json.loads((GOLDEN / name / "config.json").read_text()) | (fields or {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    changed = load_file(GOLDEN / name / "model.safetensors") | (weights or {})
    save_file({n: w for n, w in changed.items() if w is not None}, tmp_path / "model.safetensors")
    return tmp_path, fake_target(load_file(GOLDEN / name / "case.safetensors"))


@pytest.mark.parametrize(
    ("name", "fields", "weights", "message"),
    [
        ("eagle1", {"hidden_act": "gelu"}, {}, "hidden_act='gelu'; expected 'silu'"),
        ("eagle1", {"num_hidden_layers": 2}, {}, "num_hidden_layers=2; expected 1"),
        ("eagle1", {"qkv_bias": True}, {}, "attention_bias=True; expected False"),
        ("eagle1", {"rope_scaling": {"type": "linear", "factor": 2}}, {}, "rope_scaling='linear'"),
        ("eagle3", {"target_hidden_size": 64}, {}, "target_hidden_size=64; expected 32"),
        ("eagle3", {"norm_before_residual": True}, {}, "norm_before_residual=True"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, {}, "pass taps"),
        (
            "eagle3",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
            {},
            "pass taps",
        ),
        ("eagle3", {"taps": [1, 2]}, {}, r"do not fit its config: \['fc.weight'\]"),
        ("eagle3", {"taps": [1, 2, 9]}, {}, r"taps \[1, 2, 9\], but the target has 0\.\.8"),
        ("eagle1", {}, {"fc.weight": None}, "holds no EAGLE layer"),
        ("eagle1", {}, {"layers.0.mlp.up_proj.weight": None}, "do not fit.*up_proj"),
        ("eagle1", {}, {"layers.1.mlp.up_proj.weight": torch.ones(1)}, "do not fit.*layers.1"),
        ("eagle1", {}, {"fc.bias": torch.ones(3)}, r"do not fit its config: \['fc.bias'\]"),
        ("eagle1", {"hidden_size": 64}, {}, "width 64, but the target has 97 and 32"),
        ("eagle1", {"vocab_size": 96}, {}, "vocabulary of 96"),
        ("eagle1", {}, {"embed_tokens.weight": torch.ones(97, 32)}, "differs from the target's"),
        ("eagle3_reduced_vocab", {}, {"d2t": None}, "needs d2t"),
        ("eagle3_reduced_vocab", {}, {"t2d": torch.ones(97, dtype=torch.bool)}, "t2d does not"),
        (
            "eagle3_reduced_vocab",
            {},
            {"d2t": torch.full((41,), 57), "t2d": None},
            r"increasing ids in \[0, 97\), got 57\.\.97",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, name, fields, weights, message):
    """Catches a layer that is half read, or run as if it were of another kind."""
    folder, target = change(tmp_path, name, fields, weights)
    with pytest.raises(ValueError, match=message):
        load_eagle(folder, target)


def test_taps_can_be_given(tmp_path):
    """Catches an argument that config.json overrules, and the published choice of taps."""
    folder, target = change(tmp_path, "eagle3", {"taps": [1, 2, 3]})
    assert load_eagle(folder, target).taps == (1, 2, 3)
    assert load_eagle(folder, target, taps=(4, 5, 6)).taps == (4, 5, 6)
    assert load_eagle(GOLDEN / "eagle3", target).taps == (2, 4, 5)


def test_a_missing_file_is_named(tmp_path):
    """Catches an error of whoever opens the file, without the folder."""
    _, target = change(tmp_path, "eagle1")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors or pytorch_model\.bin"):
        load_eagle(tmp_path, target)
    with pytest.raises(ValueError, match=r"expected config\.json in .*nowhere"):
        load_eagle(tmp_path / "nowhere", target)
