"""A long prompt costs its cache, not a [T, V] or a [T, T] table."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import DraftModel, PromptLookup, generate
from specdec.models import Transformer, TransformerConfig


class Largest(TorchDispatchMode):
    """Notes the largest tensor any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_no_table_grows_with_the_square_of_the_prompt_or_with_the_vocabulary():
    """Prefill that builds all logits, or a mask of every token against every other."""
    length, vocab = 3000, 5000
    config = TransformerConfig(vocab, 8, 8, 1, 1, max_position_embeddings=4096)
    model = Transformer(config).reset_parameters(torch.Generator().manual_seed(0))
    prompts = [torch.arange(length) % vocab, torch.arange(length - 7) % vocab]
    for drafter in (PromptLookup(), DraftModel(model, 2)):
        with Largest() as largest:
            generate(model, prompts, drafter, max_new_tokens=3, prefill_chunk=64)
        budget = 2 * 512 * (length + 600)  # two rows of one chunk's mask
        assert largest.numel <= budget < length * length
        assert largest.numel < length * vocab
