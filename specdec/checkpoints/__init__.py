"""Readers and writers of weights: safetensors, or pickles read with `weights_only=True`."""

from .deepseek_mtp import load_deepseek_mtp
from .dflash import load_dflash, save_dflash, strix_halo
from .drafter import load_drafter
from .eagle import load_eagle, save_eagle
from .folder import load_transformer, save_transformer
from .gguf import find_smollm2, load_gguf, load_gguf_tokenizer
from .medusa import load_medusa, save_medusa
from .mtp import load_heads, load_modules, save_mtp
from .pretrained import load_target
from .qwen import save_qwen_moe
from .qwen_mtp import load_qwen_mtp, save_qwen_mtp
from .speculators import load_speculators, save_speculators

__all__ = [
    "find_smollm2",
    "load_deepseek_mtp",
    "load_dflash",
    "load_drafter",
    "load_eagle",
    "load_gguf",
    "load_gguf_tokenizer",
    "load_heads",
    "load_medusa",
    "load_modules",
    "load_qwen_mtp",
    "load_speculators",
    "load_target",
    "load_transformer",
    "save_dflash",
    "save_eagle",
    "save_medusa",
    "save_mtp",
    "save_qwen_moe",
    "save_qwen_mtp",
    "save_speculators",
    "save_transformer",
    "strix_halo",
]
