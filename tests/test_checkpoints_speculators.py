"""The speculators format: read as the package runs it, written as the package reads it.

tests/golden/make_speculators.py made the folders with the package, and checks there what we write.
"""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import FINAL, generate
from specdec.checkpoints import (
    load_drafter,
    load_speculators,
    save_dflash,
    save_eagle,
    save_speculators,
    speculators_dflash,
)
from specdec.checkpoints.speculators_networks import HeadedDFlash, NormedEagle3, Norms
from specdec.drafters import DFlash, Eagle
from specdec.drafters.dflash import DFlashNetwork, Sight
from specdec.drafters.dflash2 import DFlash2
from specdec.drafters.eagle import Eagle1, Eagle3, unroll
from specdec.models import Transformer, TransformerConfig
from tests.builders import context_of

GOLDEN = Path(__file__).parent / "golden"
EAGLE3 = [f"speculators_eagle3/{name}" for name in ("plain", "norms", "norm_of_each_tap")]
DFLASH = [f"speculators_dflash/{name}" for name in ("mixed", "from_anchor", "dflash2")]
ANCHOR, BLOCK = 7, 6
CONFIG = TransformerConfig(
    *(53, 16, 24, 1, 4, 2, 8),
    rope_theta=500.0,
    max_position_embeddings=99,
    tie_word_embeddings=False,
)


def target_for(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> Transformer:
    """A random target with the embeddings, and the head, of a golden folder."""
    case = load_file(GOLDEN / name / "case.safetensors")
    shape: dict = {"vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 6} | changes
    config = TransformerConfig(
        intermediate_size=24, num_attention_heads=4, tie_word_embeddings=False, **shape
    )
    model = Transformer(config).reset_parameters(torch.Generator().manual_seed(0))
    model.requires_grad_(False)
    if not changes:
        model.embedding.weight.copy_(case["embed_tokens"])
        model.head.weight.copy_(case.get("lm_head", model.head.weight))
    return model.to(dtype).eval()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def check_eagle(name: str) -> None:
    """Logits of three steps, the true tokens fed."""
    case, target = load_file(GOLDEN / name / "case.safetensors"), target_for(name)
    network = load_speculators(GOLDEN / name, target)
    assert isinstance(network, Eagle3)
    states = case["hidden"][:, :-1].split(target.hidden_size, dim=-1)
    features = network.fuse(dict(zip(network.taps, states, strict=True)))
    outputs = unroll(network, features, target.embedding(case["tokens"][:, 1:]), 3)
    for step, output in enumerate(outputs):
        close(network.draft_logits(output), case[f"logits.{step}"][:, : output.shape[1]])


def laws_of(name: str) -> tuple[DFlashNetwork, Tensor, Tensor]:
    """The network, and states and logits of the places behind ANCHOR as a drafter reads them."""
    case, target = load_file(GOLDEN / name / "case.safetensors"), target_for(name)
    network = load_speculators(GOLDEN / name, target)
    assert isinstance(network, DFlashNetwork)
    states = case["hidden"][:, :ANCHOR].split(target.hidden_size, dim=-1)
    row = case["tokens"][:, : ANCHOR + 1]
    context = replace(
        context_of(row.tolist()),
        new_tokens=row[:, 1:],
        n_new=torch.tensor([ANCHOR]),
        hidden=dict(zip(network.taps, states, strict=True)),
    )
    return network, *DFlash(network).begin(target, 1, 40).laws.read(context, BLOCK - 1)


def check_dflash(name: str) -> None:
    """What a drafter reads for place ANCHOR + 1, ... is what the slot trained for it says."""
    case = load_file(GOLDEN / name / "case.safetensors")
    network, states, logits = laws_of(name)
    slots = [case["said"].tolist().index(ANCHOR + depth) for depth in range(1, BLOCK)]
    close(states, case["states"][:, slots])
    ids = network.draft_ids if isinstance(network, HeadedDFlash) else None
    close(logits if ids is None else logits[..., ids], case["logits"][:, slots])
    if ids is not None:
        others = torch.ones(53, dtype=torch.bool).index_fill(0, ids, False)
        assert bool((logits[..., others] == -torch.inf).all())


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_agrees_with_the_package(name):
    """Catches a norm in another place, taps in another order, another draft vocabulary."""
    check_eagle(name)


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_agrees_with_the_package(name):
    """Catches another mask or head, and slots that say their neighbour's token."""
    check_dflash(name)


def test_the_selector_agrees_with_the_package():
    """Catches codebooks exchanged."""
    name = "speculators_dflash/dflash2"
    case = load_file(GOLDEN / name / "case.safetensors")
    network, states, logits = laws_of(name)
    assert network.selector is not None
    root = case["tokens"][:, ANCHOR : ANCHOR + 1]
    scores = network.selector(states[:, 0], logits[:, 0], root)
    close(scores.gather(-1, case["candidates"]), case["scores"])


def test_taps_are_counted_as_ours():
    """Catches z-lab's count, one less: parity feeds the states by their order and cannot tell."""
    assert load_speculators(GOLDEN / EAGLE3[0], target_for(EAGLE3[0])).taps == (1, 3, 4)
    assert load_speculators(GOLDEN / DFLASH[0], target_for(DFLASH[0])).taps == (1, 4)


def own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """sample_from_anchor passed over."""
    monkeypatch.setattr(HeadedDFlash, "forward", DFlashNetwork.forward)


def causal_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """sliding_window_non_causal the wrong way round."""
    right = speculators_dflash._sights

    def turned(fields, layer, n_layers):
        told = fields | {"sliding_window_non_causal": not fields["sliding_window_non_causal"]}
        return right(told, layer, n_layers)

    monkeypatch.setattr(speculators_dflash, "_sights", turned)


def root_in_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's embedding is a mask's."""
    monkeypatch.setattr(
        DFlashNetwork,
        "block_tokens",
        lambda self, roots, n: torch.full((*roots.shape, n), self.mask_token),
    )


@pytest.mark.parametrize(
    ("plant", "name"),
    [(own_tokens, "from_anchor"), (causal_windows, "from_anchor"), (causal_windows, "mixed")]
    + [(root_in_context, name) for name in ("mixed", "from_anchor", "dflash2")],
)
def test_planted_bugs_of_dflash_are_seen(monkeypatch, plant, name):
    """Each of these drafts losslessly and badly: only parity tells."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check_dflash(f"speculators_dflash/{name}")


@pytest.mark.parametrize("flag", [field.name for field in dataclasses.fields(Norms)])
def test_a_norm_left_out_is_seen(monkeypatch, flag):
    """Planted: each of the four fields passed over."""
    name = EAGLE3[2] if flag == "fc_norm" else EAGLE3[1]
    if flag in ("norm_before_fc", "fc_norm"):
        monkeypatch.setattr(NormedEagle3, "fuse", Eagle3.fuse)
    else:
        plain = NormedEagle3.__init__

        def init(self, *args, norms, **options):
            plain(self, *args, norms=norms, **options)
            self.norms = replace(norms, **{flag: False})

        monkeypatch.setattr(NormedEagle3, "__init__", init)
    with pytest.raises(AssertionError, match="not close"):
        check_eagle(name)


@pytest.mark.parametrize("name", EAGLE3 + DFLASH)
def test_what_was_read_is_written_again(tmp_path, name):
    """Catches a weight or field of the package's that is lost or changed on the way."""
    target = target_for(name)
    n_drafts = 3 if "eagle3" in name else None
    network = load_speculators(GOLDEN / name, target)
    save_speculators(
        network, tmp_path, target, architectures=["LlamaForCausalLM"], n_drafts=n_drafts
    )
    ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path, GOLDEN / name))
    assert ours.keys() == theirs.keys()
    for weight in ours:
        assert torch.equal(ours[weight], theirs[weight]), weight
    both = (tmp_path, GOLDEN / name)
    ours, theirs = (json.loads((at / "config.json").read_text()) for at in both)
    layer, expected = (fields.pop("transformer_layer_config") for fields in (ours, theirs))
    assert {n: v for n, v in layer.items() if n in expected and v != expected[n]} == {}
    spoken, wanted = (fields.pop("speculators_config") for fields in (ours, theirs))
    if name.endswith("from_anchor"):  # the package's count there is ours to choose
        assert spoken["proposal_methods"][0].pop("speculative_tokens") == BLOCK
        assert wanted["proposal_methods"][0].pop("speculative_tokens") == BLOCK - 1
    assert spoken == wanted
    left_out = {"auto_map", "dtype", "transformers_version"}
    assert {n: v for n, v in theirs.items() if n not in left_out and ours.get(n, 0) != v} == {}


def dflash_config(n_layers: int) -> TransformerConfig:
    return replace(CONFIG, num_hidden_layers=n_layers, qk_norm=True)


NETWORKS = {
    "eagle3": Eagle3(CONFIG, (0, 3, 6)),
    "eagle3 reduced": Eagle3(replace(CONFIG, qk_norm=True), (2,), torch.tensor([0, 4, 5, 52])),
    "eagle 3.1": NormedEagle3(CONFIG, (1, 2), norms=Norms(fc_norm=True, norm_output=True)),
    "full": DFlashNetwork(dflash_config(2), (1, 6), mask_token=9, block_size=5),
    "causal": DFlashNetwork(
        dflash_config(2), (1,), mask_token=0, sights=[Sight(causal=True)] * 2, block_size=5
    ),
    "sliding": DFlashNetwork(
        dflash_config(3), (2, 4), mask_token=9, sights=[Sight(True, 8), Sight(True, 8), Sight()]
    ),
    "sliding both ways": DFlashNetwork(
        dflash_config(2), (2, 4), mask_token=9, sights=[Sight(False, 8), Sight()]
    ),
    "dflash2": DFlashNetwork(dflash_config(1), (3,), mask_token=9, dflash2=DFlash2(2, 4, 4, 5)),
    "own head": HeadedDFlash(
        dflash_config(1),
        (3,),
        mask_token=9,
        block_size=4,
        own_head=True,
        draft_ids=torch.tensor([1, 50]),
        from_root=True,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_round_trip(tmp_path, name):
    """Catches a weight, field, tap or sight that is lost, and rows joined in another order."""
    network = NETWORKS[name].reset_parameters(torch.Generator().manual_seed(1))
    target = target_for(EAGLE3[0])
    save_speculators(
        network, tmp_path, target, verifier="org/name", n_drafts=2, metadata={"steps": 3}
    )
    again = load_speculators(tmp_path, target)
    assert type(again) is type(network)
    assert (again.taps, again.config) == (network.taps, network.config)
    assert again.state_dict().keys() == network.state_dict().keys()
    for weight, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[weight], tensor), weight
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())
    if isinstance(network, DFlashNetwork):
        assert isinstance(again, DFlashNetwork)
        sights = list(network.sights)
        if name == "causal":  # spelled as a window that nothing is beyond
            sights = [Sight(causal=True, window=99 + 5)] * 2
        assert list(again.sights) == sights
        assert (again.mask_token, again.block_size) == (network.mask_token, network.block_size)
        assert again.dflash2 == network.dflash2
    if isinstance(network, HeadedDFlash):
        assert isinstance(again, HeadedDFlash)
        assert again.from_root
    if isinstance(network, NormedEagle3):
        assert isinstance(again, NormedEagle3)
        assert again.norms == network.norms
    fields = json.loads((tmp_path / "config.json").read_text())
    spoken = fields["speculators_config"]
    assert spoken["verifier"] == {"name_or_path": "org/name", "architectures": []}
    assert spoken["proposal_methods"][0]["speculative_tokens"] == 2
    drafter = load_drafter(tmp_path, target)
    assert isinstance(drafter, Eagle | DFlash)
    assert drafter.n_drafts == 2
    assert fields["training"] == {"steps": 3}


def test_norms_are_written_though_they_are_the_defaults(tmp_path):
    """vLLM takes a missing norm_before_residual for True, a missing non_causal for True as well."""
    target = target_for(EAGLE3[0])
    save_speculators(NETWORKS["eagle3"], tmp_path, target)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert [fields[field.name] for field in dataclasses.fields(Norms)] == [False] * 4
    save_speculators(NETWORKS["sliding"], tmp_path, target)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window_non_causal"] is False


def test_embeddings_go_with_eagle3_and_not_with_dflash(tmp_path):
    """Catches a folder of EAGLE-3 that the package reads with embeddings of NaN."""
    target = target_for(EAGLE3[0])
    save_speculators(NETWORKS["eagle3"], tmp_path, target, dtype=torch.bfloat16)
    written = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(written, target.embedding.weight.bfloat16())
    assert isinstance(load_drafter(tmp_path, target), Eagle)
    save_speculators(NETWORKS["full"], tmp_path, target)
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", EAGLE3 + DFLASH)
def test_a_folder_drafts_without_changing_the_output(name):
    """Catches laws that the loop cannot take: -inf for tokens that are not drafted."""
    target = target_for(name, torch.float64)
    drafter = load_drafter(GOLDEN / name, target)
    assert type(drafter) is (Eagle if "eagle3" in name else DFlash)
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9])]
    plain = generate(target, prompts, max_new_tokens=8)
    drafted = generate(target, prompts, drafter, max_new_tokens=8)
    for have, want in zip(drafted.sequences, plain.sequences, strict=True):
        assert have.tolist() == want.tolist()
    assert any(r.draft.n_nodes for r in drafted.rounds)


def test_a_head_over_frequent_tokens_is_written_with_its_rows(tmp_path):
    """Catches a server that drafts other tokens than those whose rows were kept."""
    target, ids = target_for(MIXED), torch.tensor([0, 3, 7, 52])
    network = load_speculators(GOLDEN / MIXED, target)
    assert isinstance(network, DFlashNetwork)
    save_speculators(network.reduce_head(target, ids), tmp_path, target)
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], target.head.weight[ids])
    assert (weights["d2t"] + torch.arange(4)).tolist() == ids.tolist()
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 4
    again = load_speculators(tmp_path, target)
    states = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(4))
    assert torch.equal(again.logits(states, target), network.logits(states, target))


def test_a_window_of_eagle3_bounds_the_run(tmp_path):
    """Catches a layer that sees further back than it was trained to."""
    folder = change(tmp_path, EAGLE3[0], layer={"layer_types": ["sliding_attention"]})
    with pytest.raises(ValueError, match=r"layer_types=\['sliding_attention'\]; expected"):
        load_speculators(folder, target_for(EAGLE3[0]))
    kinds = {"layer_types": ["sliding_attention"], "sliding_window": 10}
    folder = change(tmp_path, EAGLE3[0], layer=kinds)
    target = target_for(EAGLE3[0])
    drafter = load_drafter(folder, target)
    with pytest.raises(ValueError, match=r"max_position_embeddings=10 is below the run's"):
        generate(target, torch.tensor([1, 2, 3]), drafter, max_new_tokens=20)


def test_shards_and_what_older_releases_wrote(tmp_path):
    """Catches a reader of one file, and the verifier's own weights taken for unknown ones."""
    folder = change(tmp_path, DFLASH[0], weights={"verifier_norm.weight": torch.ones(16)})
    case = load_file(GOLDEN / DFLASH[0] / "case.safetensors")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({"embed_tokens.weight": case["embed_tokens"]}, folder / "a.safetensors")
    save_file(weights, folder / "b.safetensors")
    index = {name: "b.safetensors" for name in weights} | {"embed_tokens.weight": "a.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    network = load_speculators(folder, target_for(DFLASH[0]))
    assert type(network) is DFlashNetwork
    assert torch.equal(network.fc.weight, weights["fc.weight"])


def test_a_head_of_the_whole_vocabulary_is_its_own(tmp_path):
    """Catches a trained head passed over for the target's."""
    head = torch.randn(53, 16, generator=torch.Generator().manual_seed(3))
    folder = change(tmp_path, DFLASH[0], weights={"lm_head.weight": head})
    network = load_speculators(folder, target_for(DFLASH[0]))
    assert isinstance(network, HeadedDFlash)
    states = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(4))
    close(network.logits(states, target_for(DFLASH[0])), states @ head.T)


def change(
    tmp_path: Path,
    name: str,
    fields: dict | None = None,
    layer: dict | None = None,
    weights: dict | None = None,
) -> Path:
    """A copy of a golden folder with other fields and weights (None: without)."""
    config = json.loads((GOLDEN / name / "config.json").read_text()) | (fields or {})
    if config["transformer_layer_config"]:
        config["transformer_layer_config"] |= layer or {}
    kept = {n: v for n, v in config.items() if v is not None or n == "target_hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    changed = load_file(GOLDEN / name / "model.safetensors") | (weights or {})
    save_file({n: w for n, w in changed.items() if w is not None}, tmp_path / "model.safetensors")
    return tmp_path


PLAIN, NORMS, MIXED, ANCHORED = EAGLE3[0], EAGLE3[1], DFLASH[0], DFLASH[1]


@pytest.mark.parametrize(
    ("name", "fields", "layer", "weights", "message"),
    [
        (PLAIN, {"speculators_model_type": "peagle"}, {}, {}, "type='peagle'; expected one of"),
        (PLAIN, {"transformer_layer_config": None}, {}, {}, "expected transformer_layer_config"),
        (PLAIN, {}, {"model_type": "gemma3"}, {}, r"model_type='gemma3'; expected one of \['llama"),
        (PLAIN, {}, {"vocab_size": 54}, {}, "vocab_size=54; expected 53"),
        (MIXED, {}, {"hidden_size": 32}, {}, "hidden_size=32; expected 16"),
        (PLAIN, {"target_hidden_size": 32}, {}, {}, "target_hidden_size=32; expected 16"),
        (PLAIN, {}, {"num_hidden_layers": 2}, {}, "num_hidden_layers=2; expected 1"),
        (PLAIN, {}, {"attention_bias": True}, {}, "attention_bias=True; expected False"),
        (MIXED, {}, {"rope_parameters": {"rope_type": "yarn"}}, {}, "rope_parameters='yarn'"),
        (PLAIN, {"fc_norm": True, "norm_before_fc": True}, {}, {}, "fc_norm: expected False"),
        (PLAIN, {"norm_before_fc": True}, {}, {}, r"fit its config: \['input_norm.weight'\]"),
        (PLAIN, {"eagle_aux_hidden_state_layer_ids": [1, 7, 2]}, {}, {}, r"\[1, 7, 2\], but the"),
        (PLAIN, {}, {}, {"embed_tokens.weight": torch.ones(53, 16)}, "embed_tokens differs"),
        (PLAIN, {}, {}, {"layers.0.mlp.up_proj.weight": None}, r"do not fit.*up_proj"),
        (NORMS, {}, {}, {"d2t": None}, "needs d2t"),
        (NORMS, {}, {}, {"t2d": torch.ones(53, dtype=torch.bool)}, "t2d does not mark"),
        (ANCHORED, {}, {}, {"lm_head.weight": None}, "needs lm_head"),
        (MIXED, {"mask_token_id": None}, {}, {}, "mask_token_id=None; expected a number"),
        (MIXED, {"block_size": "8"}, {}, {}, "block_size='8'; expected a number"),
        (MIXED, {"aux_hidden_state_layer_ids": None}, {}, {}, "layer_ids=None; expected numbers"),
        (MIXED, {"aux_hidden_state_layer_ids": [1, 9]}, {}, {}, r"taps \[1, 9\], but the target"),
        (MIXED, {}, {"sliding_window": None}, {}, "sliding_window=None"),
        (DFLASH[2], {"selector_rank": None}, {}, {}, "expected all of"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, name, fields, layer, weights, message):
    """Catches layers that are half read, or run as if they were of another kind."""
    folder = change(tmp_path, name, fields, layer, weights)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, target_for(name))


def test_a_target_of_another_width_or_vocabulary_is_named():
    """Catches layers for another verifier: a product that fails in the middle of a pass."""
    with pytest.raises(ValueError, match=r"vocab_size=53; expected 60"):
        load_drafter(GOLDEN / PLAIN, target_for(PLAIN, vocab_size=60))
    with pytest.raises(ValueError, match=r"hidden_size=16; expected 32"):
        load_drafter(GOLDEN / MIXED, target_for(MIXED, hidden_size=32))


@pytest.mark.parametrize("part", ["truncated", "flipped", "absent"])
def test_a_damaged_file_is_named(tmp_path, part):
    """Catches an error of whoever opens the file, without the folder."""
    folder = change(tmp_path, PLAIN)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    if part == "truncated":
        file.write_bytes(content[:-100])
    elif part == "flipped":
        file.write_bytes(b"\xff" * 8 + content[8:])
    else:
        file.unlink()
    with pytest.raises(ValueError, match=r"folder: .*(cannot be read|expected model)"):
        load_drafter(folder, target_for(PLAIN))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Eagle1(CONFIG), "expected an Eagle3 or a DFlashNetwork, got a Eagle1"),
        (Eagle3(CONFIG, (1, FINAL)), r"expected taps of 0\.\.6.*got FINAL"),
        (Eagle3(CONFIG, (1, 7)), r"taps \[1, 7\], but the target has"),
        (Eagle3(replace(CONFIG, vocab_size=60), (1,)), "vocabulary of 60"),
        (DFlashNetwork(CONFIG, (1,), mask_token=0), "expected norms of queries and keys"),
        (DFlashNetwork(dflash_config(1), (1,), mask_token=0, inject=False), "inject=False"),
        (
            DFlashNetwork(
                dflash_config(2), (1,), mask_token=0, sights=[Sight(True, 4), Sight(False, 4)]
            ),
            "one common window",
        ),
        (
            DFlashNetwork(
                dflash_config(2), (1,), mask_token=0, sights=[Sight(True, 4), Sight(True, 8)]
            ),
            "one common window",
        ),
    ],
)
def test_what_the_format_cannot_say_is_not_written(tmp_path, network, message):
    """Catches a folder that a server reads as another drafter; nothing is left behind."""
    with pytest.raises(ValueError, match=message):
        save_speculators(network, tmp_path / "new", target_for(PLAIN))
    assert not (tmp_path / "new").exists()


def test_a_depth_that_no_block_has_is_refused(tmp_path):
    """Catches a server told to draft more than there are slots."""
    for name, n_drafts in (("full", 5), ("full", 0), ("own head", 5), ("eagle3", 0)):
        with pytest.raises(ValueError, match=f"n_drafts: expected .*got {n_drafts}"):
            save_speculators(NETWORKS[name], tmp_path, target_for(PLAIN), n_drafts=n_drafts)


def test_other_writers_refuse_what_they_cannot_say(tmp_path):
    """Catches norms or a head that are lost in a published layout."""
    with pytest.raises(ValueError, match="save_speculators writes them"):
        save_eagle(NETWORKS["eagle 3.1"], tmp_path)
    with pytest.raises(ValueError, match="save_speculators writes it"):
        save_dflash(NETWORKS["own head"], tmp_path)


def test_a_draft_vocabulary_needs_a_head():
    """Catches ids that no head says."""
    with pytest.raises(ValueError, match="own_head=True, got False"):
        HeadedDFlash(CONFIG, (1,), mask_token=0, block_size=4, draft_ids=torch.tensor([1]))


def test_one_architecture_is_still_a_list(tmp_path):
    """Catches a name that is written letter by letter, which vLLM cannot find."""
    target = target_for(PLAIN)
    with pytest.raises(ValueError, match=r"architectures: expected a list of names, got 'Llama'"):
        save_speculators(NETWORKS["full"], tmp_path, target, architectures="Llama")
    assert not list(tmp_path.iterdir())
