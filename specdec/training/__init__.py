"""Training: corpora, one fit loop, and the commands that made the embedded models.

`python -m specdec.training target --out FOLDER` trains a byte-level target on the source of
Python's standard library or any folder of text; `... draft --target FOLDER --out FOLDER` distils
a draft model from it.
"""

from .corpus import Corpus
from .fit import fit, optimizers

__all__ = ["Corpus", "fit", "optimizers"]
