"""Multi-token prediction with parallel heads: n last blocks on one trunk, each one token further.

Gloeckle et al. (arXiv:2404.19737, section 2). The trunk, here the target's first L - 1 blocks,
turns x_1..x_t into a state z_t. Head i is one decoder block over z_1..z_t and the final norm and
head that all of them share, and predicts the token i places ahead; head 1 is the target itself::

    z_t = trunk(x_1..x_t)        q(x_{t+i} | x_1..x_t) = head(norm(Block_i(z_1..z_t)))_t

z_t predicted the root x_{t+1}, so head i guesses a node at depth i - 1. As in Medusa the heads do
not see each other's guesses, and a tree of fixed shape takes its nodes from them by rank.

In training the logits are what fills the memory. `parallel_backward` runs the heads one after the
other, each forward and backward, gathers their gradients at the trunk's output and goes through
the trunk once, so that one head's logits live at a time instead of n.

Where we differ: heads can be added to a finished target, as copies of its last block, and trained
alone; drafts go through the run's rule, chosen or drawn, in chains or trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import KVStore, TreeCache, everything
from ..draft import Draft
from ..models import Transformer, TransformerConfig
from ..models.layers import RotaryStore, for_groups
from ..models.transformer import angles_of, block_of, draw_weights
from ..protocol import Context, Model
from ..trees import dense_choices
from .static_draft import StaticDraft, tree_for

_CHUNK = 512  # states of a prompt that the heads read in one pass


class ParallelHeads(nn.Module):
    """The blocks of heads 2..n. Head 1 is the target's last block, and stays with the target.

    Args:
        config: shape of the blocks; width and vocabulary are the target's. `num_hidden_layers` is
            not read; in `self.config` it is the number of blocks, n - 1.
        n_heads: n, the target's own head included.
        tap: the target's states that all heads read, z: its number of blocks L less one.

    Raises:
        ValueError: for fewer than 2 heads or a negative tap.
    """

    def __init__(self, config: TransformerConfig, n_heads: int, tap: int) -> None:
        super().__init__()
        if n_heads < 2:
            raise ValueError(
                f"n_heads: expected at least 2, the target's own and another, got {n_heads}"
            )
        if tap < 0:
            raise ValueError(f"tap: expected the target's number of blocks less one, got {tap}")
        c = self.config = dataclasses.replace(config, num_hidden_layers=n_heads - 1)
        self.n_heads, self.tap = n_heads, tap
        self.blocks = nn.ModuleList(block_of(c) for _ in range(n_heads - 1))

    @staticmethod
    @torch.no_grad()
    def for_target(target: Transformer, n_heads: int = 4) -> ParallelHeads:
        """Heads that all say what the target says of the next token, to be trained from there.

        They hold copies of the target's last block: trainable though the target be frozen, in its
        dtype and on its device.

        Raises:
            ValueError: for fewer than 2 heads, or a target that is no `Transformer`.
        """
        if not isinstance(target, Transformer):
            raise ValueError(
                f"target: expected a Transformer, whose last block can be copied, got "
                f"{type(target).__name__}"
            )
        network = ParallelHeads(target.config, n_heads, target.n_layers - 1)
        network = network.to(device=target.device, dtype=target.dtype)
        for block in network.blocks:
            block.load_state_dict(target.blocks[-1].state_dict())
        return network

    def reset_parameters(self, generator: torch.Generator | None = None) -> ParallelHeads:
        """Draw fresh weights as in the target's L blocks."""
        draw_weights(self, self.tap + 1, generator)
        return self

    @property
    def n_depths(self) -> int:
        """How deep they can draft: head 2 drafts depth 1."""
        return self.n_heads - 1

    def check_fits(self, target: Model) -> None:
        """Raise a ValueError for a target of another width, vocabulary or number of blocks."""
        c = self.config
        if (c.vocab_size, c.hidden_size) != (target.vocab_size, target.hidden_size):
            raise ValueError(
                f"network: made for a vocabulary of {c.vocab_size} and width {c.hidden_size}, but "
                f"the target has {target.vocab_size} and {target.hidden_size}"
            )
        if self.tap != target.n_layers - 1:
            raise ValueError(
                f"network: reads tap {self.tap}, the states before the last of {self.tap + 1} "
                f"blocks, but the target has {target.n_layers}"
            )

    def trunk(self, target: Model, tokens: Tensor) -> dict[int, Tensor]:
        """What the heads read of `tokens` [B, T]: tap -> [B, T, D], from the first L - 1 blocks.

        For training; gradients reach the target unless it is frozen.
        """
        exit_layer = self.tap or None  # a pass runs at least one block
        return dict(target(tokens, taps=(self.tap,), exit_layer=exit_layer, logits=False).hidden)

    def stream(self, head: int, z: Tensor) -> Tensor:
        """Residual stream [B, T, D] of `head` (2..n) over trunk states z [B, T, D], in training."""
        return self.blocks[head - 2](z, angles_of(self.config, z.shape[1], z))

    def forward(self, z: Tensor, target: Model) -> Iterator[Tensor]:
        """Trunk states [B, T, D] -> logits [B, T, V] of heads 2..n, computed as they are asked for.

        Place t of head i predicts x_{t+i}.
        """
        for head in range(2, self.n_heads + 1):
            yield target.head(target.norm(self.stream(head, z)))

    def logits_by_depth(self, target: Model, tokens: Tensor) -> Iterator[Tensor]:
        """`forward` of `tokens` [B, T]; place t of the k-th head to draft predicts x_{t+1+k}."""
        return self(self.trunk(target, tokens)[self.tap], target)


def parallel_loss(
    network: ParallelHeads,
    target: Transformer,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    head_1: bool = True,
) -> Tensor:
    """L_n: the sum over heads of their mean cross-entropy, section 2; all logits live at once.

    Gradients reach the target's last block, norm and head and, through its states, the trunk,
    unless they are frozen. This is the reference; `parallel_backward` does the same in less memory.

    Args:
        network: the heads.
        target: lends head 1, the final norm and the head.
        hidden: the trunk's states, `network.tap` -> [B, T, D]; see `ParallelHeads.trunk`.
        tokens: [B, T] int64, right-padded, T >= n + 1.
        mask: [B, T] bool, True where a *token* counts as one to predict: False for padding, and
            for prompts if only answers are to be learned. None: all.
        head_1: whether the target's own head counts. With a frozen target it adds a constant, and
            False saves computing it.

    Returns:
        A scalar, float32 or better.

    Raises:
        ValueError: for shapes that differ, a missing tap, too few tokens, a network of another
            target, or a mask that leaves a head nothing to predict.
    """
    z, heads = _check_batch(network, target, hidden, tokens, mask, head_1)
    losses = [_head_loss(network, target, head, z, tokens, mask) for head in heads]
    return torch.stack(losses).sum()


def parallel_backward(
    network: ParallelHeads,
    target: Transformer,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    head_1: bool = True,
) -> Tensor:
    """`parallel_loss(...).backward()` with the logits of one head alive at a time.

    Heads run one after the other, forward and backward; their gradients add up at the detached z,
    from where the trunk goes backward once, if it is trained (section 2 and figure 2). Gradients
    add to `.grad` as ever: clip and step afterwards. Arguments are those of `parallel_loss`.

    Returns:
        The value of the loss, a scalar without gradient.

    Raises:
        ValueError: as `parallel_loss`, before any gradient has changed; and where nothing requires
            one.
    """
    z, heads = _check_batch(network, target, hidden, tokens, mask, head_1)
    at_trunk = z.detach().requires_grad_(z.requires_grad)
    total, trained = torch.zeros((), device=z.device), False
    for head in heads:
        loss = _head_loss(network, target, head, at_trunk, tokens, mask)
        if loss.requires_grad:
            loss.backward()  # frees this head's logits before the next one's
            trained = True
        total = total + loss.detach()
    if not trained:
        raise ValueError(
            "network, target, hidden: expected something that requires a gradient, got nothing"
        )
    if z.requires_grad:
        z.backward(at_trunk.grad)
    return total


def _head_loss(
    network: ParallelHeads,
    target: Transformer,
    head: int,
    z: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Mean cross-entropy of one head: place t against x_{t + head}."""
    z, labels = z[:, :-head], tokens[:, head:]
    if head == 1:
        stream = target.blocks[-1](z, target.rotary(z.shape[1]))
    else:
        stream = network.stream(head, z)
    if mask is not None:
        counts = mask[:, head:]
        stream, labels = stream[counts].unsqueeze(0), labels[counts]  # [1, M, D], [M]
    logits = target.head(target.norm(stream))
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(exact), labels.flatten())


def _check_batch(
    network: ParallelHeads,
    target: Model,
    hidden: Mapping[int, Tensor],
    tokens: Tensor,
    mask: Tensor | None,
    head_1: bool,
) -> tuple[Tensor, range]:
    """The trunk's states and the heads that count."""
    network.check_fits(target)
    n_heads, heads = network.n_heads, range(1 if head_1 else 2, network.n_heads + 1)
    if tokens.ndim != 2 or tokens.dtype != torch.long or tokens.shape[1] < n_heads + 1:
        raise ValueError(
            f"tokens: expected int64 of shape [B, T] with T >= {n_heads + 1} for {n_heads} heads, "
            f"got {tokens.dtype} of shape {list(tokens.shape)}"
        )
    z, shape = hidden.get(network.tap), [*tokens.shape, network.config.hidden_size]
    if z is None or list(z.shape) != shape:
        got = f"the taps {sorted(hidden)}" if z is None else list(z.shape)
        raise ValueError(f"hidden: expected tap {network.tap} of shape {shape}, got {got}")
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask: expected bool of shape {list(tokens.shape)}, got {mask.dtype} of shape "
            f"{list(mask.shape)}"
        )
    empty = [] if mask is None else [head for head in heads if not bool(mask[:, head:].any())]
    if empty:
        raise ValueError(f"mask: expected a token that head {empty[0]} predicts, got none")
    return z, heads


class MTPHeads:
    """Drafts a static tree, or a chain, of what heads 2..n say.

    Args:
        network: the trained heads.
        choices: the tree's rank paths; see `specdec.trees`. Its depth is at most n - 1, that of
            the chain which is the default.
        draw: under `Rejection`, draw the candidates of a depth (without replacement) and declare
            their law q; False chooses the likeliest instead, a one-hot q. Other rules choose.

    Raises:
        ValueError: for a tree that is none, too deep for the heads or too wide for the vocabulary;
            with `draw`, one whose siblings leave out a rank; at `begin`, for a target of another
            width, vocabulary, number of blocks, dtype or device, or a run beyond the heads' window.
    """

    def __init__(
        self,
        network: ParallelHeads,
        choices: Sequence[Sequence[int]] | None = None,
        *,
        draw: bool = False,
    ) -> None:
        if choices is None:
            choices = dense_choices([1] * network.n_depths)
        self.tree = tree_for(choices, network.n_depths, network.config.vocab_size, draw=draw)
        self.network, self.draw = network, draw

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.network.tap,)

    def begin(self, target: Model, batch_size: int, max_length: int) -> MTPHeadsState:
        self.network.check_fits(target)
        weight, window = next(self.network.parameters()), self.network.config
        if (weight.dtype, weight.device) != (target.dtype, target.device):
            raise ValueError(
                f"network: {weight.dtype} on {weight.device}, but the target is {target.dtype} on "
                f"{target.device}; convert one with .to()"
            )
        if max_length > window.max_position_embeddings:
            raise ValueError(
                f"network: its max_position_embeddings={window.max_position_embeddings} is below "
                f"the run's {max_length} tokens"
            )
        return MTPHeadsState(self, target, batch_size, max_length)


class MTPHeadsState:
    """One run: the keys and values of z_1..z_t for every head that the tree needs."""

    def __init__(self, config: MTPHeads, target: Model, batch_size: int, max_length: int) -> None:
        self.target, self.tap = target, config.network.tap
        self.blocks = config.network.blocks[: config.tree.max_depth]
        self.static = StaticDraft(config.tree, target.device, draw=config.draw)
        c, dtype, device = config.network.config, target.dtype, target.device
        n_layers, n_slots, self.n_groups = len(self.blocks), max_length + 8, c.n_groups
        self.store = KVStore(
            n_layers, batch_size, c.n_kv_heads, c.head_size, n_slots, dtype, device
        )
        self.angles = RotaryStore(c.head_size, c.rope_theta, n_slots, dtype, device)
        self.cache = TreeCache(batch_size, [self.store, self.angles], n_layers, dtype, device)

    def propose(self, context: Context) -> Draft:
        if not context.max_depth or not context.new_tokens.shape[1]:  # the last round, or no z yet
            return Draft.empty(len(context.lengths), context.tokens.device)
        streams = self._append(context)  # [K, B, 1, D]
        target = self.target
        return self.static.fill(context, lambda depth: target.head(target.norm(streams[depth])))

    def _append(self, context: Context) -> Tensor:
        """Commit the new states; returns every head's residual stream at the last, [K, B, 1, D]."""
        n_new, have = context.n_new, self.cache.lengths
        if bool((have + n_new != context.lengths - 1).any()):
            raise ValueError(
                f"context.new_tokens: expected all since the last call, but {have.tolist()} states "
                f"and {n_new.tolist()} new ones do not make rows of {context.lengths.tolist()} "
                f"tokens; call propose in every round"
            )
        z, outputs = context.hidden[self.tap], []
        for start in range(0, z.shape[1], _CHUNK):
            outputs.append(self._run(z[:, start : start + _CHUNK]))
            path, whole = everything(outputs[-1].shape[2], len(n_new), n_new.device)
            self.cache.commit(path, torch.minimum((n_new - start).clamp(min=0), whole))
        rows, last = torch.arange(len(n_new), device=n_new.device), (n_new - 1).clamp(min=0)
        return torch.cat(outputs, dim=2)[:, rows, last].unsqueeze(2)

    def _run(self, z: Tensor) -> Tensor:
        """Append states [B, N, D], pending, to every head; returns their streams [K, B, N, D]."""
        self.cache.append(z.shape[1], None)
        view = for_groups(self.cache.view(0), self.n_groups)
        rotary = self.angles.at(view)
        return torch.stack(
            [block(z, rotary, self.store, i, view) for i, block in enumerate(self.blocks)]
        )
