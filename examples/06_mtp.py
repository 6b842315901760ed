# %% [markdown]
# # Multi-token prediction: drafters that come with the model
#
# A model can be trained to say several tokens at every place. *Parallel heads* do so all at once:
# n last blocks on one trunk, each from the same state. *Sequential modules* take turns: each reads
# what the one before it hands on, and the token in between. We see what that difference means, how
# far each drafts, what a single module is worth that is run again, that modules can be dropped
# without a trace, and how n heads are trained in the memory of one.

# %%
import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from specdec import Context, Draft, Drafter, Greedy, Model, decode, generate, load
from specdec.drafters import MTPHeads, MTPModules
from specdec.drafters.mtp import resized
from specdec.drafters.mtp_heads import parallel_backward, parallel_loss
from specdec.metrics import measure
from specdec.protocol import DrafterState
from specdec.testing import compare
from specdec.trace import one_line
from specdec.training import Corpus

target, tokenizer, drafters, prompts = load("tiny")
by_heads, again, in_turn = (
    drafters[name] for name in ("mtp heads", "mtp, 1 module", "mtp, 3 modules")
)
assert isinstance(by_heads, MTPHeads)
assert isinstance(again, MTPModules) and isinstance(in_turn, MTPModules)
heads, module, modules = by_heads.network, again.network, in_turn.network
corpus = Corpus.standard_library()


def shown(token: int) -> str:
    return one_line(tokenizer.decode([token]))


def size(part: torch.nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in part.parameters()) / 1e6:.2f} M weights"


print(f"target: {size(target)}, {target.n_layers} blocks; its embedding and head serve all")
print(f"{heads.n_depths} more heads: {size(heads)}, on the states after block {heads.tap}")
print(f"1 module: {size(module)}; {modules.n_modules} modules: {size(modules)}")

# %% [markdown]
# ## Who knows what
#
# After `raise ` more than one byte is likely. Head 2 speaks of the byte behind, whichever it will
# be: it can only say what goes well with all of them. The module is told which one it was.

# %%
text = prompts["code"][0]
read = text[: text.index("ValueError")]
tokens = tokenizer.encode(read)[None]  # [1, T]


def likeliest(logits: torch.Tensor) -> str:
    top = logits.softmax(dim=-1).topk(3)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return "   ".join(f"{shown(token)} {share:4.0%}" for token, share in pairs)


with torch.no_grad():
    logits = target(tokens).logits
    assert logits is not None
    roots = logits[0, -1].topk(2).indices
    both = torch.cat([tokens.expand(2, -1), roots[:, None]], dim=1)  # [2, T + 1]
    blind = next(heads.logits_by_depth(target, tokens))[0, -1]
    states = target(both, taps=module.taps, logits=False).hidden[module.tap]
    told = module(states, both, target)[0][:, -1]
    truth = target(both).logits
    assert truth is not None

print(f"\n...{read[-40:]!r}, then one byte, and behind it")
print(f"  head 2, whatever comes:  {likeliest(blind)}")
for root, said, own in zip(roots.tolist(), told, truth[:, -1], strict=True):
    print(f"  the module, after {shown(root)}:      {likeliest(said)}")
    print(f"  the target, after {shown(root)}:      {likeliest(own)}")

# %% [markdown]
# ## How deep does each draft well?
#
# Drafts of three, at *every* place of some text of the target, not just where a round happens to
# begin: a wrapper notes what is drafted and hands the loop an empty draft, so that the target
# writes on byte by byte. Counted is how often a draft is right down to a depth. The single module
# was trained to look one byte ahead and is run again on what it hands on. Three modules each have a
# depth of their own; between the two stand three *copies* of the one, before they are fine-tuned.


# %%
class Noted:
    """Drafts with `drafter`, notes the drafts and what they hang below, and withholds them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps = drafter, drafter.taps
        self.drafts: list[tuple[torch.Tensor, Draft]] = []  # lengths [B], draft

    def begin(self, target: Model, batch_size: int, max_length: int) -> "NotedState":
        return NotedState(self.drafter.begin(target, batch_size, max_length), self.drafts)


class NotedState:
    def __init__(self, state: DrafterState, drafts: list[tuple[torch.Tensor, Draft]]) -> None:
        self.state, self.drafts = state, drafts

    def propose(self, context: Context) -> Draft:
        self.drafts.append((context.lengths, self.state.propose(context)))
        return Draft.empty(len(context.lengths))


DEPTH, N_NEW = 3, 64
windows = list(corpus.held_out_batch(6, 63, seed=1))  # 64 bytes each


def right_to_depth(drafter: Drafter) -> list[float]:
    noted = Noted(drafter)
    rows = torch.stack(generate(target, windows, noted, max_new_tokens=N_NEW).sequences)
    hits = []
    for lengths, draft in noted.drafts:
        place = lengths.unsqueeze(1) + torch.arange(DEPTH)  # [B, DEPTH]
        if draft.n_nodes == DEPTH and int(place.max()) < rows.shape[1]:
            hits.append((rows.gather(1, place) == draft.tokens).cumprod(dim=1))
    return torch.cat(hits).double().mean(dim=0).tolist()


designs: dict[str, Drafter] = {
    "parallel heads": MTPHeads(heads),
    "one module, run again": MTPModules(module, n_drafts=DEPTH),
    "three copies of it": MTPModules(resized(module, DEPTH)),
    "three modules": MTPModules(modules),
}
print(f"\n{'right down to depth':24}{''.join(f'{depth:6d}' for depth in range(1, DEPTH + 1))}")
for name, drafter in designs.items():
    shares = right_to_depth(drafter)
    worth = sum(shares)  # drafts that a round would get accepted if it began anywhere
    print(f"{name:24}{''.join(f'{share:6.0%}' for share in shares)}   {'#' * round(20 * worth)}")

# %% [markdown]
# ## Drafting, and dropping the modules
#
# The same drafters in the loop, the same number of passes of the target each. Then the single
# module with its weights replaced by noise. The target reads nothing of its modules, so what it
# writes does not change; `drafted` would raise if it did. Trained in, they may have made it a
# better model; afterwards they can stay or go.

# %%
N_PASSES = 24
budget = N_PASSES * (1 + DEPTH)
held_out = list(corpus.held_out_batch(6, 63, seed=2))
plain = generate(target, held_out, max_new_tokens=budget).sequences  # no module takes part


def drafted(drafter: Drafter) -> float:
    """tau of the first N_PASSES rounds; what they emit must be what plain decoding does."""
    rounds = list(islice(decode(target, held_out, drafter, max_new_tokens=budget), N_PASSES))
    for b, (prompt, expected) in enumerate(zip(held_out, plain, strict=True)):
        got = torch.cat([prompt, *[r.new_tokens[b] for r in rounds]])
        difference = compare(target, expected[: len(got)], got, Greedy())
        assert difference is None or difference.near_tie, difference  # float32 may turn a near-tie
    return measure(rounds).tau


noise = copy.deepcopy(module).reset_parameters(torch.Generator().manual_seed(0))
designs["one module, noise"] = MTPModules(noise, n_drafts=DEPTH)
print(f"\n{'drafter':24}{'tau':>6}   each in {N_PASSES} passes of the target")
for name, drafter in designs.items():
    tau = drafted(drafter)
    print(f"{name:24}{tau:6.2f}   {'#' * round(20 * (tau - 1))}")
print("every row wrote what the target writes without any of them")

# %% [markdown]
# ## n heads in the memory of one
#
# In training every head has logits of its own, [batch x length, vocabulary], and they are what
# fills the memory: with a vocabulary of 131,072 the logits of 4,096 tokens take 2 GiB a head in
# float32. The plain loss sums over heads and goes backward once, so all of them are alive at the
# same time. `parallel_backward` runs each head forward *and* backward before the next, adds up
# their gradients at the trunk's output, and goes through the trunk once. Autograd tells us what it
# holds: hooks see every tensor that is kept for the backward pass, and when it is let go.

# %%
B, T, V = 4, 128, target.vocab_size


class Kept:
    """What autograd holds instead of a tensor, so that we see when it lets go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Logits:
    """Counts the heads whose log-probabilities are kept for the backward pass."""

    def __init__(self) -> None:
        self.alive: Counter[int] = Counter()
        self.most = 0

    def pack(self, tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        if tensor.ndim == 2 and tensor.shape[1] == V and tensor.is_floating_point():
            total = tensor.exp().sum(dim=1)  # hidden states may be as wide, but do not sum to 1
            if bool(((total - 1).abs() < 1e-6).all()):
                self.alive[tensor.data_ptr()] += 1
                self.most = max(self.most, len(+self.alive))
                weakref.finalize(kept, self.release, tensor.data_ptr())
        return kept

    def release(self, pointer: int) -> None:
        self.alive[pointer] -= 1


def backward(run: Callable[..., torch.Tensor], count: Logits) -> Iterator[torch.Tensor]:
    """One backward pass through fresh copies of target and heads; their gradients."""
    model = copy.deepcopy(target).double().requires_grad_(True)
    network = copy.deepcopy(heads).double().requires_grad_(True)
    batch = corpus.batch(0, B, T - 1, seed=0)  # [B, T]
    with torch.autograd.graph.saved_tensors_hooks(count.pack, lambda kept: kept.tensor):
        loss = run(network, model, network.trunk(model, batch), batch)
        if loss.requires_grad:
            loss.backward()
    print(f"  loss {loss.item():.6f}, at most {count.most} heads' logits alive at a time")
    for part in (model, network):
        yield from (weight.grad for weight in part.parameters() if weight.grad is not None)


print(f"\n{heads.n_heads} heads on one trunk, trained together:")
gradients = []
for run in (parallel_loss, parallel_backward):
    print(f"{run.__name__}")
    gradients.append(list(backward(run, Logits())))
pairs = list(zip(*gradients, strict=True))
furthest = max((a - b).abs().max().item() / a.abs().max().item() for a, b in pairs)
assert furthest < 1e-9
print(f"gradients of {len(pairs)} weights, largest relative difference {furthest:.0e}")

# %% [markdown]
# ## Exercises
#
# 1. Let the heads draft trees (`MTPHeads(heads, choices)`, `search_choices`): what do they win back
#    of what they do not know?
# 2. `right_to_depth` with `DEPTH = 6` for the module that is run again. And for EAGLE's layers,
#    which do the same?
# 3. A module reads the state h_t and the token x_{t+1}. Feed it x_t instead. Which of the checks in
#    this file notices? (Compare the end of `05_eagle.py`.)
# 4. Freeze the target in `backward`. How many logits are alive in the plain form, and why does the
#    pass through the trunk disappear?
