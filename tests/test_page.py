"""The HTML page: parsed, and its elements counted and read back."""

import re
from html.parser import HTMLParser

import pytest

from specdec.page import to_html
from specdec.trace import Kind, Span, Step, Trace

VOID = {"meta", "wbr"}


class Page(HTMLParser):
    """Elements as (tag, attributes, text), in order; complains about tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {[self.elements[i][0] for i in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {attrs}"
        if tag not in VOID:
            self.open.append(len(self.elements))
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for i in self.open:
            self.elements[i][2].append(data)

    def find(self, tag: str, of: str = "") -> list[tuple[dict[str, str], str]]:
        """Attributes and text of the elements with this tag and class."""
        return [
            (attributes, "".join(text))
            for name, attributes, text in self.elements
            if name == tag and (not of or of in attributes.get("class", "").split())
        ]


def step(index: int, tokens: list[tuple[str, Kind]], refused: str = "", drafted: int = 0) -> Step:
    spans = [Span(7, text, kind, d) for d, (text, kind) in enumerate(tokens, 1)]
    n = sum(kind == "accepted" for _, kind in tokens)
    fallen = [Span(8, text, "refused", d) for d, text in enumerate(refused, n + 1)]
    return Step(index, tuple(spans), tuple(fallen), drafted, n, 0.0125, False)


TRACE = Trace((
    step(0, [(" <b>", "accepted"), ("&amp;", "corrected")], refused="\n\"", drafted=4),
    step(2, [(".\n", "accepted"), ("", "accepted"), ("€", "bonus")], drafted=2),
    step(3, [("\n", "plain")]),
))  # fmt: skip


def tokens_of(page: Page) -> list[str]:
    return [text for attributes, text in page.find("span", "token") if "title" in attributes]


def test_well_formed_and_as_given() -> None:
    """A tag left open, a text that reads as an entity, the tokens in another order."""
    page = Page(to_html([("A", TRACE)], "A & <B>", prompt="Say <i>\n"))
    assert [text for _, text in page.find("title")] == ["A & <B>"]
    assert [text for _, text in page.find("h1")] == ["A & <B>"]
    assert page.find("p", "text")[0][1] == "Say <i>\n <b>&amp;.\n€⏎\n"
    assert [text for _, text in page.find("p", "facts")] == [TRACE.summary]
    table = page.find("td")
    assert [text for _, text in table] == [
        "1", "1 of 4", "12.5 ms", " <b>⏎\"&amp;",
        "3", "2 of 2", "12.5 ms", ".\n€",
        "4", "0 of 0", "12.5 ms", "⏎\n",
    ]  # fmt: skip


def test_nothing_of_a_text_becomes_markup() -> None:
    """A token, name, prompt or title that opens a tag: the page of a model that writes HTML."""
    evil = '"><script>alert(1)</script>\x1b\x00'
    trace = Trace((step(0, [(evil, "corrected")], refused="<", drafted=1),))
    page = to_html([(evil, trace)], evil, prompt=evil)
    assert {tag for tag, _, _ in Page(page).elements} == {
        tag for tag, _, _ in Page(to_html([("a", TRACE)], "a")).elements
    } - {"wbr"}
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page)


def test_self_contained() -> None:
    """A font, script or picture from elsewhere, which a mailed page would lack or leak through."""
    html = to_html([("A", TRACE), ("B", TRACE)])
    assert not re.search(r"https?:|//|\bsrc\b|\bhref\b|url\(|@import|<script|<link", html)
    assert not any("http" in value for _, attributes, _ in Page(html).elements
                   for value in attributes.values())  # fmt: skip


def test_hover() -> None:
    """Rounds counted from 0, the wrong depth, seconds for milliseconds, a meaning left out."""
    page = Page(to_html([("A", TRACE)]))
    titles = [attributes["title"] for attributes, _ in page.find("span", "token")
              if "title" in attributes]  # fmt: skip
    assert titles[1] == (
        "round 1, depth 2, 12.5 ms\ncorrected: the target's own token, where it refused the draft"
        "\ntoken 7"
    )
    assert titles[3].startswith("round 3, depth 2, 12.5 ms\naccepted: ")
    assert titles[3].endswith("\ntoken 7, no text")


def test_kinds_and_pills() -> None:
    """A token in another kind's colour; rounds run into one pill, or an empty token dropped."""
    page = Page(to_html([("A", TRACE)]))
    shown = [attributes["class"] for attributes, _ in page.find("span", "token")]
    assert shown[:5] == ["token " + kind for kind in
                         ("accepted", "corrected", "bonus", "plain", "refused")]  # fmt: skip
    assert shown[5:11] == ["token accepted", "token corrected", "token accepted",
                           "token accepted bare", "token bonus", "token plain blank"]  # fmt: skip
    assert len(page.find("span", "round")) == 2 * 3  # in the text, and in the table
    assert tokens_of(page)[:6] == [" <b>", "&amp;", ".", "", "€", "⏎"]


def test_bars() -> None:
    """A bar filled by accepted of the largest draft, or as high as its own draft whatever that is.
    """  # fmt: skip
    bars = Page(to_html([("A", TRACE)])).find("span", "bar")
    assert [attributes["style"] for attributes, _ in bars] == [
        "--drafted:1.000;--kept:25.0%",
        "--drafted:0.500;--kept:100.0%",
        "--drafted:0.000;--kept:0.0%",
    ]
    assert bars[0][0]["title"] == "round 1: 1 of 4 drafted tokens accepted, 12.5 ms"


def test_several_traces_on_a_page() -> None:
    """Only the first trace shown, or a name beside another's numbers; stubs where none drafted."""
    plain = Trace((step(0, [("a", "plain")]), step(1, [("b", "plain")])))
    page = Page(to_html([("Lookup", TRACE), ("Plain", plain)], prompt=["one", "two"]))
    panels = [text for _, text in page.find("article")]
    assert ["Lookup" in panel and "2.00 tokens a pass" in panel for panel in panels] == [
        True,
        False,
    ]
    assert ["Plain" in panel and "1.00 tokens a pass" in panel for panel in panels] == [False, True]
    assert [text for _, text in page.find("span", "prompt")] == ["one", "two"]
    assert len(page.find("span", "bar")) == 3


def test_errors() -> None:
    """A page without a panel, where a caller's list came out empty; panels dropped by a zip."""
    with pytest.raises(ValueError, match="traces: expected at least one"):
        to_html([])
    with pytest.raises(ValueError, match=r"prompt: expected a text, or one per trace \(2\), got 1"):
        to_html([("A", TRACE), ("B", TRACE)], prompt=["one"])


def test_lines_wrap_at_blanks() -> None:
    """No place to wrap (tokens do not break inside), or one at the end of a line's last pill."""
    trace = Trace((step(0, [(" a", "accepted"), ("b", "accepted"), (" ", "plain")]),))
    text = to_html([("A", trace)]).split('<p class="text">')[1].split("</p>")[0]
    bare = re.sub(r'<span class="token[^>]*>([^<]*)</span>', r"\1", text)
    assert bare.endswith('<span class="round"><wbr> ab<wbr>␣</span>')
