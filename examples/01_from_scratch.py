# %% [markdown]
# # Speculative decoding from scratch
#
# Nothing but torch: two toy models with a KV cache, one loop, one acceptance rule, and the proof
# that what comes out is the target's own. p is the target's law, q the drafter's.
# %%
import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)  # so that no difference can be blamed on rounding
rng = torch.Generator().manual_seed(1)
V, D = 4, 32  # vocabulary, width


# %% [markdown]
# ## Two models
#
# Both map (tokens, kv_cache) to (logits, kv_cache). The drafter is the target's first layer: half
# the work, and an opinion that is often the same.
# %%
def make_model(n_layers):
    weights = torch.Generator().manual_seed(5)  # the same for both, as far as both go
    embedding, place, head = torch.randn(3, 64, D, generator=weights)
    layers = [torch.randn(4, D, D, generator=weights) / D**0.5 for _ in range(n_layers)]

    def model(tokens, kv_cache=None):  # [B, N] -> [B, N, V]
        kv_cache = kv_cache or [(torch.empty(len(tokens), 2, 0, D),)] * n_layers
        n, start = tokens.shape[1], kv_cache[0][0].shape[2]
        x, grown = embedding[tokens] + place[start : start + n], []  # [B, N, D]
        seen = torch.ones(n, start + n, dtype=torch.bool).tril(start)
        for (w_q, w_k, w_v, w_out), (kv,) in zip(layers, kv_cache, strict=True):
            kv = torch.cat([kv, torch.stack([x @ w_k, x @ w_v], dim=1)], dim=2)  # [B, 2, P + N, D]
            mixed = F.scaled_dot_product_attention(x @ w_q, *kv.unbind(1), attn_mask=seen)
            x = x + (mixed @ w_out).tanh()
            grown.append((kv,))
        return x @ head[:V].T / D**0.5, grown

    return model


target, drafter = make_model(2), make_model(1)


def keep(kv_cache, n):
    return [(kv[:, :, :n],) for (kv,) in kv_cache]


def draw(law):  # [M, V], not necessarily normalised -> [M, 1]
    return torch.multinomial(law, 1, generator=rng)


# %% [markdown]
# ## The rule
#
# A draft x passes with probability min(1, p(x) / q(x)). Where the first one fails, the next token
# comes from the residual law: max(p - q, 0), normalised. Behind the last draft nothing was
# proposed: q is 0 there, the residual is p itself, and what is drawn is the bonus token.
# %%
def residual(p, q):
    return (p - q).clamp(min=0)


def accept(drafts, p, q, owed=residual):  # [K], [K + 1, V], [K, V] -> the new tokens
    x = drafts.unsqueeze(1)
    passes = torch.rand(x.shape, generator=rng) < p[:-1].gather(1, x) / q.gather(1, x)
    n = int(passes.cumprod(dim=0).sum())
    q = F.pad(q, (0, 0, 0, 1))  # [K + 1, V]
    return torch.cat([drafts[:n], draw(owed(p[n], q[n])[None])[0]])


# %% [markdown]
# ## The loop
#
# Draft up to K tokens; let the target read the root (the last token it has not seen yet) and the
# drafts in *one* pass; keep what passes; cut both caches back to it. `law` turns logits into
# probabilities: softmax to sample, one-hot to decode greedily. The rule is the same.
# %%
def generate(prompt, n_new, n_drafts, law, owed=residual):
    tokens, n_passes, total = prompt, 0, prompt.shape[1] + n_new
    (_, p_cache), (_, q_cache) = target(prompt[:, :-1]), drafter(prompt[:, :-1])
    while tokens.shape[1] < total:
        drafted, q = tokens, torch.empty(0, V)
        for _ in range(min(n_drafts, total - tokens.shape[1] - 1)):
            unread = drafted[:, q_cache[0][0].shape[2] :]
            logits, q_cache = drafter(unread, q_cache)
            q = torch.cat([q, law(logits[:, -1])])
            drafted = torch.cat([drafted, draw(q[-1:])], dim=1)
        block = drafted[:, tokens.shape[1] - 1 :]  # root and drafts, [1, 1 + K]
        logits, p_cache = target(block, p_cache)
        new = accept(block[0, 1:], law(logits[0]), q, owed)
        tokens, n_passes = torch.cat([tokens, new[None]], dim=1), n_passes + 1
        p_cache, q_cache = (keep(cache, tokens.shape[1] - 1) for cache in (p_cache, q_cache))
    return tokens, n_new / n_passes  # the sequence, and tau: new tokens per target pass


# %% [markdown]
# ## Greedy: the same tokens
#
# The reference knows no cache and no draft.
# %%
prompt = plain = torch.tensor([[0, 1, 2]])
for _ in range(50):
    plain = torch.cat([plain, target(plain)[0][:, -1:].argmax(-1)], dim=1)
for k in (0, 1, 2, 4, 8):
    tokens, tau = generate(prompt, 50, k, lambda z: F.one_hot(z.argmax(-1), V).double())
    assert tokens.equal(plain), "greedy speculative decoding left the target's path"
    print(f"greedy, K = {k}: equal to plain decoding, tau {tau:.2f}")

# %% [markdown]
# ## Sampled: the same law
#
# The 64 continuations of three tokens, each with the probability that the target gives it, against
# how often 1,500 runs end in it. Beside it a well-known bug: the refused token is redrawn from p
# instead of the residual. Chi-square over the 24 likeliest and all others together has 24 degrees
# of freedom; a right program exceeds 73 once in a million times.
# %%
n_runs, found = 1500, {}
every = torch.cartesian_prod(*[torch.arange(V)] * 3)  # [64, 3]
logits, _ = target(torch.cat([prompt.expand(len(every), -1), every], dim=1))
p = logits.softmax(-1)[:, 2:-1].gather(2, every.unsqueeze(2)).prod(dim=1).squeeze(1)  # [64]
p, order = p.sort(descending=True)
expected = n_runs * torch.cat([p[:24], p[24:].sum(0, keepdim=True)])
for name, owed in (("right", residual), ("wrong", lambda p, q: p)):
    runs = [generate(prompt, 3, 2, lambda z: z.softmax(-1), owed) for _ in range(n_runs)]
    codes = torch.cat([tokens[:, 3:] for tokens, _ in runs]) @ torch.tensor([V * V, V, 1])
    count = torch.bincount(codes, minlength=len(p))[order]
    found[name] = torch.cat([count[:24], count[24:].sum(0, keepdim=True)])
    print(f"{name}: mean tau {sum(tau for _, tau in runs) / n_runs:.2f} of at most 3")

print(f"\ncontinuation {'expected':>10} {'right':>10} {'wrong':>10}")
for i in range(10):
    row = [f"{expected[i]:10.1f}", *[f"{count[i]:10d}" for count in found.values()]]
    print(f"{every[order[i]].tolist()!s:12}", *row, "#" * int(expected[i] / 8))
for name, count in found.items():
    chi_square = float(((count - expected) ** 2 / expected).sum())
    print(
        f"{name}: chi-square {chi_square:.0f}, {'' if chi_square < 73 else 'NOT '}the target's law"
    )
    assert (chi_square < 73) == (name == "right")
