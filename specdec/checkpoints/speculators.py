"""The `speculators` format: EAGLE-3, DFlash and DFlash 2 as vLLM's training library writes them.

github.com/vllm-project/speculators, read from its release 0.9.0. config.json says in
`speculators_config` which algorithm this is, how many tokens to draft and for which target (the
*verifier*), and describes the layers, Llama's or Qwen3's, in `transformer_layer_config`. vLLM
serves such a folder: see docs/serving.md.

Taps are counted as ours: id i is the stream behind i blocks, before the final norm also for the
last one (z-lab's id l is tap l + 1). A window of an EAGLE-3 layer becomes the longest run that it
drafts for. Windows of DFlash layers count from each slot, as in vLLM; the library's own training
counts a whole block's from its root. `speculators_eagle.py` and `speculators_dflash.py` tell the
rest of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..drafters.dflash import DFlashNetwork
from ..drafters.eagle import Eagle3
from ..drafters.eagle_tree import check_fits
from ..protocol import FINAL, Model
from .eagle import check_embeddings, offsets
from .folder import read_folder, write_folder
from .published import Names, expect, fields_of, join, split, without_angles
from .sharded import read_fields, weight_files
from .speculators_dflash import dflash_fields, dflash_names, dflash_of, n_slots_that_draft
from .speculators_eagle import eagle_fields, eagle_names, eagle_of

KINDS = ("eagle3", "dflash", "dflash2")
_SHAPES = ["llama", "qwen3"]
VERSION = "0.9.0"
"""The release whose format this is."""

_VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")
"""The target's own; older releases wrote them, too."""


def is_speculators(fields: Mapping) -> bool:
    """Whether a config.json is of this format."""
    return "speculators_model_type" in fields


def load_speculators(folder: Path | str, target: Model) -> Eagle3 | DFlashNetwork:
    """Read a folder for `target`, in its dtype, without gradients.

    `Eagle(...)` or `DFlash(...)` drafts with the result; EAGLE-3 comes as a `NormedEagle3` where it
    has norms that SafeAILab's has not, DFlash as a `HeadedDFlash` where it has a head of its own or
    the fields say `sample_from_anchor`.

    Raises:
        ValueError: for a folder of another format or algorithm, a layer of a kind that is not
            supported here, weights that do not fit the config, embeddings other than the target's,
            or layers made for a target of another width, vocabulary or depth.
    """
    folder = Path(folder)
    fields = read_fields(folder)
    kind = fields.get("speculators_model_type")
    if kind not in KINDS:
        raise ValueError(
            f"folder: config.json has speculators_model_type={kind!r}; expected one of "
            f"{list(KINDS)}"
        )
    layer = _layer_fields(fields, target)
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder):
        weights |= read_folder(folder, (file.name,))[1]
    weights = {n: w for n, w in without_angles(weights).items() if n not in _VERIFIER}
    check_embeddings(weights.pop("embed_tokens.weight", None), target)
    build = eagle_of if kind == "eagle3" else dflash_of
    network = build(fields, layer, weights, target)
    check_fits(network.to(device=target.device, dtype=target.dtype), target)
    state = join(weights, _names(network), network.state_dict(), folder)
    network.load_state_dict(state, strict=False)  # draft_ids are in place already
    return network.eval().requires_grad_(False)


def save_speculators(
    network: Eagle3 | DFlashNetwork,
    folder: Path | str,
    target: Model,
    *,
    verifier: str | None = None,
    architectures: Sequence[str] = (),
    n_drafts: int | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write `network` for `target` in the format that vLLM serves.

    EAGLE-3 takes a copy of the target's embeddings along, DFlash with a reduced vocabulary its rows
    of the head, as the format has it.

    Args:
        network: the layers; EAGLE-3, or DFlash with norms of queries and keys.
        folder: where to write config.json and model.safetensors.
        target: what they were trained for.
        verifier: the target's name on the hub, or its folder: what vLLM loads. None: name it on
            vLLM's command line.
        architectures: the target's, as in its config.json, for instance `["LlamaForCausalLM"]`.
        n_drafts: tokens to draft in a round; None: 4, or the slots of a block without the root.
        dtype: of the weights written; None: their own.
        metadata: goes into config.json under `training`.

    Raises:
        ValueError: for layers that do not fit the target, or that the format cannot say: of
            EAGLE-1, with FINAL among the taps, DFlash without norms of queries and keys or without
            injected context, sights that differ by more than a common window.
    """
    if isinstance(architectures, str):
        raise ValueError(f"architectures: expected a list of names, got {architectures!r}")
    if not isinstance(network, Eagle3 | DFlashNetwork):
        raise ValueError(
            f"network: expected an Eagle3 or a DFlashNetwork, got a {type(network).__name__}"
        )
    check_fits(network, target)
    if FINAL in network.taps:
        raise ValueError(
            f"network: expected taps of 0..{target.n_layers}, states before the target's final "
            f"norm, got FINAL in {list(network.taps)}"
        )
    kind, own, layer = (
        eagle_fields(network) if isinstance(network, Eagle3) else dflash_fields(network)
    )
    n_drafts = _checked_depth(network, n_drafts)
    proposal = {"proposal_type": "greedy", "speculative_tokens": n_drafts}
    c, ids = network.config, network.state_dict().get("draft_ids")
    fields = own | {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": fields_of(c)
        | {
            "model_type": "qwen3" if c.qk_norm else "llama",
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "tie_word_embeddings": False,
        }
        | layer,
        "draft_vocab_size": c.vocab_size if ids is None else len(ids),
        "tie_word_embeddings": False,
    }
    weights = split(network.state_dict(), _names(network), c)
    if ids is not None:
        weights |= offsets(ids, c.vocab_size)
    if isinstance(network, Eagle3):
        every = torch.arange(target.vocab_size, device=target.device).unsqueeze(0)
        weights["embed_tokens.weight"] = target.embedding(every).squeeze(0).detach()
    write_folder(folder, fields, weights, dtype, metadata)


def _names(network: Eagle3 | DFlashNetwork) -> Names:
    """Our name of every weight of `network` -> the published ones."""
    return eagle_names(network) if isinstance(network, Eagle3) else dflash_names(network)


def _checked_depth(network: Eagle3 | DFlashNetwork, n_drafts: int | None) -> int:
    """How many tokens a server is told to draft."""
    if isinstance(network, Eagle3):
        if n_drafts is not None and n_drafts < 1:
            raise ValueError(f"n_drafts: expected at least 1, got {n_drafts}")
        return n_drafts or 4
    most = n_slots_that_draft(network)
    if n_drafts is not None and not 1 <= n_drafts <= most:
        raise ValueError(f"n_drafts: expected 1..{most}, the slots that draft, got {n_drafts}")
    return n_drafts or most


def told_depth(fields: Mapping) -> int | None:
    """How many tokens a folder's config.json tells a server to draft; None if it does not."""
    try:
        n_drafts = fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return None
    return n_drafts if isinstance(n_drafts, int) and n_drafts >= 1 else None


def _layer_fields(fields: Mapping, target: Model) -> dict:
    """`transformer_layer_config` with what it leaves out, checked against the target."""
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError("folder: expected transformer_layer_config in config.json, got none")
    kind = layer.get("model_type", "qwen3")
    if kind not in _SHAPES:
        raise ValueError(
            f"folder: transformer_layer_config has model_type={kind!r}; expected one of {_SHAPES}"
        )
    told = fields.get("target_hidden_size")
    expect(
        ("vocab_size", layer.get("vocab_size"), target.vocab_size),
        ("hidden_size", layer.get("hidden_size"), target.hidden_size),
        ("target_hidden_size", told or target.hidden_size, target.hidden_size),
        where="folder: transformer_layer_config",
    )
    return {**layer, "model_type": kind}
