"""What `test_distributed.py` runs under torchrun, and alone: small fits that note their losses."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from specdec.training.distributed import Ranks, joined
from specdec.training.fit import fit, optimizers
from specdec.training.shards import write_shards

N_ROWS, N_STEPS = 8, 20


class Network(nn.Module):
    """An embedding, a matrix, a head, and a bias that only some rows use: rank by rank or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.sometimes = nn.Parameter(torch.zeros(6))
        self.double()
        for parameter in self.parameters():
            parameter.data.normal_(generator=draw)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of tokens [B, 2]; rows that begin with 0 are shifted."""
        x = self.inner(self.embedding(tokens[:, 0]))
        rows = (tokens[:, 0] == 0).nonzero().squeeze(1)
        if len(rows):
            x = x.index_add(0, rows, self.sometimes.expand(len(rows), -1))
        return nn.functional.cross_entropy(self.head(x.tanh()), tokens[:, 1])


class StopHereError(Exception):
    pass


def global_batch(step: int) -> Tensor:
    return torch.randint(7, (N_ROWS, 2), generator=torch.Generator().manual_seed(step))


def curve(
    ranks: Ranks,
    *,
    share: Ranks | None = None,
    seed: int = 0,
    folder: Path | None = None,
    stop_at: int | None = None,
) -> tuple[list[float], list[float], list[tuple[int, float]], list[Tensor]]:
    """A fit with AdamW and Muon: this rank's own losses, those told, the history, the weights."""
    network, own, told = Network(seed), [], []
    share = ranks if share is None else share

    def loss_of(step: int) -> Tensor:
        if step == stop_at:
            raise StopHereError
        loss = network(share.share(global_batch(step)))
        own.append(loss.item())
        return loss

    history: list[tuple[int, float]] = []
    try:
        history = fit(
            network, loss_of, optimizers(network, 0.05, 0.05), N_STEPS, folder=folder, warmup=3,
            save_every=6, evaluate=lambda: network(global_batch(99)).item(), evaluate_every=7,
            on_loss=lambda step, value: told.append(value), ranks=ranks,
        )  # fmt: skip
    except StopHereError:
        assert stop_at is not None
    return own, told, history, [p.detach() for p in network.parameters()]


def main(out: Path) -> None:
    """All cases in one process group: starting processes costs more than they do."""
    found: dict[str, object] = {}

    def note(name: str, ranks: Ranks, **options) -> None:
        own, told, history, weights = curve(ranks, **options)
        flat = torch.cat([weight.flatten() for weight in weights]).tolist()
        found[name] = {"own": own, "told": told, "history": history, "weights": flat}

    with joined() as ranks:
        note("averaged", ranks)
        # the first rank's weights hold, however the others were drawn
        note("other weights", ranks, seed=ranks.rank)
        note("same slice", ranks, share=Ranks(0, ranks.size))
        note("broken off", ranks, folder=out / "state", stop_at=15)
        note("resumed", ranks, folder=out / "state")
        average = Ranks.average_gradients
        Ranks.average_gradients = lambda self, parameters: None
        note("not averaged", ranks)
        Ranks.average_gradients = average
        network = Network(0)
        for name, factor in (("nan", torch.nan), ("inf", torch.inf)):  # on one rank, told on both
            scale = factor if ranks.rank == 1 else 1.0
            try:
                fit(
                    network, lambda step, scale=scale: network(global_batch(step)) * scale,
                    optimizers(network, 0.05), 1, ranks=ranks,
                )  # fmt: skip
            except FloatingPointError as error:
                found[name] = str(error)
        try:
            fit(network, lambda step: network(global_batch(step)), optimizers(network, 0.1), 1)
        except ValueError as error:
            found["forgotten"] = str(error)
        made: list[int] = []
        write_shards(
            out / "shards", {"kind": "test"}, 5, description="shards", ranks=ranks,
            make=lambda number: {"n": torch.tensor([made.append(number) or number])},
        )  # fmt: skip
        found["made"] = made
        found["there"] = len(list((out / "shards").glob("shard-*")))
        (out / f"rank{ranks.rank}.json").write_text(json.dumps(found))
    assert not torch.distributed.is_initialized()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
