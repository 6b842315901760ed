"""EAGLE 1-3: one decoder layer that reads the target's hidden states and drafts token by token.

EAGLE-1 (Li et al., arXiv:2401.15077): from the target's last hidden state h_t (its *feature*) and
the token x_{t+1} drawn from it, one layer predicts h_{t+1}; the target's own head turns that into
x_{t+2}. Fed its own predictions, the layer drafts on. EAGLE-2 (arXiv:2406.16858) is the same layer
with a tree that grows where it is sure. EAGLE-3 (arXiv:2503.01840) fuses hidden states from low,
middle and high in the target, has a head of its own, often over fewer tokens, is no longer asked to
predict features, and is trained on its own outputs several steps deep.

Here are the layers and how they are trained; `eagle_tree.py` drafts with them. Both count in pairs:
pair t is (h_t, x_{t+1}), stands at position t and predicts x_{t+2}.

Where we differ from the published code: losses are means over the tokens that count, and training
ends a step's places where the text ends instead of padding them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVStore, View
from ..models import TransformerConfig
from ..models.layers import GatedMLP, RMSNorm, for_groups, rotary_angles
from ..models.transformer import attention_of, draw_weights
from ..protocol import FINAL, Model
from .reduced_head import check_draft_ids, head_rows, spread

Rotary: TypeAlias = tuple[Tensor, Tensor]


class Eagle1(nn.Module):
    """The layer of EAGLE-1 and -2: fc(2 D -> D), then a decoder layer without its first norm.

    Args:
        config: shape of the layer; width and vocabulary are the target's, one layer.
        bias: whether fc has one.
    """

    taps = (FINAL,)

    def __init__(self, config: TransformerConfig, *, bias: bool = True) -> None:
        super().__init__()
        _check_one_layer(config)
        c, width = config, config.hidden_size
        self.config = config
        self.fc = nn.Linear(2 * width, width, bias=bias)
        self.attention = attention_of(c)
        self.norm_mlp = RMSNorm(width, c.rms_norm_eps)
        self.mlp = GatedMLP(width, c.intermediate_size)

    def reset_parameters(self, generator: torch.Generator | None = None) -> Eagle1:
        draw_weights(self, 1, generator)
        return self

    @property
    def n_tokens(self) -> int:
        """How many tokens it can draft."""
        return self.config.vocab_size

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """tap -> [B, N, D] to features [B, N, D]."""
        return hidden[FINAL]

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        rotary: Rotary,
        store: KVStore | None = None,
        view: View | None = None,
    ) -> Tensor:
        """Features h_t and embeddings of x_{t+1}, each [B, N, D] -> predicted h_{t+1} [B, N, D]."""
        x = self.fc(torch.cat([embeddings, features], dim=-1))
        x = x + self.attention(x, rotary, store, 0, view)
        return x + self.mlp(self.norm_mlp(x))

    def logits(self, features: Tensor, target: Model) -> Tensor:
        """Predicted features [B, N, D] -> logits of the next token [B, N, V]."""
        return target.head(features)


class Eagle3(nn.Module):
    """The layer of EAGLE-3: fc(taps -> D), attention over [embedding, feature], head of its own.

    Args:
        config: shape of the layer; width and vocabulary are the target's, one layer.
        taps: hidden states of the target to fuse, low to high; see `eagle3_taps`.
        draft_ids: [Vd] int64, increasing: the target's tokens that this layer can draft (the
            published d2t is `draft_ids - arange(Vd)`, t2d marks them); None: all.
    """

    def __init__(
        self, config: TransformerConfig, taps: Sequence[int], draft_ids: Tensor | None = None
    ) -> None:
        super().__init__()
        _check_one_layer(config)
        c, width = config, config.hidden_size
        wrong = [tap for tap in taps if tap != FINAL and tap < 0]
        if not taps or wrong:
            raise ValueError(f"taps: expected some of 0, 1, ... and FINAL (-1), got {list(taps)}")
        if draft_ids is not None:
            check_draft_ids(draft_ids, c.vocab_size)
        self.config, self.taps = config, tuple(taps)
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.norm_embedding = RMSNorm(width, c.rms_norm_eps)
        self.norm_feature = RMSNorm(width, c.rms_norm_eps)
        self.attention = attention_of(c, 2 * width)
        self.norm_mlp = RMSNorm(width, c.rms_norm_eps)
        self.mlp = GatedMLP(width, c.intermediate_size)
        self.norm = RMSNorm(width, c.rms_norm_eps)
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids)
        self.head = nn.Linear(width, self.n_tokens, bias=False)

    def reset_parameters(self, generator: torch.Generator | None = None) -> Eagle3:
        draw_weights(self, 1, generator)
        return self

    @torch.no_grad()
    def copy_head(self, target: Model) -> Eagle3:
        """Start from the rows of the target's (linear) head that belong to the draft tokens."""
        self.head.weight.copy_(head_rows(target, self.draft_ids))
        return self

    @property
    def n_tokens(self) -> int:
        """How many tokens it can draft."""
        return self.config.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """tap -> [B, N, D] to features [B, N, D]."""
        return self.fc(torch.cat([hidden[tap] for tap in self.taps], dim=-1))

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        rotary: Rotary,
        store: KVStore | None = None,
        view: View | None = None,
    ) -> Tensor:
        """Features and embeddings of the tokens behind them, [B, N, D] -> features [B, N, D]."""
        x = torch.cat([self.norm_embedding(embeddings), self.norm_feature(features)], dim=-1)
        x = features + self.attention(x, rotary, store, 0, view)
        return x + self.mlp(self.norm_mlp(x))

    def draft_logits(self, features: Tensor) -> Tensor:
        """Features [..., D] -> logits of the draft tokens [..., Vd]."""
        return self.head(self.norm(features))

    def logits(self, features: Tensor, target: Model) -> Tensor:
        """Features [B, N, D] -> logits [B, N, V] over the target's tokens, -inf for the others."""
        return spread(self.draft_logits(features), self.draft_ids, self.config.vocab_size)


Network: TypeAlias = Eagle1 | Eagle3


def eagle3_taps(n_layers: int) -> tuple[int, int, int]:
    """The published taps of a target of `n_layers` blocks: 2, half-way, and 3 before the end."""
    if n_layers < 5:
        raise ValueError(f"n_layers: expected at least 5 (name the taps yourself), got {n_layers}")
    return 2, n_layers // 2, n_layers - 3


class _Unrolled:
    """Keys and values of all steps so far, with their gradients: what `KVStore` is in decoding."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def write(self, layer: int, view: View, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(keys.transpose(1, 2))
        self.values.append(values.transpose(1, 2))
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def unroll(
    network: Network, features: Tensor, embeddings: Tensor, n_steps: int = 1
) -> list[Tensor]:
    """Training-time test (arXiv:2503.01840): the layer fed its own outputs, `n_steps` deep.

    `features` [B, P, D] (fused taps) of the places 0..P-1 and `embeddings` [B, P, D] of the tokens
    behind them. Step s at place t reads the output of step s - 1 at t and embedding t + s, stands
    at position t + s, and sees step 0 up to place t and steps 1..s at t alone: the committed pairs
    and the ancestors that node s of a chain sees in decoding. Each step is one place shorter.

    Returns the outputs of every step, [B, P - s, D]; place t of step s predicts token t + s + 2.
    """
    config, n = network.config, features.shape[1]
    store, outputs = _Unrolled(), []
    for step in range(n_steps):
        left = n - step
        position = torch.arange(step, n, device=features.device).unsqueeze(0)
        angles = rotary_angles(position, config.head_size, config.rope_theta, features.dtype)
        cos, sin = angles.unbind(2)
        seen = [torch.ones(left, n, dtype=torch.bool, device=features.device).tril()]
        for s in range(1, step + 1):
            seen.append(torch.eye(left, n - s, dtype=torch.bool, device=features.device))
        visible = torch.cat(seen, dim=1)
        mask = torch.zeros(visible.shape, dtype=features.dtype, device=features.device)
        mask = mask.masked_fill(~visible, -torch.inf)[None, None]
        view = for_groups(View(0, visible.shape[1], position, mask, None), config.n_groups)
        # attention asks a store for `write` alone
        features = network(
            features[:, :left], embeddings[:, step:], (cos, sin), cast(KVStore, store), view
        )
        outputs.append(features)
    return outputs


def eagle1_loss(
    network: Eagle1,
    target: Model,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    token_weight: float = 0.1,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """SmoothL1(h'_{t+1}, h_{t+1}) + 0.1 cross-entropy(p_{t+2}, q_{t+2}), arXiv:2401.15077.

    Args:
        network: the layer to train.
        target: its embedding and head are used and stay as they are; freeze it
            (`requires_grad_(False)`), or its head collects gradients.
        hidden: the target's states, FINAL -> [B, T, D]:
            `target(tokens, taps=(FINAL,), logits=False).hidden`, or read from disk.
        tokens: [B, T] int64, right-padded.
        mask: [B, T] bool, True where a *token* counts as one to predict: False for padding, and
            for prompts if only answers are to be learned. None: all. The first two never are.
        token_weight: weight of the cross-entropy.
        noise: features are read with uniform noise in +-`noise` (0.1 in the paper), drawn from
            `generator`, which makes the layer bear its own errors.

    Returns:
        A scalar, the mean over the tokens that count.

    Raises:
        ValueError: for shapes that differ, a missing tap, fewer than 3 tokens, or none that counts.
    """
    counts = _check_batch(network, hidden, tokens, mask, 1)
    true = hidden[FINAL].detach()
    features, wanted = true[:, :-2], true[:, 1:-1][counts[0]]  # [B, T - 2, D], [M, D]
    if noise:
        if generator is None:
            raise ValueError(f"generator: expected one to draw noise={noise} from, got None")
        drawn = torch.rand(features.shape, generator=generator, device=generator.device)
        features = features + noise * (2 * drawn - 1).to(features)
    embeddings = target.embedding(tokens[:, 1:-1]).detach()
    predicted = unroll(network, features, embeddings)[0][counts[0]]  # [M, D]
    with torch.no_grad():
        p = target.head(wanted.unsqueeze(0))
    q = network.logits(predicted.unsqueeze(0), target)
    return F.smooth_l1_loss(predicted, wanted) + token_weight * soft_cross_entropy(q, p)


def eagle3_loss(
    network: Eagle3,
    target: Model,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    step_weights: Sequence[float] = tuple(0.8**s for s in range(7)),
) -> Tensor:
    """Cross-entropy(p, q) on the layer's own outputs, several steps deep, arXiv:2503.01840.

    Step s reads the true tokens and its own features (`unroll`); p is the target's law of the token
    it predicts, over the draft tokens alone. Where the target's likeliest token cannot be drafted
    nothing counts, as in the published code.

    Args:
        network, target, tokens, mask: as in `eagle1_loss`.
        hidden: tap -> [B, T, D] for `network.taps` and FINAL, from which p is computed.
        step_weights: weight of each step's mean cross-entropy; their number is how deep it goes.

    Returns:
        The weighted sum over the steps, a scalar.

    Raises:
        ValueError: for shapes that differ, a missing tap, fewer than steps + 2 tokens, or a step
            at which no token counts.
    """
    if not step_weights:
        raise ValueError("step_weights: expected at least one step, got none")
    ids = network.draft_ids
    counts = _check_batch(network, hidden, tokens, mask, len(step_weights))
    hidden = {tap: states.detach() for tap, states in hidden.items()}
    with torch.no_grad():
        p = target.head(hidden[FINAL])  # [B, T, V], logits
        if ids is not None:
            likeliest, p = p.amax(dim=-1), p[..., ids]  # [B, T], [B, T, Vd]
            known = p.amax(dim=-1) == likeliest  # an argmax over all tokens is slow on a CPU
            counts = [here & known[:, s + 1 : -1] for s, here in enumerate(counts)]
            _check_counts(counts)
    features = network.fuse(hidden)[:, :-2]
    embeddings = target.embedding(tokens[:, 1:-1]).detach()
    steps = unroll(network, features, embeddings, len(step_weights))
    losses = [
        weight * soft_cross_entropy(network.draft_logits(own[here]), p[:, s + 1 : -1][here])
        for s, (weight, own, here) in enumerate(zip(step_weights, steps, counts, strict=True))
    ]
    return torch.stack(losses).sum()


def soft_cross_entropy(q_logits: Tensor, p_logits: Tensor) -> Tensor:
    """Mean over all places of -sum_x p(x) log q(x); [..., V] twice -> scalar, float32 or better."""
    exact = torch.promote_types(q_logits.dtype, torch.float32)
    log_q = q_logits.to(exact).log_softmax(dim=-1)
    return -(p_logits.to(exact).softmax(dim=-1) * log_q).sum(dim=-1).mean()


def _check_one_layer(config: TransformerConfig) -> None:
    if config.num_hidden_layers != 1:
        raise ValueError(
            f"config.num_hidden_layers: EAGLE has one layer, got {config.num_hidden_layers}"
        )


def _check_batch(
    network: Network,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    mask: Tensor | None,
    n_steps: int,
) -> list[Tensor]:
    """The places that count at every step, bool [B, T - 2 - s]: place t predicts t + s + 2."""
    if tokens.ndim != 2 or tokens.dtype != torch.long or tokens.shape[1] < n_steps + 2:
        raise ValueError(
            f"tokens: expected int64 of shape [B, T] with T >= {n_steps + 2} for {n_steps} "
            f"step(s), got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    shape = (*tokens.shape, network.config.hidden_size)
    for tap in {*network.taps, FINAL}:
        if tap not in hidden or hidden[tap].shape != shape:
            got = list(hidden[tap].shape) if tap in hidden else f"the taps {sorted(hidden)}"
            raise ValueError(f"hidden: expected tap {tap} of shape {list(shape)}, got {got}")
    if mask is None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
    elif mask.dtype != torch.bool or mask.shape != tokens.shape:
        raise ValueError(
            f"mask: expected bool of shape {list(tokens.shape)}, got {mask.dtype} of shape "
            f"{list(mask.shape)}"
        )
    counts = [mask[:, s + 2 :] for s in range(n_steps)]
    _check_counts(counts)
    return counts


def _check_counts(counts: Sequence[Tensor]) -> None:
    empty = [s for s, here in enumerate(counts) if not bool(here.any())]
    if empty:
        raise ValueError(f"mask: expected a token to predict at step {empty[0]}, got none")
