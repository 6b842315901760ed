"""specdec: speculative decoding methods over one cache protocol, one loop, one set of rules.

target, tokenizer, drafters, prompts = specdec.load("tiny")
result = specdec.generate(target, prompt, drafters["draft model"], max_new_tokens=128)
"""

from .accept import Coupled, Greedy, Rejection, Typical
from .draft import Draft
from .drafters import (
    DDTree,
    DFlash,
    DFlashNetwork,
    DraftModel,
    Eagle,
    LayerSkip,
    Medusa,
    MedusaHeads,
    MTPHeads,
    MTPModules,
    PromptLookup,
)
from .functional import from_functional
from .generate import Generation, Round, decode, generate
from .load import Bundle, load
from .pack import Packed, pack, unpack
from .protocol import FINAL, Context, Drafter, Model, Output

__version__ = "0.1.0"

__all__ = [
    "FINAL",
    "Bundle",
    "Context",
    "Coupled",
    "DDTree",
    "DFlash",
    "DFlashNetwork",
    "Draft",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Generation",
    "Greedy",
    "LayerSkip",
    "MTPHeads",
    "MTPModules",
    "Medusa",
    "MedusaHeads",
    "Model",
    "Output",
    "Packed",
    "PromptLookup",
    "Rejection",
    "Round",
    "Typical",
    "decode",
    "from_functional",
    "generate",
    "load",
    "pack",
    "unpack",
]
