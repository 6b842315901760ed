"""One file a method: where its drafts come from, how it is trained, how it drafts."""

from .block_tree import Budget, VerifyCosts
from .dflash import DFlashNetwork
from .dflash_draft import DDTree, DFlash
from .draft_model import DraftModel
from .eagle import Eagle1, Eagle3
from .eagle_tree import Eagle
from .layerskip import LayerSkip
from .medusa import Medusa, MedusaHeads
from .mtp import SequentialModules
from .mtp_draft import MTPModules
from .mtp_heads import MTPHeads, ParallelHeads
from .prompt_lookup import PromptLookup

__all__ = [
    "Budget",
    "DDTree",
    "DFlash",
    "DFlashNetwork",
    "DraftModel",
    "Eagle",
    "Eagle1",
    "Eagle3",
    "LayerSkip",
    "MTPHeads",
    "MTPModules",
    "Medusa",
    "MedusaHeads",
    "ParallelHeads",
    "PromptLookup",
    "SequentialModules",
    "VerifyCosts",
]
