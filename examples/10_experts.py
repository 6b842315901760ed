# %% [markdown]
# # Experts: what a verified block wakes
#
# In a mixture of experts each token goes through k of E small networks. Decoding one token reads
# the weights of k of them. Verifying a block reads those of every expert that *any* of its tokens
# picked: the "free" tokens of speculative decoding are not quite free. How many experts a block
# wakes, what the way they are computed has to do with it, and where one would rather stop drafting.

# %%
import statistics
import time

import torch

from specdec.models.experts import MoeMLP, grouped_experts, loop_experts
from specdec.models.routing import Routing, load_balancing_loss, recorded, woken
from specdec.speedup import experts_woken

E, K, WIDTH, INNER = 64, 4, 128, 64
torch.manual_seed(0)
layer = MoeMLP(WIDTH, INNER, E, K, shared_inner=INNER).requires_grad_(False)
generator = torch.Generator().manual_seed(1)

# %% [markdown]
# ## One layer, and where its tokens went
#
# The router scores all E experts, takes the best K, and lets their weights sum to 1. `recorded`
# listens to where everybody goes: nothing is kept in the layer.

# %%
x = torch.randn(1, 4, WIDTH, generator=generator)
with recorded(layer) as routes:
    y = layer(x)
indices, weights, _ = routes[0]
for token in range(4):
    picks = zip(indices[0, token].tolist(), weights[0, token].tolist(), strict=True)
    print(f"token {token}: " + "  ".join(f"{e:2d} ({w:.2f})" for e, w in picks))
print(f"{4 * K} picks, {woken(indices)} distinct experts of {E}")

# %% [markdown]
# ## Uniform routing, and tokens that agree
#
# If every token picks its K experts at random, n tokens wake E (1 - (1 - K/E)^n) of them: an expert
# sleeps on only if all n passed it by. Tokens of one text are not like that. They share a topic and
# a language, their states point the same way, and the router sends them to the same experts. Here a
# block's states are part common direction, part their own; `share` is the common part.


# %%
def block(n: int, share: float) -> torch.Tensor:
    """States [1, n, D] of unit variance, of which pairs have a correlation of `share`."""
    common = torch.randn(1, 1, WIDTH, generator=generator)
    own = torch.randn(1, n, WIDTH, generator=generator)
    return share**0.5 * common + (1 - share) ** 0.5 * own


def mean_woken(n: int, share: float, n_blocks: int = 40) -> float:
    counts = []
    for _ in range(n_blocks):
        routing = layer.router(block(n, share))
        counts.append(woken(routing.indices))
    return statistics.fmean(counts)


SIZES, SHARES = (1, 2, 4, 8, 16, 32), (0.0, 0.5, 0.8)
measured = {share: [mean_woken(n, share) for n in SIZES] for share in SHARES}
print(f"{'tokens':>8}{'uniform':>10}" + "".join(f"{f'share {s}':>12}" for s in SHARES))
for i, n in enumerate(SIZES):
    counts = "".join(f"{measured[share][i]:12.1f}" for share in SHARES)
    print(f"{n:8d}{experts_woken(n, E, K):10.1f}{counts}")
for i, n in enumerate(SIZES):  # independent states come close to the formula, agreement saves
    assert abs(measured[0.0][i] - experts_woken(n, E, K)) < 0.1 * E
assert measured[0.8][4] < measured[0.5][4] < measured[0.0][4]

# %% [markdown]
# Even independent states wake a little less than the formula has it: the random router of this
# layer has experts that it likes. The same at the size of Qwen3.5-35B-A3B, 8 of 256 experts:
# uniform routing would wake 102 for a block of 16. The Strix Halo post counted 47.

# %%
print(f"256 experts, 8 a token, 16 tokens: {experts_woken(16, 256, 8):.0f} if uniform, not 128")

# %% [markdown]
# A router that likes some experts too well wastes the others. The balancing loss that models are
# trained with is K where routing is uniform and grows with preference. It looks at all tokens of a
# batch: that *each block* agrees with itself is none of its business, and is what we live on.

# %%
for share in SHARES:
    blocks: list[Routing] = []
    for _ in range(200):
        blocks.append(layer.router(block(16, share)))
    loss = float(load_balancing_loss(blocks))
    alone = statistics.fmean(float(load_balancing_loss([each])) for each in blocks)
    print(f"share {share}: loss {loss:.2f} over 200 blocks, {alone:.2f} within one (uniform: {K})")

# %% [markdown]
# ## Unused nodes wake nobody that counts
#
# Rows of a batch draft trees of different size; the shorter ones are padded. Counting the padding
# would blame the drafter for experts that no one needed.

# %%
padded = layer.router(torch.cat([block(8, 0.5), block(8, 0.5)]))
used = torch.ones(2, 8, dtype=torch.bool)
used[1, 3:] = False  # the second row has three nodes
print(f"woken {woken(padded.indices, used)}, with the padding {woken(padded.indices)}")

# %% [markdown]
# ## Loop and groups
#
# The loop asks for every expert who picked it. The grouped form sorts the picks by expert once, and
# then works on contiguous rows; the results are put back into the K slots of their token and added
# in slot order, so that no token depends on who was sorted beside it. In float64 both agree to the
# last digits.

# %%
double = MoeMLP(WIDTH, INNER, E, K).double().requires_grad_(False)
states = block(16, 0.5).double()
results = {}
for way in ("loop", "grouped"):
    double.experts = way
    results[way] = double(states)
    alone = torch.cat([double(states[:, i : i + 1]) for i in range(16)], dim=1)
    assert (alone - results[way]).abs().max() < 1e-12  # neighbours do not matter
print(f"largest difference: {(results['loop'] - results['grouped']).abs().max():.1e}")


# %%
def milliseconds(n: int, share: float, repeats: int = 15) -> dict[str, float]:
    """Medians, interleaved; each repetition routes a new block."""
    taken: dict[str, list[float]] = {"loop": [], "grouped": []}
    weights = layer.routed.gate_up_proj, layer.routed.down_proj
    for repeat in range(repeats + 2):
        x = block(n, share)[0]
        indices, scores, _ = layer.router(x)
        for name, way in (("loop", loop_experts), ("grouped", grouped_experts)):
            start = time.perf_counter()
            way(x, indices, scores, *weights)
            if repeat >= 2:  # the first two warm up
                taken[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()}


costs = {n: milliseconds(n, 0.5) for n in SIZES}
print(f"{'tokens':>8}{'woken':>8}{'loop ms':>10}{'grouped ms':>12}{'loop/grouped':>14}")
for i, (n, cost) in enumerate(costs.items()):
    ratio = cost["loop"] / cost["grouped"]
    print(f"{n:8d}{measured[0.5][i]:8.1f}{cost['loop']:10.2f}{cost['grouped']:12.2f}{ratio:13.1f}x")

# %% [markdown]
# The times are of this machine, now, and of tiny experts, where Python's own time is much of it.
# With experts of real size the weights are what takes time to read:
# `python -m benchmarks.experts` has that table, beside the ways of `transformers`.
#
# ## The picture
#
# Experts woken by one block of 16 tokens, an expert a column. Above, tokens that have nothing in
# common; below, tokens that agree. A digit is how many of the block's tokens picked the expert.

# %%
for share in SHARES:
    indices = layer.router(block(16, share)).indices
    counts = indices.flatten().bincount(minlength=E).tolist()
    row = "".join("." if not c else (str(c) if c < 10 else "+") for c in counts)
    print(f"share {share}  {row}  {woken(indices)} woken")

print(f"\n{'tokens':>6}  experts woken of {E}: # share 0.8, = share 0.5, - uniform")
for i, n in enumerate(SIZES):
    low, middle = round(measured[0.8][i]), round(measured[0.5][i])
    high = max(round(experts_woken(n, E, K)), middle)
    print(f"{n:6d}  {'#' * low}{'=' * (middle - low)}{'-' * (high - middle)}")

# %% [markdown]
# ## Exercises
#
# 1. A pass costs A + C w for w woken experts; attention and head are in A. With A = 10 C and share
#    0.5, what do 16 tokens cost in steps of one? What with uniform routing?
# 2. A draft tree verifies siblings, of which at most one is accepted. Do siblings wake more experts
#    than the tokens of a chain? What would you measure, and with which model?
# 3. Plant a bug: in `specdec.models.experts.unsort`, return `out` as it is. Which assertion above
#    notices, and why would a block of one token not?
# 4. Let a drafter stop where the next token would wake too many new experts. What would it need to
#    know, and when?
