"""The SVGs, parsed as XML: which nodes, edges and cells they hold, and which are highlighted."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest
import torch

from specdec.draft import Draft
from specdec.pictures import mask_svg, tree_svg

WORDS = ["the", "cat", "dog", "sat", "is", "ran", "on", "to"]
PARENTS = [-1, -1, 0, 0, 1, 2, 4]  # the running example of draft.py
EXAMPLE = Draft(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), torch.tensor([PARENTS]))


def word(token: int) -> str:
    return WORDS[token]


def elements(svg: str, tag: str, of: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}")
            if of in e.get("class", "").split()]  # fmt: skip


def child(element: ET.Element, tag: str) -> ET.Element:
    found = element.find(f"{{http://www.w3.org/2000/svg}}{tag}")
    assert found is not None
    return found


def label(node: ET.Element) -> str:
    return child(node, "text").text or ""


def corner(node: ET.Element) -> tuple[float, float]:
    box = child(node, "rect")
    return float(box.get("x", "")), float(box.get("y", ""))


def links(svg: str) -> set[tuple[str, str]]:
    """(parent, child) labels of the edges, told by the boxes that their two ends touch."""
    boxes = {}
    for node in elements(svg, "g", "node"):
        (x, y), box = corner(node), child(node, "rect")
        middle = y + float(box.get("height", "")) / 2
        boxes["in", x, middle] = boxes["out", x + float(box.get("width", "")), middle] = label(node)
    found = set()
    for edge in elements(svg, "path", "edge"):
        numbers = [float(n) for n in edge.get("d", "").replace("M", "").replace("H", "")
                   .replace("C", "").split()]  # fmt: skip
        found.add((boxes["out", numbers[0], numbers[1]], boxes["in", numbers[-2], numbers[-1]]))
    return found


def test_running_example() -> None:
    """An edge to the wrong parent, or nodes on top of each other."""
    svg = tree_svg(EXAMPLE, word, root_label="the")
    nodes = elements(svg, "g", "node")
    assert [label(node) for node in nodes] == WORDS
    assert [label(node) for node in elements(svg, "g", "root")] == ["the"]
    assert links(svg) == {("the", "cat"), ("the", "dog"), ("cat", "sat"), ("cat", "is"),
                          ("dog", "ran"), ("sat", "on"), ("ran", "to")}  # fmt: skip
    at = {label(node): corner(node) for node in nodes}
    assert len(set(at.values())) == 8
    columns = [["the"], ["cat", "dog"], ["sat", "is", "ran"], ["on", "to"]]
    assert [{at[name][0] for name in column} for column in columns] == [
        {at[column[0]][0]} for column in columns
    ]
    assert at["the"][0] < at["cat"][0] < at["sat"][0] < at["on"][0]
    assert at["sat"][1] < at["is"][1] < at["ran"][1]  # no crossings
    assert at["cat"][1] == (at["sat"][1] + at["is"][1]) / 2


def test_nothing_outside_the_picture() -> None:
    """A canvas measured for fewer rows or columns, or in characters where a label is a wide one."""
    for root_label in ("the", "根根根根根根"):
        svg = tree_svg(EXAMPLE, word, root_label=root_label)
        canvas = ET.fromstring(svg)
        for node in elements(svg, "g", "node"):
            (x, y), box = corner(node), child(node, "rect")
            assert x >= 0
            assert x + float(box.get("width", "")) <= float(canvas.get("width", ""))
            assert y >= 0
            assert y + float(box.get("height", "")) <= float(canvas.get("height", ""))
    root = elements(svg, "g", "root")[0]
    assert float(child(root, "rect").get("width", "")) >= 12 * 8.4


@pytest.mark.parametrize(
    ("path", "marked", "n_edges"),
    [(None, [], 0), ([], ["the"], 0), ([0, 2], ["the", "cat", "sat"], 2),
     ([1, 4, 6], ["the", "dog", "ran", "to"], 3)],
)  # fmt: skip
def test_path(path: Sequence[int] | None, marked: list[str], n_edges: int) -> None:
    """Indices shifted by the root, siblings highlighted, no path and an empty one taken as one."""
    svg = tree_svg(EXAMPLE, word, path, root_label="the")
    assert [label(node) for node in elements(svg, "g", "accepted")] == marked
    assert len(elements(svg, "path", "accepted")) == n_edges


def test_unused_nodes_and_rows() -> None:
    """Unused nodes drawn, or the first row's tree whatever row was asked for."""
    used = torch.tensor([[True] * 7, [True, False, True, False, False, True, False]])
    draft = Draft(
        torch.stack([EXAMPLE.tokens[0], EXAMPLE.tokens[0].flip(0)]),
        torch.tensor([PARENTS, PARENTS]),
        used=used,
    )
    assert len(elements(tree_svg(draft, word), "g", "node")) == 8
    drawn = {7: "to", 5: "ran", 2: "dog"}  # an unused node may hold what no vocabulary knows
    second = elements(tree_svg(draft, drawn.__getitem__, [0, 2], row=1), "g", "node")
    assert [label(node) for node in second] == ["root", "to", "ran", "dog"]
    assert [child(node, "title").text for node in second] == [
        "root",
        "node 0, depth 1, token 7",
        "node 2, depth 2, token 5",
        "node 5, depth 3, token 2",
    ]


def test_chain_and_empty_draft() -> None:
    """Drafts without `parents`, and without nodes, which have no maximum depth to take."""
    chain = tree_svg(Draft(torch.tensor([[1, 3, 6]])), word, [0], root_label="the")
    assert links(chain) == {("the", "cat"), ("cat", "sat"), ("sat", "on")}
    empty = tree_svg(Draft.empty(1), word)
    assert [label(node) for node in elements(empty, "g", "node")] == ["root"]


def test_labels_are_text() -> None:
    """Markup, control characters or line breaks of a token, which break the XML or the row."""
    svg = tree_svg(Draft(torch.tensor([[0, 1, 2]])), ["<b>&", "\n", "\x1b"].__getitem__)
    assert [label(node) for node in elements(svg, "g", "node")] == ["root", "<b>&", "⏎", "␛"]
    mask = mask_svg([-1], ["<b>&\x00", "\n"])
    assert [e.text for e in ET.fromstring(mask).iter() if e.tag.endswith("text")] == [
        "<b>&␀", "<b>&␀", "⏎", "⏎"]  # fmt: skip


@pytest.mark.parametrize("row", [-1, 1])
def test_row_out_of_range(row: int) -> None:
    """A negative row that shows another one, or an IndexError that names nothing."""
    with pytest.raises(ValueError, match=rf"row: expected 0 <= row < 1, .*, got {row}"):
        tree_svg(EXAMPLE, word, row=row)


@pytest.mark.parametrize(
    ("path", "culprit"), [([2], 2), ([0, 4], 4), ([0, 2, 9], 9), ([0, -1], -1), ([1, 4, 6], 6)]
)
def test_not_a_path(path: list[int], culprit: int) -> None:
    """A path of padding, of the wrong row or off by one, drawn as if it had been accepted."""
    used = torch.tensor([[True] * 6 + [False]])
    draft = Draft(EXAMPLE.tokens, EXAMPLE.parents, used=used)
    with pytest.raises(ValueError, match=rf"path: expected used nodes, .*where {culprit} is none"):
        tree_svg(draft, word, path)


def test_not_a_tree() -> None:
    """A tree drawn by hand whose node hangs below a later or an unused one: a bare KeyError."""
    with pytest.raises(ValueError, match=r"draft.parents: node 0 of row 0 has parent 1"):
        tree_svg(Draft(torch.tensor([[1, 2]]), torch.tensor([[1, -1]])), word)
    with pytest.raises(ValueError, match=r"draft.used: node 1 of row 0 is used below the unused"):
        tree_svg(Draft(torch.tensor([[1, 2]]), torch.tensor([[-1, 0]]),
                       used=torch.tensor([[False, True]])), word)  # fmt: skip


MASK = """
    x.......
    xx......
    x.x.....
    xx.x....
    xx..x...
    x.x..x..
    xx.x..x.
    x.x..x.x
"""


@pytest.mark.parametrize("parents", [PARENTS, torch.tensor(PARENTS)])
def test_mask(parents: Sequence[int] | torch.Tensor) -> None:
    """A causal mask, a transposed one, siblings that see each other, a root nobody sees."""
    svg = mask_svg(parents, WORDS)
    cells = elements(svg, "rect", "cell")
    seen = [bool({"sees", "self"} & set(cell.get("class", "").split())) for cell in cells]
    rows = ["".join(".x"[s] for s in seen[i : i + 8]) for i in range(0, 64, 8)]
    assert rows == MASK.split()
    assert [i for i, cell in enumerate(cells) if "self" in cell.get("class", "")] == [
        *range(0, 64, 9)
    ]
    at = [(float(cell.get("y", "")), float(cell.get("x", ""))) for cell in cells]
    assert at == sorted(at)  # row by row, as it is read
    assert len(set(at)) == 64
    tips = [child(cell, "title").text for cell in cells]
    assert tips[8 * 6 + 3 : 8 * 6 + 5] == ["on sees sat", "on does not see is"]


def test_mask_of_the_root_alone() -> None:
    """A table of the nodes alone, which has no row for the root where there are no nodes."""
    assert len(elements(mask_svg([], ["the"]), "rect", "self")) == 1


def test_mask_errors() -> None:
    """A parent that comes later, or labels without the root's, drawn as another tree's mask."""
    with pytest.raises(ValueError, match=r"parents: .* earlier node, got 1 at node 1"):
        mask_svg([-1, 1], WORDS[:3])
    with pytest.raises(ValueError, match=r"labels: expected 8, .*, got 7"):
        mask_svg(PARENTS, WORDS[1:])


def test_self_contained() -> None:
    """Style sheets or fonts from elsewhere: GitHub and mail show an SVG without them."""
    for svg in (tree_svg(EXAMPLE, word, [0]), mask_svg(PARENTS, WORDS)):
        assert svg.count("http") == svg.count('xmlns="http://www.w3.org/2000/svg"') == 1
        assert not any(part in svg for part in ("src=", "href=", "url(", "@import", "<script"))
