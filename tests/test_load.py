"""The embedded bundle, and targets in folders."""

import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.checkpoints import save_transformer
from tests.helpers import tiny_transformer

GOLDEN = Path(__file__).parent / "golden"
DRAFTERS = [
    "prompt lookup",
    "draft model",
    "draft model, tree",
    "medusa",
    "medusa, tree",
    "eagle-1",
    "eagle-1, tree",
    "eagle-3",
    "eagle-3, tree",
    "mtp heads",
    "mtp heads, tree",
    "mtp, 1 module",
    "mtp, 3 modules",
    "mtp, 3 modules, tree",
    "layerskip",
    "dflash",
    "dflash, tree",
]


HYBRID_DRAFTERS = [
    "prompt lookup",
    "mtp, 1 module",
    "mtp, 1 module, tree",
    "dflash",
    "dflash, tree",
]


@pytest.fixture(scope="module")
def bundle():
    return specdec.load("tiny")


@pytest.fixture(scope="module")
def hybrid():
    return specdec.load("tiny-moe", torch.float64)


def test_the_bundle_unpacks_and_decodes_text(bundle):
    """A bundle whose parts do not fit each other."""
    target, tokenizer, drafters, prompts = bundle
    assert set(prompts) == {"code", "docstring", "edit", "table"}
    assert list(drafters) == DRAFTERS
    text = prompts["code"][0]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    run = specdec.generate(
        target, tokenizer.encode(text), drafters["draft model"], max_new_tokens=12
    )
    assert len(run.new_tokens[0]) == 12


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_worth_having(bundle, name):
    """Weights that do not belong together: a drafter that the target refuses."""
    prompts = [bundle.tokenizer.encode(texts[0]) for texts in bundle.prompts.values()]
    run = specdec.generate(bundle.target, prompts, bundle.drafters[name], max_new_tokens=40)
    assert run.metrics.tau > 1.5
    longest = max(r.draft.n_nodes for r in run.rounds)
    assert (longest == 20) == ("tree" in name and "draft model" not in name)


def test_the_target_has_learned_its_language(bundle):
    """Weights damaged on their way into the package."""
    prompt = bundle.tokenizer.encode("    def __init__(self, name, value):\n        self.name = na")
    run = specdec.generate(bundle.target, prompt, max_new_tokens=2)
    assert bundle.tokenizer.decode(run.new_tokens[0]) == "me"


def test_the_weights_are_small_and_come_with_their_history(bundle):
    """A repository that grows; numbers nobody can reproduce."""
    folder = resources.files("specdec") / "pretrained"
    totals = {"tiny": 0, "tiny-moe": 0}
    for part in folder.iterdir():
        if not part.name.startswith("tiny-"):
            continue
        name = "tiny-moe" if part.name.startswith("tiny-moe") else "tiny"
        totals[name] += len((part / "model.safetensors").read_bytes())
        training = json.loads((part / "config.json").read_text())["training"]
        is_target = part.name in ("tiny-target", "tiny-moe", "tiny-moe-mtp")  # trained together
        metric = "bits_per_byte" if is_target else "tau"
        assert {f"held_out_{metric}", "seed", "steps"} <= training.keys()
    assert 20_000_000 < totals["tiny"] <= 40_000_000
    assert 20_000_000 < totals["tiny-moe"] <= 30_000_000


@pytest.mark.parametrize("name", HYBRID_DRAFTERS)
def test_drafters_of_the_hybrid_are_worth_having(hybrid, name):
    """Weights of another target, states that a commit leaves behind, a row that feels another."""
    prompts = [hybrid.tokenizer.encode(texts[0]) for texts in hybrid.prompts.values()]
    plain = specdec.generate(hybrid.target, prompts, max_new_tokens=24)
    run = specdec.generate(hybrid.target, prompts, hybrid.drafters[name], max_new_tokens=24)
    assert [row.tolist() for row in run.new_tokens] == [row.tolist() for row in plain.new_tokens]
    assert run.metrics.tau > 1.5
    assert list(hybrid.drafters) == HYBRID_DRAFTERS
    longest = max(r.draft.n_nodes for r in run.rounds)
    assert (longest == 20) == ("tree" in name)


def test_the_experts_are_computed_as_asked(hybrid):
    """An argument that is read and forgotten, a way that nobody knows."""
    assert hybrid.target.experts == "grouped"
    assert specdec.load("tiny-moe", experts="loop").target.experts == "loop"
    with pytest.raises(ValueError, match="experts: expected 'loop' or 'grouped', got 'fast'"):
        specdec.load("tiny-moe", experts="fast")  # type: ignore[call-overload]


def test_an_unknown_name_is_refused():
    """A typing error that ends in a stack trace about files."""
    with pytest.raises(
        ValueError, match=r"expected one of .*'tiny-moe'.* or a folder .*, got 'tinny'"
    ):
        specdec.load("tinny")


def test_dtype_is_what_was_asked_for():
    """Equality tests that run in float32 unawares."""
    assert specdec.load("tiny", torch.float64).target.dtype == torch.float64


def test_a_folder_holds_a_target_and_nothing_else(tmp_path):
    """Catches a tokenizer, drafters or prompts that belong to another model."""
    model = tiny_transformer()
    save_transformer(model, tmp_path)
    for folder in (tmp_path, str(tmp_path)):
        bundle = specdec.load(folder, torch.float64)
        assert torch.equal(bundle.target.head.weight, model.head.weight)
        assert (bundle.tokenizer, bundle.drafters, bundle.prompts) == (None, {}, {})


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_hugging_face_folder_is_the_model_of_transformers(tmp_path, kind, tied, sharded):
    """Catches weights joined or named wrongly, a head untied, a field ignored, a shard left out."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 17,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 200.0},
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    if kind == "qwen3":
        theirs = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    else:
        theirs = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, 0.5, 0.3)
    theirs.save_pretrained(tmp_path, max_shard_size="3KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    target = specdec.load(tmp_path).target
    assert (target.head.weight is target.embedding.weight) == tied
    assert not target.training
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert target.max_position_embeddings == 64
    tokens = torch.arange(14).unsqueeze(0)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(target(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert specdec.load(tmp_path, torch.bfloat16).target.dtype == torch.bfloat16


def qwen3(folder: Path, fields: dict | None = None, weights: dict | None = None) -> Path:
    """A golden Qwen3 folder with other fields and weights (None: without)."""
    source = GOLDEN / "dflash_full" / "target"
    config = json.loads((source / "config.json").read_text()) | (fields or {})
    (folder / "config.json").write_text(json.dumps(config))
    changed = load_file(source / "model.safetensors") | (weights or {})
    save_file({n: w for n, w in changed.items() if w is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("fields", "weights", "message"),
    [
        (
            {"model_type": "mistral"},
            {},
            "model_type='mistral'; expected one of",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "architectures=.*Eagle3.*Qwen3ForCa"),
        ({"model_type": "llama", "architectures": None}, {}, "do not fit its config.*q_norm"),
        ({"hidden_act": "gelu"}, {}, "hidden_act='gelu'; expected 'silu'"),
        ({"attention_bias": True}, {}, "attention_bias=True; expected False"),
        ({"mlp_bias": True}, {}, "mlp_bias=True; expected False"),
        ({"rope_scaling": {"rope_type": "llama3"}}, {}, "rope_scaling='llama3'"),
        ({"layer_types": ["sliding_attention"] * 6}, {}, "layer_types=.*sliding_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            {},
            "use_sliding_window=True; expected False",
        ),
        ({"quantization_config": {"bits": 4}}, {}, "quantization_config"),
        ({"num_hidden_layers": 5}, {}, r"do not fit its config.*model\.layers\.5"),
        ({}, {"model.layers.0.mlp.up_proj.weight": None}, "do not fit its config.*up_proj"),
        ({}, {"lm_head.weight": None}, "do not fit its config.*lm_head"),
        ({}, {"model.norm.weight": torch.ones(31)}, r"\['model.norm.weight'\]"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, fields, weights, message):
    """Catches a model of another kind that runs, and says something else."""
    with pytest.raises(ValueError, match=message):
        specdec.load(qwen3(tmp_path, fields, weights))


def test_what_makes_no_difference_is_read_over(tmp_path):
    """Catches windows that no layer has, stored frequencies, or a tied head that is stored too."""
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    unused = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 6}
    folder = qwen3(tmp_path, unused | {"tie_word_embeddings": True}, frequencies)
    target = specdec.load(folder).target
    assert target.head.weight is target.embedding.weight


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "cannot be read"),
        ('{"weight_map": {}}', "expected safetensors"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "expected safetensors"),
        ('{"weight_map": {"a": "a.bin"}}', "expected safetensors"),
        ('{"weight_map": {"a": "a.safetensors"}}', r"expected a\.safetensors in"),
    ],
)
def test_an_index_that_lists_no_files_is_refused(tmp_path, index, message):
    """Catches files read from elsewhere, and shards that were never copied."""
    (qwen3(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=message):
        specdec.load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    """Catches a stack trace about files."""
    with pytest.raises(ValueError, match=r"expected config\.json in"):
        specdec.load(tmp_path)
