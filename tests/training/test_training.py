"""Training: corpora that hold whole files out, and a fit that resumes exactly."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from specdec.training import Corpus, fit
from specdec.training.fit import optimizers, schedule

N_FILES = 60
HELD_OUT = [34, 57]
"""Which of m0..m59 are held out: crc32 of the name divides by 20."""


def write_texts(folder, n: int = N_FILES) -> None:
    for i in range(n):
        (folder / f"m{i}.txt").write_text(f"<text {i}>" * 3)


def names_in(text: np.ndarray) -> set[int]:
    return {i for i in range(200) if f"<text {i}>".encode() in text.tobytes()}


def test_files_are_held_out_whole(tmp_path):
    """Catches a held-out text that is trained on, in part or in whole, and one lost altogether."""
    write_texts(tmp_path)
    corpus = Corpus.from_folder(tmp_path)
    train, held_out = names_in(corpus.train), names_in(corpus.held_out)
    assert not train & held_out
    assert train | held_out == set(range(N_FILES))
    # the same on every machine: `hash` of a name would differ from run to run
    assert sorted(held_out) == HELD_OUT
    for text, names in ((corpus.train, train), (corpus.held_out, held_out)):
        files = [f.decode() for f in text.tobytes().split(b"\0")]
        assert (files[0], files[-1]) == ("", "")
        assert sorted(files[1:-1]) == sorted(f"<text {i}>" * 3 for i in names)


def test_a_new_file_moves_no_other(tmp_path):
    """Catches a split by position in the list, which would leak held-out text into training."""
    write_texts(tmp_path)
    before = Corpus.from_folder(tmp_path)
    (tmp_path / "a_first.txt").write_text("<text 100>")
    after = Corpus.from_folder(tmp_path)
    assert names_in(after.held_out) - {100} == names_in(before.held_out)
    assert names_in(after.train) - {100} == names_in(before.train)


def test_a_package_stays_together(tmp_path):
    """Catches files of one package on both sides: they quote each other."""
    write_texts(tmp_path, 40)
    for i, side in ((100, HELD_OUT[0]), (101, 0)):
        folder = tmp_path / f"m{side}" / "below"
        folder.mkdir(parents=True)
        (folder / f"file{i}.txt").write_text(f"<text {i}>")
    corpus = Corpus.from_folder(tmp_path)
    assert 100 in names_in(corpus.held_out)
    assert 101 in names_in(corpus.train)


def test_left_out_folders_and_other_suffixes_are_not_read(tmp_path):
    """Catches tests and installed packages in the corpus, at any depth."""
    write_texts(tmp_path)
    for i, place in enumerate(("tests", "site-packages/pkg", "pkg/encodings/deep", "pkg/test")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file.txt").write_text(f"<text {100 + i}>")
    (tmp_path / "table.csv").write_text("<text 110>")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "code.py").write_text("<text 111>")
    corpus = Corpus.from_folder(tmp_path)
    names = names_in(corpus.train) | names_in(corpus.held_out)
    assert names == set(range(N_FILES)) | {111}
    only_text = Corpus.from_folder(tmp_path, (".txt",))
    assert names_in(only_text.train) | names_in(only_text.held_out) == set(range(N_FILES))


def test_a_zero_byte_in_a_file_is_no_separator(tmp_path):
    """Catches a file that ends in its middle."""
    write_texts(tmp_path)
    (tmp_path / "m1.txt").write_bytes(b"<te\0xt 150>")
    corpus = Corpus.from_folder(tmp_path)
    assert 150 in names_in(corpus.train) | names_in(corpus.held_out)


def test_a_folder_without_text_is_an_error(tmp_path):
    """Catches an empty corpus that fails at the first batch, and one without held-out files."""
    with pytest.raises(ValueError, match=f"folder: found no file to train on in {tmp_path}"):
        Corpus.from_folder(tmp_path)
    (tmp_path / "m0.txt").write_text("one text, which is not held out")
    with pytest.raises(ValueError, match=f"folder: found no file to hold out in {tmp_path}"):
        Corpus.from_folder(tmp_path)


COUNTING = Corpus(np.arange(200, dtype=np.uint8), np.arange(200, 230, dtype=np.uint8))


def test_batches_are_windows_fixed_by_step_and_seed():
    """Catches a batch from the global generator, and steps that all see the same windows."""
    batch = COUNTING.batch(3, 5, 8, seed=1)
    assert batch.dtype == torch.long
    assert batch.shape == (5, 9)
    assert torch.equal(batch, batch[:, :1] + torch.arange(9))
    np.random.seed(0)
    torch.manual_seed(0)
    assert torch.equal(batch, COUNTING.batch(3, 5, 8, seed=1))
    assert not torch.equal(batch, COUNTING.batch(4, 5, 8, seed=1))
    assert not torch.equal(batch, COUNTING.batch(3, 5, 8, seed=2))
    held_out = COUNTING.held_out_batch(64, 8)
    assert torch.equal(held_out, COUNTING.held_out_batch(64, 8))
    assert (held_out.min(), held_out.max()) == (200, 229)  # the last window is in reach, too


def test_a_window_may_be_the_whole_text_and_no_more():
    """Catches an upper end that is one short: a text of exactly one window."""
    assert COUNTING.held_out_batch(2, 29).tolist() == [list(range(200, 230))] * 2
    with pytest.raises(ValueError, match="length: a window of 31 bytes does not fit a text of 30"):
        COUNTING.held_out_batch(2, 30)


@pytest.mark.parametrize(
    ("step", "n_steps", "warmup", "share"),
    [
        (0, 1000, 100, 0.01),
        (49, 1000, 100, 0.5),
        (99, 1000, 100, 1.0),
        (100, 1000, 100, 1.0),
        (325, 1000, 100, 0.05 + 0.475 * (1 + math.sqrt(0.5))),
        (550, 1000, 100, 0.525),
        (1000, 1000, 100, 0.05),
        (2000, 1000, 100, 0.05),
        (0, 10, 0, 1.0),
        (5, 10, 0, 0.525),
        (3, 4, 8, 0.5),
    ],
)
def test_schedule_by_hand(step, n_steps, warmup, share):
    """Catches a first step of rate 0, a cosine over the wrong span, and one that rises again."""
    assert schedule(step, n_steps, warmup) == pytest.approx(share, abs=1e-12)


class Tiny(nn.Module):
    """An embedding, a matrix, a gain and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.double()
        for parameter in self.parameters():
            parameter.data.normal_(generator=draw)

    def loss_of(self, step: int) -> Tensor:
        tokens = torch.randint(5, (6, 2), generator=torch.Generator().manual_seed(step))
        logits = self.head(self.inner(self.embedding(tokens[:, 0])).tanh())
        return nn.functional.cross_entropy(logits, tokens[:, 1])


class StopHereError(Exception):
    pass


def trained(folder=None, *, stop_at: int | None = None, n_steps: int = 10):
    """Fit a fresh `Tiny`; returns it, the history, and the steps whose loss was asked for."""
    module, steps = Tiny(), []

    def loss_of(step: int) -> Tensor:
        if step == stop_at:
            raise StopHereError
        steps.append(step)
        return module.loss_of(step)

    def evaluate() -> float:
        assert not module.training
        return module.loss_of(0).item()

    history: list[tuple[int, float]] = []
    try:
        history = fit(
            module, loss_of, optimizers(module, 0.05, 0.05), n_steps, folder=folder, warmup=3,
            save_every=5, evaluate=evaluate, evaluate_every=4,
        )  # fmt: skip
    except StopHereError:
        assert stop_at is not None
    return module, history, steps


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("stop_at", "goes_on_at"), [(5, 5), (7, 5), (8, 8)])
def test_an_interrupted_fit_goes_on_exactly(tmp_path, stop_at, goes_on_at):
    """Stopped at its checkpoint or behind it, the second run gives the weights of an unbroken one.

    Step 8 is the best evaluation so far, and so a checkpoint, too.

    Catches an optimizer state that is not kept, and steps that are run twice or left out.
    """
    whole, history, _ = trained()
    assert [step for step, _ in history] == [4, 8, 10]
    trained(tmp_path, stop_at=stop_at)
    resumed, resumed_history, steps = trained(tmp_path)
    assert steps == list(range(goes_on_at, 10))
    assert_same_weights(resumed, whole)
    assert resumed_history == history


def test_a_finished_fit_is_read_and_not_run_again(tmp_path):
    """Catches a last step without a checkpoint, and a fit that trains on when called again."""
    first, history, steps = trained(tmp_path, n_steps=7)
    assert steps == list(range(7))
    again, again_history, steps = trained(tmp_path, n_steps=7)
    assert steps == []
    assert_same_weights(again, first)
    assert again_history == history
    assert not again.training
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.safetensors", "last.pt"]


def test_rates_follow_the_schedule_also_after_a_break(tmp_path):
    """Catches a rate that is scheduled on top of the last step's, or of a checkpoint's."""
    module = Tiny()
    both, seen = optimizers(module, 0.05, 0.02), []

    def loss_of(step: int) -> Tensor:
        seen.append([group["lr"] for each in both for group in each.param_groups])
        return module.loss_of(step)

    for n_steps in (4, 8):
        fit(module, loss_of, both, n_steps, folder=tmp_path, warmup=2)
        both = optimizers(module, 0.05, 0.02)
    shares = [schedule(step, 4, 2) for step in range(4)]
    shares += [schedule(step, 8, 2) for step in range(4, 8)]
    assert seen == [pytest.approx([0.05 * share, 0.02 * share]) for share in shares]


def test_a_fit_lowers_its_loss():
    """Catches gradients that pile up from step to step, and a sign."""
    module = Tiny()
    before = module.loss_of(0).item()
    fit(module, lambda step: module.loss_of(0), optimizers(module, 0.05), 40, warmup=1)
    assert module.loss_of(0).item() < 0.5 * before


def test_gradients_are_clipped():
    """Catches `max_norm` left unread: plain SGD shows the size of the step."""
    module = nn.Linear(1, 1, bias=False).double()
    module.weight.data.fill_(1.0)
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    fit(module, lambda step: 100 * module.weight.sum(), [sgd], 1, warmup=0, max_norm=0.25)
    assert module.weight.item() == pytest.approx(0.75, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_fit(tmp_path, bad):
    """Catches a checkpoint overwritten by a run that has already gone wrong."""
    trained(tmp_path, stop_at=6)
    before = (tmp_path / "last.pt").read_bytes()
    module = Tiny()

    def loss_of(step: int) -> Tensor:
        return module.loss_of(step) * (bad if step == 7 else 1.0)

    with pytest.raises(FloatingPointError, match=f"loss is {bad} at step 7"):
        fit(module, loss_of, optimizers(module, 0.05, 0.05), 10, folder=tmp_path, save_every=5)
    assert (tmp_path / "last.pt").read_bytes() == before


def test_a_gradient_that_is_not_finite_stops_the_fit(tmp_path):
    """Catches NaN weights in the checkpoint: a finite loss whose gradient is 0 * inf."""
    module = Tiny()

    def loss_of(step: int) -> Tensor:
        edge = (module.inner.weight * 0.0).sum().sqrt() if step == 4 else 0.0
        return module.loss_of(step) + edge

    with pytest.raises(FloatingPointError, match="step 4"):
        fit(module, loss_of, optimizers(module, 0.05), 5, folder=tmp_path, save_every=5)
    assert not (tmp_path / "last.pt").exists()


def test_optimizers_share_the_parameters_out():
    """Catches a parameter in neither, in both, or an embedding orthogonalised by Muon."""
    module = Tiny()
    module.embedding.weight.requires_grad_(False)
    adam, muon = optimizers(module, 1e-3, 2e-3)
    assert [type(each).__name__ for each in (adam, muon)] == ["AdamW", "Muon"]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = [
        [names[id(p)] for group in each.param_groups for p in group["params"]]
        for each in (adam, muon)
    ]
    assert found == [["inner.bias", "head.weight"], ["inner.weight"]]
    assert (adam.param_groups[0]["lr"], muon.param_groups[0]["lr"]) == (1e-3, 2e-3)
    (alone,) = optimizers(module, 1e-3)
    assert len(alone.param_groups[0]["params"]) == 3


def test_a_loss_may_run_its_own_backward_passes():
    """Catches gradients that `fit` clears, or a loss without gradient that it goes backward on."""
    fitted = []
    for self_run in (False, True):
        module = nn.Linear(2, 1)
        nn.init.ones_(module.weight)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)

        def loss_of(step: int, module=module, self_run=self_run) -> Tensor:
            loss = module(torch.ones(1, 2)).square().sum()
            if self_run:
                loss.backward()
                return loss.detach()
            return loss

        nn.init.zeros_(module.bias)
        fit(module, loss_of, [sgd], 3, warmup=0)
        fitted.append(module.weight.detach().clone())
    assert not torch.equal(fitted[0], torch.ones(1, 2))
    assert torch.equal(*fitted)


def test_a_loss_without_gradient_is_refused():
    """Catches a training that runs to its end without training anything."""
    module = nn.Linear(1, 1)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no gradient reaches the module at step 0"):
        fit(module, lambda step: torch.tensor(1.0), [sgd], 3)
