"""Prove a drafter lossless: `check_lossless(target, drafter)`, and the parts it is made of."""

from .divergence import Divergence, LosslessError, compare, plain_sequence
from .exact import exact_law, outcomes, target_law
from .lossless import Report, check_law, check_lossless
from .replay import replay
from .targets import small_hybrid, small_target

__all__ = [
    "Divergence",
    "LosslessError",
    "Report",
    "check_law",
    "check_lossless",
    "compare",
    "exact_law",
    "outcomes",
    "plain_sequence",
    "replay",
    "small_hybrid",
    "small_target",
    "target_law",
]
