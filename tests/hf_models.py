"""Tiny random models of `transformers` in float64, for tests.

Norms, rotary angles, softmaxes and linear attention of `transformers` compute in float32 whatever a
model's dtype is. Here their modules are compiled a second time from their own source with float64
in its place, so that equality can be asked for to 1e-10.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from specdec.hf import HFModel

V, MAX = 40, 96
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": MAX,
    **TOKENS,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
FEW: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
MLA: dict[str, Any] = {  # keys of 12, values of 6
    "num_key_value_heads": 2,
    "head_dim": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "experts_implementation": "eager",
}
DENSE: dict[str, Any] = {"intermediate_size": 48}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **SIZES, **LINEAR, **EXPERTS, experts_implementation="eager"
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZES, **LINEAR, **DENSE),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES, **LINEAR, **EXPERTS, **DENSE, experts_implementation="eager"
    ),
    "llama": lambda: LlamaConfig(**SIZES, **DENSE),
    "qwen3": lambda: Qwen3Config(**SIZES, **DENSE),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, **DENSE, sliding_window=3, layer_types=MIXED, final_logit_softcapping=3.0
    ),
    "gemma2": lambda: Gemma2Config(**SIZES, **DENSE, sliding_window=3, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, **DENSE, **FEW, sliding_window=3, layer_types=MIXED, attn_implementation="eager"
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, **DENSE, **FEW),
    "mistral": lambda: MistralConfig(**SIZES, **DENSE, sliding_window=3),
    "gpt2": lambda: GPT2Config(
        vocab_size=V, n_embd=32, n_layer=3, n_head=2, n_positions=MAX, **TOKENS
    ),
    "phi": lambda: PhiConfig(**{**SIZES, **DENSE, "num_key_value_heads": 2}),
    "opt": lambda: OPTConfig(**{**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "cohere": lambda: CohereConfig(**SIZES, **DENSE, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**SIZES, **DENSE, logits_scaling=2.0),
    "nanochat": lambda: NanoChatConfig(**SIZES, **DENSE),
    "deepseek_v3": lambda: DeepseekV3Config(**{**SIZES, **DENSE, **MLA}),
}
CLASSES = {
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "phi": "PhiForCausalLM",
    "opt": "OPTForCausalLM",
    "cohere": "CohereForCausalLM",
    "granite": "GraniteForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
HYBRIDS = ["qwen3_5_moe", "qwen3_5", "qwen3_next"]
ATTENTION = [name for name in CONFIGS if name not in HYBRIDS]


@cache
def in_float64(name: str) -> ModuleType:
    """The module of a model, compiled anew with float64 wherever it says float32.

    Under a name of its own: `transformers` keeps by the name of a class what can be recorded of it
    (and asks `inspect`, which wants to find the module).
    """
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    source = inspect.getsource(module)
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = source.replace("torch.get_default_dtype()", "torch.float64")
    copy = ModuleType(f"{module.__name__}_in_float64")
    copy.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    sys.modules[copy.__name__] = copy
    exec(compile(source, str(module.__file__), "exec"), copy.__dict__)
    return copy


def built(name: str, *, as_it_is: bool = False, attention: str | None = None) -> PreTrainedModel:
    """A random model; weights larger than they are drawn, so that every part counts."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    made_in = module if as_it_is else in_float64(name)
    config = CONFIGS[name]()
    if attention is not None:
        config._attn_implementation = attention
    model = getattr(made_in, CLASSES[name])(config)
    model = model.float() if as_it_is else model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1 or key.endswith("sinks"):
                weight.normal_(0.0, 0.25, generator=generator)
    return model.eval().requires_grad_(False)


@cache
def served(name: str) -> HFModel:
    return HFModel(built(name))
