"""The embedded bundle."""

import json
from importlib import resources

import pytest
import torch

import specdec

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
]


@pytest.fixture(scope="module")
def bundle():
    return specdec.load("tiny")


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
    total = 0
    for part in folder.iterdir():
        if not part.name.startswith("tiny-"):
            continue
        total += len((part / "model.safetensors").read_bytes())
        training = json.loads((part / "config.json").read_text())["training"]
        metric = "bits_per_byte" if part.name == "tiny-target" else "tau"
        assert {f"held_out_{metric}", "seed", "steps"} <= training.keys()
    assert 20_000_000 < total <= 40_000_000


def test_an_unknown_name_is_refused():
    """A typing error that ends in a stack trace about files."""
    with pytest.raises(ValueError, match="name: expected 'tiny', got 'tinny'"):
        specdec.load("tinny")


def test_dtype_is_what_was_asked_for():
    """Equality tests that run in float32 unawares."""
    assert specdec.load("tiny", torch.float64).target.dtype == torch.float64
