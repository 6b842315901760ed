"""What several tests share: trees by plain loops, a tiny model, the passes a cache must equal."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.models import Transformer, TransformerConfig
from specdec.protocol import Output

EXAMPLE_PARENTS = [-1, -1, 0, 0, 1, 2, 4]
"""The running example of `specdec.draft`: the-(cat-(sat-on, is), dog-ran-to)."""


def path_of(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from a child of the root down to `node`; none for the root, -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def random_parents(rng: random.Random, batch_size: int, n: int, first: int = 0) -> Tensor:
    """Parents [B, n] of the nodes `first`.., another tree in every row."""
    rows = [[rng.randint(-1, first + i - 1) for i in range(n)] for _ in range(batch_size)]
    return torch.tensor(rows, dtype=torch.long).view(batch_size, n)


def random_tokens(rng: random.Random, batch_size: int, n: int, vocab_size: int) -> Tensor:
    rows = [[rng.randrange(vocab_size) for _ in range(n)] for _ in range(batch_size)]
    return torch.tensor(rows, dtype=torch.long).view(batch_size, n)


def tiny_transformer(seed: int = 0, **changes: object) -> Transformer:
    """Three float64 blocks with grouped heads; a small `rope_theta`, so that positions matter."""
    shape: dict = {
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 100.0,
        "max_position_embeddings": 128,
    }
    model = Transformer(TransformerConfig(**(shape | changes))).double().eval()
    return model.reset_parameters(torch.Generator().manual_seed(seed)).requires_grad_(False)


def along_paths(
    forward: Callable[[Tensor], Output],
    committed: Sequence[Sequence[int]],
    tokens: Tensor,
    parents: Tensor,
    first: int = 0,
) -> Output:
    """What a pass without a cache says after every pending node from `first` on.

    `forward` sees one sequence a node: the row's committed tokens, then the node's root path.
    """
    n_rows, n_nodes = tokens.shape
    sequences = [
        [*committed[b], *(tokens[b, j].item() for j in path_of(parents[b].tolist(), i))]
        for b in range(n_rows)
        for i in range(first, n_nodes)
    ]
    longest = max(map(len, sequences))
    output = forward(torch.tensor([s + [0] * (longest - len(s)) for s in sequences]))
    row, last = torch.arange(len(sequences)), torch.tensor([len(s) - 1 for s in sequences])

    def at_nodes(states: Tensor) -> Tensor:
        return states[row, last].view(n_rows, n_nodes - first, -1)

    assert output.logits is not None
    return Output(
        at_nodes(output.logits), {tap: at_nodes(states) for tap, states in output.hidden.items()}
    )


def assert_same(actual: Output, expected: Output, *, rtol: float = 0.0, atol: float) -> None:
    """Equal logits and the same taps with equal states; the message starts with what differs."""
    assert actual.logits is not None
    assert expected.logits is not None
    assert actual.hidden.keys() == expected.hidden.keys()
    pairs = {"logits": (actual.logits, expected.logits)}
    pairs |= {f"tap {tap}": (actual.hidden[tap], expected.hidden[tap]) for tap in actual.hidden}
    for name, (have, want) in pairs.items():
        torch.testing.assert_close(
            have, want, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name} differ: {text}"
        )
