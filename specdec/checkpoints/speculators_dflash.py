"""DFlash and DFlash 2 in the `speculators` format: z-lab's weights, other fields."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..drafters.dflash import DFlashNetwork, Sight
from ..protocol import Model
from .dflash import DFLASH2_FIELDS, dflash2_in, published_dflash, sights_in
from .eagle import take_draft_ids
from .published import Names, shape_of
from .speculators_networks import HeadedDFlash

_TAPS = "aux_hidden_state_layer_ids"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def dflash_of(
    fields: Mapping, layer: Mapping, weights: dict[str, Tensor], target: Model
) -> DFlashNetwork:
    """Layers of the shape that config.json tells; takes d2t and t2d out of `weights`."""
    config = shape_of(layer, qk_norm=True)
    for name in ("mask_token_id", "block_size"):
        if not isinstance(fields.get(name), int):
            raise ValueError(
                f"folder: config.json has {name}={fields.get(name)!r}; expected a number"
            )
    taps = fields.get(_TAPS)
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        raise ValueError(f"folder: config.json has {_TAPS}={taps!r}; expected numbers of layers")
    own_head = "lm_head.weight" in weights
    ids = take_draft_ids(weights, fields.get("draft_vocab_size"), config.vocab_size)
    if ids is not None and not own_head:
        raise ValueError("folder: a reduced draft vocabulary needs lm_head, found no such weight")
    from_root = bool(fields.get("sample_from_anchor"))
    known = {
        "mask_token": fields["mask_token_id"],
        "block_size": fields["block_size"],
        "sights": _sights(fields, layer, config.num_hidden_layers),
        "dflash2": dflash2_in(fields),
    }
    if not own_head and not from_root:
        return DFlashNetwork(config, taps, **known)
    return HeadedDFlash(
        config, taps, **known, own_head=own_head, draft_ids=ids, from_root=from_root
    )


def dflash_fields(network: DFlashNetwork) -> tuple[str, dict[str, object], dict[str, object]]:
    """Its kind, and what config.json and its `transformer_layer_config` say of it alone."""
    if not network.config.qk_norm:
        raise ValueError(
            "network: expected norms of queries and keys (config.qk_norm), which the format's "
            "DFlash layers have, got none"
        )
    if not network.inject:
        raise ValueError("network: expected context injected into every layer, got inject=False")
    layer, non_causal = _sight_fields(network)
    extra = network.dflash2
    fields: dict[str, object] = {
        "architectures": ["DFlashDraftModel" if extra is None else "DFlash2DraftModel"],
        "block_size": network.block_size,
        "target_hidden_size": None,
        _TAPS: list(network.taps),
        "mask_token_id": network.mask_token,
        "sliding_window_non_causal": non_causal,
        "sample_from_anchor": isinstance(network, HeadedDFlash) and network.from_root,
    }
    if extra is None:
        return "dflash", fields, layer
    fields |= {theirs: getattr(extra, ours) for ours, theirs in DFLASH2_FIELDS.items()}
    return "dflash2", fields, layer


def dflash_names(network: DFlashNetwork) -> Names:
    """Our name of every weight of `network` -> the published ones."""
    head = {} if network.reduced is None else {"reduced.weight": ("lm_head.weight",)}
    return published_dflash(network) | head


def n_slots_that_draft(network: DFlashNetwork) -> int:
    """How many tokens a server drafts with one block."""
    from_root = isinstance(network, HeadedDFlash) and network.from_root
    return network.block_size - (0 if from_root else 1)


def _sights(fields: Mapping, layer: Mapping, n_layers: int) -> list[Sight]:
    """Full layers are bidirectional, those with a window causal unless config.json denies it."""
    plain = fields["speculators_model_type"] == "dflash2"
    non_causal = fields.get("sliding_window_non_causal", plain)
    told = {name: layer.get(name) for name in ("layer_types", "sliding_window")}
    return sights_in(told | ({"is_causal": False} if non_causal else {}), n_layers)


def _sight_fields(network: DFlashNetwork) -> tuple[dict[str, object], bool]:
    """The fields of `transformer_layer_config` for the sights, and `sliding_window_non_causal`.

    A causal layer without a window is written as one whose window is longer than any run.
    """
    c = network.config
    everywhere = c.max_position_embeddings + network.block_size
    sights = [s if s.window or not s.causal else Sight(True, everywhere) for s in network.sights]
    windows = [sight.window for sight in sights if sight.window]
    layer: dict[str, object] = {
        "layer_types": [_SLIDING if sight.window else _FULL for sight in sights],
        "sliding_window": max(windows, default=None),
        "use_sliding_window": bool(windows),
    }
    non_causal = not any(sight.causal for sight in sights)
    causal = {"is_causal": False} if non_causal else {}
    if sights_in(layer | causal, c.num_hidden_layers) != sights:
        raise ValueError(
            f"network: expected sights that are bidirectional without a window, and one common "
            f"window and direction for the rest, got {list(network.sights)}"
        )
    return layer, non_causal
