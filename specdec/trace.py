"""Who wrote which token: the rounds of one row as steps of coloured tokens.

Every round is one pass of the target and ends, unless it was cut, in one token of the target's own:

* accepted: a draft token that the target kept;
* corrected: the target's own token where the draft had others to offer, all refused;
* bonus: the target's own token where the draft was accepted down to a leaf;
* plain: the target's own token where nothing was drafted.

`to_terminal` prints a trace; `page.to_html` and `pictures` draw one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .generate import Round

Kind = Literal["accepted", "corrected", "bonus", "plain", "refused"]

KINDS: dict[Kind, str] = {
    "accepted": "a drafted token the target agreed with",
    "corrected": "the target's own token, where it refused the draft",
    "bonus": "the target's own token, after a draft accepted to its end",
    "plain": "the target's own token, where nothing was drafted",
    "refused": "drafted, not kept",
}
"""What each kind says, in a reader's words."""

_ANSI: dict[Kind, str] = {
    "accepted": "32",
    "corrected": "1;31",
    "bonus": "36",
    "plain": "",
    "refused": "2;9",
}
_MARKS: dict[Kind, tuple[str, str]] = {
    "accepted": ("", ""),
    "corrected": ("[", "]"),
    "bonus": ("{", "}"),
    "plain": ("(", ")"),
    "refused": ("~", "~"),
}

# what would move the cursor, end the XML, or be invisible: the pictures of U+2400 stand for it
_UNPRINTABLE = (
    {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], 0xFFFD)
)
_BLANK = {ord(" "): "␣", ord("\t"): "⇥", ord("\n"): "⏎\n", 0xA0: "⍽"}


@dataclass(frozen=True)
class Span:
    """One token: its id, what it adds to the text, its kind, and its depth below the root.

    `text` is empty where the token leaves a character unfinished; the one that completes the
    character carries it whole. The target's own token is one deeper than the path it follows.
    """

    token: int
    text: str
    kind: Kind
    depth: int


@dataclass(frozen=True)
class Step:
    """What one round did for the row."""

    index: int
    """Of the round, in the rounds that were traced."""
    tokens: tuple[Span, ...]
    """The accepted tokens in order, then the target's own unless `cut`."""
    refused: tuple[Span, ...]
    """What the draft said instead: from the end of the path down the first used children. Of a
    chain that is all that was not kept; a cut round judged nothing further and has none."""
    n_drafted: int
    """Used nodes of the draft."""
    n_accepted: int
    seconds: float
    """Wall time of the round, which all rows of the batch share."""
    cut: bool
    """The verdict was shortened by the budget or a stop token."""


@dataclass(frozen=True)
class Trace:
    """The steps of one row, and their sums. Rounds that the row sat out are no steps."""

    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        return "".join(span.text for step in self.steps for span in step.tokens)

    @property
    def n_tokens(self) -> int:
        return sum(len(step.tokens) for step in self.steps)

    @property
    def n_passes(self) -> int:
        """Target passes the row took part in."""
        return len(self.steps)

    @property
    def n_drafted(self) -> int:
        return sum(step.n_drafted for step in self.steps)

    @property
    def n_accepted(self) -> int:
        return sum(step.n_accepted for step in self.steps)

    @property
    def seconds(self) -> float:
        """Wall time of the steps, without the prefill."""
        return sum(step.seconds for step in self.steps)

    @property
    def tau(self) -> float:
        """Tokens per target pass, as `metrics.measure` has it for one row; 0 without steps."""
        return self.n_tokens / max(1, self.n_passes)

    @property
    def summary(self) -> str:
        """One line: tokens, target passes, tau, drafted and accepted, seconds."""
        drafted = f"; {self.n_accepted} of {self.n_drafted} drafted tokens accepted"
        return (
            f"{self.n_tokens} tokens in {self.n_passes} target passes: tau {self.tau:.2f}"
            f"{drafted if self.n_drafted else ''}; {self.seconds:.3g} s"
        )


def trace(rounds: Sequence[Round], decode: Callable[[list[int]], str], row: int = 0) -> Trace:
    """Trace one row of a run.

    Args:
        rounds: of one run, `Generation.rounds` or what `generate.decode` has yielded so far.
        decode: token ids -> text, errors replaced by U+FFFD as tokenizers do. It is called on short
            windows, so that the pieces join to the decoding of the whole row even where a
            character is split over tokens or a leading blank depends on the token before.
        row: which row of the batch.

    Raises:
        ValueError: a row outside the batch.
    """
    for r in rounds:
        if not 0 <= row < len(r.live):
            raise ValueError(f"row: expected 0 <= row < {len(r.live)}, the batch size, got {row}")
    speller = _Speller(decode)
    steps = [_step(i, r, row, speller) for i, r in enumerate(rounds) if bool(r.live[row])]
    if steps:
        steps[-1] = replace(steps[-1], tokens=_with_rest(steps[-1].tokens, speller))
    return Trace(tuple(steps))


def _step(index: int, r: Round, row: int, speller: _Speller) -> Step:
    drafted, parents = r.draft.tokens[row].tolist(), r.draft.tree()[row].tolist()
    used = r.draft.mask()[row].tolist()
    n, is_cut = int(r.n_accepted[row]), bool(r.cut[row])
    path, new = r.path[row, :n].tolist(), r.new_tokens[row].tolist()

    accepted = _spans(new[:n], "accepted", 1, speller)
    fallen = [] if is_cut else _first_children(parents, used, path[-1] if path else -1)
    fork = copy.copy(speller)  # the refused tokens are spelled as if they went on from here
    refused = _with_rest(_spans([drafted[i] for i in fallen], "refused", n + 1, fork), fork)
    own: Kind = "corrected" if fallen else "bonus" if any(used) else "plain"
    return Step(
        index=index,
        tokens=accepted + _spans(new[n:], own, n + 1, speller),
        refused=refused,
        n_drafted=sum(used),
        n_accepted=n,
        seconds=r.seconds.total,
        cut=is_cut,
    )


def _first_children(parents: list[int], used: list[bool], node: int) -> list[int]:
    """From `node` (-1: the root) down, each time to the first used child: the nodes passed."""
    below = []
    for i, parent in enumerate(parents):  # parents come before their children
        if used[i] and parent == node:
            below.append(i)
            node = i
    return below


def _spans(tokens: list[int], kind: Kind, depth: int, speller: _Speller) -> tuple[Span, ...]:
    return tuple(Span(token, speller.add(token), kind, d) for d, token in enumerate(tokens, depth))


def _with_rest(spans: tuple[Span, ...], speller: _Speller) -> tuple[Span, ...]:
    """`spans`, the last of them with what the speller still holds back."""
    return (*spans[:-1], replace(spans[-1], text=spans[-1].text + speller.rest())) if spans else ()


class _Speller:
    """Decodes token after token; the pieces join to the decoding of all of them.

    It decodes a window, the last whole piece and what follows, with and without the new token, and
    holds back what ends in a replacement character: the token may stop inside a character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.window: list[int] = []
        self.n_spelled = 0

    def add(self, token: int) -> str:
        self.window = [*self.window, token]
        return "" if self.decode(self.window).endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """The text of the tokens held back."""
        before = self.decode(self.window[: self.n_spelled])
        text = self.decode(self.window)[len(before) :]
        self.window = self.window[self.n_spelled :]
        self.n_spelled = len(self.window)
        return text


def visible(text: str) -> str:
    """`text` for display: control characters as pictures; blanks too, where there is nothing else.

    A line break stays one: alone it reads `⏎` and then breaks the line.
    """
    return text.translate(_UNPRINTABLE) if text.strip() else text.translate(_BLANK | _UNPRINTABLE)


def one_line(text: str) -> str:
    """`visible`, with every line break only pictured."""
    return visible(text).replace("⏎\n", "⏎").replace("\n", "⏎")


def to_terminal(
    trace: Trace, *, prompt: str = "", colour: bool = True, refused: bool = False
) -> str:
    """The trace as text for a terminal: `prompt` and the tokens, a legend, a summary.

    With `colour` by ANSI codes (which never span a line break), else by brackets around the tokens
    that are not accepted drafts. `refused` also shows what the draft said instead, struck through.
    """
    body = [_paint(visible(prompt), None, colour)]
    shown: set[Kind] = set()
    for step in trace.steps:
        refusals = step.refused if refused else ()
        for span in (*step.tokens[: step.n_accepted], *refusals, *step.tokens[step.n_accepted :]):
            text = one_line(span.text) if span.kind == "refused" else visible(span.text)
            shown.add(span.kind)
            body.append(_paint(text, span.kind, colour))
    legend = "   ".join(_paint(kind, kind, colour) for kind in KINDS if kind in shown)
    return f"{''.join(body)}\n\n{legend}\n{trace.summary}\n"


def _paint(text: str, kind: Kind | None, colour: bool) -> str:
    """Each line of `text` in the colours (or between the marks) of its kind; None: a prompt."""
    if colour:
        code = "2" if kind is None else _ANSI[kind]
        before, after = (f"\x1b[{code}m", "\x1b[0m") if code else ("", "")
    else:
        before, after = ("", "") if kind is None else _MARKS[kind]
    return "\n".join(f"{before}{line}{after}" if line else "" for line in text.split("\n"))
