"""DeepSeek-V3's layout of multi-token prediction: as transformers runs it, or refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_layers import MtpModel

from specdec import FINAL, generate
from specdec.checkpoints import deepseek_mtp, load_deepseek_mtp, load_drafter, load_target
from specdec.drafters import MTPModules

N_LAYERS, N_MODULES, VOCAB, WIDTH = 3, 2, 31, 16
TOKENS = torch.tensor([[3, 9, 27, 2, 6, 18, 7, 21]])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, MtpModel]:
    """A random Qwen3 and two modules: the model's folder, one with both, and what runs them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).double().eval()
    config.num_mtp_layers = N_MODULES
    config.mtp_layer_types = ["full_attention"] * N_MODULES
    modules = MtpModel(model, N_MODULES).double().eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *modules.layers.parameters()):
            drawn = torch.randn_like(parameter)
            parameter.copy_(1 + drawn / 4 if parameter.ndim == 1 else drawn / 4)
    whole, alone = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("alone")
    model.save_pretrained(alone)
    weights = load_file(alone / "model.safetensors")
    for k, layer in enumerate(modules.layers):
        for name, weight in layer.state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            weights[f"model.layers.{N_LAYERS + k}.{name}"] = weight.clone()
        prefix = f"model.layers.{N_LAYERS + k}."
        weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, whole / "model.safetensors")
    (whole / "config.json").write_text((alone / "config.json").read_text())
    return whole, alone, modules


@torch.no_grad()
def check_modules(theirs: tuple[Path, Path, MtpModel]) -> None:
    """Logits of both modules, the true tokens fed."""
    whole, alone, oracle = theirs
    target = load_target(alone, torch.float64)
    network = load_deepseek_mtp(whole, target)
    states = target(TOKENS, taps=(FINAL,)).hidden[FINAL]
    ours = network(states, TOKENS, target)
    for k in range(1, N_MODULES + 1):
        tokens = TOKENS[:, k:]
        n = tokens.shape[1]
        positions = torch.arange(n).unsqueeze(0)
        mask = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        states = oracle.layers[k - 1](
            oracle.embed_tokens(tokens),
            states[:, :n],
            oracle.rotary_emb(states, positions),
            mask,
            positions,
            None,
        )
        torch.testing.assert_close(ours[k - 1], oracle.shared_head(states), rtol=0, atol=1e-5)


def test_agrees_with_transformers(theirs):
    """Catches halves of the projection exchanged, norms exchanged, states from before the norm."""
    check_modules(theirs)


def halves_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseek_mtp, "swapped", lambda projection: projection.weight.clone())


def norms_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dict(deepseek_mtp._OWN)
    first, second = own["norm_hidden.weight"], own["norm_embedding.weight"]
    own |= {"norm_hidden.weight": second, "norm_embedding.weight": first}
    monkeypatch.setattr(deepseek_mtp, "_OWN", own)


def states_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the paper has it."""
    monkeypatch.setattr(deepseek_mtp, "FINAL", N_LAYERS)


@pytest.mark.parametrize("plant", [halves_as_published, norms_exchanged, states_before_the_norm])
def test_planted_bugs_are_seen(monkeypatch, theirs, plant):
    """Each of these drafts losslessly and badly: only parity tells."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check_modules(theirs)


def test_the_target_s_folder_is_recognised_and_drafts(theirs):
    """Catches a whole model taken for no drafter at all, and modules that change the output."""
    whole, alone, _ = theirs
    target = load_target(alone, torch.float64)
    drafter = load_drafter(whole, target)
    assert isinstance(drafter, MTPModules)
    assert drafter.n_drafts == N_MODULES
    plain = generate(target, TOKENS[0], max_new_tokens=8)
    drafted = generate(target, TOKENS[0], drafter, max_new_tokens=8)
    assert drafted.sequences[0].tolist() == plain.sequences[0].tolist()
    assert any(r.draft.n_nodes for r in drafted.rounds)


def test_layers_of_deepseek_itself_are_refused_with_the_reason(tmp_path, theirs):
    """Catches a list of weight names in place of what is wrong: latent attention and experts."""
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    last = f"model.layers.{N_LAYERS - 1}."
    weights = load_file(tmp_path / "model.safetensors")
    module = {n.replace(last, f"model.layers.{N_LAYERS}."): w for n, w in weights.items()}
    weights |= {n: w.clone() for n, w in module.items() if n not in weights}
    weights[f"model.layers.{N_LAYERS}.eh_proj.weight"] = torch.zeros(WIDTH, 2 * WIDTH)
    save_file(weights, tmp_path / "model.safetensors")
    target = load_target(theirs[1])
    with pytest.raises(ValueError, match=r"have latent attention \(MLA\) and routed experts"):
        load_drafter(tmp_path, target)


def test_mimo_s_layers_are_refused_with_the_reason(tmp_path, theirs):
    """Catches MiMo's folder taken for no drafter at all."""
    (tmp_path / "config.json").write_text("{}")
    names = ("input_proj.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias")
    weights = {f"model.mtp_layers.0.{name}": torch.zeros(2) for name in names}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="have projections with biases; expected dense"):
        load_drafter(tmp_path, load_target(theirs[1]))
    del weights["model.mtp_layers.0.self_attn.q_proj.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape("found MiMo's model.mtp_layers.*")):
        load_drafter(tmp_path, load_target(theirs[1]))


MODULE = f"model.layers.{N_LAYERS}."


@pytest.mark.parametrize(
    ("fields", "weights", "message"),
    [
        ({"vocab_size": 32}, {}, "vocab_size=32; expected 31"),
        ({"hidden_size": 8}, {}, "hidden_size=8; expected 16"),
        ({"num_hidden_layers": 4}, {}, "num_hidden_layers=4; expected 3"),
        ({"hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
        ({}, {f"{MODULE}eh_proj.weight": None}, r"from layer 3 on, found them at \[4\]"),
        ({}, {f"{MODULE}enorm.weight": None}, r"do not fit its config: .*enorm"),
        ({}, {f"{MODULE}mlp.gate.weight": torch.ones(2)}, r"do not fit its config: .*mlp\.gate\."),
        ({}, {f"{MODULE}embed_tokens.weight": torch.ones(VOCAB, WIDTH)}, "embed_tokens differs"),
        ({}, {f"{MODULE}shared_head.head.weight": torch.ones(VOCAB, WIDTH)}, "head differs"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, theirs, fields, weights, message):
    """Catches modules that are half read, or hung behind another target."""
    whole, alone, _ = theirs
    config = json.loads((whole / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    changed: dict[str, Tensor | None] = load_file(whole / "model.safetensors") | weights
    save_file({n: w for n, w in changed.items() if w is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_deepseek_mtp(tmp_path, load_target(alone))


def test_a_folder_without_modules_is_named(theirs):
    """Catches a target's folder read as a drafter's."""
    with pytest.raises(ValueError, match=r"expected weights \*\.eh_proj\.weight in"):
        load_deepseek_mtp(theirs[1], load_target(theirs[1]))
