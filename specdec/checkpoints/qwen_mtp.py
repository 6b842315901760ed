"""The multi-token prediction module in folders of Qwen3-Next, Qwen3.5 and Qwen3.6: `mtp.*`.

One block that attends, of the target's own shape, behind cat[embedding, hidden] (ours is the other
way round), each through a norm of its own, and a final norm of its own; embedding and head are the
target's. It reads the target's states *behind* the final norm, and hands on its own behind its
norm: so does vLLM (models/qwen3_next_mtp.py, qwen3_5_mtp.py), and projects that fed it the states
before that norm measured fewer accepted tokens (llama.cpp #24025, LightLLM #1402). We had no
published weights at hand to measure it on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ..drafters.mtp import MTPModule, SequentialModules, of_depth
from ..models import QwenMoeConfig
from ..protocol import FINAL, Model
from .folder import write_folder
from .published import expect
from .qwen import block_weights, has_packed
from .qwen_config import MODEL_TYPES, config_of, fields_of, text_fields
from .sharded import Weight, check_weights, fill_weights, places_in, read_fields, whole

_PREFIX = "mtp."


def load_qwen_mtp(folder: Path | str, target: Model) -> SequentialModules:
    """Read the module in `folder` for `target`, in its dtype and on its device, without gradients.

    The folder is the target's own, or one of the module alone that `save_qwen_mtp` wrote.
    `MTPModules(load_qwen_mtp(...))` drafts with it.

    Raises:
        ValueError: for a folder of another kind of model, one that holds no such module or more
            than one, or weights that do not fit the config, or the target.
    """
    folder = Path(folder)
    fields = text_fields(read_fields(folder))
    config = of_depth(config_of(fields), 1)
    assert isinstance(config, QwenMoeConfig)
    expect(
        ("mtp_num_hidden_layers", fields.get("mtp_num_hidden_layers", 1), 1),
        ("mtp_use_dedicated_embeddings", fields.get("mtp_use_dedicated_embeddings", False), False),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
    )
    places = {n: place for n, place in places_in(folder).items() if n.startswith(_PREFIX)}
    if not places:
        raise ValueError(f"folder: expected weights mtp.* in {folder}, found none")
    with torch.device("meta"):
        network = SequentialModules(config, tap=FINAL, own_norm=True)
    check_weights(places, _weights(network, places), folder)
    network = network.to(target.dtype).to_empty(device="cpu").requires_grad_(False).eval()
    fill_weights(places, _weights(network, places))
    projection = _module(network).projection
    projection.weight.copy_(swapped(projection))
    return network.to(target.device)


def save_qwen_mtp(
    network: SequentialModules,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a module alone; `metadata` goes into config.json under `training`.

    Raises:
        ValueError: for modules that Qwen's layout cannot say: several, dense ones, others' norms.
    """
    shape = network.shape
    if not isinstance(shape, QwenMoeConfig) or network.n_modules != 1 or network.tap != FINAL:
        raise ValueError(
            f"network: expected one module of a QwenMoeConfig that reads FINAL, got "
            f"{network.n_modules} of a {type(shape).__name__} that read tap {network.tap}"
        )
    if _module(network).norm is None:
        raise ValueError("network: expected a module with a final norm of its own, got none")
    with torch.no_grad():
        published = {n: w.published() for n, w in _weights(network, (), packed=True).items()}
        published[f"{_PREFIX}fc.weight"] = swapped(_module(network).projection)
    fields = fields_of(shape) | {"mtp_num_hidden_layers": 1}
    write_folder(folder, fields, published, dtype, metadata)


def has_qwen_mtp(folder: Path) -> bool:
    """Whether a folder with a config.json holds such a module; only headers are read."""
    if read_fields(folder).get("model_type") not in MODEL_TYPES:
        return False
    return f"{_PREFIX}fc.weight" in places_in(folder)


def swapped(projection: nn.Linear) -> Tensor:
    """The weight [D, 2 D] with its halves, for the states and for the embeddings, exchanged."""
    return projection.weight.detach().roll(projection.out_features, dims=1)


def _module(network: SequentialModules) -> MTPModule:
    return cast(MTPModule, network.blocks[0])


def _weights(
    network: SequentialModules, names: Collection[str], *, packed: bool = False
) -> dict[str, Weight]:
    """Every published weight, the halves of the projection as they are published."""
    module, here = _module(network), f"{_PREFIX}layers.0."
    assert module.norm is not None
    own = block_weights(module.block, packed or has_packed(here, names), fused=False)
    return {
        f"{_PREFIX}fc.weight": whole(module.projection.weight),
        f"{_PREFIX}pre_fc_norm_hidden.weight": whole(module.norm_hidden.weight),
        f"{_PREFIX}pre_fc_norm_embedding.weight": whole(module.norm_embedding.weight),
        f"{_PREFIX}norm.weight": whole(module.norm.weight),
        **{here + name: weight for name, weight in own.items()},
    }
