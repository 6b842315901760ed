"""Qwen's module of multi-token prediction: read as published, drafting as it was trained.

`transformers` does not run these modules. The oracle is a model of its own of one attending layer:
fed with the fused states in place of embeddings, its layer and final norm are the module.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec import FINAL, Coupled, Greedy, Rejection, generate
from specdec.accept import without_replacement
from specdec.checkpoints import (
    load_drafter,
    load_qwen_mtp,
    load_target,
    save_mtp,
    save_qwen_moe,
    save_qwen_mtp,
)
from specdec.drafters.mtp import SequentialModules, mtp_loss, of_depth, resized
from specdec.drafters.mtp_draft import MTPModules
from specdec.models import QwenMoe
from specdec.models.layers import CentredRMSNorm
from specdec.models.qwen_moe import FULL
from specdec.testing import check_lossless
from specdec.testing.replay import Recorder, nodes
from specdec.testing.targets import small_hybrid, small_target
from tests.test_checkpoints_qwen import KINDS, SIZES, TOKENS, oracle

TARGET = small_hybrid(5)
STORY = generate(TARGET, torch.tensor([7, 2]), max_new_tokens=24).sequences[0]


# The published weights


@cache
def published(kind: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A layer of `transformers`, and what is around it: fc and the two norms before it."""
    network, config, own = KINDS[kind]
    sizes = SIZES | {"num_hidden_layers": 1, "layer_types": [FULL]}
    options: dict[str, Any] = {"experts_implementation": "eager"}
    layer = network(config(**sizes, **own, **options)).eval()
    generator = torch.Generator().manual_seed(1)
    width = layer.config.hidden_size
    around = {"fc.weight": torch.randn(width, 2 * width, generator=generator) * width**-0.5}
    for name in ("hidden", "embedding"):
        around[f"pre_fc_norm_{name}.weight"] = torch.randn(width, generator=generator) * 0.3
    with torch.no_grad():
        for parameter in layer.parameters():
            std = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, std, generator=generator)
    return layer, around


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


@torch.no_grad()
def expected_logits(kind: str, tokens: Tensor) -> Tensor:
    """At place i of states and tokens 0..i + 1: the token at i + 2."""
    target, (layer, around) = oracle(kind), published(kind)
    states = target(tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
    embeddings = target.get_input_embeddings()(tokens[:, 1:])
    halves = (
        norm(embeddings, around["pre_fc_norm_embedding.weight"]),
        norm(states, around["pre_fc_norm_hidden.weight"]),
    )
    fused = torch.cat(halves, dim=-1) @ around["fc.weight"].T
    return target.lm_head(layer.model(inputs_embeds=fused).last_hidden_state)


def folder_with_mtp(kind: str, folder: Path) -> Path:
    """The target of `kind` with its module beside it."""
    oracle(kind).save_pretrained(folder)
    layer, around = published(kind)
    layer.save_pretrained(folder / "layer")
    own = load_file(folder / "layer" / "model.safetensors")
    moved = {
        n.replace("model.", "mtp.", 1): w
        for n, w in own.items()
        if n.startswith(("model.layers.", "model.norm."))
    }
    everything = load_file(folder / "model.safetensors") | moved
    everything |= {f"mtp.{n}": w for n, w in around.items()}
    save_file(everything, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_says_what_the_published_module_says(tmp_path, kind):
    """Catches exchanged halves or norms, a plain norm for a centred one, the target's final norm
    for the module's, states before the final norm, angles of whole heads."""
    folder = folder_with_mtp(kind, tmp_path)
    target = load_target(folder)
    assert isinstance(target, QwenMoe)
    network = load_qwen_mtp(folder, target)
    assert network.taps == (FINAL,)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    states = target(TOKENS, taps=(FINAL,), logits=False).hidden[FINAL]
    (logits,) = network(states, TOKENS, target)
    expected = expected_logits(kind, TOKENS)
    atol = 1e-4 * float(expected.square().mean().sqrt())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=atol)
    run = generate(target, TOKENS[0, :5], MTPModules(network, 3), max_new_tokens=12)
    plain = generate(target, TOKENS[0, :5], max_new_tokens=12)
    assert run.sequences[0].equal(plain.sequences[0])


# Training and decoding


def network_for(n_modules: int, own_norm: bool = True) -> SequentialModules:
    network = SequentialModules(of_depth(TARGET.config, n_modules), tap=FINAL, own_norm=own_norm)
    generator = torch.Generator().manual_seed(2)
    network.double().reset_parameters(generator)
    for module in network.modules():
        if isinstance(module, CentredRMSNorm):
            module.weight.data.uniform_(-0.4, 0.4, generator=generator)
    return network.eval().requires_grad_(False)


@torch.no_grad()
def trained_law(network: SequentialModules, row: Tensor, path: tuple[int, ...]) -> Tensor:
    """q [V] after `path` below the root of `row`, by plain causal passes as in training."""
    behind = [*path, *[0] * network.n_modules]
    tokens, known = torch.cat([row, torch.tensor(behind)])[None], len(row) - 1
    states = TARGET(tokens, taps=(FINAL,), logits=False).hidden[FINAL]
    states[:, known:] = 0.0  # the target has not seen the root yet
    if network.n_modules > 1:
        return network(states, tokens, TARGET)[len(path)][0, known - 1].softmax(-1)
    states = states[:, :known]
    for n in range(known, known + len(path) + 1):
        rotary = network.angles(torch.arange(n)[None], states)
        handed = network.step(1, TARGET, states, TARGET.embedding(tokens[:, 1 : n + 1]), rotary)
        states = torch.cat([states, handed[:, -1:]], dim=1)
    return network.logits(1, states[:, -1:], TARGET)[0, 0].softmax(-1)


@pytest.mark.parametrize(
    ("n_modules", "own_norm", "options"),
    [(1, True, {}), (1, False, {"top_k": 3, "n_nodes": 9}), (2, True, {"n_drafts": 2})],
    ids=["one again", "one again, tree", "two"],
)
def test_a_draft_is_what_training_says(n_modules, own_norm, options):
    """Catches positions, angles or masks of decoding that training never saw; see `test_mtp`."""
    network = network_for(n_modules, own_norm)
    recorder = Recorder(MTPModules(network, **{"n_drafts": 3} | options))
    prompts = [STORY[:1], STORY[:2], STORY[:6]]
    generate(TARGET, prompts, recorder, max_new_tokens=7, rule=Rejection(seed=1))
    n_compared = 0
    for context, draft in recorder.seen:
        for b in (context.live & (context.lengths > 1)).nonzero().flatten().tolist():
            row = context.tokens[b, : int(context.lengths[b])]
            siblings: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
            for path, q in nodes(draft, b, 99):
                assert q is not None
                siblings.setdefault(path[:-1], []).append((path[-1], q))
            for above, drawn in siblings.items():
                tokens = torch.tensor([token for token, _ in drawn])
                expected = without_replacement(trained_law(network, row, above), tokens)
                assert (torch.stack([q for _, q in drawn]) - expected).abs().max() < 1e-9
                n_compared += 1
    assert n_compared > 20


@pytest.mark.parametrize(
    ("n_modules", "options"),
    [(1, {"n_drafts": 3}), (1, {"n_drafts": 3, "top_k": 3, "n_nodes": 7}), (2, {})],
    ids=["one again", "one again, tree", "two"],
)
def test_chains_and_trees_are_lossless(n_modules, options):
    """Catches a hybrid target whose states go stale behind a hybrid module's drafts."""
    report = check_lossless(
        TARGET,
        MTPModules(network_for(n_modules), **options),
        prompts=[STORY[:1], STORY[:9]],
        max_new_tokens=5,
        rules=[Greedy(), Coupled(0.3)],
        n_samples=0,
    )
    assert not report.near_ties


def test_overfits_one_batch_from_fresh_weights():
    """Catches fresh norms that start at twice their size, and parts without a gradient."""
    network = SequentialModules(of_depth(TARGET.config, 1), tap=FINAL, own_norm=True).double()
    network.reset_parameters(torch.Generator().manual_seed(0))
    for module in network.modules():
        if isinstance(module, CentredRMSNorm):
            assert not module.weight.any()
    hidden = TARGET(STORY[None], taps=(FINAL,), logits=False).hidden
    optimizer, losses = torch.optim.Adam(network.parameters(), lr=0.02), []
    for _ in range(60):
        loss = mtp_loss(network, TARGET, hidden, STORY[None], weight=1.0)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.5
    assert losses[-1] < 0.3


def test_copies_of_a_module_keep_its_shape():
    """Catches copies made dense, or a config that says one module where there are three."""
    network = resized(network_for(1), 3)
    assert network.n_modules == network.config.num_hidden_layers == 3
    assert network.shape == of_depth(TARGET.config, 3)
    generate(TARGET, STORY[:3], MTPModules(network), max_new_tokens=5)


# Folders


@pytest.mark.parametrize("n_experts", [0, 4])
def test_a_module_alone_comes_back_as_it_was(tmp_path, n_experts):
    """Catches halves exchanged once, and a module that is read in another dtype."""
    target = small_hybrid(5, n_experts=n_experts)
    network = SequentialModules(of_depth(target.config, 1), tap=FINAL, own_norm=True).double()
    network.reset_parameters(torch.Generator().manual_seed(3))
    save_qwen_mtp(network, tmp_path, metadata={"steps": 4})
    again = load_qwen_mtp(tmp_path, target)
    assert again.state_dict().keys() == network.state_dict().keys()
    for name, weight in network.state_dict().items():
        assert again.state_dict()[name].equal(weight), name
    assert json.loads((tmp_path / "config.json").read_text())["training"] == {"steps": 4}
    stored = load_file(tmp_path / "model.safetensors")
    ours = network.state_dict()["blocks.0.projection.weight"]
    assert stored["mtp.fc.weight"][:, : target.hidden_size].equal(ours[:, target.hidden_size :])


def test_it_drafts_from_the_targets_own_folder(tmp_path):
    """Catches a module that `load_drafter` does not know, and a target taken for a drafter."""
    folder = folder_with_mtp(next(iter(KINDS)), tmp_path)
    drafter = load_drafter(folder, load_target(folder, torch.float64))
    assert type(drafter) is MTPModules
    save_qwen_moe(TARGET, tmp_path / "plain")
    with pytest.raises(ValueError, match="holds no drafter of a known format"):
        load_drafter(tmp_path / "plain", TARGET)


def test_blocks_of_a_hybrid_are_not_written_in_the_dense_layout(tmp_path):
    """Catches a folder that nothing can read."""
    with pytest.raises(ValueError, match=r"network: expected dense blocks, .*QwenMoeConfig"):
        save_mtp(network_for(1), tmp_path)
    assert not list(tmp_path.iterdir())


def test_modules_that_the_layout_cannot_say_are_refused(tmp_path):
    """Catches a folder that comes back as another module."""
    dense = SequentialModules(small_target(1, n_layers=1).config, tap=FINAL, own_norm=True)
    with pytest.raises(ValueError, match=r"network: expected one module of a QwenMoeConfig.*got 1"):
        save_qwen_mtp(dense, tmp_path)
    with pytest.raises(ValueError, match=r"network: expected one module .* got 2"):
        save_qwen_mtp(network_for(2), tmp_path)
    with pytest.raises(ValueError, match="final norm of its own, got none"):
        save_qwen_mtp(network_for(1, own_norm=False), tmp_path)
    with pytest.raises(ValueError, match="shape: expected layer_types of 'full_attention' alone"):
        SequentialModules(TARGET.config, tap=FINAL)
    assert not list(tmp_path.iterdir())


def test_folders_without_the_module_or_for_another_target_are_refused(tmp_path):
    """Catches a module of noise, and one that fits nothing it is used with."""
    save_qwen_moe(TARGET, tmp_path / "target")
    with pytest.raises(ValueError, match=r"folder: expected weights mtp.\* in .*, found none"):
        load_qwen_mtp(tmp_path / "target", TARGET)
    save_qwen_mtp(network_for(1), tmp_path / "module")
    with pytest.raises(ValueError, match="vocab_size=11; expected 7"):
        load_qwen_mtp(tmp_path / "module", small_hybrid(1, vocab_size=7))
    path = tmp_path / "module" / "model.safetensors"
    weights = load_file(path)
    norm_of_two = {"mtp.layers.1.input_layernorm.weight": torch.ones(16)}
    save_file({n: w for n, w in weights.items() if n != "mtp.norm.weight"} | norm_of_two, path)
    with pytest.raises(
        ValueError, match=r"missing: \['mtp.norm.weight'\]; unexpected: \['mtp.layers.1"
    ):
        load_qwen_mtp(tmp_path / "module", TARGET)
    for name, value in (("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)):
        fields = json.loads((tmp_path / "module" / "config.json").read_text())
        (tmp_path / "module" / "config.json").write_text(json.dumps(fields | {name: value}))
        with pytest.raises(ValueError, match=f"{name}={value}"):
            load_qwen_mtp(tmp_path / "module", TARGET)
        (tmp_path / "module" / "config.json").write_text(json.dumps(fields))
