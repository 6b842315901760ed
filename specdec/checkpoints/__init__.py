"""Readers and writers of weights: safetensors, or pickles read with `weights_only=True`."""

from .drafter import load_drafter
from .eagle import load_eagle, save_eagle
from .folder import load_transformer, save_transformer

__all__ = ["load_drafter", "load_eagle", "load_transformer", "save_eagle", "save_transformer"]
