"""Traces of hand-built rounds; bytes stand in for tokens, as in a byte-level tokenizer."""

import re
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft import Draft
from specdec.generate import Round, Seconds
from specdec.metrics import measure
from specdec.trace import KINDS, Kind, Span, Step, Trace, one_line, to_terminal, trace, visible

PARENTS = [-1, -1, 0, 0, 1, 2, 4]  # the running example of draft.py
TREE = "cdsirot"  # cat, dog, sat, is, ran, on, to by their initials; the root is the


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def ids(text: str | bytes) -> list[int]:
    return list(text.encode() if isinstance(text, str) else text)


def one_round(
    drafted: str | bytes,
    path: list[int],
    own: str | bytes,
    *,
    parents: list[int] | None = None,
    used: list[int] | None = None,
    live: bool = True,
) -> Round:
    """A round of one row that keeps `path` and then emits `own`; it was cut where `own` is none."""
    tokens = torch.tensor([ids(drafted)], dtype=torch.long)
    n = tokens.shape[1]
    kept = [ids(drafted)[i] for i in path]
    return Round(
        draft=Draft(
            tokens,
            None if parents is None else torch.tensor([parents]),
            used=None if used is None else torch.tensor([used], dtype=torch.bool),
        ),
        path=torch.tensor([path + [0] * (n - len(path))], dtype=torch.long),
        n_accepted=torch.tensor([len(path)]),
        new_tokens=[torch.tensor([*kept, *ids(own)], dtype=torch.long)],
        live=torch.tensor([live]),
        cut=torch.tensor([live and not own]),
        seconds=Seconds(draft=0.5, verify=1.0, accept=0.25, commit=0.125, other=0.125, prefill=9),
    )


def side_by_side(left: Round, right: Round) -> Round:
    """Two rows of one batch, both trees of equal size."""

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b])

    draft = Draft(
        both(left.draft.tokens, right.draft.tokens),
        both(left.draft.tree(), right.draft.tree()),
        used=both(left.draft.mask(), right.draft.mask()),
    )
    return replace(
        left,
        draft=draft,
        path=both(left.path, right.path),
        n_accepted=both(left.n_accepted, right.n_accepted),
        new_tokens=[*left.new_tokens, *right.new_tokens],
        live=both(left.live, right.live),
        cut=both(left.cut, right.cut),
    )


def spelled(step: Step) -> list[tuple[str, str]]:
    return [(span.text, span.kind) for span in step.tokens]


A = "accepted"


@pytest.mark.parametrize(
    ("r", "tokens", "refused"),
    [
        (one_round("abc", [0], "x"), [("a", A), ("x", "corrected")], "bc"),
        (one_round("abc", [], "x"), [("x", "corrected")], "abc"),
        (one_round("ab", [0, 1], "x"), [("a", A), ("b", A), ("x", "bonus")], ""),
        (one_round("", [], "x"), [("x", "plain")], ""),
        (one_round("abc", [], "x", used=[0, 0, 0]), [("x", "plain")], ""),
        (one_round("abc", [0], "x", used=[1, 0, 0]), [("a", A), ("x", "bonus")], ""),
        (one_round("abc", [0, 1], ""), [("a", A), ("b", A)], ""),
        (
            one_round(TREE, [0, 2], "x", parents=PARENTS),
            [("c", A), ("s", A), ("x", "corrected")],
            "o",
        ),
        (one_round(TREE, [0, 3], "x", parents=PARENTS), [("c", A), ("i", A), ("x", "bonus")], ""),
        (one_round(TREE, [1], "x", parents=PARENTS), [("d", A), ("x", "corrected")], "rt"),
        (one_round(TREE, [], "x", parents=PARENTS), [("x", "corrected")], "cso"),
        (
            one_round(TREE, [0, 2], "x", parents=PARENTS, used=[1, 1, 1, 1, 1, 0, 1]),
            [("c", A), ("s", A), ("x", "bonus")],
            "",
        ),
        (
            one_round(TREE, [], "x", parents=PARENTS, used=[0, 1, 0, 0, 1, 0, 0]),
            [("x", "corrected")],
            "dr",
        ),
    ],
)
def test_kinds(r: Round, tokens: list[tuple[str, str]], refused: str) -> None:
    """A kind told by a count (n_accepted < N) and not by a used child of the path's end: unused
    nodes, or a leaf short of the tree's depth, then read as a correction. Refusals of a cut round.
    """
    (step,) = trace([r], decode).steps
    assert spelled(step) == tokens
    assert "".join(span.text for span in step.refused) == refused
    assert all(span.kind == "refused" for span in step.refused)


def test_a_step_in_full() -> None:
    """Depths counted from 0 or by node index, unused nodes counted as drafted, prefill as time."""
    r = one_round(TREE, [1, 4], "x", parents=PARENTS, used=[1, 1, 0, 0, 1, 0, 1])
    assert trace([r], decode) == Trace((
        Step(
            index=0,
            tokens=(Span(100, "d", "accepted", 1), Span(114, "r", "accepted", 2),
                    Span(120, "x", "corrected", 3)),
            refused=(Span(116, "t", "refused", 3),),
            n_drafted=4,
            n_accepted=2,
            seconds=2.0,
            cut=False,
        ),
    ))  # fmt: skip


def test_row_and_rounds_it_sat_out() -> None:
    """Row 0 shown whatever was asked for; a finished row gaining passes, and so a lower tau."""
    rounds = [
        side_by_side(one_round("ab", [0, 1], "x"), one_round("de", [0], "y")),
        side_by_side(one_round("ab", [], "", live=False), one_round("fg", [], "z")),
        side_by_side(one_round("ab", [], "", live=False), one_round("hi", [0], "")),
    ]
    left, right = trace(rounds, decode), trace(rounds, decode, row=1)
    assert [step.index for step in left.steps] == [0]
    assert (left.text, left.n_tokens, left.n_passes, left.tau) == ("abx", 3, 1, 3.0)
    assert [spelled(step) for step in right.steps] == [
        [("d", "accepted"), ("y", "corrected")],
        [("z", "corrected")],
        [("h", "accepted")],
    ]
    assert [step.cut for step in right.steps] == [False, False, True]
    assert (right.n_drafted, right.n_accepted, right.seconds) == (6, 2, 6.0)
    later = trace(rounds[1:], decode, row=0)
    assert (later.steps, later.text, later.tau) == ((), "", 0.0)


def test_sums_agree_with_the_metrics() -> None:
    """A second definition of tau, of the tokens, passes or nodes that metrics.py counts."""
    rounds = [
        one_round(TREE, [0, 2], "x", parents=PARENTS, used=[1, 1, 1, 1, 0, 0, 0]),
        one_round("", [], "y"),
        one_round("abc", [0], ""),
    ]
    ours, theirs = trace(rounds, decode), measure(rounds)
    assert (ours.tau, ours.n_tokens, ours.n_passes, ours.n_drafted) == (
        theirs.tau,
        theirs.n_new_tokens,
        theirs.n_row_passes,
        theirs.n_draft_nodes,
    )


def test_characters_split_over_tokens_and_rounds() -> None:
    """Tokens decoded alone: a character of three bytes, split over rounds, becomes three U+FFFD."""
    euro = ids("€")  # e2 82 ac
    rounds = [
        one_round(bytes([97, euro[0]]), [0, 1], bytes([euro[1]])),
        one_round(bytes([euro[2], 98]), [0], b"c"),
        one_round("", [], bytes([0xC3])),  # ends inside a character
    ]
    found = trace(rounds, decode)
    assert [spelled(step) for step in found.steps] == [
        [("a", "accepted"), ("", "accepted"), ("", "bonus")],
        [("€", "accepted"), ("c", "corrected")],
        [("\ufffd", "plain")],
    ]
    assert [span.text for span in found.steps[1].refused] == ["b"]


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=8))
def test_pieces_join_to_the_whole(pieces: list[bytes]) -> None:
    """Bytes lost or doubled where invalid UTF-8 makes a shorter or longer decoding than before."""
    rounds = [one_round(p, list(range(len(p) - 1)), p[-1:]) for p in pieces]
    assert trace(rounds, decode).text == decode([i for p in pieces for i in p])


def test_refused_tokens_go_on_from_the_path_and_leave_no_mark() -> None:
    """Refused bytes spelled on their own, or left in the speller so that the true text is wrong."""
    e_acute, e_grave = ids("é"), ids("è")
    r = one_round(bytes([e_acute[0], e_grave[1], 122]), [0], bytes([e_acute[1]]))
    (step,) = trace([r], decode).steps
    assert [span.text for span in step.refused] == ["è", "z"]
    assert spelled(step) == [("", "accepted"), ("é", "corrected")]


def test_leading_blanks_survive_decoders_that_strip_them() -> None:
    """Words run together: SentencePiece decoders drop the blank of the first token they are given.
    """  # fmt: skip
    words = [" the", " cat", " sat"]

    def strips(tokens: list[int]) -> str:
        return "".join(words[i] for i in tokens).removeprefix(" ")

    rounds = [one_round(bytes([i]), [], bytes([i])) for i in range(3)]
    assert trace(rounds, strips).text == "the cat sat"
    assert [step.refused[0].text for step in trace(rounds, strips).steps] == ["the", " cat", " sat"]


@pytest.mark.parametrize("row", [-1, 1])
def test_row_out_of_range(row: int) -> None:
    """A negative row that shows another one, or an IndexError that names nothing."""
    with pytest.raises(ValueError, match=rf"row: expected 0 <= row < 1, .*, got {row}"):
        trace([one_round("a", [], "x")], decode, row=row)


def test_no_rounds() -> None:
    """An error, or a division by zero, before the first round."""
    empty = trace([], decode)
    assert (empty.steps, empty.text, empty.tau) == ((), "", 0.0)
    assert empty.summary == "0 tokens in 0 target passes: tau 0.00; 0 s"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" cat", " cat"),
        (" ", "␣"),
        ("\t ", "⇥␣"),
        ("\n\n", "⏎\n⏎\n"),
        ("a\nb", "a\nb"),
        ("\x1b[2J", "␛[2J"),
        ("\r\n", "␍⏎\n"),
        ("\x7f\x85\ud800", "␡\ufffd\ufffd"),
        ("", ""),
    ],
)
def test_visible(text: str, shown: str) -> None:
    """Blank tokens nobody sees; a model's escape codes carried out by the reader's terminal."""
    assert visible(text) == shown
    assert one_line(text) == shown.replace("⏎\n", "⏎").replace("\n", "⏎")


ROUNDS = [
    one_round("a \n", [0, 1], "c"),
    one_round("d", [0], "e"),
    one_round("", [], "\n"),
    one_round("f\ng", [0, 1], ""),
]


def test_to_terminal_in_colour() -> None:
    """Two kinds in one colour, a colour left on, a legend of kinds that are not there."""
    assert to_terminal(trace(ROUNDS, decode), prompt="Hi\n") == (
        "\x1b[2mHi\x1b[0m\n"
        "\x1b[32ma\x1b[0m\x1b[32m␣\x1b[0m\x1b[1;31mc\x1b[0m"
        "\x1b[32md\x1b[0m\x1b[36me\x1b[0m"
        "⏎\n"
        "\x1b[32mf\x1b[0m\x1b[32m⏎\x1b[0m\n"
        "\n\n"
        "\x1b[32maccepted\x1b[0m   \x1b[1;31mcorrected\x1b[0m   \x1b[36mbonus\x1b[0m   plain\n"
        "8 tokens in 4 target passes: tau 2.00; 5 of 7 drafted tokens accepted; 8 s\n"
    )


def test_to_terminal_without_colour() -> None:
    """Escape codes in a log file; refused tokens in the wrong place, or breaking the line."""
    found = to_terminal(trace(ROUNDS, decode), colour=False, refused=True)
    assert found.split("\n\n")[0] == "a␣~⏎~[c]d{e}(⏎)\nf⏎"
    assert "accepted   [corrected]   {bonus}   (plain)   ~refused~\n" in found
    assert "\x1b" not in found


def test_colours_never_span_a_line_break() -> None:
    """A pager colours line by line: a code opened before a break is lost after it, or runs on."""
    words = ["one\ntwo", "\n\n", "a\n\nb"]
    rounds = [one_round(bytes([0]), [], bytes([i])) for i in range(3)]
    whole = trace(rounds, lambda tokens: "".join(words[i] for i in tokens))
    for line in to_terminal(whole, prompt="x\ny", refused=True).split("\n"):
        codes = re.findall(r"\x1b\[([\d;]+)m", line)
        assert [code == "0" for code in codes] == [False, True] * (len(codes) // 2)


def test_every_kind_is_explained() -> None:
    """A kind added without its meaning, which the legends would lack."""
    assert tuple(KINDS) == get_args(Kind)
