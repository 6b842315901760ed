"""The last parts of a model of `transformers`, under the names they go by: final norm and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "layer_norm")
"""What decoders call the norm before the head."""

SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of configs that put something between the head's matrix and the logits."""


@dataclass(frozen=True)
class ScaledHead:
    """A head whose logits are scaled, or capped as cap * tanh(logits / cap) (Gemma 2)."""

    linear: nn.Module
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Normed hidden states [B, N, D] -> logits [B, N, V], as the model itself has them."""
        logits = self.linear(states) * self.scale
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()


def head_of(model: PreTrainedModel) -> nn.Module | ScaledHead:
    """Normed hidden states to logits: the output embeddings, and the scale of the config."""
    linear: Any = model.get_output_embeddings()
    config = model.config
    cap, times, over = (getattr(config, name, None) for name in SCALES)
    if cap is None and times in (None, 1.0) and over in (None, 1.0):
        return linear
    return ScaledHead(linear, (times or 1.0) / (over or 1.0), cap)


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """The norm before the head, or None where there is none under a known name."""
    body = dict(model.base_model.named_children())
    inner = body.get("decoder")  # OPT has its layers one deeper
    for parts in (body, {} if inner is None else dict(inner.named_children())):
        for name in NORMS:
            if name in parts:
                return parts[name]
    return None
