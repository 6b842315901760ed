# %% [markdown]
# # Rolling back a recurrent state
#
# A verification runs a whole draft through the target, and what was rejected has to be undone.
# Attention keeps a key and a value for every token: cut off the last ones, done. Models such as
# Qwen3-Next and Qwen3.5 have three layers of another kind for each one that attends. Such a layer
# keeps a single matrix per head that every token has written into, and nothing can be cut out of
# it. This file looks at such a cache, decodes wrongly with it, decodes rightly with it, and then
# compares four ways to roll back.
#
# The model is one of `transformers` (`pip install specdec-torch[hf]`), tiny and random: what is
# shown here depends on how its cache works and not on what it says.

# %%
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.utils import logging

from specdec import generate
from specdec.cache import Kept, everything
from specdec.hf import HFModel, crop, frozen_linear_states, replay
from specdec.models import QwenMoe, QwenMoeConfig
from specdec.models.delta_net import DeltaStore, DeltaView
from specdec.protocol import Output
from specdec.testing.drafters import Adversary

logging.set_verbosity_error()  # it says at length which faster kernels are not installed

torch.manual_seed(0)
config = Qwen3_5MoeTextConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=4,  # recurrent, recurrent, recurrent, attention
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    initializer_range=0.2,
)
model: Any = Qwen3_5MoeForCausalLM(config).eval().requires_grad_(False)
prompt = torch.randint(64, (12,))
N_NEW = 32

# %% [markdown]
# ## What the two kinds of layer keep
#
# The same model after 12 tokens and after 13. Keys grow by a slot. The state does not grow: the
# token went into the numbers that were there already. In front of the state stands a convolution
# over the last four tokens, whose window is a second, small state.

# %%
past = DynamicCache(config=config)


def shape_of(layer: Any, is_linear: bool) -> str:
    if not is_linear:
        return f"keys {list(layer.keys.shape)}"
    state, window = layer.recurrent_states[0], layer.conv_states[0]
    return f"state {list(state.shape)}, window {list(window.shape)}"


shapes: list[list[str]] = []
for tokens in (prompt, prompt[:1]):
    model(input_ids=tokens[None], cache=past)
    shapes.append([shape_of(*each) for each in zip(past.layers, past.is_linear, strict=True)])
for i, (after_12, after_13) in enumerate(zip(*shapes, strict=True)):
    print(f"layer {i}:  {after_12:50} -> {after_13}")

# %% [markdown]
# ## A loop to break
#
# Verification in its smallest form, one row and greedy. The drafter knows what the target will
# say and errs on purpose: of every four drafted tokens the last two are wrong. So two are accepted
# and two must be undone, in each round. How they are undone is left to `roll_back`.

# %%
Verify = Callable[[DynamicCache, Tensor], Output]
RollBack = Callable[[DynamicCache, int, int], None]
target = HFModel(model)
plain = model.generate(prompt[None], max_new_tokens=N_NEW, do_sample=False, pad_token_id=0)[0]


def drafted(length: int) -> Tensor:
    """Four tokens for a row of `length` tokens: two of plain decoding's, two that are wrong."""
    known = torch.cat([plain, plain.new_zeros(8)])[length : length + 4]
    return torch.where(torch.arange(4) < 2, known, (known + 1) % 64)


@torch.no_grad()
def decoded(verify: Verify, roll_back: RollBack) -> Tensor:
    tokens, past = prompt, DynamicCache(config=config)
    target.run(prompt[None, :-1], past, 0, (), False)
    while len(tokens) < len(plain):
        start = len(tokens) - 1  # all but the root are in the cache
        block = torch.cat([tokens[-1:], drafted(len(tokens))])  # [1 + 4]
        output = verify(past, block)
        assert output.logits is not None
        own = output.logits[0].argmax(-1)  # what the target says after each of them
        right = (block[1:] == own[:-1]).int().cumprod(0)
        n = 1 + int(right.sum())  # the root, and what was accepted
        roll_back(past, start, n)
        tokens = torch.cat([tokens, block[1:n], own[n - 1 : n]])
    return tokens[: len(plain)]


def show(name: str, tokens: Tensor) -> None:
    same = int((tokens == plain).int().cumprod(0).sum()) - len(prompt)
    print(f"{name:20}{' '.join(f'{t:2d}' for t in tokens[len(prompt) :].tolist())}")
    print(f"{'':20}{'   ' * same + '^^ not the same' if same < N_NEW else 'the same'}")


# %% [markdown]
# ## Wrong: crop, as one always has
#
# Keys and values are cut behind the accepted tokens. The states have taken in the whole block and
# keep it. Nothing crashes, the text goes on, and it is another text than the target's.

# %%


def verify_only(past: DynamicCache, block: Tensor) -> Output:
    return target.run(block[None], past, past.get_seq_length(), (), True)


def crop_only(past: DynamicCache, start: int, n: int) -> None:
    crop(past, start + n)


print(f"{'plain decoding':20}{' '.join(f'{t:2d}' for t in plain[len(prompt) :].tolist())}")
show("crop only", decoded(verify_only, crop_only))

# %% [markdown]
# ## Right: freeze, then replay
#
# While the block is verified, the cache layers of the recurrent layers copy nothing
# (`frozen_linear_states`): their states stay before the block. Afterwards each recurrent layer runs
# once more, over the accepted tokens only, and this time the state moves. What goes into the layer
# is known from the verification: it is the hidden state below it, and a token's hidden state does
# not depend on those behind it, so rejected tokens have changed nothing there. Attention and MLPs,
# which are most of the work, are not run again.

# %%
inputs: dict[int, Tensor] = {}


def verify_frozen(past: DynamicCache, block: Tensor) -> Output:
    with frozen_linear_states(past):
        output = target.run(block[None], past, past.get_seq_length(), target.linear, True)
    inputs.update(output.hidden)  # tap i goes into layer i
    return output


def crop_and_replay(past: DynamicCache, start: int, n: int) -> None:
    crop(past, start + n)
    replay(model, past, inputs, n)


right = decoded(verify_frozen, crop_and_replay)
show("freeze and replay", right)
assert torch.equal(right, plain)

# %% [markdown]
# ## The same, from the library
#
# `HFModel(model)` does this behind the cache protocol: append a block, commit a part of it. So
# every drafter that proposes chains runs on such a model, and a batch may be ragged. Here one that
# errs at random, drafts nothing now and then, and skips rows.

# %%
prompts = [prompt, prompt[:3], prompt[:7]]
alone = [generate(target, each, max_new_tokens=N_NEW).sequences[0] for each in prompts]
drafter = Adversary(alone, n_nodes=6, accuracy=0.8, tree=False)
run = generate(target, prompts, drafter, max_new_tokens=N_NEW)
assert all(torch.equal(a, b) for a, b in zip(run.sequences, alone, strict=True))
print(f"three rows, {len(run.rounds)} rounds, {run.metrics.tau:.2f} tokens a pass, all the same")

# %% [markdown]
# Trees are another matter: the kernels of `transformers` let a token see all that came before it,
# siblings included. A tree is refused.

# %%
parents = torch.tensor([[-1, 0, 0]])  # a root with two children
try:
    target(torch.tensor([[4, 5, 6]]), target.new_cache(1, 8), parents=parents)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Four ways, side by side
#
# Whoever writes the layer can do better. The rule that writes a state can be solved for all pending
# nodes at once, also those of a tree, and yields a pseudo-value u for each. With these a commit is
# one small product, S <- decay S + sum of k u^T over the accepted path, and no layer runs again.
# That is what `QwenMoe` does, our own model of this kind (docs/hybrid.md has the equations).
#
# One recurrent block of Qwen3.6-35B-A3B with random weights, 16 of its 256 experts. It verifies 16
# tokens of which 5 are kept:
#
# * snapshots: hold the state behind every token, take the fifth. A kernel would write them while it
#   verifies; it would still have to write them;
# * restore and re-run: hold a copy of the state, put it back, run the block over five tokens;
# * freeze and replay: hold the block's input, run its recurrent layer over five tokens;
# * commit: hold k, u and the decays.
#
# All begin behind the same verification and must end in the same state.

# %%
N_TOKENS, N_KEPT, N_RUNS = 16, 5, 7
real = replace(QwenMoeConfig.qwen35_35b_a3b(), vocab_size=64, num_hidden_layers=1, num_experts=16)
native = QwenMoe(real).reset_parameters(torch.Generator().manual_seed(0)).requires_grad_(False)
block: Any = native.blocks[0]
CHAIN = DeltaView(0, None, None)
path, n_kept = everything(N_KEPT, 1, "cpu")
KEEP, DROP = Kept(path, n_kept, N_KEPT, None), Kept(path, 0 * n_kept, 0, None)


def snapshots(x: Tensor, store: DeltaStore, copy: list[Tensor]) -> list[Tensor]:
    pending, window = store.pending[0], store.pending_inputs[0]
    assert pending is not None and window is not None
    keys = pending.k.repeat_interleave(real.linear_num_value_heads // pending.k.shape[2], dim=2)
    states = [store.states[0]]
    for i in range(N_TOKENS):
        faded = pending.g[:, i, :, None, None].exp() * states[-1]
        states.append(faded + keys[:, i, :, :, None] * pending.u[:, i, :, None, :])
    store.commit(DROP)
    store.states[0] = states[N_KEPT]
    store.inputs[0] = torch.cat([store.inputs[0], window], dim=1)[:, N_KEPT:][:, :3]
    return [*states[1:], window]


def restore(x: Tensor, store: DeltaStore, copy: list[Tensor]) -> list[Tensor]:
    store.commit(DROP)
    store.states.copy_(copy[0])
    store.inputs.copy_(copy[1])
    block(x[:, :N_KEPT], None, store, 0, CHAIN)
    store.commit(KEEP)
    return copy


def replayed(x: Tensor, store: DeltaStore, copy: list[Tensor]) -> list[Tensor]:
    store.commit(DROP)
    block.attention(block.norm_attention(x[:, :N_KEPT]), None, store, 0, CHAIN)
    store.commit(KEEP)  # other kernels hand back the state; it costs little, see the last line
    return [x]


def committed(x: Tensor, store: DeltaStore, copy: list[Tensor]) -> list[Tensor]:
    pending, window = store.pending[0], store.pending_inputs[0]
    assert pending is not None and window is not None
    store.commit(KEEP)
    return [pending.k, pending.u, pending.g, pending.G, window]


Way: TypeAlias = Callable[[Tensor, DeltaStore, list[Tensor]], list[Tensor]]


def measure(ways: dict[str, Way]) -> None:
    draw = torch.Generator().manual_seed(1)
    prefix = torch.randn(1, 64, real.hidden_size, generator=draw)
    x = torch.randn(1, N_TOKENS, real.hidden_size, generator=draw)
    seconds: dict[str, list[float]] = {name: [] for name in (VERIFICATION, *ways)}
    held: dict[str, int] = {}
    ends: list[Tensor] = []
    for number in range(N_RUNS + 1):
        ends.clear()
        for name, way in ways.items():
            store = DeltaStore(1, 1, real.delta, native.dtype, native.device)
            block(prefix, None, store, 0, CHAIN)
            store.commit(Kept(*everything(64, 1, "cpu"), 64, None))
            laps = [time.perf_counter()]
            copy = [store.states.clone(), store.inputs.clone()] if way is restore else []
            laps.append(time.perf_counter())
            block(x, None, store, 0, CHAIN)
            laps.append(time.perf_counter())
            held[name] = sum(tensor.nbytes for tensor in way(x, store, copy))
            laps.append(time.perf_counter())
            if number:  # the first run warms up
                seconds[VERIFICATION].append(laps[2] - laps[1])
                seconds[name].append(laps[1] - laps[0] + laps[3] - laps[2])
            ends.append(store.states)
        for end in ends[1:]:
            torch.testing.assert_close(end, ends[0], rtol=1e-4, atol=1e-5)
    print(f"one state: {ends[0].nbytes / 1e6:.1f} MB")
    for name, times in seconds.items():
        size = f"{held[name] / 1e6:8.2f} MB" if name in held else " " * 11
        print(f"{name:22}{size}{statistics.median(times) * 1e3:9.2f} ms")


VERIFICATION = "verification"
with torch.no_grad():
    measure(
        {
            "snapshots": snapshots,
            "restore and re-run": restore,
            "freeze and replay": replayed,
            "commit": committed,
        }
    )

# %% [markdown]
# Restoring is worse than it looks here: in a whole model the blocks that attend run again, too.
# Snapshots grow with the draft. And of these four only the commit knows what to do with a tree:
# `python -m benchmarks.commit` measures it on four blocks, along a path in a tree, too.
#
# ## Exercises
#
# 1. In `decoded`, let the drafter be always right. Does `crop_only` still fail? And if the drafter
#    proposes nothing?
# 2. `replay` runs a layer over n tokens although the verification ran it over all of them. What
#    would the kernel have to hand back to make this needless? Compare with what `committed` holds.
# 3. A batch whose rows accept different numbers of tokens: what must change in `crop_and_replay`?
#    (`HFModel` takes the simplest way out; what does it cost?)
