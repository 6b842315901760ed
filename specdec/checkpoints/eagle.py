"""Published EAGLE layers: config.json and the weight names of SafeAILab's EAGLE.

EAGLE-1 and -2 name their layer `layers.0`, EAGLE-3 names it `midlayer` and brings `lm_head`, `norm`
and, for a reduced vocabulary, `d2t` (draft token i is target token i + d2t[i]) and `t2d` (which
target tokens can be drafted). What is ours in config.json: `taps`, and `training`, a card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..drafters.eagle import Eagle1, Eagle3, Network, eagle3_taps
from ..drafters.eagle_tree import check_fits
from ..protocol import Model
from .folder import read_folder, write_folder
from .published import LAYER, below, expect, fields_of, join, shape_of, split, without_angles
from .speculators_networks import NormedEagle3

EAGLE_LAYER = {
    **LAYER,
    "norm_embedding.weight": ("input_layernorm.weight",),
    "norm_feature.weight": ("hidden_norm.weight",),
}
EAGLE_OUTSIDE = {
    "fc.weight": ("fc.weight",),
    "fc.bias": ("fc.bias",),
    "norm.weight": ("norm.weight",),
    "head.weight": ("lm_head.weight",),
}


def _published(network: Network) -> dict[str, tuple[str, ...]]:
    """Our name of every weight of `network` -> the published ones."""
    prefix = "midlayer" if isinstance(network, Eagle3) else "layers.0"
    known = EAGLE_OUTSIDE | below(EAGLE_LAYER, "", f"{prefix}.")
    return {name: known[name] for name, _ in network.named_parameters()}


def eagle_version(names: Iterable[str]) -> int | None:
    """Which EAGLE a folder with these weight names holds: 1 (also for EAGLE-2), 3, or None."""
    names = set(names)
    if {"fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"} <= names:
        return 3
    if "hidden_norm.weight" in names:  # that is DFlash
        return None
    return 1 if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names else None


def load_eagle(folder: Path | str, target: Model, *, taps: Sequence[int] | None = None) -> Network:
    """Read an EAGLE folder for `target`, in its dtype, without gradients: `Eagle(load_eagle(...))`.

    Args:
        folder: config.json beside model.safetensors or pytorch_model.bin (read without running
            any code in it).
        target: the model it was trained for; embeddings, and the head of EAGLE-1, are the target's.
        taps: hidden states that EAGLE-3 fuses; None: those in config.json, else `eagle3_taps`.

    Raises:
        ValueError: for a folder that holds no EAGLE layer, a layer of a kind that is not supported
            here, weights that do not fit the config, or a layer that does not fit the target.
    """
    folder = Path(folder)
    fields, weights = read_folder(folder, ("model.safetensors", "pytorch_model.bin"))
    version = eagle_version(weights)
    if version is None:
        raise ValueError(f"folder: {folder} holds no EAGLE layer; its weights: {sorted(weights)}")
    network = _network(version, fields, weights, target, taps)
    check_fits(network.to(device=target.device, dtype=target.dtype), target)
    check_embeddings(weights.pop("embed_tokens.weight", None), target)
    state = join(without_angles(weights), _published(network), network.state_dict(), folder)
    network.load_state_dict(state, strict=False)  # draft_ids are in place already
    return network.eval().requires_grad_(False)


def save_eagle(
    network: Network,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a layer in the published layout; `metadata` goes into config.json under `training`.

    Raises:
        ValueError: for an EAGLE-3 layer with norms that the published ones have not.
    """
    if isinstance(network, NormedEagle3):
        raise ValueError(
            f"network: expected the norms of the published layers, got {network.norms}; "
            f"save_speculators writes them"
        )
    weights = split(network.state_dict(), _published(network), network.config)
    fields = fields_of(network.config) | {
        "architectures": [f"LlamaForCausalLMEagle{'3' if isinstance(network, Eagle3) else ''}"],
        "model_type": "llama",
    }
    if isinstance(network, Eagle3):
        fields |= {"draft_vocab_size": network.n_tokens, "taps": list(network.taps)}
        if network.draft_ids is not None:
            weights |= offsets(network.draft_ids, network.config.vocab_size)
    else:
        fields |= {"bias": network.fc.bias is not None}
    write_folder(folder, fields, weights, dtype, metadata)


def _network(
    version: int,
    fields: Mapping,
    weights: dict[str, Tensor],
    target: Model,
    taps: Sequence[int] | None,
) -> Network:
    """A layer of the shape that config.json tells; takes d2t and t2d out of `weights`."""
    expect(
        ("num_hidden_layers", fields.get("num_hidden_layers", 1), 1),
        ("norm_before_residual", fields.get("norm_before_residual", False), False),
    )
    config = shape_of(
        {**fields, "num_hidden_layers": 1},
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in weights),
    )
    width = config.hidden_size
    expect(("target_hidden_size", fields.get("target_hidden_size", width), width))
    if version == 1:
        return Eagle1(config, bias="fc.bias" in weights)
    if taps is None:
        taps = fields.get("taps")
    key = "eagle_aux_hidden_state_layer_ids"
    if taps is None and (key in fields or key in (fields.get("eagle_config") or {})):
        raise ValueError(
            f"taps: config.json has {key}, which some write as inputs and some as outputs of "
            f"blocks; pass taps (tap i is the output of block i, counted from 1)"
        )
    ids = take_draft_ids(weights, fields.get("draft_vocab_size"), config.vocab_size)
    return Eagle3(config, eagle3_taps(target.n_layers) if taps is None else taps, ids)


def take_draft_ids(
    weights: dict[str, Tensor], draft_vocab_size: int | None, vocab_size: int
) -> Tensor | None:
    """Takes d2t and t2d out of `weights`: the target's tokens that can be drafted, [Vd] int64.

    None if they are all of them. Raises ValueError for weights that do not say which.
    """
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    if draft_vocab_size in (None, vocab_size):
        return None
    if d2t is None:
        raise ValueError("folder: a reduced draft vocabulary needs d2t, found no such weight")
    ids = d2t.long() + torch.arange(len(d2t))
    if t2d is not None and t2d.nonzero().flatten().tolist() != ids.tolist():
        raise ValueError("folder: t2d does not mark the target tokens i + d2t[i]")
    return ids


def offsets(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t and t2d of increasing `draft_ids` [Vd], as they are published."""
    known = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    return {
        "d2t": draft_ids - torch.arange(len(draft_ids), device=draft_ids.device),
        "t2d": known.index_fill(0, draft_ids, True),
    }


def check_embeddings(published: Tensor | None, target: Model) -> None:
    """A copy of the target's embeddings comes with some folders; another one is not supported."""
    if published is None:
        return
    ids = torch.arange(target.vocab_size, device=target.device).unsqueeze(0)
    own = target.embedding(ids).squeeze(0).float()
    theirs = published.to(own)
    if theirs.shape != own.shape or not torch.allclose(theirs, own, rtol=2e-2, atol=1e-3):
        raise ValueError(
            "folder: embed_tokens differs from the target's embeddings; expected a layer trained "
            "for this target, with its embeddings"
        )
