"""`load_drafter`: published drafters, recognised by their config.json and weight names."""

from __future__ import annotations

from pathlib import Path

from ..drafters.eagle_tree import Eagle
from ..protocol import Drafter, Model
from .eagle import load_eagle


def load_drafter(folder: Path | str, target: Model) -> Drafter:
    """Read a published drafter for `target`, in its dtype, without gradients.

    Formats: EAGLE-1, -2 and -3 as SafeAILab publishes them. It drafts a chain of four; for a tree
    or another depth, `Eagle(load_eagle(folder, target), n_drafts, top_k=...)`.

    Raises:
        ValueError: for a folder of no known format, or weights that fit neither their config nor
            the target.
    """
    return Eagle(load_eagle(folder, target))
