"""`load_drafter`: trained drafters, recognised by their config.json and weight names."""

from __future__ import annotations

from pathlib import Path

from ..drafters import DFlash, Eagle, Medusa, MTPHeads, MTPModules
from ..drafters.eagle import Eagle3
from ..drafters.mtp import SequentialModules
from ..protocol import Drafter, Model
from .deepseek_mtp import has_deepseek_mtp, load_deepseek_mtp
from .dflash import is_dflash, load_dflash
from .eagle import eagle_version, load_eagle
from .folder import weight_names
from .medusa import FILES, is_medusa, load_medusa
from .mtp import load_heads, load_modules
from .qwen_mtp import has_qwen_mtp, load_qwen_mtp
from .sharded import read_fields
from .speculators import is_speculators, load_speculators, told_depth
from .speculators_dflash import n_slots_that_draft


def load_drafter(folder: Path | str, target: Model) -> Drafter:
    """Read a drafter for `target`, in its dtype and on its device, without gradients.

    Formats: EAGLE-1, -2 and -3 as SafeAILab publishes them, DFlash and DFlash 2 as z-lab does,
    EAGLE-3, DFlash and DFlash 2 of the `speculators` project, Medusa heads as FasterDecoding does,
    alone or in a whole model, the multi-token prediction modules in a target's folder (Qwen's
    hybrids, DeepSeek-V3's layout), and this library's own folders of modules and parallel heads.

    It drafts a chain: of as many tokens as a `speculators` folder tells, else of four, or of as
    many as there are heads, modules or slots of a block. For a tree or another depth give what
    `load_eagle`, `load_dflash`, `load_speculators`, `load_medusa`, `load_modules`, `load_qwen_mtp`,
    `load_deepseek_mtp` or `load_heads` reads to the method itself.

    Raises:
        ValueError: for a folder of no known format, a file that is truncated or damaged, or weights
            that fit neither their config nor the target.
    """
    folder = Path(folder)
    fields = read_fields(folder)
    if is_speculators(fields):
        network, depth = load_speculators(folder, target), told_depth(fields)
        if isinstance(network, Eagle3):
            return Eagle(network, depth or 4)
        most = n_slots_that_draft(network)
        return DFlash(network, min(depth or most, most))
    names = weight_names(folder, FILES)
    if is_medusa(names):
        heads = load_medusa(folder, target)
        return Medusa(heads, [(0,) * depth for depth in range(1, heads.n_heads + 1)])
    if has_qwen_mtp(folder):
        return _chain(load_qwen_mtp(folder, target))
    if has_deepseek_mtp(names):
        return _chain(load_deepseek_mtp(folder, target))
    if eagle_version(names) is not None:
        return Eagle(load_eagle(folder, target))
    if is_dflash(names):
        return DFlash(load_dflash(folder, target))
    if fields.get("kind") == "sequential":
        return _chain(load_modules(folder, target))
    if fields.get("kind") == "parallel":
        return MTPHeads(load_heads(folder, target))
    raise ValueError(
        f"folder: {folder} holds no drafter of a known format (EAGLE, DFlash, speculators, Medusa, "
        f"MTP); its weights: {_some(names)}"
    )


def _chain(modules: SequentialModules) -> MTPModules:
    return MTPModules(modules, 4 if modules.n_modules == 1 else modules.n_modules)


def _some(names: set[str]) -> str:
    first = sorted(names)[:8]
    return f"{first}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
