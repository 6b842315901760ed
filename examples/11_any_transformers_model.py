# %% [markdown]
# # Any model of transformers
#
# `HFModel` makes a target of any causal language model of `transformers`: its modules and weights
# run as they are, over the library's own cache, so that a whole tree of drafts for a whole batch is
# one pass. Here prompt lookup drafts, which needs no training and no second model.
#
#     python examples/11_any_transformers_model.py    # tiny, random, offline
#     python examples/11_any_transformers_model.py --model HuggingFaceTB/SmolLM2-135M-Instruct
#     python examples/11_any_transformers_model.py --model path/to/a/folder --prompt "Say hello."

# %%
import argparse
import statistics
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec import Drafter, Generation, PromptLookup, generate
from specdec.hf import HFModel

TEXT = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
"""
parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a name on the hub or a folder; none: a tiny random one")
parser.add_argument("--prompt", default=f"Write this again, with math.pi for the number:\n\n{TEXT}")
parser.add_argument("--new-tokens", type=int, default=96)
parser.add_argument("--dtype", default="float32", help="float32, bfloat16, ...")
parser.add_argument("--repeats", type=int, default=3)
args, _ = parser.parse_known_args()  # a notebook has arguments of its own

# %% [markdown]
# ## A model, and a prompt in its own words
#
# `generate` takes and returns token ids. A chat model wants its template around the message:
# `apply_chat_template` writes it, ending where the answer begins. The random model has no tokenizer
# and reads bytes.


# %%
def tiny() -> Any:
    """A Llama with random weights, of bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def ids_of(tokenizer: Any, text: str) -> Tensor:
    """The ids [T] of a message, in the chat template if the tokenizer has one."""
    if tokenizer is None:
        return torch.tensor(list(text.encode()))
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt")["input_ids"][0]
    messages = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return encoded["input_ids"][0]


tokenizer: Any = None if args.model is None else AutoTokenizer.from_pretrained(args.model)
model: Any = tiny() if args.model is None else AutoModelForCausalLM.from_pretrained(args.model)
model = model.to(getattr(torch, args.dtype)).eval().requires_grad_(False)
target = HFModel(model)
prompt = ids_of(tokenizer, args.prompt).to(target.device)
end = model.generation_config.eos_token_id  # none, one or several
stops = tuple([end] if isinstance(end, int) else end or ())
print(f"{type(model).__name__}, {model.num_parameters() / 1e6:.1f} M parameters, {target.dtype}")
print(f"{len(prompt)} tokens of prompt, stop tokens {list(stops)}")

# %% [markdown]
# ## Plain decoding, and with drafts
#
# In turns, so that whatever else the machine does falls on both; medians.


# %%
def run(drafter: Drafter | None) -> Generation:
    return generate(target, prompt, drafter, max_new_tokens=args.new_tokens, stop_tokens=stops)


drafters: dict[str, Drafter | None] = {"plain": None, "prompt lookup": PromptLookup(n_drafts=7)}
runs: dict[str, list[Generation]] = {name: [] for name in drafters}
for _ in range(args.repeats + 1):  # the first warms up
    for name, drafter in drafters.items():
        runs[name].append(run(drafter))

plain_rate = 0.0
print(f"{'':16}{'tokens':>8}{'passes':>8}{'tau':>7}{'tokens/s':>10}{'speed-up':>10}")
for name, each in runs.items():
    metrics = each[0].metrics
    rate = metrics.n_new_tokens / statistics.median(one.seconds for one in each[1:])
    plain_rate = plain_rate or rate
    print(
        f"{name:16}{metrics.n_new_tokens:8}{metrics.n_target_passes:8}{metrics.tau:7.2f}"
        f"{rate:10.1f}{rate / plain_rate:9.2f}x"
    )

# %% [markdown]
# ## The same tokens
#
# Drafts change how fast the tokens come and not which. In low precision a pass over a block rounds
# otherwise than one over a token, and two logits that nearly tie may swap; what is printed then is
# how near they were.

# %%
plain, drafted = (each[0].sequences[0] for each in runs.values())
n = min(len(plain), len(drafted))
differs = (plain[:n] != drafted[:n]).nonzero().flatten().tolist()
if not differs:
    print(f"equal to plain decoding: {len(plain) == len(drafted)}")
else:
    with torch.no_grad():
        logits = target(plain[None, : differs[0]]).logits
    assert logits is not None
    best = logits[0, -1].float().topk(2).values.tolist()
    print(f"they part at token {differs[0]}, where the best two are {best[0] - best[1]:.2g} apart")
if args.model is None:
    assert not differs and len(plain) == len(drafted)
new = drafted[len(prompt) :]
print(new.tolist() if tokenizer is None else tokenizer.decode(new, skip_special_tokens=True))

# %% [markdown]
# ## A tree in one pass
#
# Nodes name their parents, rows may differ in length and in shape. Here two rows, the second a
# token behind, and below each a root with two children, one of which has a child. Every node says
# what the model would say after the path that leads to it.

# %%
cache = target.new_cache(2, len(prompt) + 8)
both = prompt.expand(2, -1)
chain = torch.arange(len(prompt), device=target.device).expand(2, -1)
lengths = torch.tensor([len(prompt), len(prompt) - 1], device=target.device)
target(both, cache, logits=False)
cache.commit(chain, lengths)
nodes = torch.tensor([[7, 3, 5, 9], [4, 8, 2, 6]], device=target.device)
parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 2]], device=target.device)
tree = target(nodes, cache, parents=parents).logits
path = torch.cat([both[1, : lengths[1]], nodes[1, [0, 2, 3]]])
with torch.no_grad():
    alone = target(path[None]).logits
assert tree is not None and alone is not None
print(f"largest difference to the path alone: {(tree[1, 3] - alone[0, -1]).abs().max():.1e}")
cache.commit(torch.tensor([[0, 1, 3], [0, 2, 3]], device=target.device), lengths.new_tensor([3, 2]))
print(f"committed {cache.lengths.tolist()}")

# %% [markdown]
# ## What is refused
#
# A model whose masks, positions or states we cannot set is not served wrongly; it is not served.
# Recurrent layers: Qwen3-Next and Qwen3.5 are served, in chains (`09_hybrid_rollback.py`).

# %%
try:
    HFModel(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
except ValueError as error:
    print(error)
own = model.config._attn_implementation
model.config._attn_implementation = "flex_attention"
try:
    HFModel(model)
except ValueError as error:
    print(error)
model.config._attn_implementation = own

# %% [markdown]
# ## Exercises
#
# 1. `PromptLookup` drafts 7 tokens. With which `n_drafts` is your model fastest, on this prompt and
#    on one that asks for a story?
# 2. Let a small model of the same family draft for a large one: `DraftModel(HFModel(small))`.
# 3. Prove a drafter on your model: `specdec.testing.check_lossless(HFModel(model.double()), ...)`.
# 4. In `specdec.hf.masks.slot_positions` return the slots for trees, too. For which models does
#    nothing change, and why?
