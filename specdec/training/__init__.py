"""Training: corpora, target features, one fit loop, and the commands of the embedded models.

`python -m specdec.training target --out FOLDER` trains a byte-level target on the source of
Python's standard library or any folder of text; `... medusa --target FOLDER --out FOLDER` and its
like train a drafter for it.
"""

from .checkpoint import load_best
from .conversations import Conversations, write_conversations
from .corpus import Corpus, Text
from .distributed import Ranks, joined
from .features import CachedFeatures, Features, TargetFeatures
from .fit import fit, optimizers
from .held_out import held_out_prompts, held_out_tau
from .questions import questions, read_questions
from .written import WrittenText, write_text

__all__ = [
    "CachedFeatures",
    "Corpus",
    "Features",
    "Ranks",
    "TargetFeatures",
    "Text",
    "WrittenText",
    "fit",
    "held_out_prompts",
    "held_out_tau",
    "joined",
    "load_best",
    "optimizers",
    "questions",
    "read_questions",
    "Conversations",
    "write_conversations",
    "write_text",
]
