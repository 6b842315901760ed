"""Our routed experts inside a model of `transformers`: `with transformers_experts(model): ...`.

`transformers` looks up how experts are computed in a table, by a name in the model's config. The
table has room for other people's functions and the model a method to change the name, so nothing
is patched: for the time of the context the table holds one entry more, and the model its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import WAYS, check_way

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
"""What `transformers` notes on its expert modules, and the values that our signature takes."""


@contextmanager
def transformers_experts(model: PreTrainedModel, experts: str = "grouped") -> Iterator[None]:
    """Inside, `model` computes its routed experts by our way of this name; afterwards as before.

    Contexts may be nested, and several models may have one at a time. ValueError, before anything
    changes, for an unknown name, a model without routed experts, and experts that are not
    down(silu(gate) * up) over weights [E, 2I, D] and [E, D, I].
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    way = WAYS[check_way(experts)]
    modules = [each for each in model.modules() if FLAGS.keys() <= vars(each).keys()]
    if not modules:
        raise ValueError(f"model: expected routed experts, {type(model).__name__} has none")
    for module in modules:
        _check(module)

    def compute(module: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return way(x, indices, weights, module.gate_up_proj, module.down_proj)

    name = f"specdec-{id(compute)}"  # one entry a context, so that they do not end each other
    before = model.get_experts_implementation()
    ALL_EXPERTS_FUNCTIONS[name] = compute
    try:
        model.set_experts_implementation(name)
        yield
    finally:
        model.set_experts_implementation(before)
        del ALL_EXPERTS_FUNCTIONS[name]


def _check(module: Any) -> None:
    noted = vars(module)
    wrong = [f"{flag}={noted[flag]}" for flag, want in FLAGS.items() if noted[flag] != want]
    if not wrong:
        weight = module.gate_up_proj
        both = torch.linspace(-3.0, 3.0, weight.shape[1])[None]
        gate, up = both.chunk(2, dim=-1)
        if not torch.allclose(module._apply_gate(both), F.silu(gate) * up):
            wrong.append("another activation or gate")
        elif not weight.is_floating_point() or weight.element_size() < 2:
            wrong.append(f"weights in {weight.dtype}")
    if wrong:
        raise ValueError(
            f"model: expected experts of the form down(silu(gate) * up), {type(module).__name__} "
            f"has {', '.join(wrong)}"
        )
