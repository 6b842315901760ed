"""Multi-token prediction with sequential modules, as DeepSeek-V3 trains them into the target.

DeepSeek-AI (arXiv:2412.19437, section 2.2). Module k reads the states h^{k-1} of the depth above it
(the target's own for k = 1) and the embedding of the token k places ahead, and predicts the token
behind that one through the target's head::

    h'^k_i = M_k [RMSNorm(h^{k-1}_i) ; RMSNorm(Emb(x_{i+k}))]     h^k = Block_k(h'^k)
    q_{i+k+1} = head(norm(h^k_i))

so that every draft depends on the tokens before it. Trained together with the target, the modules
add lambda / D times the sum of their losses (`mtp_loss`); dropped, they leave the target as it is.

Published weights differ in two things, which a `SequentialModules` declares: whether the states it
reads and hands on are those before the final norm (`tap` L, as in the paper) or behind it (FINAL),
and whether that norm is the target's or the module's own (`own_norm`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVStore, View
from ..models import TransformerConfig
from ..models.layers import Attention, Block, RMSNorm, rotary_angles
from ..protocol import FINAL, Model


class MTPModule(nn.Module):
    """One module: two norms, M_k (2 D -> D), a decoder block and, if it is its own, a final norm."""

    def __init__(self, config: TransformerConfig, *, own_norm: bool) -> None:
        super().__init__()
        c, width = config, config.hidden_size
        self.norm_hidden = RMSNorm(width, c.rms_norm_eps)
        self.norm_embedding = RMSNorm(width, c.rms_norm_eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        attention = Attention(
            width,
            c.num_attention_heads,
            c.n_kv_heads,
            c.head_size,
            qk_norm=c.qk_norm,
            eps=c.rms_norm_eps,
        )
        self.block = Block(width, c.intermediate_size, attention, c.rms_norm_eps)
        self.norm = RMSNorm(width, c.rms_norm_eps) if own_norm else None

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        rotary: tuple[Tensor, Tensor],
        store: KVStore | None = None,
        layer: int = 0,
        view: View | None = None,
    ) -> Tensor:
        """h^{k-1}_i and Emb(x_{i+k}), each [B, N, D] -> the residual stream h^k_i [B, N, D]."""
        both = torch.cat([self.norm_hidden(hidden), self.norm_embedding(embeddings)], dim=-1)
        return self.block(self.projection(both), rotary, store, layer, view)


class SequentialModules(nn.Module):
    """D modules; `config.num_hidden_layers` is D, width and vocabulary are the target's.

    Args:
        config: shape of the modules' blocks.
        tap: the target's states that module 1 reads: its number of blocks L, or FINAL. Modules hand
            on what corresponds: the residual stream, or what their final norm makes of it.
        own_norm: whether every module has a final norm of its own; otherwise it is the target's.

    Raises:
        ValueError: for a tap that is neither FINAL nor at least 1.
    """

    def __init__(self, config: TransformerConfig, *, tap: int, own_norm: bool = False) -> None:
        super().__init__()
        if tap != FINAL and tap < 1:
            raise ValueError(f"tap: expected the target's number of blocks or FINAL, got {tap}")
        self.config, self.tap = config, tap
        self.blocks = nn.ModuleList(
            MTPModule(config, own_norm=own_norm) for _ in range(config.num_hidden_layers)
        )

    @property
    def n_modules(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> SequentialModules:
        """Draw fresh weights: normal of 1/sqrt(fan in), residual outputs shrunk by sqrt(2)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            std = 1.0 / math.sqrt(parameter.shape[1])
            if name.endswith(("out.weight", "down.weight")):
                std /= math.sqrt(2.0)
            parameter.normal_(0.0, std, generator=generator)
        return self

    def rotary(self, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Angles of places 0..n-1 in the dtype and on the device of `like`."""
        c, positions = self.config, torch.arange(n, device=like.device)
        cos, sin = rotary_angles(positions, c.head_size, c.rope_theta, like.dtype)[None].unbind(2)
        return cos, sin

    def handed_on(self, k: int, stream: Tensor, target: Model) -> tuple[Tensor, Tensor]:
        """Of module k's (1..D) residual stream: the states for module k + 1, and its logits."""
        norm = self.blocks[k - 1].norm
        final = target.norm(stream) if norm is None else norm(stream)
        return final if self.tap == FINAL else stream, target.head(final)

    def forward(self, hidden: Tensor, tokens: Tensor, target: Model) -> list[Tensor]:
        """Training: states [B, T, D] of `tokens` [B, T] -> logits of every module.

        Those of module k are [B, T - k, V]; place i predicts token i + k + 1.
        """
        embeddings, logits = target.embedding(tokens), []
        cos, sin = self.rotary(tokens.shape[1], hidden)
        for k, module in enumerate(self.blocks, start=1):
            n = tokens.shape[1] - k
            stream = module(hidden[:, :n], embeddings[:, k:], (cos[:, :n], sin[:, :n]))
            hidden, own = self.handed_on(k, stream, target)
            logits.append(own)
        return logits


def mtp_loss(
    network: SequentialModules,
    target: Model,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    *,
    weight: float = 0.3,
    mask: Tensor | None = None,
) -> Tensor:
    """weight / D times the sum over the modules of their mean cross-entropy, Eq. 24-25.

    Added to the target's next-token loss when both are trained; gradients reach the target through
    its states, embedding and head unless it is frozen. DeepSeek-V3 takes a weight of 0.3, and 0.1
    in the last third of its training.

    Args:
        network: the modules.
        target: lends its embedding, final norm and head.
        hidden: the target's states, `network.tap` -> [B, T, D].
        tokens: [B, T] int64, right-padded, T >= D + 2.
        weight: lambda, positive.
        mask: [B, T] bool, True where a *token* counts as one to predict; None: all.

    Returns:
        A scalar.

    Raises:
        ValueError: for shapes that differ, a missing tap, too few tokens, a weight that is not
            positive, or a mask that leaves a module nothing to predict.
    """
    n_modules, width = network.n_modules, network.config.hidden_size
    if tokens.ndim != 2 or tokens.dtype != torch.long or tokens.shape[1] < n_modules + 2:
        raise ValueError(
            f"tokens: expected int64 of shape [B, T] with T >= {n_modules + 2} for {n_modules} "
            f"module(s), got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    states = hidden.get(network.tap)
    if states is None or states.shape != (*tokens.shape, width):
        got = f"the taps {sorted(hidden)}" if states is None else list(states.shape)
        raise ValueError(
            f"hidden: expected tap {network.tap} of shape {[*tokens.shape, width]}, got {got}"
        )
    if not 0 < weight < math.inf:
        raise ValueError(f"weight: expected a positive number, got {weight}")
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {list(tokens.shape)}, got {mask.dtype} of shape "
            f"{list(mask.shape)}"
        )
    losses = []
    for k, logits in enumerate(network(states, tokens, target), start=1):
        labels, logits = tokens[:, k + 1 :], logits[:, :-1]
        if mask is not None:
            counts = mask[:, k + 1 :]
            if not bool(counts.any()):
                raise ValueError(f"mask: expected a token that module {k} predicts, got none")
            labels, logits = labels[counts], logits[counts]
        exact = torch.promote_types(logits.dtype, torch.float32)
        losses.append(F.cross_entropy(logits.flatten(0, -2).to(exact), labels.flatten()))
    return weight * torch.stack(losses).mean()
