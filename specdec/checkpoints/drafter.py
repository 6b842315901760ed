"""`load_drafter`: trained drafters, recognised by their config.json and weight names."""

from __future__ import annotations

from pathlib import Path

from ..drafters import DFlash, Eagle, Medusa, MTPHeads, MTPModules
from ..protocol import Drafter, Model
from .dflash import is_dflash, load_dflash
from .eagle import eagle_version, load_eagle
from .folder import read_folder
from .medusa import FILES, load_medusa
from .mtp import load_heads, load_modules
from .qwen_mtp import has_qwen_mtp, load_qwen_mtp


def load_drafter(folder: Path | str, target: Model) -> Drafter:
    """Read a drafter for `target`, in its dtype and on its device, without gradients.

    Formats: EAGLE-1, -2 and -3 as SafeAILab publishes them, DFlash and DFlash 2 as z-lab does,
    Medusa heads as FasterDecoding does, the MTP module in a folder of Qwen's hybrids, and this
    library's own folders of MTP modules and parallel heads. It drafts a chain of four, or of as
    many as there are heads, modules or slots of a block; for a tree or another depth give what
    `load_eagle`, `load_dflash`, `load_medusa`, `load_modules`, `load_qwen_mtp` or `load_heads`
    reads to the method itself.

    Raises:
        ValueError: for a folder of no known format, or weights that fit neither their config nor
            the target.
    """
    if (Path(folder) / "config.json").is_file() and has_qwen_mtp(Path(folder)):
        return MTPModules(load_qwen_mtp(folder, target), 4)
    fields, weights = read_folder(folder, (*FILES, "pytorch_model.bin"))
    names = {name.removeprefix("medusa_head.") for name in weights}
    if eagle_version(names) is not None:
        return Eagle(load_eagle(folder, target))
    if is_dflash(names):
        return DFlash(load_dflash(folder, target))
    if "0.0.linear.weight" in names:
        heads = load_medusa(folder, target)
        return Medusa(heads, [(0,) * depth for depth in range(1, heads.n_heads + 1)])
    if fields.get("kind") == "sequential":
        modules = load_modules(folder, target)
        return MTPModules(modules, 4 if modules.n_modules == 1 else modules.n_modules)
    if fields.get("kind") == "parallel":
        return MTPHeads(load_heads(folder, target))
    raise ValueError(
        f"folder: {folder} holds no drafter of a known format (EAGLE, DFlash, Medusa, MTP); its "
        f"weights: {sorted(weights)}"
    )
