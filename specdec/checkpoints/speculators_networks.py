"""What drafters of the `speculators` project have that the papers' have not.

vLLM's training library (github.com/vllm-project/speculators, 0.9.0) writes EAGLE-3 layers with
norms in other places, and DFlash layers with a head of their own or whose slots predict the token
behind them. They draft as any `Eagle3` or `DFlashNetwork`: `Eagle(network)`, `DFlash(network)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cache import KVStore, View
from ..drafters.dflash import DFlashNetwork, Sight
from ..drafters.dflash2 import DFlash2
from ..drafters.eagle import Eagle3, Rotary
from ..drafters.reduced_head import check_draft_ids
from ..models import TransformerConfig
from ..models.layers import RMSNorm


@dataclass(frozen=True)
class Norms:
    """Where the norms of an EAGLE-3 layer sit; all False: as published by SafeAILab.

    The names are those of config.json.
    """

    norm_before_residual: bool = False
    """The residual stream starts at the normed feature, not at the feature."""
    norm_before_fc: bool = False
    """One norm over all taps, before they are fused."""
    fc_norm: bool = False
    """A norm for every tap, before they are fused (EAGLE 3.1)."""
    norm_output: bool = False
    """The layer hands on what its final norm makes of its output (EAGLE 3.1)."""

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("fc_norm: expected False beside norm_before_fc=True, got True")


class NormedEagle3(Eagle3):
    """EAGLE-3 with its norms in the places that `norms` tells; the rest as in `Eagle3`."""

    def __init__(
        self,
        config: TransformerConfig,
        taps: Sequence[int],
        draft_ids: Tensor | None = None,
        *,
        norms: Norms,
    ) -> None:
        super().__init__(config, taps, draft_ids)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norms = norms
        self.norm_taps = RMSNorm(len(taps) * width, eps) if norms.norm_before_fc else None
        self.norm_tap = nn.ModuleList(RMSNorm(width, eps) for _ in taps) if norms.fc_norm else None

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """tap -> [B, N, D] to features [B, N, D]."""
        states = [hidden[tap] for tap in self.taps]
        if self.norm_tap is not None:
            states = [norm(x) for norm, x in zip(self.norm_tap, states, strict=True)]
        both = torch.cat(states, dim=-1)
        return self.fc(both if self.norm_taps is None else self.norm_taps(both))

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        rotary: Rotary,
        store: KVStore | None = None,
        view: View | None = None,
    ) -> Tensor:
        """Features and embeddings of the tokens behind them, [B, N, D] -> features [B, N, D]."""
        normed = self.norm_feature(features)
        x = torch.cat([self.norm_embedding(embeddings), normed], dim=-1)
        residual = normed if self.norms.norm_before_residual else features
        x = residual + self.attention(x, rotary, store, 0, view)
        x = x + self.mlp(self.norm_mlp(x))
        return self.norm(x) if self.norms.norm_output else x

    def draft_logits(self, features: Tensor) -> Tensor:
        """Features [..., D] -> logits of the draft tokens [..., Vd]."""
        return self.head(features if self.norms.norm_output else self.norm(features))


class HeadedDFlash(DFlashNetwork):
    """DFlash layers with a head of their own, or slots that predict the token behind them.

    Args:
        config, taps, mask_token, block_size, sights, dflash2: as for `DFlashNetwork`.
        own_head: whether it has a head, in the place of `reduced`; otherwise it is the target's.
        draft_ids: [Vd] int64, increasing: the target's tokens that the head says; None: all.
        from_root: slot j says the token *behind* its position (`sample_from_anchor`), so the root's
            slot says the first draft. What slot j has to say here is what it said at slot j - 1:
            of a block of K, the word of the last slot goes unheard.
    """

    def __init__(
        self,
        config: TransformerConfig,
        taps: Sequence[int],
        *,
        mask_token: int,
        block_size: int,
        sights: Sequence[Sight] | None = None,
        dflash2: DFlash2 | None = None,
        own_head: bool = False,
        draft_ids: Tensor | None = None,
        from_root: bool = False,
    ) -> None:
        super().__init__(
            config,
            taps,
            mask_token=mask_token,
            block_size=block_size,
            sights=sights,
            dflash2=dflash2,
        )
        if draft_ids is not None and not own_head:
            raise ValueError("draft_ids: a reduced vocabulary needs own_head=True, got False")
        self.from_root = from_root
        if draft_ids is not None:
            check_draft_ids(draft_ids, config.vocab_size)
        self.draft_ids = draft_ids
        if own_head:
            n_tokens = config.vocab_size if draft_ids is None else len(draft_ids)
            self.reduced = nn.Linear(config.hidden_size, n_tokens, bias=False)

    def forward(
        self, embeddings: Tensor, rotary: Rotary, store: KVStore, views: Mapping[Sight, View]
    ) -> Tensor:
        """Slots' embeddings [B, N, D] -> what the head reads at each [B, N, D]."""
        states = super().forward(embeddings, rotary, store, views)
        return states.roll(1, dims=1) if self.from_root else states


def norms_of(network: Eagle3) -> Norms:
    """Where the norms of `network` sit."""
    return network.norms if isinstance(network, NormedEagle3) else Norms()


NORM_FIELDS = tuple(field.name for field in dataclasses.fields(Norms))
