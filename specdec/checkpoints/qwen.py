"""Folders of Qwen3-Next, Qwen3.5 and Qwen3.6 in the published layout: read, and written.

What is published apart is one product here, and the other way round: q_proj holds the query and the
gate of each head in turn; Qwen3-Next has the rows of a key head together, q, k, v, z and b, a,
where Qwen3.5 has them by kind. Experts lie packed or one by one. All of it is told as views of our
parameters (`sharded.Weight`), which are filled in place, or read when a folder is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..models import QwenMoe
from ..models.delta_net import GatedDeltaNet
from ..models.experts import MoeMLP
from ..models.layers import Attention, Block, GatedMLP
from .folder import write_folder
from .qwen_config import NEXT, config_of, fields_of, model_type_of, text_fields
from .sharded import Weight, check_weights, fill_weights, places_in, whole

_ELSEWHERE = ("mtp.", "model.visual.")
"""The module of multi-token prediction (`qwen_mtp.py`), and the eyes of a multimodal model."""


def load_qwen(folder: Path, fields: Mapping, dtype: torch.dtype) -> QwenMoe:
    """Read a folder whose config.json has `fields`; see `load_target`."""
    config = config_of(fields)
    with torch.device("meta"):
        model = QwenMoe(config)
    places = {
        name: place
        for name, place in places_in(folder).items()
        if not name.startswith(_ELSEWHERE) and not name.endswith("rotary_emb.inv_freq")
    }
    if config.tie_word_embeddings:
        places.pop("lm_head.weight", None)
    fused = text_fields(fields)["model_type"] == NEXT
    check_weights(places, published_weights(model, places, fused=fused), folder)
    model = model.to(dtype).to_empty(device="cpu").requires_grad_(False).eval()
    if config.tie_word_embeddings:
        model.head.weight = model.embedding.weight  # one parameter again
    fill_weights(places, published_weights(model, places, fused=fused))
    return model


def save_qwen_moe(
    model: QwenMoe,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a folder that `load_target` reads, and `transformers`, too.

    It is one of Qwen3.5, or of Qwen3-Next where `norm_topk_prob` is False. `dtype` is that of the
    file (None: the model's); `metadata` goes into config.json under the key `training`.
    """
    fused = model_type_of(model.config) == NEXT
    with torch.no_grad():
        weights = published_weights(model, (), fused=fused, packed=True)
        published = {name: weight.published() for name, weight in weights.items()}
    fields = fields_of(model.config) | {"dtype": str(dtype or model.dtype).removeprefix("torch.")}
    write_folder(folder, fields, published, dtype, metadata)


def published_weights(
    model: QwenMoe, names: Collection[str], *, fused: bool, packed: bool = False
) -> dict[str, Weight]:
    """Every published weight of `model`; `names` tell the layout, if it is a folder's."""
    below = "model.language_model."
    prefix = below if any(name.startswith(below) for name in names) else "model."
    weights = {
        f"{prefix}embed_tokens.weight": whole(model.embedding.weight),
        f"{prefix}norm.weight": whole(cast(Tensor, model.norm.weight)),
    }
    if not model.config.tie_word_embeddings:
        weights["lm_head.weight"] = whole(model.head.weight)
    for i, block in enumerate(model.blocks):
        here = f"{prefix}layers.{i}."
        own = block_weights(cast(Block, block), packed or has_packed(here, names), fused=fused)
        weights |= {here + name: weight for name, weight in own.items()}
    return weights


def has_packed(prefix: str, names: Collection[str]) -> bool:
    """Whether the experts below `prefix` lie in one weight each for all of them."""
    experts = f"{prefix}mlp.experts."
    return f"{experts}gate_up_proj" in names or f"{experts}down_proj" in names


def block_weights(block: Block, packed: bool, *, fused: bool) -> dict[str, Weight]:
    """Every published weight of a block. `packed`: its experts are; `fused`: as in Qwen3-Next."""
    mixer, mlp = block.attention, block.mlp
    weights = {
        "input_layernorm.weight": whole(cast(Tensor, block.norm_attention.weight)),
        "post_attention_layernorm.weight": whole(cast(Tensor, block.norm_mlp.weight)),
    }
    if isinstance(mixer, GatedDeltaNet):
        own = _recurrent(mixer, fused)
        weights |= {f"linear_attn.{name}": weight for name, weight in own.items()}
    else:
        own = _attention(cast(Attention, mixer))
        weights |= {f"self_attn.{name}": weight for name, weight in own.items()}
    own = _routed(mlp, packed) if isinstance(mlp, MoeMLP) else _gated(cast(GatedMLP, mlp))
    return weights | {f"mlp.{name}": weight for name, weight in own.items()}


def _attention(attention: Attention) -> dict[str, Weight]:
    a, size = attention, attention.head_dim
    assert a.gate is not None and a.q_norm is not None and a.k_norm is not None
    q, k, v = a.qkv.weight.split([n * size for n in (a.n_heads, a.n_kv_heads, a.n_kv_heads)])
    return {
        "q_proj.weight": Weight(
            (q.unflatten(0, (-1, size)), a.gate.weight.unflatten(0, (-1, size)))
        ),
        "k_proj.weight": whole(k),
        "v_proj.weight": whole(v),
        "o_proj.weight": whole(a.out.weight),
        "q_norm.weight": whole(a.q_norm.weight),
        "k_norm.weight": whole(a.k_norm.weight),
    }


def _recurrent(layer: GatedDeltaNet, fused: bool) -> dict[str, Weight]:
    s, (n_channels, *rest) = layer.shape, layer.sizes
    projection = layer.projection.weight
    weights = {
        "A_log": whole(layer.A_log),
        "dt_bias": whole(layer.dt_bias),
        "conv1d.weight": Weight((layer.convolution.T[:, None, None],)),  # [C, 1, K]
        "norm.weight": whole(layer.norm.weight),
        "out_proj.weight": whole(layer.out.weight),
    }
    if not fused:
        rows = zip(("qkv", "z", "b", "a"), projection.split([n_channels, *rest]), strict=True)
        return weights | {f"in_proj_{name}.weight": whole(part) for name, part in rows}
    n_keys = s.n_key_heads * s.key_dim
    sizes = [n_keys, n_keys, n_channels - 2 * n_keys, *rest]
    q, k, v, z, b, a = (part.unflatten(0, (s.n_key_heads, -1)) for part in projection.split(sizes))
    return weights | {
        "in_proj_qkvz.weight": Weight((q, k, v, z)),
        "in_proj_ba.weight": Weight((b, a)),
    }


def _gated(mlp: GatedMLP) -> dict[str, Weight]:
    gate, up = mlp.gate_up.weight.chunk(2)
    return {
        "gate_proj.weight": whole(gate),
        "up_proj.weight": whole(up),
        "down_proj.weight": whole(mlp.down.weight),
    }


def _routed(mlp: MoeMLP, packed: bool) -> dict[str, Weight]:
    assert mlp.shared is not None and mlp.shared_gate is not None
    gate_up, down = mlp.routed.gate_up_proj, mlp.routed.down_proj
    weights = {
        "gate.weight": whole(mlp.router.weight),
        "shared_expert_gate.weight": whole(mlp.shared_gate.weight),
    }
    weights |= {f"shared_expert.{name}": weight for name, weight in _gated(mlp.shared).items()}
    if packed:
        return weights | {
            "experts.gate_up_proj": whole(gate_up),
            "experts.down_proj": whole(down),
        }
    inner = down.shape[2]
    for j in range(len(down)):
        weights |= {
            f"experts.{j}.gate_proj.weight": whole(gate_up[j, :inner]),
            f"experts.{j}.up_proj.weight": whole(gate_up[j, inner:]),
            f"experts.{j}.down_proj.weight": whole(down[j]),
        }
    return weights
