"""Models that speak the cache protocol natively."""

from .qwen_moe import QwenMoe, QwenMoeConfig
from .transformer import Transformer, TransformerConfig

__all__ = ["QwenMoe", "QwenMoeConfig", "Transformer", "TransformerConfig"]
