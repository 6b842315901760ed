"""The commands of `python -m specdec.training`, each for two steps on a toy target."""

import json

import pytest
import torch

from specdec import DraftModel, generate
from specdec.checkpoints import load_drafter, load_modules, load_target, load_transformer
from specdec.models import QwenMoe
from specdec.training.__main__ import main
from specdec.training.recipes import RECIPES

SMALL = ["--steps", "2", "--batch", "4", "--length", "48"]
PROMPT = torch.tensor([10, 20, 30])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and a target with its module trained on it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    for i in range(60):
        (folder / "text" / f"m{i}.txt").write_text(f"number {i} of sixty, " * 20)
    shape = ["--layers", "7", "--width", "32", "--inner", "32"]
    main(["target", "--out", f"{folder}/target", "--corpus", f"{folder}/text", *shape, *SMALL])
    shape = ["--layers", "4", "--width", "32", "--inner", "8", "--shared-inner", "8"]
    experts = ["--experts", "3", "--top-k", "2"]
    text = ["--corpus", f"{folder}/text"]
    main(["hybrid", "--out", f"{folder}/hybrid", *text, *shape, *experts, *SMALL])
    return folder


def options(folder, name: str) -> list[str]:
    own = {
        "mtp": ["--module", f"{folder}/target-mtp"],
        "eagle3": ["--unroll", "2"],
        "draft": ["--width", "16"],
        "dflash": ["--taps", "2", "4", "5", "--block", "6"],
    }
    text = ["--corpus", f"{folder}/text", "--target", f"{folder}/target"]
    return [name, "--out", f"{folder}/{name}", *text, *SMALL, *own.get(name, [])]


def test_the_target_comes_with_its_module_and_its_card(folder):
    """A module of another width or tap, and numbers that nobody can reproduce."""
    target = load_transformer(folder / "target", torch.float64)
    assert load_modules(folder / "target-mtp", target).tap == target.n_layers == 7
    card = json.loads((folder / "target" / "config.json").read_text())["training"]
    assert {"held_out_bits_per_byte", "seed", "steps", "bytes_seen"} <= card.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_command_writes_drafts_for_the_target(folder, name):
    """A folder that nothing reads, a loss that lacks its tap, a drafter of another target."""
    main(options(folder, name))
    target = load_transformer(folder / "target", torch.float64)
    drafter = (
        DraftModel(load_transformer(folder / name, torch.float64))
        if name == "draft"
        else load_drafter(folder / name, target)
    )
    plain = generate(target, PROMPT, max_new_tokens=8)
    run = generate(target, PROMPT, drafter, max_new_tokens=8)
    assert run.sequences[0].tolist() == plain.sequences[0].tolist()
    assert any(r.draft.n_nodes for r in run.rounds)
    card = json.loads((folder / name / "config.json").read_text())["training"]
    assert card["held_out_tau"] >= 1
    assert ("choices" in card) == (name in ("medusa", "heads"))


@pytest.mark.parametrize("name", ["module", "draft", "medusa", "eagle1", "eagle3", "dflash"])
def test_a_hybrid_is_written_read_and_drafted_for(folder, name):
    """A folder that nothing reads, a drafter that asks for the config of a dense target."""
    target = load_target(folder / "hybrid", torch.float64)
    assert isinstance(target, QwenMoe)
    out = folder / ("hybrid-mtp" if name == "module" else f"hybrid-{name}")
    if name != "module":
        command = options(folder, name)
        command[command.index(f"{folder}/{name}")] = f"{out}"
        command[command.index(f"{folder}/target")] = f"{folder}/hybrid"
        main([*command, *(["--taps", "0", "1", "2"] if name in ("eagle3", "dflash") else [])])
    drafter = (
        DraftModel(load_transformer(out, torch.float64))
        if name == "draft"
        else load_drafter(out, target)
    )
    plain = generate(target, PROMPT, max_new_tokens=8)
    run = generate(target, PROMPT, drafter, max_new_tokens=8)
    assert run.sequences[0].tolist() == plain.sequences[0].tolist()


def test_parallel_heads_are_for_dense_targets(folder):
    """A trunk without the last block, of a model that has none to copy."""
    command = options(folder, "heads")
    command[command.index(f"{folder}/target")] = f"{folder}/hybrid"
    with pytest.raises(ValueError, match="target: expected a Transformer"):
        main(command)


def test_the_frozen_parts_stay_as_they_are(folder):
    """MiMo's recipe that trains the first module, which the copies are to follow."""
    main([*options(folder, "mtp")[:2], f"{folder}/mtp-again", *options(folder, "mtp")[3:]])
    target = load_transformer(folder / "target", torch.float64)
    first = load_modules(folder / "target-mtp", target)
    three = load_modules(folder / "mtp-again", target)
    name = "projection.weight"
    assert three.n_modules == 3
    weight = first.blocks[0].get_parameter(name)
    assert torch.equal(three.blocks[0].get_parameter(name), weight)
    assert not torch.equal(three.blocks[1].get_parameter(name), weight)


def test_text_of_its_own_and_cached_states(folder):
    """Options that fit no recipe: the mask of written text, the taps of a cache."""
    own = ["--written", f"{folder}/written", "--batches", "1", "--features", f"{folder}/features"]
    command = [*options(folder, "medusa"), *own]
    main([*command[:2], f"{folder}/medusa-own", *command[3:]])
    target = load_transformer(folder / "target", torch.float64)
    assert load_drafter(folder / "medusa-own", target)
    assert list((folder / "written").glob("*.safetensors"))
    assert list((folder / "features").glob("*.safetensors"))


def test_an_epoch_of_states_is_kept(folder, monkeypatch):
    """`--cached-steps` that is read and not used, or without a cache to mean anything."""
    kept = []

    def cached(source, where, n_steps):
        kept.append(n_steps)
        return source

    monkeypatch.setattr("specdec.training.__main__.CachedFeatures", cached)
    command = options(folder, "eagle3")
    command[command.index(f"{folder}/eagle3")] = f"{folder}/eagle3-kept"
    main([*command, "--features", f"{folder}/kept", "--cached-steps", "1"])
    assert kept == [1]
    for wrong in (["--cached-steps", "1"], ["--features", "x", "--cached-steps", "0"]):
        with pytest.raises(SystemExit):
            main([*options(folder, "eagle3"), *wrong])


def test_eagle3_starts_as_it_is_told(folder, monkeypatch):
    """A start that is read and not used, or used unasked."""
    scaled = []
    monkeypatch.setattr("specdec.training.recipes.start_scaled", lambda *a: scaled.append(a))
    for i, more in enumerate(([], ["--start", "scaled"])):
        command = options(folder, "eagle3")
        command[command.index(f"{folder}/eagle3")] = f"{folder}/eagle3-start-{i}"
        main([*command, *more])
    assert len(scaled) == 1
