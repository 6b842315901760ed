"""Several processes, one training: `torchrun --nproc-per-node 2 -m specdec.training ...`.

Data parallelism: what is random is drawn for the *global* batch from (seed, step), identically in
every process; each takes its rows of it (`Ranks.share`); after the backward pass the gradients are
averaged (`Ranks.average_gradients`, which `fit` calls), so that all take the same step::

    with joined() as ranks:
        tokens = ranks.share(corpus.batch(step, batch_size, length, seed))
        fit(module, loss_of, optimizers, n_steps, ranks=ranks)

The result is that of one process: the mean of the ranks' means is the mean over the global batch
where every rank's mean is over equally many tokens, as it is over whole windows. With a mask that
leaves the ranks different counts it is the mean of the ranks' means, which weights a token by how
few its rank has.

Why not `DistributedDataParallel`: it hooks into the forward pass of one module and counts on every
parameter's gradient arriving once a backward pass. Here a loss is a closure that calls several
modules, may skip blocks (layer dropout) and may run backward passes of its own (the heads of
arXiv:2404.19737, one after the other). Averaging what lies in `.grad` when all is done is as exact
and has no such demands; what it gives up, communication that overlaps with the backward pass, pays
on fast networks only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `size` that train together; `ALONE` is the one that trains by itself.

    `device`: where its tensors live, and what is communicated.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this process shows progress, evaluates and writes files."""
        return self.rank == 0

    def share(self, batch: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a global batch: rows rank * b .. (rank + 1) * b - 1 along `dim`.

        Raises ValueError for rows that cannot be dealt out evenly.
        """
        n = batch.shape[dim]
        if n % self.size:
            raise ValueError(f"batch: expected a multiple of the {self.size} ranks, got {n} rows")
        each = n // self.size
        return batch.narrow(dim, self.rank * each, each)

    def mean(self, value: float) -> float:
        """The mean of every rank's `value`; not finite if one of them is not."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.size

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the ranks.

        A parameter that a rank did not use counts as zero there. One that no rank used keeps no
        gradient, so that the optimizer leaves it alone, as in one process.
        """
        if self.size == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        n_used = torch.tensor([p.grad is not None for p in trained], device=self.device).long()
        dist.all_reduce(n_used)
        for parameter, n in zip(trained, n_used.tolist(), strict=True):
            if not n:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size

    def broadcast(self, value: T) -> T:
        """The first rank's `value`, anything that can be pickled; what others pass is ignored."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def wait(self) -> None:
        """Go on when all ranks have come here."""
        if self.size > 1:
            dist.barrier()

    def check(self) -> None:
        """Raise a ValueError if these are not the processes that run."""
        running = dist.get_world_size() if dist.is_initialized() else 1
        if running != self.size:
            raise ValueError(
                f"ranks: expected the {running} that run (`with joined() as ranks`), "
                f"got {self.size}"
            )


ALONE = Ranks()


@contextmanager
def joined(device: str = "cpu") -> Iterator[Ranks]:
    """Join the processes that torchrun started (RANK, LOCAL_RANK and WORLD_SIZE); else `ALONE`.

    They talk through gloo on `"cpu"`, through nccl on `"cuda"`, where each has its own GPU.
    Raises ValueError for another device.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {device!r}")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    own = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if device == "cuda":
        torch.cuda.set_device(own)
    else:
        own = torch.device("cpu")
    if size == 1:
        yield Ranks(device=own)
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), size, own)
    finally:
        dist.destroy_process_group()
