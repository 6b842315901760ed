"""Folders of MTP modules, parallel heads and Medusa heads: written, read again, or refused."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import FINAL
from specdec.checkpoints import (
    load_drafter,
    load_heads,
    load_medusa,
    load_modules,
    save_medusa,
    save_mtp,
)
from specdec.drafters import Medusa, MedusaHeads, MTPHeads, MTPModules, ParallelHeads
from specdec.drafters.mtp import SequentialModules
from specdec.models import TransformerConfig
from specdec.testing.strategies import small_target

TARGET = small_target(seed=1)
WIDTH, VOCAB = TARGET.hidden_size, TARGET.vocab_size


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def modules(tap: int = FINAL, own_norm: bool = True) -> SequentialModules:
    config = TransformerConfig(VOCAB, WIDTH, 12, 2, 2)
    network = SequentialModules(config, tap=tap, own_norm=own_norm)
    return network.reset_parameters(seeded()).double()


def heads() -> MedusaHeads:
    network = MedusaHeads(WIDTH, VOCAB, 2).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, generator=seeded())
    return network


def change(folder, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in (config | fields).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def assert_same(read: torch.nn.Module, written: torch.nn.Module) -> None:
    assert read.state_dict().keys() == written.state_dict().keys()
    for name, weight in written.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    assert not read.training
    assert not any(parameter.requires_grad for parameter in read.parameters())


@pytest.mark.parametrize(("tap", "own_norm"), [(FINAL, True), (TARGET.n_layers, False)])
def test_modules_come_back_as_they_were(tmp_path, tap, own_norm):
    """Catches a tap or a final norm that is forgotten: other drafts, and nobody is told."""
    save_mtp(modules(tap, own_norm), tmp_path)
    read = load_modules(tmp_path, TARGET)
    assert_same(read, modules(tap, own_norm))
    assert (read.tap, read.n_modules) == (tap, 2)
    drafter = load_drafter(tmp_path, TARGET)
    assert isinstance(drafter, MTPModules)
    assert drafter.n_drafts == 2


def test_heads_come_back_as_they_were(tmp_path):
    """Catches a number of heads that is off by the target's own."""
    config = TransformerConfig(VOCAB, WIDTH, 12, 1, 2)
    network = ParallelHeads(config, 3, TARGET.n_layers - 1).reset_parameters(seeded()).double()
    save_mtp(network, tmp_path)
    read = load_heads(tmp_path, TARGET)
    assert_same(read, network)
    assert (read.n_heads, read.tap) == (3, TARGET.n_layers - 1)
    assert isinstance(load_drafter(tmp_path, TARGET), MTPHeads)


def test_medusa_heads_have_the_published_names(tmp_path):
    """Catches heads in another order, and a block taken for the head."""
    save_medusa(heads(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert sorted(weights) == sorted(
        f"{k}.{name}" for k in (0, 1) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    )
    assert torch.equal(weights["1.1.weight"], heads().heads[1].get_parameter("head.weight"))
    assert_same(load_medusa(tmp_path, TARGET), heads())
    assert isinstance(load_drafter(tmp_path, TARGET), Medusa)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads_are_read_from_a_pickle_without_running_it(tmp_path, prefix):
    """Catches the file name and the prefix of older folders, and a pickle that may run code."""
    save_medusa(heads(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save({prefix + name: w for name, w in weights.items()}, tmp_path / "medusa_lm_head.pt")
    assert_same(load_medusa(tmp_path, TARGET), heads())
    torch.save({"0.0.linear.weight": print}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"folder: .* cannot be read"):
        load_medusa(tmp_path, TARGET)


def test_a_folder_of_another_kind_is_named(tmp_path):
    """Catches heads read as modules: a stack trace about weight names."""
    save_mtp(modules(), tmp_path)
    with pytest.raises(ValueError, match="of kind 'parallel', got 'sequential'"):
        load_heads(tmp_path, TARGET)
    with pytest.raises(ValueError, match="holds no Medusa heads"):
        load_medusa(tmp_path, TARGET)
    change(tmp_path, tap=None)
    with pytest.raises(ValueError, match=r"expected \['tap'\] in config\.json"):
        load_modules(tmp_path, TARGET)


def test_heads_of_another_target_are_refused(tmp_path):
    """Catches heads of another width or vocabulary, or blocks that would be left out."""
    save_medusa(MedusaHeads(WIDTH + 2, VOCAB, 2).double(), tmp_path)
    with pytest.raises(ValueError, match=r"\(11, 18\); expected \(11, 16\)"):
        load_medusa(tmp_path, TARGET)
    save_medusa(heads(), tmp_path)
    change(tmp_path, medusa_num_layers=2)
    with pytest.raises(ValueError, match="medusa_num_layers=2; expected 1"):
        load_medusa(tmp_path, TARGET)
    change(tmp_path, medusa_num_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["1.1.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"do not fit its config: \['heads\.1\.head\.weight'\]"):
        load_medusa(tmp_path, TARGET)


def test_modules_of_another_target_are_refused(tmp_path):
    """Catches modules that load and draft tokens the target does not have."""
    other = small_target(seed=1, vocab_size=12)
    config = dataclasses.replace(other.config, num_hidden_layers=1)
    save_mtp(SequentialModules(config, tap=1).double(), tmp_path)
    with pytest.raises(
        ValueError, match=r"is for 12 tokens and width 16; the target has 11 tokens"
    ):
        load_drafter(tmp_path, TARGET)
    assert load_modules(tmp_path, other).config.vocab_size == 12


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    """Catches a bare OSError, and a folder without its weights."""
    network = SequentialModules(TARGET.config, tap=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"folder: expected a folder to write to, .*file is a file"
    ):
        save_mtp(network, tmp_path / "file")
    with pytest.raises(ValueError, match=r"metadata: expected what JSON can hold, got .*Tensor"):
        save_mtp(network, tmp_path / "new", metadata={"x": torch.ones(1)})
    assert not (tmp_path / "new").exists()


def test_a_config_that_is_no_object(tmp_path):
    """Catches a list that is read as no fields at all."""
    save_mtp(SequentialModules(TARGET.config, tap=1), tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"folder: expected a JSON object in .*, got a list"):
        load_drafter(tmp_path, TARGET)
