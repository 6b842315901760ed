"""Folders of Qwen3-Next, Qwen3.5 and Qwen3.6: what `transformers` says, read, written, or refused.

The oracle is `transformers` on small random models, in float32 (its delta rule knows no other) and
with `experts_implementation="eager"`. Norms, decays and biases are drawn, too: as they start, a
centred norm that is taken for a plain one would not show.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.load_memory import config_of_size, measure, write
from specdec import FINAL
from specdec.cache import everything
from specdec.checkpoints import load_target, save_qwen_moe, sharded
from specdec.checkpoints.sharded import INDEX
from specdec.models import QwenMoe, QwenMoeConfig
from specdec.models.qwen_moe import FULL, LINEAR
from specdec.testing.targets import small_hybrid
from tests.helpers import random_tokens

N_LAYERS = 3
TAPS = (*range(N_LAYERS), FINAL)
SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [LINEAR, FULL, LINEAR],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "max_position_embeddings": 256,
}
ROUTED = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
KINDS: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict]] = {
    "qwen3.5 moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, ROUTED),
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {"intermediate_size": 40}),
    "qwen3-next": (Qwen3NextForCausalLM, Qwen3NextConfig, ROUTED),
    "qwen3-next, raw weights": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        ROUTED | {"norm_topk_prob": False},
    ),
}


@cache
def oracle(kind: str, tied: bool = False) -> PreTrainedModel:
    network, config, own = KINDS[kind]
    options = {"experts_implementation": "eager", "tie_word_embeddings": tied}
    model = network(config(**SIZES, **own, **options)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, std, generator=generator)
            if name.endswith("linear_attn.norm.weight"):
                parameter.add_(1.0)
    return model


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[..., Path]:
    """The folder of an oracle, written once."""

    @cache
    def write_once(kind: str, tied: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("oracle")
        oracle(kind, tied).save_pretrained(folder)
        return folder

    return write_once


@pytest.fixture
def copied(folder_of, tmp_path) -> Callable[..., Path]:
    """A copy of an oracle's folder with changed fields and weights."""

    def make(
        kind: str = "qwen3.5 moe",
        fields: Callable[[dict], dict] = dict,
        weights: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
        tied: bool = False,
    ) -> Path:
        source = folder_of(kind, tied)
        told = json.loads((source / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields(told)))
        changed = weights(load_file(source / "model.safetensors"))
        save_file({n: w.contiguous() for n, w in changed.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return make


def read(folder: Path, dtype: torch.dtype = torch.float32) -> QwenMoe:
    model = load_target(folder, dtype)
    assert isinstance(model, QwenMoe)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    return model


TOKENS = random_tokens(random.Random(0), 2, 75, 31)  # more than a chunk of the delta rule


@torch.no_grad()
def says(model: PreTrainedModel, tokens: Tensor, **options) -> dict[str, Tensor]:
    out = model(tokens, output_hidden_states=True, **options)
    return {"logits": out.logits} | {
        f"tap {tap}": states for tap, states in zip(TAPS, out.hidden_states, strict=True)
    }


@torch.no_grad()
def ours(model: QwenMoe, *args) -> dict[str, Tensor]:
    out = model(*args, taps=TAPS)
    assert out.logits is not None
    return {"logits": out.logits} | {f"tap {tap}": out.hidden[tap] for tap in TAPS}


def close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Relative to 1e-4; numbers that all but cancel, to 1e-4 of what is usual for the tensor."""
    for name, want in expected.items():
        atol = 1e-4 * float(want.square().mean().sqrt())
        torch.testing.assert_close(
            actual[name], want, rtol=1e-4, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def same(actual: QwenMoe, expected: QwenMoe) -> None:
    assert actual.config == expected.config
    assert actual.state_dict().keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert actual.state_dict()[name].equal(weight), name


# Parity


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_pass_is_that_of_transformers(folder_of, kind):
    """Catches rows of a joined product in another order, a norm of the other sort, a gate taken for
    a query, a turned convolution, experts' weights that are scaled or not, shifted taps."""
    close(ours(read(folder_of(kind)), TOKENS), says(oracle(kind), TOKENS))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_steps_and_rejected_branches_are_that_of_transformers(folder_of, kind):
    """Catches states that a commit gets wrong where only published weights show it.

    Prefill in pieces, single tokens, and a rejected draft in between, against a plain pass and
    against the cache of `transformers`.
    """
    model, expected = read(folder_of(kind)), says(oracle(kind), TOKENS)
    cache = model.new_cache(2, 80)
    parts, start = [], 0
    for n in (1, 2, 65, 1, 1, 5):
        noise = random_tokens(random.Random(n), 2, 4, 31)
        model(noise, cache, parents=torch.tensor([[-1, 0, -1, 2]] * 2))
        cache.commit(*everything(0, 2, "cpu"))
        parts.append(ours(model, TOKENS[:, start : start + n], cache))
        cache.commit(*everything(n, 2, "cpu"))
        start += n
    assert start == TOKENS.shape[1]
    close({name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}, expected)

    with torch.no_grad():
        past = oracle(kind)(TOKENS[:, :70], use_cache=True).cache
        step = oracle(kind)(TOKENS[:, 70:71], cache=past, use_cache=True).logits
    torch.testing.assert_close(step, expected["logits"][:, 70:71], rtol=1e-4, atol=1e-4)


def test_a_wide_pass_behind_a_state_is_that_of_transformers(folder_of):
    """Catches chunks of a long pass that start from nothing instead of the committed state."""
    kind = "qwen3.5 moe"
    model = read(folder_of(kind))
    cache = model.new_cache(2, 80)
    model(TOKENS[:, :3], cache)
    cache.commit(*everything(3, 2, "cpu"))
    rest = ours(model, TOKENS[:, 3:], cache)
    close(rest, {name: states[:, 3:] for name, states in says(oracle(kind), TOKENS).items()})


# Layouts


@pytest.mark.parametrize("kind", ["qwen3.5 moe", "qwen3-next"])
def test_shards_are_read_as_one_file(folder_of, tmp_path, kind):
    """Catches a shard that is left out, or weights cut at its end."""
    oracle(kind).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    same(read(tmp_path), read(folder_of(kind)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 500, 3000])
def test_weights_are_read_in_pieces(folder_of, monkeypatch, kind, size):
    """Catches rows of a piece that end up in another place, or between two of them."""
    whole = read(folder_of(kind))
    monkeypatch.setattr(sharded, "PIECE", size)
    same(read(folder_of(kind)), whole)


def pack(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts in one weight for all, as the published Qwen3.5 has them."""
    packed = {n: w for n, w in weights.items() if ".experts." not in n}
    for i in range(N_LAYERS):
        prefix = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            torch.stack([weights[f"{prefix}{j}.{part}_proj.weight"] for j in range(5)])
            for part in ("gate", "up", "down")
        )
        packed[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
        packed[f"{prefix}down_proj"] = down
    return packed


def below_text(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The multimodal layout, with something to see with and an MTP module."""
    moved = {n.replace("model.", "model.language_model.", 1): w for n, w in weights.items()}
    extra = {"model.visual.blocks.0.norm1.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2, 4)}
    return moved | extra


@pytest.mark.parametrize("kind", ["qwen3.5 moe", "qwen3-next"])
def test_packed_experts_are_those_one_by_one(copied, folder_of, kind):
    """Catches gate and up in another order, or experts read for one another."""
    same(read(copied(kind, weights=pack)), read(folder_of(kind)))


@pytest.mark.parametrize("packed", [False, True])
def test_the_text_part_of_a_multimodal_folder_is_read(copied, folder_of, packed):
    """Catches weights for seeing that count as unexpected, and fields looked for in one place."""

    def fields(told: dict) -> dict:
        outside = {"model_type": "qwen3_5_moe", "vision_config": {"depth": 1}}
        tied = told.pop("tie_word_embeddings")
        return outside | {"text_config": told, "tie_word_embeddings": tied}

    folder = copied(fields=fields, weights=lambda w: below_text(pack(w) if packed else w))
    same(read(folder), read(folder_of("qwen3.5 moe")))


@pytest.mark.parametrize("with_head", [False, True])
def test_tied_embeddings_stay_one_parameter(copied, folder_of, with_head):
    """Catches a head that is a copy, or one that is asked for though the embedding is it."""
    kind = "qwen3.5"
    folder = folder_of(kind, tied=True)
    if with_head:  # some folders hold it all the same
        folder = copied(
            kind,
            tied=True,
            weights=lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()},
        )
    model = read(folder)
    assert model.head.weight is model.embedding.weight
    close(ours(model, TOKENS), says(oracle(kind, tied=True), TOKENS))


def test_fields_that_are_missing_are_those_of_transformers(copied):
    """Catches defaults of our own, or of other models, for what a config.json leaves out."""
    plain = Qwen3_5MoeTextConfig(
        **{**SIZES, **ROUTED, "rope_parameters": None, "layer_types": None}
    )
    optional = ("rope_parameters", "layer_types", "rms_norm_eps", "linear_conv_kernel_dim")
    told = {n: value for n, value in plain.to_dict().items() if n not in optional}
    assert QwenMoeConfig.from_hf(told) == QwenMoeConfig.from_hf(plain)


def test_older_fields_say_the_same(copied, folder_of):
    """Catches rotary fields and an attention interval, as Qwen3-Next was published, passed over."""

    def older(told: dict) -> dict:
        rope = told.pop("rope_parameters")
        del told["layer_types"]
        told["full_attention_interval"] = 2
        return told | {k: rope[k] for k in ("rope_theta", "partial_rotary_factor")}

    expected = read(folder_of("qwen3-next"))
    same(read(copied("qwen3-next", fields=older)), expected)
    assert expected.config.kinds == (LINEAR, FULL, LINEAR)


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.bfloat16, torch.float64), (torch.float32, torch.bfloat16)]
)
def test_numbers_are_converted_on_the_way(copied, folder_of, stored, wanted):
    """Catches a dtype that is the file's, or rounding in between."""
    folder = copied(weights=lambda w: {n: x.to(stored) for n, x in w.items()})
    expected = read(folder_of("qwen3.5 moe")).to(stored).to(wanted)
    same(read(folder, wanted), expected)


# The config


def test_the_presets_fields_are_the_published_ones():
    """Catches a size that went wrong on the way, in either direction."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    told = Qwen3_5MoeTextConfig(rope_parameters=rope, max_position_embeddings=262144)
    preset = QwenMoeConfig.qwen35_35b_a3b()
    expected = replace(preset, layer_types=preset.kinds)
    assert QwenMoeConfig.from_hf(told) == expected
    assert QwenMoeConfig.from_hf(told.to_dict()) == expected
    whole = Qwen3_5MoeConfig(text_config=told.to_dict(), tie_word_embeddings=True)
    assert QwenMoeConfig.from_hf(whole) == replace(expected, tie_word_embeddings=True)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_of_transformers_are_those_of_its_folders(folder_of, kind):
    """Catches `from_hf` and `load_target` that read another model from one config."""
    config = QwenMoeConfig.from_hf(oracle(kind).config)
    assert config == read(folder_of(kind)).config
    assert config.norm_topk_prob == (kind != "qwen3-next, raw weights")
    assert config.num_experts == (0 if kind == "qwen3.5" else 5)


REFUSED = [
    ({"model_type": "qwen3_6"}, "model_type='qwen3_6'; expected one of .*qwen3_5_moe"),
    ({"head_dim": None}, r"lacks \['head_dim'\]"),
    ({"num_experts": None}, r"lacks \['num_experts'\]"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'; expected 'silu'"),
    ({"attention_bias": True}, "attention_bias=True; expected False"),
    ({"attn_output_gate": False}, "attn_output_gate=False; expected True"),
    ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]; expected \[\]"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step=2; expected 1"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.*; expected None"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters='yarn'; expected 'default'"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling='linear'; expected 'default'"),
    ({"partial_rotary_factor": 1.5, "rope_parameters": {}}, "partial_rotary_factor: .* got 1.5"),
    ({"layer_types": [FULL, LINEAR]}, "layer_types: expected 40 of .*, got"),
    ({"layer_types": ["sliding_attention"] * 40}, "layer_types: .* got .*sliding"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0"),
    ({"hidden_size": "wide"}, "cannot be read: .*not supported"),
    ({"num_experts_per_tok": 300}, "num_experts: .* got 256"),
]


def huge(**changes) -> dict:
    """Fields of the real 35B-A3B: a model that does not fit into this machine's memory."""
    return Qwen3_5MoeTextConfig().to_dict() | changes


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_before_any_weight_is_read(tmp_path, changes, message):
    """Catches a model that is built first and found wrong later, or never."""
    (tmp_path / "config.json").write_text(json.dumps(huge(**changes)))
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path)  # there are no weights to read
    if "model_type" not in changes:
        with pytest.raises(ValueError, match=message):
            QwenMoeConfig.from_hf(huge(**changes))


def test_a_quantized_multimodal_folder_is_refused(tmp_path):
    """Catches the one field that stands outside `text_config`."""
    fields = {"model_type": "qwen3_5_moe", "text_config": huge(), "quantization_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="quantization_config"):
        load_target(tmp_path)


# Weights that do not fit


def change(name: str, weight: Tensor | None) -> Callable[[dict], dict]:
    def changed(weights: dict) -> dict:
        kept = {n: w for n, w in weights.items() if n != name}
        return kept if weight is None else kept | {name: weight}

    return changed


@pytest.mark.parametrize(
    ("kind", "name", "weight", "message"),
    [
        ("qwen3.5", "model.norm.weight", None, r"missing: \['model.norm.weight'\]"),
        ("qwen3.5 moe", "lm_head.weight", None, r"missing: \['lm_head.weight'\]"),
        (
            "qwen3-next",
            "model.layers.0.linear_attn.in_proj_ba.weight",
            None,
            r"missing: \['model.layers.0.linear_attn.in_proj_ba.weight'\]$",
        ),
        (
            "qwen3.5 moe",
            "model.layers.1.mlp.experts.4.up_proj.weight",
            None,
            r"missing: \['model.layers.1.mlp.experts.4.up_proj.weight'\]$",
        ),
        (
            "qwen3.5",
            "model.layers.0.linear_attn.conv1d.bias",
            torch.ones(8),
            r"unexpected: \['model.layers.0.linear_attn.conv1d.bias'\]$",
        ),
        (
            "qwen3.5",
            "model.layers.1.self_attn.q_proj.weight",
            torch.ones(64, 32),
            r"of another shape: \['model.layers.1.self_attn.q_proj.weight'\]$",
        ),
        (
            "qwen3.5",
            "model.norm.weight",
            torch.ones(32, dtype=torch.int8),
            r"of another kind of number: \['model.norm.weight'\]$",
        ),
    ],
)
def test_a_weight_that_does_not_fit_is_named(copied, kind, name, weight, message):
    """Catches a model that is left with whatever was in memory, or broadcast into."""
    folder = copied(kind, weights=change(name, weight))
    with pytest.raises(ValueError, match=f"do not fit its config; {message}"):
        load_target(folder)


def test_weights_are_checked_before_memory_is_asked_for(copied):
    """Catches a huge model that is allocated for a folder that cannot fill it."""
    with pytest.raises(ValueError, match=r"missing: .* and \d+ more; .*of another shape"):
        load_target(copied(fields=lambda told: huge()))


def test_an_absent_shard_is_named(tmp_path):
    """Catches a folder half copied."""
    oracle("qwen3.5").save_pretrained(tmp_path, max_shard_size="20KB")
    name = sorted(path.name for path in tmp_path.glob("*.safetensors"))[1]
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"folder: expected {name} in .*, found no such file"):
        load_target(tmp_path)


def test_a_shard_that_is_cut_off_is_named(tmp_path):
    """Catches an error of another library in its own words."""
    oracle("qwen3.5").save_pretrained(tmp_path, max_shard_size="20KB")
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"folder: .*{path.name} cannot be read"):
        load_target(tmp_path)


def test_an_index_that_leaves_the_folder_is_refused(copied):
    """Catches files read from somewhere else."""
    folder = copied()
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="expected safetensors beside"):
        load_target(folder)


# Our own folders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written_is_read_here_and_by_transformers(tmp_path, folder_of, kind, tied):
    """Catches a layout that only this library understands."""
    written = read(folder_of(kind, tied))
    save_qwen_moe(written, tmp_path, metadata={"steps": 3})
    same(read(tmp_path), written)
    assert json.loads((tmp_path / "config.json").read_text())["training"] == {"steps": 3}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, experts_implementation="eager"
    )
    again, info = loaded
    assert not any(info.values()), info
    close(says(again, TOKENS), says(oracle(kind, tied), TOKENS))


def test_a_trained_model_is_written_as_it_is(tmp_path):
    """Catches gradients in the way, and a dtype that is not the one asked for."""
    model = small_hybrid(3).requires_grad_(True)
    save_qwen_moe(model, tmp_path)
    expected = model.requires_grad_(False)
    loaded = read(tmp_path, torch.float64)
    for name, weight in expected.state_dict().items():
        assert loaded.state_dict()[name].equal(weight), name
    kept = {"layer_types": expected.config.kinds, "intermediate_size": 1}  # it has no such MLP
    assert loaded.config == replace(expected.config, **kept)
    save_qwen_moe(model, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_not_held_twice(tmp_path):
    """Catches a state dict beside the model, and files that stay open; both come to twice its size.

    A process of its own loads 150 MB, in pieces of 4 MB.
    """
    write(tmp_path, config_of_size(1e8, 4), torch.float32, packed=True, n_shards=1)
    risen, size = measure(tmp_path, torch.float32, piece=2**22)
    assert size > 1.4e8
    assert size < risen < 1.2 * size
