"""The embedded bundle."""

import json
from importlib import resources

import pytest
import torch

import specdec


@pytest.fixture(scope="module")
def bundle():
    return specdec.load("tiny")


def test_the_bundle_unpacks_and_decodes_text(bundle):
    """A bundle whose parts do not fit each other."""
    target, tokenizer, drafters, prompts = bundle
    assert set(prompts) == {"code", "docstring", "edit", "table"}
    text = prompts["code"][0]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    run = specdec.generate(
        target, tokenizer.encode(text), drafters["draft model"], max_new_tokens=12
    )
    assert len(run.new_tokens[0]) == 12


def test_the_draft_model_is_worth_having(bundle):
    """Weights that do not belong together: a draft model that the target refuses."""
    prompts = [bundle.tokenizer.encode(text) for texts in bundle.prompts.values() for text in texts]
    run = specdec.generate(
        bundle.target, prompts, bundle.drafters["draft model"], max_new_tokens=48
    )
    assert run.metrics.tau > 1.6


def test_the_target_has_learned_its_language(bundle):
    """Weights damaged on their way into the package."""
    prompt = bundle.tokenizer.encode("    def __init__(self, name, value):\n        self.name = na")
    run = specdec.generate(bundle.target, prompt, max_new_tokens=2)
    assert bundle.tokenizer.decode(run.new_tokens[0]) == "me"


def test_the_weights_are_small_and_come_with_their_history(bundle):
    """A repository that grows; numbers nobody can reproduce."""
    folder = resources.files("specdec") / "pretrained"
    total = 0
    for name in ("tiny-target", "tiny-draft"):
        total += len((folder / name / "model.safetensors").read_bytes())
        training = json.loads((folder / name / "config.json").read_text())["training"]
        assert {"held_out_bits_per_byte", "seed", "steps"} <= training.keys()
    assert total <= 4_000_000


def test_an_unknown_name_is_refused():
    """A typing error that ends in a stack trace about files."""
    with pytest.raises(ValueError, match="name: expected 'tiny', got 'tinny'"):
        specdec.load("tinny")


def test_dtype_is_what_was_asked_for():
    """Equality tests that run in float32 unawares."""
    assert specdec.load("tiny", torch.float64).target.dtype == torch.float64
