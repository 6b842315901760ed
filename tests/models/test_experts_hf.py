"""Our experts inside models of `transformers`: same tokens, and everything as before afterwards."""

import pytest
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec.models.experts import WAYS
from specdec.models.experts_hf import transformers_experts

HERE = ("loop", "grouped")
PROMPTS = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(0))


def small(**changes: object) -> Qwen3_5MoeForCausalLM:
    """Two layers, one of each kind; weights large enough that experts matter for the tokens."""
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        },
        experts_implementation="eager",
    )
    model = Qwen3_5MoeForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(0.0, 0.3)  # type: ignore[union-attr]
            layer.mlp.experts.gate_up_proj.normal_(0.0, 0.3)  # type: ignore[union-attr]
            layer.mlp.experts.down_proj.normal_(0.0, 0.3)  # type: ignore[union-attr]
    return model


def greedy(model: Qwen3_5MoeForCausalLM) -> Tensor:
    return model.generate(
        PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=12, do_sample=False
    )


@pytest.mark.parametrize("experts", HERE)
def test_the_same_tokens_and_logits(monkeypatch, experts) -> None:
    """Would catch weights handed over in another layout, and a context that changes nothing."""
    model = small()
    way, calls = WAYS[experts], []

    def counted(*arguments: Tensor) -> Tensor:
        calls.append(len(arguments[0]))
        return way(*arguments)

    monkeypatch.setitem(WAYS, experts, counted)
    with torch.no_grad():
        want, tokens = model(PROMPTS).logits, greedy(model)
        assert not calls
        with transformers_experts(model, experts):
            torch.testing.assert_close(model(PROMPTS).logits, want, rtol=1e-4, atol=1e-4)
            assert calls == [14, 14]  # 2 x 7 tokens in each layer
            assert torch.equal(greedy(model), tokens)
        n_calls = len(calls)
        assert torch.equal(model(PROMPTS).logits, want) and len(calls) == n_calls


def test_a_wrong_function_turns_red(monkeypatch) -> None:
    """The comparison above must notice experts that are computed wrongly."""
    model = small()
    monkeypatch.setitem(WAYS, "loop", lambda x, i, w, g, d: WAYS["grouped"](x, i, w.flip(1), g, d))
    with torch.no_grad():
        want = model(PROMPTS).logits
        with transformers_experts(model, "loop"), pytest.raises(AssertionError):
            torch.testing.assert_close(model(PROMPTS).logits, want, rtol=1e-4, atol=1e-4)


def test_as_before_afterwards() -> None:
    """Would catch a name or table entry that outlives its context, nested or after an error."""
    model, other = small(), small()
    table, before = set(ALL_EXPERTS_FUNCTIONS), model.get_experts_implementation()
    assert before == {"": "eager"}
    with transformers_experts(model):
        outer = model.get_experts_implementation()
        with transformers_experts(other, "loop"), transformers_experts(model, "loop"):
            assert len(set(ALL_EXPERTS_FUNCTIONS)) == len(table) + 3
            assert model.get_experts_implementation() != outer
        assert model.get_experts_implementation() == outer
        with torch.no_grad():
            model(PROMPTS)
    assert model.get_experts_implementation() == before
    with pytest.raises(RuntimeError, match="boom"), transformers_experts(model):
        raise RuntimeError("boom")
    assert model.get_experts_implementation() == other.get_experts_implementation() == before
    assert set(ALL_EXPERTS_FUNCTIONS) == table


def test_models_it_cannot_serve() -> None:
    """Would catch biases, interleaved gates or another activation computed as if they were ours."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}  # fmt: skip
    gpt_oss = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=2, pad_token_id=None))
    for model, message in (
        (LlamaForCausalLM(LlamaConfig(**sizes)), r"model: expected routed experts, Llama.* none"),
        (gpt_oss, r"model: .* GptOssExperts has has_bias=True, is_transposed=True"),
        (small(hidden_act="relu"), r"model: .* another activation or gate"),
    ):
        with pytest.raises(ValueError, match=message), transformers_experts(model):
            pass
    unknown = pytest.raises(ValueError, match=r"experts: expected one of .* got 'fast'")
    with unknown, transformers_experts(small(), "fast"):
        pass
