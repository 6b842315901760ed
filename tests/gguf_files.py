"""Small GGUF files, written with the package `gguf`: a random Llama, a tokenizer of few merges."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from specdec.tokenizer import byte_alphabet

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>>"]
MERGES = ["Ġ Ġ", "Ċ Ġ", "h e", "l l", "Ġ t", "he ll", "hell o", "Ġt he", "Ã ©", "1 2", "' s", "< |"]
TOKENS = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (  # ChatML with a system prompt of its own, as SmolLM2 has it
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 48,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-3,
    "llama.rope.freq_base": 200.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
_KINDS = {"attn_norm": "F32", "ffn_norm": "F32", "ffn_gate": "Q8_0", "ffn_up": "F16"}
"""The kind of a block's tensors; all others are Q4_1."""


def shapes(n_blocks: int = 2) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tied model."""
    block = {
        "attn_norm": (64,),
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_norm": (64,),
        "ffn_gate": (96, 64),
        "ffn_up": (96, 64),
        "ffn_down": (64, 96),
    }
    below = {f"blk.{i}.{name}.weight": s for i in range(n_blocks) for name, s in block.items()}
    return {"token_embd.weight": (len(TOKENS), 64), "output_norm.weight": (64,), **below}


def write_gguf(
    file: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """A file with other metadata and shapes or arrays of tensors than `METADATA` and `shapes()`.

    None leaves one out. Arrays are written as they are, shapes are filled at random.
    """
    rng = np.random.default_rng(0)
    writer = GGUFWriter(file, architecture)
    for key, value in (METADATA | dict(metadata or {})).items():
        if value is not None:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name, what in (shapes() | dict(tensors or {})).items():
        if isinstance(what, tuple):
            drawn = rng.normal(0.5 if len(what) == 1 else 0.0, 0.3, what).astype(np.float32)
            part = name.split(".")[-2]
            kind = "F32" if len(what) == 1 else _KINDS.get(part, "Q4_1")
            kind = {"token_embd": "Q8_0", "output": "F16"}.get(part, kind)
            number = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(drawn, number), raw_dtype=number)
        elif what is not None:
            writer.add_tensor(name, what)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
