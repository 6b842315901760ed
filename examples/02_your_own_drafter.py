# %% [markdown]
# # Your own drafter, proven lossless
#
# A drafter is anything with `taps`, `begin` and `propose`. It may be as wrong as it likes: the
# target decides. What it may not do is lie about how its tokens came about. Here we write one,
# prove it, and then plant the two bugs this field knows best and see them caught.

# %%
from dataclasses import dataclass, replace

import torch

from specdec import Context, Draft, Model, generate, load
from specdec.testing import LosslessError, check_law, check_lossless

bundle = load("tiny")
target, tokenizer = bundle.target.double(), bundle.tokenizer  # equality is proven in float64

# %% [markdown]
# ## A bigram drafter
#
# It counts which byte follows which in some text and drafts a chain from the root: no model, no
# training, a table of 256 x 256. The rule draws for us (`rule.pick`), so that greedy decoding,
# coupled sampling and rejection sampling all work, and `probs` is exactly the law drawn from.


# %%
@dataclass(frozen=True)
class Bigram:
    log_counts: torch.Tensor  # [V, V]
    n_drafts: int = 3
    taps = ()  # it reads no hidden states of the target

    def begin(self, target: Model, batch_size: int, max_length: int) -> "Bigram":
        return self  # it keeps no state of a run

    def propose(self, context: Context) -> Draft:
        token = context.tokens.gather(1, context.lengths.unsqueeze(1) - 1)  # the root, [B, 1]
        tokens, laws = [], []
        for depth in range(min(self.n_drafts, context.max_depth)):
            picked, q = context.rule.pick(self.log_counts[token], context.lengths, depth)
            token = picked.squeeze(-1)  # [B, 1, 1] -> [B, 1]
            tokens.append(token)
            if q is not None:
                laws.append(q.squeeze(2))  # [B, 1, V]
        if not tokens:
            return Draft.empty(len(context.lengths))
        return Draft(torch.cat(tokens, dim=1), probs=torch.cat(laws, dim=1) if laws else None)


def count_bigrams(text: str) -> torch.Tensor:
    ids = tokenizer.encode(text)
    counts = torch.full((256, 256), 0.01, dtype=torch.float64)
    return counts.index_put((ids[:-1], ids[1:]), torch.tensor(1.0).double(), accumulate=True).log()


with open(torch.__file__, encoding="utf-8") as file:
    drafter = Bigram(count_bigrams(file.read()))

# %% [markdown]
# ## Use it, and prove it
#
# `check_lossless` decodes random prompts, alone and in a ragged batch, greedily and sampled, with
# stop tokens, budgets from one and lost drafts; every row must equal plain decoding of the target.
# It also replays every draft from a fresh state, and tests sampled tokens against the target's law.

# %%
prompt = tokenizer.encode("class Shelf:\n    def __init__(self, name):\n        self.")
run = generate(target, prompt, drafter, max_new_tokens=60)
print(tokenizer.decode(run.sequences[0]))
print(f"\ntau {run.metrics.tau:.2f}, acceptance rate {run.metrics.acceptance_rate:.0%}")
print(check_lossless(target, drafter, prompts=[prompt, prompt[:1]], max_new_tokens=6, n_samples=64))

# %% [markdown]
# ## Bug 1: the declared law is not the law drawn from
#
# A popular one: draw greedily (or at another temperature) and declare the softmax. Greedy output
# stays right, so the usual check sees nothing. The law of sampled text does not.


# %%
class Liar(Bigram):
    def propose(self, context: Context) -> Draft:
        draft = super().propose(context)
        if draft.probs is None:
            return draft
        flat = torch.full_like(draft.probs, 1 / 256)
        return replace(draft, probs=0.2 * draft.probs + 0.8 * flat)


def expect_caught(bug: str, check) -> None:
    try:
        check()
    except LosslessError as error:
        print(f"\ncaught, {bug}:\n  {error}")
    else:
        raise SystemExit(f"{bug} was not caught")


expect_caught(
    "a q that is not the q drawn from",
    lambda: check_law(target, Liar(drafter.log_counts), prompt[:3], 256, 3),
)

# %% [markdown]
# ## Bug 2: state that depends on the past of the run
#
# This drafter counts its own calls. Every output is right, but it drafts worse and worse: the kind
# of bug that only shows as a low tau, months later. Replay shows it at once.


# %%
@dataclass(frozen=True)
class Forgetful:
    drafter: Bigram
    taps = ()

    def begin(self, target: Model, batch_size: int, max_length: int) -> "ForgetfulRun":
        return ForgetfulRun(self.drafter)


class ForgetfulRun:
    def __init__(self, drafter: Bigram) -> None:
        self.drafter, self.n_calls = drafter, 0

    def propose(self, context: Context) -> Draft:
        self.n_calls += 1
        draft = self.drafter.propose(context)
        return replace(draft, tokens=(draft.tokens + self.n_calls // 2) % 256, probs=None)


expect_caught(
    "state that depends on the past",
    lambda: check_lossless(
        target, Forgetful(drafter), max_new_tokens=6, prompts=[prompt[:8]], n_samples=0
    ),
)
