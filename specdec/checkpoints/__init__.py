"""Readers and writers of weights: safetensors beside a config.json, nothing pickled."""

from .folder import load_transformer, save_transformer

__all__ = ["load_transformer", "save_transformer"]
