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
from ..models import TransformerConfig
from ..protocol import Model
from .folder import read_folder, write_folder

# our name -> the published ones, joined row by row
_LAYER = {
    "attention.qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "norm_embedding.weight": ("input_layernorm.weight",),
    "norm_feature.weight": ("hidden_norm.weight",),
    "norm_mlp.weight": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
}
_OUTSIDE = {
    "fc.weight": ("fc.weight",),
    "fc.bias": ("fc.bias",),
    "norm.weight": ("norm.weight",),
    "head.weight": ("lm_head.weight",),
}


def _published(network: Network) -> dict[str, tuple[str, ...]]:
    """Our name of every weight of `network` -> the published ones."""
    prefix = "midlayer" if isinstance(network, Eagle3) else "layers.0"
    known = _OUTSIDE | {
        ours: tuple(f"{prefix}.{name}" for name in names) for ours, names in _LAYER.items()
    }
    return {name: known[name] for name, _ in network.named_parameters()}


def eagle_version(names: Iterable[str]) -> int | None:
    """Which EAGLE a folder with these weight names holds: 1 (also for EAGLE-2), 3, or None."""
    names = set(names)
    if {"fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"} <= names:
        return 3
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
    _check_embeddings(weights.pop("embed_tokens.weight", None), target)
    for name in [name for name in weights if name.endswith("rotary_emb.inv_freq")]:
        del weights[name]
    state = _join(folder, weights, network)
    network.load_state_dict(state, strict=False)  # draft_ids are in place already
    return network.eval().requires_grad_(False)


def save_eagle(
    network: Network,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a layer in the published layout; `metadata` goes into config.json under `training`."""
    c = network.config
    published = _published(network)
    weights: dict[str, Tensor] = {}
    for ours, tensor in network.state_dict().items():
        if ours == "draft_ids":
            continue
        names = published[ours]
        sizes = [len(tensor) // len(names)] * len(names)
        if ours == "attention.qkv.weight":
            sizes = [n * c.head_size for n in (c.num_attention_heads, c.n_kv_heads, c.n_kv_heads)]
        for theirs, part in zip(names, tensor.split(sizes), strict=True):
            weights[theirs] = part
    fields: dict[str, object] = {
        "architectures": [f"LlamaForCausalLMEagle{'3' if isinstance(network, Eagle3) else ''}"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
    }
    if isinstance(network, Eagle3):
        fields |= {"draft_vocab_size": network.n_tokens, "taps": list(network.taps)}
        ids = network.draft_ids
        if ids is not None:
            known = torch.zeros(c.vocab_size, dtype=torch.bool, device=ids.device)
            weights["d2t"] = ids - torch.arange(len(ids), device=ids.device)
            weights["t2d"] = known.index_fill(0, ids, True)
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
    theta = fields.get("rope_theta") or (fields.get("rope_parameters") or {}).get("rope_theta")
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    for name, got, supported in (
        ("hidden_act", fields.get("hidden_act", "silu"), "silu"),
        ("num_hidden_layers", fields.get("num_hidden_layers", 1), 1),
        ("attention_bias", bool(fields.get("attention_bias") or fields.get("qkv_bias")), False),
        ("rope_scaling", scaling.get("rope_type", scaling.get("type", "default")), "default"),
        ("target_hidden_size", fields.get("target_hidden_size", fields["hidden_size"]),
         fields["hidden_size"]),
        ("norm_before_residual", fields.get("norm_before_residual", False), False),
    ):  # fmt: skip
        if got != supported:
            raise ValueError(f"folder: config.json has {name}={got!r}; expected {supported!r}")
    config = TransformerConfig(
        fields["vocab_size"],
        fields["hidden_size"],
        fields["intermediate_size"],
        1,
        fields["num_attention_heads"],
        fields.get("num_key_value_heads"),
        fields.get("head_dim"),
        fields.get("rms_norm_eps", 1e-6),
        theta or 10000.0,
        fields.get("max_position_embeddings", 2048),
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in weights),
    )
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
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    ids = None
    if fields.get("draft_vocab_size", config.vocab_size) != config.vocab_size:
        if d2t is None:
            raise ValueError("folder: a reduced draft vocabulary needs d2t, found no such weight")
        ids = d2t.long() + torch.arange(len(d2t))
        if t2d is not None and t2d.nonzero().flatten().tolist() != ids.tolist():
            raise ValueError("folder: t2d does not mark the target tokens i + d2t[i]")
    return Eagle3(config, eagle3_taps(target.n_layers) if taps is None else taps, ids)


def _check_embeddings(published: Tensor | None, target: Model) -> None:
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


def _join(folder: Path, weights: Mapping[str, Tensor], network: Network) -> dict[str, Tensor]:
    """The published weights under our names; a ValueError tells which do not fit."""
    published = _published(network)
    expected = {name for names in published.values() for name in names}
    wrong = sorted(expected ^ weights.keys())
    state, shapes = {}, network.state_dict()
    for ours, names in published.items():
        parts = [weights[name] for name in names if name in weights]
        if len(parts) < len(names):
            continue
        if len({part.shape[1:] for part in parts}) == 1:
            state[ours] = torch.cat(parts)
        if ours not in state or state[ours].shape != shapes[ours].shape:
            wrong += names
    if wrong:
        raise ValueError(f"folder: the weights of {folder} do not fit its config: {wrong}")
    return state
