"""Models that speak the cache protocol natively."""

from .transformer import Transformer, TransformerConfig

__all__ = ["Transformer", "TransformerConfig"]
