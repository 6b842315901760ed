"""`from_functional`: a model in the plain form (tokens, kv_cache) -> (logits, kv_cache).

`plain_form` writes the same network as `Transformer` out by hand, with the cache as a list.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.drafters import DraftModel, PromptLookup
from specdec.functional import from_functional
from specdec.generate import generate
from specdec.models import Transformer
from specdec.models.layers import rotary_angles, rotate
from tests.helpers import tiny_transformer

TARGET = tiny_transformer(2, tie_word_embeddings=False)


def near_target() -> Transformer:
    """The target with a noisy last norm: a draft model that is right now and then."""
    model = tiny_transformer(2, tie_word_embeddings=False)
    draw = torch.Generator().manual_seed(0)
    model.norm.weight += 0.2 * torch.randn(16, generator=draw, dtype=torch.float64)
    return model


DRAFT = near_target()
PROMPTS = [torch.tensor([1, 2, 3, 1, 2, 3, 1, 2]), torch.tensor([5]), torch.tensor([7, 7, 7, 7])]


def plain_form(model: Transformer):
    """The network of `model` in the plain form, for one row."""

    def fn(tokens: Tensor, kv_cache):
        kv_cache = [()] * model.n_layers if kv_cache is None else kv_cache
        n_old = kv_cache[0][0].shape[2] if kv_cache[0] else 0
        n_all, grown = n_old + tokens.shape[1], []
        rotary = rotary_angles(
            torch.arange(n_old, n_all), model.config.head_size, model.config.rope_theta, model.dtype
        ).unbind(1)
        sees = torch.ones(tokens.shape[1], n_all, dtype=torch.bool).tril(n_old)
        x = model.embedding(tokens)
        for block, old in zip(model.blocks, kv_cache, strict=True):
            a = block.attention
            qkv = a.qkv(block.norm_attention(x)).unflatten(-1, (-1, a.head_dim))
            q, k, v = qkv.split([a.n_heads, a.n_kv_heads, a.n_kv_heads], dim=2)
            new = (rotate(k, rotary).transpose(1, 2), v.transpose(1, 2))  # [1, H_kv, N, d]
            k, v = (torch.cat(pair, dim=2) for pair in zip(old, new, strict=True)) if old else new
            grown.append((k, v))
            q = rotate(q, rotary).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
            x = x + a.out(mixed.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm_mlp(x))
        return model.head(model.norm(x)), grown

    return fn


def functional(model: Transformer):
    return from_functional(
        plain_form(model),
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        dtype=model.dtype,
    )


def tokens_of(target, drafter=None) -> list[list[int]]:
    run = generate(target, PROMPTS, drafter, max_new_tokens=[20, 24, 9], prefill_chunk=3)
    return [sequence.tolist() for sequence in run.sequences]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens_of(TARGET)


@pytest.mark.parametrize(
    "drafter",
    [None, PromptLookup(), DraftModel(DRAFT, 3), DraftModel(functional(DRAFT), 3),
     DraftModel(functional(TARGET), 4)],
    ids=["plain", "prompt lookup", "draft model", "plain-form draft model", "itself"],
)  # fmt: skip
def test_generates_what_the_transformer_generates(drafter, expected):
    """Catches a row's cache cut at the wrong length, and rejected tokens left in it."""
    assert tokens_of(functional(TARGET), drafter) == expected


def test_a_plain_form_draft_model_accepts_what_its_twin_does():
    """Catches a cache that loses what was committed: the output stays right, the drafts get bad."""
    runs = [
        generate(TARGET, PROMPTS, DraftModel(model, 4), max_new_tokens=20)
        for model in (DRAFT, functional(DRAFT))
    ]
    accepted = torch.stack([r.n_accepted for r in runs[0].rounds])
    assert set(accepted.flatten().tolist()) == {0, 1, 2, 3, 4}
    for a, b in zip(*(run.rounds for run in runs), strict=True):
        assert torch.equal(a.draft.tokens, b.draft.tokens)
        assert torch.equal(a.n_accepted, b.n_accepted)


def test_without_a_cache_it_is_one_call():
    """Catches a training pass that runs through a cache."""
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    torch.testing.assert_close(functional(TARGET)(tokens).logits, TARGET(tokens).logits)


def test_a_tree_is_refused_with_the_way_out():
    """Catches a tree run as a chain, which would accept nodes of another path."""
    drafter = DraftModel(DRAFT, 2, branching=2)
    message = r"parents: .*chains only.*for trees use specdec\.models\.Transformer"
    with pytest.raises(ValueError, match=message):
        tokens_of(functional(TARGET), drafter)


@pytest.mark.parametrize(
    "arguments",
    [{"taps": (0,)}, {"exit_layer": 1}, {"resume": (1, torch.zeros(1, 1, 1))}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_hidden_states_are_refused_with_the_way_out(arguments):
    """Catches a drafter that is handed no states and finds out in the middle of a product."""
    with pytest.raises(ValueError, match=r"taps, exit_layer, resume: .*reads no hidden states"):
        functional(TARGET)(torch.tensor([[1]]), **arguments)


@pytest.mark.parametrize("part", ["embedding", "norm", "head"])
def test_it_has_no_parts(part):
    """Catches a drafter that borrows the target's head and gets something else."""
    with pytest.raises(ValueError, match=r"embedding, norm, head: .*has no parts"):
        getattr(functional(TARGET), part)(torch.tensor([[1]]))


@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings"])
def test_sizes_below_1_are_refused(name):
    """Catches a vocabulary of 0, which would refuse every prompt and blame the prompt."""
    sizes = {"vocab_size": 13, "max_position_embeddings": 64, name: 0}
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        from_functional(plain_form(TARGET), **sizes)


@pytest.mark.parametrize("n", [[3, 0], [-1, 0]])
def test_commit_errors_name_the_count(n):
    """Catches a cache longer than what was ever fed."""
    model = functional(TARGET)
    cache = model.new_cache(2, 8)
    model(torch.tensor([[1, 2], [3, 4]]), cache)
    with pytest.raises(ValueError, match=r"n: expected 0\.\.2, got"):
        cache.commit(torch.tensor([[0, 1, 0]] * 2), torch.tensor(n))


def test_logits_of_another_vocabulary_are_refused():
    """Catches tokens that the declared vocabulary does not hold."""
    model = from_functional(
        lambda tokens, cache: (torch.zeros(1, tokens.shape[1], 20), []),
        vocab_size=5,
        max_position_embeddings=16,
    )
    with pytest.raises(ValueError, match=r"fn: expected logits of shape \[1, 1, 5\]"):
        generate(model, torch.tensor([1]), max_new_tokens=2)
