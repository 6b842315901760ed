"""Tables, JSON and the picture, from results made by hand."""

import builtins
import json
import math
from dataclasses import replace

import pytest

from specdec.bench.bandwidth import Bound
from specdec.bench.measure import Refusal, Result, Spread
from specdec.bench.plot import check_plot, draw
from specdec.bench.report import averages, reading, record, refusal_record, table, word
from specdec.bench.runs import SPECDEC, TRANSFORMERS
from specdec.benchmark import Costs, Prediction
from specdec.draft import Draft
from specdec.testing import Divergence

NEAR = Divergence(0, 5, 1, 2, gap=1e-6, exact_gap=1e-6, rounding=1e-6)
BUG = Divergence(0, 5, 1, 2, gap=0.25, exact_gap=0.3, rounding=1e-6)
BOUND = Bound(step_bytes=10**8, bytes_per_second=10**10)


def result(engine=SPECDEC, method="plain", kind="chat", speed=50.0, speedup=1.0, **more) -> Result:
    fields = {
        "n_prompts": 2,
        "n_new_tokens": 9,
        "tokens_per_second": Spread(speed, speed - 1, speed + 1),
        "call_tokens_per_second": Spread(speed, speed, speed),
        "speedup": Spread(speedup, speedup, speedup),
        "over_transformers": None,
        "tau": 1.0,
        "tau_requests": (1.0, 1.0),
        "divergences": (),
        "across": (),
    }
    return Result(engine, method, kind, **(fields | more))


def test_a_difference_is_named_with_its_gap():
    """Catches a bug that reads as a near-tie, and differences that are not printed."""
    assert [word(found) for found in ((), [("a", NEAR)], [("a", NEAR), ("b", BUG)])] == [
        "yes",
        "near-tie",
        "NO",
    ]
    rows = [
        result(),
        result(method="lookup", divergences=(("chat-1", BUG),)),
        result(TRANSFORMERS, across=(("chat-2", NEAR),)),
    ]
    text = table(rows)
    assert "! specdec, lookup on chat-1: row 0, position 5" in text
    assert "top-2 gap there is 0.25" in text
    assert "! transformers, plain beside specdec's plain decoding on chat-2" in text


def test_slow_downs_are_averaged_with_the_rest():
    """Catches a mean over what went well."""
    rows = [result(method="lookup", kind=k, speedup=s) for k, s in (("a", 2.0), ("b", 0.5))]
    assert "1.25x" in averages(rows)


def test_what_could_not_be_timed_is_a_dash():
    """Catches `nan` in a table, and one of them that spoils a mean."""
    nan = Spread(math.nan, math.nan, math.nan)
    rows = [result(), replace(result(kind="code", speedup=2.0), tokens_per_second=nan)]
    rows.append(replace(result(TRANSFORMERS), speedup=nan, over_transformers=nan))
    rows.append(result(TRANSFORMERS, kind="code", speedup=3.0))
    assert "nan" not in table(rows) + averages(rows)
    assert "3.00x" in averages(rows)


def test_what_memory_allows():
    """Catches a share of the other engine, or a bound that is a hundred times off."""
    text = reading(BOUND, [result(speed=80.0), result(TRANSFORMERS, speed=50.0)])
    assert "a step reads 100.0 MB; this machine reads 10.0 GB/s: at best 100.0 tokens/s" in text
    assert text.endswith("specdec reaches 80%; transformers reaches 50%")


def test_records_are_json():
    """Catches NaN, which is no JSON, and keys that a reader relies on."""
    nan = Spread(math.nan, math.nan, math.nan)
    records = [
        record(replace(result(), tokens_per_second=nan, speedup=nan), BOUND),
        refusal_record(Refusal(TRANSFORMERS, "lookup", "no"), "chat"),
    ]
    back = json.loads(json.dumps(records, allow_nan=False))
    assert (back[0]["tokens_per_second"], back[0]["speedup_spread"]) == (None, [None, None])
    for row in back:
        assert {
            *("engine", "method", "prompt_kind", "tokens_per_second", "tau"),
            *("lossless", "speedup", "predicted_speedup", "refused"),
        } <= row.keys()
    assert (back[0]["refused"], back[1]["refused"], back[1]["lossless"]) == (None, "no", None)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path, suffix):
    """Catches a plot that fails on a method without a prediction or without a kind."""
    pytest.importorskip("matplotlib")
    costs = Costs(1.0, 0.1, {True: 0.1, False: 0.0}, 0.1, {1: 1.0, 9: 2.0})
    rounds = [type("R", (), {"draft": Draft.empty(1, "cpu")})()]
    told = Prediction.of(rounds, 2.0, costs)
    rows = [result(), result(TRANSFORMERS), result(method="lookup", prediction=told)]
    file = tmp_path / f"picture.{suffix}"
    draw(rows, file, "title")
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    """Catches an error after minutes of work in place of one before it."""
    with pytest.raises(ValueError, match=r"plot: expected a file \.png or \.svg, got .*jpeg"):
        check_plot(tmp_path / "x.jpeg")
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"plot: .* pip install matplotlib"):
        check_plot(tmp_path / "x.png")
