"""load_drafter: a published folder becomes a drafter, or an error says why not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec import generate
from specdec.checkpoints import load_drafter
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


def test_a_folder_of_no_known_format_is_refused(tmp_path):
    """A stack trace about keys instead of the name of the folder."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"some.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no drafter of a known format"):
        load_drafter(tmp_path, target_for(GOLDEN / "eagle1"))
