"""DFlash layers as z-lab publishes them: Qwen3's config fields and weight names, `dflash_config`.

`target_layer_ids` counts layers from 0: id l is tap l + 1, and FINAL for the target's last layer,
whose entry in the `hidden_states` of transformers is behind the final norm. Sliding layers are
causal and have their window, full ones are bidirectional; `is_causal` settles it for all layers.

What is ours in config.json: `training`, a card; `inject`, where the context enters at the input
alone; `sights` and `taps`, where the published fields cannot tell them; `draft_vocab_size`, and
the weight `d2t` as EAGLE-3 has it, where only some rows of the target's head are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ..drafters.dflash import DFlashNetwork, Sight, dflash_taps, sights_of
from ..drafters.dflash2 import DFlash2
from ..drafters.eagle_tree import check_fits
from ..models import TransformerConfig
from ..protocol import FINAL, Model
from .eagle import offsets, take_draft_ids
from .folder import read_folder, write_folder
from .published import LAYER, below, expect, fields_of, join, shape_of, split
from .speculators_networks import HeadedDFlash

_OUTSIDE = {
    "fc.weight": ("fc.weight",),
    "norm_context.weight": ("hidden_norm.weight",),
    "norm.weight": ("norm.weight",),
    "selector.before.weight": ("candidate_selector.predecessor_codebook",),
    "selector.after.weight": ("candidate_selector.successor_codebook",),
    "selector.project.weight": ("candidate_selector.hidden_projection.weight",),
}
_CONVOLUTIONS = {
    f"conv_{part}.{ours}": (f"{part}_conv.{theirs}",)
    for part in ("attention", "mlp")
    for ours, theirs in (("base", "base_kernel"), ("project.weight", "kernel_projection.weight"))
}
DFLASH2_FIELDS = {  # the published names of the sizes
    "kernel_size": "conv_kernel_size",
    "group_size": "conv_group_size",
    "rank": "selector_rank",
    "top_k": "selector_top_k",
}
_NEUTRAL = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None}
_KNOWN = {"mask_token_id", "target_layer_ids", "block_size", *DFLASH2_FIELDS.values(), *_NEUTRAL}
_UNUSED = {"selector_vocab_size"}  # published with DFlash 2, not read by its PyTorch code
_SLIDING, _FULL = "sliding_attention", "full_attention"


def is_dflash(names: Iterable[str]) -> bool:
    """Whether a folder with these weight names holds DFlash layers."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"} <= set(names)


def strix_halo() -> DFlashNetwork:
    """The drafter that Strix Halo starts from, without weights (on the meta device).

    z-lab/Qwen3.6-35B-A3B-DFlash. From Strix Halo, its note 4: six layers, five of them sliding,
    width 2048, `target_layer_ids` [1, 6, 11, 16, 22, 27, 32, 37] of 40 layers, blocks of 16. The
    checkpoint itself was not at hand; the rest is what other projects quote of its config.json:
    32 heads of 128, 8 of them for keys and values, inner width 6144, window 4096, 248,320 tokens,
    mask token 248077, rotary base 1e7, eps 1e-6 and 262,144 positions.
    """
    config = TransformerConfig(
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        qk_norm=True,
    )
    with torch.device("meta"):
        return DFlashNetwork(
            config,
            [_tap(layer, 40) for layer in (1, 6, 11, 16, 22, 27, 32, 37)],
            mask_token=248077,
            block_size=16,
            sights=sights_of("mixed", 6, 4096),
        )


def load_dflash(folder: Path | str, target: Model) -> DFlashNetwork:
    """Read a DFlash folder for `target`, in its dtype, without gradients.

    `DFlash(load_dflash(...))` drafts with it. Without `target_layer_ids` the taps are the published
    spread, as many as there are layers.

    Raises:
        ValueError: for a folder that holds no DFlash layers, layers of a kind that is not
            supported here, weights that do not fit the config, or layers that do not fit the
            target.
    """
    fields, weights = read_folder(folder)
    if not is_dflash(weights):
        raise ValueError(f"folder: {folder} holds no DFlash layers; its weights: {sorted(weights)}")
    # the published code writes the codebooks with a suffix, the released files are without
    weights = {
        name.removesuffix(".weight") if "codebook" in name else name: weight
        for name, weight in weights.items()
    }
    ids = take_draft_ids(weights, fields.get("draft_vocab_size"), target.vocab_size)
    network = _network(fields, weights, target).to(device=target.device, dtype=target.dtype)
    check_fits(network, target)
    network.load_state_dict(join(weights, published_dflash(network), network.state_dict(), folder))
    return network.reduce_head(target, ids).eval().requires_grad_(False)


def save_dflash(
    network: DFlashNetwork,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
    n_target_layers: int | None = None,
) -> None:
    """Write layers in the published layout; `metadata` goes into config.json under `training`.

    Args:
        n_target_layers: depth of the target. The published code needs it, and the id of the last
            layer; None: only this library reads the folder.

    Raises:
        ValueError: for layers that z-lab's format cannot say.
    """
    if isinstance(network, HeadedDFlash):
        raise ValueError(
            "network: expected layers with the target's head and slots that say their own token, "
            "got a HeadedDFlash; save_speculators writes it"
        )
    extra = network.dflash2
    known = {"mask_token_id": network.mask_token, "block_size": network.block_size}
    if extra is not None:
        known |= {theirs: getattr(extra, ours) for ours, theirs in DFLASH2_FIELDS.items()}
    fields = fields_of(network.config) | {
        "architectures": ["DFlashDraftModel" if extra is None else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "block_size": network.block_size,
        "dflash_config": known | _tap_fields(network.taps, n_target_layers),
    }
    if n_target_layers is not None:
        fields["num_target_layers"] = n_target_layers
    if n_target_layers is None or n_target_layers in network.taps:
        fields["taps"] = list(network.taps)
    if not network.inject:
        fields["inject"] = False
    fields |= _sight_fields(
        network.sights, network.config.max_position_embeddings + network.block_size
    )
    weights = split(network.state_dict(), published_dflash(network), network.config)
    if network.draft_ids is not None:  # the rows themselves are the target's
        weights |= offsets(network.draft_ids, network.config.vocab_size)
        fields["draft_vocab_size"] = len(network.draft_ids)
    write_folder(folder, fields, weights, dtype, metadata)


def published_dflash(network: DFlashNetwork) -> dict[str, tuple[str, ...]]:
    """Our name of every weight of `network` -> the published ones."""
    known = dict(_OUTSIDE)
    for i in range(network.config.num_hidden_layers):
        known |= below({**LAYER, **_CONVOLUTIONS}, f"blocks.{i}.", f"layers.{i}.")
    return {name: known[name] for name, _ in network.named_parameters() if name != "reduced.weight"}


def _network(fields: Mapping, weights: Iterable[str], target: Model) -> DFlashNetwork:
    """Layers of the shape that config.json tells."""
    own = fields.get("dflash_config") or {}
    unknown = sorted(own.keys() - _KNOWN - _UNUSED)
    if unknown:
        raise ValueError(f"folder: dflash_config has {unknown}; expected some of {sorted(_KNOWN)}")
    own = {name: fields[name] for name in _KNOWN if name in fields} | own
    config = shape_of(fields, qk_norm=any(n.endswith("self_attn.q_norm.weight") for n in weights))
    expect(
        *((name, own.get(name, plain) or plain, plain) for name, plain in _NEUTRAL.items()),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
        (
            "num_target_layers",
            fields.get("num_target_layers", target.n_layers),
            target.n_layers,
        ),
    )
    if "mask_token_id" not in own:
        raise ValueError("folder: expected mask_token_id in config.json's dflash_config, got none")
    for name in ("mask_token_id", "block_size"):
        if not isinstance(own.get(name, 0), int):
            raise ValueError(f"folder: config.json has {name}={own[name]!r}; expected a number")
    return DFlashNetwork(
        config,
        _taps(fields, own, config.num_hidden_layers, target.n_layers),
        mask_token=own["mask_token_id"],
        block_size=own.get("block_size", 16),
        sights=sights_in(fields, config.num_hidden_layers),
        inject=fields.get("inject", True),
        dflash2=dflash2_in(own),
    )


def dflash2_in(own: Mapping) -> DFlash2 | None:
    """The sizes of DFlash 2 that the fields tell, or None."""
    sizes = {ours: own[theirs] for ours, theirs in DFLASH2_FIELDS.items() if theirs in own}
    if not sizes:
        return None
    if len(sizes) < len(DFLASH2_FIELDS):
        raise ValueError(
            f"folder: expected all of {list(DFLASH2_FIELDS.values())} in config.json, or none, "
            f"got {sorted(DFLASH2_FIELDS[name] for name in sizes)}"
        )
    return DFlash2(**sizes)


def _tap(layer: int, n_target_layers: int) -> int:
    """The tap that a published layer id names; -1 are the embeddings."""
    return FINAL if layer + 1 == n_target_layers else layer + 1


def _taps(fields: Mapping, own: Mapping, n_layers: int, n_target_layers: int) -> Sequence[int]:
    if "taps" in fields:
        return fields["taps"]
    layers = own.get("target_layer_ids")
    if layers is None:
        return dflash_taps(n_target_layers, n_layers)
    if not all(isinstance(layer, int) and -1 <= layer < n_target_layers for layer in layers):
        raise ValueError(
            f"folder: config.json has target_layer_ids={layers}; expected ids below the "
            f"{n_target_layers} layers of the target"
        )
    return [_tap(layer, n_target_layers) for layer in layers]


def _tap_fields(taps: Sequence[int], n_target_layers: int | None) -> dict[str, list[int]]:
    if n_target_layers is None and FINAL in taps:
        return {}
    return {"target_layer_ids": [(n_target_layers or 0 if t == FINAL else t) - 1 for t in taps]}


def sights_in(fields: Mapping, n_layers: int) -> list[Sight]:
    """What the slots of each layer see, as config.json tells it."""
    if "sights" in fields:
        return [Sight(**sight) for sight in fields["sights"]]
    kinds, window = fields.get("layer_types") or [_FULL] * n_layers, fields.get("sliding_window")
    if len(kinds) != n_layers or not {_SLIDING, _FULL}.issuperset(kinds):
        raise ValueError(
            f"folder: config.json has layer_types={kinds}; expected {_SLIDING!r} or {_FULL!r} for "
            f"each of {n_layers} layers"
        )
    if _SLIDING in kinds:
        expect(("use_sliding_window", fields.get("use_sliding_window", True), True))
        if window is None:
            raise ValueError(
                "folder: config.json has sliding_window=None; sliding layers need a width"
            )
    causal = fields.get("is_causal")
    return [
        Sight(kind == _SLIDING if causal is None else causal, window if kind == _SLIDING else None)
        for kind in kinds
    ]


def _sight_fields(sights: Sequence[Sight], everywhere: int) -> dict[str, object]:
    """The published fields that say `sights`; `sights` themselves where those do not say it all.

    A causal layer without a window does what a sliding one does whose window is `everywhere`.
    """
    ours: dict[str, object] = {"sights": [dataclasses.asdict(sight) for sight in sights]}
    spelled = [s if s.window or not s.causal else Sight(True, everywhere) for s in sights]
    for wanted in (list(sights), spelled):
        windows = [sight.window for sight in wanted if sight.window]
        fields: dict[str, object] = {
            "layer_types": [_SLIDING if sight.window else _FULL for sight in wanted],
            "sliding_window": max(windows, default=None),
            "use_sliding_window": bool(windows),
        }
        for causal in ({}, {"is_causal": wanted[0].causal}):
            if sights_in(fields | causal, len(wanted)) == wanted:
                return fields | causal | (ours if wanted != list(sights) else {})
    return ours
