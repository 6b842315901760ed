"""Medusa's published layouts: heads alone, or in a whole model, in one file or in shards."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import Medusa, MedusaHeads
from specdec.checkpoints import load_drafter, load_medusa, medusa, save_medusa
from tests.helpers import tiny_transformer

TARGET = tiny_transformer()
MODEL = {"model.norm.weight": torch.ones(16), "lm_head.weight": torch.ones(13, 16)}
"""What else a whole model holds."""


def published(tmp_path: Path) -> dict[str, Tensor]:
    """Heads under their published names; the folder holds config.json alone."""
    heads = MedusaHeads.for_target(TARGET, 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    save_medusa(heads, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    return weights


def alone(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "medusa_lm_head.safetensors")


def alone_pickled(folder: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, folder / "medusa_lm_head.pt")


def whole(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(in_a_model(weights), folder / "model.safetensors")


def whole_pickled(folder: Path, weights: dict[str, Tensor]) -> None:
    torch.save(in_a_model(weights), folder / "pytorch_model.bin")


def sharded(folder: Path, weights: dict[str, Tensor], suffix: str = ".safetensors") -> None:
    """Heads in the second and third of three files."""
    weights = in_a_model(weights)
    files = {
        name: f"s{2 + ('1.0' in name) if name.startswith('medusa') else 1}{suffix}"
        for name in weights
    }
    for file in set(files.values()):
        part = {name: weights[name] for name in weights if files[name] == file}
        if suffix == ".bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file)
    stem = "pytorch_model" if suffix == ".bin" else "model"
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": files}))


def sharded_pickled(folder: Path, weights: dict[str, Tensor]) -> None:
    sharded(folder, weights, ".bin")
    (folder / "s1.bin").write_bytes(b"never opened")


def in_a_model(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return MODEL | {f"medusa_head.{name}": weight for name, weight in weights.items()}


LAYOUTS = [alone, alone_pickled, whole, whole_pickled, sharded, sharded_pickled]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_published_layout_is_read(tmp_path, layout):
    """Catches the model's own weights taken for heads, heads of one shard alone, and a reader that
    opens the pickles of the model."""
    weights = published(tmp_path)
    layout(tmp_path, weights)
    drafter = load_drafter(tmp_path, TARGET)
    assert isinstance(drafter, Medusa)
    heads = load_medusa(tmp_path, TARGET)
    assert heads.n_heads == 2
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for k in range(2):
        block = hidden @ weights[f"{k}.0.linear.weight"].T + weights[f"{k}.0.linear.bias"]
        mixed = hidden + block * block.sigmoid()
        expected = mixed @ weights[f"{k}.1.weight"].T
        torch.testing.assert_close(heads(hidden)[:, k], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", [whole, sharded])
def test_of_a_whole_model_the_heads_alone_are_read(monkeypatch, tmp_path, layout):
    """Catches a reader that takes a model of gigabytes into memory for its heads."""
    layout(tmp_path, published(tmp_path))
    asked: list[str] = []
    read = medusa.read_places

    def watched(places):
        asked.extend(places)
        return read(places)

    monkeypatch.setattr(medusa, "read_places", watched)
    load_drafter(tmp_path, TARGET)
    assert len(asked) == 6
    assert all(name.startswith("medusa_head.") for name in asked)


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_a_damaged_file_is_named(tmp_path, layout, damage):
    """Catches the various errors of those who open zip files, pickles and safetensors."""
    layout(tmp_path, published(tmp_path))
    (file,) = (f for f in tmp_path.iterdir() if f.name != "config.json")
    file.write_bytes(file.read_bytes()[:-200] if damage == "truncated" else b"")
    with pytest.raises(ValueError, match=rf"folder: .*{file.name} cannot be read"):
        load_drafter(tmp_path, TARGET)


def test_a_pickle_of_something_else_is_named(tmp_path):
    """Catches a training state taken for weights."""
    published(tmp_path)
    torch.save({"optimizer": {"step": 3}}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"expected tensors by name in .*medusa_lm_head\.pt"):
        load_drafter(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"weight_map": {"medusa_head.0.0.linear.weight": "../x.bin"}}', r"\['\.\./x\.bin'\]"),
        ('{"weight_map": {"medusa_head.0.0.linear.weight": "x.bin"}}', r"found no \['x\.bin'\]"),
    ],
)
def test_a_broken_index_is_named(tmp_path, index, message):
    """Catches a path out of the folder, and a shard that was not downloaded."""
    folder = tmp_path / "heads"
    torch.save(published(folder), tmp_path / "x.bin")
    (folder / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, TARGET)
