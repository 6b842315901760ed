"""`python -m specdec.training`: train a byte-level target, or distil a draft model from one."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints import load_transformer, save_transformer
from ..distill import distillation_loss
from ..drafters.layerskip import (
    block_states,
    draw_kept,
    exit_loss,
    exit_loss_weights,
    layer_dropout_rates,
)
from ..drafters.mtp import SequentialModules, mtp_loss
from ..models import Transformer, TransformerConfig
from .corpus import Corpus
from .fit import fit, optimizers


def bits_per_byte(model: Transformer, tokens: Tensor) -> float:
    """Mean bits the model needs for a byte of `tokens` [B, T + 1]."""
    with torch.no_grad():
        total = sum(
            F.cross_entropy(model(row[:, :-1]).logits.flatten(0, 1), row[:, 1:].flatten()).item()
            for row in tokens.split(8)
        )
    return total / len(tokens.split(8)) / math.log(2)


def train_target(arguments: argparse.Namespace) -> tuple[nn.Module, dict[str, object]]:
    """Next byte, at every exit under layer dropout, and one MTP module."""
    config = TransformerConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model, corpus = fresh(config, arguments.seed), open_corpus(arguments.corpus)
    mtp = SequentialModules(
        dataclasses.replace(config, num_hidden_layers=1), tap=config.num_hidden_layers
    ).reset_parameters(torch.Generator().manual_seed(arguments.seed + 1))
    weights = exit_loss_weights(model.n_layers, arguments.exit_scale, linear=True)
    rates = layer_dropout_rates(model.n_layers, arguments.layer_dropout, linear=True)

    def loss_of(step: int) -> Tensor:
        batch, length = arguments.batch, arguments.length
        if step < 0.7 * arguments.steps:  # short windows first: attention costs less there
            batch, length = 2 * batch, length // 2
        tokens = corpus.batch(step, batch, length, arguments.seed)
        generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step)
        hidden = block_states(model, tokens[:, :-1], draw_kept(rates, batch, generator))
        loss = exit_loss(model, hidden, tokens[:, 1:], weights)
        weight = 0.3 if step < 2 / 3 * arguments.steps else 0.1
        return loss + mtp_loss(mtp, model, hidden, tokens[:, :-1], weight=weight)

    return run(nn.ModuleDict({"target": model, "mtp": mtp}), model, loss_of, corpus, arguments)


def train_draft(arguments: argparse.Namespace) -> tuple[Transformer, dict[str, object]]:
    target = load_transformer(arguments.target)
    config = TransformerConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model, corpus = fresh(config, arguments.seed), open_corpus(arguments.corpus)

    def loss_of(step: int) -> Tensor:
        tokens = corpus.batch(step, arguments.batch, arguments.length, arguments.seed)[:, :-1]
        with torch.no_grad():
            p = target(tokens).logits
        q = model(tokens).logits
        assert p is not None and q is not None
        return distillation_loss(q, p)

    return run(model, model, loss_of, corpus, arguments)


def fresh(config: TransformerConfig, seed: int) -> Transformer:
    return Transformer(config).reset_parameters(torch.Generator().manual_seed(seed))


def open_corpus(folder: str | None) -> Corpus:
    return Corpus.standard_library() if folder is None else Corpus.from_folder(folder)


def run(
    trained: nn.Module,
    model: Transformer,
    loss_of: Callable[[int], Tensor],
    corpus: Corpus,
    arguments: argparse.Namespace,
) -> tuple[Transformer, dict[str, object]]:
    held_out = corpus.held_out_batch(64, arguments.length)
    history = fit(
        trained,
        loss_of,
        optimizers(trained, arguments.lr, arguments.muon_lr),
        arguments.steps,
        folder=Path(arguments.out) / "state",
        evaluate=lambda: bits_per_byte(model, held_out),
        evaluate_every=150,
        save_every=50,
        description=arguments.what,
    )
    return model, {
        "held_out_bits_per_byte": round(history[-1][1], 4),
        "seed": arguments.seed,
        "steps": arguments.steps,
        "bytes_seen": arguments.steps * arguments.batch * arguments.length,
        "train_bytes": len(corpus.train),
        "held_out_bytes": len(corpus.held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specdec.training", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, layers, width, steps in (("target", 8, 256, 1050), ("draft", 1, 96, 1500)):
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("--out", required=True, help="folder for config, weights and state")
        command.add_argument("--corpus", help="folder of text; default: Python's standard library")
        command.add_argument("--layers", type=int, default=layers)
        command.add_argument("--width", type=int, default=width)
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--batch", type=int, default=8)
        command.add_argument("--length", type=int, default=512, help="bytes a window")
        command.add_argument("--lr", type=float, default=3e-3)
        command.add_argument("--muon-lr", type=float, default=6e-3)
        command.add_argument("--seed", type=int, default=0)
        if name == "target":
            command.add_argument("--inner", type=int, default=576, help="width inside the MLP")
            command.add_argument("--exit-scale", type=float, default=0.2)
            command.add_argument("--layer-dropout", type=float, default=0.1)
        if name == "draft":
            command.add_argument("--target", required=True, help="folder of a trained target")
    arguments = parser.parse_args()
    train = train_target if arguments.what == "target" else train_draft
    model, card = train(arguments)
    save_transformer(model, arguments.out, dtype=torch.bfloat16, metadata=card)
    print(f"{arguments.out}: {card}")


if __name__ == "__main__":
    main()
