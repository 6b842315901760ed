"""The library's own folders: what is written is read again, and what does not fit is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.checkpoints import load_transformer, save_transformer
from tests.helpers import tiny_transformer

TOKENS = torch.tensor([[1, 2, 3, 4]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_round_trip(tmp_path, tied, qk_norm):
    """Catches a config field or weight that is not written, and a head tied or torn on the way."""
    model = tiny_transformer(tie_word_embeddings=tied, qk_norm=qk_norm, head_dim=6).float()
    save_transformer(model, tmp_path / "new" / "folder")
    again = load_transformer(tmp_path / "new" / "folder")
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert (again.head.weight is again.embedding.weight) == tied
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_what_is_loaded_is_ready_for_inference(tmp_path):
    """Catches a model in training mode, or one that collects gradients."""
    save_transformer(tiny_transformer().train().requires_grad_(True), tmp_path)
    model = load_transformer(tmp_path, torch.bfloat16)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.bfloat16


def test_a_tied_head_is_written_once(tmp_path):
    """Catches a file that holds the largest matrix twice."""
    save_transformer(tiny_transformer(), tmp_path)
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    save_transformer(tiny_transformer(tie_word_embeddings=False), tmp_path)
    assert "head.weight" in load_file(tmp_path / "model.safetensors")


def test_weights_are_written_in_the_dtype_asked_for(tmp_path):
    """Catches a cast of the model itself instead of what is written."""
    model = tiny_transformer()
    save_transformer(model, tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.float64
    written = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {torch.bfloat16}
    expected = model.embedding.weight.bfloat16().float()
    assert torch.equal(load_transformer(tmp_path).embedding.weight, expected)


def test_float64_comes_back_exactly(tmp_path):
    """Catches weights rounded to float32 on their way into a float64 model."""
    model = tiny_transformer()
    save_transformer(model, tmp_path)
    again = load_transformer(tmp_path, torch.float64)
    assert torch.equal(again.embedding.weight, model.embedding.weight)


def test_metadata_stands_in_the_config(tmp_path):
    """Catches a model card that is lost."""
    save_transformer(tiny_transformer(), tmp_path, metadata={"steps": 3})
    assert json.loads((tmp_path / "config.json").read_text())["training"] == {"steps": 3}
    save_transformer(tiny_transformer(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["training"] == {}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    """Catches an error of whoever opens the file, without the folder."""
    save_transformer(tiny_transformer(), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"folder: expected {name} in .*{tmp_path.name}"):
        load_transformer(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    """Catches a folder that is created by looking for it."""
    with pytest.raises(ValueError, match=r"folder: expected config\.json in .*nowhere"):
        load_transformer(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"norm.weight": w["norm.weight"][1:]}, r"\['norm\.weight'\]"),
        (
            lambda w: {"blocks.9.mlp.down.weight": w["norm.weight"].clone()},
            r"\['blocks\.9\.mlp\.down",
        ),
        (
            lambda w: {"norm.weight": None, "blocks.1.mlp.down.weight": None},
            r"\['blocks\.1\.mlp\.down\.weight', 'norm\.weight'\]",
        ),
        (lambda w: {"embedding.weight": None}, r"embedding\.weight"),
    ],
    ids=["shape", "one too many", "missing", "missing, tied"],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, message):
    """Catches a half-loaded model, with fresh weights where the file has none."""
    save_transformer(tiny_transformer(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= change(weights)
    save_file({n: w for n, w in weights.items() if w is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"folder: the weights of .*do not fit.*{message}"):
        load_transformer(tmp_path)
