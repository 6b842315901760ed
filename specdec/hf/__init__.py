"""Causal language models of `transformers` as a `Model`: `HFModel(model)`.

Their modules and weights are run as they are, and logits are their own. What they are handed is
ours: the library's cache stands in for theirs (`cache.TreeCache`), with masks and positions made
from the pending tree, so that one pass serves a ragged batch of trees (`hf.attention`). Models with
recurrent layers (`HYBRIDS`) run a row at a time, chains only, and are rolled back by freeze and
replay (`hf.hybrid`). A model that neither can serve is refused with the reason (`hf.checks`).
"""

from .attention import AttentionCache
from .checks import HYBRIDS, OLDEST
from .head import ScaledHead
from .hybrid import FROZEN, Handed, RowsCache, crop, frozen_linear_states, replay
from .model import HFModel

__all__ = [
    "FROZEN",
    "HYBRIDS",
    "OLDEST",
    "AttentionCache",
    "HFModel",
    "Handed",
    "RowsCache",
    "ScaledHead",
    "crop",
    "frozen_linear_states",
    "replay",
]
