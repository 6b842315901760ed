# %% [markdown]
# # Medusa: heads that guess ahead, and the tree to guess with
#
# The state from which the target reads its next token also feeds a few extra heads, and head k
# guesses the token k places behind that one. All guesses come at once, and no head sees those of
# the others. One guess a head makes a chain that soon goes wrong. The art is in the tree: which of
# the heads' candidates are worth verifying together?

# %%
import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from specdec import (
    FINAL,
    Drafter,
    Greedy,
    Medusa,
    PromptLookup,
    Rejection,
    Round,
    Typical,
    decode,
    generate,
    load,
)
from specdec.drafters.static_draft import rank_accuracies
from specdec.metrics import measure
from specdec.pictures import tree_svg
from specdec.testing import compare
from specdec.trace import one_line
from specdec.training import Corpus
from specdec.trees import dense_choices, expected_accepted, search_choices, static_tree

target, tokenizer, drafters, prompts = load("tiny")
medusa = drafters["medusa, tree"]
assert isinstance(medusa, Medusa)
heads = medusa.heads


def shown(token: int) -> str:
    return one_line(tokenizer.decode([token]))


# %% [markdown]
# ## What the heads say at one place
#
# The target has read some code up to the middle of a word. Its own next byte is the root; the heads
# read the same state and speak of the bytes behind the root. Three candidates each, with what the
# heads hold them for, and in brackets what the target goes on to write.

# %%
text = prompts["code"][0]
read = text[: text.index("lueError")]
tokens = tokenizer.encode(read)
own = generate(target, tokens, max_new_tokens=1 + heads.n_heads).new_tokens[0].tolist()
with torch.no_grad():
    state = target(tokens[None], taps=(FINAL,)).hidden[FINAL][0, -1]  # [D], predicted the root
    laws = heads(state).softmax(dim=-1)  # [n_heads, V]

print(f"...{read[-40:]!r}, then the target's own {shown(own[0])!r}")
for k, law in enumerate(laws, start=1):
    top = law.topk(3)
    guesses = [
        f"{shown(token)} {share:4.0%}"
        for share, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]
    print(f"head {k}:  {'   '.join(guesses)}   [{shown(own[k])}]")

# %% [markdown]
# ## How good is which rank?
#
# Not how sure a head is matters for the tree, but how often its candidate of rank r is what comes.
# What will be held against the candidates is text of the target, so that is what they are measured
# on: windows of held-out files, which the target continues by itself. (The first 40 bytes of each
# row are the window.)

# %%
corpus = Corpus.standard_library()
N_RANKS = 6


def windows(seed: int, n: int, length: int) -> list[torch.Tensor]:
    return list(corpus.held_out_batch(n, length - 1, seed))


written = generate(target, windows(seed=1, n=6, length=40), max_new_tokens=160).sequences
table = rank_accuracies(target, heads, written, N_RANKS)  # [n_heads, N_RANKS]

print("share of places where the candidate is right, by rank")
print(f"{'':8}{''.join(f'{rank:6d}' for rank in range(N_RANKS))}{'one of them':>14}")
for k, row in enumerate(table.tolist(), start=1):
    print(f"head {k}: {''.join(f'{share:6.0%}' for share in row)}{sum(row):14.0%}")

# %% [markdown]
# ## Three trees
#
# A node is named by the ranks on its path. If heads were right or wrong independently of each
# other, a node would be accepted with the product of the accuracies along its path, and a tree's
# expected yield would be the sum over its nodes. So the best tree of n nodes is found by adding the
# best node within reach, n times: `search_choices`. Against it stand a chain, which spends nothing
# on second choices, and a dense tree of as many nodes, which spends them alike everywhere.
#
# Every draft costs the same pass of the target, so each gets the same number of passes, on other
# windows than those the table comes from, and what counts is the bytes it makes of them.

# %%
N_PASSES = 30
held_out = windows(seed=2, n=6, length=64)
plain = generate(target, held_out, max_new_tokens=N_PASSES * (1 + heads.n_heads)).sequences


def drafted(drafter: Drafter) -> list[Round]:
    """The first N_PASSES rounds; what they emit must be what plain decoding does."""
    budget = N_PASSES * (1 + heads.n_heads)
    rounds = list(islice(decode(target, held_out, drafter, max_new_tokens=budget), N_PASSES))
    for b, (prompt, expected) in enumerate(zip(held_out, plain, strict=True)):
        got = torch.cat([prompt, *[r.new_tokens[b] for r in rounds]])
        difference = compare(target, expected[: len(got)], got, Greedy())
        assert difference is None or difference.near_tie, difference  # float32 may turn a near-tie
    return rounds


def bar(tau: float) -> str:
    return "#" * round(12 * (tau - 1))


chain, dense = dense_choices([1] * heads.n_heads), dense_choices((2, 2, 2, 1))
searched = search_choices(table, n_nodes=32)
trees = {"chain": chain, "dense, 2 x 2 x 2 x 1": dense}
# nodes come in the order they were added: the first n are the best tree of n
trees |= {f"searched, {n}": searched[:n] for n in (4, 8, 16, len(dense), 32)}

runs: dict[str, list[Round]] = {}
print(
    f"{'tree':22}{'nodes':>6}{'predicted':>11}{'tau':>6}   each in {N_PASSES} passes of the target"
)
for name, choices in trees.items():
    runs[name] = drafted(Medusa(heads, choices))
    tau, predicted = measure(runs[name]).tau, 1 + expected_accepted(choices, table)
    print(f"{name:22}{len(choices):6d}{predicted:11.2f}{tau:6.2f}   {bar(tau)}")

# %% [markdown]
# The prediction takes depths as independent, and this text to be as hard as that of the table. But
# an easy place is easy for all heads, so the two numbers need not agree. What the search needs of
# its prediction is the order.
#
# ## The tree that was searched
#
# First its shape, in ranks: where it is wide, and where it goes deep. Then the same shape filled
# with the candidates of one round, that in which most of the first row's was accepted (✓).


# %%
def branches(
    parents: Sequence[int], labels: Sequence[str], above: int = -1, indent: str = ""
) -> Iterator[str]:
    below = [i for i, parent in enumerate(parents) if parent == above]
    for i in below:
        last = i == below[-1]
        yield f"{indent}{'└─' if last else '├─'} {labels[i]}"
        yield from branches(parents, labels, i, indent + ("   " if last else "│  "))


shape = static_tree(searched[:16])
ranks = [",".join(map(str, path)) for path in shape.paths]
best = max(runs["searched, 16"], key=lambda r: int(r.n_accepted[0]))
path = best.path[0, : int(best.n_accepted[0])].tolist()
filled = [
    f"{shown(token)}{' ✓' if i in path else ''}"
    for i, token in enumerate(best.draft.tokens[0].tolist())
]
left, right = (list(branches(shape.parents.tolist(), labels)) for labels in (ranks, filled))
print(f"{'root':24}root")
for in_ranks, in_tokens in zip(left, right, strict=True):
    print(f"{in_ranks:24}{in_tokens}")

file = Path(tempfile.gettempdir()) / "medusa-tree.svg"
file.write_text(tree_svg(best.draft, shown, path), encoding="utf-8")
print(f"the same as a picture: {file}")

# %% [markdown]
# ## Typical acceptance is another bargain
#
# So far every byte was the target's own. Medusa's paper goes further: it also accepts a draft that
# the target finds *likely enough*, p(x) > min(epsilon, delta exp(-H(p))). That yields more bytes a
# pass, and a text with another law. Here is a way to see that on any model: a token x drawn from p
# carries -log p(x) bits of surprise, on average exactly the entropy H(p). So surprise less entropy
# averages to zero over a sampled text, if it follows the target's law. z counts in standard
# errors: a text in the target's law has |z| < 5 but for once in a million times.

# %%
TEMPERATURE, N_SAMPLED = 0.7, 48
prompt_length = len(held_out[0])
rows = held_out * 2  # row b draws with seed + b: the same prompt twice, two texts
samplers: dict[str, Drafter | None] = {
    "no drafter": None,
    "prompt lookup": PromptLookup(max_ngram=4, n_drafts=4),
    "medusa": Medusa(heads, searched[:16]),
}


@torch.no_grad()
def surplus(sequences: list[torch.Tensor]) -> torch.Tensor:
    """Surprise less entropy of every new byte, in bits, [rows, N_SAMPLED]."""
    tokens = torch.stack(sequences)
    logits = target(tokens[:, :-1]).logits
    assert logits is not None
    log_p = (logits[:, prompt_length - 1 :].double() / TEMPERATURE).log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    surprise = -log_p.gather(-1, tokens[:, prompt_length:, None]).squeeze(-1)
    return (surprise - entropy) / math.log(2)


print(f"{'rule':12}{'drafter':16}{'tau':>6}{'bits':>9}{'z':>7}   the target's law?")
for rule in (Rejection(TEMPERATURE, seed=0), Typical(temperature=TEMPERATURE, seed=0)):
    for name, drafter in samplers.items():
        run = generate(target, rows, drafter, max_new_tokens=N_SAMPLED, rule=rule)
        bits = surplus(run.sequences)
        mean, z = bits.mean().item(), (bits.mean() / bits.std() * bits.numel() ** 0.5).item()
        assert abs(z) < 5 or not rule.lossless
        law = "nothing against it" if abs(z) < 5 else "no"
        print(f"{type(rule).__name__:12}{name:16}{run.metrics.tau:6.2f}{mean:9.3f}{z:7.1f}   {law}")
print(f"Rejection.lossless is {Rejection.lossless}, Typical.lossless is {Typical.lossless}")

# %% [markdown]
# A bound on likelihood cuts the tail of p off, which already shows without a drafter; with one,
# what is written depends on who drafted. Whether that is good enough is for the reader of the text
# to say, not for a table of speeds.
#
# ## Exercises
#
# 1. Measure the table on held-out files instead of what the target writes. Which accuracies fall
#    most, and what does the tree searched from them lose?
# 2. Give every head the temperature at which its confidences are its accuracies. Could the tree
#    then be chosen anew in every round? (EAGLE-2 does: `05_eagle.py`.)
# 3. Raise `epsilon` and `delta` in `Typical`. Which of tau and bits moves first?
