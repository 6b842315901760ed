"""`python -m benchmarks.commit`: what it costs to roll a recurrent state back, five ways.

Four blocks of the 35B-A3B preset (three recurrent, one attending; hidden 2048), one row, a context,
then rounds of 16 tokens of which 8 are kept. In every round each way verifies the same tokens in a
cache of its own and rolls back; after every round all states must agree. Random weights, 64 experts
instead of 256 (3.2 GB in float32) and a small vocabulary: both make the verification cheaper than
that of the real model, and so the shares larger. Every way but the first takes chains only.

* commit: one product per layer over the pending k, u and g (`gated_delta.advance`); nothing is run
  again. Also over the path of a tree, whose entries have to be gathered.
* replay: norm and recurrent layer once more over the kept tokens, from the stored inputs of each
  block; what a model must do whose kernels hand back the last state only.
* restore: states copied before the verification and back, then all blocks over the kept tokens.
* snapshots: the state behind every token is written in the verification, one of them is picked.

Bytes are what a row holds from a verification to its end, beside the state itself, scaled to the 30
recurrent layers of the real model. Medians; shares and ratios are medians of those within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec.cache import TreeCache, everything
from specdec.models import QwenMoe, QwenMoeConfig
from specdec.models.delta_net import DeltaStore, DeltaView
from specdec.models.layers import Block
from specdec.models.qwen_moe import LINEAR
from specdec.protocol import Output

REAL = QwenMoeConfig.qwen35_35b_a3b()


@dataclass
class Way:
    """One way to roll back: its cache, what it does before and after a verification, its times.

    `before(way)` and `after(way, model, tokens, n, output)` are timed, the verification between
    them apart. `held` is whatever is kept for the roll-back.
    """

    cache: TreeCache
    before: Callable[[Way], None]
    after: Callable[[Way, QwenMoe, Tensor, int, Output], None]
    is_tree: bool = False
    held: list[Tensor] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def states_of(cache: TreeCache) -> DeltaStore:
    return next(store for store in cache.stores if isinstance(store, DeltaStore))


def nothing(way: Way) -> None:
    """No preparation."""


def pending_of(store: DeltaStore) -> list[Tensor]:
    """All that the recurrent layers keep of pending nodes."""
    kept = [x for p in store.pending if p is not None for x in (p.k, p.u, p.g, p.G)]
    return kept + [x for x in store.pending_inputs if x is not None]


def commit(way: Way, model: QwenMoe, tokens: Tensor, n: int, output: Output) -> None:
    way.held = pending_of(states_of(way.cache))
    path = torch.arange(0, 2 * n, 2) if way.is_tree else torch.arange(n)
    way.cache.commit(path.expand(len(tokens), -1).to(tokens.device), n + 0 * tokens[:, 0])


def replay(way: Way, model: QwenMoe, tokens: Tensor, n: int, output: Output) -> None:
    store = states_of(way.cache)
    linear = [i for i, kind in enumerate(model.config.kinds) if kind == LINEAR]
    way.held = [output.hidden[i] for i in linear]
    for place, i in enumerate(linear):
        block = model.blocks[i]
        assert isinstance(block, Block)
        store.pending[place] = store.pending_inputs[place] = None
        x = block.norm_attention(output.hidden[i][:, :n])
        block.attention(x, None, store, place, DeltaView(0, None, None))
    # keys of attention are cropped; the states are what the layers would hand back
    way.cache.commit(*everything(n, len(tokens), tokens.device))


def copy_states(way: Way) -> None:
    store = states_of(way.cache)
    way.held = [store.states.clone(), store.inputs.clone()]


def restore(way: Way, model: QwenMoe, tokens: Tensor, n: int, output: Output) -> None:
    store = states_of(way.cache)
    way.cache.commit(tokens[:, :0], 0 * tokens[:, 0])
    store.states.copy_(way.held[0])
    store.inputs.copy_(way.held[1])
    model(tokens[:, :n], way.cache, logits=False)
    way.cache.commit(*everything(n, len(tokens), tokens.device))


def snapshots(way: Way, model: QwenMoe, tokens: Tensor, n: int, output: Output) -> None:
    """The state behind every token, then the one behind the n-th."""
    store = states_of(way.cache)
    group = store.shape.n_value_heads // store.shape.n_key_heads
    way.held = []
    for place, pending in enumerate(store.pending):
        assert pending is not None
        keys = pending.k.repeat_interleave(group, dim=2)
        states = store.states.new_empty(tokens.shape[1], *store.states.shape[1:])
        behind = store.states[place]
        for i in range(tokens.shape[1]):
            torch.mul(behind, pending.g[:, i, :, None, None].exp(), out=states[i])
            states[i].addcmul_(keys[:, i, :, :, None], pending.u[:, i, :, None, :])
            behind = states[i]
        inputs = store.pending_inputs[place]
        assert inputs is not None
        way.held += [states, inputs]
        store.states[place] = states[n - 1]
        seen = torch.cat([store.inputs[place], inputs], dim=1)
        store.inputs[place] = seen[:, n : n + store.inputs.shape[2]]
    # what is left for the commit: lengths, and keys of attention
    n_layers, store.pending, store.pending_inputs = len(store.pending), [], []
    way.cache.commit(*everything(n, len(tokens), tokens.device))
    store.pending, store.pending_inputs = [None] * n_layers, [None] * n_layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--accepted", type=int, default=8, help="kept, the root included")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()
    if not 1 <= a.accepted <= a.tokens // 2:
        parser.error(
            f"--accepted: expected 1..{a.tokens // 2} (half of --tokens), got {a.accepted}"
        )
    model = real_shape(a.experts, getattr(torch, a.dtype), a.device)
    ways = interleaved(model, a.batch, a.context, a.tokens, a.accepted, a.rounds)
    print(
        f"4 blocks (3 recurrent), hidden {REAL.hidden_size}, {a.experts} experts, {a.dtype}, "
        f"{a.device}, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
        f"{a.batch} row(s), context {a.context}, {a.tokens} tokens verified, {a.accepted} kept, "
        f"{a.rounds} rounds; verification {spread([t for w in ways.values() for t in w.verify])}"
        f" ms\n"
    )
    print(table(ways, a.batch))


@torch.no_grad()
def real_shape(n_experts: int, dtype: torch.dtype, device: str) -> QwenMoe:
    """One group of four blocks of the preset with random weights."""
    config = replace(
        REAL,
        vocab_size=512,
        num_hidden_layers=4,
        num_experts=n_experts,
        num_experts_per_tok=min(n_experts, REAL.num_experts_per_tok),
    )
    with torch.device("meta"):
        model = QwenMoe(config)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    return model.reset_parameters(generator).eval().requires_grad_(False)


@torch.no_grad()
def interleaved(
    model: QwenMoe, batch: int, context: int, n_tokens: int, n: int, rounds: int
) -> dict[str, Way]:
    """Every way in every round, in an order that changes; the first two rounds warm up.

    Raises ValueError where the states of two ways part by more than rounding.
    """

    def cache() -> TreeCache:
        return model.new_cache(batch, context + (rounds + 2) * n)

    ways = {
        "commit": Way(cache(), nothing, commit),
        "commit, a path in a tree": Way(cache(), nothing, commit, is_tree=True),
        "replay": Way(cache(), nothing, replay),
        "restore and re-run": Way(cache(), copy_states, restore),
        "snapshots": Way(cache(), nothing, snapshots),
    }
    generator, device = torch.Generator().manual_seed(0), model.device
    vocab, taps = model.vocab_size, tuple(range(model.n_layers))
    prompt = torch.randint(vocab, (batch, context), generator=generator).to(device)
    for way in ways.values():
        model(prompt, way.cache, logits=False)
        way.cache.commit(*everything(context, batch, device))
    for number in range(rounds + 2):
        chain = torch.randint(vocab, (batch, n_tokens), generator=generator).to(device)
        tree = chain.clone()  # the first tokens of the chain at the even nodes
        tree[:, 0 : 2 * n : 2] = chain[:, :n]
        parents = torch.tensor([i - 1 if i % 2 else i - 2 for i in range(n_tokens)])
        parents = parents.clamp(min=-1).expand(batch, -1).to(device)
        for i in torch.randperm(len(ways), generator=generator).tolist():
            way = list(ways.values())[i]
            laps = [clock(device)]
            way.before(way)
            laps.append(clock(device))
            output = model(
                tree if way.is_tree else chain,
                way.cache,
                parents=parents if way.is_tree else None,
                taps=taps,
            )
            laps.append(clock(device))
            way.after(way, model, chain, n, output)
            laps.append(clock(device))
            if number >= 2:
                way.verify.append(laps[2] - laps[1])
                way.seconds.append(laps[1] - laps[0] + laps[3] - laps[2])
        check(ways, model.dtype)
    return ways


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def check(ways: dict[str, Way], dtype: torch.dtype) -> None:
    want = states_of(ways["commit"].cache)
    bound = 0.1 if dtype == torch.bfloat16 else 1e-3
    for name, way in ways.items():
        store = states_of(way.cache)
        pairs = ((store.states, want.states), (store.inputs, want.inputs))
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        if not off <= bound or way.cache.lengths.tolist() != ways["commit"].cache.lengths.tolist():
            raise ValueError(f"{name}: its states are off by {off:.2g}, expected {bound:.2g}")


def spread(seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle * 1e3:.2f} ({low * 1e3:.2f}-{high * 1e3:.2f})"


def table(ways: dict[str, Way], batch: int) -> str:
    """Markdown, and whether the goals are met: commit < 3 %, and 3x cheaper than replay."""
    scale = REAL.kinds.count(LINEAR) / 3
    ours = ways["commit"]
    lines = [
        "| way | held a row, 30 layers | ms (low-high) | of the verification | to commit |",
        "|---|---|---|---|---|",
    ]
    shares: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name, way in ways.items():
        shares[name] = statistics.median(
            t / v for t, v in zip(way.seconds, way.verify, strict=True)
        )
        ratios[name] = statistics.median(
            t / c for t, c in zip(way.seconds, ours.seconds, strict=True)
        )
        held = sum(x.nbytes for x in way.held) * scale / batch
        lines.append(
            f"| {name} | {held / 1e6:.1f} MB | {spread(way.seconds)} | {shares[name]:.1%} "
            f"| {ratios[name]:.1f}x |"
        )
    lines.append("")
    for what, value, met in (
        (
            "commit below 3 % of the verification",
            f"{shares['commit']:.1%}",
            shares["commit"] < 0.03,
        ),
        ("replay at least 3x commit", f"{ratios['replay']:.1f}x", ratios["replay"] >= 3),
    ):
        lines.append(f"{what}: {value}, {'met' if met else 'missed'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
