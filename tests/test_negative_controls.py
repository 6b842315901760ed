"""Known bugs of the field, planted: each must turn the suite red (DESIGN.md, section 7).

A control that passes means that the check it stands for has gone blind.
"""

import importlib
from dataclasses import dataclass, replace

import pytest
import torch

import specdec.accept
from specdec import FINAL, Draft, DraftModel, Rejection, generate
from specdec.cache import TreeCache
from specdec.generate import _Run
from specdec.testing import LosslessError, check_lossless, exact_law, target_law
from specdec.testing.drafters import Adversary
from specdec.testing.lossless import check_law
from specdec.testing.strategies import small_target

LOOP = importlib.import_module("specdec.generate")  # the module: the package names the function
TARGET, DRAFT = small_target(1), small_target(2, n_layers=1)
TARGET3, DRAFT3 = small_target(3, vocab_size=3), small_target(4, vocab_size=3, n_layers=1)
PROMPT = torch.tensor([1, 2])
CHAIN, TREE = DraftModel(TARGET, 3), DraftModel(TARGET, 3, branching=(3, 2, 1))


def law_error(drafter) -> float:
    law, own = exact_law(TARGET3, drafter, PROMPT, 3), target_law(TARGET3, PROMPT, 3)
    return max(abs(law.get(key, 0.0) - p) for key, p in own.items())


def check(drafter, **options) -> None:
    check_lossless(TARGET, drafter, max_new_tokens=10, **{"n_samples": 0, **options})


@dataclass(frozen=True)
class Planted:
    """A drafter whose drafts are changed by `change(draft)` on the way out."""

    drafter: DraftModel
    change: object

    taps = ()

    def begin(self, target, batch_size, max_length):
        state, change = self.drafter.begin(target, batch_size, max_length), self.change

        class State:
            def propose(self, context):
                draft = state.propose(context)
                return change(draft) if draft.n_nodes else draft

        return State()


def test_the_unplanted_code_passes():
    """Controls that fail for another reason than the planted bug."""
    assert law_error(DraftModel(DRAFT3, 2)) < 1e-9
    check(CHAIN)
    check(TREE)
    check_law(TARGET, DraftModel(DRAFT, 3), PROMPT, 256, 4)


def test_resampling_from_p_instead_of_the_residual(monkeypatch):
    right = specdec.accept.accept_or_residual
    monkeypatch.setattr(
        specdec.accept, "accept_or_residual", lambda r, q, tokens: (right(r, q, tokens)[0], r)
    )
    assert law_error(DraftModel(DRAFT3, 2)) > 1e-3


def soften(draft: Draft) -> Draft:
    """Drawn from q, declared as nearly uniform: a drafter's temperature that was forgotten."""
    assert draft.probs is not None
    q = draft.probs**0.1
    return replace(draft, probs=q / q.sum(-1, keepdim=True))


def test_a_q_that_is_not_the_q_drawn_from():
    drafter = DraftModel(small_target(9, sharpness=6.0), 3)
    assert law_error(Planted(DraftModel(DRAFT3, 2), soften)) > 1e-3
    with pytest.raises(LosslessError, match="do not follow the target's law"):
        check_law(TARGET, Planted(drafter, soften), PROMPT, 512, 4)


def test_drawn_nodes_pruned_by_their_probability():
    def prune(draft: Draft) -> Draft:
        assert draft.probs is not None
        own = draft.probs.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
        return replace(draft, used=(own > 0.3).long().cumprod(1).bool())

    assert law_error(Planted(DraftModel(DRAFT3, 2), prune)) > 1e-3


def test_a_stop_token_accepted_mid_block_and_ignored(monkeypatch):
    right = _Run._cut

    def only_the_last(self, draft, path, n_accepted, next_token):
        stops, self.stops = self.stops, frozenset()
        emitted, kept, cut = right(self, draft, path, n_accepted, next_token)
        self.stops = stops
        self.is_live = [
            live and not (new and new[-1] in stops)
            for live, new in zip(self.is_live, emitted, strict=True)
        ]
        return emitted, kept, cut

    monkeypatch.setattr(_Run, "_cut", only_the_last)
    with pytest.raises(LosslessError, match="stop tokens"):
        check(CHAIN)


def test_parents_off_by_one(monkeypatch):
    right = TreeCache.append
    monkeypatch.setattr(
        TreeCache,
        "append",
        lambda self, n, parents: right(
            self, n, None if parents is None else (parents - 1).clamp(min=-1)
        ),
    )
    with pytest.raises(LosslessError):
        check(TREE)


def test_positions_by_slot_instead_of_depth(monkeypatch):
    right = TreeCache.view

    def by_slot(self, first):
        view = right(self, first)
        slot = torch.arange(first, self.n_pending)
        return replace(view, positions=self.lengths.unsqueeze(1) + slot)

    monkeypatch.setattr(TreeCache, "view", by_slot)
    with pytest.raises(LosslessError):
        check(TREE)


class Reader:
    """Chooses a tree from the state that predicted the root: what a feature drafter reads."""

    taps = (FINAL,)

    def begin(self, target, batch_size, max_length):
        self.target = target
        return self

    def propose(self, context):
        if not context.hidden[FINAL].shape[1]:
            return Draft.empty(len(context.lengths))
        last = (context.n_new - 1).clamp(min=0)[:, None, None]
        states = context.hidden[FINAL]
        state = states.gather(1, last.expand(-1, 1, states.shape[-1]))
        tokens = self.target.head(state).topk(3).indices.squeeze(1)
        used = (context.n_new > 0).unsqueeze(1).expand_as(tokens)
        return Draft(tokens, torch.tensor([[-1, -1, 1]]).expand_as(tokens), used=used)


def test_taps_by_slot_instead_of_along_the_path(monkeypatch):
    reader = Reader()
    check(reader)
    monkeypatch.setattr(LOOP, "_rows", lambda states, nodes: states[:, : nodes.shape[1]])
    with pytest.raises(LosslessError, match=r"hidden\[-1\] differs"):
        check(reader)


def test_a_draft_cache_that_keeps_the_wrong_nodes(monkeypatch):
    """Losslessness is blind to it, replay is not."""
    module = importlib.import_module("specdec.drafters.draft_model")
    right = module.follow

    def by_slot(draft, passing, score=None):
        path, n = right(draft, passing, score)
        return torch.arange(path.shape[1]).expand_as(path), n

    monkeypatch.setattr(module, "follow", by_slot)
    with pytest.raises(LosslessError, match="replay"):
        check(TREE)


def tau_of_a_perfect_drafter() -> float:
    plain = generate(TARGET, PROMPT, max_new_tokens=20).sequences
    perfect = Adversary(plain, n_nodes=3, accuracy=1.0, tree=False, unused=0.0, seed=0)
    run = generate(TARGET, PROMPT, perfect, max_new_tokens=20)
    assert run.sequences[0].tolist() == plain[0].tolist()
    full = [r for r in run.rounds if not r.cut.any()]
    return sum(len(r.new_tokens[0]) - int(r.draft.mask().sum()) for r in full) / len(full)


def test_the_bonus_token_dropped(monkeypatch):
    """A perfect draft of n nodes must yield n + 1 tokens a round."""
    assert tau_of_a_perfect_drafter() == 1.0
    right = _Run._cut

    def drop(self, draft, path, n_accepted, next_token):
        left, live = list(self.left), list(self.is_live)
        emitted, kept, cut = right(self, draft, path, n_accepted, next_token)
        emitted = [
            new[:-1] if len(new) > 1 and not c else new for new, c in zip(emitted, cut, strict=True)
        ]
        self.left = [n - len(new) for n, new in zip(left, emitted, strict=True)]
        self.is_live = [on and n > 0 for on, n in zip(live, self.left, strict=True)]
        return emitted, kept, cut

    monkeypatch.setattr(_Run, "_cut", drop)
    assert tau_of_a_perfect_drafter() < 1.0


def test_rejection_by_chi_square_sees_a_wrong_residual(monkeypatch):
    """The wiring of `Rejection` in the loop, not only the shared function."""
    right = specdec.accept.rejection_laws
    monkeypatch.setattr(specdec.accept, "rejection_laws", lambda draft, p: (right(draft, p)[0], p))
    sharp = DraftModel(small_target(9, sharpness=6.0), 3)
    with pytest.raises(LosslessError, match="do not follow"):
        check_law(TARGET, sharp, PROMPT, 1024, 4, max_batch=256)
    assert Rejection().lossless
