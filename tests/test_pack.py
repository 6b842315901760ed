"""Packed linear layers: what they compute, what they follow, what they leave alone."""

import copy
import io

import pytest
import torch
from torch import nn

import specdec
from specdec import Greedy, generate, pack, unpack
from specdec.accept import Coupled
from specdec.pack import LEAST_ROWS, MOST_ROWS, PackedLinear
from specdec.prompts import CALIBRATION
from specdec.testing import check_lossless, compare
from tests.helpers import tiny_transformer

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


class Pair(nn.Module):
    """Two layers, one of them under two names, and a head that shares the embedding's weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(40, 24)
            self.first = nn.Linear(24, 24)
            self.second = nn.Sequential(self.first, nn.SiLU(), nn.Linear(24, 24, bias=False))
            self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embedding(tokens))))


def rows(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def packed_linear(width: int = 24, out: int = 40, **options: bool) -> PackedLinear:
    linear = nn.Linear(width, out).requires_grad_(False)
    linear.weight.copy_(rows(out, width, seed=1))
    assert linear.bias is not None
    linear.bias.copy_(rows(1, out, seed=2)[0])
    return PackedLinear(linear, **options)


def runs_packed(layer: PackedLinear, x: torch.Tensor) -> bool:
    """Whether a pass over x is that of the packed weight: spoil the copy and look."""
    honest = layer(x)
    copied = layer.copy()
    if copied is None:
        return False
    layer._copy = torch.ops.mkldnn._reorder_linear_weight(torch.zeros_like(layer.weight), 16)
    spoilt = layer(x)
    layer._copy = copied
    return not torch.equal(honest, spoilt)


@pytest.mark.parametrize("same_kernel", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 8), (3, 5), (2, 0), (MOST_ROWS + 1,)])
def test_says_what_the_layer_says(same_kernel: bool, shape: tuple[int, ...]) -> None:
    """Catches a dropped bias, a lost shape, a row of the two that stand for one mixed up."""
    layer = packed_linear(same_kernel=same_kernel)
    x = rows(max(1, torch.Size(shape).numel()), 24)[: torch.Size(shape).numel()].view(*shape, 24)
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    got = layer(x)
    assert got.shape == expected.shape and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_x_may_be_strided() -> None:
    """Catches a kernel handed memory in the order it lies in, not in that of its indices."""
    layer = packed_linear()
    x = rows(24, 8).T
    torch.testing.assert_close(layer(x), layer(x.contiguous()), rtol=0, atol=0)


def test_which_row_counts_run_packed() -> None:
    """Catches a copy that is made and never used, and one row that goes the slower way."""
    layer = packed_linear()
    used = [
        n
        for n in (1, LEAST_ROWS - 1, LEAST_ROWS, 8, MOST_ROWS, MOST_ROWS + 1)
        if runs_packed(layer, rows(n, 24))
    ]
    assert used == [LEAST_ROWS, 8, MOST_ROWS]
    layer = packed_linear(same_kernel=True)
    assert all(runs_packed(layer, rows(n, 24)) for n in (1, 2, MOST_ROWS + 1))


@pytest.mark.parametrize("width", [96, 1536])
def test_same_kernel_gives_equal_rows(width: int) -> None:
    """Catches a single row run as one: over more than 1024 inputs it is summed in another order."""
    layer, x = packed_linear(width, same_kernel=True), rows(64, width)
    every = layer(x)
    for n in (1, 2, 3, 8, 16, 33):
        assert torch.equal(layer(x[:n]), every[:n]), n


def test_replaces_every_name_and_reports() -> None:
    """Catches a shared layer packed under one of its names only, and its bytes counted twice."""
    model = Pair()
    report = pack(model, min_bytes=0)
    assert report.packed == ("first", "second.2", "head") and report.left == {}
    assert report.bytes_added == 4 * (2 * 24 * 24 + 40 * 24)
    assert model.first is model.second[0] and type(model.first) is PackedLinear
    assert model.head.weight is model.embedding.weight
    assert "packed 3 linear layers, 0.0 MiB more" in str(report)


def test_packing_again_and_unpacking() -> None:
    """Catches layers packed twice over, settings of the first call kept, parameters swapped."""
    model = Pair()
    before = {name: parameter for name, parameter in model.named_parameters()}
    tokens = torch.arange(8)[None]
    expected = model(tokens)
    first = pack(model, min_bytes=0)
    assert pack(model, min_bytes=0, same_kernel=True) == first
    assert isinstance(model.head, PackedLinear) and model.head.same_kernel
    assert unpack(model) == 3 and unpack(model) == 0
    assert type(model.first) is nn.Linear and model.first is model.second[0]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert torch.equal(model(tokens), expected)


def test_leaves_the_random_state_alone() -> None:
    """Catches stand-ins that draw weights only to drop them."""
    before = torch.get_rng_state()
    model = Pair()
    pack(model, min_bytes=0)
    unpack(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_state_dict_is_as_before() -> None:
    """Catches a packed copy that ends up in a checkpoint, and one that outlives a loaded one."""
    model, other = Pair(), Pair()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    tokens = torch.arange(8)[None]
    pack(model, min_bytes=0)
    assert list(model.state_dict()) == list(other.state_dict())
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(tokens), other(tokens), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_follows_its_weight() -> None:
    """Catches stale copies: weights written in place, replaced, or put elsewhere."""
    layer, x = packed_linear(), rows(8, 24)
    layer(x)

    def check() -> None:
        expected = nn.functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        assert runs_packed(layer, x)

    layer.weight.mul_(2.0)
    check()
    layer.weight = nn.Parameter(rows(40, 24, seed=5), requires_grad=False)
    check()
    layer.weight.data = rows(40, 24, seed=6)
    check()
    layer.bias.add_(1.0)
    check()


@torch.no_grad()
def test_a_weight_rounded_and_moved_back() -> None:
    """Catches a copy recognised by an address that the new weight got again."""
    for _ in range(20):
        layer, x = packed_linear(), rows(8, 24)
        layer(x)
        layer.to(torch.bfloat16).to(torch.float32)
        expected = nn.functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_converted_models_are_plain() -> None:
    """Catches a float32 copy used by a model that became float64: the referee of near-ties."""
    model = Pair()
    tokens = torch.arange(8)[None]
    expected = Pair(torch.float64)(tokens)
    pack(model, min_bytes=0)
    assert model(tokens).dtype == torch.float32
    assert torch.equal(copy.deepcopy(model).double()(tokens), expected)
    assert torch.equal(model.double()(tokens), expected)
    model.float()
    torch.testing.assert_close(model(tokens).double(), expected, rtol=0, atol=1e-5)


def test_deep_copies_and_saved_modules() -> None:
    """Catches the opaque copy being copied or pickled, and a copy that follows the original."""
    model = Pair()
    tokens = torch.arange(8)[None]
    pack(model, min_bytes=0)
    expected = model(tokens)
    twin = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    with torch.no_grad():
        model.first.weight.zero_()
    assert twin.first.weight is not model.first.weight
    assert isinstance(twin.first, PackedLinear) and torch.equal(twin(tokens), expected)


def test_gradients_are_refused() -> None:
    """Catches a backward pass that silently stops at a packed layer."""
    layer, x = packed_linear(), rows(8, 24)
    layer(x)
    for n in (1, 8):
        with pytest.raises(ValueError, match=r"compute no gradients.*unpack\(model\)"):
            layer(x[:n].clone().requires_grad_(True))
    for parameter in (layer.weight, layer.bias):
        layer.requires_grad_(False)
        parameter.requires_grad_(True)
        with pytest.raises(ValueError, match=r"compute no gradients"):
            layer(x)
    with torch.no_grad():
        assert runs_packed(layer, x)
    with torch.inference_mode():
        assert layer(x).shape == (8, 40)


def test_packed_in_inference_mode() -> None:
    """Catches a copy that can only be used in the mode it was made in."""
    model = Pair()
    with torch.inference_mode():
        pack(model, min_bytes=0)
        inside = model(torch.arange(8)[None])
    assert torch.equal(model(torch.arange(8)[None]), inside)


def test_what_is_left_alone() -> None:
    """Catches layers packed that must not be, and reasons that name another cause."""

    class Odd(nn.Linear):
        pass

    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    with torch.inference_mode():
        frozen = nn.Linear(8, 8)
    layers = {
        "exact": nn.Linear(8, 8, dtype=torch.float64),
        "brain": nn.Linear(8, 8, dtype=torch.bfloat16),
        "absent": nn.Linear(8, 8, device="meta"),
        "odd": Odd(8, 8),
        "hooked": hooked,
        "inference": frozen,
        "small": nn.Linear(8, 8),
        "large": nn.Linear(8, 9),
    }
    model = nn.ModuleDict(layers)
    report = pack(model, min_bytes=4 * 8 * 9)
    assert report.packed == ("large",)
    assert report.left == {
        "exact": "it is float64",
        "brain": "it is bfloat16",
        "absent": "it is on meta",
        "odd": "a subclass of nn.Linear (Odd)",
        "hooked": "it has hooks",
        "inference": "made in inference mode, where changes to a weight are not counted",
        "small": "smaller than 288 bytes",
    }
    assert all(model[name] is layer for name, layer in layers.items() if name != "large")
    assert "left alone, it is bfloat16: brain" in str(report)


def test_without_onednn_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error, or silence, where torch cannot pack."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = Pair()
    report = pack(model, min_bytes=0)
    assert report.packed == () and report.bytes_added == 0
    assert set(report.left.values()) == {"torch was built without oneDNN"}
    assert type(model.first) is nn.Linear


def test_bad_arguments() -> None:
    """Catches a model changed before its arguments were looked at."""
    for function in (pack, unpack):
        with pytest.raises(ValueError, match=r"model: expected an nn.Module.*got str"):
            function("tiny")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"model: .*got Linear"):
            function(nn.Linear(3, 3))
    model = Pair()
    pack(model, min_bytes=0)
    with pytest.raises(ValueError, match=r"min_bytes: expected at least 0, got -1"):
        pack(model, min_bytes=-1)
    assert isinstance(model.first, PackedLinear)


def test_float64_targets_stay_exact() -> None:
    """Catches a float64 target that comes out in float32's precision."""
    model = tiny_transformer()
    tokens = torch.arange(9)[None]
    expected = model(tokens).logits
    report = pack(model, min_bytes=0)
    assert not report.packed and "head" in report.left
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("same_kernel", [False, True])
def test_lossless_on_the_packed_bundle(same_kernel: bool) -> None:
    """Catches a packed pass that says something else than steps do, beyond near-ties."""
    bundle = specdec.load("tiny")
    report = pack(bundle.target, min_bytes=0, same_kernel=same_kernel)
    assert len(report.packed) == 4 * 8 + 1 and not report.left
    prompts = [bundle.tokenizer.encode(text)[:60] for text in CALIBRATION[:2]]
    plain = generate(bundle.target, prompts, max_new_tokens=40).sequences
    for name in ("prompt lookup", "dflash", "eagle-3, tree", "medusa, tree"):
        got = generate(bundle.target, prompts, bundle.drafters[name], max_new_tokens=40)
        assert got.metrics.tau > 1
        for b, (expected, sequence) in enumerate(zip(plain, got.sequences, strict=True)):
            difference = compare(bundle.target, expected, sequence, Greedy(), b)
            assert difference is None or difference.near_tie, f"{name}: {difference}"


def test_check_lossless_takes_packed_targets() -> None:
    """Catches a packed target that the divergence report cannot recompute in float64."""
    bundle = specdec.load("tiny")
    pack(bundle.target, min_bytes=0)
    proof = check_lossless(
        bundle.target,
        bundle.drafters["draft model"],
        prompts=[bundle.tokenizer.encode(CALIBRATION[0])[:n] for n in (1, 9)],
        rules=[Greedy(), Coupled(1.0, seed=0)],
        max_new_tokens=6,
        n_samples=0,
        with_replay=False,
    )
    assert proof.n_runs


def test_packed_drafters_and_models_of_transformers() -> None:
    """Catches modules whose layers are reached another way: fused slices, a head of theirs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdec.hf import HFModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
    )
    target = HFModel(LlamaForCausalLM(config).eval())
    prompt = torch.arange(20)
    with torch.no_grad():
        expected = target(prompt[None]).logits
        report = pack(target, min_bytes=0)
        assert len(report.packed) == 2 * 7 + 1
        got = target(prompt[None]).logits
        assert isinstance(target.head, PackedLinear)
    assert expected is not None and got is not None
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    run = generate(target, prompt, specdec.PromptLookup(3, 4), max_new_tokens=12)
    plain = generate(target, prompt, max_new_tokens=12)
    difference = compare(target, plain.sequences[0], run.sequences[0], Greedy())
    assert difference is None or difference.near_tie

    bundle = specdec.load("tiny")
    text = bundle.tokenizer.encode(CALIBRATION[0])[:60]
    dflash = bundle.drafters["dflash"]
    assert isinstance(dflash, specdec.DFlash)
    before = generate(bundle.target, text, dflash, max_new_tokens=24)
    assert pack(dflash.network, min_bytes=0).packed
    after = generate(bundle.target, text, dflash, max_new_tokens=24)
    assert torch.equal(before.sequences[0], after.sequences[0])
    assert abs(before.metrics.tau - after.metrics.tau) < 0.5
