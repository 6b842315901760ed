# %% [markdown]
# # LayerSkip: the target drafts with its own first blocks
#
# Leave the target after E of its L blocks, read that state through the final norm and the head, and
# there is a draft model: no weights of its own, no cache of its own. What it computed is not thrown
# away either, since the verification goes on from there. Which exit is right how often, which one
# pays on this machine, what a round computes, and what it looks like.

# %%
import statistics
import time
from collections.abc import Sequence

import torch

from specdec import Coupled, Greedy, LayerSkip, decode, generate, load
from specdec.benchmark import verification_seconds
from specdec.drafters.layerskip import best_exit, exit_acceptance, resumed_verify_cost
from specdec.speedup import expected_tau
from specdec.testing import compare
from specdec.trace import to_terminal, trace
from specdec.training import Corpus

target, tokenizer, drafters, prompts = load("tiny")
L = target.n_layers
drafter = drafters["layerskip"]
assert isinstance(drafter, LayerSkip)
E, K = drafter.exit_layer, len(drafter.widths)

# %% [markdown]
# ## Where the answer is known already
#
# Along text that the target wrote: at how many places does the head, read after block E, name the
# byte that it names after block L? An ordinary model keeps its middle states in a form that its
# head cannot read; this one was trained with a loss at every exit, and with blocks left out.

# %%
PROMPT, N_NEW = 64, 80
windows = list(Corpus.standard_library().held_out_batch(4, PROMPT - 1, seed=1))
plain = generate(target, windows, max_new_tokens=N_NEW).sequences
tokens = torch.stack(plain)  # [B, T]
own = torch.arange(tokens.shape[1]).expand_as(tokens) >= PROMPT - 1  # the target wrote what follows
accepted = exit_acceptance(target, tokens, mask=own)

print(f"{'exit':>4}   agrees with the last of {L} blocks")
for layer, share in accepted.items():
    print(f"{layer:4d}   {share:4.0%} {'#' * round(50 * share)}")

# %% [markdown]
# ## Which exit pays here
#
# A late exit is right more often and costs more. How much more depends on the machine: a draft pass
# is E blocks *and* the head; a verification of K + 1 tokens costs more than a step, less where the
# weights are what takes time to read. So take the times of this machine, now (they differ from run
# to run, and nothing further down depends on them), and let `best_exit` try every length.

# %%
CONTEXT, REPEATS, LONGEST = 128, 15, 8


def pass_costs() -> dict[int, float]:
    """Median time of a pass over one token that leaves after block E, in steps of the target."""
    cache = target.new_cache(1, CONTEXT)
    context, none = tokens[:1, :CONTEXT], torch.zeros(1, dtype=torch.long)
    target(context, cache, logits=False)
    cache.commit(torch.arange(CONTEXT)[None], none + CONTEXT)
    taken: dict[int, list[float]] = {layer: [] for layer in range(1, L + 1)}
    for _ in range(REPEATS):  # interleaved, so that a slow moment hits all of them
        for layer, seconds in taken.items():
            start = time.perf_counter()
            target(tokens[:1, :1], cache, exit_layer=layer if layer < L else None)
            seconds.append(time.perf_counter() - start)
            cache.commit(tokens[:1, :0], none)  # forget it
    median = {layer: statistics.median(seconds) for layer, seconds in taken.items()}
    return {layer: seconds / median[L] for layer, seconds in median.items()}


with torch.no_grad():
    draft_cost = pass_costs()
full = verification_seconds(target, range(1, LONGEST + 2), CONTEXT, REPEATS)


def verify(layer: int, n_tokens: int) -> float:
    """What is left to do for `n_tokens` behind block `layer`, in steps of the target."""
    return resumed_verify_cost(layer, L, full[n_tokens] / full[1])


def best_of(layers: Sequence[int]) -> tuple[int, int, float]:
    shares = {layer: accepted[layer] for layer in layers}
    return best_exit(shares, L, draft_cost=draft_cost, verify=verify, max_drafts=LONGEST)


print(f"\n{'exit':>4}{'accepted':>10}{'E/L':>7}{'measured':>10}{'best K':>8}{'speed-up':>10}")
for layer in accepted:
    _, n_drafts, speedup = best_of([layer])
    ratios = f"{layer / L:7.2f}{draft_cost[layer]:10.2f}"
    print(f"{layer:4d}{accepted[layer]:10.0%}{ratios}{n_drafts:8d}{speedup:9.2f}x")
choice = best_of(list(accepted))
if choice[1]:
    print(f"the best: exit {choice[0]}, K = {choice[1]}, {choice[2]:.2f}x predicted")
else:
    print("no exit pays: plain decoding is predicted to be faster")

# %% [markdown]
# ## What a round computes
#
# The bundle's drafter leaves after block E and drafts K bytes. Every pass of every block is counted
# in one round: how many tokens it saw. With `reuse` the first blocks see only the last draft in the
# verification, whose states nobody has yet. In all that is (K + 1) L, as K + 1 plain steps cost;
# without, K E more.


# %%
def count_round(reuse: bool) -> list[list[int]]:
    """Tokens that each block saw in each pass of a full round: [passes][blocks]."""
    passes: list[list[int]] = []

    def hook(block: int):
        def note(module: torch.nn.Module, arguments: tuple) -> None:
            if block == 0:  # a pass begins
                passes.append([0] * L)
            passes[-1][block] += arguments[0].shape[1]

        return note

    handles = [b.register_forward_pre_hook(hook(i)) for i, b in enumerate(target.blocks)]
    # a prompt of one token is its own root: nothing is prefilled
    next(decode(target, tokens[0, :1], LayerSkip(E, K, reuse=reuse), max_new_tokens=K + 1))
    for handle in handles:
        handle.remove()
    return passes


for reuse, wanted in ((True, (K + 1) * L), (False, K * E + (K + 1) * L)):
    passes = count_round(reuse)
    print(f"\nreuse={reuse}: tokens by block and pass, {K} drafts and the verification")
    for block in reversed(range(L)):
        row = "".join(f"{seen[block]:5d}" if seen[block] else "    ." for seen in passes)
        print(f"  block {block + 1}{row}{'   <- exit' if block + 1 == E else ''}")
    total = sum(map(sum, passes))
    assert total == wanted
    print(f"  {total} in all; K + 1 plain steps take {(K + 1) * L}")

# %% [markdown]
# ## A text, round by round
#
# Plain text is a draft that the target agreed with. `[ ]` is the target's own byte where it refused
# the draft `~ ~`; `{ }` its own byte behind a draft that was right to its end.

# %%
text = prompts["code"][0]
run = generate(target, tokenizer.encode(text), drafter, max_new_tokens=96)
steps = trace(run.rounds, tokenizer.decode)
print("\n" + to_terminal(steps, prompt=text, colour=False, refused=True))

# %% [markdown]
# ## The same bytes
#
# Two halves of one model share one cache, pass unfinished states around and take most of them back.
# None of that may show. Greedy and coupled sampling (where the same seed gives plain decoding the
# same bytes) must both come out as without a drafter, with and without `reuse`.

# %%
print(f"{'rule':10}{'reuse':>7}{'tau':>6}{'accepted':>10}   equal to plain decoding")
for rule in (Greedy(), Coupled(0.8, seed=0)):
    name = type(rule).__name__
    expected = generate(target, windows, max_new_tokens=N_NEW, rule=rule).sequences
    for reuse in (True, False):
        skipping = LayerSkip(E, K, reuse=reuse)
        run = generate(target, windows, skipping, max_new_tokens=N_NEW, rule=rule)
        for b, (want, got) in enumerate(zip(expected, run.sequences, strict=True)):
            difference = compare(target, want, got, rule.for_row(b), b)
            assert difference is None or difference.near_tie, difference  # float32
        m = run.metrics
        print(f"{name:10}{reuse!s:>7}{m.tau:6.2f}{m.acceptance_rate:10.0%}   {len(windows)} rows")
print(f"expected greedy tau from the first table: {expected_tau(accepted[E], K):.2f}")

# %% [markdown]
# The formula takes every place to be as hard as the average. Text has easy stretches and hard
# places, and a chain that broke at a hard place starts again behind it: the two taus may differ in
# either direction.
#
# ## Exercises
#
# 1. A round costs as many passes of a token through a block as K + 1 plain steps, whatever was
#    accepted. Then where does a speed-up come from? (What is a pass over K + 1 tokens cheaper
#    than?)
# 2. Give `branching=(2, 1, 1, 1)`. What does `count_round` have to report?
# 3. Set every entry of `draft_cost` to E/L. Which exit would you have chosen, and what does the
#    head have to do with it?
# 4. Read the exits of a model that was not trained for it: `Transformer(config).reset_parameters()`
#    trained for a few hundred steps as the teacher in `03_distill.py`.
