"""The dense decoder against Llama and Qwen3 of `transformers`, on small random weights in float64.

Two oracles. `exact`: its RMSNorm and rotary positions, which compute in float32, are replaced by
float64 ones, and everything must agree to 1e-9. `original`: untouched, to float32's own rounding.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from specdec.cache import View
from specdec.models import Transformer, TransformerConfig
from specdec.models.layers import for_groups, grouped_attention, rotary_angles
from specdec.protocol import FINAL, Output
from tests.helpers import EXAMPLE_PARENTS, along_paths, assert_same, tiny_transformer

N_LAYERS, VOCAB, THETA, EPS = 3, 17, 200.0, 1e-3  # an eps large enough to be missed
TAPS = (0, 1, 2, 3, FINAL)
TOKENS = torch.randint(VOCAB, (3, 14), generator=torch.Generator().manual_seed(0))


def converted(theirs: Mapping[str, Tensor], n_layers: int, tied: bool) -> dict[str, Tensor]:
    """Weights by the names of `transformers`, joined and renamed to those of `Transformer`."""
    embedding = theirs["model.embed_tokens.weight"]
    ours = {
        "embedding.weight": embedding,
        "norm.weight": theirs["model.norm.weight"],
        "head.weight": embedding if tied else theirs["lm_head.weight"],
    }
    renamed = {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
        "norm_attention": ("input_layernorm",),
        "norm_mlp": ("post_attention_layernorm",),
    }
    for i in range(n_layers):
        for name, sources in renamed.items():
            names = [f"model.layers.{i}.{source}.weight" for source in sources]
            if names[0] in theirs:
                joined = torch.cat([theirs[each] for each in names])
                ours[f"blocks.{i}.{name}.weight"] = joined
    return ours


class Float64Rotary(nn.Module):
    """The rotary positions of RoFormer, arXiv:2104.09864, eq. 15, in float64."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.frequency = THETA ** (-torch.arange(0, head_dim, 2).double() / head_dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids.double().unsqueeze(-1) * self.frequency
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def in_float64(oracle: nn.Module, head_dim: int) -> nn.Module:
    for parent in list(oracle.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=EPS, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    oracle.model.rotary_emb = Float64Rotary(head_dim)
    return oracle


@dataclass(frozen=True)
class Pair:
    """A `Transformer` and the two oracles that hold the same weights."""

    ours: Transformer
    exact: Callable[[Tensor], Output]
    original: Callable[[Tensor], Output]


def oracle_call(oracle: nn.Module) -> Callable[[Tensor], Output]:
    """All taps of the oracle: `hidden_states[i]` is tap i for i < L and FINAL for i = L.

    Tap L, the input of the final norm, is in no `hidden_states`.
    """
    before_norm: list[Tensor] = []
    oracle.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))

    @torch.no_grad()
    def call(tokens: Tensor) -> Output:
        output = oracle(tokens, output_hidden_states=True, use_cache=False)
        *states, final = output.hidden_states
        states = [*states, before_norm.pop()]
        return Output(output.logits, dict(enumerate(states)) | {FINAL: final})

    return call


def build(kind: str) -> Pair:
    is_qwen, tied = kind == "qwen3", kind == "llama, tied"
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1 if is_qwen else 2,
        "head_dim": 8 if is_qwen else 6,  # Qwen3's is not hidden_size / num_attention_heads
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    make_config, make = (
        (Qwen3Config, Qwen3ForCausalLM) if is_qwen else (LlamaConfig, LlamaForCausalLM)
    )
    theirs = make_config(**shape, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    oracles = [make(theirs).double().eval() for _ in range(2)]
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in oracles[0].parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3, generator=draw)
    oracles[1].load_state_dict(oracles[0].state_dict())
    ours = Transformer(TransformerConfig(**shape, rope_theta=THETA, qk_norm=is_qwen)).double()
    ours.load_state_dict(converted(oracles[0].state_dict(), N_LAYERS, tied))
    exact = in_float64(oracles[0], shape["head_dim"])
    return Pair(ours.eval().requires_grad_(False), oracle_call(exact), oracle_call(oracles[1]))


@pytest.fixture(scope="module", params=["llama", "llama, tied", "qwen3"])
def pair(request) -> Pair:
    return build(request.param)


def assert_exact(actual: Output, expected: Output) -> None:
    assert_same(actual, expected, rtol=1e-9, atol=1e-11)


def test_a_plain_pass_is_the_oracles(pair):
    """Catches any slip in the block: halves of a head, order of q k v, gate and up, eps, a gain."""
    assert_exact(pair.ours(TOKENS, taps=TAPS), pair.exact(TOKENS))


def test_a_plain_pass_is_the_untouched_oracles_to_its_rounding(pair):
    """Catches an error that the replaced norm and rotary positions share with ours."""
    ours, theirs = pair.ours(TOKENS, taps=TAPS), pair.original(TOKENS)
    for tap in TAPS:
        difference = (ours.hidden[tap] - theirs.hidden[tap]).norm() / theirs.hidden[tap].norm()
        assert difference < 1e-6
    assert (ours.logits - theirs.logits).norm() / theirs.logits.norm() < 1e-6


def test_a_cached_chain_is_the_oracles_plain_pass(pair):
    """Token by token. Catches positions that start anew with every pass."""
    cache, expected = pair.ours.new_cache(3, TOKENS.shape[1]), pair.exact(TOKENS)
    for t in range(TOKENS.shape[1]):
        actual = pair.ours(TOKENS[:, t : t + 1], cache, taps=TAPS)
        here = {tap: states[:, t : t + 1] for tap, states in expected.hidden.items()}
        assert_exact(actual, Output(expected.logits[:, t : t + 1], here))
        cache.commit(torch.zeros(3, 1, dtype=torch.long), torch.ones(3, dtype=torch.long))


def test_ragged_prompts_in_chunks_then_a_tree_then_a_chain(pair):
    """Prompts of 9, 4 and 1 tokens in chunks of 4; the example tree; a path; two more tokens.

    Catches what the cache's own law cannot see: a plain pass wrong in the same way as a cached one.
    """
    lengths = torch.tensor([9, 4, 1])
    cache = pair.ours.new_cache(3, 16)
    for start in range(0, 9, 4):
        piece = TOKENS[:, start : min(start + 4, 9)]
        pair.ours(piece, cache, logits=False)
        whole = torch.arange(piece.shape[1]).expand(3, -1)
        cache.commit(whole, (lengths - start).clamp(0, piece.shape[1]))
    committed = [TOKENS[b, :n].tolist() for b, n in enumerate(lengths.tolist())]

    nodes = (TOKENS[:, :7] + 1) % VOCAB
    tree = torch.tensor([EXAMPLE_PARENTS, [-1, 0, 1, 1, 0, -1, 5], [-1] * 7])
    actual = pair.ours(nodes, cache, parents=tree, taps=TAPS)
    assert_exact(actual, along_paths(pair.exact, committed, nodes, tree))

    cache.commit(torch.tensor([[1, 4, 6], [0, 1, 3], [5, 0, 0]]), torch.tensor([3, 2, 1]))
    for b, path in enumerate([[1, 4, 6], [0, 1], [5]]):
        committed[b] += nodes[b, path].tolist()
    new, chain = TOKENS[:, -2:], torch.tensor([[-1, 0]] * 3)
    actual = pair.ours(new, cache, taps=TAPS)
    assert_exact(actual, along_paths(pair.exact, committed, new, chain))


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_exit_layer_reads_an_early_block_through_norm_and_head(pair, exit_layer):
    """Catches an exit one block off, or one that skips the final norm."""
    actual = pair.ours(TOKENS, taps=(0, exit_layer, FINAL), exit_layer=exit_layer)
    states = pair.exact(TOKENS).hidden
    final = pair.ours.norm(states[exit_layer])
    hidden = {0: states[0], exit_layer: states[exit_layer], FINAL: final}
    assert_exact(actual, Output(pair.ours.head(final), hidden))


def test_logits_can_be_left_out():
    """Catches a prefill that pays for the head after all, and taps lost with the logits."""
    model = tiny_transformer()
    output = model(TOKENS % 13, taps=(2, FINAL), logits=False)
    assert output.logits is None
    whole = model(TOKENS % 13, taps=(2, FINAL))
    assert all(torch.equal(output.hidden[tap], whole.hidden[tap]) for tap in (2, FINAL))


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("masked", ["no mask", "one mask", "a mask per row"])
def test_grouped_attention_is_attention_with_repeated_keys(group, masked):
    """Catches queries of a group sent to the wrong key head, and a mask tiled on a wrong axis."""
    draw = torch.Generator().manual_seed(group)
    batch, n, slots, heads, dim = 2, 3, 5, 4, 6
    q = torch.randn(batch, n, heads, dim, generator=draw, dtype=torch.float64)
    keys, values = torch.randn(
        2, batch, heads // group, slots, dim, generator=draw, dtype=torch.float64
    )
    mask = None
    if masked != "no mask":
        rows = 1 if masked == "one mask" else batch
        mask = torch.where(torch.rand(rows, 1, n, slots, generator=draw) < 0.6, 0.0, -torch.inf)
        mask = mask.double().index_fill(3, torch.tensor([0]), 0.0)  # a query sees something
    repeated_keys = keys.repeat_interleave(group, dim=1)
    repeated_values = values.repeat_interleave(group, dim=1)
    scores = q.transpose(1, 2) @ repeated_keys.transpose(2, 3) / dim**0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    expected = (weights @ repeated_values).transpose(1, 2).reshape(batch, n, heads * dim)
    view = for_groups(View(0, slots, torch.arange(n).unsqueeze(0), mask, None), group)
    torch.testing.assert_close(grouped_attention(q, keys, values, view.mask), expected)


def test_rotary_angles_of_a_far_position_in_low_precision():
    """Catches angles computed in bfloat16, where position 30,001 does not exist."""
    far = torch.tensor([30_001])
    exact = rotary_angles(far, 8, 10_000.0, torch.float64)
    cos, sin = exact[0, :, 0]
    assert cos[[0, 4]].tolist() == pytest.approx([math.cos(30_001)] * 2, abs=1e-10)
    assert sin[[0, 4]].tolist() == pytest.approx([-math.sin(30_001), math.sin(30_001)], abs=1e-10)
    low = rotary_angles(far, 8, 10_000.0, torch.bfloat16)
    assert low.dtype == torch.bfloat16
    assert (low.double() - exact).abs().max() < 0.01


def test_a_plain_pass_trains():
    """Catches a parameter cut off from the loss, and a gradient that is not finite."""
    model = tiny_transformer(qk_norm=True, tie_word_embeddings=False).requires_grad_(True)
    output = model(TOKENS % 13)
    nn.functional.cross_entropy(output.logits.flatten(0, 1), TOKENS.flatten() % 13).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_a_cached_pass_works_under_grad_mode():
    """Catches an in-place write into the cache that autograd refuses, and a cache with a graph."""
    model = tiny_transformer().requires_grad_(True)
    cache = model.new_cache(2, 4)
    assert torch.is_grad_enabled()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for parents in (None, torch.tensor([[-1, 0, 0], [-1, -1, 1]])):
        model(tokens, cache, parents=parents)
    cache.commit(torch.arange(3).expand(2, -1), torch.tensor([3, 1]))
    actual = model(tokens, cache, parents=torch.tensor([[-1, 0, 1]] * 2))
    expected = along_paths(model, [[1, 2, 3], [4]], tokens, torch.tensor([[-1, 0, 1]] * 2))
    assert_same(actual, expected, atol=1e-10)
    assert not cache.stores[0].buffer.requires_grad


def test_fresh_weights_come_from_the_generator_alone():
    """Catches a draw from the global generator, gains that are not 1, and a head torn loose."""
    first, again, other = tiny_transformer(0), tiny_transformer(0), tiny_transformer(1)
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, torch.ones_like(a)) if a.ndim == 1 else not torch.equal(a, c), name
    assert first.head.weight is first.embedding.weight
    untied = tiny_transformer(tie_word_embeddings=False)
    assert not torch.equal(untied.head.weight, untied.embedding.weight)


SHAPE = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: expected at least 1, got 0"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1, got 0"),
        ({"intermediate_size": -4}, "intermediate_size: expected at least 1, got -4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected at least 1, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected at least 1, got 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: expected at least 1, got 0"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: expected a divisor .*\(4\), got 3"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads: expected a divisor .*\(4\), got 8"),
        ({"hidden_size": 18}, r"hidden_size: expected a multiple .*\(4\).*got 18"),
        ({"hidden_size": 12}, "head_dim: rotary positions need an even one, got 3"),
        ({"head_dim": 5}, "head_dim: rotary positions need an even one, got 5"),
    ],
)
def test_config_errors_name_the_field(change, message):
    """Catches a shape that fails later, in the middle of a product."""
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**(SHAPE | change))


def test_config_defaults():
    """Catches defaults of heads that contradict the Hugging Face ones."""
    config = TransformerConfig(**SHAPE)
    assert (config.n_kv_heads, config.head_size) == (4, 4)
    assert TransformerConfig(**SHAPE, head_dim=10).head_size == 10


FIVE = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": FIVE[0]}, r"tokens: expected int64 of shape \[B, N\].*of shape \[5\]"),
        ({"tokens": FIVE[:, :0]}, r"tokens: .*N >= 1, got torch\.int64 of shape \[2, 0\]"),
        ({"tokens": FIVE.int()}, r"tokens: expected int64.*torch\.int32"),
        ({"tokens": torch.zeros(1, 129, dtype=torch.long)}, r"tokens: 129 positions.* is 128"),
        ({"taps": (0, 4)}, r"taps: expected 0\.\.3 or FINAL \(-1\), got \[4\]"),
        ({"taps": (-2,)}, r"taps: .*got \[-2\]"),
        ({"exit_layer": 0}, r"exit_layer: expected 1\.\.2, got 0"),
        ({"exit_layer": 3}, r"exit_layer: expected 1\.\.2, got 3"),
        ({"parents": FIVE - 1}, "parents, resume: a pass without a cache is a plain causal one"),
        ({"resume": (1, torch.zeros(2, 1, 16))}, "parents, resume: a pass without a cache"),
    ],
)
def test_call_errors_name_the_argument(arguments, message):
    """Catches a check that is gone."""
    with pytest.raises(ValueError, match=message):
        tiny_transformer()(**({"tokens": FIVE} | arguments))


def test_call_errors_with_a_cache():
    """Catches a cache of other rows, and pending nodes that are resumed wrongly or not at all."""
    model, cache = tiny_transformer(), tiny_transformer().new_cache(2, 8)
    with pytest.raises(ValueError, match="cache: expected 1 rows and 3 layers, got 2 rows"):
        model(FIVE[:1], cache)
    states = model(FIVE, cache, taps=(1,), exit_layer=1).hidden[1]
    with pytest.raises(ValueError, match="cache: its pending nodes stop at block 1; resume"):
        model(FIVE, cache)
    with pytest.raises(ValueError, match="cache: its pending nodes stop at block 1; resume"):
        model(FIVE, cache, exit_layer=2)
    with pytest.raises(ValueError, match="resume: expected the 5 pending nodes at block 1, got 4"):
        model(FIVE, cache, resume=(1, states[:, :4]))
    with pytest.raises(ValueError, match=r"resume: .* at block 1, got 5 at block 2"):
        model(FIVE, cache, resume=(2, states))
    with pytest.raises(ValueError, match=r"taps: a pass resumed at block 1 .*got \[0, 1\]"):
        model(FIVE, cache, resume=(1, states), taps=(0, 1, 2, FINAL))
    assert cache.n_pending == 5
    model(FIVE, cache, resume=(1, states))
    with pytest.raises(ValueError, match="resume: expected the 5 pending nodes at block 3"):
        model(FIVE, cache, resume=(1, states))


def test_a_refused_pass_leaves_the_cache_as_it_was():
    """Catches phantom pending nodes behind an error: the next pass would hang below them."""
    model = tiny_transformer()
    cache = model.new_cache(1, 8)
    states = model(FIVE[:1, :2], cache, taps=(2,), exit_layer=2).hidden[2]
    for call, message in (
        (lambda: model(FIVE[:1], cache, resume=(2, states), exit_layer=1), "exit_layer: expected"),
        (lambda: model(FIVE[:1], cache, taps=(2,), exit_layer=1), "taps: expected 0..1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    cache.commit(FIVE[:1, :0], torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"parents: expected \[1, 2\], got \[1, 3\]"):
        model(FIVE[:1, :2], cache, parents=torch.tensor([[-1, 0, 1]]))
    with pytest.raises(IndexError):
        model(torch.tensor([[10_000]]), cache)
    with pytest.raises(ValueError, match="cache: expected one of new_cache, got object"):
        model(FIVE[:1], object())
    assert cache.n_pending == 0
