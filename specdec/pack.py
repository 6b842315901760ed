"""`pack(model)`: linear layers laid out for small blocks, so that a pass over 8 tokens is cheap.

Verifying a block reads every weight once, as a step does, and should cost about a step. On a CPU in
float32 it nearly does for up to three rows, whose products run about as fast as memory. But 4 to
32 rows become a general product that first copies the weights into the order its
inner loop wants, for a handful of rows. oneDNN can keep that order: the weights are laid out once,
and blocks read them as they lie (`torch.ops.mkldnn`, what TorchInductor compiles linears to).

    specdec.pack(target)      # in place: 4 to 64 rows take the new road
    specdec.unpack(target)    # as it was

What a packed layer does with one to three rows: by default what it did before, which is faster
there (packed weights cost 1.4 of a step). `same_kernel=True` sends every row count through one
kernel, whose rows then come out equal to the bit however many there are; a step gets slower.
Decodings can differ at near-ties all the same: attention rounds by the number of queries, too.
`testing.compare` tells such a difference from a bug.

Weights stay where they are, as parameters of the same names, and packed copies come on top: memory
of the packed layers doubles. Nothing is gained on GPUs, in other dtypes, in layers that fit a
core's own cache, in weights of experts (no `nn.Linear`), and where torch was built without oneDNN;
all linears left alone are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_BYTES = 5 << 18
"""Smaller weights are left alone. At 4 and 8 rows those of 1.13 MiB lose a tenth, those of 1.27 MiB
neither gain nor lose; above it depends on the shape (docs/pack.md)."""

HINT_ROWS = 16
"""Rows the layout is made for; 2 to 16 came out alike, 1 slower for blocks."""

LEAST_ROWS = 4
"""`F.linear` of 2 and 3 rows costs 1.2 and 1.3 of a single row's product, packed ones 1.4."""

MOST_ROWS = 64
"""Up to here a block is run packed; of more rows a general product makes as good a use."""


@dataclass(frozen=True)
class Packed:
    """What `pack` did."""

    packed: tuple[str, ...]
    """Names of the linear layers that hold a packed copy."""
    left: dict[str, str] = field(default_factory=dict)
    """Linear layers left alone, and why."""
    bytes_added: int = 0
    """Memory of the packed copies."""

    def __str__(self) -> str:
        size = self.bytes_added / 2**20
        lines = [f"packed {len(self.packed)} linear layers, {size:.1f} MiB more"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"left alone, {reason}: {', '.join(names[:3])}{more}")
        return "\n".join(lines)


class PackedLinear(nn.Linear):
    """A linear layer with a copy of its weight in oneDNN's order; for inference.

    It shares the parameters of the layer it stands for. The copy follows the weight: when that was
    moved, converted, replaced or written to, it is made anew in the next pass, or left out where
    the weight can no longer be packed. (Writes through `weight.data` or numpy go unseen, as torch
    does not see them either: pack again.) `copy.deepcopy` and saving leave the copy out, too.
    """

    def __init__(self, linear: nn.Linear, same_kernel: bool = False) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias
        self.same_kernel = same_kernel
        self.train(linear.training)
        self._copy: Tensor | None = None
        self._seen: tuple[Tensor, int, int] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features].

        Raises:
            ValueError: if a gradient were to be computed.
        """
        if torch.is_grad_enabled() and (
            input.requires_grad
            or any(p.requires_grad for p in (self.weight, self.bias) if p is not None)
        ):
            raise ValueError(
                "model: packed linear layers compute no gradients; run it under torch.no_grad(), "
                "or undo the packing with specdec.unpack(model)"
            )
        n_rows = input.numel() // self.in_features
        rows_fit = n_rows > 0 if self.same_kernel else LEAST_ROWS <= n_rows <= MOST_ROWS
        copy = self.copy() if rows_fit and input.dtype == torch.float32 else None
        if copy is None:
            return F.linear(input, self.weight, self.bias)
        if n_rows == 1:  # as two: a single row has a kernel of its own that sums in another order
            row = input.reshape(1, -1).expand(2, -1)
            return _product(row, copy, self.bias)[0].view(*input.shape[:-1], -1)
        return _product(input, copy, self.bias)

    def copy(self) -> Tensor | None:
        """The weight in oneDNN's order, as it is now; None where it cannot be packed."""
        weight = self.weight
        version = -1 if weight.is_inference() else weight._version
        if weight.device.type != "cpu":  # an address elsewhere means nothing here
            self._copy, self._seen = None, None
            return None
        seen = self._seen
        if seen is None or seen[0] is not weight or seen[1:] != (weight.data_ptr(), version):
            packable = obstacle(weight) is None
            self._copy = _reorder(weight) if packable else None
            self._seen = (weight, weight.data_ptr(), version)
        return self._copy

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        """Of `.to()` and its kin: memory of a dropped weight may come back with another one."""
        self._copy, self._seen = None, None
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copy": None, "_seen": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, same_kernel={self.same_kernel}"


def pack(model: nn.Module, *, min_bytes: int = MIN_BYTES, same_kernel: bool = False) -> Packed:
    """Prepare the `nn.Linear`s of a model for blocks of 4 to 64 rows, in place; for inference.

    Works on any module: a target, a drafter's network, an `HFModel`. Layers become `PackedLinear`s
    of the same name that share their parameters, so `state_dict` and tied weights are as before,
    and code that reads `layer.weight` goes on. A tied head gets a copy; the embedding needs none.
    Packing a packed model packs it anew.

    Args:
        model: its float32 weights on the CPU are packed, everything else is left alone.
        min_bytes: weights of fewer bytes are left alone.
        same_kernel: whether one row goes through the packed weights, too. All rows of a packed
            layer then come out the same however many there are, and a step is slower. Layers left
            alone keep their own kernels: combine it with `min_bytes=0`.

    Raises:
        ValueError: if `model` is no module, or itself an `nn.Linear`, which nothing holds; or for
            a negative `min_bytes`.
    """
    _check_model(model)
    if min_bytes < 0:
        raise ValueError(f"min_bytes: expected at least 0, got {min_bytes}")
    unpack(model)
    made: dict[nn.Module, PackedLinear] = {}
    packed: list[str] = []
    left: dict[str, str] = {}
    for name, linear in _linears(model):
        if linear in made:
            _replace(model, name, made[linear])
            continue
        reason = _reason(linear, min_bytes)
        if reason is not None:
            left[name] = reason
            continue
        made[linear] = PackedLinear(linear, same_kernel)
        made[linear].copy()
        _replace(model, name, made[linear])
        packed.append(name)
    copies = [layer.copy() for layer in made.values()]
    return Packed(tuple(packed), left, sum(c.nbytes for c in copies if c is not None))


def unpack(model: nn.Module) -> int:
    """Undo `pack`, in place; returns how many layers are plain `nn.Linear`s again.

    Raises:
        ValueError: as `pack` does for `model`.
    """
    _check_model(model)
    made: dict[nn.Module, nn.Linear] = {}
    for name, layer in _linears(model):
        if isinstance(layer, PackedLinear):
            made.setdefault(layer, _plain(layer))
            _replace(model, name, made[layer])
    return len(made)


def obstacle(weight: Tensor) -> str | None:
    """Why a weight [out, in] cannot be packed, in words; None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"it is on {weight.device.type}"
    if weight.dtype != torch.float32:
        return f"it is {str(weight.dtype).removeprefix('torch.')}"
    if weight.is_inference():
        return "made in inference mode, where changes to a weight are not counted"
    if not weight.numel():
        return "it is empty"
    return None


def _reason(linear: nn.Linear, min_bytes: int) -> str | None:
    if type(linear) is not nn.Linear:
        return f"a subclass of nn.Linear ({type(linear).__name__})"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has hooks"
    reason = obstacle(linear.weight)
    if reason is None and linear.weight.nbytes < min_bytes:
        return f"smaller than {min_bytes} bytes"
    return reason


def _product(x: Tensor, copy: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")


def _reorder(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), HINT_ROWS)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, nn.Linear):
        raise ValueError(
            f"model: expected an nn.Module that holds linear layers, got {type(model).__name__}"
        )


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every name of every linear layer; those of a shared one, too."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear):
            yield name, module


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def _plain(packed: PackedLinear) -> nn.Linear:
    linear = nn.Linear(
        packed.in_features, packed.out_features, packed.bias is not None, device="meta"
    )
    linear.weight, linear.bias = packed.weight, packed.bias
    return linear.train(packed.training)
