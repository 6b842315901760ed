"""Attention-only models of `transformers` over the library's own cache: trees, ragged batches.

A `TreeCache` keeps the books, as for the native models. Its stores are cache layers in the eyes of
`transformers` (`hf.layers`), so its modules write keys and values of new nodes where the cache says
and read all slots back; masks (`hf.masks`) and positions come from the pending tree. A commit is
the cache's own, and no pass is run twice or row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache import TreeCache, everything
from ..protocol import Output
from .checks import check_attention, has_types, layer_sizes
from .masks import masks_of

if TYPE_CHECKING:
    from .model import HFModel


class AttentionCache:
    """A `Cache` of a model without recurrent layers; see the module's first lines.

    An exception in a pass drops all pending nodes.
    """

    def __init__(self, model: HFModel, batch_size: int, max_length: int) -> None:
        from transformers import Cache

        from .layers import TreeLayer

        self.model, self.sizes = model, layer_sizes(model.config)
        self.layers = [TreeLayer() for _ in range(model.n_layers)]
        self.past = Cache(layers=[*self.layers])
        self.tree = TreeCache(batch_size, self.layers, model.n_layers, model.dtype, model.device)
        for layer in self.layers:
            layer.reserve(max_length + 8)  # a little room for pending nodes
        self._read()

    def _read(self) -> None:
        self.lengths, self.n_pending = self.tree.lengths, self.tree.n_pending

    @torch.no_grad()
    def append(
        self, tokens: Tensor, parents: Tensor | None, taps: Sequence[int], logits: bool
    ) -> Output:
        """Run `tokens` [B, N] with `parents` [B, N], and keep them pending; see `Model`."""
        check_attention(self.model.config)  # it can have been switched since
        tree, first = self.tree, self.tree.n_pending
        tree.append(tokens.shape[1], parents)
        try:
            view = tree.view(first)
            for layer in self.layers:
                layer.view = view
            masks = masks_of(
                view,
                tree.lengths,
                self.sizes,
                by_type=has_types(self.model.config),
                additive=self._additive(),
            )
            positions = view.positions.expand(len(tokens), -1)
            return self.model.run(tokens, self.past, positions, taps, logits, masks)
        except BaseException:
            tree.commit(*everything(0, len(tokens), tokens.device))
            raise
        finally:
            self._read()

    def _additive(self) -> torch.dtype | None:
        """The dtype of additive masks, None: bool ones. Asked anew, since it can be switched."""
        eager = self.model.config._attn_implementation == "eager"
        return self.model.dtype if eager else None

    def commit(self, path: Tensor, n: Tensor) -> None:
        """Keep the first `n` [B] nodes of `path` [B, P]; see `Cache.commit`."""
        self.tree.commit(path, n)
        self._read()
