"""EAGLE-3 in the `speculators` format: SafeAILab's weights with the layer named `layers.0`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from ..drafters.eagle import Eagle3, eagle3_taps
from ..protocol import Model
from .eagle import EAGLE_LAYER, EAGLE_OUTSIDE, take_draft_ids
from .published import Names, below, expect, shape_of
from .speculators_networks import NORM_FIELDS, NormedEagle3, Norms, norms_of

_TAPS = "eagle_aux_hidden_state_layer_ids"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def eagle_of(fields: Mapping, layer: Mapping, weights: dict[str, Tensor], target: Model) -> Eagle3:
    """A layer of the shape that config.json tells; takes d2t and t2d out of `weights`."""
    config = shape_of(layer, qk_norm=layer["model_type"] == "qwen3")
    expect(("num_hidden_layers", config.num_hidden_layers, 1))
    kinds = layer.get("layer_types") or [_FULL]
    if kinds == [_SLIDING] and layer.get("sliding_window"):  # the same for runs no longer than that
        longest = min(config.max_position_embeddings, layer["sliding_window"])
        config = dataclasses.replace(config, max_position_embeddings=longest)
    elif kinds != [_FULL]:
        raise ValueError(f"folder: config.json has layer_types={kinds}; expected [{_FULL!r}]")
    taps = fields.get(_TAPS) or eagle3_taps(target.n_layers)
    ids = take_draft_ids(weights, fields.get("draft_vocab_size"), config.vocab_size)
    norms = Norms(**{name: bool(fields.get(name)) for name in NORM_FIELDS})
    if norms == Norms():
        return Eagle3(config, taps, ids)
    return NormedEagle3(config, taps, ids, norms=norms)


def eagle_fields(network: Eagle3) -> tuple[str, dict[str, object], dict[str, object]]:
    """Its kind, and what config.json and its `transformer_layer_config` say of it alone."""
    fields = {
        "architectures": ["Eagle3DraftModel"],
        **dataclasses.asdict(norms_of(network)),
        "target_hidden_size": None,
        _TAPS: list(network.taps),
        "embed_requires_grad": False,
    }
    return "eagle3", fields, {"mlp_bias": False}


def eagle_names(network: Eagle3) -> Names:
    """Our name of every weight of `network` -> the published ones."""
    known = EAGLE_OUTSIDE | below(EAGLE_LAYER, "", "layers.0.")
    known["norm_taps.weight"] = ("input_norm.weight",)
    for i in range(len(network.taps)):
        known[f"norm_tap.{i}.weight"] = (f"fc_norm.{i}.weight",)
    return {name: known[name] for name, _ in network.named_parameters()}
