"""A draft model: a small language model drafts, token after token or as a tree.

Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318); with several children a
node, SpecInfer (arXiv:2305.09781). Any `Model` with the target's vocabulary will do; one distilled
from the target (`specdec.distill`) is accepted most.

Its cache holds the tokens it was fed: at the start of a round it keeps those of its own pending
nodes that turned out true, whatever was verified meanwhile, and appends what is missing. The last
level of a draft is never fed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..accept import follow
from ..draft import Draft, depths
from ..protocol import Context, Model


class DraftModel:
    """Drafts `n_drafts` levels with `model`.

    Args:
        model: the draft model; its vocabulary must be the target's.
        n_drafts: depth of the draft.
        branching: children per node, one number for all levels or one per level; 1 is a chain.
        draw: under `Rejection`, draw the nodes (without replacement) and declare their law q;
            False chooses the likeliest instead, a one-hot q. Other rules always choose.

    Raises:
        ValueError: for counts below 1, a vocabulary that differs from the target's, or a context
            window shorter than the run (at `begin`).
    """

    taps = ()

    def __init__(
        self,
        model: Model,
        n_drafts: int = 4,
        *,
        branching: int | Sequence[int] = 1,
        draw: bool = True,
    ) -> None:
        if n_drafts < 1:
            raise ValueError(f"n_drafts: expected at least 1, got {n_drafts}")
        widths = [branching] * n_drafts if isinstance(branching, int) else list(branching)
        if len(widths) != n_drafts or min(widths) < 1 or max(widths) > model.vocab_size:
            raise ValueError(
                f"branching: expected numbers in 1..{model.vocab_size}, one or "
                f"{n_drafts}, got {branching}"
            )
        self.model, self.widths, self.draw = model, widths, draw

    def begin(self, target: Model, batch_size: int, max_length: int) -> DraftModelState:
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"model: a vocabulary of {self.model.vocab_size} cannot draft for "
                f"the target's of {target.vocab_size}"
            )
        if max_length > self.model.max_position_embeddings:
            raise ValueError(
                f"model: its max_position_embeddings="
                f"{self.model.max_position_embeddings} is below the run's "
                f"{max_length} tokens"
            )
        return DraftModelState(self, batch_size, max_length)


class DraftModelState:
    def __init__(self, config: DraftModel, batch_size: int, max_length: int) -> None:
        self.config = config
        self.cache = config.model.new_cache(batch_size, max_length)
        self.fed: Draft | None = None  # the pending nodes, as a draft below the committed prefix

    def propose(self, context: Context) -> Draft:
        n_levels = min(len(self.config.widths), context.max_depth)
        logits = self._catch_up(context) if n_levels else None
        if logits is None:
            return Draft.empty(len(context.lengths), context.tokens.device)
        is_tree = max(self.config.widths[:n_levels]) > 1
        levels: list[Tensor] = []
        parents: list[Tensor] = []
        laws: list[Tensor] = []
        first = 0  # index of the level's first node
        for depth, width in enumerate(self.config.widths[:n_levels]):
            if depth:
                above = parents[-1] if is_tree else None
                logits = self.config.model(levels[-1], self.cache, parents=above).logits
            assert logits is not None
            tokens, q = context.rule.pick(
                logits, context.lengths, depth, width, draw=self.config.draw
            )  # [B, M, k], [B, M, k, V]
            n_above = tokens.shape[1]
            parent = (
                torch.arange(first - n_above, first, device=tokens.device)
                if depth
                else torch.full((1,), -1, device=tokens.device)
            )
            parents.append(parent.repeat_interleave(width).expand(len(tokens), -1))
            levels.append(tokens.flatten(1, 2))
            if q is not None:
                laws.append(q.flatten(1, 2))
            first += n_above * width
        # all but the last level were fed, each below its parent: they are the pending tree
        tree = torch.cat(parents, dim=1) if is_tree else None
        n_fed = first - levels[-1].shape[1]
        self.fed = Draft(
            torch.cat(levels, dim=1)[:, :n_fed], None if tree is None else tree[:, :n_fed]
        )
        return Draft(torch.cat(levels, dim=1), tree, torch.cat(laws, dim=1) if laws else None)

    def _catch_up(self, context: Context) -> Tensor:
        """Commit the pending nodes that came true, then what else the row holds.

        Returns the logits after every root, [B, 1, V].
        """
        if self.fed is not None:
            have = self.cache.lengths
            depth = depths(self.fed.tree())  # the node at depth d would be token have + d - 1
            index = have.unsqueeze(1) + depth - 1
            actual = context.tokens.gather(1, index.clamp(max=context.tokens.shape[1] - 1))
            # all but the root, which is appended anew: its logits start the draft
            came_true = (actual == self.fed.tokens) & (index < context.lengths.unsqueeze(1) - 1)
            self.cache.commit(*follow(self.fed, came_true))
            self.fed = None
        missing = context.lengths - self.cache.lengths  # [B], at least the root
        while int((ahead := (missing - 8).clamp(0, 512)).max()):  # a long prompt, without logits
            self._feed(context, ahead, logits=False)
            missing = missing - ahead
        logits = self._feed(context, missing, logits=True)
        assert logits is not None
        last = (missing - 1).clamp(min=0)[:, None, None]
        return logits.gather(1, last.expand(-1, 1, logits.shape[-1]))

    def _feed(self, context: Context, n: Tensor, *, logits: bool) -> Tensor | None:
        """Commit the next `n` [B] tokens of every row; returns the logits [B, max(n), V]."""
        step = torch.arange(int(n.max()), device=n.device)
        index = (self.cache.lengths.unsqueeze(1) + step).clamp(max=context.tokens.shape[1] - 1)
        output = self.config.model(context.tokens.gather(1, index), self.cache, logits=logits)
        self.cache.commit(step.expand(len(n), -1), n)
        return output.logits
