"""Readers and writers of weights: safetensors, or pickles read with `weights_only=True`."""

from .drafter import load_drafter
from .eagle import load_eagle, save_eagle
from .folder import load_transformer, save_transformer
from .medusa import load_medusa, save_medusa
from .mtp import load_heads, load_modules, save_mtp

__all__ = [
    "load_drafter",
    "load_eagle",
    "load_heads",
    "load_medusa",
    "load_modules",
    "load_transformer",
    "save_eagle",
    "save_medusa",
    "save_mtp",
    "save_transformer",
]
