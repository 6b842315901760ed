"""`python -m specdec.training`: train a byte-level target, then a drafter of any method for it.

    python -m specdec.training target --out runs/target
    python -m specdec.training eagle3 --target runs/target --out runs/eagle3

Each is resumed where it was broken off when called again, and runs on several processes under
`torchrun --nproc-per-node N -m specdec.training ...` with the same global batch.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..accept import Coupled, Greedy
from ..checkpoints import save_mtp, save_qwen_moe, save_transformer
from ..drafters.mtp import SequentialModules
from ..load import load
from ..models.decoder import Decoder
from ..tokenizer import BPETokenizer, ByteTokenizer
from .conversations import Conversations, write_conversations
from .corpus import Corpus, Text
from .distributed import Ranks, joined
from .features import CachedFeatures, TargetFeatures
from .fit import fit, optimizers
from .held_out import held_out_prompts, held_out_tau
from .hybrid import hybrid_loss, new_hybrid
from .questions import questions, read_questions
from .recipes import DIVERGENCES, RECIPES, new_target, target_loss
from .written import write_text

HELD_OUT = 20
"""One question in so many is not trained on."""


def bits_per_byte(model: Decoder, tokens: Tensor) -> float:
    """Mean bits the model needs for a byte of `tokens` [B, T + 1]."""
    with torch.no_grad():
        total = sum(
            F.cross_entropy(model(row[:, :-1]).logits.flatten(0, 1), row[:, 1:].flatten()).item()
            for row in tokens.split(8)
        )
    return total / len(tokens.split(8)) / math.log(2)


def train_target(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """A target that can exit early and brings an MTP module, in the folders OUT and OUT-mtp."""
    corpus = open_corpus(arguments.corpus)
    target, mtp = new_target(arguments)
    loss = target_loss(target, mtp, corpus, arguments, ranks)
    finish_target(target, mtp, loss, save_transformer, corpus, arguments, ranks)


def train_hybrid(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """A hybrid target with routed experts and an MTP module, in the folders OUT and OUT-mtp."""
    corpus = open_corpus(arguments.corpus)
    target, mtp = new_hybrid(arguments)
    loss = hybrid_loss(target, mtp, corpus, arguments, ranks)
    finish_target(target, mtp, loss, save_qwen_moe, corpus, arguments, ranks)


def finish_target(
    target: Decoder,
    mtp: SequentialModules,
    loss: Callable[[int], Tensor],
    save: Callable[..., None],
    corpus: Corpus,
    arguments: argparse.Namespace,
    ranks: Ranks,
) -> None:
    """Train, keep the weights with the fewest held-out bits, write both folders."""
    held_out = corpus.held_out_batch(64, arguments.length)
    modules = nn.ModuleDict({"target": target} | ({"mtp": mtp} if arguments.mtp_weight else {}))
    card = run(
        modules, loss, lambda: bits_per_byte(target, held_out), arguments, ranks, maximize=False
    )
    if ranks.is_first:
        card |= {"held_out_bits_per_byte": card.pop("held_out")}
        card |= {"train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out)}
        save(target, arguments.out, dtype=torch.bfloat16, metadata=card)
        if arguments.mtp_weight:
            save_mtp(mtp, f"{arguments.out}-mtp", dtype=torch.bfloat16, metadata=card)
        print(f"{arguments.out}: {card}")


def train_drafter(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """A drafter for a frozen target, selected by its held-out tau."""
    bundle = load(arguments.target)
    target = bundle.target.to(ranks.device)
    lowered = functools.partial(
        torch.autocast, ranks.device.type, torch.bfloat16, enabled=arguments.autocast
    )
    text, prompts = open_text(arguments, target, bundle.tokenizer, ranks)
    recipe = RECIPES[arguments.what](target, arguments, text)
    source = features = TargetFeatures(
        target,
        text,
        recipe.taps,
        arguments.batch,
        arguments.length,
        arguments.seed,
        dtype=torch.bfloat16 if arguments.autocast else None,
        ranks=ranks,
    )
    if arguments.features:
        with lowered():
            n_steps = arguments.cached_steps or arguments.steps
            features = CachedFeatures(source, arguments.features, n_steps)

    def loss_of(step: int) -> Tensor:
        drawn = torch.Generator().manual_seed(
            (arguments.seed * 1_000_003 + step) * ranks.size + ranks.rank
        )
        with lowered():
            tokens, hidden = features(step)
            return recipe.loss(hidden, tokens, features.own(step), drawn)

    card = run(
        recipe.network,
        loss_of,
        lambda: held_out_tau(target, recipe.drafter, prompts),
        arguments,
        ranks,
        maximize=True,
    )
    if ranks.is_first:
        card |= {"held_out_tau": card.pop("held_out")} | recipe.finish()
        recipe.save(recipe.network, arguments.out, dtype=torch.bfloat16, metadata=card)
        print(f"{arguments.out}: {card}")


def open_text(
    arguments: argparse.Namespace,
    target: Decoder,
    tokenizer: ByteTokenizer | BPETokenizer | None,
    ranks: Ranks,
) -> tuple[Text, list[Tensor]]:
    """What to train on, and held-out prompts."""
    if arguments.questions or arguments.prompts:
        return open_conversations(arguments, target, tokenizer, ranks)
    corpus = open_corpus(arguments.corpus)
    prompts = held_out_prompts(corpus)
    if not arguments.written:
        return corpus, prompts
    n_given = min(64, arguments.length // 2)
    text = write_text(
        arguments.written,
        target,
        corpus,
        arguments.batches,
        n_given=n_given,
        n_new=arguments.length + 1 - n_given,
        ranks=ranks,
    )
    return text, prompts


def open_conversations(
    arguments: argparse.Namespace,
    target: Decoder,
    tokenizer: ByteTokenizer | BPETokenizer | None,
    ranks: Ranks,
) -> tuple[Conversations, list[Tensor]]:
    """The target's answers to questions; the first of `HELD_OUT` questions is held out."""
    if not isinstance(tokenizer, BPETokenizer):
        raise ValueError(
            f"--questions, --prompts: expected a target with a chat template, "
            f"got {arguments.target}"
        )
    if not arguments.written:
        raise ValueError("--written: expected a folder for the answers, got none")
    asked = questions(arguments.questions) if arguments.questions else []
    for file in arguments.prompts or []:
        asked += read_questions(file)
    prompts = [tokenizer.chat([{"role": "user", "content": each}]) for each in asked]
    held_out, kept = prompts[::HELD_OUT], [p for i, p in enumerate(prompts) if i % HELD_OUT]
    writer = copy.deepcopy(target).to(torch.bfloat16) if arguments.autocast else target
    conversations = write_conversations(
        arguments.written,
        writer,
        [prompt for prompt in kept if len(prompt) <= arguments.length // 2],
        arguments.batches,
        stop_tokens=tokenizer.stop_tokens,
        max_new_tokens=arguments.new_tokens,
        rule=Coupled(temperature=arguments.temperature) if arguments.temperature else Greedy(),
        ranks=ranks,
    )
    text = Conversations.join(conversations, arguments.length + 1)
    return text, [prompt for prompt in held_out if len(prompt) <= arguments.length // 2][:12]


def run(
    module: nn.Module,
    loss_of: Callable[[int], Tensor],
    evaluate: Callable[[], float],
    arguments: argparse.Namespace,
    ranks: Ranks,
    *,
    maximize: bool,
) -> dict[str, object]:
    """Train `module`; returns what its card says of it, `held_out` the best evaluation."""
    history = fit(
        module,
        loss_of,
        optimizers(module, arguments.lr, arguments.muon_lr),
        arguments.steps,
        folder=Path(arguments.out) / "state",
        warmup=min(100, arguments.steps // 10),
        save_every=50,
        evaluate=evaluate,
        evaluate_every=max(1, arguments.steps // 8),
        maximize=maximize,
        ranks=ranks,
        description=arguments.what,
    )
    values = [value for _, value in history]
    return {
        "held_out": round(max(values) if maximize else min(values), 4),
        "seed": arguments.seed,
        "steps": arguments.steps,
        "bytes_seen": arguments.steps * arguments.batch * arguments.length,
    }


def open_corpus(folder: str | None) -> Corpus:
    return Corpus.standard_library() if folder is None else Corpus.from_folder(folder)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m specdec.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)
    targets = {"target": train_target, "hybrid": train_hybrid}
    for name, steps in {**dict.fromkeys(targets, 1050), **dict.fromkeys(RECIPES, 400)}.items():
        about = (targets | RECIPES)[name].__doc__
        command = commands.add_parser(
            name,
            help=about,
            description=about,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_argument("--out", required=True, help="folder for config, weights and state")
        command.add_argument("--corpus", help="folder of text; default: Python's standard library")
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--batch", type=int, default=8, help="windows a step, of all ranks")
        command.add_argument("--length", type=int, default=512, help="bytes a window")
        command.add_argument("--lr", type=float, default=3e-3, help="AdamW's")
        command.add_argument("--muon-lr", type=float, default=6e-3, help="Muon's, 0: AdamW alone")
        command.add_argument("--seed", type=int, default=0)
        if name in targets:
            inner = 576 if name == "target" else 80
            command.add_argument("--layers", type=int, default=8)
            command.add_argument("--width", type=int, default=256)
            command.add_argument("--inner", type=int, default=inner, help="width inside an MLP")
            command.add_argument("--mtp-weight", type=float, default=0.3, help="0: no MTP module")
        if name == "target":
            command.add_argument("--exit-scale", type=float, default=0.2, help="0: no early exits")
            command.add_argument("--layer-dropout", type=float, default=0.1)
        if name == "hybrid":
            command.add_argument("--experts", type=int, default=16, help="routed, a block")
            command.add_argument("--top-k", type=int, default=4, help="of them a token")
            command.add_argument("--shared-inner", type=int, default=128)
        if name in targets:
            continue
        command.add_argument(
            "--target",
            required=True,
            help="folder of a trained target, or a name `load` knows",
        )
        command.add_argument(
            "--autocast", action="store_true", help="compute in bfloat16, keep weights as they are"
        )
        command.add_argument("--features", help="folder to cache the target's states in")
        command.add_argument(
            "--cached-steps", type=int, help="so many, an epoch, over and over; default: all steps"
        )
        command.add_argument(
            "--written", help="folder of text for the target to write; train on it"
        )
        command.add_argument("--batches", type=int, default=32, help="of text written, most")
        conversation_options(command)
        if name in ("eagle3", "dflash"):
            command.add_argument(
                "--taps", type=int, nargs="+", help="states to fuse; default: the published ones"
            )
        if name == "dflash":
            dflash_options(command)
        if name == "draft":
            command.add_argument("--layers", type=int, default=1)
            command.add_argument("--width", type=int, default=192)
        if name == "eagle3":
            command.add_argument(
                "--unroll", type=int, default=4, help="steps of training-time test"
            )
            command.add_argument("--vocabulary", type=int, help="tokens to draft; default: all")
            command.add_argument(
                "--start", choices=["scaled", "plain"], default="plain", help="of the layer"
            )
        if name == "mtp":
            command.add_argument("--module", required=True, help="folder of the target's module")
            command.add_argument("--modules", type=int, default=3)
    arguments = parser.parse_args(argv)
    n_cached = getattr(arguments, "cached_steps", None)
    if n_cached is not None and (n_cached < 1 or not arguments.features):
        parser.error(f"--cached-steps: expected at least 1, with --features, got {n_cached}")
    return arguments


def conversation_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--questions", type=int, help="built-in ones for a chat target to answer, with --written"
    )
    command.add_argument("--prompts", action="append", help="file of questions, lines of JSON")
    command.add_argument("--new-tokens", type=int, default=256, help="most of an answer")
    command.add_argument("--temperature", type=float, default=0.0, help="of the answers")


def dflash_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--layers", type=int, default=3)
    command.add_argument("--inner", type=int, help="width inside an MLP; default: the target's")
    command.add_argument(
        "--mask-token", type=int, help="an id that no text has; default: the last one"
    )
    command.add_argument("--block", type=int, default=16, help="slots of a block, root included")
    command.add_argument("--blocks", type=int, default=32, help="most blocks of a window")
    command.add_argument("--loss", choices=list(DIVERGENCES), default="kl")
    command.add_argument("--decay", type=float, default=7.0, help="lambda of the weights")
    command.add_argument("--dpace", type=float, help="alpha of D-PACE, in place of the decay")
    command.add_argument("--corruption", choices=["full", "uniform"], default="full")
    command.add_argument(
        "--sight", choices=["bidirectional", "causal", "mixed"], default="bidirectional"
    )
    command.add_argument("--window", type=int, help="of the layers that are not full; default: all")
    command.add_argument(
        "--at-input", action="store_true", help="context at the input, not in every layer"
    )
    command.add_argument("--dflash2", action="store_true", help="convolutions and selector, too")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    with joined() as ranks:
        own = {"target": train_target, "hybrid": train_hybrid}
        own.get(arguments.what, train_drafter)(arguments, ranks)


if __name__ == "__main__":
    main()
