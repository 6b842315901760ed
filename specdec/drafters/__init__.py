"""One file a method: where its drafts come from, how it is trained, how it drafts."""

from .draft_model import DraftModel
from .layerskip import LayerSkip
from .medusa import Medusa, MedusaHeads
from .prompt_lookup import PromptLookup

__all__ = ["DraftModel", "LayerSkip", "Medusa", "MedusaHeads", "PromptLookup"]
