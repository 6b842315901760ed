"""Traces as one self-contained HTML page: the text, a pill a round, and how each round went.

No scripts and nothing loaded from elsewhere, so that a page can be mailed, archived and embedded.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .trace import KINDS, Span, Step, Trace, one_line, visible

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #667080; --line: #dfe3e8;
  --accepted: #c9ecd6; --accepted-ink: #0b4a2b; --accepted-bar: #2c9f63;
  --corrected: #ffd3c4; --corrected-ink: #92280a;
  --bonus: #cfe2ff; --bonus-ink: #123f86;
  --plain: #e8ebef; --plain-ink: #3b434d; --refused-bar: #ccd2da; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0f1216; --card: #181c22; --ink: #e6e9ee; --soft: #97a1af; --line: #2b313a;
  --accepted: #12452c; --accepted-ink: #a9efc6; --accepted-bar: #37b576;
  --corrected: #65260f; --corrected-ink: #ffc4b0;
  --bonus: #1a3d73; --bonus-ink: #c4dbff;
  --plain: #2b313a; --plain-ink: #c5ccd6; --refused-bar: #3f4854; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(.75rem, 3vw, 2rem); max-width: 84rem;
  background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.4rem; line-height: 1.25; }
h2 { margin: 0; font-size: 1.05rem; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: .5rem 0 1.1rem; padding: 0;
  list-style: none; color: var(--soft); font-size: .82rem; }
.legend .token { margin-right: .4rem; }
main { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
article { min-width: 0; padding: 1rem 1.15rem; border: 1px solid var(--line); border-radius: .75rem;
  background: var(--card); }
article header { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem; }
.tau { white-space: nowrap; color: var(--soft); font-size: .82rem; }
.tau b { color: var(--ink); font-size: 1.5rem; line-height: 1.2; }
.text { margin: .6rem 0 .9rem; line-height: 1.9; white-space: pre-wrap; overflow-wrap: anywhere; }
.text, td:last-child { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .85rem; }
.prompt { color: var(--soft); }
.token { padding: .16em 0; white-space: pre; background: var(--plain); color: var(--plain-ink);
  box-shadow: inset 1px 0 color-mix(in srgb, currentColor 15%, transparent);
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.round > .token:first-of-type, .legend .token { border-radius: .35em 0 0 .35em; box-shadow: none; }
.round > .token:last-of-type { border-radius: 0 .35em .35em 0; margin-right: 2px; }
.round > .token:only-of-type, .legend .token { border-radius: .35em; }
.round > .token:first-of-type, .legend .token { padding-left: .12em; }
.round > .token:last-of-type, .legend .token { padding-right: .12em; }
.legend .token { padding: .1em .45em; }
.accepted { background: var(--accepted); color: var(--accepted-ink); }
.corrected { background: var(--corrected); color: var(--corrected-ink); font-weight: 650; }
.bonus { background: var(--bonus); color: var(--bonus-ink); }
.refused { background: none; color: var(--soft); text-decoration: line-through; }
.bare { padding-right: 3px; }
.blank { color: color-mix(in srgb, var(--ink) 35%, transparent); }
.token:hover { outline: 2px solid currentColor; }
.bars { display: flex; flex-wrap: wrap; align-items: flex-end; gap: 6px 2px; }
.bar { width: 9px; min-height: 3px; border-radius: 2px; height: calc(var(--drafted) * 38px);
  background: linear-gradient(to top, var(--accepted-bar) var(--kept), var(--refused-bar) 0); }
.bar:hover { outline: 2px solid var(--ink); }
.facts { margin: .35rem 0 0; color: var(--soft); font-size: .82rem; }
details { margin-top: .5rem; font-size: .85rem; }
summary { color: var(--soft); cursor: pointer; }
table { width: 100%; margin-top: .4rem; border-collapse: collapse; }
td { padding: .2rem .6rem .2rem 0; border-top: 1px solid var(--line); vertical-align: top;
  color: var(--soft); white-space: nowrap; font-variant-numeric: tabular-nums; }
td:last-child { width: 100%; padding-right: 0; color: var(--ink); white-space: pre-wrap;
  overflow-wrap: anywhere; line-height: 1.8; }
"""


def to_html(
    traces: Sequence[tuple[str, Trace]],
    title: str = "Who wrote which token",
    *,
    prompt: str | Sequence[str] = "",
) -> str:
    """One page with a panel for each (name, trace), such as one drafter beside another.

    A panel shows `prompt` (one for all, or one each) and the text, one pill a round; a bar a round,
    as high as the draft was large and filled as far as it was accepted; and a table of the rounds
    with what was refused. Hovering over a token or a bar tells its round, depth and seconds. Light
    and dark by the reader's system. Texts are escaped. Raises ValueError where there are no traces,
    or another number of prompts.
    """
    if not traces:
        raise ValueError("traces: expected at least one (name, trace), got none")
    prompts = [prompt] * len(traces) if isinstance(prompt, str) else prompt
    if len(prompts) != len(traces):
        raise ValueError(
            f"prompt: expected a text, or one per trace ({len(traces)}), got {len(prompts)}"
        )
    legend = "".join(
        f'<li><span class="token {kind}">{kind}</span>{meaning}</li>'
        for kind, meaning in KINDS.items()
    )
    panels = "\n".join(
        _panel(name, trace, text) for (name, trace), text in zip(traces, prompts, strict=True)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(one_line(title))}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(one_line(title))}</h1>
<ul class="legend">{legend}<li>One pill is one pass of the target.</li></ul>
<main>
{panels}
</main>
</body>
</html>
"""


def _panel(name: str, trace: Trace, prompt: str) -> str:
    largest = max((step.n_drafted for step in trace.steps), default=0)
    text = "".join(
        f'<span class="round">{_tokens(step, step.tokens)}</span>' for step in trace.steps
    )
    bars = "".join(_bar(step, largest) for step in trace.steps) if largest else ""
    rows = "\n".join(_row(step) for step in trace.steps)
    return f"""<article>
<header><h2>{escape(one_line(name))}</h2>
<span class="tau" title="tau: tokens per target pass"><b>{trace.tau:.2f}</b> tokens a pass</span>
</header>
<p class="text"><span class="prompt">{escape(visible(prompt))}</span>{text}</p>
<div class="bars" role="img" aria-label="accepted of drafted tokens, a bar a round">{bars}</div>
<p class="facts">{escape(trace.summary)}</p>
<details><summary>Round by round</summary>
<table>
{rows}
</table>
</details>
</article>"""


def _tokens(step: Step, spans: Sequence[Span]) -> str:
    return "".join(_token(step, span) for span in spans)


def _token(step: Step, span: Span) -> str:
    """A token as one element a line: line breaks stand between elements, not in them.

    Lines wrap before the blank a token begins with, so that its colour does not stay behind.
    """
    hover = (
        f"round {step.index + 1}, depth {span.depth}, {_milliseconds(step)}\n"
        f"{span.kind}: {KINDS[span.kind]}\ntoken {span.token}"
    )
    text = one_line(span.text) if span.kind == "refused" else visible(span.text)
    if not text:  # it stops inside a character, or is a special token that the decoder skips
        return f'<span class="token {span.kind} bare" title="{escape(hover)}, no text"></span>'
    blank = "" if span.text.strip() else " blank"  # told by its background, the glyph stands back
    pieces = [
        f'<span class="token {span.kind}{blank}" title="{escape(hover)}">{escape(line)}</span>'
        if line
        else ""
        for line in text.split("\n")
    ]
    return ("<wbr>" if span.text[0] == " " else "") + "\n".join(pieces)


def _bar(step: Step, largest: int) -> str:
    hover = (
        f"round {step.index + 1}: {step.n_accepted} of {step.n_drafted} drafted tokens "
        f"accepted, {_milliseconds(step)}"
    )
    drafted = step.n_drafted / max(1, largest)
    kept = step.n_accepted / max(1, step.n_drafted)
    return (
        f'<span class="bar" style="--drafted:{drafted:.3f};--kept:{kept:.1%}" '
        f'title="{escape(hover)}"></span>'
    )


def _row(step: Step) -> str:
    n = step.n_accepted
    spans = (*step.tokens[:n], *step.refused, *step.tokens[n:])
    return (
        f"<tr><td>{step.index + 1}</td><td>{n} of {step.n_drafted}</td>"
        f"<td>{_milliseconds(step)}</td>"
        f'<td><span class="round">{_tokens(step, spans)}</span></td></tr>'
    )


def _milliseconds(step: Step) -> str:
    return f"{1000 * step.seconds:.3g} ms"
