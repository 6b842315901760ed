"""load_drafter: a published folder becomes a drafter, or an error says why not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import specdec
from specdec import generate
from specdec.checkpoints import load_drafter
from specdec.drafters import DFlash, Eagle
from specdec.models import Transformer, TransformerConfig

GOLDEN = Path(__file__).parent / "golden"


def target_for(folder: Path) -> Transformer:
    """A random target of the width and vocabulary that the published layer was made for."""
    fields = json.loads((folder / "config.json").read_text())
    vocab = fields["vocab_size"]
    config = TransformerConfig(vocab, fields["hidden_size"], 64, 6, 4, max_position_embeddings=128)
    return Transformer(config).reset_parameters(torch.Generator().manual_seed(0)).eval()


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3_reduced_vocab"])
def test_a_published_folder_drafts_without_changing_the_output(name):
    """A format that is taken for another, or a layer that cannot draft for its target."""
    target = target_for(GOLDEN / name).double()
    drafter = load_drafter(GOLDEN / name, target)
    prompt = torch.tensor([5, 6, 7])
    plain = generate(target, prompt, max_new_tokens=8)
    drafted = generate(target, prompt, drafter, max_new_tokens=8)
    assert drafted.sequences[0].tolist() == plain.sequences[0].tolist()
    assert any(r.draft.n_nodes for r in drafted.rounds)
    assert type(drafter) is Eagle


@pytest.mark.parametrize("name", ["dflash_full", "dflash_sliding", "dflash2"])
def test_a_block_drafter_is_recognised(name):
    """DFlash taken for EAGLE-1, whose weight names it has as well; blocks cut short."""
    target = specdec.load(GOLDEN / name / "target", torch.float64).target
    drafter = load_drafter(GOLDEN / name, target)
    assert type(drafter) is DFlash
    assert drafter.n_drafts == 7
    assert (drafter.network.selector is not None) == (name == "dflash2")
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9])]
    plain = generate(target, prompts, max_new_tokens=5)
    drafted = generate(target, prompts, drafter, max_new_tokens=5)
    for have, want in zip(drafted.sequences, plain.sequences, strict=True):
        assert have.tolist() == want.tolist()


def test_a_folder_of_no_known_format_is_refused(tmp_path):
    """A stack trace about keys instead of the name of the folder."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"some.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no drafter of a known format"):
        load_drafter(tmp_path, target_for(GOLDEN / "eagle1"))
