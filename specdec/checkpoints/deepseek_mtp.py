"""Multi-token prediction layers as DeepSeek-V3 keeps them: behind the target's own in its folder.

arXiv:2412.19437. With L layers in the target, module k is `model.layers.{L + k - 1}`: `enorm` and
`hnorm` on embedding and state, `eh_proj` over both in that order (ours is the other way round), a
decoder layer, and `shared_head.norm`; embedding and head are the target's, written again or not. As
`transformers` (5.24, MtpModel) and vLLM run them, a module reads states behind the target's final
norm and hands on its own behind `shared_head.norm`; the paper has the states before the norm.

The blocks here are dense and attend with all heads. DeepSeek-V3's own layers have latent attention
and experts, GLM-4.5's and MiMo's (`model.mtp_layers`) biases: they are refused with that reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..drafters.eagle_tree import check_fits
from ..drafters.mtp import SequentialModules
from ..protocol import FINAL, Model
from .eagle import check_embeddings
from .folder import read_places
from .published import LAYER, below, expect, join, shape_of, without_angles
from .qwen_mtp import swapped
from .sharded import places_in, read_fields

_OWN = {
    "norm_hidden.weight": ("hnorm.weight",),
    "norm_embedding.weight": ("enorm.weight",),
    "projection.weight": ("eh_proj.weight",),
    "norm.weight": ("shared_head.norm.weight",),
    **below(LAYER, "block.", ""),
}
_REFUSED = {
    "self_attn.kv_a_proj": "latent attention (MLA)",
    ".mlp.experts.": "routed experts",
    "_proj.bias": "projections with biases",
    "_scale_inv": "quantized weights",
}
_MODULE = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
_MIMO = "model.mtp_layers."


def has_deepseek_mtp(names: Iterable[str]) -> bool:
    """Whether weights of these names hold such modules, or MiMo's."""
    return any(_MODULE.fullmatch(name) or name.startswith(_MIMO) for name in names)


def load_deepseek_mtp(folder: Path | str, target: Model) -> SequentialModules:
    """Read the modules in `folder` for `target`, in its dtype and on its device, without gradients.

    The folder is the target's own. `MTPModules(load_deepseek_mtp(...))` drafts with them.

    Raises:
        ValueError: for a folder without such modules, modules of a kind that is not supported here,
            weights that do not fit the config, or a target of another shape.
    """
    folder = Path(folder)
    fields = read_fields(folder)
    places = places_in(folder)
    layers = sorted(int(match[1]) for name in places if (match := _MODULE.fullmatch(name)))
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    places = {n: p for n, p in places.items() if n.startswith((*prefixes, _MIMO))}
    if not places:
        raise ValueError(f"folder: expected weights *.eh_proj.weight in {folder}, found none")
    found = {why for part, why in _REFUSED.items() if any(part in name for name in places)}
    if found:
        raise ValueError(
            f"folder: its multi-token prediction layers have {' and '.join(sorted(found))}; "
            f"expected dense blocks with plain attention"
        )
    if not layers:
        raise ValueError(f"folder: expected model.layers.*.eh_proj.weight, found MiMo's {_MIMO}*")
    first = fields.get("num_hidden_layers")
    expect(
        ("num_hidden_layers", first, target.n_layers),
        ("vocab_size", fields.get("vocab_size"), target.vocab_size),
        ("hidden_size", fields.get("hidden_size"), target.hidden_size),
    )
    if layers != list(range(target.n_layers, target.n_layers + len(layers))):
        raise ValueError(
            f"folder: expected modules from layer {target.n_layers} on, found them at {layers}"
        )
    config = shape_of(
        {**fields, "num_hidden_layers": len(layers)},
        qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in places),
    )
    network = SequentialModules(config, tap=FINAL, own_norm=True)
    network = network.to(device=target.device, dtype=target.dtype)
    check_fits(network, target)
    weights = without_angles(read_places(places))
    names: dict[str, tuple[str, ...]] = {}
    for k, prefix in enumerate(prefixes):
        names |= below(_OWN, f"blocks.{k}.", prefix)
        check_embeddings(weights.pop(f"{prefix}embed_tokens.weight", None), target)
        _check_head(weights.pop(f"{prefix}shared_head.head.weight", None), target)
    state = network.state_dict()
    network.load_state_dict(join(weights, {ours: names[ours] for ours in state}, state, folder))
    for module in network.blocks:
        projection = module.get_submodule("projection")
        assert isinstance(projection, torch.nn.Linear)
        projection.weight.data.copy_(swapped(projection))
    return network.eval().requires_grad_(False)


@torch.no_grad()
def _check_head(published: Tensor | None, target: Model) -> None:
    """A copy of the target's head may come with a module; another one is not supported."""
    if published is None:
        return
    probe = torch.randn(1, 4, target.hidden_size, generator=torch.Generator().manual_seed(0))
    own = target.head(probe.to(device=target.device, dtype=target.dtype)).float()
    theirs = probe.to(own) @ published.to(own).T
    if theirs.shape != own.shape or not torch.allclose(theirs, own, rtol=5e-2, atol=5e-2):
        raise ValueError(
            "folder: shared_head.head differs from the target's head; expected modules trained for "
            "this target, with its head"
        )
