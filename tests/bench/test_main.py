"""`python -m specdec.bench` from end to end, on a random bundle of bytes in float64."""

import json

import pytest
import torch

from specdec.bench.__main__ import main
from specdec.bench.job import Wanted, of_transformers, prepare
from specdec.benchmark import calibrate
from specdec.checkpoints import save_transformer
from specdec.drafters import DraftModel, PromptLookup
from specdec.load import Bundle, load
from specdec.tokenizer import ByteTokenizer
from tests.helpers import tiny_transformer

SMALL = ["--model", "tiny", "--no-pack", "--limit", "1", "--tokens", "6", "--repeats", "2"]


@pytest.fixture(autouse=True)
def bundle(monkeypatch):
    """`tiny` is replaced by what decodes in milliseconds; `--threads`, the process's, put back."""
    target = tiny_transformer(vocab_size=256, max_position_embeddings=2048)
    small = DraftModel(tiny_transformer(1, vocab_size=256, max_position_embeddings=2048), 2)
    drafters = {"prompt lookup": PromptLookup(4, 8), "draft model": small, "other": small}
    prompts = {kind: [f"def {kind}(x):", f"class {kind}:"] for kind in ("code", "edit", "table")}
    made = Bundle(target, ByteTokenizer(), drafters, prompts)
    monkeypatch.setattr("specdec.bench.job.load", lambda n: made if n == "tiny" else load(n))
    monkeypatch.setattr("specdec.bench.__main__.read_bandwidth", lambda device: 1e10)
    before = torch.get_num_threads()
    yield made
    torch.set_num_threads(before)


def test_both_engines_are_compared(tmp_path, capsys):
    """Catches a method, kind, key or part of the report that goes missing; a wrong output."""
    file = tmp_path / "rows.json"
    kinds = ["--kinds", "edit", "code", "--drafters", "lookup", "draft model"]
    main([*SMALL, *kinds, "--threads", "1", "--json", str(file)])
    rows = json.loads(file.read_text())
    drawn = [(row["prompt_kind"], row["engine"], row["method"]) for row in rows]
    assert drawn == [
        (kind, engine, method)
        for kind in ("code", "edit")
        for engine, methods in (
            ("specdec", ("plain", "prompt lookup", "draft model")),
            ("transformers", ("plain", "prompt lookup", "draft model")),
        )
        for method in methods
    ]
    for row in rows:
        assert row["model"] == "tiny"
        assert row["lossless"] and row["same_as_specdec"], row
        assert row["tokens_per_second"] > 0 and row["speedup"] > 0 and row["tau"] >= 1
        assert (row["predicted_speedup"] is not None) == (
            row["engine"] == "specdec" and row["method"] != "plain"
        )
        assert row["seconds_by_block"].keys() == {"1", "2", "4", "8", "16"}
    printed = capsys.readouterr().out
    for words in (
        *("lossless", "predicted", "vs hf", "T_d/T_t", "T_t/L", "T_d->0", "T_t->L", "loop"),
        *("tau per request", "accepted by depth", "GB/s", "a pass takes, in steps"),
    ):
        assert words in printed, words


def test_questions_of_a_file_without_transformers(tmp_path, capsys):
    """Catches the built-in prompts in place of the file's; transformers where it is not wanted."""
    file = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "short", "turns": ["def f(x):", "def g(x):"]},
        {"question_id": 2, "category": "long", "turns": ["x" * 3000]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    options = ["--prompts", str(file), "--no-transformers", "--drafters", "lookup", "--turns", "2"]
    main([*SMALL, *options])
    printed = capsys.readouterr().out
    assert "left out, too long for the target: 2" in printed
    assert "short" in printed
    assert not any(line.startswith(("long", "short  transformers")) for line in printed.split("\n"))


def test_without_a_draft_model_it_is_said():
    """Catches silence where a column of the comparison is missing."""
    job = prepare(Wanted("tiny", limit=1, kinds=("code",), drafters=("lookup",), packed=False))
    assert [m.name for m in job.methods if m.engine == "transformers"] == [
        *("plain", "prompt lookup", "draft model"),
    ]
    methods, (refused,) = of_transformers(tiny_transformer(), None, (), 3)
    assert [m.name for m in methods] == ["plain", "prompt lookup"]
    assert refused.reason.startswith("there is no draft model for this target")


def test_an_assistant_helps_both_engines(tmp_path):
    """Catches an assistant that only one engine has, or one of another vocabulary."""
    shape = {"vocab_size": 256, "max_position_embeddings": 2048}
    save_transformer(tiny_transformer(**shape), tmp_path / "helper")
    save_transformer(tiny_transformer(), tmp_path / "other")
    wanted = Wanted("tiny", limit=1, kinds=("code",), drafters=("lookup",), packed=False)
    own = Wanted(**(vars(wanted) | {"assistant": tmp_path / "helper"}))
    names = [(m.engine, m.name) for m in prepare(own).methods]
    assert ("specdec", "draft model") in names
    assert ("transformers", "draft model") in names
    other = Wanted(**(vars(wanted) | {"assistant": tmp_path / "other"}))
    with pytest.raises(ValueError, match="model: a vocabulary of 13 cannot draft"):
        prepare(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1"], "--tokens: expected at least 2, got 1"),
        (["--repeats", "0"], "--repeats: expected at least 1"),
        (["--n-drafts", "0"], "--n-drafts: expected at least 1"),
        (["--json", "/no/such/folder/rows.json"], "--json: expected a file in an existing folder"),
        (["--plot", "/tmp"], "--plot: expected a file in an existing folder"),
        (["--plot", "/tmp/x.gif"], r"--plot: expected a file .png or .svg"),
        (["--drafter", "/no/such/folder"], "--drafter: expected a folder"),
        (["--prompts", "/no/such/file"], "prompts: /no/such/file cannot be read"),
        (["--kinds", "poems"], "kinds: expected some of"),
        (["--drafters", "oracle"], "drafters: expected part of a name of"),
        (["--model", "no such model"], "expected one of"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(options, message, capsys, monkeypatch):
    """Catches minutes of decoding, and then an error."""
    monkeypatch.setattr("specdec.bench.__main__.calibrate", None)
    with pytest.raises(SystemExit) as exited:
        main([*SMALL, *options])
    assert message in f"{exited.value} {capsys.readouterr().err}"


def test_prompt_lookup_is_the_bundles_unless_it_is_told(tmp_path, bundle):
    """A drafter of the benchmark's own where a bundle has tuned one; a folder that replaces one."""
    wanted = Wanted("tiny", limit=1, kinds=("code",), drafters=("lookup",), packed=False)
    for n_drafts, expected in ((None, bundle.drafters["prompt lookup"]), (3, PromptLookup(4, 3))):
        job = prepare(Wanted(**(vars(wanted) | {"n_drafts": n_drafts})))
        assert job.drafters == {"prompt lookup": expected}
    (tmp_path / "prompt lookup").mkdir()
    with pytest.raises(ValueError, match=r"drafter: prompt lookup is a drafter of the bundle"):
        prepare(Wanted(**(vars(wanted) | {"drafter": tmp_path / "prompt lookup"})))


def test_fewer_prompts_to_calibrate_on(monkeypatch, capsys):
    """`--calibration` that is read and not used."""
    lengths = []

    def calibrated(target, drafters, prompts, progress):
        lengths.append(len(prompts))
        return calibrate(target, drafters, prompts)

    monkeypatch.setattr("specdec.bench.__main__.calibrate", calibrated)
    main([*SMALL, "--kinds", "code", "--drafters", "lookup", "--calibration", "1"])
    assert lengths == [1]
