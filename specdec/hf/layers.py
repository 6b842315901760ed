"""The library's keys and values behind the interface that `transformers` has for cache layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import CacheLayerMixin

from ..cache import Kept, KVStore, View


class TreeLayer(CacheLayerMixin):
    """Keys and values of one attention layer: a cache layer there, a `Store` here.

    Its `KVStore` is made at the first pass, which brings the shape: layers of a model may differ,
    and so may the width of keys and values (they lie in one buffer, the narrower padded).
    """

    is_sliding = False  # keeps every slot; the mask alone knows of windows

    def __init__(self) -> None:
        super().__init__()
        self.store: KVStore | None = None
        self.view: View | None = None
        """What the nodes of the pass that runs now see."""
        self.n_slots = 0

    def reserve(self, n_slots: int) -> None:
        self.n_slots = max(self.n_slots, n_slots)
        if self.store is not None:
            self.store.reserve(n_slots)

    def commit(self, kept: Kept) -> None:
        if self.store is not None:
            self.store.commit(kept)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, width = key_states.shape
        width = max(width, value_states.shape[-1])
        dtype, device = key_states.dtype, key_states.device
        self.store = KVStore(1, batch, heads, width, self.n_slots, dtype, device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values [B, H_kv, N, d] of the new nodes; all slots', [B, H_kv, slots, d].

        What else a model says (`args`, `kwargs`) is of no interest to a cache of all slots.
        """
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None and self.view is not None
        width = self.store.buffer.shape[-1]
        wide = [
            F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
            for x in (key_states, value_states)
        ]
        new_keys, new_values = (x.transpose(1, 2) for x in wide)
        keys, values = self.store.write(0, self.view, new_keys, new_values)
        return keys[..., : key_states.shape[-1]], values[..., : value_states.shape[-1]]

    def get_seq_length(self) -> int:
        """Slots before those of the pass that runs now."""
        return 0 if self.view is None else self.view.n_slots - self.view.positions.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1
