"""DFlash: a small block-diffusion network that fills a whole block in one pass (arXiv:2602.06036).

A *block* is the root and K - 1 mask tokens behind it; its slot j stands at the position of the
token it predicts. Beside the block, every layer's keys and values hold the *context*: hidden states
of the target from several depths, projected once, one slot for every token before the root. So the
block costs one pass of a few layers however long it is, and the layers' depth is paid once.

Context keys and values stay in the drafter's cache, those of the block never do: they are pending
for one pass. A block's attention is no ancestor mask: what a slot sees of its own block differs by
layer (`Sight`). Released checkpoints have causal sliding layers and bidirectional full ones.

Here are the network and what it sees; `dflash_loss.py` trains it, `dflash_draft.py` drafts with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..cache import KVStore, View
from ..models import TransformerConfig
from ..models.layers import Attention, Block, RMSNorm
from ..models.transformer import block_of, draw_weights
from ..protocol import FINAL, Model
from .dflash2 import ConvBlock, DFlash2, Selector
from .eagle import Rotary
from .reduced_head import check_draft_ids, head_over, spread


@dataclass(frozen=True)
class Sight:
    """What the slots of a block see of each other, and how far back, in one layer."""

    causal: bool = False
    """See the own slot and earlier ones alone; False: all of the block."""
    window: int | None = None
    """See positions less than this far away, in the context and in the block; None: all."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: expected at least 1 or None, got {self.window}")

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether `query` positions see `key` positions, bool of their common shape."""
        seen = key <= query if self.causal else torch.ones_like(key <= query)
        if self.window is not None:
            seen = seen & (query - key < self.window) & (key - query < self.window)
        return seen


def sights_of(kind: str, n_layers: int, window: int | None = None) -> tuple[Sight, ...]:
    """`"bidirectional"`, `"causal"`, or `"mixed"`: causal layers, sliding if there is a `window`,
    and one bidirectional full layer at last.

    Raises:
        ValueError: for another kind.
    """
    if kind not in ("bidirectional", "causal", "mixed"):
        raise ValueError(f"kind: expected 'bidirectional', 'causal' or 'mixed', got {kind!r}")
    if kind == "mixed":
        return (Sight(causal=True, window=window),) * (n_layers - 1) + (Sight(),)
    return (Sight(causal=kind == "causal", window=window),) * n_layers


def dflash_taps(n_target_layers: int, n_taps: int) -> tuple[int, ...]:
    """The published spread: from block 2 to the third-last, even; a single tap is half-way.

    Taps count blocks done, so the published layer id l is tap l + 1. Raises ValueError for fewer
    than one tap, or a target too shallow for as many.
    """
    first, last = 2, n_target_layers - 2
    if n_taps == 1:
        return (n_target_layers // 2 + 1,)
    if n_taps < 1 or last - first < n_taps - 1:
        raise ValueError(
            f"n_taps: expected 1..{max(1, last - first + 1)} for {n_target_layers} blocks, "
            f"got {n_taps}"
        )
    return tuple(round(1 + i * (last - first) / (n_taps - 1)) + 1 for i in range(n_taps))


class DFlashNetwork(nn.Module):
    """The layers of DFlash; embedding and head are the target's.

    Args:
        config: shape of the layers; width and vocabulary are the target's.
        taps: hidden states of the target to fuse, low to high; 0 alone is a drafter that is told
            the tokens and nothing that the target made of them.
        mask_token: the token whose embedding fills the slots to predict.
        block_size: slots of a block, root included, that it is trained for.
        sights: one a layer; None: bidirectional, without windows.
        inject: True: every layer's keys and values are projected from the context itself. False:
            the context only enters at the input, as tokens that go through the layers, causally.
        dflash2: convolutions and candidate selector of DFlash 2; None: there are none.

    Raises:
        ValueError: for taps, a mask token, a block size or sights that do not fit.
    """

    def __init__(
        self,
        config: TransformerConfig,
        taps: Sequence[int],
        *,
        mask_token: int,
        block_size: int = 16,
        sights: Sequence[Sight] | None = None,
        inject: bool = True,
        dflash2: DFlash2 | None = None,
    ) -> None:
        super().__init__()
        n_layers = config.num_hidden_layers
        wrong = [tap for tap in taps if tap != FINAL and tap < 0]
        if not taps or wrong:
            raise ValueError(f"taps: expected some of 0, 1, ... and FINAL (-1), got {list(taps)}")
        if not 0 <= mask_token < config.vocab_size:
            raise ValueError(
                f"mask_token: expected an id below the vocabulary of {config.vocab_size}, "
                f"got {mask_token}"
            )
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1 (the root), got {block_size}")
        sights = sights_of("bidirectional", n_layers) if sights is None else tuple(sights)
        if len(sights) != n_layers:
            raise ValueError(f"sights: expected {n_layers}, one a layer, got {len(sights)}")
        if dflash2 is not None and not inject:
            raise ValueError(
                "inject: the convolutions of DFlash 2 run over blocks alone; got False"
            )
        self.config, self.taps, self.mask_token = config, tuple(taps), mask_token
        self.block_size, self.sights, self.inject = block_size, sights, inject
        self.dflash2 = dflash2
        width = config.hidden_size
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.norm_context = RMSNorm(width, config.rms_norm_eps)
        self.blocks = nn.ModuleList(
            block_of(config) if dflash2 is None else ConvBlock(config, dflash2, block_size)
            for _ in range(n_layers)
        )
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.selector = None if dflash2 is None else Selector(config, dflash2)
        self.reduced: nn.Linear | None = None
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", None)

    def reset_parameters(self, generator: torch.Generator | None = None) -> DFlashNetwork:
        draw_weights(self, self.config.num_hidden_layers, generator)
        for part in self.modules():  # after the general rule, which does not know them
            if isinstance(part, ConvBlock | Selector):
                part.reset_own()
        return self

    def reduce_head(self, target: Model, draft_ids: Tensor | None) -> DFlashNetwork:
        """Draft the tokens `draft_ids` [Vd] int64, increasing, alone; None: all again.

        Their rows of the target's head are copied once, and the others are not read any more.

        Raises:
            ValueError: for ids that do not fit, or with a candidate selector, which has codebooks
                of all tokens.
        """
        if draft_ids is None:
            self.reduced = self.draft_ids = None
            return self
        check_draft_ids(draft_ids, self.config.vocab_size)
        if self.selector is not None:
            raise ValueError("draft_ids: expected None for DFlash 2, whose selector knows all ids")
        self.draft_ids = draft_ids.to(target.device)
        self.reduced = head_over(target, self.draft_ids)
        return self

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """tap -> [B, N, D] to context features [B, N, D]."""
        return self.norm_context(self.fc(torch.cat([hidden[tap] for tap in self.taps], dim=-1)))

    def read(self, features: Tensor, rotary: Rotary, store: KVStore, view: View) -> None:
        """Write keys and values of context features [B, N, D] at the view's positions."""
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block | ConvBlock)
            if self.inject:
                attention = block.attention
                assert isinstance(attention, Attention)
                store.write(i, view, *attention.keys_values(features, rotary))
            else:
                features = block(features, rotary, store, i, view)

    def forward(
        self, embeddings: Tensor, rotary: Rotary, store: KVStore, views: Mapping[Sight, View]
    ) -> Tensor:
        """Slots' embeddings [B, N, D] -> what the head reads at each [B, N, D].

        `store` gives every layer the keys and values of the context besides the slots' own, `views`
        what the slots see of them by the layers' sights.
        """
        x = embeddings
        for i, (block, sight) in enumerate(zip(self.blocks, self.sights, strict=True)):
            x = block(x, rotary, store, i, views[sight])
        return self.norm(x)

    def block_tokens(self, roots: Tensor, n_slots: int) -> Tensor:
        """Roots [...] -> blocks [..., n_slots]: the root, then mask tokens."""
        masks = roots.new_full((*roots.shape, n_slots - 1), self.mask_token)
        return torch.cat([roots.unsqueeze(-1), masks], dim=-1)

    def logits(self, states: Tensor, target: Model) -> Tensor:
        """States [B, N, D] -> logits [B, N, V], each of the token at the slot's own position."""
        if self.reduced is None:
            return target.head(states)
        return spread(self.reduced(states), self.draft_ids, self.config.vocab_size)


def block_view(view: View, sight: Sight, lengths: Tensor, n_slots: int, dtype: torch.dtype) -> View:
    """What a block of `n_slots` pending slots sees behind a context of `lengths` [B].

    `view` is the cache's, of a pending chain. In slot order a key's place is its position.
    """
    even = view.slots is None
    if even and sight.window is None:
        if sight.causal:
            return view
        return replace(view, mask=None)  # every slot is either context or block
    key = torch.arange(view.n_slots, device=lengths.device)
    seen = sight.sees(view.positions.unsqueeze(-1), key)  # [B or 1, N, slots]
    if not even:
        seen = seen & (key < lengths.unsqueeze(1) + n_slots).unsqueeze(1)
    return replace(view, mask=additive(seen, dtype).unsqueeze(1))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, else -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
