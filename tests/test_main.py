"""The main job: `python -m specdec` on a small budget."""

import json
from html.parser import HTMLParser

import pytest

from specdec.__main__ import main

KEYS = {
    "drafter",
    "prompt_kind",
    "lossless",
    "tau",
    "acceptance_rate",
    "target_passes",
    "tokens_per_second",
    "speedup",
    "spread",
    "predicted_speedup",
    "predicted_without_overhead",
    "draft_to_verify",
    "verify_to_step",
    "loop_share",
    "tokens",
    "repeats",
    "version",
    "commit",
    "torch",
    "threads",
}


def test_the_main_job_prints_a_table_a_trace_and_writes_files(tmp_path, capsys):
    """A row, key or kind that goes missing; a drafter that is not lossless on the bundle."""
    main(
        [
            "--tokens",
            "6",
            "--repeats",
            "1",
            "--only",
            "lookup",
            "--only",
            "medusa",
            "--json",
            str(tmp_path / "rows.json"),
            "--html",
            str(tmp_path / "trace.html"),
        ]
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(row.keys() == KEYS for row in rows)
    assert {row["prompt_kind"] for row in rows} == {"code", "edit"}
    assert {row["drafter"] for row in rows} == {
        "plain",
        "prompt lookup",
        "medusa",
        "medusa, tree",
    }
    assert all(row["lossless"] for row in rows)
    assert all(row["tau"] == 1.0 for row in rows if row["drafter"] == "plain")
    HTMLParser().feed((tmp_path / "trace.html").read_text())
    printed = capsys.readouterr().out
    for word in ("speed-up", "predicted", "T_d/T_t", "T_t/L", "T_d->0", "T_t->L", "accepted"):
        assert word in printed, word


def test_a_word_that_no_drafter_has_is_refused():
    """Catches an empty table, or a stack trace of statistics on nothing."""
    with pytest.raises(SystemExit, match=r"--only: expected part of a name of .*'layerskip'"):
        main(["--only", "no such drafter"])


@pytest.mark.parametrize(
    "arguments", [["--tokens", "0"], ["--repeats", "0"], ["--json", "/no/such/folder/rows.json"]]
)
def test_bad_arguments_are_refused_before_any_work(arguments, capsys):
    """A minute of decoding, and then an error."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_the_hybrid_bundle_tells_what_its_blocks_wake(capsys):
    """A table that goes missing, or tells of the drafters that were not asked for."""
    main(["--bundle", "tiny-moe", "--tokens", "4", "--repeats", "1", "--only", "dflash"])
    out = capsys.readouterr().out
    assert "one token wakes 4 of 16" in out
    told = out[out.index("both ways") :].splitlines()[2:6]
    assert [line.split()[0] for line in told] == ["loop", "loop", "grouped", "grouped"]
    assert "prompt lookup" not in out
