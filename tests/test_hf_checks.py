"""Models of `transformers` that cannot be served, and the reasons they are refused with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForCausalLM,
)

import specdec.hf.checks
from specdec.hf import HFModel
from specdec.hf.checks import layer_sizes, n_positions
from tests.hf_models import CONFIGS, DENSE, MAX, SIZES, TOKENS, V, built

LAYER: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": MAX, **TOKENS}
WHISPER: dict[str, Any] = {
    "decoder_attention_heads": 2,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    **TOKENS,
}


def small(config: type, **changes: Any) -> Any:
    return config(**SIZES, **DENSE, **changes)


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(small(LlamaConfig, **changes)).eval()


def with_field(name: str, value: Any) -> PreTrainedModel:
    model = llama()
    setattr(model.config, name, value)
    return model


def in_bytes() -> PreTrainedModel:
    model: Any = llama()
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = weight
    return model


def of_torch_ao() -> PreTrainedModel:
    class Linear(torch.nn.Linear):
        pass

    Linear.__module__ = "torch.ao.nn.quantized.dynamic.modules.linear"
    model: Any = llama()
    model.model.layers[0].mlp.up_proj = Linear(2, 2)
    return model


def gpt2(**changes: Any) -> PreTrainedModel:
    config = GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=2, **TOKENS, **changes)
    return GPT2LMHeadModel(config)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no transformer": (lambda: torch.nn.Linear(2, 2), r"model: expected a causal .* got Linear"),
    "no head": (lambda: BertModel(small(BertConfig)), r"model: expected a causal .* got BertModel"),
    "encoder and decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=V, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        ),
        r"model: expected a decoder, T5ForConditionalGeneration is an encoder and a decoder",
    ),
    "cross-attention": (
        lambda: gpt2(add_cross_attention=True),
        r"model: GPT2LMHeadModel has cross-attention",
    ),
    "looks ahead": (
        lambda: with_field("is_causal", False),
        r"model: LlamaForCausalLM looks ahead",
    ),
    "looks ahead, as Gemma says it": (
        lambda: with_field("use_bidirectional_attention", True),
        r"model: LlamaForCausalLM looks ahead",
    ),
    "quantized": (
        lambda: with_field("quantization_config", {"quant_method": "gptq"}),
        r"model: LlamaForCausalLM is quantized \(config.quantization_config\); .*dequantize\(\)",
    ),
    "quantized weights": (
        in_bytes,
        r"model: model.layers.1.mlp.up_proj.weight of Llama.* is quantized, torch.uint8",
    ),
    "weights of torch.ao": (
        of_torch_ao,
        r"model: model.layers.0.mlp.up_proj of Llama.* a quantized Linear of torch.ao",
    ),
    "other recurrent layers": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=V, hidden_size=8, num_hidden_layers=1)),
        r"model: MambaForCausalLM has recurrent layers .*cannot be rolled back",
    ),
    "unknown layers": (
        lambda: with_field("layer_types", ["indexed_attention"] * 3),
        r"model: cannot take over the cache of Llama.*, which has \['DynamicIndexedLayer'\]",
    ),
    "no final norm": (
        lambda: BartForCausalLM(
            BartConfig(vocab_size=V, d_model=8, decoder_layers=1, decoder_attention_heads=2)
        ),
        r"model: expected a final norm in BartDecoderWrapper, one of norm, .*found \['decoder'\]",
    ),
    "no last position": (
        lambda: WhisperForCausalLM(
            WhisperConfig(vocab_size=V, d_model=8, decoder_layers=1, **WHISPER)
        ),
        r"model: the config of WhisperForCausalLM does not say \['max_position_embeddings'\]",
    ),
    "ALiBi of Bloom": (
        lambda: BloomForCausalLM(
            BloomConfig(vocab_size=V, hidden_size=8, n_layer=1, n_head=2, **TOKENS)
        ),
        r"model: cannot serve BloomForCausalLM: ALiBi",
    ),
    "ALiBi of MPT": (
        lambda: MptForCausalLM(MptConfig(vocab_size=V, d_model=8, n_layers=1, n_heads=2)),
        r"model: cannot serve MptForCausalLM: ALiBi",
    ),
    "ALiBi of Falcon": (
        lambda: FalconForCausalLM(
            FalconConfig(vocab_size=V, hidden_size=32, num_attention_heads=2, alibi=True, **LAYER)
        ),
        r"model: FalconForCausalLM has ALiBi \(config.alibi\)",
    ),
    "slots of GPT-Neo": (
        lambda: GPTNeoForCausalLM(
            GPTNeoConfig(
                vocab_size=V,
                hidden_size=32,
                num_layers=2,
                num_heads=2,
                attention_types=[[["global", "local"], 1]],
                **TOKENS,
            )
        ),
        r"model: GPTNeoForCausalLM has local attention",
    ),
    "a type of layer that has no cache": (
        lambda: with_field("layer_types", ["unheard of", "full_attention", "full_attention"]),
        r"model: cannot take over the cache of LlamaForCausalLM, which has 'unheard of'",
    ),
    "an attention that ignores masks": (
        lambda: with_field("_attn_implementation", "flex_attention"),
        r"attn_implementation: expected one of sdpa, eager, .* got flex_attention; .*set_attn",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_it_cannot_serve(kind: str) -> None:
    """Would catch a model that is wrapped and then decodes something else."""
    made, message = MODELS[kind]
    with pytest.raises(ValueError, match=message):
        HFModel(made())


def test_a_model_in_training_mode() -> None:
    """Would catch dropout, with which two plain decodings differ."""
    with pytest.raises(ValueError, match=r"model: expected GPT2LMHeadModel in evaluation mode"):
        HFModel(built("gpt2").train())


def test_positions_counted_by_the_model_itself() -> None:
    """Would catch a model that takes no positions and is handed some, to no effect."""

    class NoPositions(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, cache=None):  # type: ignore[override]
            return super().forward(input_ids, attention_mask, cache=cache)

    with pytest.raises(ValueError, match=r"NoPositions takes no \['position_ids'\]: it counts"):
        HFModel(NoPositions(small(LlamaConfig)))


def test_an_attention_switched_later() -> None:
    """Would catch a mask handed to an attention that ignores it, after the model was wrapped."""
    model = HFModel(llama())
    kept, tokens = model.new_cache(1, 8), torch.tensor([[3, 4]])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attn_implementation: expected .* flash_attention_2"):
        model(tokens, kept)
    assert kept.n_pending == 0
    model.config._attn_implementation = "eager"
    eager = model(tokens, kept).logits
    assert eager is not None and kept.n_pending == 2


def test_long_rope_is_served_where_its_angles_hold() -> None:
    """Would catch angles that change for all rows when one row's draft looks beyond a length."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    model = HFModel(llama(rope_parameters=rope))
    assert model.max_position_embeddings == 32
    with pytest.raises(ValueError, match=r"max_length: .*=32, got 1, 33"):
        model.new_cache(1, 33)
    nested = PretrainedConfig(
        max_position_embeddings=MAX,
        rope_parameters={"full_attention": rope, "sliding_attention": {"rope_type": "default"}},
    )
    assert n_positions(nested) == 32
    assert HFModel(llama()).max_position_embeddings == MAX


def test_windows_as_configs_say_them() -> None:
    """Would catch a window that is not one, or one that is overlooked."""
    sizes = {name: layer_sizes(CONFIGS[name]()) for name in ("llama", "mistral", "gpt_oss")}
    assert sizes == {
        "llama": {"full_attention": None},
        "mistral": {"sliding_attention": 3},
        "gpt_oss": {"sliding_attention": 3, "full_attention": None},
    }
    chunked = PretrainedConfig(attention_chunk_size=4)
    assert layer_sizes(chunked) == {"chunked_attention": 4}


@pytest.mark.parametrize("version", ["4.57.1", "5.7.0", "5.23.9", "unknown"])
def test_versions_it_cannot_serve(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Would catch versions compared as text, and an old one that verifies wrongly in silence."""
    model = llama()
    monkeypatch.setattr(specdec.hf.checks, "version", lambda: version)
    with pytest.raises(ValueError, match=rf"transformers: expected at least 5.24, got {version}"):
        HFModel(model)
    for enough in ("5.24.0", "5.100.0.dev0", "6.0"):
        monkeypatch.setattr(specdec.hf.checks, "version", lambda enough=enough: enough)
        HFModel(model)


def test_a_multimodal_model() -> None:
    """Would catch an answer about missing fields where another class is what is wanted."""
    model = llama()
    model.config = PretrainedConfig(text_config=LlamaConfig(), num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"Llama.* is multimodal \(config.text_config\)"):
        HFModel(model)


def test_hybrids_and_their_names() -> None:
    """Would catch a hybrid taken for a model that takes trees."""
    model = HFModel(built("qwen3_5"))
    assert type(model.new_cache(1, 4)).__name__ == "RowsCache"
    other = Qwen3_5TextConfig(**SIZES, **DENSE)
    other.model_type = "qwen9"
    theirs: Any = built("qwen3_5")
    theirs.config = other
    with pytest.raises(ValueError, match=r"has recurrent layers .*: qwen3_next, qwen3_5_text"):
        HFModel(theirs)
