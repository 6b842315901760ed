"""Writes speculators_eagle3/ and speculators_dflash/ with the package `speculators`, checks ours.

The package wants another transformers than ours, so it lives in an environment of its own::

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    pip install torch transformers loguru openai datasets
    python tests/golden/make_speculators.py          # write the folders
    python tests/golden/make_speculators.py --check  # what specdec writes loads there, is equal

Every folder holds what `save_pretrained` wrote of small random layers, and case.safetensors:
inputs, and what the package's own forward pass (eager attention, float32, CPU) makes of them. Made
with speculators 0.9.0, transformers 5.24.0 and torch 2.13.0.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

HERE = Path(__file__).parent
WIDTH, VOCAB, N_DRAFT, LENGTH, N_STEPS, BLOCK = 16, 53, 29, 16, 3, 6
ANCHOR, MASK = 7, 52
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
FULL, SLIDING = "full_attention", "sliding_attention"

EAGLE3 = {  # name -> layer config, fields
    "plain": (LlamaConfig(**SHAPE, num_hidden_layers=1), {}),
    "norms": (
        Qwen3Config(**SHAPE, num_hidden_layers=1),
        {
            "draft_vocab_size": N_DRAFT,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
        },
    ),
    "norm_of_each_tap": (LlamaConfig(**SHAPE, num_hidden_layers=1), {"fc_norm": True}),
}


def qwen3(kinds: list[str], window: int | None = None) -> Qwen3Config:
    return Qwen3Config(
        **SHAPE,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        sliding_window=window,
        use_sliding_window=window is not None,
    )


# a window that covers the context: the package counts it from the root, vLLM and we from each slot
DFLASH = {
    "mixed": (qwen3([SLIDING, SLIDING, FULL], 64), {}),
    "from_anchor": (
        qwen3([SLIDING, FULL], 64),
        {
            "draft_vocab_size": N_DRAFT,
            "sliding_window_non_causal": True,
            "sample_from_anchor": True,
        },
    ),
    "dflash2": (
        qwen3([FULL, FULL]),
        {
            "conv_kernel_size": 2,
            "conv_group_size": 4,
            "selector_rank": 4,
            "selector_top_k": 5,
        },
    ),
}


def spoken(algorithm: str, n_drafts: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=n_drafts)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def fill(model: SpeculatorModel, generator: torch.Generator) -> None:
    """Random weights large enough for every part to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + drawn / 4 if parameter.ndim == 1 else drawn / 3)
        if model.t2d is not None:
            ids = torch.randperm(VOCAB, generator=generator)[:N_DRAFT].sort().values
            model.d2t.copy_(ids - torch.arange(N_DRAFT))
            model.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True))


def eagle3(config: LlamaConfig | Qwen3Config, fields: dict) -> Eagle3DraftModel:
    config._attn_implementation = "eager"
    return Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=config,
            eagle_aux_hidden_state_layer_ids=[1, 3, 4],
            speculators_config=spoken("eagle3", 3),
            **{"draft_vocab_size": VOCAB, **fields},
        )
    ).eval()


def dflash(config: Qwen3Config, fields: dict) -> DFlashDraftModel:
    config._attn_implementation = "eager"
    second = "conv_kernel_size" in fields
    kind = DFlash2SpeculatorConfig if second else DFlashSpeculatorConfig
    return (DFlash2DraftModel if second else DFlashDraftModel)(
        kind(
            transformer_layer_config=config,
            aux_hidden_state_layer_ids=[1, 4],
            block_size=BLOCK,
            mask_token_id=MASK,
            speculators_config=spoken("dflash2" if second else "dflash", BLOCK - 1),
            **{"draft_vocab_size": VOCAB, **fields},
        )
    ).eval()


@torch.no_grad()
def run_eagle3(model: Eagle3DraftModel, hidden: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Logits of every step [1, T - 1, Vd], true tokens fed; places beyond T - 2 - s are void."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, read, wrote: seen.append(wrote))
    model(
        hidden[:, :-1],
        tokens[:, 1:],
        document_ids=torch.zeros(1, tokens.shape[1] - 1, dtype=torch.long),
        ttt_steps=N_STEPS,
    )
    hook.remove()
    return {f"logits.{step}": logits.clone() for step, logits in enumerate(seen)}


@torch.no_grad()
def run_dflash(model: DFlashDraftModel, hidden: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """States and logits of the block behind ANCHOR, [1, BLOCK, ...].

    `said` [BLOCK]: the place of the token that each slot is trained to say.
    """
    anchor = torch.zeros_like(tokens, dtype=torch.bool)
    anchor[0, ANCHOR] = True
    last = hidden[..., :WIDTH]
    states, logits, targets, _, _ = model._backbone_forward(
        hidden, tokens, anchor, last, torch.zeros_like(tokens), max_anchors=1
    )
    laws = model.verifier_lm_head(model.verifier_norm(last))  # at place t, of token t + 1
    same = (laws[0] - targets[0].unsqueeze(1)).abs().amax(-1) < 1e-5  # [BLOCK, LENGTH]
    assert (same.sum(1) == 1).all()
    case = {"states": states, "logits": logits, "said": same.int().argmax(1) + 1}
    if isinstance(model, DFlash2DraftModel):
        ids, scores = model.candidate_selector.select(
            logits[:, 1:2], states[:, 1:2], tokens[:, ANCHOR : ANCHOR + 1]
        )
        case |= {"candidates": ids, "scores": scores}
    return {name: tensor.clone() for name, tensor in case.items()}


def write() -> None:
    generator = torch.Generator().manual_seed(11)
    for method, cases in (("eagle3", EAGLE3), ("dflash", DFLASH)):
        for name, (config, fields) in cases.items():
            model = (eagle3 if method == "eagle3" else dflash)(config, fields)
            fill(model, generator)
            n_taps = len(model.target_layer_ids)
            tokens = torch.randint(0, VOCAB - 1, (1, LENGTH), generator=generator)
            hidden = torch.randn(1, LENGTH, n_taps * WIDTH, generator=generator)
            case = {"tokens": tokens, "hidden": hidden, "embed_tokens": model.embed_tokens.weight}
            if method == "dflash" and not model.use_draft_vocab:
                case["lm_head"] = model.lm_head.weight
            case |= (run_eagle3 if method == "eagle3" else run_dflash)(model, hidden, tokens)
            folder = HERE / f"speculators_{method}" / name
            model.save_pretrained(folder)
            (folder / "config.py").unlink()  # the package's source
            save_file(
                {n: t.detach().contiguous() for n, t in case.items()}, folder / "case.safetensors"
            )


@torch.no_grad()
def check() -> None:
    """What specdec reads and writes again loads with the package: same weights, same outputs."""
    from specdec.checkpoints import load_speculators, load_target, save_speculators

    for folder in sorted(HERE.glob("speculators_*/*")):
        case = load_file(folder / "case.safetensors")
        with tempfile.TemporaryDirectory() as place:
            verifier, written = Path(place) / "verifier", Path(place) / "written"
            write_verifier(verifier, case)
            target = load_target(verifier)
            network = load_speculators(folder, target)
            save_speculators(
                network,
                written,
                target,
                verifier=str(verifier),
                architectures=["LlamaForCausalLM"],
            )
            ours, theirs = (load_file(at / "model.safetensors") for at in (written, folder))
            assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
            config = SpeculatorModel.config_class.from_pretrained(written)
            config.transformer_layer_config._attn_implementation = "eager"
            model = SpeculatorModel.from_pretrained(written, config=config).eval()
        loaded = model.state_dict()
        assert all(torch.equal(loaded[name], weight) for name, weight in ours.items())
        run = run_eagle3 if "said" not in case else run_dflash
        for name, tensor in run(model, case["hidden"], case["tokens"]).items():
            torch.testing.assert_close(tensor, case[name], rtol=0, atol=1e-6)
        print(f"{folder.parent.name}/{folder.name}: equal")


def write_verifier(folder: Path, case: dict[str, Tensor]) -> None:
    """A random Llama with the embeddings and the head of `case`."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=6, tie_word_embeddings=False))
    model.model.embed_tokens.weight.copy_(case["embed_tokens"])
    model.lm_head.weight.copy_(case.get("lm_head", torch.randn(VOCAB, WIDTH)))
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check() if parser.parse_args().check else write()
